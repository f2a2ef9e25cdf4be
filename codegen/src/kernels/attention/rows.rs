//! The attention of several decoded rows in one launch: `step.rs` with fewer blocks, each of which takes several splits of a row, one
//! behind the other.
//!
//! One row needs a block for each split, or most SMs idle. Several rows fill the GPU with fewer. A block then norms and rotates its
//! queries once, and the next split's keys are on their way while the last one's are multiplied.
//!
//! **A row has the bits that it has alone**: the arithmetic is `step.rs`'s. Splits, their tiles and the order of all sums are the same; only who
//! computes a split differs. What one row's cluster merges at once is a group of splits here, shared out to PEERS blocks, which take TURNS
//! splits of it each. A block keeps the results of a group in its shared memory until all of the group are there, since the weight of each
//! depends on the largest score of all. Then the group is merged as a cluster merges: from shared memory, where PEERS is more than 1
//! the cluster's. A window is one group. Of a full layer's groups, clusters take turns, and the last to arrive merges what the groups
//! have left in memory.
//!
//! Caches whose splits are merged through memory (`Attention::peers` is 1) stay with `step.rs`: that order is another.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};
use gemma4c_plan::cuda::KvType;

use super::Attention;
use super::address::{page_start, record_of};
use super::codes::load_code_queries;
use super::narrow::{head_len, narrow_slot, operands_slot};
use super::peers::merge_clusters;
use super::plain::first_visible;
use super::prepare::{fill_turns, load_frequencies, load_heads, prepare_heads};
use super::shape::clustered_multiprocessors;
use super::step::{keep_floats, keep_int8};
use super::tensor::{clear_weights, load_queries};
use super::turns::{Seen, attend_split, merge_group, split_part, split_start, start_both, start_tile, wait_for_peers};

/// The attention of rows that have a record each. Parameters are those of `attention_step`; a row's keys are cut into `splits`, of which
/// PEERS * TURNS are merged at once. `clusters` of PEERS blocks take the groups of a row's head in turn. `extrema` and `values` are scratch, one place for each
/// group. `counters` are zero before and after. The grid is (key-value heads, PEERS, clusters * rows), the first clusters of all rows first.
#[kernel(block = THREADS, min_blocks = RESIDENT, cluster = PEERS, dependent, waits_first, dynamic_shared, slots(
    keep(value: F32x4, at: u32) -> F32x4,
    narrow(bits: u32) -> u32,
    operands(eight: U32x4) -> U32x4
))]
pub fn attention_rows<
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
    const PEERS: u32,
    const TURNS: u32,
    const AHEAD: bool,
    const NARROW: bool,
    const SCALED: bool,
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
    splits: u32,
    clusters: u32,
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
    // A lane has a split of the group.
    require!(PEERS >= 1 && TURNS >= 1 && PEERS * TURNS <= 32 && TURNS * G <= THREADS);
    require!(AHEAD || !NARROW);
    require!(TENSOR || !AHEAD);
    // A tile of a full layer lies in one page.
    require!(256 % KEYS == 0);
    // The results of a block's splits, and room for scores. Of 16-bit floats the last result takes the scores' place; queries in f32 stay there.
    let results = shared::<f32>(
        (if TENSOR { TURNS - 1 } else { TURNS }) * G * (D + 8)
            + if TENSOR && SLICES * (KEYS + 8) > D + 8 { G * SLICES * (KEYS + 8) } else { G * (D + 8) },
    );
    // Keys, and values; with AHEAD, both of one tile and of another.
    let keys =
        shared::<KV>(if NARROW { 2 * KEYS * (D / 2 + 16) } else { (if AHEAD { 2 } else { 1 }) * KEYS * (D + 8) });
    let mixed =
        shared::<KV>(if NARROW { 2 * KEYS * (D / 2 + 16) } else { (if AHEAD { 2 } else { 1 }) * KEYS * (D + 8) });
    let new_key = shared::<KV>(D);
    let new_value = shared::<KV>(D);
    let weights = shared::<KV>(if TENSOR { SETS * 16 * (KEYS + 8) } else { 1 });
    let scores = shared::<f32>(if TENSOR { 1 } else { G * KEYS });
    let largest = shared::<f32>(TURNS * G);
    let totals = shared::<f32>(TURNS * G);
    let factors = shared::<f32>(G);
    let norms = shared::<f32>(if OWN { 2 * D } else { D });
    let turns = shared::<F32x2>(D / 2);
    let work = results.offset((if TENSOR { TURNS - 1 } else { TURNS }) * G * (D + 8));

    // What does not wait for the projections.
    for i in (thread_idx()..D).by(THREADS) {
        norms[i] = q_weight[i];
        if OWN {
            norms[D + i] = k_weight[i];
        }
    }
    let mut frequencies = regs(0.0f32, (D / 2 + THREADS - 1) / THREADS);
    load_frequencies(inverse_frequencies, &mut frequencies);

    grid_dependency_wait();
    grid_launch_dependents();
    let rows = grid_dim_z() / clusters;
    let row = block_idx_z() % rows;
    let cluster = block_idx_z() / rows;
    let rank = block_idx_y();
    // The heads are on their way before the position is known: a block that sees nothing asks for them in vain.
    let mut low = regs(0.0f32, ROUNDS * D / 64);
    let mut high = regs(0.0f32, ROUNDS * D / 64);
    let k_raw = k.offset(row * k_stride + block_idx() * D);
    let v_raw = v.offset(row * v_stride + block_idx() * D);
    load_heads(q.offset(row * q_stride + block_idx() * G * D), k_raw, v_raw, &mut low, &mut high);
    let record = record_of(state, row, 16);
    // A row that is free: its whole clusters leave.
    if record.y == 0 {
        return;
    }
    let position = record.x;
    let first = first_visible(position, window);
    let segments = (position - first) / segment + 1;
    let used = segments.min(splits);
    let groups = used.div_ceil(PEERS * TURNS);
    // Nobody of the cluster sees anything.
    if cluster >= groups {
        return;
    }
    let seen = Seen {
        slot: record.w,
        first,
        position,
        stored: if OWN { position } else { position + 1 },
        segment,
        splits,
        used,
        window,
        capacity,
        kv_row: grid_dim() * head_len(D),
        max_pages,
        page_stride,
    };
    let k_head = read_only(k_cache).offset(block_idx() * head_len(D));
    let v_head = read_only(v_cache).offset(block_idx() * head_len(D));
    let mut fragments = regs(U32x4::ZERO, D / (16 * SLICES) * SETS);
    let mut offsets = regs(F32x4::ZERO, if SCALED { (D * 2 / THREADS + 1) / 2 * SETS } else { 1 });
    let mut is_odd = false;
    let start = split_start(cluster * (PEERS * TURNS) + rank, seen);
    if start <= position {
        let page = page_start(pages, record.w, start, window, max_pages, page_stride);
        if AHEAD {
            start_both(keys, k_head, v_head, page, start, start + segment, seen);
        } else {
            start_tile(keys, k_head, page, start, start + segment, seen);
            start_tile(mixed, v_head, page, start, start + segment, seen);
        }
        fill_turns(&mut frequencies, position, turns);
        if TENSOR && !NARROW {
            clear_weights(weights);
        }
        barrier();
        let newest = (segments - 1) % splits;
        let fresh = OWN && newest / (PEERS * TURNS) % clusters == cluster && newest % PEERS == rank;
        let new_page = if fresh { page_start(pages, record.w, position, window, max_pages, page_stride) } else { 0u64 };
        let new_row = (position % capacity) * seen.kv_row + block_idx() * head_len(D);
        let k_row = k_cache.offset(new_page).offset(new_row);
        let v_row = v_cache.offset(new_page).offset(new_row);
        prepare_heads(
            narrow, &mut low, &mut high, norms, turns, work, mixed, new_key, new_value, k_row, v_row, fresh, epsilon,
        );
        barrier();
        if NARROW {
            load_code_queries(work, weights, &mut fragments, &mut offsets);
        } else if TENSOR {
            load_queries(work, &mut fragments);
        }
    }

    let out_head = (row * grid_dim() + block_idx()) * G;
    let group_results = (row * grid_dim() + block_idx()) * (splits / (PEERS * TURNS)) * (G * D);
    for group in (cluster..groups).by(clusters) {
        if thread_idx() < TURNS * G {
            largest[thread_idx()] = f32::NEG_INFINITY;
            totals[thread_idx()] = 0.0;
        }
        #[unroll(1)]
        for turn in 0..TURNS {
            let split = group * (PEERS * TURNS) + turn * PEERS + rank;
            let following = if turn + 1 < TURNS { split + PEERS } else { (group + clusters) * (PEERS * TURNS) + rank };
            if split < used {
                attend_split(
                    operands,
                    &mut fragments,
                    &mut offsets,
                    &mut is_odd,
                    work,
                    keys,
                    mixed,
                    new_key,
                    new_value,
                    weights,
                    scores,
                    largest.offset(turn * G),
                    totals.offset(turn * G),
                    factors,
                    results.offset(turn * G * (D + 8)),
                    k_head,
                    v_head,
                    pages,
                    split_start(split, seen),
                    split_start(following, seen),
                    seen,
                );
            }
        }
        wait_for_peers();
        let count = (PEERS * TURNS).min(used - group * (PEERS * TURNS));
        // A warp takes 128 values, all of one head.
        for i in ((warp_id() * PEERS + rank) * 128..G * D).by(PEERS * THREADS * 4) {
            let part = split_part(largest, totals, i / D, count);
            let top = warp_max(part.x);
            let factor = (part.x - top).exp();
            let total = warp_sum(part.y.mul_add(factor, 0.0));
            let four = results.offset(i / D * (D + 8) + i % D + lane_id() * 4);
            if groups == 1 {
                keep(merge_group(four, factor / total, count), out_head * D + i + lane_id() * 4);
            } else {
                let to = group_results + group * (G * D) + i;
                store(values, to + lane_id() * 4, merge_group(four, factor, count));
                if lane_id() == 0 {
                    extrema[to / 128] = f32x2(top, total);
                }
            }
        }
        // What the others still read must neither change nor go.
        wait_for_peers();
    }
    let arrivals = clusters.min(groups);
    if groups > 1 && last_block_of(counters, (row * grid_dim() + block_idx()) * PEERS + rank, arrivals) {
        for i in ((warp_id() * PEERS + rank) * 128..G * D).by(PEERS * THREADS * 4) {
            let from = group_results + i;
            let mut part = f32x2(f32::NEG_INFINITY, 0.0);
            if lane_id() < groups {
                part = extrema[(from + lane_id() * (G * D)) / 128];
            }
            let factor = (part.x - warp_max(part.x)).exp();
            let total = warp_sum(part.y.mul_add(factor, 0.0));
            let fours = read_only(values).offset(from + lane_id() * 4);
            keep(merge_clusters(fours, factor / total, groups), out_head * D + i + lane_id() * 4);
        }
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
    /// How so many rows are shared out; `None` where blocks would have no more to do than a split, or where splits are merged through memory.
    ///
    /// If the GPU has an SM for every row's head, as many blocks share each as find an SM for themselves: a block alone is faster than two,
    /// and of clusters an SM holds one block at a time. Else a block takes all splits of a head, and an SM holds as many as one row's kernel wants.
    /// Clusters of a full layer, whose rows may differ in depth by much, are twice as many; those that see nothing leave at once.
    pub fn sharing(&self, rows: u32, own: bool) -> Result<Option<Sharing>, InstanceError> {
        let group = self.peers();
        if rows < 2 || group == 1 {
            return Ok(None);
        }
        let heads = rows * self.kv_heads;
        let of = |peers, clusters, ahead| Sharing { peers, turns: group / peers, clusters, ahead };
        let bytes = |sharing| Ok::<_, InstanceError>(self.rows(own, false, sharing)?.shared_bytes());
        let (resident, narrow) = (self.decode_shape().resident as usize, self.kv.is_narrow());
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

    /// Clusters of so many blocks that the GPU holds at once, a block to an SM. SMs come in pairs, so that two find room wherever there is some;
    /// larger clusters leave some SMs over.
    fn clusters_at_once(&self, peers: u32) -> u32 {
        let multiprocessors =
            if peers <= 2 { self.multiprocessors } else { clustered_multiprocessors(self.multiprocessors) };
        multiprocessors / peers
    }

    /// One launch for several decoded rows. `own`: the layer has keys and values of its own. `int8`: it leaves codes, scales and sums.
    pub fn rows(&self, own: bool, int8: bool, sharing: Sharing) -> Result<Instance, InstanceError> {
        let shape = self.decode_shape();
        let alone = sharing.ahead && !self.kv.is_narrow();
        attention_rows::Chosen {
            D: self.head_dim,
            G: self.group,
            KEYS: shape.keys,
            THREADS: shape.threads,
            VECTOR: shape.vector,
            TENSOR: self.kv != KvType::F32,
            SETS: self.group.div_ceil(8),
            SLICES: shape.slices,
            RESIDENT: if alone { 1 } else { shape.resident },
            BF: self.kv == KvType::BF16,
            ROUNDS: (self.group + if own { 2 } else { 0 }).div_ceil(shape.threads / 32),
            OWN: own,
            PEERS: sharing.peers,
            TURNS: sharing.turns,
            AHEAD: sharing.ahead,
            NARROW: self.kv.is_narrow(),
            SCALED: self.kv == KvType::Q8_0,
            KV: self.element(),
            keep: if int8 { vec![keep_int8::DEF] } else { vec![keep_floats::DEF] },
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
