//! The matrix product in f32, weights in their GGUF layout.

use gemma4c_blocks::DType;
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

use crate::kernels::values::value;

/// `out[row] = W · x[row]`: a warp takes an output, its lanes every 32nd value of a row. The order of the sum depends
/// on `k` alone.
#[kernel(block = 256, dependent, slots(value(at: u64) -> f32))]
pub fn matmul_exact(x: Input<f32>, out: Output<f32>, k: u32, outputs: u32) {
    grid_launch_dependents();
    grid_dependency_wait();
    let output = block_idx() * 8 + warp_id();
    let row = block_idx_y();
    if output < outputs {
        let mut sum = 0.0f32;
        for i in (lane_id()..k).by(32) {
            sum = value(output as u64 * k as u64 + i as u64).mul_add(x[row * k + i], sum);
        }
        let sum = warp_sum(sum);
        if lane_id() == 0 {
            out[row * outputs + output] = sum;
        }
    }
}

/// A [`matmul_exact`] with a matrix of that type.
pub fn instance(dtype: DType) -> Result<Instance, InstanceError> {
    matmul_exact::Chosen { value: value(dtype) }.build()
}

/// Blocks for `rows` rows.
pub fn grid(outputs: u32, rows: u32) -> [u32; 3] {
    [outputs.div_ceil(8), rows, 1]
}
