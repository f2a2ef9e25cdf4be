//! The attention of several decoded rows in one launch: `step.rs` with fewer blocks, each of which takes several splits
//! of a row, one after the other.
//!
//! One row needs a block for each split, or most SMs idle. Several rows fill the GPU with fewer. A block then norms and
//! rotates its queries once, and the next split's keys are in flight while the last one's are multiplied.
//!
//! **A row has the bits that it has alone**: the arithmetic is `step.rs`'s. Splits, their tiles and the order of all
//! sums are the same; only who computes a split differs. What one row's cluster merges at once is a group of splits
//! here, shared out to CLUSTER_SIZE blocks, which take TURNS splits of it each. A block keeps the results of a group in
//! its shared memory until all of the group are there, since the weight of each depends on the largest score of all.
//! Then the group is merged as a cluster merges: from shared memory, where CLUSTER_SIZE is more than 1 the cluster's. A
//! window is one group. Of a full layer's groups, clusters take turns, and the last to arrive merges what the groups
//! have written to memory.
//!
//! Caches whose splits are merged through memory (`Attention::peers` is 1) stay with `step.rs`: that order is another.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};
use gemma4c_plan::cuda::KvType;

use super::Attention;
use super::address::record_of;
use super::merge::{cluster_part, merge_clusters, merge_turns, wait_for_cluster};
use super::narrow::{narrow_slot, operands_slot};
use super::prepare::{HeadsMemory, fill_rotations, load_frequencies, load_heads, new_page, new_row, prepare_heads};
use super::shape::clustered_multiprocessors;
use super::split::{
    Seen, SplitMemory, attend, clear_softmax, copy_first, head_of, load_operands, pages_of, read_only_view,
    require_tiles, seen_from,
};
use super::step::StepOut;
use super::tensor::clear_weights;
use super::view::{AttentionShape, CacheFormat, DecodeTile, KvViewMut, PartialResults, Pipeline, Projections};

/// How blocks share out a row's splits.
#[config]
pub struct RowsOptions {
    /// The layer has keys and values of its own; else it reads the cache of another.
    pub HAS_KV: bool,
    /// How often the block's warps take a head each, to norm it.
    pub ROUNDS: u32,
    /// Blocks of a cluster, which share out groups of splits.
    pub CLUSTER_SIZE: u32,
    /// Splits of a group that a block takes.
    pub TURNS: u32,
}

/// Where a split starts; behind the last position, if it sees nothing.
#[device]
pub fn split_start(split: u32, seen: Seen) -> u32 {
    if split < seen.used { seen.first + split * seen.segment } else { seen.position + 1 }
}

/// The block's memory with the results of a turn.
#[device]
pub fn memory_of<const D: u32, const GROUP: u32, KV: Float>(block: SplitMemory<KV>, turn: u32) -> SplitMemory<KV> {
    SplitMemory::<KV> {
        queries: block.queries,
        scores: block.scores,
        sums: block.sums.offset(turn * GROUP * (D + 8)),
        even: block.even,
        odd: block.odd,
        new_key: block.new_key,
        new_value: block.new_value,
        weights: block.weights,
        largest: block.largest.offset(turn * GROUP),
        totals: block.totals.offset(turn * GROUP),
        factors: block.factors,
    }
}

/// Merges the results of groups, which are in memory from `results` on.
#[device(slots(write(value: F32x4, at: u32) -> F32x4))]
pub fn merge_groups<const S: AttentionShape, const THREADS: u32, const CLUSTER_SIZE: u32>(
    parts: PartialResults,
    out: u32,
    results: u32,
    rank: u32,
    groups: u32,
) {
    for i in ((warp_id() * CLUSTER_SIZE + rank) * 128..S.GROUP * S.D).by(CLUSTER_SIZE * THREADS * 4) {
        let from = results + i;
        let part = cluster_part(parts, from, groups);
        let fours = read_only(parts.values).offset(from + lane_id() * 4);
        write(merge_clusters(fours, part.x / part.y, groups), out + i + lane_id() * 4);
    }
}

/// The attention of rows that have a record each, as [`attention_step`](super::step::attention_step) has them; a row's
/// keys are cut into `splits`, of which CLUSTER_SIZE * TURNS are merged at once. `clusters` of blocks take the groups
/// of a row's head in turn. `parts` is scratch, one place for each group. The grid is (key-value heads, CLUSTER_SIZE,
/// clusters * rows), the first clusters of all rows first.
#[kernel(block = T.THREADS, min_blocks = T.RESIDENT, cluster = O.CLUSTER_SIZE, dependent, waits_first, dynamic_shared, slots(
    write(value: F32x4, at: u32) -> F32x4,
    narrow(bits: u32) -> u32,
    operands(eight: U32x4) -> U32x4
))]
pub fn attention_rows<
    const S: AttentionShape,
    const C: CacheFormat,
    const T: DecodeTile,
    const P: Pipeline,
    const O: RowsOptions,
    KV: Float,
>(
    heads: Projections,
    state: Input<u32>,
    kv: KvViewMut<KV>,
    parts: PartialResults,
    segment: u32,
    splits: u32,
    clusters: u32,
) {
    require_tiles();
    require!(O.ROUNDS * T.THREADS / 32 >= if O.HAS_KV { S.GROUP + 2 } else { S.GROUP });
    // A lane has a split of the group.
    require!(O.CLUSTER_SIZE >= 1 && O.TURNS >= 1 && O.CLUSTER_SIZE * O.TURNS <= 32 && O.TURNS * S.GROUP <= T.THREADS);
    // The results of a block's splits, and room for scores. Of 16-bit floats the last result takes the scores' place;
    // queries in f32 stay there.
    let results = shared::<f32>(
        (if C.TENSOR { O.TURNS - 1 } else { O.TURNS }) * S.GROUP * (S.D + 8)
            + if C.TENSOR && T.SLICES * (T.KEYS + 8) > S.D + 8 {
                S.GROUP * T.SLICES * (T.KEYS + 8)
            } else {
                S.GROUP * (S.D + 8)
            },
    );
    let even = shared::<KV>(if C.NARROW { 2 * T.KEYS * (S.D / 2 + 16) } else { P.TILES * T.KEYS * (S.D + 8) });
    let odd = shared::<KV>(if C.NARROW { 2 * T.KEYS * (S.D / 2 + 16) } else { P.TILES * T.KEYS * (S.D + 8) });
    let new_key = shared::<KV>(S.D);
    let new_value = shared::<KV>(S.D);
    let weights = shared::<KV>(if C.TENSOR { T.SETS * 16 * (T.KEYS + 8) } else { 1 });
    let float_scores = shared::<f32>(if C.TENSOR { 1 } else { S.GROUP * T.KEYS });
    let largest = shared::<f32>(O.TURNS * S.GROUP);
    let totals = shared::<f32>(O.TURNS * S.GROUP);
    let factors = shared::<f32>(S.GROUP);
    let norms = shared::<f32>(if O.HAS_KV { 2 * S.D } else { S.D });
    let rotations = shared::<F32x2>(S.D / 2);
    let work = results.offset((if C.TENSOR { O.TURNS - 1 } else { O.TURNS }) * S.GROUP * (S.D + 8));
    // With the results of the first turn.
    let block = SplitMemory::<KV> {
        queries: work,
        scores: if C.TENSOR { work } else { float_scores },
        sums: results,
        even,
        odd,
        new_key,
        new_value,
        weights,
        largest,
        totals,
        factors,
    };

    // What does not depend on the projections.
    for i in (thread_idx()..S.D).by(T.THREADS) {
        norms[i] = heads.q_weight[i];
        if O.HAS_KV {
            norms[S.D + i] = heads.k_weight[i];
        }
    }
    let mut frequencies = regs(0.0f32, (S.D / 2 + T.THREADS - 1) / T.THREADS);
    load_frequencies(heads.inverse_frequencies, &mut frequencies);

    grid_dependency_wait();
    grid_launch_dependents();
    let rows = grid_dim_z() / clusters;
    let row = block_idx_z() % rows;
    let cluster = block_idx_z() / rows;
    let rank = block_idx_y();
    // The heads are in flight before the position is known: a block that sees nothing loads them in vain.
    let mut low = regs(0.0f32, O.ROUNDS * S.D / 64);
    let mut high = regs(0.0f32, O.ROUNDS * S.D / 64);
    load_heads(heads, row, &mut low, &mut high);
    let record = record_of(state, row, 16);
    // A row that is free: its whole clusters return.
    if record.y == 0 {
        return;
    }
    let position = record.x;
    let seen = seen_from(position, if O.HAS_KV { position } else { position + 1 }, kv.window, segment, splits);
    let used = seen.used;
    let groups = used.div_ceil(O.CLUSTER_SIZE * O.TURNS);
    // Nobody of the cluster sees anything.
    if cluster >= groups {
        return;
    }
    let head = head_of(read_only_view(kv), record.w, block_idx(), grid_dim());
    let mut queries = regs(U32x4::ZERO, S.D / (16 * T.SLICES) * T.SETS);
    let mut offsets = regs(F32x4::ZERO, if C.SCALED { (S.D * 2 / T.THREADS + 1) / 2 * T.SETS } else { 1 });
    let mut is_odd = false;
    let start = split_start(cluster * (O.CLUSTER_SIZE * O.TURNS) + rank, seen);
    if start <= position {
        copy_first(block, head, pages_of(head, start), start, seen);
        fill_rotations(&mut frequencies, position, rotations);
        if C.TENSOR && !C.NARROW {
            clear_weights(weights);
        }
        barrier();
        let newest_group = seen.newest / (O.CLUSTER_SIZE * O.TURNS);
        let is_own = O.HAS_KV && newest_group % clusters == cluster && seen.newest % O.CLUSTER_SIZE == rank;
        let new = new_row(kv, new_page(kv, record.w, position, is_own), position, is_own);
        let memory = HeadsMemory::<KV> { norms, rotations, queries: work, new_key, new_value, scratch: odd };
        prepare_heads(narrow, &mut low, &mut high, memory, new, heads.epsilon);
        barrier();
        load_operands(block, &mut queries, &mut offsets);
    }

    let row_head = row * grid_dim() + block_idx();
    let out = row_head * S.GROUP * S.D;
    let group_results = row_head * (splits / (O.CLUSTER_SIZE * O.TURNS)) * (S.GROUP * S.D);
    for group in (cluster..groups).by(clusters) {
        clear_softmax(largest, totals, O.TURNS * S.GROUP);
        #[unroll(1)]
        for turn in 0u32..O.TURNS {
            let split = group * (O.CLUSTER_SIZE * O.TURNS) + turn * O.CLUSTER_SIZE + rank;
            let of_next_group = (group + clusters) * (O.CLUSTER_SIZE * O.TURNS) + rank;
            let after = if turn + 1 < O.TURNS { split + O.CLUSTER_SIZE } else { of_next_group };
            if split < used {
                attend(
                    operands,
                    &mut queries,
                    &mut offsets,
                    &mut is_odd,
                    memory_of(block, turn),
                    head,
                    seen,
                    split_start(split, seen),
                    split_start(after, seen),
                );
            }
        }
        wait_for_cluster();
        let count = (O.CLUSTER_SIZE * O.TURNS).min(used - group * (O.CLUSTER_SIZE * O.TURNS));
        merge_turns(write, block, parts, out, group_results + group * (S.GROUP * S.D), rank, count, groups == 1);
        // The others may still read this block's shared memory.
        wait_for_cluster();
    }
    let arrivals = clusters.min(groups);
    if groups > 1 && last_block_of(parts.counters, row_head * O.CLUSTER_SIZE + rank, arrivals) {
        merge_groups(write, parts, out, group_results, rank, groups);
    }
}

/// How blocks share out the splits of a row's key-value head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sharing {
    /// Blocks of a cluster.
    pub peers: u32,
    /// Splits of a group that a block takes.
    pub turns: u32,
    /// Clusters, which take groups in turn.
    pub clusters: u32,
    /// A block has an SM for itself, and room for two tiles. Caches of 8 bits have that room anyway.
    pub ahead: bool,
}

impl Attention {
    /// How so many rows are shared out; `None` where blocks would have no more to do than a split, or where splits are
    /// merged through memory.
    ///
    /// If the GPU has an SM for every row's head, as many blocks share each as find an SM for themselves: a block alone
    /// is faster than two, and of clusters an SM holds one block at a time. Else a block takes all splits of a head,
    /// and an SM holds as many as one row's kernel wants. Clusters of a full layer, whose rows may differ in depth by
    /// much, are twice as many; those that see nothing return at once.
    pub fn sharing(&self, rows: u32, own: bool) -> Result<Option<Sharing>, InstanceError> {
        let group = self.peers();
        if rows < 2 || group == 1 {
            return Ok(None);
        }
        let heads = rows * self.kv_heads;
        let of = |peers, clusters, ahead| Sharing { peers, turns: group / peers, clusters, ahead };
        let bytes = |sharing| Ok::<_, InstanceError>(self.rows(own, StepOut::Floats, sharing)?.shared_bytes());
        let (resident, narrow) = (self.decode_shape().RESIDENT as usize, self.kv.is_narrow());
        let several = (self.shared_bytes + BLOCK_BYTES) / resident - BLOCK_BYTES;
        if heads > self.multiprocessors && bytes(of(1, 1, narrow))? <= several {
            return Ok(Some(of(1, 1, narrow)));
        }
        // Groups of a head that are in use soon.
        let soon = (SHALLOW / self.segment() / group).clamp(1, self.splits() / group);
        // A window: where an SM has room for two blocks of one row's kernel, its clusters leave no SM over.
        if self.splits() == group && resident > 1 && heads <= self.multiprocessors / group {
            return Ok(None);
        }
        let mut peers = group;
        for fewer in (1..group).rev().filter(|peers| group.is_multiple_of(*peers)) {
            if heads * soon > self.clusters_at_once(peers) && bytes(of(fewer, 1, narrow))? <= self.shared_bytes {
                peers = fewer;
            }
        }
        let clusters = (2 * self.clusters_at_once(peers) / heads).clamp(1, self.splits() / group);
        let tensor = self.kv != KvType::F32;
        let ahead = narrow || tensor && bytes(of(peers, clusters, true))? <= self.shared_bytes;
        Ok((peers * clusters < self.splits()).then_some(of(peers, clusters, ahead)))
    }

    /// Clusters of so many blocks that the GPU holds at once, a block to an SM. SMs come in pairs, so that two find
    /// room wherever there is some; larger clusters leave some SMs over.
    fn clusters_at_once(&self, peers: u32) -> u32 {
        let multiprocessors =
            if peers <= 2 { self.multiprocessors } else { clustered_multiprocessors(self.multiprocessors) };
        multiprocessors / peers
    }

    /// One launch for several decoded rows. `own`: the layer has keys and values of its own.
    pub fn rows(&self, own: bool, out: StepOut, sharing: Sharing) -> Result<Instance, InstanceError> {
        let shape = self.decode_shape();
        let alone = sharing.ahead && !self.kv.is_narrow();
        attention_rows::Chosen {
            S: self.attention_shape(),
            C: CacheFormat::of(self.kv),
            T: DecodeTile { RESIDENT: if alone { 1 } else { shape.RESIDENT }, ..shape },
            P: Pipeline {
                TILES: if sharing.ahead { 2 } else { 1 },
                WHOLE_TILES: sharing.ahead,
                CHAINED: true,
                SEPARATE_SCORES: false,
            },
            O: RowsOptions {
                HAS_KV: own,
                ROUNDS: (self.group + if own { 2 } else { 0 }).div_ceil(shape.THREADS / 32),
                CLUSTER_SIZE: sharing.peers,
                TURNS: sharing.turns,
            },
            KV: self.element(),
            write: out.writes(),
            narrow: narrow_slot(self.kv),
            operands: operands_slot(self.kv),
        }
        .build()
    }

    pub fn rows_grid(&self, rows: u32, sharing: Sharing) -> [u32; 3] {
        [self.kv_heads, sharing.peers, sharing.clusters * rows]
    }
}

/// Positions of a sequence that is not long: its full layers are to find all SMs, too.
const SHALLOW: u32 = 512;
/// Shared memory that every block takes from an SM besides its own.
const BLOCK_BYTES: usize = 1024;
