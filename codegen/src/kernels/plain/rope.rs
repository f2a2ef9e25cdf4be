//! RoPE of rows of heads, with the angles of the fused kernel (`heads`).

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

use crate::kernels::attention::address::{record_of, row_of_record};
use crate::kernels::heads::cos_sin;

/// Turns the pairs (i, i + dim / 2) of each head by `position * inverse_frequencies[i]`. `state` has the rows' records.
/// A thread takes a pair. `out` may be `x`.
#[kernel(block = 256, dependent)]
pub fn rope(
    x: Input<f32>,
    inverse_frequencies: Weights<f32>,
    state: Input<u32>,
    out: Output<f32>,
    heads: u32,
    dim: u32,
    record_stride: u32,
) {
    grid_launch_dependents();
    grid_dependency_wait();
    let row = block_idx_y();
    let pair = block_idx() * 256 + thread_idx();
    let half = dim / 2;
    if pair < heads * half {
        let low = row * heads * dim + pair / half * dim + pair % half;
        let high = low + half;
        let record = record_of(state, row, record_stride);
        let position = record.x + row_of_record(record, row, record_stride);
        let turn = cos_sin(position as f32 * inverse_frequencies[pair % half]);
        let a = x[low];
        let b = x[high];
        out[low] = a * turn.x - b * turn.y;
        out[high] = b * turn.x + a * turn.y;
    }
}

/// A [`rope`].
pub fn rotation() -> Result<Instance, InstanceError> {
    rope::Chosen {}.build()
}

/// Blocks for `rows` rows of heads.
pub fn grid(heads: u32, dim: u32, rows: u32) -> [u32; 3] {
    [(heads * dim / 2).div_ceil(256), rows, 1]
}
