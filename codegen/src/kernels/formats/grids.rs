//! The grid types IQ2 and IQ3: magnitudes that occur together, found by an index, each with a sign of its own.
//!
//! A unit has 8 bytes of codes, so instances are thin (`two_bits.rs` says what that means): eight indices of points of
//! four values, or four of points of eight and a word of signs. [`packing`](super::packing) makes the planes. A grid is
//! a table in shared memory: a word a point, four bytes, or eight numbers of four bits that stand for three magnitudes.
//!
//! All functions of a type follow from one, `word_*`: four values of a unit as signed bytes. `number` says which unit of
//! those that share words it is.

use gemma4c_blocks::grids::{self, Grid};
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::table;

use super::description::{Format, Kernels, TensorFormat};
use super::packing::block_word;
use super::pieces::{dot16, finish, half_at, half_in, scaled8, start_zero};
use super::two_bits::whole_of_halves;
use crate::kernels::matvec::parts::{Unit, UnitActivations};

// ---- tables ---------------------------------------------------------------------------------------------------------

/// The points of four values, a byte each.
const fn bytes_of<const POINTS: usize>(grid: &Grid) -> [u32; POINTS] {
    let mut words = [0; POINTS];
    let mut at = 0;
    while at < POINTS * 4 {
        words[at / 4] |= (grid.values[at] as u32) << (at % 4 * 8);
        at += 1;
    }
    words
}

/// The points of eight values, four bits each: 0, 1 and 2 for the magnitudes 8, 25 and 43.
const fn levels_of<const POINTS: usize>(grid: &Grid) -> [u32; POINTS] {
    let mut words = [0; POINTS];
    let mut at = 0;
    while at < POINTS * 8 {
        let level = match grid.values[at] {
            8 => 0,
            25 => 1,
            _ => 2,
        };
        words[at / 8] |= level << (at % 8 * 4);
        at += 1;
    }
    words
}

table! {
    /// Points of IQ2_XXS.
    pub fn iq2_xxs_point: [u32; 256] = levels_of(&grids::IQ2_XXS);
}

table! {
    /// Points of IQ2_XS.
    pub fn iq2_xs_point: [u32; 512] = levels_of(&grids::IQ2_XS);
}

table! {
    /// Points of IQ2_S.
    pub fn iq2_s_point: [u32; 1024] = levels_of(&grids::IQ2_S);
}

table! {
    /// Points of IQ3_XXS.
    pub fn iq3_xxs_point: [u32; 256] = bytes_of(&grids::IQ3_XXS);
}

table! {
    /// Points of IQ3_S.
    pub fn iq3_s_point: [u32; 512] = bytes_of(&grids::IQ3_S);
}

// ---- signs ----------------------------------------------------------------------------------------------------------

/// Four magnitudes with the signs of word `j` of a unit. A magnitude is 1 to 62, so that nothing is carried to the next byte.
#[device]
pub fn with_signs(magnitudes: u32, signs: u32, j: u32) -> u32 {
    let negative = byte_signs(signs << (7 - j));
    (magnitudes ^ negative) + (negative & 0x01010101)
}

/// The signs where a word has seven of eight: the eighth makes their number even.
#[device]
pub fn with_eighths(word: u32) -> u32 {
    let sevens = word & 0x55ffffff;
    let halves = sevens ^ sevens >> 16;
    let of_words = halves ^ halves >> 8;
    let of_eights = of_words ^ of_words >> 1;
    sevens | (of_eights & 0x55) << 25
}

/// The four bits in the room that such a word has.
#[device]
pub fn from_room(word: u32) -> u32 {
    let spread = word >> 25 & 0x55;
    let pairs = (spread | spread >> 1) & 0x33;
    (pairs | pairs >> 2) & 15
}

/// Values `4 j` to `4 j + 3` of a point of eight, j of 0 and 1.
#[device]
pub fn magnitudes_of(point: u32, j: u32) -> u32 {
    byte_perm_or_sign(0x002b1908, 0, point >> (j % 2 * 16))
}

/// Byte `index` of two words.
#[device]
pub fn byte_of_two(words: U32x2, index: u32) -> u32 {
    byte_of(if index < 4 { words.x } else { words.y }, index % 4)
}

/// The 16 bits of a unit in a word of two.
#[device]
pub fn fields_of_unit(word: u32, number: u32) -> u32 {
    word >> (number % 2 * 16) & 0xffff
}

// ---- what is made of words ------------------------------------------------------------------------------------------

#[device(slots(word(codes: U32x2, side: U32x4, number: u32, j: u32) -> u32))]
pub fn half_of_words(codes: U32x2, side: U32x4, number: u32, half: u32) -> U32x4 {
    u32x4(
        word(codes, side, number, half * 4),
        word(codes, side, number, half * 4 + 1),
        word(codes, side, number, half * 4 + 2),
        word(codes, side, number, half * 4 + 3),
    )
}

/// The dots of both halves of a unit (x, y).
#[device(slots(word(codes: U32x2, side: U32x4, number: u32, j: u32) -> u32))]
pub fn dots_of_words(unit: Unit, number: u32, x: UnitActivations) -> U32x2 {
    let codes = u32x2(unit.codes.x, unit.codes.y);
    let first = dot16(half_of_words(word, codes, unit.side, number, 0), x.low, 0);
    let second = dot16(half_of_words(word, codes, unit.side, number, 1), x.high, 0);
    u32x2(first as u32, second as u32)
}

/// Words `index % 4` of both halves, of unit `index / 4`, as tensor cores take them.
#[device(slots(word(codes: U32x2, side: U32x4, number: u32, j: u32) -> u32))]
pub fn words_of_lane(first: u32, side: U32x4, index: u32) -> U32x2 {
    let codes = u32x2(first, side.w);
    u32x2(word(codes, side, index / 4, index % 4), word(codes, side, index / 4, index % 4 + 4))
}

/// Eight values as bf16.
#[device(slots(word(codes: U32x2, side: U32x4, number: u32, j: u32) -> u32))]
pub fn decoded_words(codes: U32x4, side: U32x4, unit: u32, part: u32, factor: f32) -> U32x4 {
    let own = u32x2(codes.x, codes.y);
    let first = word(own, side, unit, part * 2);
    let second = word(own, side, unit, part * 2 + 1);
    scaled8(u32x2(first ^ 0x80808080, second ^ 0x80808080), 128.0, factor)
}

/// `total` plus the product of a unit of which both halves have one integer.
#[device]
pub fn finish_whole(dots: U32x2, factors: U32x4, scale: f32, total: f32) -> f32 {
    finish(((dots.x as i32 + dots.y as i32) * factors.z as i32) as f32, factors, scale, total)
}

/// The same of halves with an integer each.
#[device]
pub fn finish_halves(dots: U32x2, factors: U32x4, scale: f32, total: f32) -> f32 {
    finish(whole_of_halves(dots.x as i32, dots.y as i32, factors), factors, scale, total)
}

/// A dot by an integer.
#[device]
pub fn whole_of_unit(first: i32, second: i32, factors: U32x4) -> f32 {
    (first * factors.z as i32) as f32
}

/// What multiplies half `half` of a unit.
#[device]
pub fn scale_of_half(factors: U32x4, half: u32) -> f32 {
    f32::from_bits(factors.x) * if half == 0 { factors.z } else { factors.w } as f32
}

/// Factors of a half in a word of two, that many times; and of two fields of four bits twice each plus one.
#[device]
pub fn factors_of_nibbles(half: f32, times: f32, nibbles: u32) -> U32x4 {
    u32x4((half * times).to_bits(), 0, (nibbles & 15) * 2 + 1, (nibbles >> 4 & 15) * 2 + 1)
}

/// The magnitude of value `i` of a point of eight.
#[device]
pub fn level_of(point: u32, i: u32) -> u32 {
    byte_of(0x002b1908, nibble_of(point, i % 8))
}

/// Bit `i` of seven, or of the eighth, that makes their number even.
#[device]
pub fn seven_signs(signs: u32, i: u32) -> u32 {
    let sevens = signs & 127;
    (sevens | (sevens.count_ones() & 1) << 7) >> i & 1
}

#[device]
pub fn with_sign(magnitude: u32, negative: u32) -> f32 {
    if negative == 1 { -(magnitude as f32) } else { magnitude as f32 }
}

/// Four bits a unit, and one half for each eight.
#[device(thin)]
pub fn side_iq2_xxs(unit: u32, more: u32, scales: Weights<u32>, supers: Weights<u32>) -> U32x4 {
    u32x4(scales.offset(unit / 8)[more / 8], supers.offset(unit / 16)[more / 16], 0, 0)
}

/// A byte a unit, and one half for each eight.
#[device(thin)]
pub fn side_iq2_xs(unit: u32, more: u32, scales: Weights<u32>, supers: Weights<u32>) -> U32x4 {
    u32x4(scales.offset(unit / 4)[more / 4], supers.offset(unit / 16)[more / 16], 0, 0)
}

/// Two bytes a unit, and one half for each eight.
#[device(thin)]
pub fn side_iq2_s(unit: u32, more: u32, scales: Weights<u32>, supers: Weights<u32>) -> U32x4 {
    u32x4(scales.offset(unit / 2)[more / 2], supers.offset(unit / 16)[more / 16], 0, 0)
}

/// One half for each eight units, and a unit's signs.
#[device(thin)]
pub fn side_iq3_xxs(unit: u32, more: u32, high: Weights<u32>, scales: Weights<u32>) -> U32x4 {
    u32x4(scales.offset(unit / 16)[more / 16], high.offset(unit)[more], 0, 0)
}

/// Two bytes a unit, one half for each eight units, and a unit's signs.
#[device(thin)]
pub fn side_iq3_s(unit: u32, more: u32, high: Weights<u32>, scales: Weights<u32>, supers: Weights<u32>) -> U32x4 {
    u32x4(scales.offset(unit / 2)[more / 2], supers.offset(unit / 16)[more / 16], high.offset(unit)[more], 0)
}

// ---- IQ2_XXS --------------------------------------------------------------------------------------------------------

#[device]
pub fn word_iq2_xxs(codes: U32x2, side: U32x4, number: u32, j: u32) -> u32 {
    let point = iq2_xxs_point(byte_of(codes.x, j / 2));
    with_signs(magnitudes_of(point, j), with_eighths(codes.y), j)
}

#[device]
pub fn factors_iq2_xxs(side: U32x4, number: u32) -> U32x4 {
    let scale = nibble_of(side.x, number % 8) * 2 + 1;
    u32x4((half_in(side.y, number / 8) * 0.125).to_bits(), 0, scale, scale)
}

#[device]
pub fn dot_iq2_xxs(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32 {
    finish_whole(dots_of_words(word_iq2_xxs, unit, number, x), factors_iq2_xxs(unit.side, number), x.scale, total)
}

#[device(thin)]
pub fn bytes_iq2_xxs(word: u32, side: U32x4, index: u32) -> U32x2 {
    words_of_lane(word_iq2_xxs, word, side, index)
}

#[device]
pub fn decode_iq2_xxs(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    let factor = scale_of_half(factors_iq2_xxs(side, unit), part / 2);
    decoded_words(word_iq2_xxs, codes, side, unit, part, factor)
}

#[device]
pub fn value_iq2_xxs(at: u64, tensor: Weights<u8>) -> f32 {
    let block = tensor.offset(at / 256 * 66);
    let i = (at % 256) as u32;
    let group = i / 32;
    let second = block_word(block, 6 + group * 8);
    let magnitude = level_of(iq2_xxs_point(block[2 + group * 8 + i % 32 / 8] as u32), i);
    let scale = half_at(block, 0) * ((second >> 28) * 2 + 1) as f32 * 0.125;
    scale * with_sign(magnitude, seven_signs(second >> (i % 32 / 8 * 7), i % 8))
}

pub fn iq2_xxs() -> Kernels {
    let tensor = TensorFormat::integers(8, bytes_iq2_xxs::DEF, factors_iq2_xxs::DEF);
    Kernels {
        matvec: Format { side_words: 2, ..Format::integers(16, side_iq2_xxs::DEF, dot_iq2_xxs::DEF) },
        tensor: Some(TensorFormat {
            start: start_zero::DEF,
            whole: whole_of_unit::DEF,
            supers: 16,
            period: 16,
            ..tensor
        }),
        decode: decode_iq2_xxs::DEF,
        decode_by_fma: decode_iq2_xxs::DEF,
        picked: None,
    }
}

// ---- IQ2_XS --------------------------------------------------------------------------------------------------------

#[device]
pub fn word_iq2_xs(codes: U32x2, side: U32x4, number: u32, j: u32) -> u32 {
    let point = iq2_xs_point(byte_of(codes.x, j / 2) | codes.y >> (17 + j / 2 * 2) & 256);
    with_signs(magnitudes_of(point, j), with_eighths(codes.y), j)
}

#[device]
pub fn factors_iq2_xs(side: U32x4, number: u32) -> U32x4 {
    factors_of_nibbles(half_in(side.y, number / 8), 0.125, byte_of(side.x, number % 4))
}

#[device]
pub fn dot_iq2_xs(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32 {
    finish_halves(dots_of_words(word_iq2_xs, unit, number, x), factors_iq2_xs(unit.side, number), x.scale, total)
}

#[device(thin)]
pub fn bytes_iq2_xs(word: u32, side: U32x4, index: u32) -> U32x2 {
    words_of_lane(word_iq2_xs, word, side, index)
}

#[device]
pub fn decode_iq2_xs(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    let factor = scale_of_half(factors_iq2_xs(side, unit), part / 2);
    decoded_words(word_iq2_xs, codes, side, unit, part, factor)
}

#[device]
pub fn value_iq2_xs(at: u64, tensor: Weights<u8>) -> f32 {
    let block = tensor.offset(at / 256 * 74);
    let i = (at % 256) as u32;
    let entry = load::<u16>(block, 2 + i / 8 * 2) as u32;
    let magnitude = level_of(iq2_xs_point(entry & 511), i);
    let nibble = block[66 + i / 32] as u32 >> (i % 32 / 16 * 4) & 15;
    let scale = half_at(block, 0) * (nibble * 2 + 1) as f32 * 0.125;
    scale * with_sign(magnitude, seven_signs(entry >> 9, i % 8))
}

pub fn iq2_xs() -> Kernels {
    let tensor = TensorFormat::integers(4, bytes_iq2_xs::DEF, factors_iq2_xs::DEF);
    Kernels {
        matvec: Format { side_words: 2, ..Format::integers(16, side_iq2_xs::DEF, dot_iq2_xs::DEF) },
        tensor: Some(TensorFormat {
            start: start_zero::DEF,
            whole: whole_of_halves::DEF,
            halves: true,
            supers: 16,
            period: 16,
            ..tensor
        }),
        decode: decode_iq2_xs::DEF,
        decode_by_fma: decode_iq2_xs::DEF,
        picked: None,
    }
}

// ---- IQ2_S ---------------------------------------------------------------------------------------------------------

#[device]
pub fn word_iq2_s(codes: U32x2, side: U32x4, number: u32, j: u32) -> u32 {
    let upper = fields_of_unit(side.x, number) >> (j / 2 * 2) & 3;
    let point = iq2_s_point(byte_of(codes.x, j / 2) | upper << 8);
    with_signs(magnitudes_of(point, j), codes.y, j)
}

#[device]
pub fn factors_iq2_s(side: U32x4, number: u32) -> U32x4 {
    factors_of_nibbles(half_in(side.y, number / 8), 0.125, fields_of_unit(side.x, number) >> 8)
}

#[device]
pub fn dot_iq2_s(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32 {
    finish_halves(dots_of_words(word_iq2_s, unit, number, x), factors_iq2_s(unit.side, number), x.scale, total)
}

#[device(thin)]
pub fn bytes_iq2_s(word: u32, side: U32x4, index: u32) -> U32x2 {
    words_of_lane(word_iq2_s, word, side, index)
}

#[device]
pub fn decode_iq2_s(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    let factor = scale_of_half(factors_iq2_s(side, unit), part / 2);
    decoded_words(word_iq2_s, codes, side, unit, part, factor)
}

#[device]
pub fn value_iq2_s(at: u64, tensor: Weights<u8>) -> f32 {
    let block = tensor.offset(at / 256 * 82);
    let i = (at % 256) as u32;
    let upper = block[66 + i / 32] as u32 >> (i % 32 / 8 * 2) & 3;
    let magnitude = level_of(iq2_s_point(block[2 + i / 8] as u32 | upper << 8), i);
    let nibble = block[74 + i / 32] as u32 >> (i % 32 / 16 * 4) & 15;
    let scale = half_at(block, 0) * (nibble * 2 + 1) as f32 * 0.125;
    scale * with_sign(magnitude, block[34 + i / 8] as u32 >> (i % 8) & 1)
}

pub fn iq2_s() -> Kernels {
    let tensor = TensorFormat::integers(2, bytes_iq2_s::DEF, factors_iq2_s::DEF);
    Kernels {
        matvec: Format { side_words: 2, ..Format::integers(16, side_iq2_s::DEF, dot_iq2_s::DEF) },
        tensor: Some(TensorFormat {
            start: start_zero::DEF,
            whole: whole_of_halves::DEF,
            halves: true,
            supers: 16,
            period: 16,
            ..tensor
        }),
        decode: decode_iq2_s::DEF,
        decode_by_fma: decode_iq2_s::DEF,
        picked: None,
    }
}

// ---- IQ3_XXS -------------------------------------------------------------------------------------------------------

#[device]
pub fn word_iq3_xxs(codes: U32x2, side: U32x4, number: u32, j: u32) -> u32 {
    with_signs(iq3_xxs_point(byte_of_two(codes, j)), with_eighths(side.y), j)
}

#[device]
pub fn factors_iq3_xxs(side: U32x4, number: u32) -> U32x4 {
    let scale = from_room(side.y) * 2 + 1;
    u32x4((half_in(side.x, number / 8) * 0.25).to_bits(), 0, scale, scale)
}

#[device]
pub fn dot_iq3_xxs(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32 {
    finish_whole(dots_of_words(word_iq3_xxs, unit, number, x), factors_iq3_xxs(unit.side, number), x.scale, total)
}

#[device(thin)]
pub fn bytes_iq3_xxs(word: u32, side: U32x4, index: u32) -> U32x2 {
    words_of_lane(word_iq3_xxs, word, side, index)
}

#[device]
pub fn decode_iq3_xxs(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    let factor = scale_of_half(factors_iq3_xxs(side, unit), part / 2);
    decoded_words(word_iq3_xxs, codes, side, unit, part, factor)
}

#[device]
pub fn value_iq3_xxs(at: u64, tensor: Weights<u8>) -> f32 {
    let block = tensor.offset(at / 256 * 98);
    let i = (at % 256) as u32;
    let word = block_word(block, 66 + i / 32 * 4);
    let magnitude = byte_of(iq3_xxs_point(block[2 + i / 4] as u32), i % 4);
    let scale = half_at(block, 0) * ((word >> 28) * 2 + 1) as f32 * 0.25;
    scale * with_sign(magnitude, seven_signs(word >> (i % 32 / 8 * 7), i % 8))
}

pub fn iq3_xxs() -> Kernels {
    let tensor = TensorFormat::integers(16, bytes_iq3_xxs::DEF, factors_iq3_xxs::DEF);
    Kernels {
        matvec: Format { side_words: 2, ..Format::integers(16, side_iq3_xxs::DEF, dot_iq3_xxs::DEF) },
        tensor: Some(TensorFormat { start: start_zero::DEF, whole: whole_of_unit::DEF, high: 1, period: 16, ..tensor }),
        decode: decode_iq3_xxs::DEF,
        decode_by_fma: decode_iq3_xxs::DEF,
        picked: None,
    }
}

// ---- IQ3_S ---------------------------------------------------------------------------------------------------------

#[device]
pub fn word_iq3_s(codes: U32x2, side: U32x4, number: u32, j: u32) -> u32 {
    let upper = fields_of_unit(side.x, number) >> j & 1;
    with_signs(iq3_s_point(byte_of_two(codes, j) | upper << 8), side.z, j)
}

#[device]
pub fn factors_iq3_s(side: U32x4, number: u32) -> U32x4 {
    let scale = fields_of_unit(side.x, number) >> 8;
    u32x4(half_in(side.y, number / 8).to_bits(), 0, scale, scale)
}

#[device]
pub fn dot_iq3_s(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32 {
    finish_whole(dots_of_words(word_iq3_s, unit, number, x), factors_iq3_s(unit.side, number), x.scale, total)
}

#[device(thin)]
pub fn bytes_iq3_s(word: u32, side: U32x4, index: u32) -> U32x2 {
    words_of_lane(word_iq3_s, word, side, index)
}

#[device]
pub fn decode_iq3_s(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    let factor = scale_of_half(factors_iq3_s(side, unit), part / 2);
    decoded_words(word_iq3_s, codes, side, unit, part, factor)
}

#[device]
pub fn value_iq3_s(at: u64, tensor: Weights<u8>) -> f32 {
    let block = tensor.offset(at / 256 * 110);
    let i = (at % 256) as u32;
    let upper = block[66 + i / 32] as u32 >> (i % 32 / 4) & 1;
    let magnitude = byte_of(iq3_s_point(block[2 + i / 4] as u32 | upper << 8), i % 4);
    let nibble = block[106 + i / 64] as u32 >> (i / 32 % 2 * 4) & 15;
    let scale = half_at(block, 0) * (nibble * 2 + 1) as f32;
    scale * with_sign(magnitude, block[74 + i / 8] as u32 >> (i % 8) & 1)
}

pub fn iq3_s() -> Kernels {
    let tensor = TensorFormat::integers(2, bytes_iq3_s::DEF, factors_iq3_s::DEF);
    Kernels {
        matvec: Format { side_words: 3, ..Format::integers(16, side_iq3_s::DEF, dot_iq3_s::DEF) },
        tensor: Some(TensorFormat {
            start: start_zero::DEF,
            whole: whole_of_unit::DEF,
            supers: 16,
            high: 1,
            period: 16,
            ..tensor
        }),
        decode: decode_iq3_s::DEF,
        decode_by_fma: decode_iq3_s::DEF,
        picked: None,
    }
}
