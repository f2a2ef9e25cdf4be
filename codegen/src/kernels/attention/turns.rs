//! What a block of `rows.rs` does: the splits of a row one behind the other, and the merge of a group of them.

use gemma4c_dsl::prelude::*;

use super::address::page_start;
use super::codes::{leave_columns, mix_codes, score_codes};
use super::decode::{copy_tile, next_limit, next_tile, patch_tile, tile_end};
use super::floats::{add_scaled, leave_floats, mix_floats, score_floats, weigh_floats};
use super::narrow::{code_row, copy_codes, patch_codes};
use super::tensor::{leave_tensor, leave_totals, mix_tensor, score_tensor, weigh_tensor};

/// What a row sees, how it is cut, and where it lies.
#[registers]
pub struct Seen {
    /// The row's sequence.
    pub slot: u32,
    pub first: u32,
    pub position: u32,
    /// The cache holds the positions before this one.
    pub stored: u32,
    pub segment: u32,
    pub splits: u32,
    /// Splits that see anything.
    pub used: u32,
    pub window: u32,
    pub capacity: u32,
    pub kv_row: u32,
    pub max_pages: u32,
    pub page_stride: u32,
}

/// Where a split starts; behind the last position, if it sees nothing.
#[device]
pub fn split_start(split: u32, seen: Seen) -> u32 {
    if split < seen.used { seen.first + split * seen.segment } else { seen.position + 1 }
}

/// Starts to copy the keys (or values) of the tile at `at`, whose segment ends at `limit`, as a group of copies. There may be no such tile: the group is empty then, since
/// waits count groups.
#[device]
pub fn start_tile<const D: u32, const KEYS: u32, const THREADS: u32, const VECTOR: u32, KV: Float>(
    tile: Shared<KV>,
    head: Input<KV>,
    page: u64,
    at: u32,
    limit: u32,
    seen: Seen,
) {
    if at <= seen.position {
        let end = tile_end(at, seen.position, limit);
        copy_tile(tile, head.offset(page), at, end, seen.stored, seen.kv_row, seen.capacity);
    }
    cp_async_commit();
}

/// The same for keys, and behind them values, as one group.
#[device]
pub fn start_both<
    const D: u32,
    const KEYS: u32,
    const THREADS: u32,
    const VECTOR: u32,
    const NARROW: bool,
    const SCALED: bool,
    KV: Float,
>(
    tile: Shared<KV>,
    k_head: Input<KV>,
    v_head: Input<KV>,
    page: u64,
    at: u32,
    limit: u32,
    seen: Seen,
) {
    if at <= seen.position {
        let end = tile_end(at, seen.position, limit);
        let k_page = k_head.offset(page);
        let v_page = v_head.offset(page);
        if NARROW {
            copy_codes(tile, k_page, at, end, seen.stored, seen.kv_row, seen.capacity);
            copy_codes(tile.offset(KEYS * code_row()), v_page, at, end, seen.stored, seen.kv_row, seen.capacity);
        } else {
            copy_tile(tile, k_page, at, end, seen.stored, seen.kv_row, seen.capacity);
            copy_tile(tile.offset(KEYS * (D + 8)), v_page, at, end, seen.stored, seen.kv_row, seen.capacity);
        }
    }
    cp_async_commit();
}

/// Puts the row of a position that the cache does not hold into its place in a tile.
#[device]
pub fn patch_new<
    const D: u32,
    const THREADS: u32,
    const VECTOR: u32,
    const NARROW: bool,
    const SCALED: bool,
    KV: Float,
>(
    tile: Shared<KV>,
    row: Shared<KV>,
    place: u32,
) {
    if NARROW {
        patch_codes(tile, row, place);
    } else {
        patch_tile(tile, row, place);
    }
}

/// The attention of one split, whose first tile's keys and values are on their way already, each as a group of copies (as one, with AHEAD); in the end those of
/// the tile at `after` are, which is another split's. `parts` has room for scores, and the queries where they are f32. `keys` and `mixed` are a tile's
/// keys and values; or with AHEAD, where a tile is multiplied while all of the next one comes, both of one tile and of the next. `is_odd`: the first
/// is in `mixed`. The split's sums go to
/// `result`, rows of D + 8.
#[device(slots(operands(eight: U32x4) -> U32x4))]
pub fn attend_split<
    const D: u32,
    const G: u32,
    const KEYS: u32,
    const THREADS: u32,
    const VECTOR: u32,
    const TENSOR: bool,
    const SETS: u32,
    const SLICES: u32,
    const BF: bool,
    const AHEAD: bool,
    const NARROW: bool,
    const SCALED: bool,
    KV: Float,
>(
    fragments: &mut Regs<U32x4>,
    offsets: &mut Regs<F32x4>,
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
    let mut sums = regs(
        F32x4::ZERO,
        if NARROW {
            D * 2 / THREADS * SETS
        } else if TENSOR {
            D * 4 / THREADS
        } else {
            G
        },
    );
    let mut of_lanes = regs(0.0f32, (G * 32 + THREADS - 1) / THREADS);
    let mut at = start;
    let mut limit = start + seen.segment;
    while at <= seen.position {
        let end = tile_end(at, seen.position, limit);
        let of_split = next_tile(at, limit, seen.segment, seen.splits);
        limit = next_limit(at, limit, seen.segment, seen.splits);
        let next = if of_split <= seen.position { of_split } else { after };
        let ends = if of_split <= seen.position { limit } else { after + seen.segment };
        let page_of = next.min(seen.position);
        let next_page = page_start(pages, seen.slot, page_of, seen.window, seen.max_pages, seen.page_stride);
        let is_new = end > seen.stored;
        if AHEAD {
            let tile = if *is_odd { mixed } else { keys };
            let ahead = if *is_odd { keys } else { mixed };
            let values = KEYS * if NARROW { code_row() } else { D + 8 };
            start_both(ahead, k_head, v_head, next_page, next, ends, seen);
            cp_async_wait(1);
            if is_new {
                patch_new(tile, new_key, seen.stored - at);
                patch_new(tile.offset(values), new_value, seen.stored - at);
            }
            barrier();
            if NARROW {
                score_codes(operands, fragments, offsets, tile, parts);
            } else {
                score_tensor(fragments, tile, parts);
            }
            barrier();
            weigh_tensor(parts, weights, largest, &mut of_lanes, factors, end - at);
            barrier();
            if NARROW {
                mix_codes(operands, weights, factors, tile.offset(values), &mut sums);
            } else {
                mix_tensor(weights, factors, tile.offset(values), &mut sums);
            }
            // What comes next takes this tile's place.
            barrier();
            *is_odd = !*is_odd;
        } else {
            cp_async_wait(1);
            if is_new {
                patch_new(keys, new_key, seen.stored - at);
            }
            barrier();
            if TENSOR {
                score_tensor(fragments, keys, parts);
            } else {
                score_floats(parts, keys, scores);
            }
            barrier();
            start_tile(keys, k_head, next_page, next, ends, seen);
            if TENSOR {
                weigh_tensor(parts, weights, largest, &mut of_lanes, factors, end - at);
            } else {
                weigh_floats(scores, largest, totals, factors, end - at);
            }
            cp_async_wait(1);
            if is_new {
                patch_new(mixed, new_value, seen.stored - at);
            }
            barrier();
            if TENSOR {
                mix_tensor(weights, factors, mixed, &mut sums);
            } else {
                mix_floats(scores, factors, mixed, &mut sums);
            }
            barrier();
            start_tile(mixed, v_head, next_page, next, ends, seen);
        }
        at = of_split;
    }
    if TENSOR {
        leave_totals(&mut of_lanes, totals);
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
    let mut sum = F32x4::ZERO;
    // More at once would need more registers than a thread has.
    #[unroll]
    for first in (0..PEERS * TURNS).by(8) {
        let mut parts = regs(F32x4::ZERO, 8);
        #[unroll]
        for i in 0u32..8 {
            let split = first + i;
            if split < count && split < PEERS * TURNS {
                if PEERS > 1 {
                    parts[i] = load_peer::<F32x4>(four, split / PEERS * (G * (D + 8)), split % PEERS);
                } else {
                    parts[i] = load::<F32x4>(four, split * (G * (D + 8)));
                }
            }
        }
        #[unroll]
        for i in 0u32..8 {
            if first + i < PEERS * TURNS {
                sum = add_scaled(sum, 1.0, add_scaled(F32x4::ZERO, shfl_idx(share, first + i), parts[i]));
            }
        }
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
