//! Repacked weights to bf16, eight values at a time: what a tile of the product is filled with.
//!
//! Values are those of the blocks, rounded once. A byte becomes a float without a conversion: as the last byte of 2^23 + n,
//! whose 2^23 is then taken off together with the zero point.

use gemma4c_blocks::DType;
use gemma4c_dsl::DeviceDef;
use gemma4c_dsl::prelude::*;

use super::fragments::raw_pair;
use crate::kernels::matvec::formats::{half_in, iq4_levels, no_kernels, spread_bits};

// ---- pieces ---------------------------------------------------------------------------------------------------------

/// Byte `index` of a word, less `zero`.
#[device]
pub fn byte_less(word: u32, index: u32, zero: f32) -> f32 {
    f32::from_bits(byte_perm(word, 0x4b000000, 0x7440 | index)) - (8388608.0 + zero)
}

/// Two bytes of a word as bf16: `(byte - zero) * factor`.
#[device]
pub fn scaled_pair(word: u32, index: u32, zero: f32, factor: f32) -> u32 {
    pack_bf16(byte_less(word, index, zero) * factor, byte_less(word, index + 1, zero) * factor)
}

/// Two bytes of a word as bf16: `byte * factor + minimum`.
#[device]
pub fn lifted_pair(word: u32, index: u32, factor: f32, minimum: f32) -> u32 {
    pack_bf16(byte_less(word, index, 0.0) * factor + minimum, byte_less(word, index + 1, 0.0) * factor + minimum)
}

/// Eight bytes as bf16: `(byte - zero) * factor`.
#[device]
pub fn scaled8(bytes: U32x2, zero: f32, factor: f32) -> U32x4 {
    u32x4(
        scaled_pair(bytes.x, 0, zero, factor),
        scaled_pair(bytes.x, 2, zero, factor),
        scaled_pair(bytes.y, 0, zero, factor),
        scaled_pair(bytes.y, 2, zero, factor),
    )
}

/// Eight bytes as bf16: `byte * factor + minimum`.
#[device]
pub fn lifted8(bytes: U32x2, factor: f32, minimum: f32) -> U32x4 {
    u32x4(
        lifted_pair(bytes.x, 0, factor, minimum),
        lifted_pair(bytes.x, 2, factor, minimum),
        lifted_pair(bytes.y, 0, factor, minimum),
        lifted_pair(bytes.y, 2, factor, minimum),
    )
}

/// The words that hold elements `8 * part` and on of a group of nibbles: in their lower nibbles for the first two parts, in
/// their upper ones for the others.
#[device]
pub fn part_words(codes: U32x4, part: u32) -> U32x2 {
    if part % 2 == 0 { u32x2(codes.x, codes.y) } else { u32x2(codes.z, codes.w) }
}

/// Eight nibbles, a byte each.
#[device]
pub fn part_nibbles(codes: U32x4, part: u32) -> U32x2 {
    let words = part_words(codes, part);
    u32x2(words.x >> (part / 2 * 4) & 0x0f0f0f0f, words.y >> (part / 2 * 4) & 0x0f0f0f0f)
}

/// Eight bytes as bf16, `(byte - zero) * factor`, one fma each.
#[device]
pub fn eight_bytes(bytes: U32x2, zero: f32, factor: f32) -> U32x4 {
    let offset = -(32768.0 + zero) * factor;
    u32x4(
        raw_pair(bytes.x, 0, factor, offset),
        raw_pair(bytes.x, 2, factor, offset),
        raw_pair(bytes.y, 0, factor, offset),
        raw_pair(bytes.y, 2, factor, offset),
    )
}

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
        _ => no_kernels(dtype),
    }
}
