//! Split-KV attention for a few rows: the keys of one row are shared out among many blocks, and what these leave is merged by
//! `combine.rs`.
//!
//! Positions are cut into segments of a fixed length; split `s` takes the segments whose number is `s` modulo the number of
//! splits. Both are fixed by the layer's shape, so a row's result does not depend on how full the cache is, on the chunk it
//! came in or on its neighbours. A block takes all query heads of one key-value head, so that each key and value is read
//! from memory once. Keys and values pass through shared memory, one of them on its way while the other is used.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{ElementType, Instance, InstanceError};

use super::Attention;
use super::plain::first_visible;

/// Threads of a block.
const BLOCK_THREADS: u32 = 128;

/// Blocks of a launch over a long context: about two for each multiprocessor of a large GPU.
const BLOCKS: u32 = 256;

/// Where the tile of keys after the one at `at` starts: in the same segment, or in the split's next one.
#[device]
pub fn next_tile<const KEYS: u32>(at: u32, segment: u32, splits: u32) -> u32 {
    let next = at + KEYS;
    if next / segment == at / segment { next } else { (at / segment + splits) * segment }
}

/// Where the tile at `at` ends: with its segment, or with the last position.
#[device]
pub fn tile_end<const KEYS: u32>(at: u32, position: u32, segment: u32) -> u32 {
    (at + KEYS).min((at / segment + 1) * segment).min(position + 1)
}

/// Starts to copy the keys (or values) of a tile's positions `at..end`, of one head. The cache holds those before `stored`;
/// one that it does not hold yet stays as it is. The tile's rest becomes zero: it weighs nothing, but what a ring holds there
/// need not be a number. A ring holds all visible positions, so it wraps at most once between them.
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
    let start = at % capacity;
    #[unroll(4)]
    for i in (0..KEYS * D).by(THREADS * VECTOR) {
        let to = i + thread_idx() * VECTOR;
        let row = start + to / D;
        let wrapped = if row < capacity { row } else { row - capacity };
        if at + to / D < end.min(stored) {
            cp_async16(tile, to, cache, wrapped * kv_row + to % D);
        } else if at + to / D >= end {
            store(tile, to, U32x4::ZERO);
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
        store(tile, place * D + i, load::<U32x4>(row, i));
    }
}

#[device]
pub fn dot4(a: F32x4, b: F32x4, sum: f32) -> f32 {
    a.w.mul_add(b.w, a.z.mul_add(b.z, a.y.mul_add(b.y, a.x.mul_add(b.x, sum))))
}

/// `a + factor * b`
#[device]
pub fn add_scaled(a: F32x4, factor: f32, b: F32x4) -> F32x4 {
    f32x4(factor.mul_add(b.x, a.x), factor.mul_add(b.y, a.y), factor.mul_add(b.z, a.z), factor.mul_add(b.w, a.w))
}

/// Sums over pairs of lanes, and shares the results out between them: each keeps one half of the values.
#[device]
pub fn fold_half(values: &mut Regs<f32>, half: u32, mask: u32) {
    let upper = lane_id() & mask != 0;
    #[unroll]
    for i in 0..half {
        let kept = if upper { values[i + half] } else { values[i] };
        let given = if upper { values[i] } else { values[i + half] };
        values[i] = kept + shfl_xor(given, mask);
    }
}

/// Sums over pairs of lanes; both keep all values.
#[device]
pub fn fold_all(values: &mut Regs<f32>, count: u32, mask: u32) {
    #[unroll]
    for i in 0..count {
        values[i] = values[i] + shfl_xor(values[i], mask);
    }
}

/// The bits of a lane's number that tell nothing: [`fold`] halves as often as the number of values is even.
#[device]
pub fn idle_bits<const G: u32>() -> u32 {
    let eighths = if G % 8 == 0 { 0u32 } else { 1u32 };
    let quarters = if G % 4 == 0 { eighths } else { 3u32 };
    if G % 2 == 0 { quarters } else { 7u32 }
}

/// Sums 4 G values over the warp. Lane `l` ends with the sums of values `l * G / 8 …`, as many as `G * (idle + 1) / 8`; lanes
/// that differ in idle bits alone have the same. One at a time would take three to five times as many shuffles.
#[device]
pub fn fold<const G: u32>(values: &mut Regs<f32>) {
    fold_half(values, G * 2, 16);
    fold_half(values, G, 8);
    if G % 2 == 0 {
        fold_half(values, G / 2, 4);
    } else {
        fold_all(values, G, 4);
    }
    if G % 4 == 0 {
        fold_half(values, G / 4, 2);
    } else {
        fold_all(values, G * (idle_bits() + 1) / 8, 2);
    }
    if G % 8 == 0 {
        fold_half(values, G / 8, 1);
    } else {
        fold_all(values, G * (idle_bits() + 1) / 8, 1);
    }
}

/// Scores of a tile's keys with G queries: a warp takes four keys at a time, its lanes share out the head's values.
#[device]
pub fn score_tile<const D: u32, const G: u32, const KEYS: u32, const THREADS: u32, KV: Float>(
    queries: Shared<f32>,
    keys: Shared<KV>,
    scores: Shared<f32>,
) {
    #[unroll(1)]
    for first in (warp_id() * 4..KEYS).by(THREADS / 8) {
        let mut sums = regs(0.0f32, G * 4);
        // More at once would need more registers than there are with 16 queries.
        #[unroll(1)]
        for start in (0..D).by(128) {
            let at = start + lane_id() * 4;
            let mut four = regs(F32x4::ZERO, 4);
            #[unroll]
            for i in 0u32..4 {
                four[i] = load_floats4(keys, (first + i) * D + at);
            }
            #[unroll]
            for head in 0..G {
                let query = load::<F32x4>(queries, head * D + at);
                #[unroll]
                for i in 0u32..4 {
                    sums[head * 4 + i] = dot4(query, four[i], sums[head * 4 + i]);
                }
            }
        }
        fold(&mut sums);
        if lane_id() & idle_bits() == 0 {
            #[unroll]
            for i in 0..G * (idle_bits() + 1) / 8 {
                let value = lane_id() * G / 8 + i;
                scores[value / 4 * KEYS + first + value % 4] = sums[i];
            }
        }
    }
}

/// One step of the online softmax: scores become weights relative to the largest score so far, and each head's sums so far
/// get the factor that makes them relative to it too.
#[device]
pub fn weigh_tile<const G: u32, const KEYS: u32, const THREADS: u32>(
    scores: Shared<f32>,
    largest: Shared<f32>,
    totals: Shared<f32>,
    factors: Shared<f32>,
    visible: u32,
) {
    // KEYS lanes take a head. Whole warps: lanes past the end work on the last head, and keep the result to themselves.
    for pair in (thread_idx()..(G * KEYS).div_ceil(32) * 32).by(THREADS) {
        let head = (pair / KEYS).min(G - 1);
        let key = pair % KEYS;
        let score = if key < visible { scores[head * KEYS + key] } else { f32::NEG_INFINITY };
        let before = largest[head];
        let total = totals[head];
        let mut now = score;
        #[unroll]
        for step in 0u32..5 {
            if 1u32 << step < KEYS {
                now = now.max(shfl_xor(now, 1u32 << step));
            }
        }
        now = now.max(before);
        let weight = (score - now).exp();
        let mut sum = weight;
        #[unroll]
        for step in 0u32..5 {
            if 1u32 << step < KEYS {
                sum = sum + shfl_xor(sum, 1u32 << step);
            }
        }
        // The lanes of a head have read what one of them now replaces.
        warp_barrier();
        if pair < G * KEYS {
            scores[pair] = weight;
            if key == 0 {
                let factor = (before - now).exp();
                largest[head] = now;
                totals[head] = total.mul_add(factor, sum);
                factors[head] = factor;
            }
        }
    }
}

/// Adds a tile's values times their weights to the sums of G heads. A thread takes four of the head's values; threads left
/// over take other keys.
#[device]
pub fn mix_tile<const D: u32, const G: u32, const KEYS: u32, const THREADS: u32, KV: Float>(
    scores: Shared<f32>,
    factors: Shared<f32>,
    mixed: Shared<KV>,
    sums: &mut Regs<F32x4>,
) {
    let column = thread_idx() % (D / 4) * 4;
    #[unroll]
    for h in 0..G {
        sums[h] = add_scaled(F32x4::ZERO, factors[h], sums[h]);
    }
    #[unroll(1)]
    for key in (thread_idx() / (D / 4) * 4..KEYS).by(THREADS * 16 / D) {
        let a = load_floats4(mixed, key * D + column);
        let b = load_floats4(mixed, key * D + D + column);
        let c = load_floats4(mixed, key * D + 2 * D + column);
        let d = load_floats4(mixed, key * D + 3 * D + column);
        #[unroll]
        for h in 0..G {
            let weights = load::<F32x4>(scores, h * KEYS + key);
            let two = add_scaled(add_scaled(sums[h], weights.x, a), weights.y, b);
            sums[h] = add_scaled(add_scaled(two, weights.z, c), weights.w, d);
        }
    }
}

/// The attention of a split: its tiles from `first` on, of which the keys and the values are on their way already, each as a
/// group of copies. `stored` is the number of positions that the cache holds: the last may be in `new_key` and `new_value`
/// instead. Sums come out in the threads below D / 4.
#[device]
pub fn attend<const D: u32, const G: u32, const KEYS: u32, const THREADS: u32, const VECTOR: u32, KV: Float>(
    queries: Shared<f32>,
    keys: Shared<KV>,
    mixed: Shared<KV>,
    scores: Shared<f32>,
    largest: Shared<f32>,
    totals: Shared<f32>,
    factors: Shared<f32>,
    new_key: Shared<KV>,
    new_value: Shared<KV>,
    k_head: Input<KV>,
    v_head: Input<KV>,
    first: u32,
    position: u32,
    stored: u32,
    segment: u32,
    splits: u32,
    kv_row: u32,
    capacity: u32,
    sums: &mut Regs<F32x4>,
) {
    if thread_idx() < G {
        largest[thread_idx()] = f32::NEG_INFINITY;
        totals[thread_idx()] = 0.0;
    }
    let mut at = first;
    while at <= position {
        let end = tile_end(at, position, segment);
        let next = next_tile(at, segment, splits);
        let next_end = tile_end(next, position, segment);
        cp_async_wait(1);
        if end > stored {
            patch_tile(keys, new_key, stored - at);
        }
        barrier();
        score_tile(queries, keys, scores);
        barrier();
        if next <= position {
            copy_tile(keys, k_head, next, next_end, stored, kv_row, capacity);
        }
        // An empty group too: the waits count groups.
        cp_async_commit();
        weigh_tile(scores, largest, totals, factors, end - at);
        cp_async_wait(1);
        if end > stored {
            patch_tile(mixed, new_value, stored - at);
        }
        barrier();
        mix_tile(scores, factors, mixed, sums);
        barrier();
        if next <= position {
            copy_tile(mixed, v_head, next, next_end, stored, kv_row, capacity);
        }
        cp_async_commit();
        at = next;
    }

    // The sums over other keys, one after the other, through the memory of the queries.
    let team = thread_idx() / (D / 4);
    let column = thread_idx() % (D / 4) * 4;
    for other in 1..THREADS * 4 / D {
        if team == other {
            #[unroll]
            for h in 0..G {
                store(queries, h * D + column, sums[h]);
            }
        }
        barrier();
        if team == 0 {
            #[unroll]
            for h in 0..G {
                sums[h] = add_scaled(sums[h], 1.0, load::<F32x4>(queries, h * D + column));
            }
        }
        barrier();
    }
}

/// The first position that a split sees of those from `first` on: in its first segment that holds one. Past the last: none.
#[device]
pub fn split_start(first: u32, segment: u32, split: u32, splits: u32) -> u32 {
    let start = first / segment;
    let mine = start + (split + splits - start % splits) % splits;
    first.max(mine * segment)
}

/// One split of one row's attention: for each query head the largest score and the sum of weights (`extrema`) and the weighted
/// sum of values (`values`), by [row][query head][split]. A split without a visible position leaves a sum of zero and no
/// values. The grid is (key-value heads, splits, rows); `window` is `u32::MAX` for a full layer.
#[kernel(block = THREADS, dependent, dynamic_shared)]
pub fn attention_decode<
    const D: u32,
    const G: u32,
    const KEYS: u32,
    const THREADS: u32,
    const VECTOR: u32,
    KV: Float,
>(
    q: Input<f32>,
    k: Input<KV>,
    v: Input<KV>,
    state: Input<u32>,
    extrema: Output<F32x2>,
    values: Output<f32>,
    window: u32,
    segment: u32,
    capacity: u32,
) {
    require!(D % 128 == 0 && THREADS * 4 % D == 0);
    require!(32 % KEYS == 0 && KEYS % (THREADS / 8) == 0 && KEYS % (THREADS * 16 / D) == 0);
    require!(KEYS * D % (THREADS * VECTOR) == 0 && G <= THREADS);
    let queries = shared::<f32>(G * D);
    let keys = shared::<KV>(KEYS * D);
    let mixed = shared::<KV>(KEYS * D);
    let scores = shared::<f32>(G * KEYS);
    let largest = shared::<f32>(G);
    let totals = shared::<f32>(G);
    let factors = shared::<f32>(G);
    grid_dependency_wait();
    grid_launch_dependents();

    let splits = grid_dim_y();
    let row = block_idx_z();
    if row >= state[1u32] {
        return;
    }
    let position = state[0u32] + row;
    let head = (row * grid_dim() + block_idx()) * G;
    let slot = head * splits + block_idx_y();
    let at = split_start(first_visible(position, window), segment, block_idx_y(), splits);
    if at > position {
        if thread_idx() < G {
            extrema[slot + thread_idx() * splits] = f32x2(f32::NEG_INFINITY, 0.0);
        }
        return;
    }

    let kv_row = grid_dim() * D;
    let k_head = k.offset(block_idx() * D);
    let v_head = v.offset(block_idx() * D);
    for i in (thread_idx() * 4..G * D).by(THREADS * 4) {
        cp_async16(queries, i, q, head * D + i);
    }
    let end = tile_end(at, position, segment);
    copy_tile(keys, k_head, at, end, end, kv_row, capacity);
    cp_async_commit();
    copy_tile(mixed, v_head, at, end, end, kv_row, capacity);
    cp_async_commit();
    let mut sums = regs(F32x4::ZERO, G);
    attend(
        queries,
        keys,
        mixed,
        scores,
        largest,
        totals,
        factors,
        keys,
        mixed,
        k_head,
        v_head,
        at,
        position,
        position + 1,
        segment,
        splits,
        kv_row,
        capacity,
        &mut sums,
    );
    let column = thread_idx() * 4;
    if column < D {
        #[unroll]
        for h in 0..G {
            store(values, (slot + h * splits) * D + column, sums[h]);
        }
    }
    if thread_idx() < G {
        extrema[slot + thread_idx() * splits] = f32x2(largest[thread_idx()], totals[thread_idx()]);
    }
}

/// How a block of `attention_decode` or `attention_step` works.
pub(super) struct DecodeShape {
    pub threads: u32,
    /// Keys of a tile.
    pub keys: u32,
    /// Elements in 16 bytes.
    pub vector: u32,
}

impl Attention {
    /// Positions of a segment: windows are cut so that there is work for every multiprocessor, but never below a tile.
    pub fn segment(&self) -> u32 {
        match self.window {
            Some(window) => (window * self.kv_heads / 128).next_power_of_two().clamp(32, 256),
            None => 32,
        }
    }

    /// Blocks that share a row's keys. Those of a window have a segment each; a full layer's take turns.
    pub fn splits(&self) -> u32 {
        match self.window {
            Some(window) => (window.max(1) - 1).div_ceil(self.segment()) + 1,
            None => self.capacity.div_ceil(self.segment()).min(BLOCKS / self.kv_heads).max(1),
        }
    }

    pub(super) fn decode_shape(&self) -> DecodeShape {
        let (vector, keys) = if self.kv == ElementType::F32 { (4, 16) } else { (8, 32) };
        DecodeShape { threads: BLOCK_THREADS, keys, vector }
    }

    pub fn decode(&self) -> Result<Instance, InstanceError> {
        let shape = self.decode_shape();
        Instance::of(attention_decode::DEF)
            .constant("D", self.head_dim)
            .constant("G", self.group)
            .constant("KEYS", shape.keys)
            .constant("THREADS", shape.threads)
            .constant("VECTOR", shape.vector)
            .element("KV", self.kv)
            .build()
    }

    pub fn decode_grid(&self, rows: u32) -> [u32; 3] {
        [self.kv_heads, self.splits(), rows]
    }
}
