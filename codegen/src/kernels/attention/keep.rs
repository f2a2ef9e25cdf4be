//! The last rows of each segment of a chunk, from the stage that its attention reads, into its ring: no row of the
//! chunk reads what they replace after that.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{ElementType, Instance, InstanceError};

use super::Attention;
use super::address::{record_of, row_of_record};

/// The rings of a layer's slots, to be written.
#[view]
pub struct RingView<KV: Float> {
    k: InOut<KV>,
    v: InOut<KV>,
    /// Elements of a row.
    width: u32,
    /// Rows of a ring.
    capacity: u32,
    /// Elements from the start of a ring to that of the next one.
    page_stride: u32,
}

/// Copies keys and values of as many rows as both segment and ring have; a thread copies 16 bytes of each. The grid is
/// (runs of 128 vectors of a row, some of the phase's `rows`), and its blocks share the rows out: of a long segment
/// each keeps one.
#[kernel(block = 128, dependent)]
pub fn keep_rows<const VECTOR: u32, KV: Float>(
    k_stage: Input<KV>,
    v_stage: Input<KV>,
    state: Input<u32>,
    ring: RingView<KV>,
    rows: u32,
) {
    grid_launch_dependents();
    grid_dependency_wait();
    let i = (block_idx() * 128 + thread_idx()) * VECTOR;
    for row in (block_idx_y()..rows).by(grid_dim_y()) {
        let record = record_of(state, row, 0);
        let of_record = row_of_record(record, row, 0);
        if of_record < record.y && of_record + ring.capacity >= record.y && i < ring.width {
            let page = record.w as u64 * ring.page_stride as u64;
            let to = (record.x + of_record) % ring.capacity * ring.width + i;
            store(ring.k.offset(page), to, load::<U32x4>(k_stage, row * ring.width + i));
            store(ring.v.offset(page), to, load::<U32x4>(v_stage, row * ring.width + i));
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
