//! Integers of four bits with a bfloat16 scale for each 32, as checkpoints have them: symmetric, or with an integer that
//! stands for zero.

use gemma4c_dsl::prelude::*;

use super::description::{Format, Kernels, Picked, TensorFormat};
use super::factors::{brain_as_f16, brain_at, brain_in, factors_brain, factors_brain_zero, minimum_of_zero};
use super::pieces::{
    bytes_nibbles, bytes_q4_0, dot_nibbles, eight_bytes, finish, finish_with_minimum, lifted8, part_nibbles,
    plane_bits, scaled8, side_half, side_half_pair, whole_sixteenth,
};
use crate::kernels::matvec::parts::{Unit, UnitActivations};

#[device]
pub fn dot_i4(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32 {
    let dot = dot_nibbles(unit.codes, x.low, x.high, x.sum.wrapping_mul(-8));
    finish(dot as f32, factors_brain(unit.side, number), x.scale, total)
}

#[device]
pub fn decode_i4(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    scaled8(part_nibbles(codes, part), 8.0, brain_in(side.x, unit))
}

#[device]
pub fn decode_i4_by_fma(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    eight_bytes(part_nibbles(codes, part), 8.0, brain_in(side.x, unit))
}

/// Four bytes of a block, of which both nibbles are values: two products' parts.
#[device]
pub fn raw_i4(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    let nibbles = u32x2(codes.x & 0x0f0f0f0f, codes.x >> 4 & 0x0f0f0f0f);
    eight_bytes(nibbles, 8.0, brain_in(side.x, unit))
}

/// Both nibbles of bytes 0, 2, 1 and 3 in f16. A lower one in the mantissa of 1024 is 1024 + n, an upper one
/// 1024 + 16 n. An eighth of a value is multiplied by eight times the scale, which is exact in f16 from 2^-17 on; so is
/// everything else until the last operation.
#[device]
pub fn halves_i4(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    let factor = brain_as_f16(side.x, unit, 8.0);
    let far = codes.x >> 8;
    // 1 / 8 and -129; 1 / 128 and -9.
    u32x4(
        multiply_f16(fma_f16(and_or(codes.x, 0x000f000f, 0x64006400), 0x30003000, 0xd808d808), factor),
        multiply_f16(fma_f16(and_or(far, 0x000f000f, 0x64006400), 0x30003000, 0xd808d808), factor),
        multiply_f16(fma_f16(and_or(codes.x, 0x00f000f0, 0x64006400), 0x20002000, 0xc880c880), factor),
        multiply_f16(fma_f16(and_or(far, 0x00f000f0, 0x64006400), 0x20002000, 0xc880c880), factor),
    )
}

#[device]
pub fn value_i4(at: u64, tensor: Weights<u8>) -> f32 {
    let block = tensor.offset(at / 32 * 18);
    let code = plane_bits(block, (at % 32) as u32, 2, 4, 16) as i32 - 8;
    brain_at(block, 0) * code as f32
}

pub fn i4() -> Kernels {
    Kernels {
        matvec: Format { summed: true, ..Format::integers(2, side_half::DEF, dot_i4::DEF) },
        tensor: Some(TensorFormat {
            whole: whole_sixteenth::DEF,
            ..TensorFormat::integers(2, bytes_q4_0::DEF, factors_brain::DEF)
        }),
        decode: decode_i4::DEF,
        decode_by_fma: decode_i4_by_fma::DEF,
        picked: Some(Picked { to_bf16: raw_i4::DEF, to_f16: halves_i4::DEF, centred: true }),
    }
}

// ---- with an integer that stands for zero ---------------------------------------------------------------------------

#[device]
pub fn dot_i4_z(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32 {
    let dot = dot_nibbles(unit.codes, x.low, x.high, 0);
    finish_with_minimum(dot as f32, factors_brain_zero(unit.side, number), x.sum, x.scale, total)
}

#[device]
pub fn decode_i4_z(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    lifted8(part_nibbles(codes, part), bf16_lo(side.x), minimum_of_zero(side.x))
}

#[device]
pub fn value_i4_z(at: u64, tensor: Weights<u8>) -> f32 {
    let block = tensor.offset(at / 32 * 20);
    let code = plane_bits(block, (at % 32) as u32, 4, 4, 16);
    let scale = brain_at(block, 0);
    scale * code as f32 + -(scale * load::<u16>(block, 2) as u32 as f32)
}

pub fn i4_z() -> Kernels {
    Kernels {
        matvec: Format { summed: true, ..Format::integers(1, side_half_pair::DEF, dot_i4_z::DEF) },
        tensor: Some(TensorFormat {
            minimum: true,
            ..TensorFormat::integers(1, bytes_nibbles::DEF, factors_brain_zero::DEF)
        }),
        decode: decode_i4_z::DEF,
        decode_by_fma: decode_i4_z::DEF,
        picked: None,
    }
}
