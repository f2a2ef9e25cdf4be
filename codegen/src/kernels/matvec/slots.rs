//! What fills the product's slots besides a weight format: how the activations arrive, and what becomes of a result.
//!
//! Activations arrive piece by piece: eight values for integer formats, four for floats (the constant `INTEGER` says which).
//! `*_energy` gives the sum of a piece's squares for the norms a prologue needs, `*_input` the piece itself: codes (x, y),
//! scale (z) and sum (w) of `quantise8`, or four floats as bits. Every block computes the norms anew: the vector is a few
//! kilobytes of L2, and a kernel less. `kept` is false in lanes that only complete a warp.

use gemma4c_dsl::prelude::*;

use crate::kernels::gelu::gelu;
use crate::kernels::quantise::quantise8;

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

/// No norm is asked for.
#[device]
pub fn no_energy(piece: u32, round: i32, factor: f32) -> f32 {
    0.0
}

/// Codes, scales and sums that an earlier kernel made.
#[device]
pub fn int8_input<const INTEGER: bool>(
    piece: u32,
    kept: bool,
    first: f32,
    factor: f32,
    xq: Input<u32>,
    xscale: Input<f32>,
    xsum: Input<i32>,
) -> U32x4 {
    require!(INTEGER);
    let codes = load::<U32x2>(xq, piece * 2);
    u32x4(codes.x, codes.y, xscale[piece / 4].to_bits(), xsum[piece / 4] as u32)
}

/// Floats as they are.
#[device]
pub fn f32_input<const INTEGER: bool>(piece: u32, kept: bool, first: f32, factor: f32, x: Input<f32>) -> U32x4 {
    if INTEGER {
        quantise8(load::<F32x4>(x, piece * 8), load::<F32x4>(x, piece * 8 + 4))
    } else {
        load::<U32x4>(x, piece * 4)
    }
}

#[device]
pub fn norm_energy<const INTEGER: bool>(piece: u32, round: i32, factor: f32, x: Input<f32>) -> f32 {
    if INTEGER {
        square_sum(load::<F32x4>(x, piece * 8)) + square_sum(load::<F32x4>(x, piece * 8 + 4))
    } else {
        square_sum(load::<F32x4>(x, piece * 4))
    }
}

/// Four values times the norm's factor and weights.
#[device]
pub fn normed4(x: F32x4, at: u32, factor: f32, norm: Weights<f32>) -> F32x4 {
    let weight = load::<F32x4>(norm, at);
    f32x4(x.x * factor * weight.x, x.y * factor * weight.y, x.z * factor * weight.z, x.w * factor * weight.w)
}

/// The RMS norm of `x`.
#[device]
pub fn normed_input<const INTEGER: bool>(
    piece: u32,
    kept: bool,
    first: f32,
    factor: f32,
    x: Input<f32>,
    norm: Weights<f32>,
) -> U32x4 {
    if INTEGER {
        quantise8(
            normed4(load::<F32x4>(x, piece * 8), piece * 8, factor, norm),
            normed4(load::<F32x4>(x, piece * 8 + 4), piece * 8 + 4, factor, norm),
        )
    } else {
        as_words(normed4(load::<F32x4>(x, piece * 4), piece * 4, factor, norm))
    }
}

/// Four values of the residual stream after a layer's part: `x + RMS norm of update`, times `scale[0]` where it is SCALED.
#[device]
pub fn residual4<const SCALED: bool>(
    at: u32,
    factor: f32,
    x: Input<f32>,
    update: Input<f32>,
    post_norm: Weights<f32>,
    scale: Weights<f32>,
) -> F32x4 {
    let old = load::<F32x4>(x, at);
    let new = normed4(load::<F32x4>(update, at), at, factor, post_norm);
    let mut by = 1.0f32;
    if SCALED {
        by = scale[0u32];
    }
    f32x4((old.x + new.x) * by, (old.y + new.y) * by, (old.z + new.z) * by, (old.w + new.w) * by)
}

/// The update's squares.
#[device]
pub fn residual_energy<const INTEGER: bool>(piece: u32, round: i32, factor: f32, update: Input<f32>) -> f32 {
    norm_energy(piece, round, factor, update)
}

/// Round 0: the update's squares; round 1: those of the residual stream that it leads to.
#[device]
pub fn residual_norm_energy<const INTEGER: bool>(
    piece: u32,
    round: i32,
    factor: f32,
    x: Input<f32>,
    update: Input<f32>,
    post_norm: Weights<f32>,
    scale: Weights<f32>,
) -> f32 {
    let width: u32 = if INTEGER { 8 } else { 4 };
    let mut sum = 0.0f32;
    #[unroll]
    for at in (piece * width..piece * width + width).by(4) {
        if round == 0 {
            sum = sum + square_sum(load::<F32x4>(update, at));
        } else {
            sum = sum + square_sum(residual4(at, factor, x, update, post_norm, scale));
        }
    }
    sum
}

/// The residual stream after a layer's part, as it is. The first block leaves it in `stream`, which is not `x`: other blocks
/// still read it.
#[device]
pub fn residual_input<const INTEGER: bool>(
    piece: u32,
    kept: bool,
    first: f32,
    factor: f32,
    x: Input<f32>,
    update: Input<f32>,
    post_norm: Weights<f32>,
    scale: Weights<f32>,
    stream: Output<f32>,
) -> U32x4 {
    let at = if INTEGER { piece * 8 } else { piece * 4 };
    let low = residual4(at, factor, x, update, post_norm, scale);
    if kept && block_idx() == 0 {
        store(stream, at, low);
    }
    let arrived: U32x4;
    if INTEGER {
        let high = residual4(at + 4, factor, x, update, post_norm, scale);
        if kept && block_idx() == 0 {
            store(stream, at + 4, high);
        }
        arrived = quantise8(low, high);
    } else {
        arrived = as_words(low);
    }
    arrived
}

/// The RMS norm of the residual stream after a layer's part. The first block leaves that stream in `stream`, which is not `x`:
/// other blocks still read it.
#[device]
pub fn residual_normed_input<const INTEGER: bool>(
    piece: u32,
    kept: bool,
    first: f32,
    factor: f32,
    x: Input<f32>,
    update: Input<f32>,
    post_norm: Weights<f32>,
    scale: Weights<f32>,
    norm: Weights<f32>,
    stream: Output<f32>,
) -> U32x4 {
    let at = if INTEGER { piece * 8 } else { piece * 4 };
    let low = residual4(at, first, x, update, post_norm, scale);
    if kept && block_idx() == 0 {
        store(stream, at, low);
    }
    let arrived: U32x4;
    if INTEGER {
        let high = residual4(at + 4, first, x, update, post_norm, scale);
        if kept && block_idx() == 0 {
            store(stream, at + 4, high);
        }
        arrived = quantise8(normed4(low, at, factor, norm), normed4(high, at + 4, factor, norm));
    } else {
        arrived = as_words(normed4(low, at, factor, norm));
    }
    arrived
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
#[device]
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
#[device]
pub fn then_softcap(value: f32, row: u32, cap: f32) -> f32 {
    cap * (value / cap).tanh()
}
