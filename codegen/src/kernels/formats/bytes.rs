//! Signed bytes with a bfloat16 scale for each 32, as checkpoints have them: what Q8_0 is, with another scale.

use gemma4c_dsl::prelude::*;

use super::description::{Format, Kernels, Picked, TensorFormat};
use super::factors::{brain_as_f16, brain_at, brain_in, factors_brain16};
use super::pieces::{bytes_signed, dot16, eight_bytes, finish, part_words, raw_pair, scaled8, side_q8_0};
use crate::kernels::matvec::parts::{Unit, UnitActivations};

#[device]
pub fn dot_i8(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32 {
    finish(dot16(unit.codes, x.low, 0) as f32, factors_brain16(unit.side, number), x.scale, total)
}

/// The dot of a block of 32 values, of which two neighbouring lanes have 16 each: both get all of it. A collective of
/// the warp.
#[device]
pub fn dot_i8_joined(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32 {
    let own = dot16(unit.codes, x.low, 0);
    finish((own + shfl_xor(own, 1)) as f32, factors_brain16(unit.side, number), x.scale, total)
}

/// The same for two rows at once: the even lane gets the first row's, the odd lane the second's. A collective of the
/// warp.
#[device]
pub fn two_dots_i8(first: Unit, second: Unit, number: u32, x: UnitActivations, total: f32) -> f32 {
    let is_odd = lane_id() % 2 == 1;
    let of_first = dot16(first.codes, x.low, 0);
    let of_second = dot16(second.codes, x.low, 0);
    let other = shfl_xor(if is_odd { of_first } else { of_second }, 1);
    let own = if is_odd { of_second } else { of_first };
    let side = if is_odd { second.side } else { first.side };
    finish((own + other) as f32, factors_brain16(side, number), x.scale, total)
}

#[device]
pub fn decode_i8(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    let words = part_words(codes, part);
    scaled8(u32x2(words.x ^ 0x80808080, words.y ^ 0x80808080), 128.0, brain_in(side.x, unit / 2))
}

#[device]
pub fn decode_i8_by_fma(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    let words = part_words(codes, part);
    eight_bytes(u32x2(words.x ^ 0x80808080, words.y ^ 0x80808080), 128.0, brain_in(side.x, unit / 2))
}

/// Four bytes: one product's part.
#[device]
pub fn raw_i8(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    let factor = brain_in(side.x, unit);
    let offset = -(32768.0f32 + 128.0f32) * factor;
    let word = codes.x ^ 0x80808080;
    u32x4(raw_pair(word, 0, factor, offset), raw_pair(word, 2, factor, offset), 0, 0)
}

/// Four bytes in f16: in the mantissa of 1024 one is 1024 + 128 + n. A 128th of a value is multiplied by 128 times the
/// scale, which is exact in f16 from 2^-21 on.
#[device]
pub fn halves_i8(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    let factor = brain_as_f16(side.x, unit, 128.0);
    let word = codes.x ^ 0x80808080;
    // 1 / 128 and -9.
    u32x4(
        multiply_f16(fma_f16(byte_perm(word, 0x64646464, 0x4140), 0x20002000, 0xc880c880), factor),
        multiply_f16(fma_f16(byte_perm(word, 0x64646464, 0x4342), 0x20002000, 0xc880c880), factor),
        0,
        0,
    )
}

#[device]
pub fn value_i8(at: u64, tensor: Weights<u8>) -> f32 {
    let block = tensor.offset(at / 32 * 34);
    let code = block[2 + (at % 32) as u32] as i8 as i32;
    brain_at(block, 0) * code as f32
}

pub fn i8() -> Kernels {
    Kernels {
        matvec: Format {
            unit: 16,
            lane_dot: dot_i8_joined::DEF,
            two_dots: two_dots_i8::DEF,
            joined: true,
            ..Format::integers(4, side_q8_0::DEF, dot_i8::DEF)
        },
        tensor: Some(TensorFormat {
            parts: 2,
            classes: 4,
            ..TensorFormat::integers(4, bytes_signed::DEF, factors_brain16::DEF)
        }),
        decode: decode_i8::DEF,
        decode_by_fma: decode_i8_by_fma::DEF,
        picked: Some(Picked { to_bf16: raw_i8::DEF, to_f16: halves_i8::DEF, centred: true }),
    }
}
