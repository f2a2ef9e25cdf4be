//! Rows that move: the one row whose logits are asked for, and the keys and values of a chunk into the cache.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};
use gemma4c_plan::cuda::KvType;

use crate::kernels::attention::address::{page_start, record_of, row_of_page, row_of_record};
use crate::kernels::attention::narrow::{head_len, narrow_slot, store_word, word_of};
use crate::kernels::attention::view::KvViewMut;
use crate::kernels::kv_element;

/// The row that is asked for. `asked` is the state of the one-row part of a plan: the row's position, its rows (1), and
/// its number among the rows of `x`.
#[kernel(block = 256, dependent)]
pub fn take_row(x: Input<f32>, asked: Input<u32>, out: Output<f32>, width: u32) {
    grid_launch_dependents();
    grid_dependency_wait();
    let i = block_idx() * 256 + thread_idx();
    if i < width {
        out[i] = x[asked[2u32] * width + i];
    }
}

/// Keys and values of rows, `width` values each in heads of `dim`, to their places in the caches.
#[kernel(block = 256, dependent, slots(narrow(bits: u32) -> u32))]
pub fn kv_store<const NARROW: bool, const SCALED: bool, KV: Float>(
    k: Input<f32>,
    v: Input<f32>,
    state: Input<u32>,
    record_stride: u32,
    width: u32,
    dim: u32,
    kv: KvViewMut<KV>,
) {
    grid_launch_dependents();
    grid_dependency_wait();
    let row = block_idx_y();
    let i = block_idx() * 256 + thread_idx();
    let record = record_of(state, row, record_stride);
    let of_record = row_of_record(record, row, record_stride);
    if of_record < record.y && i < width {
        let position = record.x + of_record;
        let page = page_start(kv.pages, record.w, position, kv.capacity, kv.max_pages, kv.page_stride);
        let to_row = row_of_page(position, row, kv.capacity);
        let mut k_page = kv.k.offset(page);
        let mut v_page = kv.v.offset(page);
        if NARROW {
            // Whole warps have a group of 32 values of a head.
            let head = (to_row * (width / dim) + i / dim) * head_len(dim);
            store_word(k_page.offset(head), dim, i % dim, word_of(narrow, k[row * width + i]));
            store_word(v_page.offset(head), dim, i % dim, word_of(narrow, v[row * width + i]));
        } else {
            let to = to_row * width + i;
            k_page[to] = KV::from_f32(k[row * width + i]);
            v_page[to] = KV::from_f32(v[row * width + i]);
        }
    }
}

/// A [`take_row`].
pub fn take() -> Result<Instance, InstanceError> {
    take_row::Chosen {}.build()
}

/// A [`kv_store`] into caches of that type.
pub fn store(cache: KvType) -> Result<Instance, InstanceError> {
    kv_store::Chosen {
        NARROW: cache.is_narrow(),
        SCALED: cache == KvType::Q8_0,
        KV: kv_element(cache),
        narrow: narrow_slot(cache),
    }
    .build()
}

/// Blocks of a [`take_row`].
pub fn take_grid(width: u32) -> [u32; 3] {
    [width.div_ceil(256), 1, 1]
}

/// Blocks of a [`kv_store`]; `width` is that of all heads.
pub fn store_grid(width: u32, rows: u32) -> [u32; 3] {
    [width.div_ceil(256), rows, 1]
}
