//! Weight formats of the matrix-vector product: how a unit of repacked weights is read, and multiplied by activations.
//!
//! A unit is 16 bytes of the plane `codes`: 32 nibbles, 16 bytes, 8 or 4 floats. A format is two device functions: `side_*`
//! fetches what else the unit needs, `dot_*` adds the unit's product to a total. A side is fetched long before it is used,
//! so it holds whole words as they lie in memory: a 16-bit load would be widened at once, and so waited for. `dot_*` picks
//! its part out of the word by the unit's number. A side is of the unit `more` behind `unit`: 0, or a constant multiple of the units that share a word (`Format::units_beside`), so that rows at such a distance share an address.
//!
//! Every `dot_*` of an integer format is an exact sum of integers, then one rounding after the other in `finish`. What the side says of a unit is
//! its `factors_*`: the factor (x) and the minimum (y) as bits of f32, and integers that multiply the dots of its halves (z, w). Tensor cores
//! make the same integers another way and finish them by the same functions.
//!
//! In integer formats `x.low` and `x.high` are 16 activations each, codes in bytes; `x.scale` is their common scale and `x.sum` the
//! sum of all 32. In float formats they are four activations each.

use gemma4c_blocks::DType;
use gemma4c_dsl::Filled;
use gemma4c_dsl::prelude::*;

use super::parts::{Unit, UnitActivations};
use crate::kernels::formats;
pub use crate::kernels::formats::description::Format;
pub use crate::kernels::formats::pieces::{
    dot_nibbles, dot16, finish, finish_with_minimum, half_in, high_nibbles, low_nibbles, no_two_dots, side_half,
    side_half_pair, side_q8_0,
};

// ---- pieces ---------------------------------------------------------------------------------------------------------

/// Bits 0 to 3 of `bits`, at bit 4 of the four bytes.
#[device]
pub fn spread_bits(bits: u32) -> u32 {
    (bits & 15) * 0x02040810 & 0x10101010
}

/// Nibbles with their fifth bits: the sixteen low ones of `bits`.
#[device]
pub fn with_fifth_bits(nibbles: U32x4, bits: u32) -> U32x4 {
    u32x4(
        nibbles.x | spread_bits(bits),
        nibbles.y | spread_bits(bits >> 4),
        nibbles.z | spread_bits(bits >> 8),
        nibbles.w | spread_bits(bits >> 12),
    )
}

/// 32 products of codes of five bits, plus `sum`.
#[device]
pub fn dot_five_bits(codes: U32x4, bits: u32, low: U32x4, high: U32x4, sum: i32) -> i32 {
    let upper = with_fifth_bits(high_nibbles(codes), bits >> 16);
    dot16(upper, high, dot16(with_fifth_bits(low_nibbles(codes), bits), low, sum))
}

/// Four of the sixteen levels of the IQ4 formats, by the four nibbles of the low half of `codes`.
#[device]
pub fn iq4_levels(codes: u32) -> u32 {
    // -127 -104 -83 -65 | -49 -35 -22 -10 | 1 13 25 38 | 53 69 89 113
    let lower = byte_perm(0xbfad9881, 0xf6eaddcf, codes);
    let upper = byte_perm(0x26190d01, 0x71594535, codes);
    byte_perm(lower, upper, 0x3210 | (codes & 0x8888) >> 1)
}

/// 32 products of levels.
#[device]
pub fn dot_levels(codes: U32x4, low: U32x4, high: U32x4) -> i32 {
    let first = dot_levels4(codes.y, low.y, high.y, dot_levels4(codes.x, low.x, high.x, 0));
    dot_levels4(codes.w, low.w, high.w, dot_levels4(codes.z, low.z, high.z, first))
}

/// Eight products of levels: a word of nibbles holds four elements and the four that lie 16 further on.
#[device]
pub fn dot_levels4(codes: u32, low: u32, high: u32, sum: i32) -> i32 {
    let first = iq4_levels(codes);
    let second = iq4_levels(codes >> 16);
    dp4a(byte_perm(first, second, 0x7531), high, dp4a(byte_perm(first, second, 0x6420), low, sum))
}

// ---- integer formats ------------------------------------------------------------------------------------------------

#[device]
pub fn factors_q8_0(side: U32x4, number: u32) -> U32x4 {
    u32x4(half_in(side.x, number / 2).to_bits(), 0, 0, 0)
}

#[device]
pub fn dot_q8_0(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32 {
    finish(dot16(unit.codes, x.low, 0) as f32, factors_q8_0(unit.side, number), x.scale, total)
}

/// The dot of a block of 32 values, of which two neighbouring lanes have 16 each: both get all of it. A collective of the warp.
#[device]
pub fn dot_q8_0_joined(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32 {
    let own = dot16(unit.codes, x.low, 0);
    finish((own + shfl_xor(own, 1)) as f32, factors_q8_0(unit.side, number), x.scale, total)
}

/// The same for two rows at once: the even lane gets the first row's, the odd lane the second's. A collective of the warp.
#[device]
pub fn two_dots_q8_0(first: Unit, second: Unit, number: u32, x: UnitActivations, total: f32) -> f32 {
    let is_odd = lane_id() % 2 == 1;
    let of_first = dot16(first.codes, x.low, 0);
    let of_second = dot16(second.codes, x.low, 0);
    let other = shfl_xor(if is_odd { of_first } else { of_second }, 1);
    let own = if is_odd { of_second } else { of_first };
    let side = if is_odd { second.side } else { first.side };
    finish((own + other) as f32, factors_q8_0(side, number), x.scale, total)
}

#[device]
pub fn factors_half(side: U32x4, number: u32) -> U32x4 {
    u32x4(half_in(side.x, number).to_bits(), 0, 0, 0)
}

#[device]
pub fn dot_q4_0(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32 {
    let dot = dot_nibbles(unit.codes, x.low, x.high, x.sum.wrapping_mul(-8));
    finish(dot as f32, factors_half(unit.side, number), x.scale, total)
}

#[device]
pub fn dot_iq4_nl(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32 {
    finish(dot_levels(unit.codes, x.low, x.high) as f32, factors_half(unit.side, number), x.scale, total)
}

#[device]
pub fn factors_half_pair(side: U32x4, number: u32) -> U32x4 {
    u32x4(f16_lo(side.x).to_bits(), f16_hi(side.x).to_bits(), 0, 0)
}

#[device]
pub fn dot_q4_1(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32 {
    let dot = dot_nibbles(unit.codes, x.low, x.high, 0);
    finish_with_minimum(dot as f32, factors_half_pair(unit.side, number), x.sum, x.scale, total)
}

/// One half a unit, and the fifth bits.
#[device]
pub fn side_q5_0(unit: u32, more: u32, high: Weights<u32>, scales: Weights<u32>) -> U32x4 {
    u32x4(scales.offset(unit / 2)[more / 2], high.offset(unit)[more], 0, 0)
}

#[device]
pub fn dot_q5_0(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32 {
    let dot = dot_five_bits(unit.codes, unit.side.y, x.low, x.high, x.sum.wrapping_mul(-16));
    finish(dot as f32, factors_half(unit.side, number), x.scale, total)
}

/// Scale and minimum, and the fifth bits.
#[device]
pub fn side_q5_1(unit: u32, more: u32, high: Weights<u32>, scales: Weights<u32>) -> U32x4 {
    u32x4(scales.offset(unit)[more], high.offset(unit)[more], 0, 0)
}

#[device]
pub fn dot_q5_1(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32 {
    let dot = dot_five_bits(unit.codes, unit.side.y, x.low, x.high, 0);
    finish_with_minimum(dot as f32, factors_half_pair(unit.side, number), x.sum, x.scale, total)
}

/// Scale and minimum, a byte each, and the halves that scale both.
#[device]
pub fn side_q4_k(unit: u32, more: u32, scales: Weights<u32>, supers: Weights<u32>) -> U32x4 {
    u32x4(scales.offset(unit / 2)[more / 2], supers.offset(unit / 8)[more / 8], 0, 0)
}

#[device]
pub fn factors_k(side: U32x4, number: u32) -> U32x4 {
    let factor = f16_lo(side.y) * byte_of(side.x, number % 2 * 2) as f32;
    let minimum = f16_hi(side.y) * byte_of(side.x, number % 2 * 2 + 1) as f32;
    u32x4(factor.to_bits(), (-minimum).to_bits(), 0, 0)
}

#[device]
pub fn dot_q4_k(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32 {
    let dot = dot_nibbles(unit.codes, x.low, x.high, 0);
    finish_with_minimum(dot as f32, factors_k(unit.side, number), x.sum, x.scale, total)
}

#[device]
pub fn side_q5_k(unit: u32, more: u32, high: Weights<u32>, scales: Weights<u32>, supers: Weights<u32>) -> U32x4 {
    u32x4(scales.offset(unit / 2)[more / 2], supers.offset(unit / 8)[more / 8], high.offset(unit)[more], 0)
}

#[device]
pub fn dot_q5_k(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32 {
    let dot = dot_five_bits(unit.codes, unit.side.z, x.low, x.high, 0);
    finish_with_minimum(dot as f32, factors_k(unit.side, number), x.sum, x.scale, total)
}

/// The high bit pairs (x, y), two signed bytes a unit (z), and one half for each eight units (w).
#[device]
pub fn side_q6_k(unit: u32, more: u32, high: Weights<U32x2>, scales: Weights<u32>, supers: Weights<u32>) -> U32x4 {
    let pairs = high.offset(unit)[more];
    u32x4(pairs.x, pairs.y, scales.offset(unit / 2)[more / 2], supers.offset(unit / 16)[more / 16])
}

#[device]
pub fn factors_q6_k(side: U32x4, number: u32) -> U32x4 {
    let first = signed_byte_of(side.z, number % 2 * 2);
    let second = signed_byte_of(side.z, number % 2 * 2 + 1);
    u32x4(half_in(side.w, number / 8).to_bits(), 0, first as u32, second as u32)
}

#[device]
pub fn dot_q6_k(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32 {
    let lower = low_nibbles(unit.codes);
    let upper = high_nibbles(unit.codes);
    let first = u32x4(
        lower.x | unit.side.x << 4 & 0x30303030,
        lower.y | unit.side.y << 4 & 0x30303030,
        lower.z | unit.side.x << 2 & 0x30303030,
        lower.w | unit.side.y << 2 & 0x30303030,
    );
    let second = u32x4(
        upper.x | unit.side.x & 0x30303030,
        upper.y | unit.side.y & 0x30303030,
        upper.z | unit.side.x >> 2 & 0x30303030,
        upper.w | unit.side.y >> 2 & 0x30303030,
    );
    // Each half has a x.scale of its own, so the zero point of 32 needs the x.sum of each half: once for all rows.
    let minus32 = u32x4(0xe0e0e0e0, 0xe0e0e0e0, 0xe0e0e0e0, 0xe0e0e0e0);
    let factors = factors_q6_k(unit.side, number);
    let dots = dot16(first, x.low, dot16(minus32, x.low, 0)) * factors.z as i32
        + dot16(second, x.high, dot16(minus32, x.high, 0)) * factors.w as i32;
    finish(dots as f32, factors, x.scale, total)
}

/// One signed byte a unit, and one half for each eight.
#[device]
pub fn side_iq4_xs(unit: u32, more: u32, scales: Weights<u32>, supers: Weights<u32>) -> U32x4 {
    u32x4(scales.offset(unit / 4)[more / 4], supers.offset(unit / 16)[more / 16], 0, 0)
}

#[device]
pub fn factors_iq4_xs(side: U32x4, number: u32) -> U32x4 {
    u32x4(half_in(side.y, number / 8).to_bits(), 0, signed_byte_of(side.x, number % 4) as u32, 0)
}

#[device]
pub fn dot_iq4_xs(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32 {
    let factors = factors_iq4_xs(unit.side, number);
    finish((dot_levels(unit.codes, x.low, x.high) * factors.z as i32) as f32, factors, x.scale, total)
}

// ---- float formats --------------------------------------------------------------------------------------------------

/// Floats need nothing beside themselves.
#[device]
pub fn side_none(unit: u32, more: u32) -> U32x4 {
    u32x4(0, 0, 0, 0)
}

#[device]
pub fn dot_f32(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32 {
    let two = f32::from_bits(unit.codes.y)
        .mul_add(f32::from_bits(x.low.y), f32::from_bits(unit.codes.x).mul_add(f32::from_bits(x.low.x), total));
    f32::from_bits(unit.codes.w)
        .mul_add(f32::from_bits(x.low.w), f32::from_bits(unit.codes.z).mul_add(f32::from_bits(x.low.z), two))
}

#[device]
pub fn dot_f16(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32 {
    let two = f16_hi(unit.codes.x)
        .mul_add(f32::from_bits(x.low.y), f16_lo(unit.codes.x).mul_add(f32::from_bits(x.low.x), total));
    let four = f16_hi(unit.codes.y)
        .mul_add(f32::from_bits(x.low.w), f16_lo(unit.codes.y).mul_add(f32::from_bits(x.low.z), two));
    let six = f16_hi(unit.codes.z)
        .mul_add(f32::from_bits(x.high.y), f16_lo(unit.codes.z).mul_add(f32::from_bits(x.high.x), four));
    f16_hi(unit.codes.w).mul_add(f32::from_bits(x.high.w), f16_lo(unit.codes.w).mul_add(f32::from_bits(x.high.z), six))
}

#[device]
pub fn dot_bf16(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32 {
    let two = bf16_hi(unit.codes.x)
        .mul_add(f32::from_bits(x.low.y), bf16_lo(unit.codes.x).mul_add(f32::from_bits(x.low.x), total));
    let four = bf16_hi(unit.codes.y)
        .mul_add(f32::from_bits(x.low.w), bf16_lo(unit.codes.y).mul_add(f32::from_bits(x.low.z), two));
    let six = bf16_hi(unit.codes.z)
        .mul_add(f32::from_bits(x.high.y), bf16_lo(unit.codes.z).mul_add(f32::from_bits(x.high.x), four));
    bf16_hi(unit.codes.w)
        .mul_add(f32::from_bits(x.high.w), bf16_lo(unit.codes.w).mul_add(f32::from_bits(x.high.z), six))
}

// ---- the table ------------------------------------------------------------------------------------------------------

/// The format of a type.
pub fn format(dtype: DType) -> Format {
    let units_beside = match dtype {
        DType::F32 | DType::F16 | DType::BF16 | DType::Q4_1 | DType::Q5_1 => 1,
        DType::Q4_0 | DType::IQ4NL | DType::Q5_0 => 2,
        DType::Q8_0 => 4,
        DType::Q4K | DType::Q5K => 8,
        DType::Q6K | DType::IQ4XS => 16,
        _ => return formats::of(dtype).unwrap_or_else(|| no_kernels(dtype)).matvec,
    };
    let format = |unit, integer, side_words, side, dot| Format {
        unit,
        integer,
        summed: false,
        side_words,
        units_beside,
        side,
        dot,
        fine_dot: dot,
        lane_dot: dot,
        two_dots: no_two_dots::DEF,
        joined: false,
    };
    let summed = |format| Format { summed: true, ..format };
    match dtype {
        DType::F32 => format(4, false, 0, side_none::DEF, dot_f32::DEF),
        DType::F16 => format(8, false, 0, side_none::DEF, dot_f16::DEF),
        DType::BF16 => format(8, false, 0, side_none::DEF, dot_bf16::DEF),
        DType::Q8_0 => Format {
            lane_dot: dot_q8_0_joined::DEF,
            two_dots: two_dots_q8_0::DEF,
            joined: true,
            ..format(16, true, 1, side_q8_0::DEF, dot_q8_0::DEF)
        },
        DType::Q4_0 => summed(format(32, true, 1, side_half::DEF, dot_q4_0::DEF)),
        DType::Q4_1 => summed(format(32, true, 1, side_half_pair::DEF, dot_q4_1::DEF)),
        DType::Q5_0 => summed(format(32, true, 2, side_q5_0::DEF, dot_q5_0::DEF)),
        DType::Q5_1 => summed(format(32, true, 2, side_q5_1::DEF, dot_q5_1::DEF)),
        DType::Q4K => summed(format(32, true, 2, side_q4_k::DEF, dot_q4_k::DEF)),
        DType::Q5K => summed(format(32, true, 3, side_q5_k::DEF, dot_q5_k::DEF)),
        DType::Q6K => format(32, true, 4, side_q6_k::DEF, dot_q6_k::DEF),
        DType::IQ4NL => format(32, true, 1, side_half::DEF, dot_iq4_nl::DEF),
        DType::IQ4XS => format(32, true, 2, side_iq4_xs::DEF, dot_iq4_xs::DEF),
        _ => no_kernels(dtype),
    }
}

/// Types that have no kernels yet: lowering refuses them first.
pub fn has_kernels(dtype: DType) -> bool {
    dtype as usize <= DType::IQ4XS as usize || formats::of(dtype).is_some()
}

/// All types that have kernels, in the order of the table.
pub fn types_with_kernels() -> impl Iterator<Item = DType> + Clone {
    DType::ALL.into_iter().filter(|dtype| has_kernels(*dtype))
}

pub fn no_kernels(dtype: DType) -> ! {
    panic!("a plan was lowered with {dtype}, which has no kernels")
}

/// The arguments of a type's `side_*` function, from the memory of each of its planes. `codes` is the kernel's own parameter.
pub fn side_arguments<M>(dtype: DType, plane: impl Fn(&'static str) -> M) -> Filled<M> {
    let (high, scales, supers) = (|| plane("high"), || plane("scales"), || plane("supers"));
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => Filled::alone(side_none::DEF),
        DType::Q8_0 => side_q8_0::Arguments { scales: scales() }.into(),
        DType::Q4_0 | DType::IQ4NL => side_half::Arguments { scales: scales() }.into(),
        DType::Q4_1 => side_half_pair::Arguments { scales: scales() }.into(),
        DType::Q5_0 => side_q5_0::Arguments { high: high(), scales: scales() }.into(),
        DType::Q5_1 => side_q5_1::Arguments { high: high(), scales: scales() }.into(),
        DType::Q4K => side_q4_k::Arguments { scales: scales(), supers: supers() }.into(),
        DType::Q5K => side_q5_k::Arguments { high: high(), scales: scales(), supers: supers() }.into(),
        DType::Q6K => side_q6_k::Arguments { high: high(), scales: scales(), supers: supers() }.into(),
        DType::IQ4XS => side_iq4_xs::Arguments { scales: scales(), supers: supers() }.into(),
        _ => formats::side_arguments(dtype, &plane).unwrap_or_else(|| no_kernels(dtype)),
    }
}
