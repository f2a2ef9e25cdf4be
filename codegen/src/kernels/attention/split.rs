//! Split-KV attention: what a block does with one split of the keys that a decoded row sees. `decode.rs`, `step.rs` and
//! `rows.rs` are grids around it.
//!
//! The positions that a row sees are cut into segments of a fixed length, from the first on; split `s` takes the
//! segments whose number is `s` modulo the number of splits. Both are fixed by the layer's shape, so a row's result
//! does not depend on how full the cache is, on the chunk it came in or on its neighbours. A block takes all query
//! heads of one key-value head, so that each key and value is read from memory once.
//!
//! A split is tiles of keys, and an online softmax passes over them: scores, weights, weighted sums of values. Tiles
//! pass through shared memory, some in flight while one is multiplied; which, [`Pipeline`] says. `tensor.rs`,
//! `codes.rs` and `floats.rs` are what a block does with a tile, by the cache's type. Arithmetic and the order of sums
//! depend on none of this.

use gemma4c_dsl::prelude::*;
use gemma4c_plan::cuda::KvType;

use super::address::{first_visible, page_number, page_start};
use super::codes::{load_code_queries, mix_codes, score_codes, write_columns};
use super::floats::{mix_floats, score_floats, weigh_floats, write_floats};
use super::narrow::{code_row, copy_codes, head_len, patch_codes};
use super::tensor::{load_queries, mix_tensor, score_tensor, weigh_tensor, write_tensor, write_totals};
use super::view::{AttentionShape, CacheFormat, DecodeTile, KvView, KvViewMut, Pipeline};

/// The keys and values of one sequence and one key-value head.
#[view]
pub struct HeadView<KV: Float> {
    pub pages: Weights<u32>,
    pub k: Input<KV>,
    pub v: Input<KV>,
    /// The sequence's slot.
    pub slot: u32,
    pub window: u32,
    pub capacity: u32,
    pub max_pages: u32,
    pub page_stride: u32,
    /// Elements from a position to the next one of its page.
    pub row_len: u32,
}

/// What a row sees, and how that is cut.
#[registers]
pub struct Seen {
    /// The first position.
    pub first: u32,
    /// The last one, the row's own.
    pub position: u32,
    /// The cache holds the positions before this one. The row's own may be in [`SplitMemory`] alone.
    pub stored: u32,
    /// Positions of a segment.
    pub segment: u32,
    pub splits: u32,
    /// Splits that see anything: the first ones.
    pub used: u32,
    /// The split that has the row's own position.
    pub newest: u32,
}

/// A tile of keys: where it starts, and where its segment ends.
#[registers]
pub struct Tile {
    pub at: u32,
    pub limit: u32,
}

/// The numbers of the pages that a tile's keys are on: where they start takes twice the registers.
#[registers]
pub struct TilePages {
    /// The first key's.
    pub near: u32,
    /// The last key's. A full layer's tile is on one page.
    pub far: u32,
}

/// The shared memory of a block that attends to a split. Queries, scores and sums may have the same place, one after
/// the other.
#[view]
pub struct SplitMemory<KV: Float> {
    /// The normed and rotated queries, rows of D + 8.
    pub queries: Shared<f32>,
    /// Scores of a tile; on tensor cores those of each slice of the depth.
    pub scores: Shared<f32>,
    /// Weighted sums of values, rows of D + 8.
    pub sums: Shared<f32>,
    /// The keys of a tile; with two tiles, the keys and behind them the values of one.
    pub even: Shared<KV>,
    /// Its values; with two tiles, the keys and behind them the values of the other.
    pub odd: Shared<KV>,
    /// The key and the value of the row's own position, where the cache does not hold them.
    pub new_key: Shared<KV>,
    pub new_value: Shared<KV>,
    /// Weights of a tile's keys, as tensor cores take them.
    pub weights: Shared<KV>,
    /// Of each query head: the largest score, the sum of weights, and what brings earlier sums to a new largest score.
    pub largest: Shared<f32>,
    pub totals: Shared<f32>,
    pub factors: Shared<f32>,
}

/// What the kernels' tiles must be.
#[device]
pub fn require_tiles<const S: AttentionShape, const C: CacheFormat, const T: DecodeTile>() {
    require!(T.KEYS * S.D % (T.THREADS * T.VECTOR) == 0 && S.GROUP <= 16 && S.D % 128 == 0);
    require!(!C.TENSOR || T.THREADS / 32 % T.SLICES == 0 && T.KEYS * T.SLICES * 2 % T.THREADS == 0);
    require!(!C.NARROW || T.SLICES * 32 == T.THREADS);
    // A tile of a full layer is on one page, that of a window on two at most: pages are whole runs of 64.
    require!(64 % T.KEYS == 0);
}

/// A cache that is not written.
#[device]
pub fn read_only_view<KV: Float>(kv: KvViewMut<KV>) -> KvView<KV> {
    KvView::<KV> {
        pages: kv.pages,
        k: read_only(kv.k),
        v: read_only(kv.v),
        window: kv.window,
        capacity: kv.capacity,
        max_pages: kv.max_pages,
        page_stride: kv.page_stride,
    }
}

/// What key-value head `number` of `heads` has in the cache.
#[device]
pub fn head_of<const D: u32, KV: Float>(kv: KvView<KV>, slot: u32, number: u32, heads: u32) -> HeadView<KV> {
    head_at(kv, slot, number * head_len(D), heads * head_len(D))
}

/// What a page has from an element of its rows on.
#[device]
pub fn head_at<KV: Float>(kv: KvView<KV>, slot: u32, start: u32, row_len: u32) -> HeadView<KV> {
    HeadView::<KV> {
        pages: kv.pages,
        k: kv.k.offset(start),
        v: kv.v.offset(start),
        slot,
        window: kv.window,
        capacity: kv.capacity,
        max_pages: kv.max_pages,
        page_stride: kv.page_stride,
        row_len,
    }
}

/// What the row at a position sees. The cache holds the positions before `stored`.
#[device]
pub fn seen_from(position: u32, stored: u32, window: u32, segment: u32, splits: u32) -> Seen {
    let first = first_visible(position, window);
    let segments = (position - first) / segment + 1;
    let used = segments.min(splits);
    Seen { first, position, stored, segment, splits, used, newest: (segments - 1) % splits }
}

/// The element with which the page of a position starts.
#[device]
pub fn page_of<KV: Float>(head: HeadView<KV>, position: u32) -> u64 {
    page_start(head.pages, head.slot, position, head.capacity, head.max_pages, head.page_stride)
}

/// The pages of the tile at a position. Both are looked up at once, before it is known whether they differ.
#[device]
pub fn pages_of<const KEYS: u32, KV: Float>(head: HeadView<KV>, at: u32) -> TilePages {
    TilePages {
        near: page_number(head.pages, head.slot, at, head.capacity, head.max_pages),
        far: page_number(head.pages, head.slot, at + (KEYS - 1), head.capacity, head.max_pages),
    }
}

/// The tile after: in the same segment, or in the split's next one. Counted on from tile to tile: a division would take
/// as long as a tenth of a tile.
#[device]
pub fn next_tile<const KEYS: u32>(tile: Tile, seen: Seen) -> Tile {
    let in_segment = tile.at + KEYS < tile.limit;
    Tile {
        at: if in_segment { tile.at + KEYS } else { tile.limit + (seen.splits - 1) * seen.segment },
        limit: if in_segment { tile.limit } else { tile.limit + seen.splits * seen.segment },
    }
}

/// Where a tile ends: with its segment, or with the last position.
#[device]
pub fn tile_end<const KEYS: u32>(tile: Tile, position: u32) -> u32 {
    (tile.at + KEYS).min(tile.limit).min(position + 1)
}

/// Elements from a key (or value) of a tile to the next one.
#[device]
pub fn tile_row_len<const D: u32, const NARROW: bool>() -> u32 {
    if NARROW { code_row() } else { D + 8 }
}

/// Issues the copies of the keys (or values) of positions `at..end`, of one head: from the page `near`, and behind its
/// end from the page `far`. The cache holds the positions before `stored`; what it does not hold yet stays as it is.
/// The tile's rest becomes zero: it weighs nothing, but what a page holds there need not be a number.
#[device]
pub fn copy_tile<const D: u32, const KEYS: u32, const THREADS: u32, const VECTOR: u32, KV: Float>(
    tile: Shared<KV>,
    near: Input<KV>,
    far: Input<KV>,
    at: u32,
    end: u32,
    stored: u32,
    row_len: u32,
    capacity: u32,
) {
    require!(THREADS * VECTOR % D == 0 && KEYS * D % (THREADS * VECTOR) == 0);
    let start = at % capacity;
    let at_once = THREADS * VECTOR / D;
    let key = thread_idx() * VECTOR / D;
    let column = thread_idx() * VECTOR % D;
    if at + KEYS <= end.min(stored) && start + KEYS <= capacity {
        // The cache has all of it, contiguously. Pointers first: what is added to them is one
        // multiplication.
        let from = near.offset((start + key) * row_len + column);
        let to = tile.offset(key * (D + 8) + column);
        #[unroll]
        for i in 0..KEYS * D / (THREADS * VECTOR) {
            cp_async16(to, i * at_once * (D + 8), from, i * at_once * row_len);
        }
    } else {
        // Copies before stores: they are on the way to the first score.
        let to = tile.offset(key * (D + 8) + column);
        let here = end.min(stored);
        #[unroll]
        for i in 0..KEYS * D / (THREADS * VECTOR) {
            let row = start + key + i * at_once;
            let from = if row < capacity { near } else { far };
            let of_page = if row < capacity { row } else { row - capacity };
            if at + key + i * at_once < here {
                cp_async16(to, i * at_once * (D + 8), from, of_page * row_len + column);
            }
        }
        if at + KEYS > end {
            #[unroll]
            for i in 0..KEYS * D / (THREADS * VECTOR) {
                if at + key + i * at_once >= end {
                    store(to, i * at_once * (D + 8), U32x4::ZERO);
                }
            }
        }
    }
}

/// Puts the row of a position that the cache does not hold into its place in a tile.
#[device]
pub fn patch_tile<const D: u32, const THREADS: u32, const VECTOR: u32, KV: Float>(
    tile: Shared<KV>,
    row: Shared<KV>,
    place: u32,
) {
    for i in (thread_idx() * VECTOR..D).by(THREADS * VECTOR) {
        store(tile, place * (D + 8) + i, load::<U32x4>(row, i));
    }
}

/// Issues the copies of a tile's keys (or values) from `cache`, the head's part of all pages.
#[device]
pub fn copy_rows<const S: AttentionShape, const C: CacheFormat, const T: DecodeTile, KV: Float>(
    to: Shared<KV>,
    cache: Input<KV>,
    pages: TilePages,
    tile: Tile,
    head: HeadView<KV>,
    seen: Seen,
) {
    let end = tile_end(tile, seen.position);
    let near = cache.offset(pages.near as u64 * head.page_stride as u64);
    let far = cache.offset(pages.far as u64 * head.page_stride as u64);
    if C.NARROW {
        copy_codes(to, near, far, tile.at, end, seen.stored, head.row_len, head.capacity);
    } else {
        copy_tile(to, near, far, tile.at, end, seen.stored, head.row_len, head.capacity);
    }
}

/// Puts the new key (or value) into its place in a tile.
#[device]
pub fn patch_rows<const S: AttentionShape, const C: CacheFormat, const T: DecodeTile, KV: Float>(
    to: Shared<KV>,
    row: Shared<KV>,
    place: u32,
) {
    if C.NARROW {
        patch_codes(to, row, place);
    } else {
        patch_tile(to, row, place);
    }
}

/// Issues the copies of a split's first tile, whose pages are known: keys and values each as a group, or all as one.
#[device]
pub fn copy_first<const S: AttentionShape, const C: CacheFormat, const T: DecodeTile, const P: Pipeline, KV: Float>(
    block: SplitMemory<KV>,
    head: HeadView<KV>,
    pages: TilePages,
    first: u32,
    seen: Seen,
) {
    let tile = Tile { at: first, limit: first + seen.segment };
    copy_rows(block.even, head.k, pages, tile, head, seen);
    if !P.WHOLE_TILES {
        cp_async_commit();
    }
    let values = if P.TILES == 2 { block.even.offset(T.KEYS * tile_row_len()) } else { block.odd };
    copy_rows(values, head.v, pages, tile, head, seen);
    cp_async_commit();
}

/// Nothing has been seen of `heads` query heads yet.
#[device]
pub fn clear_softmax(largest: Shared<f32>, totals: Shared<f32>, heads: u32) {
    if thread_idx() < heads {
        largest[thread_idx()] = f32::NEG_INFINITY;
        totals[thread_idx()] = 0.0;
    }
}

/// The block's queries as operands of tensor cores; of 8-bit codes with scales, what their offset of 128 sums to.
#[device]
pub fn load_operands<const S: AttentionShape, const C: CacheFormat, const T: DecodeTile, KV: Float>(
    block: SplitMemory<KV>,
    queries: &mut Regs<U32x4>,
    offsets: &mut Regs<F32x4>,
) {
    if C.NARROW {
        load_code_queries(block.queries, block.weights, queries, offsets);
    } else if C.TENSOR {
        load_queries(block.queries, queries);
    }
}

/// Scores of a tile's keys.
#[device(slots(operands(eight: U32x4) -> U32x4))]
pub fn score_tile<const S: AttentionShape, const C: CacheFormat, const T: DecodeTile, KV: Float>(
    queries: &mut Regs<U32x4>,
    offsets: &mut Regs<F32x4>,
    keys: Shared<KV>,
    block: SplitMemory<KV>,
) {
    if C.NARROW {
        score_codes(operands, queries, offsets, keys, block.scores);
    } else if C.TENSOR {
        score_tensor(queries, keys, block.scores);
    } else {
        score_floats(block.queries, keys, block.scores);
    }
}

/// One step of the online softmax over a tile of which so many keys are visible.
#[device]
pub fn weigh_tile<const S: AttentionShape, const C: CacheFormat, const T: DecodeTile, KV: Float>(
    block: SplitMemory<KV>,
    lane_totals: &mut Regs<f32>,
    visible: u32,
) {
    if C.TENSOR {
        weigh_tensor(block.scores, block.weights, block.largest, lane_totals, block.factors, visible);
    } else {
        weigh_floats(block.scores, block.largest, block.totals, block.factors, visible);
    }
}

/// Adds a tile's values times their weights to the sums.
#[device(slots(operands(eight: U32x4) -> U32x4))]
pub fn mix_tile<const S: AttentionShape, const C: CacheFormat, const T: DecodeTile, KV: Float>(
    block: SplitMemory<KV>,
    values: Shared<KV>,
    sums: &mut Regs<F32x4>,
) {
    if C.NARROW {
        mix_codes(operands, block.weights, block.factors, values, sums);
    } else if C.TENSOR {
        mix_tensor(block.weights, block.factors, values, sums);
    } else {
        mix_floats(block.scores, block.factors, values, sums);
    }
}

/// Sums and totals of the split, to shared memory. Ends with a barrier.
#[device]
pub fn write_results<const S: AttentionShape, const C: CacheFormat, const T: DecodeTile, KV: Float>(
    block: SplitMemory<KV>,
    lane_totals: &mut Regs<f32>,
    sums: &mut Regs<F32x4>,
) {
    if C.TENSOR {
        write_totals(lane_totals, block.totals);
    }
    if C.NARROW {
        write_columns(sums, block.sums);
    } else if C.TENSOR {
        write_tensor(sums, block.sums);
    } else {
        write_floats(sums, block.sums);
    }
}

/// The attention of a block that takes one split, whose first tile is in flight and whose queries are in shared memory,
/// up to a barrier.
#[device(slots(operands(eight: U32x4) -> U32x4))]
pub fn attend_alone<
    const S: AttentionShape,
    const C: CacheFormat,
    const T: DecodeTile,
    const P: Pipeline,
    KV: Float,
>(
    block: SplitMemory<KV>,
    head: HeadView<KV>,
    seen: Seen,
    first: u32,
) {
    clear_softmax(block.largest, block.totals, S.GROUP);
    if P.SEPARATE_SCORES {
        cp_async_wait(1);
    }
    barrier();
    let mut queries = regs(U32x4::ZERO, S.D / (16 * T.SLICES) * T.SETS);
    let mut offsets = regs(F32x4::ZERO, if C.SCALED { (S.D * 2 / T.THREADS + 1) / 2 * T.SETS } else { 1 });
    let mut is_odd = false;
    load_operands(block, &mut queries, &mut offsets);
    attend(operands, &mut queries, &mut offsets, &mut is_odd, block, head, seen, first, 0);
}

/// The attention of one split, whose first tile, at `first`, is in flight (see [`copy_first`]) and whose queries are in
/// registers or, of f32, in shared memory. With CHAINED, in the end the tile at `after` is in flight, if it is visible.
/// `is_odd`: with two tiles, the first one is in `odd`.
///
/// Groups of copies complete in order, so a wait says how many may still be in flight: with whole tiles the one just
/// issued, else keys and values of all tiles but the half that comes next.
#[device(slots(operands(eight: U32x4) -> U32x4))]
pub fn attend<const S: AttentionShape, const C: CacheFormat, const T: DecodeTile, const P: Pipeline, KV: Float>(
    queries: &mut Regs<U32x4>,
    offsets: &mut Regs<F32x4>,
    is_odd: &mut bool,
    block: SplitMemory<KV>,
    head: HeadView<KV>,
    seen: Seen,
    first: u32,
    after: u32,
) {
    require!(P.TILES == 1 || P.TILES == 2 && (P.WHOLE_TILES || !P.CHAINED));
    require!(P.TILES == 2 || !P.WHOLE_TILES && !C.NARROW);
    let in_flight = if P.WHOLE_TILES { 1 } else { 2 * P.TILES - 1 };
    let mut sums = regs(
        F32x4::ZERO,
        if C.NARROW {
            S.D * 2 / T.THREADS * T.SETS
        } else if C.TENSOR {
            S.D * 4 / T.THREADS
        } else {
            S.GROUP
        },
    );
    let mut lane_totals = regs(0.0f32, (S.GROUP * 32 + T.THREADS - 1) / T.THREADS);
    let mut tile = Tile { at: first, limit: first + seen.segment };
    // The last tile that has been issued.
    let mut issued = tile;
    if P.TILES == 2 && !P.WHOLE_TILES {
        issued = next_tile(tile, seen);
        let pages = pages_of(head, issued.at.min(seen.position));
        if issued.at <= seen.position {
            copy_rows(block.odd, head.k, pages, issued, head, seen);
        }
        // An empty group too: the waits count groups.
        cp_async_commit();
        if issued.at <= seen.position {
            copy_rows(block.odd.offset(T.KEYS * tile_row_len()), head.v, pages, issued, head, seen);
        }
        cp_async_commit();
    }
    while tile.at <= seen.position {
        let end = tile_end(tile, seen.position);
        let following = next_tile(issued, seen);
        let is_last = P.CHAINED && following.at > seen.position;
        let next = Tile {
            at: if is_last { after } else { following.at },
            limit: if is_last { after + seen.segment } else { following.limit },
        };
        let pages = pages_of(head, next.at.min(seen.position));
        let keys = if P.TILES == 2 && *is_odd { block.odd } else { block.even };
        let values = if P.TILES == 2 { keys.offset(T.KEYS * tile_row_len()) } else { block.odd };
        let is_new = end > seen.stored;
        if P.WHOLE_TILES {
            let other = if *is_odd { block.even } else { block.odd };
            if next.at <= seen.position {
                copy_rows(other, head.k, pages, next, head, seen);
                copy_rows(other.offset(T.KEYS * tile_row_len()), head.v, pages, next, head, seen);
            }
            cp_async_commit();
        }

        let is_ready = P.SEPARATE_SCORES && tile.at == first;
        if !is_ready {
            cp_async_wait(in_flight);
            if is_new {
                patch_rows(keys, block.new_key, seen.stored - tile.at);
                if P.WHOLE_TILES {
                    patch_rows(values, block.new_value, seen.stored - tile.at);
                }
            }
            barrier();
        }
        score_tile(operands, queries, offsets, keys, block);
        barrier();
        if !P.WHOLE_TILES {
            if next.at <= seen.position {
                copy_rows(keys, head.k, pages, next, head, seen);
            }
            cp_async_commit();
        }
        weigh_tile(block, &mut lane_totals, end - tile.at);
        if !P.WHOLE_TILES {
            cp_async_wait(in_flight);
            if is_new && !is_ready {
                patch_rows(values, block.new_value, seen.stored - tile.at);
            }
        }
        barrier();
        mix_tile(operands, block, values, &mut sums);
        // All have used the values: what is issued next takes their place.
        if P.CHAINED || next.at <= seen.position {
            barrier();
        }
        if !P.WHOLE_TILES {
            if next.at <= seen.position {
                copy_rows(values, head.v, pages, next, head, seen);
            }
            cp_async_commit();
        }
        if P.TILES == 2 {
            *is_odd = !*is_odd;
        }
        if P.TILES == 2 && !P.WHOLE_TILES {
            tile = issued;
        } else {
            tile = following;
        }
        issued = following;
    }
    write_results(block, &mut lane_totals, &mut sums);
}

impl Pipeline {
    /// Of a block that attends to one split. A tile of 8 bits takes longer to come than to be multiplied: two of them
    /// are in flight.
    pub fn of_split(kv: KvType, separate_scores: bool) -> Self {
        let tiles = if kv.is_narrow() { 2 } else { 1 };
        Self { TILES: tiles, WHOLE_TILES: false, CHAINED: false, SEPARATE_SCORES: separate_scores }
    }
}
