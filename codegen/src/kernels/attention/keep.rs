//! The last rows of each segment of a chunk, from the stage that its attention reads, to the pages of its window: no
//! row of the chunk reads what they replace after that.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{ElementType, Instance, InstanceError};

use super::Attention;
use super::address::{page_start, record_of, row_of_record};
use super::view::KvViewMut;

/// Copies keys and values, of `width` elements, of as many rows as both a segment and the pages of a window have; a
/// thread copies 16 bytes of each. The grid is (runs of 128 vectors of a row, some of the phase's `rows`), and its
/// blocks share the rows out: of a long segment each keeps one.
#[kernel(block = 128, dependent)]
pub fn keep_rows<const VECTOR: u32, KV: Float>(
    k_stage: Input<KV>,
    v_stage: Input<KV>,
    state: Input<u32>,
    kv: KvViewMut<KV>,
    width: u32,
    rows: u32,
) {
    grid_launch_dependents();
    grid_dependency_wait();
    let i = (block_idx() * 128 + thread_idx()) * VECTOR;
    for row in (block_idx_y()..rows).by(grid_dim_y()) {
        let record = record_of(state, row, 0);
        let of_record = row_of_record(record, row, 0);
        if of_record < record.y && of_record + kv.capacity * kv.max_pages >= record.y && i < width {
            let position = record.x + of_record;
            let page = page_start(kv.pages, record.w, position, kv.capacity, kv.max_pages, kv.page_stride);
            let to = position % kv.capacity * width + i;
            store(kv.k.offset(page), to, load::<U32x4>(k_stage, row * width + i));
            store(kv.v.offset(page), to, load::<U32x4>(v_stage, row * width + i));
        }
    }
}

impl Attention {
    /// Elements of 16 bytes.
    fn vector(&self) -> u32 {
        if self.element() == ElementType::F32 { 4 } else { 8 }
    }

    /// Elements of a row of the cache: the launch argument `width`.
    pub fn row_len(&self) -> u32 {
        (self.kv.row_bytes(self.kv_heads, self.head_dim) / self.kv.bytes()) as u32
    }

    pub fn keep(&self) -> Result<Instance, InstanceError> {
        keep_rows::Chosen { VECTOR: self.vector(), KV: self.element() }.build()
    }

    /// Blocks for a chunk of `rows`.
    pub fn keep_grid(&self, rows: u32) -> [u32; 3] {
        [self.row_len().div_ceil(128 * self.vector()), rows.min(self.capacity), 1]
    }
}
