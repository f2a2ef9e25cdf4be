//! Values that are no numbers: infinity and NaN, in any format. A file has them where it is damaged, and one of them
//! makes everything behind it useless.

use crate::layout::{Codes, DType, Layout, Minimum, Scale};

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
    let (factor, addend) = halves(layout);
    let is_odd = |block: &[u8], at: usize| u16::from_le_bytes([block[at], block[at + 1]]) & HALF == HALF;
    let odd = |block: &[u8]| is_odd(block, factor) || addend.is_some_and(|addend| is_odd(block, addend));
    Some(blocks.chunks_exact(layout.bytes).position(odd)? * layout.len)
}

/// The exponent of a half.
const HALF: u16 = 0x7c00;

/// The first of floats of N bytes whose exponent, in its two upper bytes, is all ones.
fn first_float<const N: usize>(values: &[u8], exponent: u16) -> Option<usize> {
    let is_odd = |value: &[u8; N]| u16::from_le_bytes([value[N - 2], value[N - 1]]) & exponent == exponent;
    let (values, _) = values.as_chunks::<N>();
    let mut groups = values.chunks(GROUP);
    let group = groups.position(|group| group.iter().fold(false, |odd, value| odd | is_odd(value)))?;
    Some(group * GROUP + values[group * GROUP..].iter().position(is_odd)?)
}

/// Where a block of codes has its halves: one, and perhaps another.
fn halves(layout: &Layout) -> (usize, Option<usize>) {
    let factor = match layout.scale {
        Scale::One => 0,
        Scale::Half { offset } => offset,
        Scale::Packed6 { half, .. } | Scale::Bytes16 { half, .. } | Scale::Split6 { half, .. } => half,
    };
    let addend = match layout.minimum {
        Minimum::Zero => None,
        Minimum::Half { offset } => Some(offset),
        Minimum::Packed6 { half, .. } => Some(half),
    };
    (factor, addend)
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
            for (at, upper) in (0..layout.bytes).flat_map(|at| [0x7c, 0x7f, 0xfc, 0xff, 0x7b, 0x80].map(|b| (at, b))) {
                let mut blocks = vec![filler; layout.bytes * 3];
                blocks[layout.bytes + at] = upper;
                let is_odd = |block: &[u8]| (0..layout.len).any(|i| !reference::value(layout, block, i).is_finite());
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
