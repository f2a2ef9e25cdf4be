//! The end-to-end tolerance, measured: how far the CPU's own results drift under noise.
//!
//! A deep model amplifies small differences, most of all one with random weights or with experts to choose from: a
//! right result can end far from the CPU's. So the CPU reads the same tokens once more with a little noise on
//! everything that a device rounds. How far that takes it is how far rounding may take a device.

use std::collections::{HashMap, HashSet};

use anyhow::Result;
use gemma4c_plan::ValueIndex;
use gemma4c_runtime::{Asked, Session};

use super::compare::{Apart, rms};
use super::meaning::Meaning;
use super::reference::Reference;
use crate::random::Random;

/// Of the layers' outputs and of the logits: relative rms, over all rows of all passes and over those of one pass.
/// Tokens differ in how much they amplify noise, so a pass of one row is judged by what noise did to that row, if that
/// is more.
pub struct Drift {
    overall: HashMap<ValueIndex, f64>,
    /// By the position of the pass.
    of_passes: HashMap<(ValueIndex, u32), f64>,
}

impl Drift {
    /// Feeds the same passes to a CPU that has seen none. `noise`: its rms, as a part of each row's.
    pub fn measure(cpu: &mut Session, passes: &[&Reference], meaning: &Meaning<'_>, noise: f64) -> Result<Drift> {
        let named = |value: ValueIndex| (meaning.name(value), value);
        let depths: HashMap<&str, ValueIndex> = meaning.depths().map(named).collect();
        let noisy: HashSet<&str> = meaning.rounded().map(|value| meaning.name(value)).collect();
        let mut random = Random::new(0);
        let mut overall: HashMap<ValueIndex, Apart> = HashMap::new();
        let mut of_passes: HashMap<(ValueIndex, u32), Apart> = HashMap::new();
        for pass in passes {
            let mut tap = |name: &str, width: usize, rows: &mut [f32]| {
                if noisy.contains(name) {
                    rows.chunks_exact_mut(width).for_each(|row| disturb(row, noise, &mut random));
                }
                let Some(value) = depths.get(name) else { return };
                overall.entry(*value).or_default().add(pass.all(*value), rows);
                of_passes.entry((*value, pass.position)).or_default().add(pass.all(*value), rows);
            };
            cpu.feed_tapped(&pass.tokens, Asked::Last, None, &mut tap, &mut |_, _| {})?;
        }
        let overall = overall.into_iter().map(|(value, apart)| (value, apart.relative())).collect();
        let of_passes = of_passes.into_iter().map(|(pass, apart)| (pass, apart.relative())).collect();
        Ok(Drift { overall, of_passes })
    }

    /// Of one of them, in the pass at this position.
    pub fn of(&self, value: ValueIndex, position: u32) -> f64 {
        let overall = self.overall.get(&value).copied().unwrap_or(0.0);
        overall.max(self.of_passes.get(&(value, position)).copied().unwrap_or(0.0))
    }
}

/// Adds noise, evenly spread.
pub fn disturb(row: &mut [f32], noise: f64, random: &mut Random) {
    let reach = rms(row) * noise * 3f64.sqrt();
    for value in row {
        *value += (reach * (2.0 * random.unit() - 1.0)) as f32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_has_the_size_asked_for() {
        let still: Vec<f32> = (0..10_000).map(|i| (i % 7) as f32 - 3.0).collect();
        let mut moved = still.clone();
        disturb(&mut moved, 0.01, &mut Random::new(7));
        let differences: Vec<f32> = moved.iter().zip(&still).map(|(a, b)| a - b).collect();
        let part = rms(&differences) / rms(&still);
        assert!((0.0095..0.0105).contains(&part), "{part}");
    }
}
