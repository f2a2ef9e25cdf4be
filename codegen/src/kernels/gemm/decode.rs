//! Codes with one f16 scale for each 32 values to bf16, eight at a time, as
//! [`product::decode`](crate::kernels::product::decode) does, with an instruction a value less: the zero point is taken
//! off by the multiplication.
//!
//! Values are those of the blocks, rounded once. Only a zero may have the other sign, which no sum of products shows.

use gemma4c_blocks::DType;
use gemma4c_dsl::DeviceDef;
use gemma4c_dsl::prelude::*;

use crate::kernels::matvec::formats::half_in;
use crate::kernels::product::decode::{decode, decode_q8_0_by_fma, eight_bytes, part_nibbles, raised_levels};

/// Nibbles `at` and `at + 1` of a word of four, less 8, times a factor that is the sum of two bf16: exact until the
/// last of three operations on pairs.
#[device]
pub fn nibble_pair(nibbles: u32, selector: u32, upper: u32, lower: u32) -> u32 {
    // A nibble in the last byte of 128 is 128 more than itself.
    let whole = fma_bf16(byte_perm(nibbles, 0x43434343, selector), 0x3f803f80, 0xc308c308);
    fma_bf16(whole, upper, fma_bf16(whole, lower, 0x80008000))
}

/// An f16 is a bf16 and three bits more, which times a nibble are a bf16 too. On pairs it is two thirds of the
/// instructions of [`eight_bytes`], and most of them are of the pipe that has little else to do.
#[device]
pub fn raw_q4_0(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    let nibbles = part_nibbles(codes, part);
    let factor = half_in(side.x, unit);
    let upper = pack_bf16(factor, factor);
    let rest = factor - f32::from_bits(upper << 16);
    let lower = pack_bf16(rest, rest);
    u32x4(
        nibble_pair(nibbles.x, 0x4140, upper, lower),
        nibble_pair(nibbles.x, 0x4342, upper, lower),
        nibble_pair(nibbles.y, 0x4140, upper, lower),
        nibble_pair(nibbles.y, 0x4342, upper, lower),
    )
}

#[device]
pub fn raw_iq4_nl(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    eight_bytes(raised_levels(codes, part), 128.0, half_in(side.x, unit))
}

/// The function for a type whose rows are SCALED.
fn raw(dtype: DType) -> Option<&'static DeviceDef> {
    match dtype {
        DType::Q8_0 => Some(decode_q8_0_by_fma::DEF),
        DType::Q4_0 => Some(raw_q4_0::DEF),
        DType::IQ4NL => Some(raw_iq4_nl::DEF),
        _ => None,
    }
}

/// Whether a row of the type has an f16 scale for each 32 values and nothing else beside its codes.
pub fn is_scaled(dtype: DType) -> bool {
    raw(dtype).is_some()
}

/// The function for a type's codes.
pub fn decode_of(dtype: DType) -> &'static DeviceDef {
    raw(dtype).unwrap_or_else(|| decode(dtype))
}
