//! The partial results of `decode.rs`, merged in a fixed order: by kernels of their own, as f32 rows or as int8 for the
//! output product, and by the last block of `step.rs`.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

use super::Attention;
use super::address::{record_of, row_of_record};
use super::floats::add_scaled;
use crate::kernels::quantise::quantise8;

/// Values of a head that a block merges: heads are few, and a long context has many splits.
const SLICE: u32 = 64;

/// Splits that are added up before anything is added to their sum: a sixteenth of all.
#[device]
pub fn run_of(splits: u32) -> u32 {
    splits.div_ceil(16)
}

/// Eight values of a head, merged: `low` and `high`. Eight threads at a time take a run of splits, each eight values of
/// it; warp 0 adds up the runs, and only its values are complete. A collective of a block of 128 threads.
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

    let run = run_of(splits);
    let first = thread_idx() / 8 * run;
    for split in first..(first + run).min(splits) {
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

/// What each of `count` parts weighs in each of GROUP heads, into `shares[head * (D + 8) + part]`, relative to the
/// head's largest score, or as a share of all if this merge is the last. A warp takes a head.
#[device]
pub fn weigh_parts<const D: u32, const GROUP: u32, const THREADS: u32>(
    extrema: Input<F32x2>,
    stride: u32,
    shares: Shared<f32>,
    largest: Shared<f32>,
    totals: Shared<f32>,
    count: u32,
    is_last: bool,
) {
    for head in (warp_id()..GROUP).by(THREADS / 32) {
        let mut top = f32::NEG_INFINITY;
        for part in (lane_id()..count).by(32) {
            top = top.max(extrema[head * stride + part].x);
        }
        top = warp_max(top);
        let mut total = 0.0f32;
        for part in (lane_id()..count).by(32) {
            let found = extrema[head * stride + part];
            total = found.y.mul_add((found.x - top).exp(), total);
        }
        total = warp_sum(total);
        let whole = if is_last { total } else { 1.0 };
        for part in (lane_id()..count).by(32) {
            shares[head * (D + 8) + part] = (extrema[head * stride + part].x - top).exp() / whole;
        }
        if lane_id() == 0 {
            largest[head] = top;
            totals[head] = total;
        }
    }
    barrier();
}

/// Four values of a head, merged: the loads of 16 parts are in flight at once, and they are added up in the order of
/// [`merge_splits`], `run` parts to a run. Only parts that weigh something are loaded: a merge's time is what it reads.
#[device]
pub fn merge_four<const D: u32>(values: Input<f32>, shares: Shared<f32>, count: u32, run: u32) -> F32x4 {
    let mut all = F32x4::ZERO;
    let mut sum = F32x4::ZERO;
    let mut of_run = run;
    for first in (0..count).by(16) {
        let mut weights = regs(0.0f32, 16);
        let mut ahead = regs(F32x4::ZERO, 16);
        #[unroll]
        for i in 0u32..16 {
            if first + i < count {
                weights[i] = shares[first + i];
                if weights[i] > 0.0 {
                    ahead[i] = load::<F32x4>(values, (first + i) * D);
                }
            }
        }
        #[unroll]
        for i in 0u32..16 {
            if of_run == 0 {
                all = add_scaled(all, 1.0, sum);
                sum = F32x4::ZERO;
                of_run = run;
            }
            of_run = of_run - 1;
            sum = add_scaled(sum, weights[i], ahead[i]);
        }
    }
    add_scaled(all, 1.0, sum)
}

/// Merges the splits of a row's heads. The grid is (query heads, slices of a head, rows).
#[kernel(block = 128, dependent)]
pub fn attention_combine<const D: u32>(
    extrema: Input<F32x2>,
    values: Input<f32>,
    state: Input<u32>,
    out: Output<f32>,
    splits: u32,
    record_stride: u32,
) {
    require!(D % 64 == 0);
    let found = shared::<f32>(1024);
    grid_dependency_wait();
    grid_launch_dependents();
    let record = record_of(state, block_idx_z(), record_stride);
    if row_of_record(record, block_idx_z(), record_stride) >= record.y {
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
    record_stride: u32,
) {
    require!(D % 64 == 0);
    let found = shared::<f32>(1024);
    grid_dependency_wait();
    grid_launch_dependents();
    let record = record_of(state, block_idx_z(), record_stride);
    if row_of_record(record, block_idx_z(), record_stride) >= record.y {
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
        attention_combine::Chosen { D: self.head_dim }.build()
    }

    pub fn combine_int8(&self) -> Result<Instance, InstanceError> {
        attention_combine_int8::Chosen { D: self.head_dim }.build()
    }

    pub fn combine_grid(&self, rows: u32) -> [u32; 3] {
        [self.heads(), self.head_dim / SLICE, rows]
    }
}
