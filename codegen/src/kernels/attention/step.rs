//! The attention of decoded rows in one launch: head norms, RoPE, the store of the new key and value, split-KV
//! attention, and the merge of the splits.
//!
//! It is `heads.rs`, `decode.rs` and `combine.rs` in one launch: it saves the way through memory and two launches. Each
//! block norms and rotates its own query heads. The new key and value are made by the block whose split has the row's
//! position; it uses them as the cache will hold them, and no other block reads that row of the cache.
//!
//! How many splits see anything, the first ones, follows from the position. A single one needs no merge at all. Where
//! GPUs have clusters, the splits of a cluster merge out of each other's shared memory. A window is one cluster. A full
//! layer is several, which write their results to memory; of the blocks that have the same part, a counter finds the
//! last, which merges those. Without clusters every split writes its result to memory, and the last block of a group of
//! splits, then the last of all groups, merges (`merge.rs`).

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{DeviceDef, Instance, InstanceError};

use super::Attention;
use super::address::record_of;
use super::merge::{groups_of, merge_in_clusters, merge_in_memory, row_slots, store_result, write_only_split};
use super::narrow::{narrow_slot, operands_slot};
use super::prepare::{
    HeadsMemory, fill_rotations, load_frequencies, load_heads, load_norms, new_page, new_row, prepare_heads,
    store_norms,
};
use super::shape::ROOMY;
use super::split::{
    SplitMemory, attend_alone, copy_first, head_of, pages_of, read_only_view, require_tiles, seen_from,
};
use super::tensor::clear_weights;
use super::view::{AttentionShape, CacheFormat, DecodeTile, KvViewMut, PartialResults, Pipeline, Projections};
use crate::kernels::quantise::{codes_per_unit, int8_codes, largest_of, scale_of};

/// What one launch does besides attention.
#[config]
pub struct StepOptions {
    /// The layer has keys and values of its own; else it reads the cache of another.
    pub HAS_KV: bool,
    /// How often the block's warps take a head each, to norm it.
    pub ROUNDS: u32,
    /// The splits are merged; else what they found is the result.
    pub MERGE: bool,
    /// Blocks of a cluster, whose splits are merged out of shared memory.
    pub CLUSTER_SIZE: u32,
    /// Records are read before the wait: nobody writes there who may still run.
    pub PREFETCH_RECORD: bool,
    /// So are keys and values.
    pub PREFETCH_KV: bool,
}

/// Writes four values of the output.
#[device]
pub fn output_floats(value: F32x4, at: u32, out: Output<f32>) -> F32x4 {
    store(out, at, value);
    value
}

/// Writes four values of the output as bf16.
#[device]
pub fn output_bf16(value: F32x4, at: u32, out: Output<BF16>) -> F32x4 {
    store(out, at, u32x2(pack_bf16(value.x, value.y), pack_bf16(value.z, value.w)));
    value
}

/// Writes four values of the output as f16.
#[device]
pub fn output_f16(value: F32x4, at: u32, out: Output<F16>) -> F32x4 {
    store(out, at, u32x2(pack_f16(value.x, value.y), pack_f16(value.z, value.w)));
    value
}

/// Writes four values of the output as int8, eight lanes to a group. A collective of the warp.
#[device]
pub fn output_int8(value: F32x4, at: u32, xq: Output<u32>, xscale: Output<f32>, xsum: Output<i32>) -> F32x4 {
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

/// A block that returns has waited, too.
#[device]
pub fn end_prefetch<const PREFETCH_RECORD: bool>() {
    if PREFETCH_RECORD {
        grid_dependency_wait();
        grid_launch_dependents();
    }
}

/// The attention of rows that have a record each. `parts` is scratch with MERGE, and each four values of the output go
/// to `write`; else it is the result, which is `decode.rs`'s. More than `grouped` splits are merged in groups of as
/// many. The grid is (key-value heads, splits, rows), and every row has its own scratch and counters. The blocks of a
/// row that is free return at once.
#[kernel(block = T.THREADS, min_blocks = T.RESIDENT, cluster = O.CLUSTER_SIZE, dependent, waits_first,
    early(O.PREFETCH_RECORD, state), early(O.PREFETCH_KV, kv.k, kv.v), only_reads(!O.HAS_KV, kv.k, kv.v), dynamic_shared, slots(
    write(value: F32x4, at: u32) -> F32x4,
    narrow(bits: u32) -> u32,
    operands(eight: U32x4) -> U32x4
))]
pub fn attention_step<
    const S: AttentionShape,
    const C: CacheFormat,
    const T: DecodeTile,
    const P: Pipeline,
    const O: StepOptions,
    KV: Float,
>(
    heads: Projections,
    state: Input<u32>,
    kv: KvViewMut<KV>,
    parts: PartialResults,
    segment: u32,
    grouped: u32,
) {
    require_tiles();
    require!(O.ROUNDS * T.THREADS / 32 >= if O.HAS_KV { S.GROUP + 2 } else { S.GROUP });
    require!(O.PREFETCH_RECORD || !O.PREFETCH_KV);
    require!(O.CLUSTER_SIZE >= 1 && O.CLUSTER_SIZE <= 16 && (O.MERGE || O.CLUSTER_SIZE == 1));
    // The queries, and in the end their sums; between them scores, which may have a place of their own.
    let work = shared::<f32>(if C.TENSOR && !P.SEPARATE_SCORES && T.SLICES * (T.KEYS + 8) > S.D + 8 {
        S.GROUP * T.SLICES * (T.KEYS + 8)
    } else {
        S.GROUP * (S.D + 8)
    });
    let separate = shared::<f32>(if C.TENSOR && P.SEPARATE_SCORES { S.GROUP * T.SLICES * (T.KEYS + 8) } else { 1 });
    let even = shared::<KV>(if C.NARROW { 2 * T.KEYS * (S.D / 2 + 16) } else { T.KEYS * (S.D + 8) });
    let odd = shared::<KV>(if C.NARROW { 2 * T.KEYS * (S.D / 2 + 16) } else { T.KEYS * (S.D + 8) });
    let new_key = shared::<KV>(S.D);
    let new_value = shared::<KV>(S.D);
    let weights = shared::<KV>(if C.TENSOR { T.SETS * 16 * (T.KEYS + 8) } else { 1 });
    let float_scores = shared::<f32>(if C.TENSOR { 1 } else { S.GROUP * T.KEYS });
    let largest = shared::<f32>(S.GROUP);
    let totals = shared::<f32>(S.GROUP);
    let factors = shared::<f32>(S.GROUP);
    let norms = shared::<f32>(if O.HAS_KV { 2 * S.D } else { S.D });
    let rotations = shared::<F32x2>(S.D / 2);
    let block = SplitMemory::<KV> {
        queries: work,
        scores: if !C.TENSOR { float_scores } else { if P.SEPARATE_SCORES { separate } else { work } },
        sums: work,
        even,
        odd,
        new_key,
        new_value,
        weights,
        largest,
        totals,
        factors,
    };

    // What does not depend on the projections. All of its loads are issued before any of it is used.
    let mut norm_weights = regs(0.0f32, (S.D + T.THREADS - 1) / T.THREADS * 2);
    load_norms(heads, &mut norm_weights);
    let mut frequencies = regs(0.0f32, (S.D / 2 + T.THREADS - 1) / T.THREADS);
    load_frequencies(heads.inverse_frequencies, &mut frequencies);
    // What follows from a record comes before the wait where records are read there: places, cosines, perhaps the first
    // tile.
    if !O.PREFETCH_RECORD {
        grid_dependency_wait();
        grid_launch_dependents();
    }
    let row = block_idx_z();
    let record = record_of(state, row, 16);
    order_loads();
    store_norms(&mut norm_weights, norms);
    // A row that is free: its whole clusters return.
    if record.y == 0 {
        end_prefetch();
        return;
    }
    let splits = grid_dim_y();
    let position = record.x;
    let groups = if O.MERGE { groups_of(splits, grouped) } else { 0 };
    let slot = row_slots(groups) + block_idx() * S.GROUP * splits + block_idx_y();
    let seen = seen_from(position, if O.HAS_KV { position } else { position + 1 }, kv.window, segment, splits);
    let used = seen.used;
    let at = seen.first + block_idx_y() * segment;
    // The first block of the cluster: where it sees nothing, nobody of the cluster does.
    let rank = if O.CLUSTER_SIZE > 1 { cluster_rank() } else { 0 };
    let sees = block_idx_y() < used;
    if block_idx_y() - rank >= used || (used == 1 && !sees) {
        end_prefetch();
        if !O.MERGE && thread_idx() < S.GROUP {
            parts.extrema[slot + thread_idx() * splits] = f32x2(f32::NEG_INFINITY, 0.0);
        }
        return;
    }

    let is_own = O.HAS_KV && seen.newest == block_idx_y();
    let head = head_of(read_only_view(kv), record.w, block_idx(), grid_dim());
    let page_of_new = new_page(kv, record.w, position, is_own);
    let pages = pages_of(head, if sees { at } else { position });
    // Cosines are computed while the pages are looked up.
    if sees {
        fill_rotations(&mut frequencies, position, rotations);
        if C.TENSOR && !C.NARROW {
            clear_weights(weights);
        }
    }
    if O.PREFETCH_KV && sees {
        copy_first(block, head, pages, at, seen);
    }
    if O.PREFETCH_RECORD {
        grid_dependency_wait();
        if O.PREFETCH_KV || !sees {
            grid_launch_dependents();
        }
    }
    if sees {
        let mut low = regs(0.0f32, O.ROUNDS * S.D / 64);
        let mut high = regs(0.0f32, O.ROUNDS * S.D / 64);
        load_heads(heads, row, &mut low, &mut high);
        if !O.PREFETCH_KV {
            copy_first(block, head, pages, at, seen);
        }
        barrier();
        // The new key and value: to their places in the first tile, or kept for a later one.
        let in_place = P.SEPARATE_SCORES && is_own && position - at < T.KEYS;
        let place = (position - at) * (S.D + 8);
        let memory = HeadsMemory::<KV> {
            norms,
            rotations,
            queries: work,
            new_key: if in_place { even.offset(place) } else { new_key },
            new_value: if in_place { odd.offset(place) } else { new_value },
            scratch: odd,
        };
        let new = new_row(kv, page_of_new, position, is_own);
        prepare_heads(narrow, &mut low, &mut high, memory, new, heads.epsilon);
        // The successor issues the loads of its weights at once: all loads of this block have been issued by now.
        if O.PREFETCH_RECORD && !O.PREFETCH_KV {
            grid_launch_dependents();
        }
        attend_alone(operands, block, head, seen, at);
    }

    if O.MERGE && used == 1 {
        write_only_split(write, block);
        return;
    }
    if O.CLUSTER_SIZE > 1 {
        merge_in_clusters(write, block, parts, used, rank);
        return;
    }
    store_result(block, parts, slot, splits);
    if O.MERGE {
        merge_in_memory(write, block, parts, used, grouped);
    }
}

/// Groups of splits; none where all are merged at once.
pub fn groups(splits: u32, grouped: u32) -> u32 {
    if grouped < splits { splits.div_ceil(grouped) } else { 0 }
}

/// What becomes of the attention's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepOut {
    /// Codes, scales and sums: what the output product reads. Launch arguments `write_xq`, `write_xscale`,
    /// `write_xsum`.
    Int8,
    /// Launch argument `write_out`.
    Floats,
    /// Launch argument `write_out`, in bf16.
    Bf16,
    /// The same in f16.
    F16,
    /// Partial results, for `combine.rs` to merge: contexts so long that one block would be busy with it for too long.
    Partials,
}

impl StepOut {
    /// What fills the slot `write`.
    pub fn writes(self) -> Vec<&'static DeviceDef> {
        match self {
            StepOut::Int8 => vec![output_int8::DEF],
            StepOut::Bf16 => vec![output_bf16::DEF],
            StepOut::F16 => vec![output_f16::DEF],
            StepOut::Floats => vec![output_floats::DEF],
            StepOut::Partials => vec![],
        }
    }
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
        let shape = self.decode_shape();
        let heads = self.group + if own { 2 } else { 0 };
        let separate = !self.kv.is_narrow() && self.group <= 8 && self.shared_bytes >= ROOMY;
        attention_step::Chosen {
            S: self.attention_shape(),
            C: CacheFormat::of(self.kv),
            T: shape,
            P: Pipeline::of_split(self.kv, separate),
            O: StepOptions {
                HAS_KV: own,
                ROUNDS: heads.div_ceil(shape.THREADS / 32),
                MERGE: out != StepOut::Partials,
                CLUSTER_SIZE: if out == StepOut::Partials { 1 } else { self.peers() },
                PREFETCH_RECORD: early != Early::Nothing,
                PREFETCH_KV: early == Early::Caches,
            },
            KV: self.element(),
            write: out.writes(),
            narrow: narrow_slot(self.kv),
            operands: operands_slot(self.kv),
        }
        .build()
    }

    /// Whether it pays to read keys and values before the wait. A window that takes more than half of the SMs reads as
    /// much then as the product before it, which has to end first: measured, such a launch is no shorter once the
    /// window is full. A full layer's blocks are few until the context is long.
    pub fn starts_early(&self) -> bool {
        self.window.is_none() || self.kv_heads * self.splits() <= self.multiprocessors / 2
    }

    pub fn step_grid(&self, rows: u32) -> [u32; 3] {
        [self.kv_heads, self.splits(), rows]
    }

    /// The launch argument `grouped`: splits that are merged at once. All of a window's; the root of a full layer's, so
    /// that both merges are as short as they can be.
    pub fn grouped(&self) -> u32 {
        let splits = self.splits();
        if self.window.is_some() || splits <= 16 { splits } else { splits.isqrt() + 1 }
    }

    fn groups(&self) -> u32 {
        groups(self.splits(), self.grouped())
    }

    /// Results that go through memory, of one key-value head: those of splits and of their groups, or those of
    /// clusters.
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
