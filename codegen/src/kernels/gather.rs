//! Rows of an embedding table: gathered by token, decoded and scaled, straight from the file's blocks.
//!
//! Only the rows of a few tokens are read, so a table stays in its GGUF layout. A thread takes one value: neighbours
//! share the bytes of their block, and the kernel takes little more than the latency of one read.

use gemma4c_blocks::DType;
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

use super::values::value;

/// `out[row] = scale * table[tokens[row]]`, rows of `width` values. A token beyond the table reads its last row: rows
/// past the end of a prompt hold whatever was there. Tokens are `token_stride` words apart: 1 in a chunk, a record's
/// length where rows have records.
#[kernel(block = 256, dependent, slots(value(at: u64) -> f32))]
pub fn gather(tokens: Input<u32>, out: Output<f32>, width: u32, vocabulary: u32, token_stride: u32, scale: f32) {
    grid_launch_dependents();
    grid_dependency_wait();
    let row = block_idx_y();
    let at = block_idx() * block_dim() + thread_idx();
    if at < width {
        let token = tokens[row * token_stride].min(vocabulary - 1);
        out[row * width + at] = value(token as u64 * width as u64 + at as u64) * scale;
    }
}

/// The gather from tables of that type.
pub fn instance(dtype: DType) -> Result<Instance, InstanceError> {
    gather::Chosen { value: value(dtype) }.build()
}

/// Blocks for `rows` rows of `width` values.
pub fn grid(instance: &Instance, width: u32, rows: u32) -> [u32; 3] {
    [width.div_ceil(instance.block()), rows, 1]
}
