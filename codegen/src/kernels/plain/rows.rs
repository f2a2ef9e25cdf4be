//! Rows that move: the one row whose logits are asked for, and the keys and values of a chunk into the cache.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{ElementType, Instance, InstanceError};

use crate::kernels::attention::address::{page_start, record_of, row_of_page, row_of_record};

/// The row that is asked for. `asked` is the state of the one-row part of a plan: the row's position, its rows (1), and its
/// number among the rows of `x`.
#[kernel(block = 256, dependent)]
pub fn take_row(x: Input<f32>, asked: Input<u32>, out: Output<f32>, width: u32) {
    grid_launch_dependents();
    grid_dependency_wait();
    let i = block_idx() * 256 + thread_idx();
    if i < width {
        out[i] = x[asked[2u32] * width + i];
    }
}

/// Keys and values of rows, `width` values each, to their places in the caches: position p in row `p % capacity` of its page;
/// with a capacity of 0 they are a stage.
#[kernel(block = 256, dependent)]
pub fn kv_store<KV: Float>(
    k: Input<f32>,
    v: Input<f32>,
    state: Input<u32>,
    pages: Weights<u32>,
    k_cache: InOut<KV>,
    v_cache: InOut<KV>,
    width: u32,
    capacity: u32,
    window: u32,
    record_stride: u32,
    max_pages: u32,
    page_stride: u32,
) {
    grid_launch_dependents();
    grid_dependency_wait();
    let row = block_idx_y();
    let i = block_idx() * 256 + thread_idx();
    let record = record_of(state, row, record_stride);
    let of_record = row_of_record(row, record_stride);
    if of_record < record.y && i < width {
        let position = record.x + of_record;
        let page = page_start(pages, record.w, position, window, max_pages, page_stride);
        let to = row_of_page(position, record.x, capacity) * width + i;
        let mut k_page = k_cache.offset(page);
        let mut v_page = v_cache.offset(page);
        k_page[to] = KV::from_f32(k[row * width + i]);
        v_page[to] = KV::from_f32(v[row * width + i]);
    }
}

/// A [`take_row`].
pub fn take() -> Result<Instance, InstanceError> {
    take_row::Chosen {}.build()
}

/// A [`kv_store`] into caches of F32, F16 or BF16.
pub fn store(cache: ElementType) -> Result<Instance, InstanceError> {
    kv_store::Chosen { KV: cache }.build()
}

/// Blocks of a [`take_row`].
pub fn take_grid(width: u32) -> [u32; 3] {
    [width.div_ceil(256), 1, 1]
}

/// Blocks of a [`kv_store`]; `width` is that of all heads.
pub fn store_grid(width: u32, rows: u32) -> [u32; 3] {
    [width.div_ceil(256), rows, 1]
}
