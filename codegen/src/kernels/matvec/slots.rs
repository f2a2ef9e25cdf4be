//! What fills the product's slots besides a weight format: how the activations arrive, and what becomes of a result.
//!
//! Activations arrive as float4 vectors, or as int8 that an earlier kernel made. Every block computes the norms anew: the vector is a
//! few kilobytes of L2, and a kernel less.

use gemma4c_dsl::prelude::*;

use crate::kernels::gelu::gelu;
use crate::kernels::quantise::quantise4;

// ---- prologues ------------------------------------------------------------------------------------------------------

/// Four floats as words.
#[device]
pub fn as_words(x: F32x4) -> U32x4 {
    u32x4(x.x.to_bits(), x.y.to_bits(), x.z.to_bits(), x.w.to_bits())
}

#[device]
pub fn square_sum(x: F32x4) -> f32 {
    x.w.mul_add(x.w, x.z.mul_add(x.z, x.y.mul_add(x.y, x.x * x.x)))
}

/// Four values.
#[device]
pub fn four_of(at: u32, x: Input<f32>) -> F32x4 {
    load::<F32x4>(x, at)
}

/// Nothing is read here.
#[device]
pub fn no_four(at: u32) -> F32x4 {
    F32x4::ZERO
}

/// Sixteen codes that an earlier kernel made.
#[device]
pub fn ready_codes(part: u32, xq: Input<u32>) -> U32x4 {
    load::<U32x4>(xq, part * 4)
}

/// Their group's scale and sum.
#[device]
pub fn ready_scale(group: u32, xscale: Input<f32>, xsum: Input<i32>) -> U32x2 {
    u32x2(xscale[group].to_bits(), xsum[group] as u32)
}

#[device]
pub fn no_part(part: u32) -> U32x4 {
    U32x4::ZERO
}

#[device]
pub fn no_group(group: u32) -> U32x2 {
    U32x2::ZERO
}

/// Four values times a norm's factor and weights.
#[device]
pub fn weighted(x: F32x4, weight: F32x4, factor: f32) -> F32x4 {
    f32x4(x.x * factor * weight.x, x.y * factor * weight.y, x.z * factor * weight.z, x.w * factor * weight.w)
}

/// Four values of the residual after a layer's part: `(x + update * factor) * by`.
#[device]
pub fn with_update(x: F32x4, update: F32x4, factor: f32, by: f32) -> F32x4 {
    f32x4(
        update.x.mul_add(factor, x.x) * by,
        update.y.mul_add(factor, x.y) * by,
        update.z.mul_add(factor, x.z) * by,
        update.w.mul_add(factor, x.w) * by,
    )
}

/// Times a weight of one element: a layer's scale.
#[device]
pub fn scaled_by(value: f32, weight: Weights<f32>) -> f32 {
    value * weight[0u32]
}

/// The residual as it is now, for whoever reads it later. Not the memory it came from: other blocks still read that.
#[device]
pub fn leave_residual(value: F32x4, at: u32, out: Output<f32>) -> F32x4 {
    store(out, at, value);
    value
}

// ---- epilogues ------------------------------------------------------------------------------------------------------

/// Joins a gate and its row above: GeGLU.
#[device]
pub fn geglu(value: f32, up: f32) -> f32 {
    gelu(value) * up
}

/// `gelu(value)`
#[device]
pub fn then_gelu(value: f32, row: u32) -> f32 {
    gelu(value)
}

/// Times a constant.
#[device(fills(value, row))]
pub fn then_scale(value: f32, row: u32, scale: f32) -> f32 {
    value * scale
}

/// Times a weight of one element: a layer's scale.
#[device]
pub fn then_scale_by(value: f32, row: u32, scale: Weights<f32>) -> f32 {
    value * scale[0u32]
}

/// Times what another kernel made: the per-layer input.
#[device]
pub fn then_times(value: f32, row: u32, by: Input<f32>) -> f32 {
    value * by[row]
}

/// Plus what another kernel made.
#[device]
pub fn then_add(value: f32, row: u32, addend: Input<f32>) -> f32 {
    value + addend[row]
}

/// Squashed into `-cap..cap`: the logits.
#[device(fills(value, row))]
pub fn then_softcap(value: f32, row: u32, cap: f32) -> f32 {
    cap * (value / cap).tanh()
}

// ---- results ---------------------------------------------------------------------------------------------------------

/// Leaves four neighbouring results as int8, eight lanes to a group. A collective of the warp.
#[device]
pub fn leave_codes(four: F32x4, at: u32, xq: Output<i8>, xscale: Output<f32>, xsum: Output<i32>) -> F32x4 {
    let codes = quantise4(four);
    if lane_id() < 8 {
        store(xq, at, codes.x);
    }
    if lane_id() == 0 {
        xscale[at / 32] = f32::from_bits(codes.y);
        xsum[at / 32] = codes.z as i32;
    }
    four
}
