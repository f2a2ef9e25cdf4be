//! What lies between two clipped products, one launch each: the bounds of what a product leaves, the residual and the norms or the gate after it, and a bf16 copy within the bounds
//! of each product that reads the result. A bound that a product does not have is infinite.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{ElementType, Instance, InstanceError};

use crate::kernels::gelu::gelu_by_exp;
use crate::kernels::norm::{inverse_rms, product4, scaled4, sum4};
use crate::kernels::outputs::bf16x8;

#[device]
pub fn bounded4(x: F32x4, low: f32, high: f32) -> F32x4 {
    f32x4(x.x.max(low).min(high), x.y.max(low).min(high), x.z.max(low).min(high), x.w.max(low).min(high))
}

/// Stores eight values within bounds.
#[device]
pub fn leave_bounded(out: Output<BF16>, at: u32, low: F32x4, high: F32x4, least: f32, most: f32) {
    store(out, at, bf16x8(bounded4(low, least, most), bounded4(high, least, most)));
}

/// With RESIDUAL `h_out = h + norm(x) * weight`, x within its bounds, else x itself; then, with CLIPS, the norm of that times `next_weight`, rounded, CLIPS times: each
/// within bounds of its own and `part` values behind the one before. A block takes a row, a thread eight neighbouring values.
#[kernel(block = THREADS)]
pub fn clipped_norm<const WIDTH: u32, const THREADS: u32, const RESIDUAL: bool, const CLIPS: u32>(
    h: Input<f32>,
    x: Input<f32>,
    weight: Weights<f32>,
    next_weight: Weights<f32>,
    x_low: Weights<f32>,
    x_high: Weights<f32>,
    first_low: Weights<f32>,
    first_high: Weights<f32>,
    second_low: Weights<f32>,
    second_high: Weights<f32>,
    third_low: Weights<f32>,
    third_high: Weights<f32>,
    h_out: Output<f32>,
    rounded: Output<BF16>,
    part: u32,
    epsilon: f32,
) {
    require!(WIDTH % 8 == 0 && WIDTH <= THREADS * 8 && CLIPS <= 3);
    let at = thread_idx() * 8;
    let inside = at < WIDTH;
    let start = block_idx() * WIDTH + at;
    let mut low = F32x4::ZERO;
    let mut high = F32x4::ZERO;
    if inside {
        low = bounded4(load::<F32x4>(x, start), x_low[0u32], x_high[0u32]);
        high = bounded4(load::<F32x4>(x, start + 4), x_low[0u32], x_high[0u32]);
    }
    if RESIDUAL {
        let factor = inverse_rms(low, high, epsilon);
        if inside {
            let before = load::<F32x4>(h, start);
            low = sum4(before, product4(scaled4(low, factor), load::<F32x4>(weight, at)));
            let before_high = load::<F32x4>(h, start + 4);
            high = sum4(before_high, product4(scaled4(high, factor), load::<F32x4>(weight, at + 4)));
            store(h_out, start, low);
            store(h_out, start + 4, high);
        }
    }
    if CLIPS > 0 {
        let factor = inverse_rms(low, high, epsilon);
        if inside {
            low = product4(scaled4(low, factor), load::<F32x4>(next_weight, at));
            high = product4(scaled4(high, factor), load::<F32x4>(next_weight, at + 4));
            leave_bounded(rounded, start, low, high, first_low[0u32], first_high[0u32]);
            if CLIPS > 1 {
                leave_bounded(rounded, part + start, low, high, second_low[0u32], second_high[0u32]);
            }
            if CLIPS > 2 {
                leave_bounded(rounded, part * 2 + start, low, high, third_low[0u32], third_high[0u32]);
            }
        }
    }
}

/// `gelu(gate) * up`, all three within bounds, rounded. Gates, and what they gate, are f32 or bf16. Gate and up are `stride` values from row to row; a thread takes four of a row of `width`.
#[kernel(block = 256)]
pub fn clipped_geglu<T: Float>(
    gate: Input<T>,
    up: Input<T>,
    gate_low: Weights<f32>,
    gate_high: Weights<f32>,
    up_low: Weights<f32>,
    up_high: Weights<f32>,
    low: Weights<f32>,
    high: Weights<f32>,
    out: Output<BF16>,
    width: u32,
    stride: u32,
) {
    let at = (block_idx() * 256 + thread_idx()) * 4;
    let row = block_idx_y();
    if at < width {
        let from = row as u64 * stride as u64 + at as u64;
        let gates = bounded4(load_floats4(gate, from), gate_low[0u32], gate_high[0u32]);
        let ups = bounded4(load_floats4(up, from), up_low[0u32], up_high[0u32]);
        let activated = f32x4(gelu_by_exp(gates.x), gelu_by_exp(gates.y), gelu_by_exp(gates.z), gelu_by_exp(gates.w));
        let four = bounded4(product4(activated, ups), low[0u32], high[0u32]);
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
