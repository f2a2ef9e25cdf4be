//! Values that are no numbers: infinity and NaN, in any format, and codes whose factor is so large that a half, to
//! which products may decode them, would be infinite. A file has them where it is damaged, and one of them makes
//! everything behind it useless.

use crate::layout::{Codes, DType, Layout, Scale};
use crate::reference::scale;

/// Values that are looked at together, without a branch.
const GROUP: usize = 4096;

/// The first value of whole blocks that is no number: of a block with a factor or addend that is none, its first.
pub fn first_not_finite(dtype: DType, blocks: &[u8]) -> Option<usize> {
    let layout = dtype.layout();
    if layout.codes == Codes::Float {
        return match dtype {
            DType::F16 => first_float::<2>(blocks, HALF),
            DType::BF16 => first_float::<2>(blocks, 0x7f80),
            _ => first_float::<4>(blocks, 0x7f80),
        };
    }
    if wide_factor(layout, &[0; 64]).is_some() {
        let fits = |(factor, code): (f32, f32)| factor.abs() * code <= LARGEST_HALF;
        let odd = |block: &[u8]| !wide_factor(layout, block).is_some_and(fits) || has_odd_code(layout, block);
        return Some(blocks.chunks_exact(layout.bytes).position(odd)? * layout.len);
    }
    let (factor, addend) = (layout.scale.factor().map_or(0, |(at, _)| at), layout.minimum.half());
    let most = largest_factor(layout);
    let magnitude = |block: &[u8], at: usize| u16::from_le_bytes([block[at], block[at + 1]]) & !SIGN;
    let odd =
        |block: &[u8]| magnitude(block, factor) > most || addend.is_some_and(|addend| magnitude(block, addend) >= HALF);
    Some(blocks.chunks_exact(layout.bytes).position(odd)? * layout.len)
}

/// The exponent of a half, and its sign.
const HALF: u16 = 0x7c00;
const SIGN: u16 = 0x8000;

/// The largest half that a block may have as its factor: the largest of all, or, where it is the only factor, the
/// largest whose products with all codes are halves, too.
fn largest_factor(layout: &Layout) -> u16 {
    match (layout.scale, layout.codes) {
        // 65504 / 128 and 127, / 8 and / 16, rounded down.
        (Scale::Half { .. }, Codes::Signed { .. }) => 0x5fff,
        (Scale::Half { .. }, Codes::Table { .. }) => 0x6007,
        (Scale::Half { .. }, Codes::Unsigned { zero: 8, .. }) => 0x6fff,
        (Scale::Half { .. }, Codes::Unsigned { zero: 16, .. }) => 0x6bff,
        _ => HALF - 1,
    }
}

/// The factor of a block that no half holds, and the largest number that it is multiplied by; `None` of a half.
fn wide_factor(layout: &Layout, block: &[u8]) -> Option<(f32, f32)> {
    match layout.scale {
        Scale::Brain { .. } | Scale::Single { .. } | Scale::Exponent { .. } => {
            Some((scale(layout.scale, block, 0), largest_code(layout)))
        }
        // Sub-blocks' own factors reach 448, and levels are twice the values.
        Scale::Floats16 { single, .. } => {
            Some((scale(Scale::Single { offset: single }, block, 0), 224.0 * largest_code(layout)))
        }
        _ => None,
    }
}

/// Whether a code of a block is none.
fn has_odd_code(layout: &Layout, block: &[u8]) -> bool {
    match layout.codes {
        Codes::E4M3 { plane } => block[plane.offset..].iter().fold(false, |odd, code| odd | (code & 0x7f == 0x7f)),
        _ => false,
    }
}

/// The largest half.
const LARGEST_HALF: f32 = 65504.0;

/// The largest magnitude of a code.
fn largest_code(layout: &Layout) -> f32 {
    match layout.codes {
        Codes::Unsigned { zero: 0, low, .. } => ((1 << low.bits) - 1) as f32,
        Codes::Unsigned { zero, .. } => zero as f32,
        Codes::Signed { .. } => 128.0,
        Codes::Table { levels, .. } => levels.iter().map(|level| level.unsigned_abs()).max().unwrap_or(0).into(),
        Codes::E4M3 { .. } => 448.0,
        Codes::Grid { grid, .. } => grid.values.iter().copied().max().unwrap_or(0).into(),
        Codes::Float => 1.0,
    }
}

/// The first of floats of N bytes whose exponent, in its two upper bytes, is all ones.
fn first_float<const N: usize>(values: &[u8], exponent: u16) -> Option<usize> {
    let is_odd = |value: &[u8; N]| u16::from_le_bytes([value[N - 2], value[N - 1]]) & exponent == exponent;
    let (values, _) = values.as_chunks::<N>();
    let mut groups = values.chunks(GROUP);
    let group = groups.position(|group| group.iter().fold(false, |odd, value| odd | is_odd(value)))?;
    Some(group * GROUP + values[group * GROUP..].iter().position(is_odd)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference;

    /// Against the decoder: every byte of a block as a float's upper one. No code and no small scale is zero.
    #[test]
    fn what_is_found_is_what_the_decoder_makes_no_number_of() {
        for (dtype, filler) in DType::ALL.into_iter().flat_map(|dtype| [(dtype, 0x11), (dtype, 0x91)]) {
            let layout = dtype.layout();
            // The largest code of types whose only factor is a half, which lies at the start.
            let code = match dtype {
                DType::Q8_0 => 128.0,
                DType::IQ4NL => 127.0,
                DType::Q4_0 => 8.0,
                DType::Q5_0 => 16.0,
                _ => 0.0,
            };
            let is_large = |block: &[u8]| match layout.scale {
                Scale::Brain { .. } | Scale::Single { .. } | Scale::Exponent { .. } => {
                    reference::scale(layout.scale, block, 0).abs() * largest_code(layout) > 65504.0
                }
                Scale::Floats16 { .. } => {
                    f32::from_le_bytes([block[0], block[1], block[2], block[3]]).abs() * 6.0 * 448.0 > 65504.0
                }
                _ => half::f16::from_le_bytes([block[0], block[1]]).to_f32().abs() * code > 65504.0,
            };
            for (at, upper) in (0..layout.bytes).flat_map(|at| {
                [0x7c, 0x7f, 0xfc, 0xff, 0x7b, 0x80, 0x5f, 0x60, 0xe0, 0x6b, 0x6c, 0x6f, 0x70].map(|b| (at, b))
            }) {
                let mut blocks = vec![filler; layout.bytes * 3];
                blocks[layout.bytes + at] = upper;
                let is_odd = |block: &[u8]| {
                    is_large(block) || (0..layout.len).any(|i| !reference::value(layout, block, i).is_finite())
                };
                let expected = blocks.chunks(layout.bytes).position(is_odd).map(|block| block * layout.len);
                assert_eq!(
                    first_not_finite(dtype, &blocks),
                    expected,
                    "{dtype}: {upper:#x} at byte {at} of {filler:#x}"
                );
            }
        }
    }
}
