//! Codes of two bits: Q2_K, Q3_K and checkpoints' integers of two bits. A unit has 8 bytes of them.
//!
//! Byte j of a unit has elements j, j + 8, j + 16 and j + 24. Elements `4 j` to `4 j + 3` are word j: two bits of every
//! byte of the unit's first or second word. Instances are thin (`#[device(thin)]`): kernels count units of 32 values
//! as always, and read 8 bytes where other types have 16.
//!
//! The third bits of Q3_K are a word: bit j of byte i is that of element `4 j + i`. Q2_K has a minimum for each 16
//! values, so its dots need the sums of each half of the activations.

use gemma4c_dsl::prelude::*;

use super::description::{Format, Kernels, TensorFormat};
use super::factors::{brain_at, brain_in, factors_brain};
use super::pieces::{dot16, finish, finish_with_minimum, half_at, half_in, lifted8, plane_bits, scaled8, start_zero};
use crate::kernels::matvec::parts::{Unit, UnitActivations};

// ---- codes ----------------------------------------------------------------------------------------------------------

/// Elements `4 j` to `4 j + 3`, a byte each.
#[device]
pub fn word_of_twos(codes: U32x2, j: u32) -> u32 {
    let word = if j % 2 == 0 { codes.x } else { codes.y };
    word >> (j / 2 * 2) & 0x03030303
}

/// The same with third bits.
#[device]
pub fn word_of_threes(codes: U32x2, high: u32, j: u32) -> u32 {
    word_of_twos(codes, j) | high.rotate_left((34 - j) % 32) & 0x04040404
}

/// Bytes less `zero` times 0x01010101, of which each has at most seven bits.
#[device]
pub fn less_in_bytes(bytes: u32, zero: u32) -> u32 {
    (bytes | 0x80808080) - zero ^ 0x80808080
}

/// The dots of both halves of a unit (x, y). Codes are multiplied where they lie in their bytes, as multiples of what they are.
#[device]
pub fn dots_of_twos(codes: U32x4, x: UnitActivations) -> U32x2 {
    let first = dp4a(codes.y & 0x03030303, x.low.y, dp4a(codes.x & 0x03030303, x.low.x, 0));
    let second = dp4a(codes.y & 0x0c0c0c0c, x.low.w, dp4a(codes.x & 0x0c0c0c0c, x.low.z, 0));
    let third = dp4a(codes.y & 0x30303030, x.high.y, dp4a(codes.x & 0x30303030, x.high.x, 0));
    let fourth = dp4a_unsigned(codes.y & 0xc0c0c0c0, x.high.w, dp4a_unsigned(codes.x & 0xc0c0c0c0, x.high.z, 0));
    u32x2((first + (second >> 2)) as u32, ((third >> 4) + (fourth >> 6)) as u32)
}

/// The sum of sixteen activations.
#[device]
pub fn sum_of_16(x: U32x4) -> i32 {
    dot16(u32x4(0x01010101, 0x01010101, 0x01010101, 0x01010101), x, 0)
}

// ---- Q2_K -----------------------------------------------------------------------------------------------------------

/// A byte for each half of a unit, a scale and a minimum of four bits; and the halves that scale both.
#[device(thin)]
pub fn side_q2_k(unit: u32, more: u32, scales: Weights<u32>, supers: Weights<u32>) -> U32x4 {
    u32x4(scales.offset(unit / 2)[more / 2], supers.offset(unit / 8)[more / 8], 0, 0)
}

/// The factors, and a byte for each half: its scale in the lower four bits, its minimum in the upper.
#[device]
pub fn factors_q2_k(side: U32x4, number: u32) -> U32x4 {
    let first = byte_of(side.x, number % 2 * 2);
    let second = byte_of(side.x, number % 2 * 2 + 1);
    u32x4(f16_lo(side.y).to_bits(), (-f16_hi(side.y)).to_bits(), first, second)
}

#[device]
pub fn dot_q2_k(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32 {
    let factors = factors_q2_k(unit.side, number);
    let dots = dots_of_twos(unit.codes, x);
    let dot = dots.x as i32 * (factors.z & 15) as i32 + dots.y as i32 * (factors.w & 15) as i32;
    // Once for all rows.
    let first = sum_of_16(x.low);
    let second = sum_of_16(x.high);
    let sum = first * (factors.z >> 4) as i32 + second * (factors.w >> 4) as i32;
    finish_with_minimum(dot as f32, factors, sum, x.scale, total)
}

#[device(thin)]
pub fn bytes_q2_k(word: u32, side: U32x4, index: u32) -> U32x2 {
    let codes = u32x2(word, side.w);
    u32x2(word_of_twos(codes, index % 4), word_of_twos(codes, index % 4 + 4))
}

/// Two dots by the scales of their halves.
#[device]
pub fn whole_q2_k(first: i32, second: i32, factors: U32x4) -> f32 {
    (first * (factors.z & 15) as i32 + second * (factors.w & 15) as i32) as f32
}

#[device]
pub fn decode_q2_k(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    let twos = u32x2(codes.x, codes.y);
    let byte = byte_of(side.x, unit % 2 * 2 + part / 2);
    let factor = f16_lo(side.y) * (byte & 15) as f32;
    let minimum = f16_hi(side.y) * (byte >> 4) as f32;
    lifted8(u32x2(word_of_twos(twos, part * 2), word_of_twos(twos, part * 2 + 1)), factor, -minimum)
}

#[device]
pub fn value_q2_k(at: u64, tensor: Weights<u8>) -> f32 {
    let block = tensor.offset(at / 256 * 84);
    let i = (at % 256) as u32;
    let byte = block[i / 16] as u32;
    let code = plane_bits(block, i, 16, 2, 32);
    half_at(block, 80) * (byte & 15) as f32 * code as f32 + -(half_at(block, 82) * (byte >> 4) as f32)
}

pub fn q2_k() -> Kernels {
    Kernels {
        matvec: Format { side_words: 2, ..Format::integers(8, side_q2_k::DEF, dot_q2_k::DEF) },
        tensor: Some(TensorFormat {
            start: start_zero::DEF,
            whole: whole_q2_k::DEF,
            halves: true,
            minimum: true,
            supers: 8,
            ..TensorFormat::integers(2, bytes_q2_k::DEF, factors_q2_k::DEF)
        }),
        decode: decode_q2_k::DEF,
        decode_by_fma: decode_q2_k::DEF,
        picked: None,
    }
}

// ---- Q3_K -----------------------------------------------------------------------------------------------------------

/// Two signed bytes a unit, one half for each eight units, and the third bits.
#[device(thin)]
pub fn side_with_high(unit: u32, more: u32, high: Weights<u32>, scales: Weights<u32>, supers: Weights<u32>) -> U32x4 {
    u32x4(scales.offset(unit / 2)[more / 2], supers.offset(unit / 16)[more / 16], high.offset(unit)[more], 0)
}

#[device]
pub fn factors_q3_k(side: U32x4, number: u32) -> U32x4 {
    let first = signed_byte_of(side.x, number % 2 * 2);
    let second = signed_byte_of(side.x, number % 2 * 2 + 1);
    u32x4(half_in(side.y, number / 8).to_bits(), 0, first as u32, second as u32)
}

/// Elements `16 half` and on, unsigned.
#[device]
pub fn half_of_threes(codes: U32x2, high: u32, half: u32) -> U32x4 {
    u32x4(
        word_of_threes(codes, high, half * 4),
        word_of_threes(codes, high, half * 4 + 1),
        word_of_threes(codes, high, half * 4 + 2),
        word_of_threes(codes, high, half * 4 + 3),
    )
}

#[device]
pub fn dot_q3_k(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32 {
    let codes = u32x2(unit.codes.x, unit.codes.y);
    let factors = factors_q3_k(unit.side, number);
    // Each half has a scale of its own, so the zero point of 4 needs the sum of each half: once for all rows.
    let minus4 = u32x4(0xfcfcfcfc, 0xfcfcfcfc, 0xfcfcfcfc, 0xfcfcfcfc);
    let first = dot16(half_of_threes(codes, unit.side.z, 0), x.low, dot16(minus4, x.low, 0));
    let second = dot16(half_of_threes(codes, unit.side.z, 1), x.high, dot16(minus4, x.high, 0));
    finish((first * factors.z as i32 + second * factors.w as i32) as f32, factors, x.scale, total)
}

#[device(thin)]
pub fn bytes_q3_k(word: u32, side: U32x4, index: u32) -> U32x2 {
    let codes = u32x2(word, side.w);
    u32x2(
        less_in_bytes(word_of_threes(codes, side.z, index % 4), 0x04040404),
        less_in_bytes(word_of_threes(codes, side.z, index % 4 + 4), 0x04040404),
    )
}

/// Two dots by integers of their own.
#[device]
pub fn whole_of_halves(first: i32, second: i32, factors: U32x4) -> f32 {
    (first * factors.z as i32 + second * factors.w as i32) as f32
}

#[device]
pub fn decode_q3_k(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    let twos = u32x2(codes.x, codes.y);
    let bytes = u32x2(word_of_threes(twos, side.z, part * 2), word_of_threes(twos, side.z, part * 2 + 1));
    let factor = half_in(side.y, unit / 8) * signed_byte_of(side.x, unit % 2 * 2 + part / 2) as f32;
    scaled8(bytes, 4.0, factor)
}

#[device]
pub fn value_q3_k(at: u64, tensor: Weights<u8>) -> f32 {
    let block = tensor.offset(at / 256 * 110);
    let i = (at % 256) as u32;
    let k = i / 16;
    let low = block[96 + k % 8] as u32 >> (k / 8 * 4) & 15;
    let scale = (low | (block[104 + k % 4] as u32 >> (k / 4 * 2) & 3) << 4) as i32 - 32;
    let code = plane_bits(block, i, 32, 2, 32) | plane_bits(block, i, 0, 1, 32) << 2;
    half_at(block, 108) * scale as f32 * (code as i32 - 4) as f32
}

pub fn q3_k() -> Kernels {
    Kernels {
        matvec: Format { side_words: 3, ..Format::integers(16, side_with_high::DEF, dot_q3_k::DEF) },
        tensor: Some(TensorFormat {
            start: start_zero::DEF,
            whole: whole_of_halves::DEF,
            halves: true,
            supers: 16,
            high: 1,
            period: 16,
            ..TensorFormat::integers(2, bytes_q3_k::DEF, factors_q3_k::DEF)
        }),
        decode: decode_q3_k::DEF,
        decode_by_fma: decode_q3_k::DEF,
        picked: None,
    }
}

// ---- integers of two bits -------------------------------------------------------------------------------------------

/// One bfloat16 a unit.
#[device(thin)]
pub fn side_i2(unit: u32, more: u32, scales: Weights<u32>) -> U32x4 {
    u32x4(scales.offset(unit / 2)[more / 2], 0, 0, 0)
}

#[device]
pub fn dot_i2(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32 {
    let dots = dots_of_twos(unit.codes, x);
    let dot = dots.x as i32 + dots.y as i32 + x.sum.wrapping_mul(-2);
    finish(dot as f32, factors_brain(unit.side, number), x.scale, total)
}

#[device(thin)]
pub fn bytes_i2(word: u32, side: U32x4, index: u32) -> U32x2 {
    let codes = u32x2(word, side.w);
    u32x2(
        less_in_bytes(word_of_twos(codes, index % 4), 0x02020202),
        less_in_bytes(word_of_twos(codes, index % 4 + 4), 0x02020202),
    )
}

#[device]
pub fn decode_i2(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    let twos = u32x2(codes.x, codes.y);
    scaled8(u32x2(word_of_twos(twos, part * 2), word_of_twos(twos, part * 2 + 1)), 2.0, brain_in(side.x, unit))
}

#[device]
pub fn value_i2(at: u64, tensor: Weights<u8>) -> f32 {
    let block = tensor.offset(at / 32 * 10);
    let code = plane_bits(block, (at % 32) as u32, 2, 2, 8) as i32 - 2;
    brain_at(block, 0) * code as f32
}

pub fn i2() -> Kernels {
    Kernels {
        matvec: Format { summed: true, ..Format::integers(2, side_i2::DEF, dot_i2::DEF) },
        tensor: Some(TensorFormat::integers(2, bytes_i2::DEF, factors_brain::DEF)),
        decode: decode_i2::DEF,
        decode_by_fma: decode_i2::DEF,
        picked: None,
    }
}
