//! Codes to bf16 or f16, in the order in which tensor cores take them: lane q of a quad has values `2 q`, `2 q + 1`,
//! `2 q + 8` and `2 q + 9` of each product of 16; or, where whoever multiplies has activations in that order too, the
//! four neighbours from `4 q` on (NEAR), which are one word of codes.
//!
//! Of types whose codes can be picked apart (RAW) a lane reads the words that have its values, and decodes nothing
//! else. Of the others it decodes a unit of its own, eight values at a time, and the quad exchanges them.
//!
//! Values are those of the blocks, rounded once.

use gemma4c_blocks::DType;
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{DeviceDef, ElementType};

use super::tile::{row_words, unit_at};
use super::views::GemmRing;
use crate::kernels::formats;
use crate::kernels::formats::Picked;
use crate::kernels::matvec::formats::half_in;
use crate::kernels::product::decode::{decode, eight_bytes};
use crate::kernels::product::fragments::{raw_pair, transpose_quad, word_in};

/// Four bytes of a block, of which both nibbles are values: two products' parts.
#[device]
pub fn raw_q4_0(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    let nibbles = u32x2(codes.x & 0x0f0f0f0f, codes.x >> 4 & 0x0f0f0f0f);
    eight_bytes(nibbles, 8.0, half_in(side.x, unit))
}

/// Four bytes: one product's part.
#[device]
pub fn raw_q8_0(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    let factor = half_in(side.x, unit);
    let offset = -(32768.0f32 + 128.0f32) * factor;
    let word = codes.x ^ 0x80808080;
    u32x4(raw_pair(word, 0, factor, offset), raw_pair(word, 2, factor, offset), 0, 0)
}

/// Both nibbles of bytes 0, 2, 1 and 3 in f16. A lower one in the mantissa of 1024 is 1024 + n, an upper one
/// 1024 + 16 n; everything is exact until the last operation.
#[device]
pub fn halves_q4_0(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    let factor = byte_perm(side.x, 0, if unit % 2 == 1 { 0x3232 } else { 0x1010 });
    let far = codes.x >> 8;
    // 1 and -1032; 1 / 16 and -72.
    u32x4(
        multiply_f16(fma_f16(and_or(codes.x, 0x000f000f, 0x64006400), 0x3c003c00, 0xe408e408), factor),
        multiply_f16(fma_f16(and_or(far, 0x000f000f, 0x64006400), 0x3c003c00, 0xe408e408), factor),
        multiply_f16(fma_f16(and_or(codes.x, 0x00f000f0, 0x64006400), 0x2c002c00, 0xd480d480), factor),
        multiply_f16(fma_f16(and_or(far, 0x00f000f0, 0x64006400), 0x2c002c00, 0xd480d480), factor),
    )
}

/// Four bytes in f16: in the mantissa of 1024 one is 1024 + 128 + n.
#[device]
pub fn halves_q8_0(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    let factor = byte_perm(side.x, 0, if unit % 2 == 1 { 0x3232 } else { 0x1010 });
    let word = codes.x ^ 0x80808080;
    u32x4(
        multiply_f16(fma_f16(byte_perm(word, 0x64646464, 0x4140), 0x3c003c00, 0xe480e480), factor),
        multiply_f16(fma_f16(byte_perm(word, 0x64646464, 0x4342), 0x3c003c00, 0xe480e480), factor),
        0,
        0,
    )
}

/// Whether a lane picks its values out of codes of the type; their scales, if any, are copied as codes are.
pub fn is_raw(dtype: DType, k: u32) -> bool {
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => true,
        _ => is_scaled(dtype, k),
    }
}

/// Whether a row of the type has an f16 scale for each 32 values, in whole words, and nothing else beside its codes.
pub fn is_scaled(dtype: DType, k: u32) -> bool {
    let scaled = matches!(dtype, DType::Q8_0 | DType::Q4_0) || picked(dtype).is_some();
    scaled && k.is_multiple_of(64)
}

/// What decodes the words that a lane picks out of codes of a type, where [`formats`] has it.
fn picked(dtype: DType) -> Option<Picked> {
    formats::of(dtype)?.picked
}

/// The function for a type's codes, to bf16, or to f16 where rows are scaled.
pub fn decode_of(dtype: DType, k: u32, to: ElementType) -> &'static DeviceDef {
    match (dtype, to) {
        (DType::Q4_0, ElementType::F16) => halves_q4_0::DEF,
        (DType::Q8_0, ElementType::F16) => halves_q8_0::DEF,
        (DType::Q4_0, _) if is_scaled(dtype, k) => raw_q4_0::DEF,
        (DType::Q8_0, _) if is_scaled(dtype, k) => raw_q8_0::DEF,
        _ => match picked(dtype).filter(|_| is_scaled(dtype, k)) {
            Some(picked) if to == ElementType::F16 => picked.to_f16,
            Some(picked) => picked.to_bf16,
            None => decode(dtype),
        },
    }
}

/// Where unit `unit` of row `i` of this lane's rows lies in a step's codes.
#[device]
pub fn unit_place<const UNIT: u32>(i: u32, unit: u32) -> u32 {
    i * 8 * row_words(UNIT) + unit * 4
}

/// This lane's four bytes of a unit, in the order of `selector`: 0, 1, 4 and 5 stand for them.
#[device]
pub fn own_bytes<const UNIT: u32, const NEAR: bool>(codes: Shared<u32>, i: u32, unit: u32, selector: u32) -> u32 {
    let at = unit_place(i, unit);
    let mut bytes = codes[at];
    if NEAR {
        // Bytes 4 and 5 are 2 and 3 of the word.
        bytes = if selector == 0x5140 { byte_perm(bytes, 0, 0x3120) } else { bytes };
    } else {
        bytes = byte_perm(bytes, codes[at + 2], selector + lane_id() % 2 * 0x2222);
    }
    bytes
}

/// Both scales of a word of row `i`: those of block `block` and its neighbour.
#[device]
pub fn own_scales(scales: Shared<u32>, i: u32, block: u32) -> U32x4 {
    u32x4(scales[i * 16 + block / 2], 0, 0, 0)
}

/// The part of row `i` in products `2 block` and `2 block + 1` of a step: of nibbles with a scale.
#[device(slots(decode(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4))]
pub fn of_nibbles<const UNIT: u32, const BF: bool>(ring: GemmRing, i: u32, block: u32) -> U32x4 {
    let bytes = own_bytes(ring.codes, i, block, if BF { 0x5410 } else { 0x5140 });
    decode(u32x4(bytes, 0, 0, 0), own_scales(ring.scales, i, block), block, 0)
}

/// The same of bytes with a scale.
#[device(slots(decode(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4))]
pub fn of_bytes<const UNIT: u32>(ring: GemmRing, i: u32, block: u32) -> U32x4 {
    let scales = own_scales(ring.scales, i, block);
    let first = decode(u32x4(own_bytes(ring.codes, i, block * 2, 0x5410), 0, 0, 0), scales, block, 0);
    let second = decode(u32x4(own_bytes(ring.codes, i, block * 2 + 1, 0x5410), 0, 0, 0), scales, block, 0);
    u32x4(first.x, first.y, second.x, second.y)
}

/// The same of 16-bit floats.
#[device(slots(decode(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4))]
pub fn of_halves<const UNIT: u32, const NEAR: bool>(codes: Shared<u32>, i: u32, block: u32) -> U32x4 {
    let at = unit_place(i, block * 4);
    let words = if NEAR {
        words_of(load::<U32x2>(codes, at), load::<U32x2>(codes, at + 8))
    } else {
        u32x4(codes[at], codes[at + 4], codes[at + 8], codes[at + 12])
    };
    decode(words, U32x4::ZERO, 0, 0)
}

/// The same of f32.
#[device(slots(decode(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4))]
pub fn of_floats<const UNIT: u32, const NEAR: bool>(codes: Shared<u32>, i: u32, block: u32) -> U32x4 {
    let first = decode(own_floats(codes, unit_place(i, block * 8)), U32x4::ZERO, 0, 0);
    let second = decode(own_floats(codes, unit_place(i, block * 8 + 4)), U32x4::ZERO, 0, 0);
    u32x4(first.x, first.y, second.x, second.y)
}

/// This lane's four floats of a product.
#[device]
pub fn own_floats<const NEAR: bool>(codes: Shared<u32>, at: u32) -> U32x4 {
    if NEAR { load::<U32x4>(codes, at) } else { words_of(load::<U32x2>(codes, at), load::<U32x2>(codes, at + 8)) }
}

/// Two pairs of words as one vector.
#[device]
pub fn words_of(low: U32x2, high: U32x2) -> U32x4 {
    u32x4(low.x, low.y, high.x, high.y)
}

/// The left operands of products `2 block` and `2 block + 1` of a step, four words each.
#[device(slots(decode(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4))]
pub fn decode_block<const UNIT: u32, const BF: bool>(ring: GemmRing, left: &mut Regs<u32>, block: u32) {
    #[unroll]
    for i in 0u32..2 {
        let mut values = U32x4::ZERO;
        if UNIT == 32 {
            values = of_nibbles(decode, ring, i, block);
        }
        if UNIT == 16 {
            values = of_bytes(decode, ring, i, block);
        }
        if UNIT == 8 {
            values = of_halves(decode, ring.codes, i, block);
        }
        if UNIT == 4 {
            values = of_floats(decode, ring.codes, i, block);
        }
        left[block * 8 + i] = values.x;
        left[block * 8 + 2 + i] = values.y;
        left[block * 8 + 4 + i] = values.z;
        left[block * 8 + 6 + i] = values.w;
    }
}

/// The left operands of all products of a step, of a type that is not RAW: lane s has unit s and, where units have 16
/// values, s + 4. A collective of the warp.
#[device(thin(decode_thin_and_exchange), slots(decode(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4))]
pub fn decode_and_exchange<const UNIT: u32>(
    ring: GemmRing,
    sides: &Regs<U32x4>,
    rows: U32x2,
    left: &mut Regs<u32>,
    step: u32,
    k: u32,
) {
    #[unroll]
    for i in 0u32..2 {
        #[unroll]
        for l in 0..32 / UNIT {
            let codes = load::<U32x4>(ring.codes, unit_place(i, l * 4));
            let unit = unit_at(if i == 0 { rows.x } else { rows.y }, step, l, k);
            #[unroll]
            for part in 0..UNIT / 8 {
                let eight = transpose_quad(decode(codes, sides[i * (32 / UNIT) + l], unit, part));
                #[unroll]
                for s in 0u32..4 {
                    let product = if UNIT == 32 { s * 2 + part / 2 } else { l * 4 + s };
                    left[product * 4 + part % 2 * 2 + i] = word_in(eight, s);
                }
            }
        }
    }
}

/// The same of units of 8 bytes: lane s has unit s.
#[device(slots(decode(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4))]
pub fn decode_thin_and_exchange<const UNIT: u32>(
    ring: GemmRing,
    sides: &Regs<U32x4>,
    rows: U32x2,
    left: &mut Regs<u32>,
    step: u32,
    k: u32,
) {
    #[unroll]
    for i in 0u32..2 {
        let two = load::<U32x2>(ring.codes, i * 8 * row_words(UNIT));
        let codes = u32x4(two.x, two.y, 0, 0);
        let unit = unit_at(if i == 0 { rows.x } else { rows.y }, step, 0, k);
        #[unroll]
        for part in 0u32..4 {
            let eight = transpose_quad(decode(codes, sides[i], unit, part));
            #[unroll]
            for s in 0u32..4 {
                left[(s * 2 + part / 2) * 4 + part % 2 * 2 + i] = word_in(eight, s);
            }
        }
    }
}
