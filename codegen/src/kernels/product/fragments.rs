//! Codes of weights in the registers of a warpgroup to the left operands of its products.
//!
//! A tensor core wants pairs of neighbouring values, spread over the four lanes of a quad; a lane loads 16 bytes in a row. The quad therefore transposes: codes before
//! they are decoded, where a type's codes allow it (RAW), which is half the shuffles; else the values. The scales of RAW types are f16 or,
//! BRAIN, bfloat16.

use gemma4c_dsl::prelude::*;

use crate::kernels::formats::factors::brain_in;
pub use crate::kernels::formats::pieces::raw_pair;
use crate::kernels::matvec::formats::half_in;

/// Words i of the four lanes of a quad to lane i: lane s's becomes word s. A collective of the warp.
#[device]
pub fn transpose_quad(words: U32x4) -> U32x4 {
    let odd = lane_id() % 2 == 1;
    let near = shfl_xor(if odd { words.x } else { words.y }, 1);
    let far = shfl_xor(if odd { words.z } else { words.w }, 1);
    let a = if odd { near } else { words.x };
    let b = if odd { words.y } else { near };
    let c = if odd { far } else { words.z };
    let d = if odd { words.w } else { far };
    let upper = lane_id() % 4 >= 2;
    let first = shfl_xor(if upper { a } else { c }, 2);
    let second = shfl_xor(if upper { b } else { d }, 2);
    if upper { u32x4(first, second, c, d) } else { u32x4(a, b, first, second) }
}

/// Word `index` of four.
#[device]
pub fn word_in(words: U32x4, index: u32) -> u32 {
    if index == 0 {
        words.x
    } else if index == 1 {
        words.y
    } else if index == 2 {
        words.z
    } else {
        words.w
    }
}

/// Decodes a step, from part `from` of the registers to the left operands of its four products, half `half` of all. A collective of the warp.
#[device(slots(decode(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4))]
pub fn decode_step<const UNIT: u32, const RAW: bool, const BRAIN: bool>(
    held: &mut Regs<U32x4>,
    beside: &mut Regs<U32x4>,
    units: &mut Regs<u32>,
    left: &mut Regs<U32x4>,
    from: u32,
    half: u32,
) {
    // Word 4 b + 2 h + r is of product b: row r, of its 16 values the first eight (h = 0) or the others.
    let mut words = regs(0u32, 16);
    if RAW {
        let mut factors = regs(0.0f32, 4);
        let mut offsets = regs(0.0f32, 4);
        let zero = if UNIT == 16 { 32768.0f32 + 128.0f32 } else { 32768.0f32 + 8.0f32 };
        #[unroll]
        for i in 0u32..4 {
            let word = beside[from * 4 + i / 2].x;
            factors[i] = if BRAIN { brain_in(word, i % 2) } else { half_in(word, i % 2) };
            offsets[i] = -zero * factors[i];
        }
        #[unroll]
        for i in 0u32..if UNIT == 32 { 1 } else { 2 } {
            let own = held[from * 4 + i];
            let pairs = transpose_quad(u32x4(
                byte_perm(own.x, own.z, 0x5410),
                byte_perm(own.x, own.z, 0x7632),
                byte_perm(own.y, own.w, 0x5410),
                byte_perm(own.y, own.w, 0x7632),
            ));
            #[unroll]
            for s in 0u32..4 {
                let word = word_in(pairs, s);
                if UNIT == 32 {
                    // Lane s had unit s % 2 of row s / 2: products 2 u and 2 u + 1, in the lower and upper nibbles.
                    let row = s / 2;
                    let unit = s % 2;
                    let factor = factors[row * 2 + unit];
                    let offset = offsets[row * 2 + unit];
                    words[unit * 8 + row] = raw_pair(word & 0x0f0f0f0f, 0, factor, offset);
                    words[unit * 8 + 2 + row] = raw_pair(word & 0x0f0f0f0f, 2, factor, offset);
                    words[unit * 8 + 4 + row] = raw_pair(word >> 4 & 0x0f0f0f0f, 0, factor, offset);
                    words[unit * 8 + 6 + row] = raw_pair(word >> 4 & 0x0f0f0f0f, 2, factor, offset);
                } else {
                    // Lane s had the values of product s.
                    let factor = factors[i * 2 + s / 2];
                    let offset = offsets[i * 2 + s / 2];
                    words[s * 4 + i] = raw_pair(word ^ 0x80808080, 0, factor, offset);
                    words[s * 4 + 2 + i] = raw_pair(word ^ 0x80808080, 2, factor, offset);
                }
            }
        }
    } else {
        #[unroll]
        for set in 0u32..4 {
            // Eight values at a time: of the one unit, or of the row's 16 values.
            let at = from * 4 + if UNIT == 32 { 0 } else { set * 8 / UNIT };
            let eighth = if UNIT == 32 { set } else { set * 8 % UNIT / 8 };
            let eight = transpose_quad(decode(held[at], beside[at], units[at], eighth));
            #[unroll]
            for s in 0u32..4 {
                if UNIT == 32 {
                    words[s % 2 * 8 + set / 2 * 4 + set % 2 * 2 + s / 2] = word_in(eight, s);
                } else {
                    words[s * 4 + set % 2 * 2 + set / 2] = word_in(eight, s);
                }
            }
        }
    }
    #[unroll]
    for b in 0u32..4 {
        left[half * 4 + b] = u32x4(words[b * 4], words[b * 4 + 1], words[b * 4 + 2], words[b * 4 + 3]);
    }
}
