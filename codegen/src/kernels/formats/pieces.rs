//! What several formats have in common: codes to integers, dots to sums, and values to pairs of 16-bit floats.
//!
//! How a factor is read is in [`factors`](super::factors). What one format alone does stays with it.

use gemma4c_dsl::prelude::*;

use crate::kernels::matvec::parts::{Unit, UnitActivations};

// ---- dots of integers -----------------------------------------------------------------------------------------------

/// `sum` plus sixteen products of signed bytes.
#[device]
pub fn dot16(a: U32x4, b: U32x4, sum: i32) -> i32 {
    dp4a(a.w, b.w, dp4a(a.z, b.z, dp4a(a.y, b.y, dp4a(a.x, b.x, sum))))
}

/// Elements 0 to 15 of a group of nibbles, a byte each.
#[device]
pub fn low_nibbles(codes: U32x4) -> U32x4 {
    u32x4(codes.x & 0x0f0f0f0f, codes.y & 0x0f0f0f0f, codes.z & 0x0f0f0f0f, codes.w & 0x0f0f0f0f)
}

/// Elements 16 to 31 of a group of nibbles, a byte each.
#[device]
pub fn high_nibbles(codes: U32x4) -> U32x4 {
    low_nibbles(u32x4(codes.x >> 4, codes.y >> 4, codes.z >> 4, codes.w >> 4))
}

/// 32 products of codes of four bits, plus `sum`. The upper halves of bytes are multiplied where they lie, as sixteen times what they are: one shift for all of them.
#[device]
pub fn dot_nibbles(codes: U32x4, low: U32x4, high: U32x4, sum: i32) -> i32 {
    let upper = dp4a_unsigned(codes.y & 0xf0f0f0f0, high.y, dp4a_unsigned(codes.x & 0xf0f0f0f0, high.x, 0));
    let all_upper = dp4a_unsigned(codes.w & 0xf0f0f0f0, high.w, dp4a_unsigned(codes.z & 0xf0f0f0f0, high.z, upper));
    dot16(low_nibbles(codes), low, sum) + (all_upper >> 4)
}

/// The 16-bit float of a word of two.
#[device]
pub fn half_in(word: u32, index: u32) -> f32 {
    f16_lo(word >> (index % 2 * 16))
}

/// `total` plus the product of a unit, of which `dot` is the integer part: `factor * scale * dot`.
#[device]
pub fn finish(dot: f32, factors: U32x4, scale: f32, total: f32) -> f32 {
    dot.mul_add(f32::from_bits(factors.x) * scale, total)
}

/// `total` plus the product of a unit with a minimum: `scale * (factor * dot + minimum * sum)`.
#[device]
pub fn finish_with_minimum(dot: f32, factors: U32x4, sum: i32, scale: f32, total: f32) -> f32 {
    dot.mul_add(f32::from_bits(factors.x) * scale, (sum as f32).mul_add(f32::from_bits(factors.y) * scale, total))
}

/// The word that holds the half of a unit of 16 values: four units to a word.
#[device]
pub fn side_q8_0(unit: u32, more: u32, scales: Weights<u32>) -> U32x4 {
    u32x4(scales.offset(unit / 4)[more / 4], 0, 0, 0)
}

/// No type's lanes are joined that has this.
#[device]
pub fn no_two_dots(first: Unit, second: Unit, number: u32, x: UnitActivations, total: f32) -> f32 {
    total
}

/// One half a unit.
#[device]
pub fn side_half(unit: u32, more: u32, scales: Weights<u32>) -> U32x4 {
    u32x4(scales.offset(unit / 2)[more / 2], 0, 0, 0)
}

/// Scale and minimum, a half each.
#[device]
pub fn side_half_pair(unit: u32, more: u32, scales: Weights<u32>) -> U32x4 {
    u32x4(scales.offset(unit)[more], 0, 0, 0)
}

// ---- signed bytes for tensor cores, and their dots ------------------------------------------------------------------

/// Bytes are what they are.
#[device]
pub fn bytes_signed(word: u32, side: U32x4, index: u32) -> U32x2 {
    u32x2(word, 0)
}

/// Nibbles.
#[device]
pub fn bytes_nibbles(word: u32, side: U32x4, index: u32) -> U32x2 {
    u32x2(word & 0x0f0f0f0f, word >> 4 & 0x0f0f0f0f)
}

/// Sixteen times the nibbles less their zero point of 8: as the upper half of a byte a nibble is one exclusive or from it.
#[device]
pub fn bytes_q4_0(word: u32, side: U32x4, index: u32) -> U32x2 {
    u32x2((word << 4 & 0xf0f0f0f0) ^ 0x80808080, word & 0xf0f0f0f0 ^ 0x80808080)
}

/// The bits of 12582912, 1.5 · 2^23: a float whose neighbours are integers.
#[device]
pub fn start_biased(sum: i32) -> i32 {
    0x4b400000
}

#[device]
pub fn start_zero(sum: i32) -> i32 {
    0
}

/// A dot that started at the bias.
#[device]
pub fn whole_biased(first: i32, second: i32, factors: U32x4) -> f32 {
    f32::from_bits(first as u32) - 12582912.0
}

/// The same of sixteen times the dot: 786432 is the sixteenth of the bias, and the result an integer, so nothing is rounded.
#[device]
pub fn whole_sixteenth(first: i32, second: i32, factors: U32x4) -> f32 {
    f32::from_bits(first as u32).mul_add(0.0625, -786432.0)
}

// ---- eight values as bf16 -------------------------------------------------------------------------------------------

/// Bytes `at` and `at + 1` of a word as bf16, `byte * factor + offset`, where the offset takes off 2^15 and the zero point: a byte becomes a float
/// without a conversion, as the second byte of 2^15 + n, and everything is exact until it is rounded.
#[device]
pub fn raw_pair(word: u32, at: u32, factor: f32, offset: f32) -> u32 {
    let low = f32::from_bits(byte_perm(word, 0x47000000, 0x7404 | at << 4));
    let high = f32::from_bits(byte_perm(word, 0x47000000, 0x7404 | (at + 1) << 4));
    pack_bf16(low.mul_add(factor, offset), high.mul_add(factor, offset))
}

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

// ---- a value of a block ---------------------------------------------------------------------------------------------

/// The bits of element `i` in a plane: see `Plane` of the block formats.
#[device]
pub fn plane_bits(block: Weights<u8>, i: u32, at: u32, bits: u32, run: u32) -> u32 {
    let span = run * 8 / bits;
    let byte = block[at + run * (i / span) + i % run] as u32;
    byte >> (bits * (i % span / run)) & ((1u32 << bits) - 1)
}

#[device]
pub fn half_at(block: Weights<u8>, at: u32) -> f32 {
    load::<F16>(block, at).to_f32()
}
