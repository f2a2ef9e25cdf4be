//! What comes before a decoded row's attention: head norms and RoPE of the block's queries, and of its new key and value, which are
//! rounded, stored, and kept for the block's own use. `heads.rs` does the same for many rows, as a launch of its own.

use gemma4c_dsl::prelude::*;

use super::narrow::{keep_word, store_word, word_of};
use crate::kernels::heads::{add_squares, cos_sin, head_factor, rotated};

/// The raw heads of the warp: the queries of the block, then its new key and value. A lane has values i and i + D / 2 of a head.
#[device]
pub fn load_heads<const D: u32, const G: u32, const THREADS: u32, const ROUNDS: u32, const OWN: bool>(
    q_head: Input<f32>,
    k_head: Input<f32>,
    v_head: Input<f32>,
    low: &mut Regs<f32>,
    high: &mut Regs<f32>,
) {
    #[unroll]
    for round in 0..ROUNDS {
        let head = warp_id() + round * (THREADS / 32);
        let of_kv = if head == G { k_head } else { v_head };
        let source = if head < G { q_head.offset(head * D) } else { of_kv };
        if head < if OWN { G + 2 } else { G } {
            #[unroll]
            for p in 0..D / 64 {
                low[round * D / 64 + p] = source[lane_id() + 32 * p];
                high[round * D / 64 + p] = source[lane_id() + 32 * p + D / 2];
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
pub fn fill_turns<const D: u32, const THREADS: u32>(frequencies: &mut Regs<f32>, position: u32, turns: Shared<F32x2>) {
    #[unroll]
    for n in 0..(D / 2 + THREADS - 1) / THREADS {
        if thread_idx() + n * THREADS < D / 2 {
            turns[thread_idx() + n * THREADS] = cos_sin(position as f32 * frequencies[n]);
        }
    }
}

/// What [`word_of`] made of a value of the new key or value, to the cache and to shared memory.
#[device]
pub fn store_new<const D: u32, const SCALED: bool, KV: Float>(row: InOut<KV>, new: Shared<KV>, i: u32, word: u32) {
    store_word(row, D, i, word);
    keep_word(new, D, i, word);
}

/// Norms and rotates the query heads of the block and, if `fresh`, its new key and value, which are then rounded, stored, and
/// kept in `new_key` and `new_value`. To 8 bits they are rounded by all warps, by way of `room`, which has 2 * D floats. `norms` are the weights of the queries, then of the keys; `turns` cosine and sine of
/// each pair.
#[device(slots(narrow(bits: u32) -> u32))]
pub fn prepare_heads<
    const D: u32,
    const G: u32,
    const THREADS: u32,
    const ROUNDS: u32,
    const OWN: bool,
    const NARROW: bool,
    const SCALED: bool,
    KV: Float,
>(
    low: &mut Regs<f32>,
    high: &mut Regs<f32>,
    norms: Shared<f32>,
    turns: Shared<F32x2>,
    queries: Shared<f32>,
    room: Shared<KV>,
    new_key: Shared<KV>,
    new_value: Shared<KV>,
    k_row: InOut<KV>,
    v_row: InOut<KV>,
    fresh: bool,
    epsilon: f32,
) {
    #[unroll]
    for round in 0..ROUNDS {
        let head = warp_id() + round * (THREADS / 32);
        let mut squares = 0.0f32;
        #[unroll]
        for p in 0..D / 64 {
            squares = add_squares(squares, low[round * D / 64 + p], high[round * D / 64 + p]);
        }
        let factor = head_factor(squares, D, epsilon);
        // Queries, the new key and the new value go the same way up to their stores, so that all of a warp's reads of shared memory are under way at once. A value is not rotated.
        let is_value = OWN && head == G + 1;
        let weights = norms.offset(if OWN && head == G { D } else { 0 });
        let mut first = regs(0.0f32, D / 64);
        let mut second = regs(0.0f32, D / 64);
        #[unroll]
        for p in 0..D / 64 {
            let i = lane_id() + 32 * p;
            let x = low[round * D / 64 + p] * factor;
            let y = high[round * D / 64 + p] * factor;
            let turned = rotated(x * weights[i], y * weights[i + D / 2], turns[i]);
            first[p] = if is_value { x } else { turned.x };
            second[p] = if is_value { y } else { turned.y };
        }
        if head < G {
            #[unroll]
            for p in 0..D / 64 {
                let i = lane_id() + 32 * p;
                queries[head * (D + 8) + i] = first[p];
                queries[head * (D + 8) + i + D / 2] = second[p];
            }
        } else if NARROW && OWN && fresh && head < G + 2 {
            #[unroll]
            for p in 0..D / 64 {
                let i = (head - G) * D + lane_id() + 32 * p;
                store(room, i * 2, first[p]);
                store(room, (i + D / 2) * 2, second[p]);
            }
        } else if OWN && fresh && head < G + 2 {
            let kept = if is_value { new_value } else { new_key };
            #[unroll]
            for p in 0..D / 64 {
                let i = lane_id() + 32 * p;
                store(kept, i, KV::from_f32(first[p]));
                store(kept, i + D / 2, KV::from_f32(second[p]));
                if is_value {
                    v_row[i] = KV::from_f32(first[p]);
                    v_row[i + D / 2] = KV::from_f32(second[p]);
                } else {
                    k_row[i] = KV::from_f32(first[p]);
                    k_row[i + D / 2] = KV::from_f32(second[p]);
                }
            }
        }
    }
    if NARROW && OWN && fresh {
        barrier();
        // A warp has the values of a scale. All warps share them out: one after the other in one warp's registers is a long text. A store would hold back
        // the loads after it, so these come first.
        let mut values = regs(0.0f32, (2 * D + THREADS - 1) / THREADS);
        #[unroll]
        for i in 0..(2 * D + THREADS - 1) / THREADS {
            let at = i * THREADS + thread_idx();
            if 2 * D % THREADS == 0 || at < 2 * D {
                values[i] = load::<f32>(room, at * 2);
            }
        }
        #[unroll]
        for i in 0..(2 * D + THREADS - 1) / THREADS {
            let first = i * THREADS + warp_id() * 32;
            if 2 * D % THREADS == 0 || first < 2 * D {
                let word = word_of(narrow, values[i]);
                if first < D {
                    store_new(k_row, new_key, first + lane_id(), word);
                } else {
                    store_new(v_row, new_value, first - D + lane_id(), word);
                }
            }
        }
    }
}
