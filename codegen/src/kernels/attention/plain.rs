//! Attention as its definition says it, for any number of rows: the oracle of the fast kernels on a GPU, and what a plan
//! without fusion uses.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{DeviceDef, Instance, InstanceError};
use gemma4c_plan::cuda::KvType;

use super::Attention;
use super::address::{page_start, record_of, row_of_page, row_of_record};
use super::narrow::{head_len, value_at, widen_slot};

/// The first position that the query at `position` sees. `window` counts the query's own position.
#[device]
pub fn first_visible(position: u32, window: u32) -> u32 {
    if position >= window { position + 1 - window } else { 0 }
}

/// The last position that a soft token sees: the last of its picture's, which come after it. Other rows see up to their own position. `row` is
/// the row's number in the chunk, whose rows have a word each.
#[device]
pub fn picture_end(last: u32, row: u32, ahead: Input<u32>) -> u32 {
    last + ahead[row].max(1) - 1
}

/// What fills the slot `reach`.
pub fn reach(ahead: bool) -> Vec<&'static DeviceDef> {
    if ahead { vec![picture_end::DEF] } else { Vec::new() }
}

/// Query times key. A collective of the warp.
#[device(slots(widen(eight: U32x4, scale: u32) -> U32x4))]
pub fn plain_score<const D: u32, const NARROW: bool, const SCALED: bool, KV: Float>(
    query: Input<f32>,
    key: Input<KV>,
) -> f32 {
    let mut sum = 0.0f32;
    for i in (lane_id()..D).by(32) {
        sum = query[i].mul_add(value_at(widen, key, D, i), sum);
    }
    warp_sum(sum)
}

/// `out = softmax(q · kᵀ) · v`, a warp for each row and query head: one pass over the keys for the largest score, one for the
/// sums. `group` query heads share a key-value head; `window` is `u32::MAX` for a full layer. With `staged` the chunk's own rows are
/// in the stage.
#[kernel(block = 32, dependent, slots(widen(eight: U32x4, scale: u32) -> U32x4, reach(last: u32, row: u32) -> u32))]
pub fn attention_plain<const D: u32, const NARROW: bool, const SCALED: bool, KV: Float>(
    q: Input<f32>,
    k: Input<KV>,
    v: Input<KV>,
    k_stage: Input<KV>,
    v_stage: Input<KV>,
    state: Input<u32>,
    pages: Weights<u32>,
    out: Output<f32>,
    group: u32,
    window: u32,
    capacity: u32,
    record_stride: u32,
    max_pages: u32,
    page_stride: u32,
    staged: u32,
) {
    require!(D % 32 == 0);
    grid_launch_dependents();
    grid_dependency_wait();
    let head = block_idx();
    let row = block_idx_y();
    let record = record_of(state, row, record_stride);
    let of_record = row_of_record(record, row, record_stride);
    if of_record >= record.y {
        return;
    }
    let position = record.x + of_record;
    let first = first_visible(position, window);
    let last = reach(position, row);
    let query = q.offset((row * grid_dim() + head) * D);
    let kv_row = grid_dim() / group * head_len(D);
    let kv_head = head / group * head_len(D);
    let stage_from = if staged == 1 { record.x } else { 0xffff_ffff };

    let mut largest = f32::NEG_INFINITY;
    for at in first..last + 1 {
        let in_stage = at >= stage_from;
        let page = if in_stage { 0u64 } else { page_start(pages, record.w, at, window, max_pages, page_stride) };
        // The row's own segment lies in the stage from its first row on.
        let staged_row = if in_stage { record.z + (at - record.x) } else { 0 };
        let start = row_of_page(at, staged_row, if in_stage { 0 } else { capacity }) * kv_row + kv_head;
        let key = if in_stage { k_stage } else { k.offset(page) };
        largest = largest.max(plain_score(widen, query, key.offset(start)));
    }
    let mut total = 0.0f32;
    let mut sums = regs(0.0f32, D / 32);
    for at in first..last + 1 {
        let in_stage = at >= stage_from;
        let page = if in_stage { 0u64 } else { page_start(pages, record.w, at, window, max_pages, page_stride) };
        // The row's own segment lies in the stage from its first row on.
        let staged_row = if in_stage { record.z + (at - record.x) } else { 0 };
        let start = row_of_page(at, staged_row, if in_stage { 0 } else { capacity }) * kv_row + kv_head;
        let key = if in_stage { k_stage } else { k.offset(page) };
        let values = if in_stage { v_stage } else { v.offset(page) };
        let weight = (plain_score(widen, query, key.offset(start)) - largest).exp();
        let value = values.offset(start);
        total += weight;
        #[unroll]
        for i in 0..D / 32 {
            sums[i] = weight.mul_add(value_at(widen, value, D, i * 32 + lane_id()), sums[i]);
        }
    }
    #[unroll]
    for i in 0..D / 32 {
        out[(row * grid_dim() + head) * D + i * 32 + lane_id()] = sums[i] / total;
    }
}

impl Attention {
    /// `ahead`: soft tokens see those of their picture that come after them.
    pub fn plain(&self, ahead: bool) -> Result<Instance, InstanceError> {
        attention_plain::Chosen {
            D: self.head_dim,
            NARROW: self.kv.is_narrow(),
            SCALED: self.kv == KvType::Q8_0,
            KV: self.element(),
            widen: widen_slot(self.kv),
            reach: reach(ahead),
        }
        .build()
    }

    pub fn plain_grid(&self, rows: u32) -> [u32; 3] {
        [self.heads(), rows, 1]
    }
}
