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
use super::codes::{leave_columns, mix_codes, score_codes};
use super::decode::{clustered_multiprocessors, copy_tile, next_tile, patch_tile, tile_end};
use super::floats::{add_scaled, leave_floats, mix_floats, score_floats, weigh_floats};
use super::narrow::{copy_codes, head_len, narrow_slot, patch_codes, widen_slot};
use super::plain::first_visible;
use super::prepare::{load_heads, prepare_heads};
use super::step::{keep_floats, keep_int8, merge_clusters};
use super::tensor::{leave_tensor, load_queries, mix_tensor, score_tensor, weigh_tensor};
use crate::kernels::heads::cos_sin;

/// What a row sees, how it is cut, and where it lies.
#[registers]
pub struct Seen {
    /// The row's sequence.
    slot: u32,
    first: u32,
    position: u32,
    /// The cache holds the positions before this one.
    stored: u32,
    segment: u32,
    splits: u32,
    /// Splits that see anything.
    used: u32,
    window: u32,
    capacity: u32,
    kv_row: u32,
    max_pages: u32,
    page_stride: u32,
}

/// Where a split starts; behind the last position, if it sees nothing.
#[device]
pub fn split_start(split: u32, seen: Seen) -> u32 {
    if split < seen.used { seen.first + split * seen.segment } else { seen.position + 1 }
}

/// Starts to copy the keys (or values) of the tile at `at`, as a group of copies. There may be no such tile: the group is empty then, since
/// waits count groups.
#[device]
pub fn start_tile<
    const D: u32,
    const KEYS: u32,
    const THREADS: u32,
    const VECTOR: u32,
    const NARROW: bool,
    const SCALED: bool,
    KV: Float,
>(
    tile: Shared<KV>,
    head: Input<KV>,
    page: u64,
    at: u32,
    seen: Seen,
) {
    if at <= seen.position {
        let end = tile_end(at, seen.position, seen.first, seen.segment);
        if NARROW {
            copy_codes(tile, head.offset(page), at, end, seen.stored, seen.kv_row, seen.capacity);
        } else {
            copy_tile(tile, head.offset(page), at, end, seen.stored, seen.kv_row, seen.capacity);
        }
    }
    cp_async_commit();
}

/// The attention of one split, whose first tile's keys and values are on their way already, each as a group of copies; in the end those of
/// the tile at `after` are, which is another split's. `parts` has room for scores, and the queries where they are f32. `keys` and `mixed` are a tile's
/// keys and values, or the codes of both of one tile and of the next; `is_odd`: the first is in `mixed`. The split's sums go to
/// `result`, rows of D + 8.
#[device(slots(widen(eight: U32x4, scale: u32) -> U32x4))]
pub fn attend_split<
    const D: u32,
    const G: u32,
    const KEYS: u32,
    const THREADS: u32,
    const VECTOR: u32,
    const TENSOR: bool,
    const SETS: u32,
    const BF: bool,
    const NARROW: bool,
    const SCALED: bool,
    KV: Float,
>(
    fragments: &mut Regs<U32x4>,
    is_odd: &mut bool,
    parts: Shared<f32>,
    keys: Shared<KV>,
    mixed: Shared<KV>,
    new_key: Shared<KV>,
    new_value: Shared<KV>,
    weights: Shared<KV>,
    scores: Shared<f32>,
    largest: Shared<f32>,
    totals: Shared<f32>,
    factors: Shared<f32>,
    result: Shared<f32>,
    k_head: Input<KV>,
    v_head: Input<KV>,
    pages: Weights<u32>,
    start: u32,
    after: u32,
    seen: Seen,
) {
    let mut sums = regs(F32x4::ZERO, if TENSOR { D * 4 / THREADS } else { G });
    let mut at = start;
    while at <= seen.position {
        let end = tile_end(at, seen.position, seen.first, seen.segment);
        let of_split = next_tile(at, seen.first, seen.segment, seen.splits);
        let next = if of_split <= seen.position { of_split } else { after };
        let page_of = next.min(seen.position);
        let next_page = page_start(pages, seen.slot, page_of, seen.window, seen.max_pages, seen.page_stride);
        let is_new = end > seen.stored;
        if NARROW {
            let codes = if *is_odd { mixed } else { keys };
            let ahead = if *is_odd { keys } else { mixed };
            start_tile(ahead, k_head, next_page, next, seen);
            start_tile(ahead.offset(KEYS * head_len(D)), v_head, next_page, next, seen);
            cp_async_wait(3);
            if is_new {
                patch_codes(codes, new_key, seen.stored - at);
            }
            barrier();
            score_codes(widen, fragments, codes, parts);
            barrier();
            weigh_tensor(parts, weights, largest, totals, factors, end - at);
            cp_async_wait(2);
            if is_new {
                patch_codes(codes.offset(KEYS * head_len(D)), new_value, seen.stored - at);
            }
            barrier();
            mix_codes(widen, weights, factors, codes.offset(KEYS * head_len(D)), &mut sums);
            // What comes next takes this tile's place.
            barrier();
            *is_odd = !*is_odd;
        } else {
            cp_async_wait(1);
            if is_new {
                patch_tile(keys, new_key, seen.stored - at);
            }
            barrier();
            if TENSOR {
                score_tensor(fragments, keys, parts);
            } else {
                score_floats(parts, keys, scores);
            }
            barrier();
            start_tile(keys, k_head, next_page, next, seen);
            if TENSOR {
                weigh_tensor(parts, weights, largest, totals, factors, end - at);
            } else {
                weigh_floats(scores, largest, totals, factors, end - at);
            }
            cp_async_wait(1);
            if is_new {
                patch_tile(mixed, new_value, seen.stored - at);
            }
            barrier();
            if TENSOR {
                mix_tensor(weights, factors, mixed, &mut sums);
            } else {
                mix_floats(scores, factors, mixed, &mut sums);
            }
            barrier();
            start_tile(mixed, v_head, next_page, next, seen);
        }
        at = of_split;
    }
    if NARROW {
        leave_columns(&mut sums, result);
    } else if TENSOR {
        leave_tensor(&mut sums, result);
    } else {
        leave_floats(&mut sums, result);
    }
}

/// Lane s: the largest score and the total of split s of a group, for a head.
#[device]
pub fn split_part<const G: u32, const PEERS: u32>(
    largest: Shared<f32>,
    totals: Shared<f32>,
    head: u32,
    count: u32,
) -> F32x2 {
    let mut part = f32x2(f32::NEG_INFINITY, 0.0);
    let at = lane_id() / PEERS * G + head;
    if lane_id() < count {
        if PEERS > 1 {
            let peer = lane_id() % PEERS;
            part = f32x2(load_peer::<f32>(largest, at, peer), load_peer::<f32>(totals, at, peer));
        } else {
            part = f32x2(largest[at], totals[at]);
        }
    }
    part
}

/// Four values of a head, merged from a group's splits, in the order of `step.rs`'s `merge_peers`. A collective of the warp.
#[device]
pub fn merge_group<const D: u32, const G: u32, const PEERS: u32, const TURNS: u32>(
    four: Shared<f32>,
    share: f32,
    count: u32,
) -> F32x4 {
    let mut parts = regs(F32x4::ZERO, PEERS * TURNS);
    #[unroll]
    for split in 0..PEERS * TURNS {
        if split < count {
            if PEERS > 1 {
                parts[split] = load_peer::<F32x4>(four, split / PEERS * (G * (D + 8)), split % PEERS);
            } else {
                parts[split] = load::<F32x4>(four, split * (G * (D + 8)));
            }
        }
    }
    let mut sum = F32x4::ZERO;
    #[unroll]
    for split in 0..PEERS * TURNS {
        sum = add_scaled(sum, 1.0, add_scaled(F32x4::ZERO, shfl_idx(share, split), parts[split]));
    }
    sum
}

/// Waits for the blocks that merge together.
#[device]
pub fn wait_for_peers<const PEERS: u32>() {
    if PEERS > 1 {
        cluster_barrier();
    } else {
        barrier();
    }
}

/// The attention of rows that have a record each. Parameters are those of `attention_step`; a row's keys are cut into `splits`, of which
/// PEERS * TURNS are merged at once. `clusters` of PEERS blocks take the groups of a row's head in turn. `extrema` and `values` are scratch, one place for each
/// group. `counters` are zero before and after. The grid is (key-value heads, PEERS, clusters * rows), the first clusters of all rows first.
#[kernel(block = THREADS, min_blocks = RESIDENT, cluster = PEERS, dependent, dynamic_shared, slots(
    keep(value: F32x4, at: u32) -> F32x4,
    narrow(bits: u32) -> u32,
    widen(eight: U32x4, scale: u32) -> U32x4
))]
pub fn attention_rows<
    const D: u32,
    const G: u32,
    const KEYS: u32,
    const THREADS: u32,
    const VECTOR: u32,
    const TENSOR: bool,
    const SETS: u32,
    const RESIDENT: u32,
    const BF: bool,
    const ROUNDS: u32,
    const OWN: bool,
    const PEERS: u32,
    const TURNS: u32,
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
    require!(ROUNDS * THREADS / 32 >= if OWN { G + 2 } else { G });
    // A lane has a split of the group.
    require!(PEERS >= 1 && TURNS >= 1 && PEERS * TURNS <= 32 && TURNS * G <= THREADS);
    // A tile of a full layer lies in one page.
    require!(256 % KEYS == 0);
    // The results of a block's splits, and room for scores. Of 16-bit floats the last result takes the scores' place; queries in f32 stay there.
    let results = shared::<f32>(
        (if TENSOR { TURNS - 1 } else { TURNS }) * G * (D + 8)
            + if TENSOR && THREADS / 32 * (KEYS + 8) > D + 8 {
                G * (THREADS / 32) * (KEYS + 8)
            } else {
                G * (D + 8)
            },
    );
    // Keys, and values; of 8 bits, the codes of both of one tile, and of another.
    let keys = shared::<KV>(if NARROW {
        2 * KEYS * ((D / 2 + if SCALED { D / 32 } else { 0 }).div_ceil(8) * 8)
    } else {
        KEYS * (D + 8)
    });
    let mixed = shared::<KV>(if NARROW {
        2 * KEYS * ((D / 2 + if SCALED { D / 32 } else { 0 }).div_ceil(8) * 8)
    } else {
        KEYS * (D + 8)
    });
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
    #[unroll]
    for n in 0..(D / 2 + THREADS - 1) / THREADS {
        frequencies[n] = inverse_frequencies[(thread_idx() + n * THREADS).min(D / 2 - 1)];
    }

    grid_dependency_wait();
    grid_launch_dependents();
    let rows = grid_dim_z() / clusters;
    let row = block_idx_z() % rows;
    let cluster = block_idx_z() / rows;
    let rank = block_idx_y();
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
    let mut fragments = regs(U32x4::ZERO, D * 2 / THREADS * SETS);
    let mut is_odd = false;
    let start = split_start(cluster * (PEERS * TURNS) + rank, seen);
    if start <= position {
        let page = page_start(pages, record.w, start, window, max_pages, page_stride);
        let mut low = regs(0.0f32, ROUNDS * D / 64);
        let mut high = regs(0.0f32, ROUNDS * D / 64);
        let k_raw = k.offset(row * k_stride + block_idx() * D);
        let v_raw = v.offset(row * v_stride + block_idx() * D);
        load_heads(q.offset(row * q_stride + block_idx() * G * D), k_raw, v_raw, &mut low, &mut high);
        start_tile(keys, k_head, page, start, seen);
        start_tile(if NARROW { keys.offset(KEYS * head_len(D)) } else { mixed }, v_head, page, start, seen);
        #[unroll]
        for n in 0..(D / 2 + THREADS - 1) / THREADS {
            if thread_idx() + n * THREADS < D / 2 {
                turns[thread_idx() + n * THREADS] = cos_sin(position as f32 * frequencies[n]);
            }
        }
        barrier();
        let newest = (segments - 1) % splits;
        let fresh = OWN && newest / (PEERS * TURNS) % clusters == cluster && newest % PEERS == rank;
        let new_page = if fresh { page_start(pages, record.w, position, window, max_pages, page_stride) } else { 0u64 };
        let new_row = (position % capacity) * seen.kv_row + block_idx() * head_len(D);
        let k_row = k_cache.offset(new_page).offset(new_row);
        let v_row = v_cache.offset(new_page).offset(new_row);
        prepare_heads(
            narrow, &mut low, &mut high, norms, turns, work, new_key, new_value, k_row, v_row, fresh, epsilon,
        );
        barrier();
        if TENSOR {
            load_queries(work, weights, &mut fragments);
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
            let following =
                if turn + 1 < TURNS { split + PEERS } else { (group + clusters) * (PEERS * TURNS) + rank };
            if split < used {
                attend_split(
                    widen,
                    &mut fragments,
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
}

impl Attention {
    /// How so many rows are shared out; `None` where blocks would have no more to do than a split, or where splits are merged through memory.
    ///
    /// Blocks are as many as the GPU holds at once, as far as their results fit beside the tiles. Of a full layer, whose rows may differ
    /// in depth by much, twice as many: those that see nothing leave at once.
    pub fn sharing(&self, rows: u32, own: bool) -> Result<Option<Sharing>, InstanceError> {
        let group = self.peers();
        if rows < 2 || group == 1 {
            return Ok(None);
        }
        let resident = self.decode_shape().resident;
        let room = (self.shared_bytes + BLOCK_BYTES) / resident as usize - BLOCK_BYTES;
        let heads = rows * self.kv_heads;
        let wanted = (self.multiprocessors * resident / heads).max(1);
        let mut peers = group;
        for fewer in (1..group).rev().filter(|peers| group.is_multiple_of(*peers)) {
            let sharing = Sharing { peers: fewer, turns: group / fewer, clusters: 1 };
            if peers > wanted && self.rows(own, false, sharing)?.shared_bytes() <= room {
                peers = fewer;
            }
        }
        let blocks = 2 * clustered_multiprocessors(self.multiprocessors) * resident;
        let clusters = (blocks / (heads * peers)).clamp(1, self.splits() / group);
        let sharing = Sharing { peers, turns: group / peers, clusters };
        Ok((peers * clusters < self.splits()).then_some(sharing))
    }

    /// One launch for several decoded rows. `own`: the layer has keys and values of its own. `int8`: it leaves codes, scales and sums.
    pub fn rows(&self, own: bool, int8: bool, sharing: Sharing) -> Result<Instance, InstanceError> {
        let shape = self.decode_shape();
        attention_rows::Chosen {
            D: self.head_dim,
            G: self.group,
            KEYS: shape.keys,
            THREADS: shape.threads,
            VECTOR: shape.vector,
            TENSOR: self.kv != KvType::F32,
            SETS: self.group.div_ceil(8),
            RESIDENT: shape.resident,
            BF: self.kv == KvType::BF16,
            ROUNDS: (self.group + if own { 2 } else { 0 }).div_ceil(shape.threads / 32),
            OWN: own,
            PEERS: sharing.peers,
            TURNS: sharing.turns,
            NARROW: self.kv.is_narrow(),
            SCALED: self.kv == KvType::Q8_0,
            KV: self.element(),
            keep: if int8 { vec![keep_int8::DEF] } else { vec![keep_floats::DEF] },
            narrow: narrow_slot(self.kv),
            widen: widen_slot(self.kv),
        }
        .build()
    }

    pub fn rows_grid(&self, rows: u32, sharing: Sharing) -> [u32; 3] {
        [self.kv_heads, sharing.peers, sharing.clusters * rows]
    }
}

/// Shared memory that every block takes from an SM besides its own.
const BLOCK_BYTES: usize = 1024;
