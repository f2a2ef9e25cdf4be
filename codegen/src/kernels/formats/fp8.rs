//! Floats of 8 bits (e4m3) with a scale for each 32: a bfloat16 (F8) or an f32 (F8S).
//!
//! A code that is no number is refused when a file is loaded; here it may be any.
//!
//! One row multiplies them by activations in int8, as all types of blocks. A product of a float and a code has 11 bits:
//! it is exact in f16. Sums of four products are f16, rounded to 2^-11 of themselves: a twentieth of what the rounding
//! of activations to int8 costs. Activations with fine codes have no such rounding, and their products are added in f32.
//! Neither is a sum of integers, so int8 tensor cores cannot have it; many rows are multiplied as f16 or bf16.

use gemma4c_dsl::prelude::*;

use super::description::{Format, Kernels, Picked};
use super::factors::{brain_as_f16, brain_at, brain_in, factors_brain16, side_single16};
use super::pieces::{finish, part_words, side_q8_0};
use crate::kernels::matvec::parts::{Unit, UnitActivations};

/// Four codes of activations as f16, divided by 2^8: sums of products with the largest floats stay below infinity.
#[device]
pub fn codes_as_f16(word: u32) -> U32x2 {
    let raised = word ^ 0x80808080;
    // In the mantissa of 1024 a byte is 1024 + 128 + n; times 2^-8, and -4.5.
    u32x2(
        fma_f16(byte_perm(raised, 0x64646464, 0x4140), 0x1c001c00, 0xc480c480),
        fma_f16(byte_perm(raised, 0x64646464, 0x4342), 0x1c001c00, 0xc480c480),
    )
}

#[device]
pub fn sum_of_pair(pair: u32) -> f32 {
    f16_lo(pair) + f16_hi(pair)
}

/// Sixteen products, each divided by 2^8; of four there is a sum in f16.
#[device]
pub fn dot16_fp8(codes: U32x4, x: U32x4) -> f32 {
    let a = e4m3_as_f16(codes.x);
    let b = e4m3_as_f16(codes.y);
    let c = e4m3_as_f16(codes.z);
    let d = e4m3_as_f16(codes.w);
    let by_a = codes_as_f16(x.x);
    let by_b = codes_as_f16(x.y);
    let by_c = codes_as_f16(x.z);
    let by_d = codes_as_f16(x.w);
    let first = fma_f16(b.x, by_b.x, multiply_f16(a.x, by_a.x));
    let second = fma_f16(b.y, by_b.y, multiply_f16(a.y, by_a.y));
    let all_first = fma_f16(d.x, by_d.x, fma_f16(c.x, by_c.x, first));
    let all_second = fma_f16(d.y, by_d.y, fma_f16(c.y, by_c.y, second));
    sum_of_pair(all_first) + sum_of_pair(all_second)
}

/// Four products, each divided by 2^8, which are exact and added in f32.
#[device]
pub fn exact_dot4_fp8(codes: u32, x: u32) -> f32 {
    let floats = e4m3_as_f16(codes);
    let by = codes_as_f16(x);
    sum_of_pair(multiply_f16(floats.x, by.x)) + sum_of_pair(multiply_f16(floats.y, by.y))
}

/// Sixteen products, each divided by 2^8.
#[device]
pub fn exact_dot16_fp8(codes: U32x4, x: U32x4) -> f32 {
    let first = exact_dot4_fp8(codes.x, x.x) + exact_dot4_fp8(codes.y, x.y);
    first + (exact_dot4_fp8(codes.z, x.z) + exact_dot4_fp8(codes.w, x.w))
}

/// Four floats as bf16, times a factor.
#[device]
pub fn four_fp8(codes: u32, factor: f32) -> U32x2 {
    let pairs = e4m3_as_f16(codes);
    let first = pack_bf16(f16_lo(pairs.x) * factor, f16_hi(pairs.x) * factor);
    u32x2(first, pack_bf16(f16_lo(pairs.y) * factor, f16_hi(pairs.y) * factor))
}

/// Eight values as bf16.
#[device]
pub fn eight_fp8(codes: U32x4, part: u32, factor: f32) -> U32x4 {
    let words = part_words(codes, part);
    let first = four_fp8(words.x, factor);
    let second = four_fp8(words.y, factor);
    u32x4(first.x, first.y, second.x, second.y)
}

/// The float of 8 bits at `at` of a block.
#[device]
pub fn fp8_at(block: Weights<u8>, at: u32) -> f32 {
    f16_lo(e4m3_as_f16(block[at] as u32).x)
}

// ---- F8 -------------------------------------------------------------------------------------------------------------

#[device]
pub fn dot_f8(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32 {
    let dot = dot16_fp8(unit.codes, x.low) * 256.0;
    finish(dot, factors_brain16(unit.side, number), x.scale, total)
}

#[device]
pub fn fine_dot_f8(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32 {
    let dot = exact_dot16_fp8(unit.codes, x.low) * 256.0;
    finish(dot, factors_brain16(unit.side, number), x.scale, total)
}

#[device]
pub fn decode_f8(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    eight_fp8(codes, part, brain_in(side.x, unit / 2))
}

/// Four bytes: one product's part.
#[device]
pub fn raw_f8(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    let pairs = four_fp8(codes.x, brain_in(side.x, unit));
    u32x4(pairs.x, pairs.y, 0, 0)
}

/// The same in f16. A 256th of a float is multiplied by 256 times the scale, which is exact in f16 from 2^-22 on.
#[device]
pub fn halves_f8(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    let factor = brain_as_f16(side.x, unit, 256.0);
    let pairs = e4m3_as_f16(codes.x);
    let first = multiply_f16(multiply_f16(pairs.x, 0x1c001c00), factor);
    u32x4(first, multiply_f16(multiply_f16(pairs.y, 0x1c001c00), factor), 0, 0)
}

#[device]
pub fn value_f8(at: u64, tensor: Weights<u8>) -> f32 {
    let block = tensor.offset(at / 32 * 34);
    brain_at(block, 0) * fp8_at(block, 2 + (at % 32) as u32)
}

pub fn f8() -> Kernels {
    Kernels {
        matvec: Format { unit: 16, fine_dot: fine_dot_f8::DEF, ..Format::integers(4, side_q8_0::DEF, dot_f8::DEF) },
        tensor: None,
        decode: decode_f8::DEF,
        decode_by_fma: decode_f8::DEF,
        picked: Some(Picked { to_bf16: raw_f8::DEF, to_f16: halves_f8::DEF, centred: false }),
    }
}

// ---- F8S ------------------------------------------------------------------------------------------------------------

#[device]
pub fn dot_f8_s(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32 {
    finish(dot16_fp8(unit.codes, x.low) * 256.0, unit.side, x.scale, total)
}

#[device]
pub fn fine_dot_f8_s(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32 {
    finish(exact_dot16_fp8(unit.codes, x.low) * 256.0, unit.side, x.scale, total)
}

#[device]
pub fn decode_f8_s(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    eight_fp8(codes, part, f32::from_bits(side.x))
}

#[device]
pub fn value_f8_s(at: u64, tensor: Weights<u8>) -> f32 {
    let block = tensor.offset(at / 32 * 36);
    load::<f32>(block, 0) * fp8_at(block, 4 + (at % 32) as u32)
}

pub fn f8_s() -> Kernels {
    Kernels {
        matvec: Format {
            unit: 16,
            fine_dot: fine_dot_f8_s::DEF,
            ..Format::integers(2, side_single16::DEF, dot_f8_s::DEF)
        },
        tensor: None,
        decode: decode_f8_s::DEF,
        decode_by_fma: decode_f8_s::DEF,
        picked: None,
    }
}
