//! How the scales of a unit are read: the factors of its dot as bits of f32 (x: factor, y: minimum), and what multiplies
//! the dots of its halves (z, w). Units have 32 values, or 16 where a name says so.

use gemma4c_dsl::prelude::*;

// ---- bfloat16 -------------------------------------------------------------------------------------------------------

/// The bfloat16 of a word of two.
#[device]
pub fn brain_in(word: u32, index: u32) -> f32 {
    f32::from_bits(word >> (index % 2 * 16) << 16)
}

/// One bfloat16 for each unit.
#[device]
pub fn factors_brain(side: U32x4, number: u32) -> U32x4 {
    u32x4(brain_in(side.x, number).to_bits(), 0, 0, 0)
}

/// One bfloat16 for each two units of 16 values.
#[device]
pub fn factors_brain16(side: U32x4, number: u32) -> U32x4 {
    u32x4(brain_in(side.x, number / 2).to_bits(), 0, 0, 0)
}

/// What takes the place of zero, next to a bfloat16: minus their product.
#[device]
pub fn minimum_of_zero(word: u32) -> f32 {
    // An integer behind 2^23.
    let zero = f32::from_bits(word >> 16 | 0x4b000000) - 8388608.0;
    -(bf16_lo(word) * zero)
}

/// A bfloat16 for each unit, and the integer that stands for zero.
#[device]
pub fn factors_brain_zero(side: U32x4, number: u32) -> U32x4 {
    u32x4(bf16_lo(side.x).to_bits(), minimum_of_zero(side.x).to_bits(), 0, 0)
}

/// The bfloat16 of a word of two, times a power of two, as a pair of f16, twice the same.
#[device]
pub fn brain_as_f16(word: u32, index: u32, by: f32) -> u32 {
    let factor = brain_in(word, index) * by;
    pack_f16(factor, factor)
}

/// The bfloat16 at `at` of a block.
#[device]
pub fn brain_at(block: Weights<u8>, at: u32) -> f32 {
    load::<BF16>(block, at).to_f32()
}

// ---- f32 ------------------------------------------------------------------------------------------------------------

/// One f32 for each two units of 16 values.
#[device]
pub fn side_single16(unit: u32, more: u32, scales: Weights<u32>) -> U32x4 {
    u32x4(scales.offset(unit / 2)[more / 2], 0, 0, 0)
}

// ---- exponents ------------------------------------------------------------------------------------------------------

/// Half of the power of two whose exponent is `code - 127`.
#[device]
pub fn half_of_power(code: u32) -> f32 {
    // The code 0 is the power 2^-127, which is no normal number.
    f32::from_bits((code << 23).max(0x00400000)) * 0.5
}

/// The word that holds the byte of a unit: four units to a word.
#[device]
pub fn side_byte(unit: u32, more: u32, scales: Weights<u32>) -> U32x4 {
    u32x4(scales.offset(unit / 4)[more / 4], 0, 0, 0)
}

/// One exponent for each unit.
#[device]
pub fn factors_exponent(side: U32x4, number: u32) -> U32x4 {
    u32x4(half_of_power(byte_of(side.x, number % 4)).to_bits(), 0, 0, 0)
}

// ---- unsigned floats of 8 bits --------------------------------------------------------------------------------------

/// Two floats of 8 bits a unit, and an f32 for each two units.
#[device]
pub fn side_floats16(unit: u32, more: u32, scales: Weights<u32>, supers: Weights<u32>) -> U32x4 {
    u32x4(scales.offset(unit / 2)[more / 2], supers.offset(unit / 2)[more / 2], 0, 0)
}

/// One of the four unsigned floats of 8 bits (e4m3) in a word, divided by 2^8: an f16 whose exponent counts from 15
/// instead of 7.
#[device]
pub fn small_float_in(word: u32, index: u32) -> f32 {
    f16_lo(byte_of(word, index) << 7)
}

/// The f32 of a unit with what [`small_float_in`] is too small by, and half of that: levels are doubled. The floats of
/// its halves are beside it.
#[device]
pub fn factors_floats16(side: U32x4, number: u32) -> U32x4 {
    let first = small_float_in(side.x, number % 2 * 2);
    let second = small_float_in(side.x, number % 2 * 2 + 1);
    u32x4((f32::from_bits(side.y) * 128.0).to_bits(), 0, first.to_bits(), second.to_bits())
}

/// The factor of half `half` of a unit, rounded as that of a block is.
#[device]
pub fn factor_of_half(side: U32x4, number: u32, half: u32) -> f32 {
    f32::from_bits(side.y) * (small_float_in(side.x, number % 2 * 2 + half) * 128.0)
}

/// Two dots by floats of their own: the first started at the bias.
#[device]
pub fn whole_floats16(first: i32, second: i32, factors: U32x4) -> f32 {
    let of_first = f32::from_bits(first as u32) - 12582912.0;
    let of_second = f32::from_bits((second + 0x4b400000) as u32) - 12582912.0;
    of_first.mul_add(f32::from_bits(factors.z), of_second * f32::from_bits(factors.w))
}
