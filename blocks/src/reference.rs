//! Decodes one element at a time by reading [`Layout`] literally: slow, obvious, and the oracle of [`crate::decode`].

use half::{bf16, f16};

use crate::layout::{Codes, DType, Layout, Minimum, Plane, Scale};

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
    };
    let scaled = scale(layout.scale, block, i) * code as f32;
    // Without a minimum nothing is added, not even zero: a negative scale times code 0 stays -0.0.
    minimum(layout.minimum, block, i).map_or(scaled, |minimum| scaled + minimum)
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

fn scale(scale: Scale, block: &[u8], i: usize) -> f32 {
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
    }
}

fn minimum(minimum: Minimum, block: &[u8], i: usize) -> Option<f32> {
    match minimum {
        Minimum::Zero => None,
        Minimum::Half { offset } => Some(half_at(block, offset)),
        Minimum::Packed6 { half, packed } => {
            Some(-(half_at(block, half) * packed6(&block[packed..packed + 12], i / 32).1 as f32))
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
