//! How the scales of a unit are read: the factors of its dot as bits of f32 (x: factor, y: minimum), and what multiplies
//! the dots of its halves (z, w).

use gemma4c_dsl::prelude::*;

/// The bfloat16 of a word of two.
#[device]
pub fn brain_in(word: u32, index: u32) -> f32 {
    f32::from_bits(word >> (index % 2 * 16) << 16)
}

/// One bfloat16 for each 32 values, of units of 32.
#[device]
pub fn factors_brain(side: U32x4, number: u32) -> U32x4 {
    u32x4(brain_in(side.x, number).to_bits(), 0, 0, 0)
}

/// The bfloat16 of a word of two as a pair of f16, twice the same.
#[device]
pub fn brain_as_f16(word: u32, index: u32) -> u32 {
    let factor = brain_in(word, index);
    pack_f16(factor, factor)
}

/// The bfloat16 at `at` of a block.
#[device]
pub fn brain_at(block: Weights<u8>, at: u32) -> f32 {
    load::<BF16>(block, at).to_f32()
}
