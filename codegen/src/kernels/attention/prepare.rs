//! What comes before a decoded row's attention: head norms and RoPE of the block's queries, and of its new key and
//! value, which are rounded, stored, and kept for the block's own use. `heads.rs` does the same for many rows, as a
//! launch of its own.

use gemma4c_dsl::prelude::*;

use super::address::page_start;
use super::narrow::{head_len, keep_word, store_word, word_of};
use super::view::{AttentionShape, CacheFormat, KvViewMut, Projections};
use crate::kernels::heads::{add_squares, cos_sin, head_factor, rotated};

/// The shared memory in which heads are prepared.
#[view]
pub struct HeadsMemory<KV: Float> {
    /// Weights of the queries' norm, then of the keys'.
    pub norms: Shared<f32>,
    /// Cosine and sine of each pair of a head at the row's position.
    pub rotations: Shared<F32x2>,
    /// The queries that come of it, rows of D + 8.
    pub queries: Shared<f32>,
    /// Where the new key and value go, as the cache has them.
    pub new_key: Shared<KV>,
    pub new_value: Shared<KV>,
    /// 2 * D floats, on the way to 8 bits.
    pub scratch: Shared<KV>,
}

/// The row's own position in the cache, at the block's key-value head.
#[view]
pub struct NewRow<KV: Float> {
    pub k: InOut<KV>,
    pub v: InOut<KV>,
    /// This block makes its key and value.
    pub is_own: bool,
}

/// [`NewRow`] on a page.
#[device]
pub fn new_row<const D: u32, KV: Float>(kv: KvViewMut<KV>, page: u64, position: u32, is_own: bool) -> NewRow<KV> {
    let at = (position % kv.capacity) * (grid_dim() * head_len(D)) + block_idx() * head_len(D);
    NewRow::<KV> { k: kv.k.offset(page).offset(at), v: kv.v.offset(page).offset(at), is_own }
}

/// The page of the row's own position, where this block makes its key and value.
#[device]
pub fn new_page<KV: Float>(kv: KvViewMut<KV>, slot: u32, position: u32, is_own: bool) -> u64 {
    if is_own { page_start(kv.pages, slot, position, kv.capacity, kv.max_pages, kv.page_stride) } else { 0u64 }
}

/// The raw heads of the warp: the queries of the block, then its new key and value. A lane has values i and i + D / 2
/// of a head.
#[device]
pub fn load_heads<const S: AttentionShape, const THREADS: u32, const ROUNDS: u32, const HAS_KV: bool>(
    heads: Projections,
    row: u32,
    low: &mut Regs<f32>,
    high: &mut Regs<f32>,
) {
    let q_head = heads.q.offset(row * heads.q_stride + block_idx() * S.GROUP * S.D);
    let k_head = heads.k.offset(row * heads.k_stride + block_idx() * S.D);
    let v_head = heads.v.offset(row * heads.v_stride + block_idx() * S.D);
    #[unroll]
    for round in 0..ROUNDS {
        let head = warp_id() + round * (THREADS / 32);
        let of_kv = if head == S.GROUP { k_head } else { v_head };
        let source = if head < S.GROUP { q_head.offset(head * S.D) } else { of_kv };
        if head < if HAS_KV { S.GROUP + 2 } else { S.GROUP } {
            #[unroll]
            for p in 0u32..S.D / 64 {
                low[round * S.D / 64 + p] = source[lane_id() + 32 * p];
                high[round * S.D / 64 + p] = source[lane_id() + 32 * p + S.D / 2];
            }
        }
    }
}

/// The weights of the heads' norms: a thread's values of the queries' and of the keys' in turn, THREADS apart.
#[device]
pub fn load_norms<const D: u32, const THREADS: u32, const HAS_KV: bool>(heads: Projections, weights: &mut Regs<f32>) {
    #[unroll]
    for n in 0..(D + THREADS - 1) / THREADS {
        let i = (thread_idx() + n * THREADS).min(D - 1);
        weights[2 * n] = heads.q_weight[i];
        if HAS_KV {
            weights[2 * n + 1] = heads.k_weight[i];
        }
    }
}

/// These to shared memory.
#[device]
pub fn store_norms<const D: u32, const THREADS: u32, const HAS_KV: bool>(weights: &mut Regs<f32>, norms: Shared<f32>) {
    #[unroll]
    for n in 0..(D + THREADS - 1) / THREADS {
        let i = thread_idx() + n * THREADS;
        if D % THREADS == 0 || i < D {
            norms[i] = weights[2 * n];
            if HAS_KV {
                norms[D + i] = weights[2 * n + 1];
            }
        }
    }
}

/// The frequencies of a thread's pairs of a head, THREADS apart.
#[device]
pub fn load_frequencies<const D: u32, const THREADS: u32>(
    inverse_frequencies: Weights<f32>,
    frequencies: &mut Regs<f32>,
) {
    #[unroll]
    for n in 0..(D / 2 + THREADS - 1) / THREADS {
        frequencies[n] = inverse_frequencies[(thread_idx() + n * THREADS).min(D / 2 - 1)];
    }
}

/// Cosine and sine of each pair of a head at a position. A thread has the frequencies of its own pairs.
#[device]
pub fn fill_rotations<const D: u32, const THREADS: u32>(
    frequencies: &mut Regs<f32>,
    position: u32,
    rotations: Shared<F32x2>,
) {
    #[unroll]
    for n in 0..(D / 2 + THREADS - 1) / THREADS {
        if thread_idx() + n * THREADS < D / 2 {
            rotations[thread_idx() + n * THREADS] = cos_sin(position as f32 * frequencies[n]);
        }
    }
}

/// What [`word_of`] made of a value of the new key or value, to the cache and to shared memory.
#[device]
pub fn store_new<const D: u32, const SCALED: bool, KV: Float>(row: InOut<KV>, new: Shared<KV>, i: u32, word: u32) {
    store_word(row, D, i, word);
    keep_word(new, D, i, word);
}

/// Norms and rotates the query heads of the block and, if the new row is its own, the new key and value, which are then
/// rounded and stored.
#[device(slots(narrow(bits: u32) -> u32))]
pub fn prepare_heads<
    const S: AttentionShape,
    const C: CacheFormat,
    const THREADS: u32,
    const ROUNDS: u32,
    const HAS_KV: bool,
    KV: Float,
>(
    low: &mut Regs<f32>,
    high: &mut Regs<f32>,
    memory: HeadsMemory<KV>,
    new: NewRow<KV>,
    epsilon: f32,
) {
    #[unroll]
    for round in 0..ROUNDS {
        let head = warp_id() + round * (THREADS / 32);
        let mut squares = 0.0f32;
        #[unroll]
        for p in 0u32..S.D / 64 {
            squares = add_squares(squares, low[round * S.D / 64 + p], high[round * S.D / 64 + p]);
        }
        let factor = head_factor(squares, S.D, epsilon);
        // Queries, the new key and the new value go the same way up to their stores, so that all of a warp's reads of
        // shared memory are in flight at once. A value is not rotated.
        let is_value = HAS_KV && head == S.GROUP + 1;
        let weights = memory.norms.offset(if HAS_KV && head == S.GROUP { S.D } else { 0 });
        let mut first = regs(0.0f32, S.D / 64);
        let mut second = regs(0.0f32, S.D / 64);
        #[unroll]
        for p in 0u32..S.D / 64 {
            let i = lane_id() + 32 * p;
            let x = low[round * S.D / 64 + p] * factor;
            let y = high[round * S.D / 64 + p] * factor;
            let turned = rotated(x * weights[i], y * weights[i + S.D / 2], memory.rotations[i]);
            first[p] = if is_value { x } else { turned.x };
            second[p] = if is_value { y } else { turned.y };
        }
        if head < S.GROUP {
            #[unroll]
            for p in 0u32..S.D / 64 {
                let i = lane_id() + 32 * p;
                memory.queries[head * (S.D + 8) + i] = first[p];
                memory.queries[head * (S.D + 8) + i + S.D / 2] = second[p];
            }
        } else if C.NARROW && HAS_KV && new.is_own && head < S.GROUP + 2 {
            #[unroll]
            for p in 0u32..S.D / 64 {
                let i = (head - S.GROUP) * S.D + lane_id() + 32 * p;
                store(memory.scratch, i * 2, first[p]);
                store(memory.scratch, (i + S.D / 2) * 2, second[p]);
            }
        } else if HAS_KV && new.is_own && head < S.GROUP + 2 {
            let kept = if is_value { memory.new_value } else { memory.new_key };
            #[unroll]
            for p in 0u32..S.D / 64 {
                let i = lane_id() + 32 * p;
                store(kept, i, KV::from_f32(first[p]));
                store(kept, i + S.D / 2, KV::from_f32(second[p]));
                if is_value {
                    new.v[i] = KV::from_f32(first[p]);
                    new.v[i + S.D / 2] = KV::from_f32(second[p]);
                } else {
                    new.k[i] = KV::from_f32(first[p]);
                    new.k[i + S.D / 2] = KV::from_f32(second[p]);
                }
            }
        }
    }
    if C.NARROW && HAS_KV && new.is_own {
        barrier();
        narrow_new_row(narrow, memory, new);
    }
}

/// The new key and value in 8 bits, from their floats in `scratch`. A warp has the values of a scale, and all warps
/// share them out: one after the other in one warp's registers is a long text.
#[device(slots(narrow(bits: u32) -> u32))]
pub fn narrow_new_row<const D: u32, const THREADS: u32, const SCALED: bool, KV: Float>(
    memory: HeadsMemory<KV>,
    new: NewRow<KV>,
) {
    // All loads first: a store would hold back the loads after it.
    let mut values = regs(0.0f32, (2 * D + THREADS - 1) / THREADS);
    #[unroll]
    for i in 0..(2 * D + THREADS - 1) / THREADS {
        let at = i * THREADS + thread_idx();
        if 2 * D % THREADS == 0 || at < 2 * D {
            values[i] = load::<f32>(memory.scratch, at * 2);
        }
    }
    #[unroll]
    for i in 0..(2 * D + THREADS - 1) / THREADS {
        let first = i * THREADS + warp_id() * 32;
        if 2 * D % THREADS == 0 || first < 2 * D {
            let word = word_of(narrow, values[i]);
            if first < D {
                store_new(new.k, memory.new_key, first + lane_id(), word);
            } else {
                store_new(new.v, memory.new_value, first - D + lane_id(), word);
            }
        }
    }
}
