//! One value of a tensor in its GGUF layout, of any type.
//!
//! Kernels that read few values, or that need to be plainly right rather than fast, take a tensor in its GGUF layout
//! through a slot `value(at: u64) -> f32`: element `at` of the tensor, counted over all rows. The arithmetic is that of
//! [`gemma4c_blocks::reference`], so the values are the same bits; the tests hold each function against that table.

use gemma4c_blocks::DType;
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{DeviceDef, Filled};

use super::formats;
pub use super::formats::pieces::{half_at, plane_bits};
use super::matvec::formats::{iq4_levels, no_kernels};

/// Two of eight 6-bit integers packed into 12 bytes: the scale (x) and the minimum (y) of group `k`.
#[device]
pub fn packed6(block: Weights<u8>, at: u32, k: u32) -> U32x2 {
    let low = block[at + k] as u32;
    let middle = block[at + k % 4 + 4] as u32;
    let high = block[at + k % 4 + 8] as u32;
    let first = block[at + k % 4] as u32;
    let scale = if k < 4 { low & 63 } else { high & 15 | first >> 6 << 4 };
    let minimum = if k < 4 { middle & 63 } else { high >> 4 | middle >> 6 << 4 };
    u32x2(scale, minimum)
}

/// One of the 16 levels of the IQ4 formats.
#[device]
pub fn iq4_level(code: u32) -> i32 {
    signed_byte_of(iq4_levels(code), 0)
}

#[device]
pub fn value_f32(at: u64, tensor: Weights<f32>) -> f32 {
    tensor[at]
}

#[device]
pub fn value_f16(at: u64, tensor: Weights<F16>) -> f32 {
    tensor[at].to_f32()
}

#[device]
pub fn value_bf16(at: u64, tensor: Weights<BF16>) -> f32 {
    tensor[at].to_f32()
}

#[device]
pub fn value_q4_0(at: u64, tensor: Weights<u8>) -> f32 {
    let block = tensor.offset(at / 32 * 18);
    let code = plane_bits(block, (at % 32) as u32, 2, 4, 16) as i32 - 8;
    half_at(block, 0) * code as f32
}

#[device]
pub fn value_q4_1(at: u64, tensor: Weights<u8>) -> f32 {
    let block = tensor.offset(at / 32 * 20);
    let code = plane_bits(block, (at % 32) as u32, 4, 4, 16);
    half_at(block, 0) * code as f32 + half_at(block, 2)
}

#[device]
pub fn value_q5_0(at: u64, tensor: Weights<u8>) -> f32 {
    let block = tensor.offset(at / 32 * 22);
    let i = (at % 32) as u32;
    let code = plane_bits(block, i, 6, 4, 16) | plane_bits(block, i, 2, 1, 1) << 4;
    half_at(block, 0) * (code as i32 - 16) as f32
}

#[device]
pub fn value_q5_1(at: u64, tensor: Weights<u8>) -> f32 {
    let block = tensor.offset(at / 32 * 24);
    let i = (at % 32) as u32;
    let code = plane_bits(block, i, 8, 4, 16) | plane_bits(block, i, 4, 1, 1) << 4;
    half_at(block, 0) * code as f32 + half_at(block, 2)
}

#[device]
pub fn value_q8_0(at: u64, tensor: Weights<u8>) -> f32 {
    let block = tensor.offset(at / 32 * 34);
    let code = block[2 + (at % 32) as u32] as i8 as i32;
    half_at(block, 0) * code as f32
}

#[device]
pub fn value_q4_k(at: u64, tensor: Weights<u8>) -> f32 {
    let block = tensor.offset(at / 256 * 144);
    let i = (at % 256) as u32;
    let group = packed6(block, 4, i / 32);
    let code = plane_bits(block, i, 16, 4, 32);
    half_at(block, 0) * group.x as f32 * code as f32 + -(half_at(block, 2) * group.y as f32)
}

#[device]
pub fn value_q5_k(at: u64, tensor: Weights<u8>) -> f32 {
    let block = tensor.offset(at / 256 * 176);
    let i = (at % 256) as u32;
    let group = packed6(block, 4, i / 32);
    let code = plane_bits(block, i, 48, 4, 32) | plane_bits(block, i, 16, 1, 32) << 4;
    half_at(block, 0) * group.x as f32 * code as f32 + -(half_at(block, 2) * group.y as f32)
}

#[device]
pub fn value_q6_k(at: u64, tensor: Weights<u8>) -> f32 {
    let block = tensor.offset(at / 256 * 210);
    let i = (at % 256) as u32;
    let code = plane_bits(block, i, 0, 4, 64) | plane_bits(block, i, 128, 2, 32) << 4;
    let scale = block[192 + i / 16] as i8 as i32;
    half_at(block, 208) * scale as f32 * (code as i32 - 32) as f32
}

#[device]
pub fn value_iq4_nl(at: u64, tensor: Weights<u8>) -> f32 {
    let block = tensor.offset(at / 32 * 18);
    let code = plane_bits(block, (at % 32) as u32, 2, 4, 16);
    half_at(block, 0) * iq4_level(code) as f32
}

#[device]
pub fn value_iq4_xs(at: u64, tensor: Weights<u8>) -> f32 {
    let block = tensor.offset(at / 256 * 136);
    let i = (at % 256) as u32;
    let k = i / 32;
    let four_bits = block[4 + k / 2] as u32 >> (4 * (k % 2)) & 15;
    let two_bits = load::<u16>(block, 2) as u32 >> (2 * k) & 3;
    let scale = (four_bits | two_bits << 4) as i32 - 32;
    half_at(block, 0) * scale as f32 * iq4_level(plane_bits(block, i, 8, 4, 16)) as f32
}

/// What fills the slot `value` for tensors of that type.
pub fn value(dtype: DType) -> &'static DeviceDef {
    value_arguments(dtype, ()).function
}

/// The same with its argument: the tensor's blocks in the GGUF layout.
pub fn value_arguments<M>(dtype: DType, tensor: M) -> Filled<M> {
    match dtype {
        DType::F32 => value_f32::Arguments { tensor }.into(),
        DType::F16 => value_f16::Arguments { tensor }.into(),
        DType::BF16 => value_bf16::Arguments { tensor }.into(),
        DType::Q4_0 => value_q4_0::Arguments { tensor }.into(),
        DType::Q4_1 => value_q4_1::Arguments { tensor }.into(),
        DType::Q5_0 => value_q5_0::Arguments { tensor }.into(),
        DType::Q5_1 => value_q5_1::Arguments { tensor }.into(),
        DType::Q8_0 => value_q8_0::Arguments { tensor }.into(),
        DType::Q4K => value_q4_k::Arguments { tensor }.into(),
        DType::Q5K => value_q5_k::Arguments { tensor }.into(),
        DType::Q6K => value_q6_k::Arguments { tensor }.into(),
        DType::IQ4NL => value_iq4_nl::Arguments { tensor }.into(),
        DType::IQ4XS => value_iq4_xs::Arguments { tensor }.into(),
        _ => formats::value_arguments(dtype, tensor).unwrap_or_else(|| no_kernels(dtype)),
    }
}
