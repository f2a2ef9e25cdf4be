//! How the splits of a row are merged in the launch that attends to them: out of shared memory, where they are the
//! blocks of a cluster or one block's; through memory, where they are neither.
//!
//! A merge's time is what one SM reads, so it is shared out: each block of a cluster merges a part of the output. All
//! loads are issued at once: the values of other blocks are in flight before it is known what share each of them has.
//! The order of all additions is fixed by the shape. It is that of `combine.rs`, and so are the bits, unless there are
//! groups of splits or several clusters.

use gemma4c_dsl::prelude::*;

use super::combine::{merge_four, run_of, weigh_parts};
use super::floats::add_scaled;
use super::split::SplitMemory;
use super::view::{AttentionShape, PartialResults};

/// Waits for the blocks that merge together.
#[device]
pub fn wait_for_cluster<const CLUSTER_SIZE: u32>() {
    if CLUSTER_SIZE > 1 {
        cluster_barrier();
    } else {
        barrier();
    }
}

/// Writes the output of the only split that sees anything.
#[device(slots(write(value: F32x4, at: u32) -> F32x4))]
pub fn write_only_split<const D: u32, const GROUP: u32, const THREADS: u32, KV: Float>(block: SplitMemory<KV>) {
    let out_head = (block_idx_z() * grid_dim() + block_idx()) * GROUP;
    for i in (thread_idx() * 4..GROUP * D).by(THREADS * 4) {
        let sum = load::<F32x4>(block.sums, i / D * (D + 8) + i % D);
        write(add_scaled(F32x4::ZERO, quotient(1.0, block.totals[i / D]), sum), out_head * D + i);
    }
}

/// Lane p: the largest score and the total that block p of the cluster has found for a head.
#[device]
pub fn peer_part<KV: Float>(block: SplitMemory<KV>, head: u32, peers: u32) -> F32x2 {
    let mut part = f32x2(f32::NEG_INFINITY, 0.0);
    if lane_id() < peers {
        let largest = load_peer::<f32>(block.largest.offset(head), 0u32, lane_id());
        part = f32x2(largest, load_peer::<f32>(block.totals.offset(head), 0u32, lane_id()));
    }
    part
}

/// Four values of a head as each block of the cluster has them.
#[device]
pub fn load_peers<const CLUSTER_SIZE: u32>(four: Shared<f32>, peers: u32, parts: &mut Regs<F32x4>) {
    #[unroll]
    for peer in 0..CLUSTER_SIZE {
        if peer < peers {
            parts[peer] = load_peer::<F32x4>(four, 0u32, peer);
        }
    }
}

/// These merged, in the order of `combine.rs`: lane p has the share of block p. A collective of the warp.
#[device]
pub fn merge_peers<const CLUSTER_SIZE: u32>(parts: &mut Regs<F32x4>, share: f32) -> F32x4 {
    let mut sum = F32x4::ZERO;
    #[unroll]
    for peer in 0..CLUSTER_SIZE {
        sum = add_scaled(sum, 1.0, add_scaled(F32x4::ZERO, shfl_idx(share, peer), parts[peer]));
    }
    sum
}

/// Four values of a head, merged from the results of clusters, in their order. Lane c has the share of cluster c. A
/// collective of the warp.
#[device]
pub fn merge_clusters<const D: u32, const GROUP: u32>(values: Input<f32>, share: f32, clusters: u32) -> F32x4 {
    let mut sum = F32x4::ZERO;
    for first in (0..clusters).by(8) {
        let mut parts = regs(F32x4::ZERO, 8);
        #[unroll]
        for i in 0u32..8 {
            if first + i < clusters {
                parts[i] = load::<F32x4>(values, (first + i) * (GROUP * D));
            }
        }
        #[unroll]
        for i in 0u32..8 {
            sum = add_scaled(sum, shfl_idx(share, first + i), parts[i]);
        }
    }
    sum
}

/// Lane c: what the result of cluster c, of 128 values from `from` on, weighs relative to the largest score (x), and
/// what all of them weigh (y). A collective of the warp.
#[device]
pub fn cluster_part<const D: u32, const GROUP: u32>(parts: PartialResults, from: u32, clusters: u32) -> F32x2 {
    let mut part = f32x2(f32::NEG_INFINITY, 0.0);
    if lane_id() < clusters {
        part = parts.extrema[(from + lane_id() * (GROUP * D)) / 128];
    }
    let factor = (part.x - warp_max(part.x)).exp();
    f32x2(factor, warp_sum(part.y.mul_add(factor, 0.0)))
}

/// Merges the splits that see anything, `used` of them, whose blocks are clusters. Those of a window are one cluster.
/// Of a full layer's several clusters each writes its result to memory; of the blocks with the same part of the output,
/// the last to arrive merges these.
#[device(slots(write(value: F32x4, at: u32) -> F32x4))]
pub fn merge_in_clusters<const S: AttentionShape, const THREADS: u32, const CLUSTER_SIZE: u32, KV: Float>(
    block: SplitMemory<KV>,
    parts: PartialResults,
    used: u32,
    rank: u32,
) {
    let row_head = block_idx_z() * grid_dim() + block_idx();
    let out = row_head * S.GROUP * S.D;
    let leader = block_idx_y() - rank;
    let here = CLUSTER_SIZE.min(used - leader);
    let clusters = used.div_ceil(CLUSTER_SIZE);
    let results = row_head * (grid_dim_y() / CLUSTER_SIZE) * (S.GROUP * S.D);
    cluster_barrier();
    // A warp takes 128 values, all of one head.
    let mut merged = regs(F32x4::ZERO, (S.GROUP * S.D + CLUSTER_SIZE * THREADS * 4 - 1) / (CLUSTER_SIZE * THREADS * 4));
    let mut of_parts =
        regs(F32x2::ZERO, (S.GROUP * S.D + CLUSTER_SIZE * THREADS * 4 - 1) / (CLUSTER_SIZE * THREADS * 4));
    #[unroll]
    for n in 0..(S.GROUP * S.D + CLUSTER_SIZE * THREADS * 4 - 1) / (CLUSTER_SIZE * THREADS * 4) {
        let i = ((n * (THREADS / 32) + warp_id()) * CLUSTER_SIZE + rank) * 128;
        if i < S.GROUP * S.D {
            let four = block.sums.offset(i / S.D * (S.D + 8) + i % S.D + lane_id() * 4);
            let part = peer_part(block, i / S.D, here);
            let mut of_peers = regs(F32x4::ZERO, CLUSTER_SIZE);
            load_peers(four, here, &mut of_peers);
            let top = warp_max(part.x);
            // A share below 2^-100 is not correctly rounded, and changes nothing.
            let factor = (part.x - top).exp();
            let total = warp_sum(part.y.mul_add(factor, 0.0));
            merged[n] = merge_peers(&mut of_peers, if clusters == 1 { quotient(factor, total) } else { factor });
            of_parts[n] = f32x2(top, total);
        }
    }
    cluster_arrive();
    #[unroll]
    for n in 0..(S.GROUP * S.D + CLUSTER_SIZE * THREADS * 4 - 1) / (CLUSTER_SIZE * THREADS * 4) {
        let i = ((n * (THREADS / 32) + warp_id()) * CLUSTER_SIZE + rank) * 128;
        if i < S.GROUP * S.D && clusters == 1 {
            write(merged[n], out + i + lane_id() * 4);
        } else if i < S.GROUP * S.D {
            let to = results + leader / CLUSTER_SIZE * (S.GROUP * S.D) + i;
            store(parts.values, to + lane_id() * 4, merged[n]);
            if lane_id() == 0 {
                parts.extrema[to / 128] = of_parts[n];
            }
        }
    }
    // The others may still read this block's shared memory.
    cluster_wait();
    if clusters > 1 && last_block_of(parts.counters, row_head * CLUSTER_SIZE + rank, clusters) {
        for i in ((warp_id() * CLUSTER_SIZE + rank) * 128..S.GROUP * S.D).by(CLUSTER_SIZE * THREADS * 4) {
            let from = results + i;
            let part = cluster_part(parts, from, clusters);
            let fours = read_only(parts.values).offset(from + lane_id() * 4);
            write(merge_clusters(fours, quotient(part.x, part.y), clusters), out + i + lane_id() * 4);
        }
    }
}

/// The block's result to memory, at its place `slot` of the first query head's; those of a head are `stride` apart.
#[device]
pub fn store_result<const D: u32, const GROUP: u32, const THREADS: u32, KV: Float>(
    block: SplitMemory<KV>,
    parts: PartialResults,
    slot: u32,
    stride: u32,
) {
    for i in (thread_idx() * 4..GROUP * D).by(THREADS * 4) {
        let sums = load::<F32x4>(block.sums, i / D * (D + 8) + i % D);
        store(parts.values, (slot + i / D * stride) * D + i % D, sums);
    }
    if thread_idx() < GROUP {
        parts.extrema[slot + thread_idx() * stride] = f32x2(block.largest[thread_idx()], block.totals[thread_idx()]);
    }
}

/// Groups of as many splits as are merged at once; none, if that is all of them.
#[device]
pub fn groups_of(splits: u32, grouped: u32) -> u32 {
    if grouped < splits { splits.div_ceil(grouped) } else { 0 }
}

/// Where a row's results are: those of splits, by head, and behind them those of groups.
#[device]
pub fn row_slots<const GROUP: u32>(groups: u32) -> u32 {
    block_idx_z() * grid_dim() * GROUP * (grid_dim_y() + groups)
}

/// Merges the results of splits, which are in memory, once all `used` of them are there: the last block of a group of
/// splits merges these, and the last of all groups the groups.
#[device(slots(write(value: F32x4, at: u32) -> F32x4))]
pub fn merge_in_memory<const S: AttentionShape, const THREADS: u32, KV: Float>(
    block: SplitMemory<KV>,
    parts: PartialResults,
    used: u32,
    grouped: u32,
) {
    let splits = grid_dim_y();
    let groups = groups_of(splits, grouped);
    let row_slots = row_slots(groups);
    let head = block_idx() * S.GROUP;
    let group_slot = row_slots + grid_dim() * S.GROUP * splits + head * groups;
    let counter = (block_idx_z() * grid_dim() + block_idx()) * (groups + 1);
    let in_groups = used > grouped;
    let group = block_idx_y() / grouped;
    if in_groups {
        let from = group * grouped;
        let count = grouped.min(used - from);
        if !last_block_of(parts.counters, counter + 1 + group, count) {
            return;
        }
        let run = run_of(count);
        let base = row_slots + head * splits + from;
        let found = read_only(parts.extrema).offset(base);
        weigh_parts(found, splits, block.sums, block.largest, block.totals, count, false);
        for i in (thread_idx() * 4..S.GROUP * S.D).by(THREADS * 4) {
            let h = i / S.D;
            let fours = read_only(parts.values).offset((base + h * splits) * S.D + i % S.D);
            let merged = merge_four(fours, block.sums.offset(h * (S.D + 8)), count, run);
            store(parts.values, (group_slot + h * groups + group) * S.D + i % S.D, merged);
        }
        if thread_idx() < S.GROUP {
            let to = group_slot + thread_idx() * groups + group;
            parts.extrema[to] = f32x2(block.largest[thread_idx()], block.totals[thread_idx()]);
        }
    }
    let arrivals = if in_groups { used.div_ceil(grouped) } else { used };
    if !last_block_of(parts.counters, counter, arrivals) {
        return;
    }
    let base = if in_groups { group_slot } else { row_slots + head * splits };
    let stride = if in_groups { groups } else { splits };
    let run = run_of(if in_groups { arrivals } else { splits });
    let out = (block_idx_z() * grid_dim() + block_idx()) * S.GROUP * S.D;
    let found = read_only(parts.extrema).offset(base);
    weigh_parts(found, stride, block.sums, block.largest, block.totals, arrivals, true);
    for i in (thread_idx() * 4..S.GROUP * S.D).by(THREADS * 4) {
        let h = i / S.D;
        let fours = read_only(parts.values).offset((base + h * stride) * S.D + i % S.D);
        write(merge_four(fours, block.sums.offset(h * (S.D + 8)), arrivals, run), out + i);
    }
}

/// Lane s: the largest score and the total of split s of a group, for a head. Blocks of the cluster have taken splits
/// in turn.
#[device]
pub fn split_part<const GROUP: u32, const CLUSTER_SIZE: u32, KV: Float>(
    block: SplitMemory<KV>,
    head: u32,
    count: u32,
) -> F32x2 {
    let mut part = f32x2(f32::NEG_INFINITY, 0.0);
    let at = lane_id() / CLUSTER_SIZE * GROUP + head;
    if lane_id() < count {
        if CLUSTER_SIZE > 1 {
            let peer = lane_id() % CLUSTER_SIZE;
            part = f32x2(load_peer::<f32>(block.largest, at, peer), load_peer::<f32>(block.totals, at, peer));
        } else {
            part = f32x2(block.largest[at], block.totals[at]);
        }
    }
    part
}

/// Four values of a head, merged from a group's splits, in the order of [`merge_peers`]. A collective of the warp.
#[device]
pub fn merge_group<const D: u32, const GROUP: u32, const CLUSTER_SIZE: u32, const TURNS: u32>(
    four: Shared<f32>,
    share: f32,
    count: u32,
) -> F32x4 {
    let mut sum = F32x4::ZERO;
    // More at once would need more registers than a thread has.
    #[unroll]
    for first in (0..CLUSTER_SIZE * TURNS).by(8) {
        let mut parts = regs(F32x4::ZERO, 8);
        #[unroll]
        for i in 0u32..8 {
            let split = first + i;
            if split < count && split < CLUSTER_SIZE * TURNS {
                if CLUSTER_SIZE > 1 {
                    let from = split / CLUSTER_SIZE * (GROUP * (D + 8));
                    parts[i] = load_peer::<F32x4>(four, from, split % CLUSTER_SIZE);
                } else {
                    parts[i] = load::<F32x4>(four, split * (GROUP * (D + 8)));
                }
            }
        }
        #[unroll]
        for i in 0u32..8 {
            if first + i < CLUSTER_SIZE * TURNS {
                sum = add_scaled(sum, 1.0, add_scaled(F32x4::ZERO, shfl_idx(share, first + i), parts[i]));
            }
        }
    }
    sum
}

/// Merges a group of splits, of which `count` see anything, out of the shared memory of the blocks that took them: to
/// the output, if it is the only group, else to memory.
#[device(slots(write(value: F32x4, at: u32) -> F32x4))]
pub fn merge_turns<
    const S: AttentionShape,
    const THREADS: u32,
    const CLUSTER_SIZE: u32,
    const TURNS: u32,
    KV: Float,
>(
    block: SplitMemory<KV>,
    parts: PartialResults,
    out: u32,
    results: u32,
    rank: u32,
    count: u32,
    is_only: bool,
) {
    // A warp takes 128 values, all of one head.
    for i in ((warp_id() * CLUSTER_SIZE + rank) * 128..S.GROUP * S.D).by(CLUSTER_SIZE * THREADS * 4) {
        let part = split_part(block, i / S.D, count);
        let top = warp_max(part.x);
        let factor = (part.x - top).exp();
        let total = warp_sum(part.y.mul_add(factor, 0.0));
        let four = block.sums.offset(i / S.D * (S.D + 8) + i % S.D + lane_id() * 4);
        if is_only {
            write(merge_group(four, factor / total, count), out + i + lane_id() * 4);
        } else {
            let to = results + i;
            store(parts.values, to + lane_id() * 4, merge_group(four, factor, count));
            if lane_id() == 0 {
                parts.extrema[to / 128] = f32x2(top, total);
            }
        }
    }
}
