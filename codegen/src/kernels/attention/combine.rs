//! What the splits of `decode.rs` left, merged in a fixed order: as f32 rows, or as int8 for the output product.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

use super::Attention;
use super::floats::add_scaled;
use crate::kernels::quantise::quantise8;

/// Values of a head that a block merges: heads are few, and a long context leaves many splits.
const SLICE: u32 = 64;

/// Eight values of a head, merged: `low` and `high`. The threads take pieces of eight values from every 16th split; warp 0 adds
/// up what they found, and only its values are complete. A collective of a block of 128 threads.
#[device]
pub fn merge_splits<const D: u32>(
    extrema: Input<F32x2>,
    values: Input<f32>,
    found: Shared<f32>,
    splits: u32,
    column: u32,
    low: &mut F32x4,
    high: &mut F32x4,
) {
    let mut largest = f32::NEG_INFINITY;
    for split in (lane_id()..splits).by(32) {
        largest = largest.max(extrema[split].x);
    }
    largest = warp_max(largest);
    let mut total = 0.0f32;
    for split in (lane_id()..splits).by(32) {
        let part = extrema[split];
        total = part.y.mul_add((part.x - largest).exp(), total);
    }
    total = warp_sum(total);

    let team = thread_idx() / 8;
    for split in (team..splits).by(16) {
        let part = extrema[split];
        // An empty split has no values.
        if part.y > 0.0 {
            let factor = (part.x - largest).exp() / total;
            *low = add_scaled(*low, factor, load::<F32x4>(values, split * D + column));
            *high = add_scaled(*high, factor, load::<F32x4>(values, split * D + column + 4));
        }
    }
    store(found, thread_idx() * 8, *low);
    store(found, thread_idx() * 8 + 4, *high);
    barrier();
    if warp_id() == 0 {
        *low = F32x4::ZERO;
        *high = F32x4::ZERO;
        #[unroll(4)]
        for other in 0u32..16 {
            let at = (other * 8 + thread_idx() % 8) * 8;
            *low = add_scaled(*low, 1.0, load::<F32x4>(found, at));
            *high = add_scaled(*high, 1.0, load::<F32x4>(found, at + 4));
        }
    }
}

/// Merges the splits of a row's heads. The grid is (query heads, slices of a head, rows).
#[kernel(block = 128, dependent)]
pub fn attention_combine<const D: u32>(
    extrema: Input<F32x2>,
    values: Input<f32>,
    state: Input<u32>,
    out: Output<f32>,
    splits: u32,
) {
    require!(D % 64 == 0);
    let found = shared::<f32>(1024);
    grid_dependency_wait();
    grid_launch_dependents();
    if block_idx_z() >= state[1u32] {
        return;
    }
    let head = block_idx_z() * grid_dim() + block_idx();
    let column = block_idx_y() * 64 + thread_idx() % 8 * 8;
    let mut low = F32x4::ZERO;
    let mut high = F32x4::ZERO;
    merge_splits(
        extrema.offset(head * splits),
        values.offset(head * splits * D),
        found,
        splits,
        column,
        &mut low,
        &mut high,
    );
    if thread_idx() < 8 {
        store(out, head * D + column, low);
        store(out, head * D + column + 4, high);
    }
}

/// The same, quantised to int8.
#[kernel(block = 128, dependent)]
pub fn attention_combine_int8<const D: u32>(
    extrema: Input<F32x2>,
    values: Input<f32>,
    state: Input<u32>,
    xq: Output<u32>,
    xscale: Output<f32>,
    xsum: Output<i32>,
    splits: u32,
) {
    require!(D % 64 == 0);
    let found = shared::<f32>(1024);
    grid_dependency_wait();
    grid_launch_dependents();
    if block_idx_z() >= state[1u32] {
        return;
    }
    let head = block_idx_z() * grid_dim() + block_idx();
    let column = block_idx_y() * 64 + thread_idx() % 8 * 8;
    let mut low = F32x4::ZERO;
    let mut high = F32x4::ZERO;
    merge_splits(
        extrema.offset(head * splits),
        values.offset(head * splits * D),
        found,
        splits,
        column,
        &mut low,
        &mut high,
    );
    if warp_id() == 0 {
        let codes = quantise8(low, high);
        let at = head * D + column;
        if thread_idx() < 8 {
            store(xq, at / 4, u32x2(codes.x, codes.y));
            if thread_idx() % 4 == 0 {
                xscale[at / 32] = f32::from_bits(codes.z);
                xsum[at / 32] = codes.w as i32;
            }
        }
    }
}

impl Attention {
    pub fn combine(&self) -> Result<Instance, InstanceError> {
        Instance::of(attention_combine::DEF).constant("D", self.head_dim).build()
    }

    pub fn combine_int8(&self) -> Result<Instance, InstanceError> {
        Instance::of(attention_combine_int8::DEF).constant("D", self.head_dim).build()
    }

    pub fn combine_grid(&self, rows: u32) -> [u32; 3] {
        [self.heads(), self.head_dim / SLICE, rows]
    }
}
