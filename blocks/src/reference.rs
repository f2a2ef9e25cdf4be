//! Decodes one element at a time by reading [`Layout`] literally: slow, obvious, and the oracle of [`crate::decode`].

use half::{bf16, f16};

use crate::layout::{Codes, DType, Index, Layout, Minimum, OddField, Plane, Scale, Signs};
use crate::narrow::fp8_to_f32;

/// Value `i` of `block`, which holds exactly one block.
pub fn value(layout: &Layout, block: &[u8], i: usize) -> f32 {
    debug_assert!(block.len() == layout.bytes && i < layout.len);
    let code = match layout.codes {
        Codes::Float => return float(layout.dtype, block),
        Codes::Signed { plane } => bits(plane, block, i) as u8 as i8 as i32,
        Codes::Unsigned { low, high, zero } => {
            let high = high.map_or(0, |h| bits(h, block, i) << low.bits);
            (bits(low, block, i) | high) as i32 - zero
        }
        Codes::Table { low, levels } => levels[bits(low, block, i) as usize] as i32,
        Codes::E4M3 { plane } => return scale(layout.scale, block, i) * fp8_to_f32(bits(plane, block, i) as u8),
        Codes::Grid { grid, index, signs } => {
            let magnitude = grid.values[point(index, grid.len, block, i) * grid.len + i % grid.len] as i32;
            if sign(signs, index, block, i) { -magnitude } else { magnitude }
        }
    };
    let scaled = scale(layout.scale, block, i) * code as f32;
    // Without a minimum nothing is added, not even zero: a negative scale times code 0 stays -0.0.
    minimum(layout, block, i).map_or(scaled, |minimum| scaled + minimum)
}

/// The number of the point of the grid that element `i` is part of.
fn point(index: Index, len: usize, block: &[u8], i: usize) -> usize {
    let (group, entry) = (i / 32, i % 32 / len);
    let low = index_bits(index, block, group, entry) & ((1 << index.bits) - 1);
    let high = index.high.map_or(0, |(offset, bits)| block[offset + group] >> (bits * entry) & ((1 << bits) - 1));
    low as usize | (high as usize) << index.bits
}

/// The byte or two that hold an index, and what is beside it.
fn index_bits(index: Index, block: &[u8], group: usize, entry: usize) -> u16 {
    let at = index.offset + index.group * group + index.step * entry;
    if index.step == 2 { u16::from_le_bytes([block[at], block[at + 1]]) } else { block[at].into() }
}

fn sign(signs: Signs, index: Index, block: &[u8], i: usize) -> bool {
    let (group, eight) = (i / 32, i % 32 / 8);
    let with_parity = |seven: u32| seven | (seven.count_ones() & 1) << 7;
    let byte = match signs {
        Signs::Bytes { offset } => block[offset + 4 * group + eight].into(),
        Signs::Word { offset, step } => with_parity(word(block, offset + step * group) >> (7 * eight) & 127),
        Signs::BesideIndex => with_parity(u32::from(index_bits(index, block, group, eight) >> index.bits)),
    };
    byte >> (i % 8) & 1 == 1
}

fn word(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

fn bits(plane: Plane, block: &[u8], i: usize) -> u32 {
    let (byte, shift) = plane.locate(i);
    (block[byte] as u32 >> shift) & ((1 << plane.bits) - 1)
}

fn float(dtype: DType, b: &[u8]) -> f32 {
    match dtype {
        DType::F16 => f16::from_le_bytes([b[0], b[1]]).to_f32(),
        DType::BF16 => bf16::from_le_bytes([b[0], b[1]]).to_f32(),
        _ => f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
    }
}

fn half_at(block: &[u8], offset: usize) -> f32 {
    f16::from_le_bytes([block[offset], block[offset + 1]]).to_f32()
}

pub(crate) fn scale(scale: Scale, block: &[u8], i: usize) -> f32 {
    match scale {
        Scale::One => 1.0,
        Scale::Half { offset } => half_at(block, offset),
        Scale::Packed6 { half, packed } => half_at(block, half) * packed6(&block[packed..packed + 12], i / 32).0 as f32,
        Scale::Bytes16 { half, bytes } => half_at(block, half) * (block[bytes + i / 16] as i8) as f32,
        Scale::Split6 { half, high, low } => {
            let k = i / 32;
            let high = u16::from_le_bytes([block[high], block[high + 1]]);
            let s = (block[low + k / 2] >> (4 * (k % 2)) & 15) as u16 | (high >> (2 * k) & 3) << 4;
            half_at(block, half) * (s as i32 - 32) as f32
        }
        Scale::Split6By16 { half, packed } => {
            let k = i / 16;
            let low = block[packed + k % 8] >> (k / 8 * 4) & 15;
            let high = block[packed + 8 + k % 4] >> (k / 4 * 2) & 3;
            half_at(block, half) * ((low | high << 4) as i32 - 32) as f32
        }
        Scale::LowNibbles16 { half, bytes } => half_at(block, half) * (block[bytes + i / 16] & 15) as f32,
        Scale::Odd { half, field, shift } => {
            let s = match field {
                OddField::Nibbles16 { offset } => (block[offset + i / 32] >> (i / 16 % 2 * 4) & 15) as u32,
                OddField::Nibbles32 { offset } => (block[offset + i / 64] >> (i / 32 % 2 * 4) & 15) as u32,
                OddField::Word { offset, step } => word(block, offset + step * (i / 32)) >> 28,
            };
            half_at(block, half) * (2 * s + 1) as f32 / (1 << shift) as f32
        }
        Scale::Brain { offset } => bf16::from_le_bytes([block[offset], block[offset + 1]]).to_f32(),
        Scale::Single { offset } => f32::from_bits(word(block, offset)),
        Scale::Exponent { offset } => half_of_power(block[offset]),
        Scale::Floats16 { single, bytes } => {
            f32::from_bits(word(block, single)) * (unsigned_fp8(block[bytes + i / 16]) * 0.5)
        }
    }
}

/// Half of the power of two whose exponent is `code - 127`. The lowest two are below the normal numbers.
pub(crate) const fn half_of_power(code: u8) -> f32 {
    f32::from_bits(match code {
        0 => 0x0020_0000,
        1 => 0x0040_0000,
        code => (code as u32 - 1) << 23,
    })
}

/// An unsigned e4m3: its upper bit counts for nothing, and there is no NaN.
pub(crate) fn unsigned_fp8(code: u8) -> f32 {
    match code & 0x7f {
        0x7f => 0.0,
        code => fp8_to_f32(code),
    }
}

fn minimum(layout: &Layout, block: &[u8], i: usize) -> Option<f32> {
    match layout.minimum {
        Minimum::Zero => None,
        Minimum::Half { offset } => Some(half_at(block, offset)),
        Minimum::Packed6 { half, packed } => {
            Some(-(half_at(block, half) * packed6(&block[packed..packed + 12], i / 32).1 as f32))
        }
        Minimum::HighNibbles16 { half, bytes } => Some(-(half_at(block, half) * (block[bytes + i / 16] >> 4) as f32)),
        Minimum::ZeroPoint { offset } => {
            let zero = u16::from_le_bytes([block[offset], block[offset + 1]]);
            Some(-(scale(layout.scale, block, i) * zero as f32))
        }
    }
}

/// Scale and minimum `k` of the eight 6-bit pairs in 12 bytes: the first four lie in the low six bits of bytes 0..8,
/// the last four are split between the nibbles of bytes 8..12 and the two bits left over above.
fn packed6(s: &[u8], k: usize) -> (u8, u8) {
    if k < 4 {
        (s[k] & 63, s[k + 4] & 63)
    } else {
        (s[k + 4] & 15 | (s[k - 4] >> 6) << 4, s[k + 4] >> 4 | (s[k] >> 6) << 4)
    }
}
