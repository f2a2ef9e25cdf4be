//! The activations of several rows, as the products of several rows read them.
//!
//! A product of one row norms and quantises its activations in every block. For several rows that is a kernel of its
//! own: a block takes a row and does what a block of [`matvec`](crate::kernels::matvec::matvec) does before it
//! multiplies, with the same warps, the same fours a thread and the same functions, so a row has the same bits as
//! alone.
//!
//! Codes are stored as any earlier kernel stores int8, row by row; or, for tensor cores, in PANELS of eight rows: 16
//! bytes of each, then the next 16 of each, and their scales and sums likewise. The last panel is padded with zeros. A
//! norm's factor is not applied: the products multiply their results by it.

use gemma4c_dsl::prelude::*;

use crate::kernels::matvec::parts::{chunk_slots, inverse_rms_of_chunks};
use crate::kernels::matvec::prologue::{copy_norms, load_update, take_update, weigh};
use crate::kernels::quantise::{fine_codes, quantise4, quantise4_unbounded};

/// A row of K values, of which each thread of WARPS warps holds PIECES fours, and what is done to it: the RESIDUAL
/// takes a layer's part, BRANCHED is the sum of two normed ones, and a norm follows.
#[config]
pub struct RowPrologue {
    pub K: u32,
    pub WARPS: u32,
    pub PIECES: u32,
    pub RESIDUAL: bool,
    pub BRANCHED: bool,
    pub NORMED: bool,
    pub EPSILON: f32,
}

/// How activations are stored: INTEGER codes with scales and sums, else f32; with FINE codes for the digits behind
/// them; in PANELS.
#[config]
pub struct PreparedForm {
    pub INTEGER: bool,
    pub FINE: bool,
    pub PANELS: bool,
}

/// The weights of the norms: of a layer's part, of a mixture's other half, of their sum, and of the residual.
#[view]
pub struct PrologueNorms {
    update: Weights<f32>,
    branch: Weights<f32>,
    post: Weights<f32>,
    next: Weights<f32>,
}

/// Elements from a row to the next one, of each input.
#[view]
pub struct PrologueStrides {
    input: u32,
    update: u32,
    branch: u32,
}

/// Prepared rows: codes with a scale and a sum for each 32, or `values`. A row's second digits, then its third ones,
/// are in `fine`: zeros in groups that have none. `factor`: the norm's, one a row.
#[view]
pub struct PreparedOut {
    codes: Output<u32>,
    scales: Output<f32>,
    sums: Output<i32>,
    fine: Output<u32>,
    fine_sums: Output<i32>,
    values: Output<f32>,
    factor: Output<f32>,
}

/// Writes the four values at `place` of a row, if there is such a place. A collective of the warp.
#[device]
pub fn write_prepared<const K: u32, const F: PreparedForm>(four: F32x4, row: u32, place: u32, out: PreparedOut) {
    let places = K / 4;
    if F.INTEGER {
        let codes = if F.FINE { quantise4_unbounded(four) } else { quantise4(four) };
        let mut digits = U32x4::ZERO;
        if F.FINE && warp_any(f32::from_bits(codes.y) < 0.0) {
            digits = fine_codes(four, codes.x, f32::from_bits(codes.w));
        }
        let has_digits = f32::from_bits(codes.y) < 0.0;
        if place < places {
            let vector = (row / 8 * (K / 16) + place / 4) * 8 + row % 8;
            out.codes[if F.PANELS { vector * 4 + place % 4 } else { row * places + place }] = codes.x;
            if F.FINE {
                out.fine[row * 2 * places + place] = if has_digits { digits.x } else { 0 };
                out.fine[(row * 2 + 1) * places + place] = if has_digits { digits.y } else { 0 };
            }
            if place % 8 == 0 {
                let group = (row / 8 * (K / 32) + place / 8) * 8 + row % 8;
                let at = if F.PANELS { group } else { row * (K / 32) + place / 8 };
                out.scales[at] = f32::from_bits(codes.y);
                out.sums[at] = codes.z as i32;
                if F.FINE {
                    out.fine_sums[row * (K / 32) + place / 8] = if has_digits { digits.z as i32 } else { 0 };
                }
            }
        }
    } else if place < places {
        store(out.values, row * K + place * 4, four);
    }
}

/// Fills the panel of the last `row` with rows of zeros.
#[device]
pub fn pad_panel<const K: u32, const WARPS: u32>(row: u32, out: PreparedOut) {
    for pad in row + 1..(row / 8 + 1) * 8 {
        for place in (thread_idx()..K / 4).by(WARPS * 32) {
            out.codes[((row / 8 * (K / 16) + place / 4) * 8 + pad % 8) * 4 + place % 4] = 0;
        }
        for group in (thread_idx()..K / 32).by(WARPS * 32) {
            let at = (row / 8 * (K / 32) + group) * 8 + pad % 8;
            out.scales[at] = 0.0;
            out.sums[at] = 0;
        }
    }
}

/// A row of activations a block. Every row is computed, in use or not: rows are independent.
#[kernel(block = R.WARPS * 32, dependent, dynamic_shared, slots(
    input(at: u32) -> F32x4,
    update(at: u32) -> F32x4,
    branch(at: u32) -> F32x4,
    scale(value: f32) -> f32,
    residual(value: F32x4, at: u32) -> F32x4
))]
pub fn prepare_rows<const R: RowPrologue, const F: PreparedForm>(
    norms: PrologueNorms,
    out: PreparedOut,
    strides: PrologueStrides,
) {
    require!(R.K % 32 == 0);
    require!(!R.BRANCHED || R.RESIDUAL);
    require!(!(R.RESIDUAL || R.NORMED) || R.K <= R.PIECES * R.WARPS * 128);
    require!(!F.FINE || F.INTEGER && !F.PANELS);
    let posts = shared::<f32>(if R.BRANCHED {
        3 * R.K
    } else if R.RESIDUAL {
        R.K
    } else {
        4
    });
    let nexts = shared::<f32>(if R.NORMED { R.K } else { 4 });
    let of_branches = shared::<f32>(if R.BRANCHED { 2 * chunk_slots(R.K) } else { 4 });
    let of_updates = shared::<f32>(if R.RESIDUAL { chunk_slots(R.K) } else { 4 });
    let of_residual = shared::<f32>(if R.NORMED { chunk_slots(R.K) } else { 4 });
    let row = block_idx();
    let threads = R.WARPS * 32;
    let places = R.K / 4;

    copy_norms(posts, nexts, norms.update, norms.branch, norms.post, norms.next);
    let by = scale(1.0);
    grid_launch_dependents();
    grid_dependency_wait();
    // Whole warps, because to quantise is a collective: the lanes past the end have zeros, which are not kept.
    for start in (0u32..places).by(R.PIECES * threads) {
        let mut held = regs(F32x4::ZERO, R.PIECES);
        #[unroll]
        for p in 0u32..R.PIECES {
            let place = start + thread_idx() + p * threads;
            if places % (R.PIECES * threads) == 0 || place < places {
                held[p] = input(row * strides.input + place * 4);
            }
        }
        if R.RESIDUAL {
            let mut updates = regs(F32x4::ZERO, R.PIECES);
            let from = row * strides.update;
            let other = row * strides.branch;
            let factor = load_update(update, branch, &mut updates, from, other, posts, of_branches, of_updates);
            take_update(residual, &mut held, &updates, factor, by, row * R.K, true, posts);
        }
        if R.NORMED {
            weigh(&mut held, nexts, of_residual);
        }
        #[unroll]
        for p in 0u32..R.PIECES {
            write_prepared(held[p], row, start + thread_idx() + p * threads, out);
        }
    }
    if F.PANELS && row + 1 == grid_dim() {
        pad_panel(row, out);
    }
    if R.NORMED {
        barrier();
        let after = inverse_rms_of_chunks(of_residual, R.K);
        if thread_idx() == 0 {
            out.factor[row] = after;
        }
    }
}
