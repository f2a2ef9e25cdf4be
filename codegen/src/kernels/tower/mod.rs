//! What only a tower's patches need: their places in a grid, attention of all to all, and soft tokens in a prompt.
//! Plainly, in f32. [`flash`] is attention on tensor cores, [`heads`] and [`warpgroups`] by warpgroups. [`clipped`]
//! fuses what is between clipped products, and [`sound`] is what frames need.
//!
//! `grid` is a record of the plan's tower: word 1 is the number of rows in use, word 2 how many of them a row of the
//! grid has. Rows beyond those in use are not written, or hold numbers that nobody reads.

pub mod clipped;
pub mod flash;
pub mod heads;
pub mod sound;
pub mod warpgroups;

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

use super::heads::{cos_sin, rotated};

/// The row of each patch's coordinate, from slice `axis` of a table whose slices have `length` rows: 0 is its column, 1
/// its row.
#[kernel(block = 256)]
pub fn axis_rows(table: Weights<f32>, grid: Input<u32>, out: Output<f32>, width: u32, length: u32, axis: u32) {
    let i = block_idx() * 256 + thread_idx();
    let row = block_idx_y();
    if i < width && row < grid[1u32] {
        let at = if axis == 0 { row % grid[2u32] } else { row / grid[2u32] };
        out[row * width + i] = table[(axis * length + at) * width + i];
    }
}

/// Turns the pairs (i, i + dim / 4) of either half of a head: of the first by the patch's column, of the second by its
/// row. A thread takes a pair.
#[kernel(block = 256)]
pub fn grid_rope(
    x: Input<f32>,
    inverse_frequencies: Weights<f32>,
    grid: Input<u32>,
    out: Output<f32>,
    heads: u32,
    dim: u32,
) {
    let pair = block_idx() * 256 + thread_idx();
    let row = block_idx_y();
    let quarter = dim / 4;
    if pair < heads * quarter * 2 && row < grid[1u32] {
        let half = pair / quarter;
        let i = pair % quarter;
        let low = row * heads * dim + half * quarter * 2 + i;
        let at = if half % 2 == 0 { row % grid[2u32] } else { row / grid[2u32] };
        let turned = rotated(x[low], x[low + quarter], cos_sin(at as f32 * inverse_frequencies[i]));
        out[low] = turned.x;
        out[low + quarter] = turned.y;
    }
}

/// The mean of each square of `side` by `side` patches. `squares` is the grid of these.
#[kernel(block = 256)]
pub fn grid_mean(x: Input<f32>, grid: Input<u32>, squares: Input<u32>, out: Output<f32>, width: u32, side: u32) {
    let i = block_idx() * 256 + thread_idx();
    let square = block_idx_y();
    if i < width && square < squares[1u32] {
        let first = square / squares[2u32] * side * grid[2u32] + square % squares[2u32] * side;
        let mut sum = 0.0f32;
        for patch in 0..side * side {
            sum += x[(first + patch / side * grid[2u32] + patch % side) * width + i];
        }
        out[square * width + i] = sum * (1.0 / (side * side) as f32);
    }
}

/// `x - mean(x)`, a warp for each row.
#[kernel(block = 32)]
pub fn sub_mean(x: Input<f32>, out: Output<f32>, width: u32) {
    let first = block_idx() * width;
    let mut sum = 0.0f32;
    for i in (lane_id()..width).by(32) {
        sum += x[first + i];
    }
    let mean = warp_sum(sum) / width as f32;
    for i in (lane_id()..width).by(32) {
        out[first + i] = x[first + i] - mean;
    }
}

/// Query times key. A collective of the warp.
#[device]
pub fn patch_score<const D: u32>(query: Input<f32>, key: Input<f32>) -> f32 {
    let mut sum = 0.0f32;
    for i in (lane_id()..D).by(32) {
        sum = query[i].mul_add(key[i], sum);
    }
    warp_sum(sum)
}

/// `out = softmax(q · kᵀ) · v` over all patches, a warp for each patch and head, with an online softmax.
#[kernel(block = 32)]
pub fn full_attention<const D: u32>(q: Input<f32>, k: Input<f32>, v: Input<f32>, grid: Input<u32>, out: Output<f32>) {
    let head = block_idx();
    let row = block_idx_y();
    let width = grid_dim() * D;
    if row >= grid[1u32] {
        return;
    }
    let query = q.offset(row * width + head * D);
    let mut largest = f32::NEG_INFINITY;
    let mut total = 0.0f32;
    let mut sums = regs(0.0f32, (D + 31) / 32);
    for patch in 0..grid[1u32] {
        let start = patch * width + head * D;
        let score = patch_score(query, k.offset(start));
        let now = score.max(largest);
        let factor = (largest - now).exp();
        let weight = (score - now).exp();
        largest = now;
        total = total.mul_add(factor, weight);
        #[unroll]
        for part in 0..(D + 31) / 32 {
            let i = part * 32 + lane_id();
            if i < D {
                sums[part] = weight.mul_add(v[start + i], sums[part] * factor);
            }
        }
    }
    #[unroll]
    for part in 0..(D + 31) / 32 {
        let i = part * 32 + lane_id();
        if i < D {
            out[row * width + head * D + i] = sums[part] / total;
        }
    }
}

/// The chunk's rows, with soft tokens in their places: where `ahead` is not 0.
#[kernel(block = 256)]
pub fn place_soft(x: Input<f32>, soft: Input<f32>, ahead: Input<u32>, out: Output<f32>, width: u32) {
    let i = block_idx() * 256 + thread_idx();
    let row = block_idx_y();
    if i < width {
        let from = if ahead[row] == 0 { x } else { soft };
        out[row * width + i] = from[row * width + i];
    }
}

// ---- links of a chain (`plain::map`) --------------------------------------------------------------------------------

/// Plus a constant.
#[device(fills(value, at))]
pub fn then_plus(value: f32, at: u32, term: f32) -> f32 {
    value + term
}

/// Plus a weight, as wide as a row or of one element.
#[device]
pub fn then_plus_weight(value: f32, at: u32, term: Weights<f32>, terms: u32) -> f32 {
    value + term[at % terms]
}

/// No less than a weight, as wide as a row or of one element.
#[device]
pub fn then_at_least(value: f32, at: u32, low: Weights<f32>, lows: u32) -> f32 {
    value.max(low[at % lows])
}

/// No more than a weight, as wide as a row or of one element.
#[device]
pub fn then_at_most(value: f32, at: u32, high: Weights<f32>, highs: u32) -> f32 {
    value.min(high[at % highs])
}

// ---- instances ------------------------------------------------------------------------------------------------------

pub fn axis_rows_instance() -> Result<Instance, InstanceError> {
    axis_rows::Chosen {}.build()
}

pub fn rope_instance() -> Result<Instance, InstanceError> {
    grid_rope::Chosen {}.build()
}

pub fn mean_instance() -> Result<Instance, InstanceError> {
    grid_mean::Chosen {}.build()
}

pub fn sub_mean_instance() -> Result<Instance, InstanceError> {
    sub_mean::Chosen {}.build()
}

/// A [`full_attention`] of heads of `dim` values, launched on `[heads, rows]`.
pub fn attention_instance(dim: u32) -> Result<Instance, InstanceError> {
    full_attention::Chosen { D: dim }.build()
}

pub fn place_soft_instance() -> Result<Instance, InstanceError> {
    place_soft::Chosen {}.build()
}

/// Blocks for `rows` rows of `width` values or pairs, one to a thread.
pub fn grid(width: u32, rows: u32) -> [u32; 3] {
    [width.div_ceil(256), rows, 1]
}
