//! Integer weight formats as tensor cores take them: what [`formats`](crate::kernels::matvec::formats) says with `dp4a`, in three functions.
//!
//! `bytes_*` makes signed bytes of a word of codes: four values of the unit's first half (x) and four of its second (y); units of two pieces have
//! their bytes as they are.
//! `start_*` is what a dot starts with; zero points are taken from the bytes. `whole_*` makes an f32 of a unit's
//! dots. A dot below 2^22 needs no conversion: it starts at the bits of 1.5 · 2^23, so its sum is the bits of that float plus
//! the dot, and a subtraction gives the dot exactly.

use gemma4c_blocks::DType;
use gemma4c_dsl::prelude::*;

use crate::kernels::formats;
pub use crate::kernels::formats::description::TensorFormat;
pub use crate::kernels::formats::pieces::{
    bytes_nibbles, bytes_q4_0, bytes_signed, start_biased, start_zero, whole_biased, whole_sixteenth,
};
use crate::kernels::matvec::formats::{
    factors_half, factors_half_pair, factors_iq4_xs, factors_k, factors_q6_k, factors_q8_0, iq4_levels, no_kernels,
    spread_bits,
};

// ---- signed bytes ---------------------------------------------------------------------------------------------------

/// Levels of the IQ4 formats.
#[device]
pub fn bytes_levels(word: u32, side: U32x4, index: u32) -> U32x2 {
    let first = iq4_levels(word);
    let second = iq4_levels(word >> 16);
    u32x2(byte_perm(first, second, 0x6420), byte_perm(first, second, 0x7531))
}

/// Nibbles with fifth bits, which are the side's second word.
#[device]
pub fn bytes_q5(word: u32, side: U32x4, index: u32) -> U32x2 {
    let low = word & 0x0f0f0f0f | spread_bits(side.y >> (index * 4));
    u32x2(low, word >> 4 & 0x0f0f0f0f | spread_bits(side.y >> (16 + index * 4)))
}

/// The same less the zero point of 16. The upper bit of every byte keeps the subtraction from borrowing of the next.
#[device]
pub fn bytes_q5_0(word: u32, side: U32x4, index: u32) -> U32x2 {
    let five = bytes_q5(word, side, index);
    let lower = (five.x | 0x80808080) - 0x10101010 ^ 0x80808080;
    u32x2(lower, (five.y | 0x80808080) - 0x10101010 ^ 0x80808080)
}

/// Nibbles with fifth bits, which are the side's third word.
#[device]
pub fn bytes_q5_k(word: u32, side: U32x4, index: u32) -> U32x2 {
    let low = word & 0x0f0f0f0f | spread_bits(side.z >> (index * 4));
    u32x2(low, word >> 4 & 0x0f0f0f0f | spread_bits(side.z >> (16 + index * 4)))
}

/// Values of six bits in bytes, less 32. The upper bit of every byte keeps the subtraction from borrowing of the next.
#[device]
pub fn less_32(bytes: u32) -> u32 {
    (bytes | 0x80808080) - 0x20202020 ^ 0x80808080
}

/// Nibbles with two high bits, less the zero point: the halves of a unit have scales of their own, and no sum.
#[device]
pub fn bytes_q6_k(word: u32, side: U32x4, index: u32) -> U32x2 {
    let pairs = if index % 2 == 0 { side.x } else { side.y };
    // Words 2 and 3 of the first half have bits 2 and 3 of every byte, the second half bits 4 and 5, and 6 and 7.
    let first = if index < 2 { pairs << 4 } else { pairs << 2 };
    let second = if index < 2 { pairs } else { pairs >> 2 };
    let low = word & 0x0f0f0f0f | first & 0x30303030;
    u32x2(less_32(low), less_32(word >> 4 & 0x0f0f0f0f | second & 0x30303030))
}

// ---- dots -----------------------------------------------------------------------------------------------------------

/// Two dots by integers of their own.
#[device]
pub fn whole_q6_k(first: i32, second: i32, factors: U32x4) -> f32 {
    (first * factors.z as i32 + second * factors.w as i32) as f32
}

/// A dot by an integer.
#[device]
pub fn whole_iq4_xs(first: i32, second: i32, factors: U32x4) -> f32 {
    (first * factors.z as i32) as f32
}

// ---- the table ------------------------------------------------------------------------------------------------------

impl TensorFormat {
    /// Words that lie beside a piece.
    pub fn side_words(&self) -> u32 {
        1 + u32::from(self.supers > 0) + self.high
    }

    /// Neighbouring pieces that have the same words beside them, in rows of that many.
    pub fn sharing(&self, pieces: u32) -> u32 {
        let same = |sharing: &u32| self.scales.is_multiple_of(*sharing) && pieces.is_multiple_of(*sharing);
        if self.high > 0 { 1 } else { [4, 2].into_iter().find(same).unwrap_or(1) }
    }

    /// The sums of the activations are needed.
    pub fn sums(&self) -> bool {
        self.minimum
    }

    /// Of a type; `None` of floats.
    pub fn of(dtype: DType) -> Option<TensorFormat> {
        let biased = TensorFormat {
            bytes: bytes_nibbles::DEF,
            start: start_biased::DEF,
            whole: whole_biased::DEF,
            factors: factors_half::DEF,
            parts: 1,
            classes: 8,
            halves: false,
            minimum: false,
            scales: 2,
            supers: 0,
            high: 0,
            period: 2,
        };
        let minimum = |factors, scales| TensorFormat { factors, scales, minimum: true, ..biased };
        let factors_k = minimum(factors_k::DEF, 2);
        Some(match dtype {
            DType::F32 | DType::F16 | DType::BF16 => return None,
            DType::Q8_0 => TensorFormat {
                bytes: bytes_signed::DEF,
                factors: factors_q8_0::DEF,
                parts: 2,
                classes: 4,
                scales: 4,
                period: 4,
                ..biased
            },
            DType::Q4_0 => TensorFormat { bytes: bytes_q4_0::DEF, whole: whole_sixteenth::DEF, ..biased },
            DType::IQ4NL => TensorFormat { bytes: bytes_levels::DEF, ..biased },
            DType::Q4_1 => minimum(factors_half_pair::DEF, 1),
            DType::Q5_0 => TensorFormat { bytes: bytes_q5_0::DEF, high: 1, ..biased },
            DType::Q5_1 => TensorFormat { bytes: bytes_q5::DEF, high: 1, ..minimum(factors_half_pair::DEF, 1) },
            DType::Q4K => TensorFormat { supers: 8, ..factors_k },
            DType::Q5K => TensorFormat { bytes: bytes_q5_k::DEF, supers: 8, high: 1, ..factors_k },
            DType::Q6K => TensorFormat {
                bytes: bytes_q6_k::DEF,
                start: start_zero::DEF,
                whole: whole_q6_k::DEF,
                factors: factors_q6_k::DEF,
                halves: true,
                supers: 16,
                high: 2,
                period: 16,
                ..biased
            },
            DType::IQ4XS => TensorFormat {
                bytes: bytes_levels::DEF,
                start: start_zero::DEF,
                whole: whole_iq4_xs::DEF,
                factors: factors_iq4_xs::DEF,
                scales: 4,
                supers: 16,
                period: 16,
                ..biased
            },
            _ => return formats::of(dtype).unwrap_or_else(|| no_kernels(dtype)).tensor,
        })
    }
}
