//! What comes before a decoded row's attention: head norms and RoPE of the block's queries, and of its new key and value, which are
//! rounded, stored, and kept for the block's own use. `heads.rs` does the same for many rows, as a launch of its own.

use gemma4c_dsl::prelude::*;

use super::narrow::{keep_word, store_word, word_of};
use crate::kernels::heads::{add_squares, head_factor, rotated};

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
        #[unroll]
        for p in 0..D / 64 {
            let i = lane_id() + 32 * p;
            let x = low[round * D / 64 + p] * factor;
            let y = high[round * D / 64 + p] * factor;
            if head < G {
                let turned = rotated(x * norms[i], y * norms[i + D / 2], turns[i]);
                queries[head * (D + 8) + i] = turned.x;
                queries[head * (D + 8) + i + D / 2] = turned.y;
            } else if NARROW && OWN && fresh && head == G {
                let turned = rotated(x * norms[D + i], y * norms[D + i + D / 2], turns[i]);
                store(room, i * 2, turned.x);
                store(room, (i + D / 2) * 2, turned.y);
            } else if NARROW && OWN && fresh && head == G + 1 {
                store(room, (D + i) * 2, x);
                store(room, (D + i + D / 2) * 2, y);
            } else if OWN && fresh && head == G {
                let turned = rotated(x * norms[D + i], y * norms[D + i + D / 2], turns[i]);
                new_key[i] = KV::from_f32(turned.x);
                new_key[i + D / 2] = KV::from_f32(turned.y);
                k_row[i] = KV::from_f32(turned.x);
                k_row[i + D / 2] = KV::from_f32(turned.y);
            } else if OWN && fresh && head == G + 1 {
                new_value[i] = KV::from_f32(x);
                new_value[i + D / 2] = KV::from_f32(y);
                v_row[i] = KV::from_f32(x);
                v_row[i + D / 2] = KV::from_f32(y);
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
