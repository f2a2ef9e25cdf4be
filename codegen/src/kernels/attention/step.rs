//! The attention of decoded rows in one launch: head norms, RoPE, the store of the new key and value, split-KV attention, and the
//! merge of the splits.
//!
//! It is `heads.rs`, `decode.rs` and `combine.rs` behind each other. What it saves is the way through memory and two launches.
//! Each block norms and rotates its own query heads. The new key and value are made by the block whose split has the row's
//! position; it uses them as the cache will hold them, and no other block looks at that row of the cache.
//!
//! How many splits see anything, the first ones, follows from the position. A single one needs no merge at all. A merge's time is
//! what one SM reads, so it is shared out. Where GPUs have clusters, the splits of a cluster merge out of each other's
//! shared memory, each block a part of the output. A window is one cluster. A full layer is several, which leave their results
//! in memory; of the blocks that have the same part, a counter finds the last, which merges those. Without clusters every
//! split leaves its result in memory, and the last block of a group of splits, then the last of all groups, merges. The order of
//! all additions is fixed by the shape; it is `combine.rs`'s, and so are the bits, unless there are groups or several clusters.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};
use gemma4c_plan::cuda::KvType;

use super::Attention;
use super::address::{page_start, record_of};
use super::combine::{merge_four, run_of, weigh_parts};
use super::decode::{attend, attend_narrow, copy_tile, tile_end};
use super::floats::add_scaled;
use super::narrow::{code_row, copy_codes, head_len, narrow_slot, operands_slot};
use super::peers::{load_peers, merge_clusters, merge_peers, peer_part};
use super::plain::first_visible;
use super::prepare::{fill_turns, load_frequencies, load_heads, prepare_heads};
use super::shape::ROOMY;
use super::tensor::clear_weights;
use crate::kernels::quantise::{codes_per_unit, int8_codes, largest_of, scale_of};

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
    let scale = scale_of(largest);
    let codes = int8_codes(value, codes_per_unit(largest));
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

/// Starts to copy a split's first tile: keys and values each as a group of copies.
#[device]
pub fn copy_first<
    const D: u32,
    const KEYS: u32,
    const THREADS: u32,
    const VECTOR: u32,
    const NARROW: bool,
    const SCALED: bool,
    KV: Float,
>(
    keys: Shared<KV>,
    mixed: Shared<KV>,
    k_head: Input<KV>,
    v_head: Input<KV>,
    at: u32,
    end: u32,
    stored: u32,
    kv_row: u32,
    capacity: u32,
) {
    if NARROW {
        copy_codes(keys, k_head, at, end, stored, kv_row, capacity);
    } else {
        copy_tile(keys, k_head, at, end, stored, kv_row, capacity);
    }
    cp_async_commit();
    if NARROW {
        copy_codes(keys.offset(KEYS * code_row()), v_head, at, end, stored, kv_row, capacity);
    } else {
        copy_tile(mixed, v_head, at, end, stored, kv_row, capacity);
    }
    cp_async_commit();
}

/// The attention of rows that have a record each. `q`, `k` and `v` are the projections as they come; without OWN the layer
/// reads the cache of another, and neither `k`, `v` nor `k_weight` are looked at. `extrema` and `values` are `decode.rs`'s; with
/// MERGE they are scratch, and each four values of the output go through `keep`, else they are the result. More than `grouped`
/// splits are merged in groups of as many. `counters` are zero before and after. With PEERS more than 1, splits are clusters of as
/// many blocks. The grid is (key-value heads, splits, rows), and every row has its own scratch and counters. The blocks of a row that
/// is free return at once. With KNOWN records are read before the wait, with EARLY caches too: nobody writes there who may still run.
#[kernel(block = THREADS, min_blocks = RESIDENT, cluster = PEERS, dependent, waits_first,
    early(KNOWN, state), early(EARLY, k_cache, v_cache), only_reads(!OWN, k_cache, v_cache), dynamic_shared, slots(
    keep(value: F32x4, at: u32) -> F32x4,
    narrow(bits: u32) -> u32,
    operands(eight: U32x4) -> U32x4
))]
pub fn attention_step<
    const D: u32,
    const G: u32,
    const KEYS: u32,
    const THREADS: u32,
    const VECTOR: u32,
    const TENSOR: bool,
    const SETS: u32,
    const SLICES: u32,
    const RESIDENT: u32,
    const BF: bool,
    const ROUNDS: u32,
    const OWN: bool,
    const MERGE: bool,
    const PEERS: u32,
    const NARROW: bool,
    const SCALED: bool,
    const KNOWN: bool,
    const EARLY: bool,
    const APART: bool,
    KV: Float,
>(
    q: Input<f32>,
    k: Input<f32>,
    v: Input<f32>,
    q_weight: Weights<f32>,
    k_weight: Weights<f32>,
    inverse_frequencies: Weights<f32>,
    state: Input<u32>,
    pages: Weights<u32>,
    k_cache: InOut<KV>,
    v_cache: InOut<KV>,
    extrema: InOut<F32x2>,
    values: InOut<f32>,
    counters: InOut<u32>,
    window: u32,
    segment: u32,
    grouped: u32,
    capacity: u32,
    epsilon: f32,
    q_stride: u32,
    k_stride: u32,
    v_stride: u32,
    max_pages: u32,
    page_stride: u32,
) {
    require!(KEYS * D % (THREADS * VECTOR) == 0 && G <= 16 && D % 128 == 0);
    require!(!TENSOR || THREADS / 32 % SLICES == 0 && KEYS * SLICES * 2 % THREADS == 0);
    require!(!NARROW || SLICES * 32 == THREADS);
    require!(ROUNDS * THREADS / 32 >= if OWN { G + 2 } else { G });
    require!(KNOWN || !EARLY);
    require!(PEERS >= 1 && PEERS <= 16 && (MERGE || PEERS == 1));
    // A tile of a full layer lies in one page.
    require!(256 % KEYS == 0);
    // The queries, and in the end their sums. The parts of scores take the queries' place or, with APART, one of their own.
    let work = shared::<f32>(if TENSOR && !APART && SLICES * (KEYS + 8) > D + 8 {
        G * SLICES * (KEYS + 8)
    } else {
        G * (D + 8)
    });
    let apart = shared::<f32>(if TENSOR && APART { G * SLICES * (KEYS + 8) } else { 1 });
    // Keys, and values; of 8 bits, the codes of both of one tile, and of another.
    let keys = shared::<KV>(if NARROW { 2 * KEYS * (D / 2 + 16) } else { KEYS * (D + 8) });
    let mixed = shared::<KV>(if NARROW { 2 * KEYS * (D / 2 + 16) } else { KEYS * (D + 8) });
    let new_key = shared::<KV>(D);
    let new_value = shared::<KV>(D);
    let weights = shared::<KV>(if TENSOR { SETS * 16 * (KEYS + 8) } else { 1 });
    let scores = shared::<f32>(if TENSOR { 1 } else { G * KEYS });
    let largest = shared::<f32>(G);
    let totals = shared::<f32>(G);
    let factors = shared::<f32>(G);
    let norms = shared::<f32>(if OWN { 2 * D } else { D });
    let turns = shared::<F32x2>(D / 2);

    // What does not wait for the projections. All of it is asked for before any of it is used.
    let mut own_norms = regs(0.0f32, (D + THREADS - 1) / THREADS * 2);
    #[unroll]
    for n in 0..(D + THREADS - 1) / THREADS {
        let i = (thread_idx() + n * THREADS).min(D - 1);
        own_norms[2 * n] = q_weight[i];
        if OWN {
            own_norms[2 * n + 1] = k_weight[i];
        }
    }
    let mut frequencies = regs(0.0f32, (D / 2 + THREADS - 1) / THREADS);
    load_frequencies(inverse_frequencies, &mut frequencies);

    let row = block_idx_z();
    let head = block_idx() * G;
    let mut low = regs(0.0f32, ROUNDS * D / 64);
    let mut high = regs(0.0f32, ROUNDS * D / 64);
    let q_raw = q.offset(row * q_stride + head * D);
    let k_raw = k.offset(row * k_stride + block_idx() * D);
    let v_raw = v.offset(row * v_stride + block_idx() * D);
    // What follows from a record comes before the wait where the record is known: places, cosines and, with EARLY, the first tile.
    if !KNOWN {
        grid_dependency_wait();
        grid_launch_dependents();
    }
    let record = record_of(state, row, 16);
    order_loads();
    #[unroll]
    for n in 0..(D + THREADS - 1) / THREADS {
        let i = thread_idx() + n * THREADS;
        if D % THREADS == 0 || i < D {
            norms[i] = own_norms[2 * n];
            if OWN {
                norms[D + i] = own_norms[2 * n + 1];
            }
        }
    }
    let splits = grid_dim_y();
    // A row that is free: its whole clusters leave.
    if record.y == 0 {
        if KNOWN {
            grid_dependency_wait();
            grid_launch_dependents();
        }
        return;
    }
    let position = record.x;
    // The row's scratch, and its heads of the output.
    let groups = if MERGE && grouped < splits { splits.div_ceil(grouped) } else { 0 };
    let row_slots = row * grid_dim() * G * (splits + groups);
    let out_head = (row * grid_dim() + block_idx()) * G;
    let slot = row_slots + head * splits + block_idx_y();
    let first = first_visible(position, window);
    let at = first + block_idx_y() * segment;
    let segments = (position - first) / segment + 1;
    let used = segments.min(splits);
    // The first block of the cluster: where it sees nothing, nobody of the cluster does.
    let rank = if PEERS > 1 { cluster_rank() } else { 0 };
    let leader = block_idx_y() - rank;
    let sees = block_idx_y() < used;
    if leader >= used || (used == 1 && !sees) {
        if KNOWN {
            grid_dependency_wait();
            grid_launch_dependents();
        }
        if !MERGE && thread_idx() < G {
            extrema[slot + thread_idx() * splits] = f32x2(f32::NEG_INFINITY, 0.0);
        }
        return;
    }

    let fresh = OWN && (segments - 1) % splits == block_idx_y();
    let stored = if OWN { position } else { position + 1 };
    let kv_row = grid_dim() * head_len(D);
    let k_head = read_only(k_cache).offset(block_idx() * head_len(D));
    let v_head = read_only(v_cache).offset(block_idx() * head_len(D));
    let new_page = if fresh { page_start(pages, record.w, position, window, max_pages, page_stride) } else { 0u64 };
    let page = if sees { page_start(pages, record.w, at, window, max_pages, page_stride) } else { 0u64 };
    let end = tile_end(at, position, at + segment);
    // Cosines are computed while the page is looked up.
    if sees {
        fill_turns(&mut frequencies, position, turns);
        if TENSOR && !NARROW {
            clear_weights(weights);
        }
    }
    if EARLY && sees {
        copy_first(keys, mixed, k_head.offset(page), v_head.offset(page), at, end, stored, kv_row, capacity);
    }
    if KNOWN {
        grid_dependency_wait();
        if EARLY || !sees {
            grid_launch_dependents();
        }
    }
    if sees {
        load_heads(q_raw, k_raw, v_raw, &mut low, &mut high);
        if !EARLY {
            copy_first(keys, mixed, k_head.offset(page), v_head.offset(page), at, end, stored, kv_row, capacity);
        }
    }
    if sees {
        barrier();
        let new_row = (position % capacity) * kv_row + block_idx() * head_len(D);
        let k_row = k_cache.offset(new_page).offset(new_row);
        let v_row = v_cache.offset(new_page).offset(new_row);
        // The new key and value: in their places in the first tile, or for a later one.
        let in_place = APART && fresh && position - at < KEYS;
        let fresh_key = if in_place { keys.offset((position - at) * (D + 8)) } else { new_key };
        let fresh_value = if in_place { mixed.offset((position - at) * (D + 8)) } else { new_value };
        prepare_heads(
            narrow,
            &mut low,
            &mut high,
            norms,
            turns,
            work,
            mixed,
            fresh_key,
            fresh_value,
            k_row,
            v_row,
            fresh,
            epsilon,
        );
        // The successor asks for its weights at once: what this block waits for itself has been asked for by now.
        if KNOWN && !EARLY {
            grid_launch_dependents();
        }
        if NARROW {
            attend_narrow(
                operands,
                work,
                keys,
                mixed,
                new_key,
                new_value,
                weights,
                largest,
                totals,
                factors,
                k_head,
                v_head,
                at,
                position,
                stored,
                segment,
                splits,
                kv_row,
                capacity,
                pages,
                record.w,
                window,
                max_pages,
                page_stride,
            );
        } else {
            attend(
                work,
                if APART { apart } else { work },
                keys,
                mixed,
                new_key,
                new_value,
                weights,
                scores,
                largest,
                totals,
                factors,
                k_head,
                v_head,
                at,
                position,
                stored,
                segment,
                splits,
                kv_row,
                capacity,
                pages,
                record.w,
                window,
                max_pages,
                page_stride,
                APART,
            );
        }
    }

    if MERGE && used == 1 {
        for i in (thread_idx() * 4..G * D).by(THREADS * 4) {
            let sum = load::<F32x4>(work, i / D * (D + 8) + i % D);
            keep(add_scaled(F32x4::ZERO, quotient(1.0, totals[i / D]), sum), out_head * D + i);
        }
        return;
    }
    if PEERS > 1 {
        let here = PEERS.min(used - leader);
        let clusters = used.div_ceil(PEERS);
        let results = (row * grid_dim() + block_idx()) * (splits / PEERS) * (G * D);
        cluster_barrier();
        // A warp takes 128 values, all of one head.
        let mut merged = regs(F32x4::ZERO, (G * D + PEERS * THREADS * 4 - 1) / (PEERS * THREADS * 4));
        let mut of_parts = regs(F32x2::ZERO, (G * D + PEERS * THREADS * 4 - 1) / (PEERS * THREADS * 4));
        #[unroll]
        for n in 0..(G * D + PEERS * THREADS * 4 - 1) / (PEERS * THREADS * 4) {
            let i = ((n * (THREADS / 32) + warp_id()) * PEERS + rank) * 128;
            if i < G * D {
                let four = work.offset(i / D * (D + 8) + i % D + lane_id() * 4);
                let part = peer_part(largest.offset(i / D), totals.offset(i / D), here);
                let mut parts = regs(F32x4::ZERO, PEERS);
                load_peers(four, here, &mut parts);
                let top = warp_max(part.x);
                // A share below 2^-100 is not correctly rounded, and changes nothing.
                let factor = (part.x - top).exp();
                let total = warp_sum(part.y.mul_add(factor, 0.0));
                merged[n] = merge_peers(&mut parts, if clusters == 1 { quotient(factor, total) } else { factor });
                of_parts[n] = f32x2(top, total);
            }
        }
        cluster_arrive();
        #[unroll]
        for n in 0..(G * D + PEERS * THREADS * 4 - 1) / (PEERS * THREADS * 4) {
            let i = ((n * (THREADS / 32) + warp_id()) * PEERS + rank) * 128;
            if i < G * D && clusters == 1 {
                keep(merged[n], out_head * D + i + lane_id() * 4);
            } else if i < G * D {
                let to = results + leader / PEERS * (G * D) + i;
                store(values, to + lane_id() * 4, merged[n]);
                if lane_id() == 0 {
                    extrema[to / 128] = of_parts[n];
                }
            }
        }
        // What the others still read must not go.
        cluster_wait();
        if clusters > 1 && last_block_of(counters, (row * grid_dim() + block_idx()) * PEERS + rank, clusters) {
            for i in ((warp_id() * PEERS + rank) * 128..G * D).by(PEERS * THREADS * 4) {
                let from = results + i;
                let mut part = f32x2(f32::NEG_INFINITY, 0.0);
                if lane_id() < clusters {
                    part = extrema[(from + lane_id() * (G * D)) / 128];
                }
                let factor = (part.x - warp_max(part.x)).exp();
                let total = warp_sum(part.y.mul_add(factor, 0.0));
                let fours = read_only(values).offset(from + lane_id() * 4);
                keep(merge_clusters(fours, quotient(factor, total), clusters), out_head * D + i + lane_id() * 4);
            }
        }
        return;
    }
    for i in (thread_idx() * 4..G * D).by(THREADS * 4) {
        store(values, (slot + i / D * splits) * D + i % D, load::<F32x4>(work, i / D * (D + 8) + i % D));
    }
    if thread_idx() < G {
        extrema[slot + thread_idx() * splits] = f32x2(largest[thread_idx()], totals[thread_idx()]);
    }
    if MERGE {
        let counter = (row * grid_dim() + block_idx()) * (groups + 1);
        let in_groups = used > grouped;
        let group = block_idx_y() / grouped;
        let group_slot = row_slots + grid_dim() * G * splits + head * groups;
        if in_groups {
            let from = group * grouped;
            let count = grouped.min(used - from);
            if !last_block_of(counters, counter + 1 + group, count) {
                return;
            }
            let run = run_of(count);
            let base = row_slots + head * splits + from;
            let found = read_only(extrema).offset(base);
            weigh_parts(found, splits, work, largest, totals, count, false);
            for i in (thread_idx() * 4..G * D).by(THREADS * 4) {
                let h = i / D;
                let parts = read_only(values).offset((base + h * splits) * D + i % D);
                let merged = merge_four(parts, work.offset(h * (D + 8)), count, run);
                store(values, (group_slot + h * groups + group) * D + i % D, merged);
            }
            if thread_idx() < G {
                let to = group_slot + thread_idx() * groups + group;
                extrema[to] = f32x2(largest[thread_idx()], totals[thread_idx()]);
            }
        }
        let arrivals = if in_groups { used.div_ceil(grouped) } else { used };
        if !last_block_of(counters, counter, arrivals) {
            return;
        }
        let base = if in_groups { group_slot } else { row_slots + head * splits };
        let stride = if in_groups { groups } else { splits };
        let run = run_of(if in_groups { arrivals } else { splits });
        let found = read_only(extrema).offset(base);
        weigh_parts(found, stride, work, largest, totals, arrivals, true);
        for i in (thread_idx() * 4..G * D).by(THREADS * 4) {
            let h = i / D;
            let parts = read_only(values).offset((base + h * stride) * D + i % D);
            keep(merge_four(parts, work.offset(h * (D + 8)), arrivals, run), out_head * D + i);
        }
    }
}

/// Groups of splits; none where all are merged at once.
pub fn groups(splits: u32, grouped: u32) -> u32 {
    if grouped < splits { splits.div_ceil(grouped) } else { 0 }
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

/// What is read before the wait: whoever writes there has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Early {
    Nothing,
    /// The rows' records.
    Records,
    /// Records, keys and values.
    Caches,
}

impl Attention {
    /// One launch for decoded rows. `own`: the layer has keys and values of its own.
    pub fn step(&self, own: bool, early: Early, out: StepOut) -> Result<Instance, InstanceError> {
        let keep = match out {
            StepOut::Int8 => vec![keep_int8::DEF],
            StepOut::Floats => vec![keep_floats::DEF],
            StepOut::Partials => vec![],
        };
        let shape = self.decode_shape();
        let heads = self.group + if own { 2 } else { 0 };
        attention_step::Chosen {
            D: self.head_dim,
            G: self.group,
            KEYS: shape.keys,
            THREADS: shape.threads,
            VECTOR: shape.vector,
            TENSOR: self.kv != KvType::F32,
            SETS: self.group.div_ceil(8),
            SLICES: shape.slices,
            RESIDENT: shape.resident,
            BF: self.kv == KvType::BF16,
            ROUNDS: heads.div_ceil(shape.threads / 32),
            OWN: own,
            MERGE: out != StepOut::Partials,
            PEERS: if out == StepOut::Partials { 1 } else { self.peers() },
            NARROW: self.kv.is_narrow(),
            SCALED: self.kv == KvType::Q8_0,
            KNOWN: early != Early::Nothing,
            EARLY: early == Early::Caches,
            APART: !self.kv.is_narrow() && self.group <= 8 && self.shared_bytes >= ROOMY,
            KV: self.element(),
            keep,
            narrow: narrow_slot(self.kv),
            operands: operands_slot(self.kv),
        }
        .build()
    }

    /// Whether it pays to read keys and values before the wait. A window that takes more than half of the SMs reads as much then as the product before it, which has to end first:
    /// measured, such a launch is no shorter once the window is full. A full layer's blocks are few until the context is long.
    pub fn starts_early(&self) -> bool {
        self.window.is_none() || self.kv_heads * self.splits() <= self.multiprocessors / 2
    }

    pub fn step_grid(&self, rows: u32) -> [u32; 3] {
        [self.kv_heads, self.splits(), rows]
    }

    /// The launch argument `grouped`: splits that are merged at once. All of a window's; the root of a full layer's, so that
    /// both merges are as short as they can be.
    pub fn grouped(&self) -> u32 {
        let splits = self.splits();
        if self.window.is_some() || splits <= 16 { splits } else { splits.isqrt() + 1 }
    }

    fn groups(&self) -> u32 {
        groups(self.splits(), self.grouped())
    }

    /// Results that go through memory, of one key-value head: those of splits and of their groups, or those of clusters.
    fn step_results(&self) -> u32 {
        match (self.peers(), self.splits()) {
            (1, splits) => splits + self.groups(),
            (peers, splits) if splits == peers => 0,
            (peers, splits) => splits / peers,
        }
    }

    /// Elements of `counters`, for a row.
    pub fn step_counters_len(&self) -> u64 {
        let counters = match self.peers() {
            1 => self.groups() + 1,
            peers => peers,
        };
        if self.step_results() == 0 { 0 } else { u64::from(self.kv_heads) * u64::from(counters) }
    }

    /// Elements of `extrema`, for a row: one for each head, or for each 128 values of it.
    pub fn step_extrema_len(&self) -> u64 {
        if self.peers() == 1 { self.step_values_len() / u64::from(self.head_dim) } else { self.step_values_len() / 128 }
    }

    /// Elements of `values`, for a row.
    pub fn step_values_len(&self) -> u64 {
        u64::from(self.heads()) * u64::from(self.head_dim) * u64::from(self.step_results())
    }
}
