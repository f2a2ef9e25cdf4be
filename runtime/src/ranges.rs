//! What the settings of sampling may be: on the command line, in files of prompts and in requests alike.

use std::ops::RangeInclusive;

use crate::error::RuntimeError;

/// 0 takes the likeliest token.
pub const TEMPERATURE: RangeInclusive<f64> = 0.0..=2.0;
/// 0 takes the likeliest token.
pub const TOP_P: RangeInclusive<f64> = 0.0..=1.0;
pub const MIN_P: RangeInclusive<f64> = 0.0..=1.0;
pub const PRESENCE_PENALTY: RangeInclusive<f64> = -2.0..=2.0;
pub const FREQUENCY_PENALTY: RangeInclusive<f64> = -2.0..=2.0;
pub const REPETITION_PENALTY: RangeInclusive<f64> = 0.01..=100.0;
/// 0 turns DRY off.
pub const DRY_MULTIPLIER: RangeInclusive<f64> = 0.0..=100.0;
pub const DRY_BASE: RangeInclusive<f64> = 1.0..=100.0;

/// Refuses a setting that is out of its range.
pub(crate) fn within(what: &'static str, found: f32, range: &RangeInclusive<f64>) -> Result<(), RuntimeError> {
    // As decimal numbers: the nearest f32 to 0.01 is below it.
    let value: f64 = found.to_string().parse().unwrap_or(f64::NAN);
    match range.contains(&value) {
        true => Ok(()),
        false => {
            let expected = format!("{} to {}", range.start(), range.end());
            Err(RuntimeError::Setting { what, expected, found: found.to_string() })
        }
    }
}
