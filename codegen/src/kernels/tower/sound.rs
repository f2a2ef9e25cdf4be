//! What only the frames of a sound need: convolutions along time, and attention over the rows just before. Plainly, in
//! f32: ten seconds are 250 rows, of which these take a few microseconds.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

/// A convolution of 3 by 3 over rows and columns of `channels` values, with stride 2 along both and zeros around. Rows
/// of the sound were halved `halvings` times before it. A warp computes all outputs of a place: its lanes hold the TAPS
/// and read the weights together. The grid is (columns, rows) of the result.
#[kernel(block = 32)]
pub fn halving_conv<const TAPS: u32>(
    x: Input<f32>,
    weight: Weights<f32>,
    grid: Input<u32>,
    out: Output<f32>,
    columns: u32,
    outputs: u32,
    halvings: u32,
) {
    let channels = TAPS / 9;
    let column = block_idx();
    let row = block_idx_y();
    let rows = (grid[1u32] + (1u32 << halvings) - 1) >> halvings;
    if row * 2 >= rows {
        return;
    }
    let mut taps = regs(0.0f32, (TAPS + 31) / 32);
    #[unroll]
    for i in 0..(TAPS + 31) / 32 {
        let tap = i * 32 + lane_id();
        // Counted from one before the first.
        let y = row * 2 + tap / 3 % 3;
        let z = column * 2 + tap % 3;
        if tap < TAPS && y > 0 && y <= rows && z > 0 && z <= columns {
            taps[i] = x[((y - 1) * columns + z - 1) * channels + tap / 9];
        }
    }
    for output in 0..outputs {
        let mut sum = 0.0f32;
        #[unroll]
        for i in 0..(TAPS + 31) / 32 {
            let tap = i * 32 + lane_id();
            if tap < TAPS {
                sum = weight[output * TAPS + tap].mul_add(taps[i], sum);
            }
        }
        let all = warp_sum(sum);
        if lane_id() == 0 {
            out[(row * grid_dim() + column) * outputs + output] = all;
        }
    }
}

/// `out[t] = Σ_j w[j] x[t - taps + 1 + j]` for every value of a row by itself, with zeros before the first row.
#[kernel(block = 256)]
pub fn causal_conv(x: Input<f32>, weight: Weights<f32>, out: Output<f32>, width: u32, taps: u32) {
    let i = block_idx() * 256 + thread_idx();
    let row = block_idx_y();
    if i < width {
        let mut sum = 0.0f32;
        for tap in 0..taps {
            if row + tap + 1 >= taps {
                sum = weight[i * taps + tap].mul_add(x[(row + tap + 1 - taps) * width + i], sum);
            }
        }
        out[row * width + i] = sum;
    }
}

/// `softmax(cap * tanh((q·k + q·r) / cap)) v` over a row and the `reach - 1` before it, where `r` is the row of
/// `by_distance` of their distance. A warp for each row and head; a lane keeps the score of a distance.
#[kernel(block = 32)]
pub fn near_attention<const D: u32>(
    q: Input<f32>,
    k: Input<f32>,
    v: Input<f32>,
    by_distance: Weights<f32>,
    out: Output<f32>,
    reach: u32,
    cap: f32,
) {
    let head = block_idx();
    let row = block_idx_y();
    let width = grid_dim() * D;
    let start = row * width + head * D;
    let seen = reach.min(row + 1);
    let mut own = f32::NEG_INFINITY;
    for distance in 0..seen {
        let mut sum = 0.0f32;
        #[unroll]
        for part in 0..(D + 31) / 32 {
            let i = part * 32 + lane_id();
            if i < D {
                let key = k[start - distance * width + i] + by_distance[distance * width + head * D + i];
                sum = q[start + i].mul_add(key, sum);
            }
        }
        let score = cap * (warp_sum(sum) / cap).tanh();
        own = if lane_id() == distance { score } else { own };
    }
    let most = warp_max(own);
    let weight = (own - most).exp();
    let total = warp_sum(weight);
    let mut sums = regs(0.0f32, (D + 31) / 32);
    for distance in 0..seen {
        let share = shfl_idx(weight, distance) / total;
        #[unroll]
        for part in 0..(D + 31) / 32 {
            let i = part * 32 + lane_id();
            if i < D {
                sums[part] = share.mul_add(v[start - distance * width + i], sums[part]);
            }
        }
    }
    #[unroll]
    for part in 0..(D + 31) / 32 {
        let i = part * 32 + lane_id();
        if i < D {
            out[start + i] = sums[part];
        }
    }
}

// ---- links of a chain (`plain::map`) --------------------------------------------------------------------------------

/// `1 / (1 + e^-x)`.
#[device]
pub fn then_sigmoid(value: f32, at: u32) -> f32 {
    1.0 / (1.0 + (-value).exp())
}

/// No less than 0.
#[device]
pub fn then_relu(value: f32, at: u32) -> f32 {
    value.max(0.0)
}

// ---- instances ------------------------------------------------------------------------------------------------------

/// The most taps that lanes hold in registers, and the most rows that one sees: a lane each.
pub const MOST_TAPS: u32 = 2048;
pub const LONGEST_REACH: u32 = 32;

/// A [`halving_conv`]; its grid is the columns and rows of the result.
pub fn halving(taps: u32) -> Result<Instance, InstanceError> {
    halving_conv::Chosen { TAPS: taps }.build()
}

pub fn causal() -> Result<Instance, InstanceError> {
    causal_conv::Chosen {}.build()
}

/// A [`near_attention`] of heads of `dim` values; its grid is `[heads, rows]`.
pub fn near(dim: u32) -> Result<Instance, InstanceError> {
    near_attention::Chosen { D: dim }.build()
}

/// For each distance the sines, then the cosines, of its product with frequencies from 1 down to 1/10000. Taken in f64
/// and rounded once.
pub fn waves(reach: u32, width: u32) -> Vec<f32> {
    let half = width / 2;
    let angle = |distance: u32, i: u32| f64::from(distance) * 10_000f64.powf(-f64::from(i) / (f64::from(half) - 1.0));
    let row = |distance: u32| {
        let sines = (0..half).map(move |i| angle(distance, i).sin() as f32);
        sines.chain((0..half).map(move |i| angle(distance, i).cos() as f32)).collect::<Vec<f32>>()
    };
    (0..reach).flat_map(row).collect()
}
