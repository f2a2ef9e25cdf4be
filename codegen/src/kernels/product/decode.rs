//! Repacked weights to bf16, eight values at a time: what a tile of the product is filled with.
//!
//! Values are those of the blocks, rounded once. A byte becomes a float without a conversion: as the last byte of 2^23 + n,
//! whose 2^23 is then taken off together with the zero point.

use gemma4c_blocks::DType;
use gemma4c_dsl::DeviceDef;
use gemma4c_dsl::prelude::*;

use crate::kernels::formats;
pub use crate::kernels::formats::pieces::{
    byte_less, eight_bytes, lifted_pair, lifted8, part_nibbles, part_words, scaled_pair, scaled8,
};
use crate::kernels::matvec::formats::{half_in, iq4_levels, no_kernels, spread_bits};

// ---- pieces ---------------------------------------------------------------------------------------------------------

#[device]
pub fn decode_q8_0_by_fma(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    let words = part_words(codes, part);
    eight_bytes(u32x2(words.x ^ 0x80808080, words.y ^ 0x80808080), 128.0, half_in(side.x, unit / 2))
}

/// Eight nibbles with their fifth bits.
#[device]
pub fn part_five_bits(codes: U32x4, bits: u32, part: u32) -> U32x2 {
    let nibbles = part_nibbles(codes, part);
    u32x2(nibbles.x | spread_bits(bits >> (part * 8)), nibbles.y | spread_bits(bits >> (part * 8 + 4)))
}

/// The levels of four nibbles of a word of the IQ4 formats: the lower nibbles, or the upper ones.
#[device]
pub fn part_levels(word: u32, upper: bool) -> u32 {
    byte_perm(iq4_levels(word), iq4_levels(word >> 16), if upper { 0x7531 } else { 0x6420 })
}

/// Eight levels, as bytes that are 128 too large.
#[device]
pub fn raised_levels(codes: U32x4, part: u32) -> U32x2 {
    let words = part_words(codes, part);
    u32x2(part_levels(words.x, part >= 2) ^ 0x80808080, part_levels(words.y, part >= 2) ^ 0x80808080)
}

// ---- formats --------------------------------------------------------------------------------------------------------

#[device]
pub fn decode_q8_0(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    let words = part_words(codes, part);
    scaled8(u32x2(words.x ^ 0x80808080, words.y ^ 0x80808080), 128.0, half_in(side.x, unit / 2))
}

#[device]
pub fn decode_q4_0(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    scaled8(part_nibbles(codes, part), 8.0, half_in(side.x, unit))
}

#[device]
pub fn decode_q4_1(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    lifted8(part_nibbles(codes, part), f16_lo(side.x), f16_hi(side.x))
}

#[device]
pub fn decode_q5_0(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    scaled8(part_five_bits(codes, side.y, part), 16.0, half_in(side.x, unit))
}

#[device]
pub fn decode_q5_1(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    lifted8(part_five_bits(codes, side.y, part), f16_lo(side.x), f16_hi(side.x))
}

#[device]
pub fn decode_q4_k(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    let factor = f16_lo(side.y) * byte_of(side.x, unit % 2 * 2) as f32;
    let minimum = f16_hi(side.y) * byte_of(side.x, unit % 2 * 2 + 1) as f32;
    lifted8(part_nibbles(codes, part), factor, -minimum)
}

#[device]
pub fn decode_q5_k(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    let factor = f16_lo(side.y) * byte_of(side.x, unit % 2 * 2) as f32;
    let minimum = f16_hi(side.y) * byte_of(side.x, unit % 2 * 2 + 1) as f32;
    lifted8(part_five_bits(codes, side.z, part), factor, -minimum)
}

#[device]
pub fn decode_q6_k(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    let nibbles = part_nibbles(codes, part);
    let low = nibbles.x | (side.x >> (part * 2) & 0x03030303) << 4;
    let high = nibbles.y | (side.y >> (part * 2) & 0x03030303) << 4;
    let factor = half_in(side.w, unit / 8) * signed_byte_of(side.z, unit % 2 * 2 + part / 2) as f32;
    scaled8(u32x2(low, high), 32.0, factor)
}

#[device]
pub fn decode_iq4_nl(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    scaled8(raised_levels(codes, part), 128.0, half_in(side.x, unit))
}

#[device]
pub fn decode_iq4_xs(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    let factor = half_in(side.y, unit / 8) * signed_byte_of(side.x, unit % 4) as f32;
    scaled8(raised_levels(codes, part), 128.0, factor)
}

/// Four values alone: a unit has no more.
#[device]
pub fn decode_f32(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    let low = pack_bf16(f32::from_bits(codes.x), f32::from_bits(codes.y));
    u32x4(low, pack_bf16(f32::from_bits(codes.z), f32::from_bits(codes.w)), 0, 0)
}

#[device]
pub fn decode_f16(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    u32x4(
        pack_bf16(f16_lo(codes.x), f16_hi(codes.x)),
        pack_bf16(f16_lo(codes.y), f16_hi(codes.y)),
        pack_bf16(f16_lo(codes.z), f16_hi(codes.z)),
        pack_bf16(f16_lo(codes.w), f16_hi(codes.w)),
    )
}

#[device]
pub fn decode_bf16(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    codes
}

/// The function for a type's units. What lies beside a unit is fetched as the matrix-vector product does it.
pub fn decode(dtype: DType) -> &'static DeviceDef {
    match dtype {
        DType::F32 => decode_f32::DEF,
        DType::F16 => decode_f16::DEF,
        DType::BF16 => decode_bf16::DEF,
        DType::Q8_0 => decode_q8_0::DEF,
        DType::Q4_0 => decode_q4_0::DEF,
        DType::Q4_1 => decode_q4_1::DEF,
        DType::Q5_0 => decode_q5_0::DEF,
        DType::Q5_1 => decode_q5_1::DEF,
        DType::Q4K => decode_q4_k::DEF,
        DType::Q5K => decode_q5_k::DEF,
        DType::Q6K => decode_q6_k::DEF,
        DType::IQ4NL => decode_iq4_nl::DEF,
        DType::IQ4XS => decode_iq4_xs::DEF,
        _ => formats::of(dtype).unwrap_or_else(|| no_kernels(dtype)).decode,
    }
}
