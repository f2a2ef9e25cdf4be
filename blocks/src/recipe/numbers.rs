//! Floats of files as numbers.

use half::{bf16, f16};

use super::kinds::Float;

/// Floats of a file as numbers.
pub(super) fn floats(from: Float, bytes: &[u8]) -> impl Iterator<Item = f32> + '_ {
    bytes.chunks_exact(from.bytes() as usize).map(move |b| match from {
        Float::F32 => f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
        Float::F16 => f16::from_le_bytes([b[0], b[1]]).to_f32(),
        Float::BF16 => bf16::from_le_bytes([b[0], b[1]]).to_f32(),
    })
}

/// A float of 4 bits.
pub(super) fn e2m1(code: u8) -> f32 {
    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}
