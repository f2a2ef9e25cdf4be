//! The activations of several rows, as the products of several rows read them.
//!
//! A product of one row norms and quantises its activations in every block. For several rows that is a kernel of its own: a block
//! takes a row and does what a block of [`matvec`](crate::kernels::matvec::matvec) does before its first unit, with the same warps, the same
//! pieces a thread and the same functions, so a row has the same bits as alone. Codes lie as any earlier kernel leaves int8, row by row; or, for tensor
//! cores, in PANELS of eight rows: 16 bytes of each, then the next 16 of each, and their scales and sums likewise; the last panel is filled up with zeros.
//! A norm's factor is not in them: the products multiply their results by it.

use gemma4c_dsl::prelude::*;

use crate::kernels::matvec::parts::{chunk_slots, inverse_rms_of_chunks};
use crate::kernels::matvec::prologue::{copy_norms, load_update, take_update, weigh};
use crate::kernels::quantise::{fine_codes, quantise4, quantise4_unbounded};

/// A row of activations a block: INTEGER codes with their scales and sums, else f32 `values`. With FINE a row's second digits, then its third ones
/// lie in `fine`; they are zero in groups that have none. Every row is computed, in use or not: rows are independent.
#[kernel(block = WARPS * 32, dependent, dynamic_shared, slots(
    input(at: u32) -> F32x4,
    update(at: u32) -> F32x4,
    branch(at: u32) -> F32x4,
    scale(value: f32) -> f32,
    residual(value: F32x4, at: u32) -> F32x4
))]
pub fn prepare_rows<
    const K: u32,
    const INTEGER: bool,
    const WARPS: u32,
    const PIECES: u32,
    const RESIDUAL: bool,
    const BRANCHED: bool,
    const NORMED: bool,
    const FINE: bool,
    const PANELS: bool,
    const EPSILON: f32,
>(
    update_norm: Weights<f32>,
    branch_norm: Weights<f32>,
    post_norm: Weights<f32>,
    next_norm: Weights<f32>,
    xq: Output<u32>,
    xscale: Output<f32>,
    xsum: Output<i32>,
    fine: Output<u32>,
    fine_sums: Output<i32>,
    values: Output<f32>,
    factor: Output<f32>,
    input_stride: u32,
    update_stride: u32,
    branch_stride: u32,
) {
    require!(K % 32 == 0);
    require!(!BRANCHED || RESIDUAL);
    require!(!(RESIDUAL || NORMED) || K <= PIECES * WARPS * 128);
    require!(!FINE || INTEGER && !PANELS);
    let posts = shared::<f32>(if BRANCHED {
        3 * K
    } else if RESIDUAL {
        K
    } else {
        4
    });
    let nexts = shared::<f32>(if NORMED { K } else { 4 });
    let of_branches = shared::<f32>(if BRANCHED { 2 * chunk_slots(K) } else { 4 });
    let of_updates = shared::<f32>(if RESIDUAL { chunk_slots(K) } else { 4 });
    let of_residual = shared::<f32>(if NORMED { chunk_slots(K) } else { 4 });
    let row = block_idx();
    let threads = WARPS * 32;
    let places = K / 4;

    copy_norms(posts, nexts, update_norm, branch_norm, post_norm, next_norm);
    let by = scale(1.0);
    grid_launch_dependents();
    grid_dependency_wait();
    // Whole warps, because to quantise is a collective: the lanes past the end have zeros, which are not kept.
    for start in (0..places).by(PIECES * threads) {
        let mut held = regs(F32x4::ZERO, PIECES);
        #[unroll]
        for p in 0..PIECES {
            let place = start + thread_idx() + p * threads;
            if places % (PIECES * threads) == 0 || place < places {
                held[p] = input(row * input_stride + place * 4);
            }
        }
        if RESIDUAL {
            let mut updates = regs(F32x4::ZERO, PIECES);
            let from = row * update_stride;
            let other = row * branch_stride;
            let factor = load_update(update, branch, &mut updates, from, other, posts, of_branches, of_updates);
            take_update(residual, &mut held, &updates, factor, by, row * K, true, posts);
        }
        if NORMED {
            weigh(&mut held, nexts, of_residual);
        }
        #[unroll]
        for p in 0..PIECES {
            let place = start + thread_idx() + p * threads;
            if INTEGER {
                let four = if FINE { quantise4_unbounded(held[p]) } else { quantise4(held[p]) };
                let mut digits = U32x4::ZERO;
                if FINE && warp_any(f32::from_bits(four.y) < 0.0) {
                    digits = fine_codes(held[p], four.x, f32::from_bits(four.w));
                }
                let has_digits = f32::from_bits(four.y) < 0.0;
                if place < places {
                    let part = (row / 8 * (K / 16) + place / 4) * 8 + row % 8;
                    xq[if PANELS { part * 4 + place % 4 } else { row * places + place }] = four.x;
                    if FINE {
                        fine[row * 2 * places + place] = if has_digits { digits.x } else { 0 };
                        fine[(row * 2 + 1) * places + place] = if has_digits { digits.y } else { 0 };
                    }
                    if place % 8 == 0 {
                        let group = (row / 8 * (K / 32) + place / 8) * 8 + row % 8;
                        let at = if PANELS { group } else { row * (K / 32) + place / 8 };
                        xscale[at] = f32::from_bits(four.y);
                        xsum[at] = four.z as i32;
                        if FINE {
                            fine_sums[row * (K / 32) + place / 8] = if has_digits { digits.z as i32 } else { 0 };
                        }
                    }
                }
            } else if place < places {
                store(values, row * K + place * 4, held[p]);
            }
        }
    }
    if PANELS && row + 1 == grid_dim() {
        // The last panel is whole: rows that are not there are zeros.
        for pad in row + 1..(row / 8 + 1) * 8 {
            for place in (thread_idx()..places).by(threads) {
                xq[((row / 8 * (K / 16) + place / 4) * 8 + pad % 8) * 4 + place % 4] = 0;
            }
            for group in (thread_idx()..K / 32).by(threads) {
                let at = (row / 8 * (K / 32) + group) * 8 + pad % 8;
                xscale[at] = 0.0;
                xsum[at] = 0;
            }
        }
    }
    if NORMED {
        barrier();
        let after = inverse_rms_of_chunks(of_residual, K);
        if thread_idx() == 0 {
            factor[row] = after;
        }
    }
}
