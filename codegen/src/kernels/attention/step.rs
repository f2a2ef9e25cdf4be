//! A decoded row's attention in one launch: head norms, RoPE, the store of the new key and value, split-KV attention, and the
//! merge of the splits.
//!
//! It is `heads.rs`, `decode.rs` and `combine.rs` behind each other, and gives their bits. What it saves is the way through
//! memory and two launches. Each block norms and rotates its own query heads. The new key and value are made by the block
//! whose split has the row's position; it uses them as the cache will hold them, and no other block looks at that row of the
//! cache. Splits that see nothing leave at once: how many do not follows from the position, so a counter for each key-value
//! head finds the last of them, which merges. A single one needs no merge at all.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

use super::Attention;
use super::decode::{add_scaled, attend, copy_tile, split_start, tile_end};
use super::plain::first_visible;
use crate::kernels::heads::{add_squares, cos_sin, head_factor, rotated};
use crate::kernels::quantise::{int8_codes, largest_of};

/// Norms, and rotates, the G query heads of the block and, if `fresh`, its new key and value, which are then rounded, stored,
/// and kept in `new_key` and `new_value`. A warp takes a head at a time, and has all its heads on their way at once.
#[device]
pub fn prepare_heads<const D: u32, const G: u32, const THREADS: u32, const ROUNDS: u32, const OWN: bool, KV: Float>(
    queries: Shared<f32>,
    new_key: Shared<KV>,
    new_value: Shared<KV>,
    q_head: Input<f32>,
    k_head: Input<f32>,
    v_head: Input<f32>,
    k_row: InOut<KV>,
    v_row: InOut<KV>,
    q_low: &mut Regs<f32>,
    q_high: &mut Regs<f32>,
    k_low: &mut Regs<f32>,
    k_high: &mut Regs<f32>,
    turns: &mut Regs<F32x2>,
    fresh: bool,
    epsilon: f32,
) {
    let heads = if fresh { G + 2 } else { G };
    let lane = lane_id();
    let mut low = regs(0.0f32, ROUNDS * D / 64);
    let mut high = regs(0.0f32, ROUNDS * D / 64);
    #[unroll]
    for round in 0..ROUNDS {
        let head = warp_id() + round * (THREADS / 32);
        let of_kv = if head == G { k_head } else { v_head };
        let source = if head < G { q_head.offset(head * D) } else { of_kv };
        if head < heads {
            #[unroll]
            for p in 0..D / 64 {
                low[round * D / 64 + p] = source[lane + 32 * p];
                high[round * D / 64 + p] = source[lane + 32 * p + D / 2];
            }
        }
    }
    #[unroll]
    for round in 0..ROUNDS {
        let head = warp_id() + round * (THREADS / 32);
        let mut squares = 0.0f32;
        #[unroll]
        for p in 0..D / 64 {
            squares = add_squares(squares, low[round * D / 64 + p], high[round * D / 64 + p]);
        }
        let factor = head_factor(squares, D, epsilon);
        #[unroll]
        for p in 0..D / 64 {
            let i = lane + 32 * p;
            let x = low[round * D / 64 + p] * factor;
            let y = high[round * D / 64 + p] * factor;
            if head < G {
                let turned = rotated(x * q_low[p], y * q_high[p], turns[p]);
                queries[head * D + i] = turned.x;
                queries[head * D + i + D / 2] = turned.y;
            } else if OWN && fresh && head == G {
                let turned = rotated(x * k_low[p], y * k_high[p], turns[p]);
                new_key[i] = KV::from_f32(turned.x);
                new_key[i + D / 2] = KV::from_f32(turned.y);
                k_row[i] = KV::from_f32(turned.x);
                k_row[i + D / 2] = KV::from_f32(turned.y);
            } else if OWN && fresh && head == G + 1 {
                new_value[i] = KV::from_f32(x);
                new_value[i + D / 2] = KV::from_f32(y);
                v_row[i] = KV::from_f32(x);
                v_row[i + D / 2] = KV::from_f32(y);
            }
        }
    }
}

/// The share of each split in each of G heads, into `shares[head * D + split]`; zero where a split saw nothing. A warp takes a
/// head. `used` splits from `start` on, around the end, saw something.
#[device]
pub fn share_splits<const D: u32, const G: u32, const THREADS: u32>(
    extrema: Input<F32x2>,
    shares: Shared<f32>,
    start: u32,
    used: u32,
    splits: u32,
) {
    for head in (warp_id()..G).by(THREADS / 32) {
        let mut largest = f32::NEG_INFINITY;
        for split in (lane_id()..splits).by(32) {
            if (split + splits - start) % splits < used {
                largest = largest.max(extrema[head * splits + split].x);
            }
        }
        largest = warp_max(largest);
        let mut total = 0.0f32;
        for split in (lane_id()..splits).by(32) {
            if (split + splits - start) % splits < used {
                let part = extrema[head * splits + split];
                total = part.y.mul_add((part.x - largest).exp(), total);
            }
        }
        total = warp_sum(total);
        for split in (lane_id()..splits).by(32) {
            let mut share = 0.0f32;
            if (split + splits - start) % splits < used {
                share = (extrema[head * splits + split].x - largest).exp() / total;
            }
            shares[head * D + split] = share;
        }
    }
}

/// Four values of a head, merged: those of 16 splits on their way at once, added up in the order of `combine.rs`.
#[device]
pub fn merge_four<const D: u32>(values: Input<f32>, shares: Shared<f32>, head: u32, column: u32, splits: u32) -> F32x4 {
    let mut sums = regs(F32x4::ZERO, 16);
    for first in (0..splits).by(16) {
        #[unroll]
        for i in 0u32..16 {
            if first + i < splits {
                let share = shares[head * D + first + i];
                // A split that saw nothing has no values.
                if share > 0.0 {
                    let four = load::<F32x4>(values, (head * splits + first + i) * D + column);
                    sums[i] = add_scaled(sums[i], share, four);
                }
            }
        }
    }
    let mut sum = F32x4::ZERO;
    #[unroll]
    for i in 0u32..16 {
        sum = add_scaled(sum, 1.0, sums[i]);
    }
    sum
}

/// Leaves four values of the output as they are.
#[device]
pub fn keep_floats(value: F32x4, at: u32, out: Output<f32>) -> F32x4 {
    store(out, at, value);
    value
}

/// Leaves four values of the output as int8, eight lanes to a group. A collective of the warp.
#[device]
pub fn keep_int8(value: F32x4, at: u32, xq: Output<u32>, xscale: Output<f32>, xsum: Output<i32>) -> F32x4 {
    let mut largest = largest_of(value);
    largest = largest.max(shfl_xor(largest, 1));
    largest = largest.max(shfl_xor(largest, 2));
    largest = largest.max(shfl_xor(largest, 4));
    let scale = largest / 127.0;
    let codes = int8_codes(value, scale);
    let mut sum = dp4a(codes, 0x01010101, 0);
    sum = sum + shfl_xor(sum, 1);
    sum = sum + shfl_xor(sum, 2);
    sum = sum + shfl_xor(sum, 4);
    xq[at / 4] = codes;
    if at % 32 == 0 {
        xscale[at / 32] = scale;
        xsum[at / 32] = sum;
    }
    value
}

/// The attention of the row at position `state[0]`. `q`, `k` and `v` are the projections as they come; without OWN the layer
/// reads the cache of another, and neither `k`, `v` nor `k_weight` are looked at. `extrema` and `values` are `decode.rs`'s; with
/// MERGE they are scratch, and each four values of the output go through `keep`, else they are the result. `counters`, one
/// for each key-value head, are zero before and after. The grid is (key-value heads, splits).
#[kernel(block = THREADS, dependent, dynamic_shared, slots(keep(value: F32x4, at: u32) -> F32x4))]
pub fn attention_step<
    const D: u32,
    const G: u32,
    const KEYS: u32,
    const THREADS: u32,
    const VECTOR: u32,
    const ROUNDS: u32,
    const OWN: bool,
    const MERGE: bool,
    KV: Float,
>(
    q: Input<f32>,
    k: Input<f32>,
    v: Input<f32>,
    q_weight: Weights<f32>,
    k_weight: Weights<f32>,
    inverse_frequencies: Weights<f32>,
    state: Input<u32>,
    k_cache: InOut<KV>,
    v_cache: InOut<KV>,
    extrema: InOut<F32x2>,
    values: InOut<f32>,
    counters: InOut<u32>,
    window: u32,
    segment: u32,
    capacity: u32,
    epsilon: f32,
) {
    require!(D % 128 == 0 && THREADS * 4 % D == 0);
    require!(32 % KEYS == 0 && KEYS % (THREADS / 8) == 0 && KEYS % (THREADS * 16 / D) == 0);
    require!(KEYS * D % (THREADS * VECTOR) == 0 && G <= THREADS);
    require!(ROUNDS * THREADS / 32 >= if OWN { G + 2 } else { G });
    let queries = shared::<f32>(G * D);
    let keys = shared::<KV>(KEYS * D);
    let mixed = shared::<KV>(KEYS * D);
    let new_key = shared::<KV>(D);
    let new_value = shared::<KV>(D);
    let scores = shared::<f32>(G * KEYS);
    let largest = shared::<f32>(G);
    let totals = shared::<f32>(G);
    let factors = shared::<f32>(G);

    // What does not wait for the projections. The key is the work of one warp.
    let lane = lane_id();
    let mut q_low = regs(0.0f32, D / 64);
    let mut q_high = regs(0.0f32, D / 64);
    let mut k_low = regs(0.0f32, D / 64);
    let mut k_high = regs(0.0f32, D / 64);
    let mut turns = regs(F32x2::ZERO, D / 64);
    #[unroll]
    for p in 0..D / 64 {
        q_low[p] = q_weight[lane + 32 * p];
        q_high[p] = q_weight[lane + 32 * p + D / 2];
        turns[p] = f32x2(inverse_frequencies[lane + 32 * p], 0.0);
        if OWN && warp_id() == G % (THREADS / 32) {
            k_low[p] = k_weight[lane + 32 * p];
            k_high[p] = k_weight[lane + 32 * p + D / 2];
        }
    }

    grid_dependency_wait();
    grid_launch_dependents();
    let splits = grid_dim_y();
    let position = state[0u32];
    let head = block_idx() * G;
    let slot = head * splits + block_idx_y();
    let first = first_visible(position, window);
    let at = split_start(first, segment, block_idx_y(), splits);
    if at > position {
        if !MERGE && thread_idx() < G {
            extrema[slot + thread_idx() * splits] = f32x2(f32::NEG_INFINITY, 0.0);
        }
        return;
    }

    let fresh = OWN && position / segment % splits == block_idx_y();
    let stored = if OWN { position } else { position + 1 };
    let kv_row = grid_dim() * D;
    let k_head = read_only(k_cache).offset(block_idx() * D);
    let v_head = read_only(v_cache).offset(block_idx() * D);
    let end = tile_end(at, position, segment);
    copy_tile(keys, k_head, at, end, stored, kv_row, capacity);
    cp_async_commit();
    copy_tile(mixed, v_head, at, end, stored, kv_row, capacity);
    cp_async_commit();

    #[unroll]
    for p in 0..D / 64 {
        turns[p] = cos_sin(position as f32 * turns[p].x);
    }
    let new_row = (position % capacity) * kv_row + block_idx() * D;
    prepare_heads(
        queries,
        new_key,
        new_value,
        q.offset(head * D),
        k.offset(block_idx() * D),
        v.offset(block_idx() * D),
        k_cache.offset(new_row),
        v_cache.offset(new_row),
        &mut q_low,
        &mut q_high,
        &mut k_low,
        &mut k_high,
        &mut turns,
        fresh,
        epsilon,
    );
    // The new rows are read before the first barrier of the tiles.
    if fresh {
        barrier();
    }
    let mut sums = regs(F32x4::ZERO, G);
    attend(
        queries, keys, mixed, scores, largest, totals, factors, new_key, new_value, k_head, v_head, at, position,
        stored, segment, splits, kv_row, capacity, &mut sums,
    );

    let column = thread_idx() * 4;
    let start = first / segment;
    let used = (position / segment - start + 1).min(splits);
    if MERGE && used == 1 {
        if column < D {
            #[unroll]
            for h in 0..G {
                let four = add_scaled(F32x4::ZERO, 1.0 / totals[h], sums[h]);
                keep(four, (head + h) * D + column);
            }
        }
        return;
    }
    if column < D {
        #[unroll]
        for h in 0..G {
            store(values, (slot + h * splits) * D + column, sums[h]);
        }
    }
    if thread_idx() < G {
        extrema[slot + thread_idx() * splits] = f32x2(largest[thread_idx()], totals[thread_idx()]);
    }
    if MERGE {
        if last_block_of(counters, block_idx(), used) {
            let own_values = read_only(values).offset(head * splits * D);
            share_splits(read_only(extrema).offset(head * splits), queries, start % splits, used, splits);
            barrier();
            for i in (column..G * D).by(THREADS * 4) {
                keep(merge_four(own_values, queries, i / D, i % D, splits), head * D + i);
            }
        }
    }
}

/// What becomes of the attention's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepOut {
    /// Codes, scales and sums: what the output product reads. Launch arguments `keep_xq`, `keep_xscale`, `keep_xsum`.
    Int8,
    /// Launch argument `keep_out`.
    Floats,
    /// Partial results, for `combine.rs` to merge: contexts so long that one block would be busy with it for too long.
    Partials,
}

impl Attention {
    /// One launch for a decoded row. `own`: the layer has keys and values of its own.
    pub fn step(&self, own: bool, out: StepOut) -> Result<Instance, InstanceError> {
        let shape = self.decode_shape();
        let keep = match out {
            StepOut::Int8 => &[keep_int8::DEF][..],
            StepOut::Floats => &[keep_floats::DEF],
            StepOut::Partials => &[],
        };
        Instance::of(attention_step::DEF)
            .constant("D", self.head_dim)
            .constant("G", self.group)
            .constant("KEYS", shape.keys)
            .constant("THREADS", shape.threads)
            .constant("VECTOR", shape.vector)
            .constant("ROUNDS", (self.group + if own { 2 } else { 0 }).div_ceil(shape.threads / 32))
            .constant("OWN", own)
            .constant("MERGE", out != StepOut::Partials)
            .element("KV", self.kv)
            .slot("keep", keep)
            .build()
    }

    pub fn step_grid(&self) -> [u32; 3] {
        [self.kv_heads, self.splits(), 1]
    }

    /// Elements of `counters`.
    pub fn step_counters_len(&self) -> u64 {
        u64::from(self.kv_heads)
    }
}
