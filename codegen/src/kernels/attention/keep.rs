//! The last rows of each segment of a chunk, from the stage that its attention reads, into its ring: afterwards nobody of the chunk looks at what they
//! replace.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{ElementType, Instance, InstanceError};

use super::Attention;
use super::address::{record_of, row_of_record};

/// Copies keys and values of as many rows as both segment and ring have; a row is `width` elements, a thread copies 16 bytes of each. The
/// grid is (pieces of a row, some of the phase's `rows`), and its blocks share the rows out: of a long segment each keeps one.
#[kernel(block = 128, dependent)]
pub fn keep_rows<const VECTOR: u32, KV: Float>(
    k_stage: Input<KV>,
    v_stage: Input<KV>,
    state: Input<u32>,
    k_cache: InOut<KV>,
    v_cache: InOut<KV>,
    rows: u32,
    width: u32,
    capacity: u32,
    page_stride: u32,
) {
    grid_launch_dependents();
    grid_dependency_wait();
    let i = (block_idx() * 128 + thread_idx()) * VECTOR;
    for row in (block_idx_y()..rows).by(grid_dim_y()) {
        let record = record_of(state, row, 0);
        let of_record = row_of_record(record, row, 0);
        if of_record < record.y && of_record + capacity >= record.y && i < width {
            let page = record.w as u64 * page_stride as u64;
            let to = (record.x + of_record) % capacity * width + i;
            store(k_cache.offset(page), to, load::<U32x4>(k_stage, row * width + i));
            store(v_cache.offset(page), to, load::<U32x4>(v_stage, row * width + i));
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
