//! The mixture of experts in single steps: the choice, the products of the chosen experts, and their weighted sum.
//!
//! A row and one of its choices are a pair; pairs are ordered `[rows][top]`.

use gemma4c_blocks::DType;
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

use crate::kernels::moe::choose::choose;
use crate::kernels::values::value;

/// The TOP largest of each row's logits, of equal ones the lower expert, and the softmax over these. A warp takes a
/// row. `logits` are only read.
#[kernel(block = 32, dependent)]
pub fn top_k_softmax<const EXPERTS: u32, const TOP: u32>(logits: InOut<f32>, ids: Output<u32>, weights: Output<f32>) {
    require!(TOP <= 32 && TOP <= EXPERTS);
    grid_launch_dependents();
    grid_dependency_wait();
    choose(block_idx(), logits, ids, weights);
}

/// Which rows of each expert's matrix are multiplied: `first..first + outputs` of its `height`, `k` values each.
#[view]
pub struct ExpertRows {
    k: u32,
    height: u32,
    first: u32,
    outputs: u32,
}

/// `out[pair] = W[ids[pair]] · x`, of some rows of W. `pairs_a_row` pairs have the same row of `x`: `top` of them, or
/// 1. A warp takes an output of a pair.
#[kernel(block = 256, dependent, slots(value(at: u64) -> f32))]
pub fn expert_product(
    x: Input<f32>,
    ids: Input<u32>,
    state: Input<u32>,
    out: Output<f32>,
    matrix: ExpertRows,
    top: u32,
    pairs_a_row: u32,
) {
    grid_launch_dependents();
    grid_dependency_wait();
    let output = block_idx() * 8 + warp_id();
    let pair = block_idx_y();
    if output < matrix.outputs && pair < state[1u32] * top {
        let start = (ids[pair] as u64 * matrix.height as u64 + (matrix.first + output) as u64) * matrix.k as u64;
        let mut sum = 0.0f32;
        for i in (lane_id()..matrix.k).by(32) {
            sum = value(start + i as u64).mul_add(x[pair / pairs_a_row * matrix.k + i], sum);
        }
        let sum = warp_sum(sum);
        if lane_id() == 0 {
            out[pair * matrix.outputs + output] = sum;
        }
    }
}

/// `out[row] = Σ weights[j] * expert_scale[ids[j]] * x[j]` over the row's `top` choices j; the scale only where it is
/// SCALED.
#[kernel(block = 256, dependent)]
pub fn expert_sum<const SCALED: bool>(
    x: Input<f32>,
    ids: Input<u32>,
    weights: Input<f32>,
    expert_scale: Weights<f32>,
    state: Input<u32>,
    out: Output<f32>,
    width: u32,
    top: u32,
) {
    grid_launch_dependents();
    grid_dependency_wait();
    let row = block_idx_y();
    let i = block_idx() * 256 + thread_idx();
    if i < width && row < state[1u32] {
        let mut sum = 0.0f32;
        for pair in row * top..row * top + top {
            let mut factor = weights[pair];
            if SCALED {
                factor = factor * expert_scale[ids[pair]];
            }
            sum = sum + factor * x[pair * width + i];
        }
        out[row * width + i] = sum;
    }
}

/// A [`top_k_softmax`] on a grid `[rows, 1, 1]`.
pub fn choice(experts: u32, top: u32) -> Result<Instance, InstanceError> {
    top_k_softmax::Chosen { EXPERTS: experts, TOP: top }.build()
}

/// An [`expert_product`] with experts of that type.
pub fn product(dtype: DType) -> Result<Instance, InstanceError> {
    expert_product::Chosen { value: value(dtype) }.build()
}

/// An [`expert_sum`].
pub fn sum(scaled: bool) -> Result<Instance, InstanceError> {
    expert_sum::Chosen { SCALED: scaled }.build()
}

/// Blocks of an [`expert_product`].
pub fn product_grid(outputs: u32, top: u32, rows: u32) -> [u32; 3] {
    [outputs.div_ceil(8), rows * top, 1]
}

/// Blocks of an [`expert_sum`].
pub fn sum_grid(width: u32, rows: u32) -> [u32; 3] {
    [width.div_ceil(256), rows, 1]
}
