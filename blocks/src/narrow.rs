//! Keys and values in 8 bits: how the values of an attention head are rounded, bit by bit.
//!
//! Two types, for a head's values in order:
//!
//! - q8_0: groups of 32 values have an int8 code each and one f16 scale. A code is stored as a byte that is 128 more,
//!   so that kernels widen it without a sign. A value is read as code times scale, rounded to f16: that is the number
//!   that a chunk's tensor cores multiply (decoded rows multiply codes, and then the sums by scales). The scale is the
//!   group's largest magnitude / 127; codes are taken relative to the scale as it is stored, so that its own rounding
//!   costs nothing. A group that holds something that is not finite is read as NaN, all of it: a fault stays visible.
//! - fp8: e4m3, saturating, without a scale. Heads are RMS-normed before they are stored, so no value exceeds the root
//!   of the head's length times a norm weight: 16 to 23 times the weight, and e4m3 reaches 448. A scale a tensor would
//!   have to be measured on data, and one a group is what q8_0 is for.
//!
//! GPU kernels round the same way, and tests hold them to these functions. This has nothing to do with blocks of
//! weights: q8_0 of a GGUF file has its scale first and does not round what is read.

use half::f16;

/// Values of a head that share a scale.
pub const GROUP: usize = 32;

/// The largest magnitude of a code.
const LARGEST_CODE: f32 = 127.0;

/// What tells a stored byte from its code: 128 more is the same as the other sign.
const SIGN: u8 = 0x80;

/// The largest number of e4m3.
const LARGEST_FP8: f32 = 448.0;

/// A group's scale and the codes of its values, into `codes`.
pub fn q8_0_from_f32(values: &[f32], codes: &mut [u8]) -> f16 {
    // As integers, magnitudes are ordered like the floats, and NaN is above all of them: it is not lost in a maximum.
    let largest = values.iter().map(|value| value.to_bits() & 0x7fff_ffff).max().map_or(0.0, f32::from_bits);
    let scale = f16::from_f32(largest / LARGEST_CODE);
    let per_unit = if scale.to_f32() > 0.0 { 1.0 / scale.to_f32() } else { 0.0 };
    for (code, value) in codes.iter_mut().zip(values) {
        *code = (value * per_unit).round_ties_even().clamp(-LARGEST_CODE, LARGEST_CODE) as i8 as u8 ^ SIGN;
    }
    scale
}

/// A scale out of memory.
pub fn scale_from(bytes: [u8; 2]) -> f16 {
    f16::from_le_bytes(bytes)
}

/// The value of a code.
pub fn q8_0_to_f32(code: u8, scale: f16) -> f32 {
    f16::from_f32(f32::from((code ^ SIGN) as i8) * scale.to_f32()).to_f32()
}

/// To the nearest e4m3, ties to even; beyond the largest, the largest; NaN stays NaN.
pub fn fp8_from_f32(value: f32) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    if value.is_nan() {
        return 0x7f;
    }
    let magnitude = value.abs().min(LARGEST_FP8);
    // Below 2^-6 numbers are 2^-9 apart; eight of them are the first normal number, whose code is 8.
    if magnitude < 0.015625 {
        return sign | (magnitude * 512.0).round_ties_even() as u8;
    }
    let bits = magnitude.to_bits();
    let rounded = (bits + 0x7_ffff + (bits >> 20 & 1)) >> 20;
    sign | (rounded - (120 << 3)) as u8
}

/// The value of an e4m3 number; exact in f16 too.
pub const fn fp8_to_f32(code: u8) -> f32 {
    let (exponent, fraction) = (code >> 3 & 15, code & 7);
    let magnitude = match (exponent, fraction) {
        (15, 7) => f32::NAN,
        (0, fraction) => fraction as f32 / 512.0,
        (exponent, fraction) => f32::from_bits((exponent as u32 + 120) << 23 | (fraction as u32) << 20),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn q8_0(values: &[f32]) -> (f16, Vec<i8>, Vec<f32>) {
        let mut codes = vec![0; values.len()];
        let scale = q8_0_from_f32(values, &mut codes);
        let read = codes.iter().map(|code| q8_0_to_f32(*code, scale)).collect();
        (scale, codes.into_iter().map(|code| (code ^ SIGN) as i8).collect(), read)
    }

    #[test]
    fn q8_0_rounds_ties_to_even_and_keeps_signs() {
        let mut values = [0.0f32; GROUP];
        values[..8].copy_from_slice(&[127.0, -127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5]);
        let (scale, codes, read) = q8_0(&values);
        assert_eq!(scale, f16::ONE);
        assert_eq!(codes[..8], [127, -127, 0, 2, 2, 0, -2, 126]);
        assert_eq!(read[..4], [127.0, -127.0, 0.0, 2.0]);
    }

    #[test]
    fn q8_0_is_within_half_a_step_of_every_value() {
        for exponent in -12..16 {
            let unit = 2f32.powi(exponent);
            let values: Vec<f32> = (0..GROUP).map(|i| ((i * 37 % 64) as f32 - 31.3) / 31.3 * unit).collect();
            let (scale, _, read) = q8_0(&values);
            for (read, value) in read.iter().zip(&values) {
                // Half a step, and what f16 rounds of the product; scales below its normal numbers are coarser.
                let allowed = 0.5 * scale.to_f32() + value.abs() / 2048.0 + 4e-6;
                assert!((read - value).abs() <= allowed, "2^{exponent}: {value} is read as {read}");
            }
        }
    }

    #[test]
    fn a_group_of_zeros_is_zeros() {
        assert_eq!(q8_0(&[0.0; GROUP]), (f16::ZERO, vec![0; GROUP], vec![0.0; GROUP]));
        // A scale below the smallest f16: the group is nothing.
        assert_eq!(q8_0(&[1e-6; GROUP]).2, [0.0; GROUP]);
    }

    #[test]
    fn a_massive_value_takes_the_scale_of_its_group_alone() {
        let mut values = [0.3f32; GROUP];
        values[5] = 60_000.0;
        let (_, codes, read) = q8_0(&values);
        assert_eq!((codes[5], codes[6], read[6]), (127, 0, 0.0));
        assert!((read[5] / 60_000.0 - 1.0).abs() < 1e-3, "{}", read[5]);
    }

    #[test]
    fn what_is_not_finite_stays_visible() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e9] {
            let mut values = [0.5f32; GROUP];
            values[17] = bad;
            assert!(!q8_0(&values).2[17].is_finite(), "{bad}");
        }
        assert!(fp8_to_f32(fp8_from_f32(f32::NAN)).is_nan());
        assert!(fp8_to_f32(fp8_from_f32(-f32::NAN)).is_nan());
    }

    /// Against the definition: the nearest of all numbers, and of two equally near the one with an even code.
    #[test]
    fn fp8_is_the_nearest_number() {
        let all: Vec<(u8, f32)> = (0..0x7fu8).map(|code| (code, fp8_to_f32(code))).collect();
        assert_eq!((all[0].1, all[1].1, all[8].1, all[0x38].1, all[0x7e].1), (0.0, 0.001953125, 0.015625, 1.0, 448.0));
        assert!(all.windows(2).all(|pair| pair[0].1 < pair[1].1));
        let mut values: Vec<f32> = all.windows(2).map(|pair| (pair[0].1 + pair[1].1) / 2.0).collect();
        values.extend((0..20_000).map(|i| (i as f32 * 0.0231).min((i as f32 * 1e-3).exp2() * 1e-3)));
        values.extend(all.iter().map(|(_, value)| *value));
        for value in values {
            let distance = |number: f32| (f64::from(number) - f64::from(value)).abs();
            let least = all.iter().map(|(_, number)| distance(*number)).fold(f64::INFINITY, f64::min);
            let nearest: Vec<u8> =
                all.iter().filter(|(_, number)| distance(*number) == least).map(|(code, _)| *code).collect();
            let expected = nearest.iter().copied().find(|code| nearest.len() == 1 || code % 2 == 0);
            assert_eq!(Some(fp8_from_f32(value)), expected, "{value}");
            assert_eq!(fp8_to_f32(fp8_from_f32(-value)), -fp8_to_f32(fp8_from_f32(value)), "{value}");
        }
        assert_eq!((fp8_from_f32(f32::INFINITY), fp8_from_f32(-1e30)), (0x7e, 0xfe));
    }
}
