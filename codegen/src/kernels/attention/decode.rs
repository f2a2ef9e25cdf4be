//! Split-KV attention for a few rows: the keys of one row are shared out among many blocks, and what these leave is merged by
//! `combine.rs`.
//!
//! The positions a row sees are cut into segments of a fixed length, from the first on; split `s` takes the segments whose
//! number is `s` modulo the number of splits. Both are fixed by the layer's shape, so a row's result does not depend on how full
//! the cache is, on the chunk it came in or on its neighbours. A block takes all query heads of one key-value head, so that each key and value is read
//! from memory once. Keys and values pass through shared memory, one of them on its way while the other is used.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};
use gemma4c_plan::cuda::KvType;

use super::Attention;
use super::address::{page_start, record_of, row_of_record};
use super::codes::{leave_columns, load_code_queries, mix_codes, score_codes};
use super::floats::{leave_floats, mix_floats, score_floats, weigh_floats};
use super::narrow::{code_row, copy_codes, head_len, operands_slot, patch_codes};
use super::plain::first_visible;
use super::tensor::{clear_weights, leave_tensor, leave_totals, load_queries, mix_tensor, score_tensor, weigh_tensor};

/// Where the tile of keys after the one at `at` starts: in the same segment, or in the split's next one. `limit` is where its segment ends.
#[device]
pub fn next_tile<const KEYS: u32>(at: u32, limit: u32, segment: u32, splits: u32) -> u32 {
    if at + KEYS < limit { at + KEYS } else { limit + (splits - 1) * segment }
}

/// Where the segment of that tile ends. Counted on from tile to tile: a division would take as long as a tenth of a tile.
#[device]
pub fn next_limit<const KEYS: u32>(at: u32, limit: u32, segment: u32, splits: u32) -> u32 {
    if at + KEYS < limit { limit } else { limit + splits * segment }
}

/// Where the tile at `at` ends: with its segment, or with the last position.
#[device]
pub fn tile_end<const KEYS: u32>(at: u32, position: u32, limit: u32) -> u32 {
    (at + KEYS).min(limit).min(position + 1)
}

/// Starts to copy the keys (or values) of a tile's positions `at..end`, of one head. The cache holds those before `stored`; one that it does not hold yet stays as it is. The tile's rest
/// becomes zero: it weighs nothing, but what a ring holds there need not be a number. A ring holds all visible positions, so it wraps at most once between them; a full layer's tile lies in one page.
#[device]
pub fn copy_tile<const D: u32, const KEYS: u32, const THREADS: u32, const VECTOR: u32, KV: Float>(
    tile: Shared<KV>,
    cache: Input<KV>,
    at: u32,
    end: u32,
    stored: u32,
    kv_row: u32,
    capacity: u32,
) {
    require!(THREADS * VECTOR % D == 0 && KEYS * D % (THREADS * VECTOR) == 0);
    let start = at % capacity;
    let at_once = THREADS * VECTOR / D;
    let key = thread_idx() * VECTOR / D;
    let column = thread_idx() * VECTOR % D;
    if at + KEYS <= end.min(stored) && start + KEYS <= capacity {
        // Most tiles: the cache has all of it, in one piece. Pointers first: what is added to them is one multiplication.
        let from = cache.offset((start + key) * kv_row + column);
        let to = tile.offset(key * (D + 8) + column);
        #[unroll]
        for i in 0..KEYS * D / (THREADS * VECTOR) {
            cp_async16(to, i * at_once * (D + 8), from, i * at_once * kv_row);
        }
    } else {
        // All of it at once: what a copy takes besides the way to memory is on the way to the first score.
        let to = tile.offset(key * (D + 8) + column);
        let from = cache.offset(column);
        let here = end.min(stored);
        #[unroll]
        for i in 0..KEYS * D / (THREADS * VECTOR) {
            let row = start + key + i * at_once;
            let wrapped = if row < capacity { row } else { row - capacity };
            if at + key + i * at_once < here {
                cp_async16(to, i * at_once * (D + 8), from, wrapped * kv_row);
            }
        }
        #[unroll]
        for i in 0..KEYS * D / (THREADS * VECTOR) {
            if at + key + i * at_once >= end {
                store(to, i * at_once * (D + 8), U32x4::ZERO);
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

/// The attention of a split, whose first segment starts at `start`; the keys and the values of its first tile are
/// on their way already, each as a group of copies. `stored` is the number of positions that the cache holds: the last may be in `new_key` and `new_value`
/// instead or, with `is_patched`, in its place in the first tile, if it is of that. `work` has the queries, rows of D + 8, and in the end their sums; `largest` and `totals` what goes with them.
/// `parts` has room for scores: `work`'s or, with `is_patched`, its own, so that nobody waits between queries and scores. On tensor cores `weights` have been cleared.
#[device]
pub fn attend<
    const D: u32,
    const G: u32,
    const KEYS: u32,
    const THREADS: u32,
    const VECTOR: u32,
    const TENSOR: bool,
    const SETS: u32,
    const SLICES: u32,
    const BF: bool,
    KV: Float,
>(
    work: Shared<f32>,
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
    k_head: Input<KV>,
    v_head: Input<KV>,
    start: u32,
    position: u32,
    stored: u32,
    segment: u32,
    splits: u32,
    kv_row: u32,
    capacity: u32,
    pages: Weights<u32>,
    slot: u32,
    window: u32,
    max_pages: u32,
    page_stride: u32,
    is_patched: bool,
) {
    if thread_idx() < G {
        largest[thread_idx()] = f32::NEG_INFINITY;
        totals[thread_idx()] = 0.0;
    }
    if is_patched {
        cp_async_wait(1);
    }
    barrier();
    let mut fragments = regs(U32x4::ZERO, D / (16 * SLICES) * SETS);
    let mut sums = regs(F32x4::ZERO, if TENSOR { D * 4 / THREADS } else { G });
    if TENSOR {
        load_queries(work, &mut fragments);
    }
    let mut of_lanes = regs(0.0f32, (G * 32 + THREADS - 1) / THREADS);
    let mut at = start;
    let mut limit = start + segment;
    while at <= position {
        let end = tile_end(at, position, limit);
        let next = next_tile(at, limit, segment, splits);
        limit = next_limit(at, limit, segment, splits);
        let next_end = tile_end(next, position, limit);
        let next_page = page_start(pages, slot, next.min(position), window, max_pages, page_stride);
        let is_ready = is_patched && at == start;
        if !is_ready {
            cp_async_wait(1);
            if end > stored {
                patch_tile(keys, new_key, stored - at);
            }
            barrier();
        }
        if TENSOR {
            score_tensor(&mut fragments, keys, parts);
        } else {
            score_floats(work, keys, scores);
        }
        barrier();
        if next <= position {
            copy_tile(keys, k_head.offset(next_page), next, next_end, stored, kv_row, capacity);
        }
        // An empty group too: the waits count groups.
        cp_async_commit();
        if TENSOR {
            weigh_tensor(parts, weights, largest, &mut of_lanes, factors, end - at);
        } else {
            weigh_floats(scores, largest, totals, factors, end - at);
        }
        cp_async_wait(1);
        if end > stored && !is_ready {
            patch_tile(mixed, new_value, stored - at);
        }
        barrier();
        if TENSOR {
            mix_tensor(weights, factors, mixed, &mut sums);
        } else {
            mix_floats(scores, factors, mixed, &mut sums);
        }
        if next <= position {
            // All have used the values.
            barrier();
            copy_tile(mixed, v_head.offset(next_page), next, next_end, stored, kv_row, capacity);
        }
        cp_async_commit();
        at = next;
    }
    if TENSOR {
        leave_totals(&mut of_lanes, totals);
        leave_tensor(&mut sums, work);
    } else {
        leave_floats(&mut sums, work);
    }
}

/// [`attend`] over a cache of 8 bits. `even` and `odd` have the codes of a tile's keys and behind them those of its values: one tile is
/// multiplied while the next comes, and some of the one after it: a tile takes longer to come than to be multiplied. The first is on its way to `even`, keys and values each as a group of
/// copies.
#[device(slots(operands(eight: U32x4) -> U32x4))]
pub fn attend_narrow<
    const D: u32,
    const G: u32,
    const KEYS: u32,
    const THREADS: u32,
    const SETS: u32,
    const SLICES: u32,
    const BF: bool,
    const NARROW: bool,
    const SCALED: bool,
    KV: Float,
>(
    work: Shared<f32>,
    even: Shared<KV>,
    odd: Shared<KV>,
    new_key: Shared<KV>,
    new_value: Shared<KV>,
    weights: Shared<KV>,
    largest: Shared<f32>,
    totals: Shared<f32>,
    factors: Shared<f32>,
    k_head: Input<KV>,
    v_head: Input<KV>,
    start: u32,
    position: u32,
    stored: u32,
    segment: u32,
    splits: u32,
    kv_row: u32,
    capacity: u32,
    pages: Weights<u32>,
    slot: u32,
    window: u32,
    max_pages: u32,
    page_stride: u32,
) {
    if thread_idx() < G {
        largest[thread_idx()] = f32::NEG_INFINITY;
        totals[thread_idx()] = 0.0;
    }
    barrier();
    let mut fragments = regs(U32x4::ZERO, D / (16 * SLICES) * SETS);
    let mut offsets = regs(F32x4::ZERO, (D * 2 / THREADS + 1) / 2 * SETS);
    let mut sums = regs(F32x4::ZERO, D * 2 / THREADS * SETS);
    load_code_queries(work, weights, &mut fragments, &mut offsets);
    let values = KEYS * code_row();
    let mut of_lanes = regs(0.0f32, (G * 32 + THREADS - 1) / THREADS);
    let mut is_odd = false;
    let mut at = start;
    let mut limit = start + segment;
    // The tile after, all of which is on its way while this one is multiplied.
    let mut next = next_tile(at, limit, segment, splits);
    let mut next_ends = next_limit(at, limit, segment, splits);
    let second_page = page_start(pages, slot, next.min(position), window, max_pages, page_stride);
    if next <= position {
        let end = tile_end(next, position, next_ends);
        copy_codes(odd, k_head.offset(second_page), next, end, stored, kv_row, capacity);
    }
    // An empty group too: the waits count groups.
    cp_async_commit();
    if next <= position {
        let end = tile_end(next, position, next_ends);
        copy_codes(odd.offset(values), v_head.offset(second_page), next, end, stored, kv_row, capacity);
    }
    cp_async_commit();
    while at <= position {
        let end = tile_end(at, position, limit);
        // What comes after that takes the place of what this tile has done with, keys and values each as soon as they may.
        let third = next_tile(next, next_ends, segment, splits);
        let third_ends = next_limit(next, next_ends, segment, splits);
        let third_end = tile_end(third, position, third_ends);
        let third_page = page_start(pages, slot, third.min(position), window, max_pages, page_stride);
        let codes = if is_odd { odd } else { even };
        cp_async_wait(3);
        if end > stored {
            patch_codes(codes, new_key, stored - at);
        }
        barrier();
        score_codes(operands, &mut fragments, &mut offsets, codes, work);
        barrier();
        if third <= position {
            copy_codes(codes, k_head.offset(third_page), third, third_end, stored, kv_row, capacity);
        }
        cp_async_commit();
        weigh_tensor(work, weights, largest, &mut of_lanes, factors, end - at);
        cp_async_wait(3);
        if end > stored {
            patch_codes(codes.offset(values), new_value, stored - at);
        }
        barrier();
        mix_codes(operands, weights, factors, codes.offset(values), &mut sums);
        if third <= position {
            // All have used the values.
            barrier();
            copy_codes(codes.offset(values), v_head.offset(third_page), third, third_end, stored, kv_row, capacity);
        }
        cp_async_commit();
        is_odd = !is_odd;
        at = next;
        limit = next_ends;
        next = third;
        next_ends = third_ends;
    }
    leave_totals(&mut of_lanes, totals);
    leave_columns(&mut sums, work);
}

/// One split of one row's attention: for each query head the largest score and the sum of weights (`extrema`) and the weighted
/// sum of values (`values`), by [row][query head][split]. A split without a visible position leaves a sum of zero and no
/// values. The grid is (key-value heads, splits, rows); `window` is `u32::MAX` for a full layer.
#[kernel(block = THREADS, min_blocks = RESIDENT, dependent, dynamic_shared, slots(
    operands(eight: U32x4) -> U32x4
))]
pub fn attention_decode<
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
    const NARROW: bool,
    const SCALED: bool,
    KV: Float,
>(
    q: Input<f32>,
    k: Input<KV>,
    v: Input<KV>,
    state: Input<u32>,
    pages: Weights<u32>,
    extrema: Output<F32x2>,
    values: Output<f32>,
    window: u32,
    segment: u32,
    capacity: u32,
    record_stride: u32,
    max_pages: u32,
    page_stride: u32,
) {
    require!(KEYS * D % (THREADS * VECTOR) == 0 && G <= 16 && D % 128 == 0);
    require!(!TENSOR || THREADS / 32 % SLICES == 0 && KEYS * SLICES * 2 % THREADS == 0);
    require!(!NARROW || SLICES * 32 == THREADS);
    // A tile of a full layer lies in one page.
    require!(256 % KEYS == 0);
    let work = shared::<f32>(if TENSOR && SLICES * (KEYS + 8) > D + 8 { G * SLICES * (KEYS + 8) } else { G * (D + 8) });
    // Keys, and values; of 8 bits, the codes of both of one tile, and of another.
    let keys = shared::<KV>(if NARROW { 2 * KEYS * (D / 2 + 16) } else { KEYS * (D + 8) });
    let mixed = shared::<KV>(if NARROW { 2 * KEYS * (D / 2 + 16) } else { KEYS * (D + 8) });
    let weights = shared::<KV>(if TENSOR { SETS * 16 * (KEYS + 8) } else { 1 });
    let scores = shared::<f32>(if TENSOR { 1 } else { G * KEYS });
    let largest = shared::<f32>(G);
    let totals = shared::<f32>(G);
    let factors = shared::<f32>(G);
    grid_dependency_wait();
    grid_launch_dependents();

    let splits = grid_dim_y();
    let row = block_idx_z();
    let record = record_of(state, row, record_stride);
    let of_record = row_of_record(record, row, record_stride);
    if of_record >= record.y {
        return;
    }
    let position = record.x + of_record;
    let head = (row * grid_dim() + block_idx()) * G;
    let slot = head * splits + block_idx_y();
    let first = first_visible(position, window);
    let at = first + block_idx_y() * segment;
    if at > position {
        if thread_idx() < G {
            extrema[slot + thread_idx() * splits] = f32x2(f32::NEG_INFINITY, 0.0);
        }
        return;
    }

    let kv_row = grid_dim() * head_len(D);
    let k_head = k.offset(block_idx() * head_len(D));
    let v_head = v.offset(block_idx() * head_len(D));
    let end = tile_end(at, position, at + segment);
    let page = page_start(pages, record.w, at, window, max_pages, page_stride);
    if NARROW {
        copy_codes(keys, k_head.offset(page), at, end, end, kv_row, capacity);
    } else {
        copy_tile(keys, k_head.offset(page), at, end, end, kv_row, capacity);
    }
    cp_async_commit();
    if NARROW {
        copy_codes(keys.offset(KEYS * code_row()), v_head.offset(page), at, end, end, kv_row, capacity);
    } else {
        copy_tile(mixed, v_head.offset(page), at, end, end, kv_row, capacity);
    }
    cp_async_commit();
    for i in (thread_idx() * 4..G * D).by(THREADS * 4) {
        store(work, i / D * (D + 8) + i % D, load::<F32x4>(q, head * D + i));
    }
    if TENSOR && !NARROW {
        clear_weights(weights);
    }
    if NARROW {
        attend_narrow(
            operands,
            work,
            keys,
            mixed,
            keys,
            mixed,
            weights,
            largest,
            totals,
            factors,
            k_head,
            v_head,
            at,
            position,
            position + 1,
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
            work,
            keys,
            mixed,
            keys,
            mixed,
            weights,
            scores,
            largest,
            totals,
            factors,
            k_head,
            v_head,
            at,
            position,
            position + 1,
            segment,
            splits,
            kv_row,
            capacity,
            pages,
            record.w,
            window,
            max_pages,
            page_stride,
            false,
        );
    }
    for i in (thread_idx() * 4..G * D).by(THREADS * 4) {
        store(values, (slot + i / D * splits) * D + i % D, load::<F32x4>(work, i / D * (D + 8) + i % D));
    }
    if thread_idx() < G {
        extrema[slot + thread_idx() * splits] = f32x2(largest[thread_idx()], totals[thread_idx()]);
    }
}

impl Attention {
    pub fn decode(&self) -> Result<Instance, InstanceError> {
        let shape = self.decode_shape();
        attention_decode::Chosen {
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
            NARROW: self.kv.is_narrow(),
            SCALED: self.kv == KvType::Q8_0,
            KV: self.element(),
            operands: operands_slot(self.kv),
        }
        .build()
    }

    pub fn decode_grid(&self, rows: u32) -> [u32; 3] {
        [self.kv_heads, self.splits(), rows]
    }
}
