//! Floats of four bits (e2m1), whose doubles are integers: with a power of two for each 32 (MXFP4), or a float of 8 bits
//! for each 16 and an f32 for each 64 (NVFP4).
//!
//! A table of 16 bytes is looked up with four nibbles at a time, those of half a word. So repacking puts four neighbours
//! there, which need not be sorted afterwards ([`Quads`](crate::kernels::planes::Content::Quads)).

use gemma4c_dsl::prelude::*;

use super::description::{Format, Kernels, TensorFormat};
use super::factors::{
    factor_of_half, factors_exponent, factors_floats16, half_of_power, side_byte, side_floats16, small_float_in,
    whole_floats16,
};
use super::pieces::{dot16, eight_bytes, finish, part_words, plane_bits, scaled8};
use crate::kernels::matvec::parts::{Unit, UnitActivations};

/// The doubles of the floats that are the four nibbles of the low half of `codes`, as signed bytes.
#[device]
pub fn fp4_levels(codes: u32) -> u32 {
    // 0 1 2 3 | 4 6 8 12, and their negatives.
    let positive = byte_perm(0x03020100, 0x0c080604, codes);
    let negative = byte_perm(0xfdfeff00, 0xf4f8fafc, codes);
    byte_perm(positive, negative, 0x3210 | (codes & 0x8888) >> 1)
}

/// The same, 128 more.
#[device]
pub fn raised_fp4_levels(codes: u32) -> u32 {
    let positive = byte_perm(0x83828180, 0x8c888684, codes);
    let negative = byte_perm(0x7d7e7f80, 0x74787a7c, codes);
    byte_perm(positive, negative, 0x3210 | (codes & 0x8888) >> 1)
}

/// The levels of the codes without a sign of the low half of a word; zero in place of the others. The lookup itself
/// tells them apart: for a nibble whose upper bit is set it repeats the sign of the byte, which has none here.
#[device]
pub fn fp4_without_sign(codes: u32) -> u32 {
    byte_perm_or_sign(0x03020100, 0x0c080604, codes)
}

/// The dots of both halves of a unit (x, y): those of codes without a sign, less those of the others. That takes half of
/// the instructions that signed levels take.
#[device]
pub fn dots_of_fp4(codes: U32x4, x: UnitActivations) -> U32x2 {
    let turned = u32x4(codes.x ^ 0x88888888, codes.y ^ 0x88888888, codes.z ^ 0x88888888, codes.w ^ 0x88888888);
    u32x2(
        (dot_low_fp4(codes, x.low) - dot_low_fp4(turned, x.low)) as u32,
        (dot_high_fp4(codes, x.high) - dot_high_fp4(turned, x.high)) as u32,
    )
}

/// The dot of the codes without a sign of a unit's first half.
#[device]
pub fn dot_low_fp4(codes: U32x4, x: U32x4) -> i32 {
    let levels = u32x4(
        fp4_without_sign(codes.x),
        fp4_without_sign(codes.y),
        fp4_without_sign(codes.z),
        fp4_without_sign(codes.w),
    );
    dot16(levels, x, 0)
}

/// The same of its second half.
#[device]
pub fn dot_high_fp4(codes: U32x4, x: U32x4) -> i32 {
    dot_low_fp4(u32x4(codes.x >> 16, codes.y >> 16, codes.z >> 16, codes.w >> 16), x)
}

/// The levels of a word of nibbles: of a unit's first half (x) and of its second (y).
#[device]
pub fn bytes_fp4(word: u32, side: U32x4, index: u32) -> U32x2 {
    u32x2(fp4_levels(word), fp4_levels(word >> 16))
}

/// Eight levels, 128 more.
#[device]
pub fn raised_fp4(codes: U32x4, part: u32) -> U32x2 {
    let words = part_words(codes, part);
    u32x2(raised_fp4_levels(words.x >> (part / 2 * 16)), raised_fp4_levels(words.y >> (part / 2 * 16)))
}

/// The level of a code.
#[device]
pub fn fp4_level(code: u32) -> f32 {
    signed_byte_of(fp4_levels(code), 0) as f32
}

// ---- MXFP4 ----------------------------------------------------------------------------------------------------------

#[device]
pub fn dot_mxfp4(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32 {
    let dots = dots_of_fp4(unit.codes, x);
    finish((dots.x as i32 + dots.y as i32) as f32, factors_exponent(unit.side, number), x.scale, total)
}

#[device]
pub fn decode_mxfp4(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    scaled8(raised_fp4(codes, part), 128.0, half_of_power(byte_of(side.x, unit % 4)))
}

#[device]
pub fn decode_mxfp4_by_fma(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    eight_bytes(raised_fp4(codes, part), 128.0, half_of_power(byte_of(side.x, unit % 4)))
}

#[device]
pub fn value_mxfp4(at: u64, tensor: Weights<u8>) -> f32 {
    let block = tensor.offset(at / 32 * 17);
    half_of_power(block[0u32] as u32) * fp4_level(plane_bits(block, (at % 32) as u32, 1, 4, 16))
}

pub fn mxfp4() -> Kernels {
    Kernels {
        matvec: Format::integers(4, side_byte::DEF, dot_mxfp4::DEF),
        tensor: Some(TensorFormat::integers(4, bytes_fp4::DEF, factors_exponent::DEF)),
        decode: decode_mxfp4::DEF,
        decode_by_fma: decode_mxfp4_by_fma::DEF,
        picked: None,
    }
}

// ---- NVFP4 ----------------------------------------------------------------------------------------------------------

#[device]
pub fn dot_nvfp4(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32 {
    let dots = dots_of_fp4(unit.codes, x);
    let factors = factors_floats16(unit.side, number);
    finish(whole_floats16(dots.x as i32 + 0x4b400000, dots.y as i32, factors), factors, x.scale, total)
}

/// Values are the factor of a half times levels, rounded once more: an f32 factor leaves no room for fewer operations.
#[device]
pub fn decode_nvfp4(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    scaled8(raised_fp4(codes, part), 128.0, factor_of_half(side, unit, part / 2))
}

#[device]
pub fn value_nvfp4(at: u64, tensor: Weights<u8>) -> f32 {
    let block = tensor.offset(at / 64 * 40);
    let i = (at % 64) as u32;
    // The upper bit of a factor counts for nothing, and there is no NaN.
    let code = block[4 + i / 16] as u32 & 127;
    let factor = small_float_in(if code == 127 { 0 } else { code }, 0) * 128.0;
    load::<f32>(block, 0) * factor * fp4_level(plane_bits(block, i, 8, 4, 8))
}

pub fn nvfp4() -> Kernels {
    Kernels {
        matvec: Format { side_words: 2, ..Format::integers(2, side_floats16::DEF, dot_nvfp4::DEF) },
        tensor: Some(TensorFormat {
            whole: whole_floats16::DEF,
            halves: true,
            supers: 2,
            ..TensorFormat::integers(2, bytes_fp4::DEF, factors_floats16::DEF)
        }),
        decode: decode_nvfp4::DEF,
        decode_by_fma: decode_nvfp4::DEF,
        picked: None,
    }
}
