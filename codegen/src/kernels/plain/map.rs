//! Element-wise operations, one or a chain of them, over rows: sums, products, scales, GELU, softcap; and the copy of a
//! range of columns, which is the empty chain.
//!
//! The functions are those that end a product (`matvec::slots`); here are the ones that only many rows need. To all of
//! them a value's place is that in the output, counted over all rows.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{DeviceDef, Instance, InstanceError};

/// `out[row][i] = chain(x[row * x_stride + i])`, rows of `width` values.
#[kernel(block = 256, dependent, slots(chain(value: f32, at: u32) -> f32))]
pub fn map(x: Input<f32>, out: Output<f32>, width: u32, x_stride: u32) {
    grid_launch_dependents();
    grid_dependency_wait();
    let i = block_idx() * 256 + thread_idx();
    let at = block_idx_y() * width + i;
    if i < width {
        out[at] = chain(x[block_idx_y() * x_stride + i], at);
    }
}

/// Times a weight vector as wide as a row.
#[device]
pub fn then_times_weight(value: f32, at: u32, weight: Weights<f32>, width: u32) -> f32 {
    value * weight[at % width]
}

/// Times a part of wider rows: a layer's slice of the per-layer inputs.
#[device]
pub fn then_times_part(value: f32, at: u32, part: Input<f32>, width: u32, stride: u32) -> f32 {
    value * part[at / width * stride + at % width]
}

/// A [`map`] that applies those functions in order.
pub fn instance(chain: &[&'static DeviceDef]) -> Result<Instance, InstanceError> {
    map::Chosen { chain: chain.to_vec() }.build()
}

/// Blocks for `rows` rows of `width` values.
pub fn grid(width: u32, rows: u32) -> [u32; 3] {
    [width.div_ceil(256), rows, 1]
}
