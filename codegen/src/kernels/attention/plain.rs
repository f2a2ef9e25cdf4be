//! Attention as its definition says it, for any number of rows: the oracle of the fast kernels on a GPU, and what a
//! plan without fusion uses.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{DeviceDef, Instance, InstanceError};

use super::Attention;
use super::address::{first_visible, record_of, row_of_record};
use super::chunk::{chunk_of, keys_of, page_at, row_at, values_of};
use super::narrow::{head_len, value_at, widen_slot};
use super::split::head_of;
use super::view::{CacheFormat, KvView, StageView};

/// The last position that a soft token sees: the last of its picture's, which come after it. Other rows see up to their
/// own position. `row` is the row's number in the chunk, whose rows have a word each.
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

/// `out = softmax(q · kᵀ) · v`, a warp for each row and query head: one pass over the keys for the largest score, one
/// for the sums. `group` query heads share a key-value head.
#[kernel(block = 32, dependent, slots(widen(eight: U32x4, scale: u32) -> U32x4, reach(last: u32, row: u32) -> u32))]
pub fn attention_plain<const D: u32, const C: CacheFormat, KV: Float>(
    q: Input<f32>,
    kv: KvView<KV>,
    stage: StageView<KV>,
    state: Input<u32>,
    out: Output<f32>,
    group: u32,
    record_stride: u32,
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
    let first = first_visible(position, kv.window);
    let last = reach(position, row);
    let query = q.offset((row * grid_dim() + head) * D);
    let number = head / group;
    let view = head_of(kv, record.w, number, grid_dim() / group);
    let chunk = chunk_of(view, stage, record, number * head_len(D), first, last);

    let mut largest = f32::NEG_INFINITY;
    for at in first..last + 1 {
        let key = row_at(keys_of(chunk, page_at(chunk, at)), at);
        largest = largest.max(plain_score(widen, query, key));
    }
    let mut total = 0.0f32;
    let mut sums = regs(0.0f32, D / 32);
    for at in first..last + 1 {
        let page = page_at(chunk, at);
        let weight = (plain_score(widen, query, row_at(keys_of(chunk, page), at)) - largest).exp();
        let value = row_at(values_of(chunk, page), at);
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
            C: CacheFormat::of(self.kv),
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
