//! What is between two clipped products, one launch each: the bounds of a product's result, the residual and the norms
//! or the gate after it, and a bf16 copy within the bounds of each product that reads the result. A bound that a
//! product does not have is infinite.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{ElementType, Instance, InstanceError};

use crate::kernels::gelu::gelu_by_exp;
use crate::kernels::norm::{inverse_rms, product4, scaled4, sum4};
use crate::kernels::outputs::bf16x8;

/// The bounds of a value, one element each.
#[view]
pub struct ClipBounds {
    low: Weights<f32>,
    high: Weights<f32>,
}

/// What a norm is added to: `after = before + norm(x) * weight`.
#[view]
pub struct ClippedResidual {
    before: Input<f32>,
    weight: Weights<f32>,
    after: Output<f32>,
}

/// Copies of the next norm, times `weight`: copy i of a row is `i * part` values behind the first.
#[view]
pub struct ClippedCopies {
    weight: Weights<f32>,
    rounded: Output<BF16>,
    part: u32,
}

#[device]
pub fn bounded4(x: F32x4, low: f32, high: f32) -> F32x4 {
    f32x4(x.x.max(low).min(high), x.y.max(low).min(high), x.z.max(low).min(high), x.w.max(low).min(high))
}

/// Four values within bounds.
#[device]
pub fn clipped4(x: F32x4, bounds: ClipBounds) -> F32x4 {
    bounded4(x, bounds.low[0u32], bounds.high[0u32])
}

/// Stores eight values within bounds.
#[device]
pub fn store_clipped8(out: Output<BF16>, at: u32, low: F32x4, high: F32x4, bounds: ClipBounds) {
    store(out, at, bf16x8(clipped4(low, bounds), clipped4(high, bounds)));
}

/// The residual update with RESIDUAL, else x itself, x within the bounds `entry`; then the norm of that, rounded, CLIPS
/// times: each copy within bounds of its own. A block takes a row, a thread eight neighbouring values.
#[kernel(block = THREADS)]
pub fn clipped_norm<const WIDTH: u32, const THREADS: u32, const RESIDUAL: bool, const CLIPS: u32>(
    x: Input<f32>,
    entry: ClipBounds,
    residual: ClippedResidual,
    copies: ClippedCopies,
    first: ClipBounds,
    second: ClipBounds,
    third: ClipBounds,
    epsilon: f32,
) {
    require!(WIDTH % 8 == 0 && WIDTH <= THREADS * 8 && CLIPS <= 3);
    let at = thread_idx() * 8;
    let inside = at < WIDTH;
    let start = block_idx() * WIDTH + at;
    let mut low = F32x4::ZERO;
    let mut high = F32x4::ZERO;
    if inside {
        low = clipped4(load::<F32x4>(x, start), entry);
        high = clipped4(load::<F32x4>(x, start + 4), entry);
    }
    if RESIDUAL {
        let factor = inverse_rms(low, high, epsilon);
        if inside {
            let before = load::<F32x4>(residual.before, start);
            low = sum4(before, product4(scaled4(low, factor), load::<F32x4>(residual.weight, at)));
            let before_high = load::<F32x4>(residual.before, start + 4);
            high = sum4(before_high, product4(scaled4(high, factor), load::<F32x4>(residual.weight, at + 4)));
            store(residual.after, start, low);
            store(residual.after, start + 4, high);
        }
    }
    if CLIPS > 0 {
        let factor = inverse_rms(low, high, epsilon);
        if inside {
            low = product4(scaled4(low, factor), load::<F32x4>(copies.weight, at));
            high = product4(scaled4(high, factor), load::<F32x4>(copies.weight, at + 4));
            store_clipped8(copies.rounded, start, low, high, first);
            if CLIPS > 1 {
                store_clipped8(copies.rounded, copies.part + start, low, high, second);
            }
            if CLIPS > 2 {
                store_clipped8(copies.rounded, copies.part * 2 + start, low, high, third);
            }
        }
    }
}

/// `gelu(gate) * up`, rounded, the two and the result within bounds of their own. Rows of `width` values, of which a
/// thread takes four; rows of gate and up are `stride` values apart.
#[kernel(block = 256)]
pub fn clipped_geglu<T: Float>(
    gate: Input<T>,
    up: Input<T>,
    gate_bounds: ClipBounds,
    up_bounds: ClipBounds,
    out_bounds: ClipBounds,
    out: Output<BF16>,
    width: u32,
    stride: u32,
) {
    let at = (block_idx() * 256 + thread_idx()) * 4;
    let row = block_idx_y();
    if at < width {
        let from = row as u64 * stride as u64 + at as u64;
        let gates = clipped4(load_floats4(gate, from), gate_bounds);
        let ups = clipped4(load_floats4(up, from), up_bounds);
        let activated = f32x4(gelu_by_exp(gates.x), gelu_by_exp(gates.y), gelu_by_exp(gates.z), gelu_by_exp(gates.w));
        let four = clipped4(product4(activated, ups), out_bounds);
        let to = row as u64 * width as u64 + at as u64;
        store(out, to, u32x2(pack_bf16(four.x, four.y), pack_bf16(four.z, four.w)));
    }
}

/// The widest row of a [`clipped_norm`].
pub const WIDEST: u32 = 8192;

/// A [`clipped_norm`]; its grid is `[rows, 1, 1]`.
pub fn norm(width: u32, residual: bool, clips: u32) -> Result<Instance, InstanceError> {
    let threads = width.div_ceil(256) * 32;
    clipped_norm::Chosen { WIDTH: width, THREADS: threads, RESIDUAL: residual, CLIPS: clips }.build()
}

/// A [`clipped_geglu`]; its grid is `[width.div_ceil(1024), rows, 1]`.
pub fn geglu(of: ElementType) -> Result<Instance, InstanceError> {
    clipped_geglu::Chosen { T: of }.build()
}
