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
//!
//! Of a product with adapters the same launch computes what lies between their halves. A row has more blocks then, for
//! 16 numbers each: they prepare the row once more, keep it in shared memory and multiply it by A, in the order of a row
//! on its own. Those of a row without a seat have nothing to do.

use gemma4c_dsl::prelude::*;

use crate::kernels::adapter::{WideBank, is_repeated, prefetch_wide};
use crate::kernels::matvec::adapter::{fours_of, narrow_part};
use crate::kernels::matvec::parts::{chunk_slots, inverse_rms_of_chunks, keep_codes};
use crate::kernels::matvec::prologue::{copy_norms, load_update, take_update, weigh};
use crate::kernels::matvec::slots::as_words;
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

/// What lies between the halves of adapters' pairs: VALUES numbers, RANK for each matrix that has a pair; none of a
/// product without. Shared memory has a row as units of UNIT values, whose parts are in their order.
#[config]
pub struct Narrowed {
    pub VALUES: u32,
    pub RANK: u32,
    pub UNIT: u32,
}

/// The first halves, of each matrix those of all `seats`; the entry of each row's seat; and where the numbers go.
#[view]
pub struct NarrowedRows {
    a: Weights<u32>,
    row_seats: Weights<u32>,
    out: Output<f32>,
    seats: u32,
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

/// Keeps the four values at `place` of a row in shared memory, if there is such a place. A collective of the warp.
#[device]
pub fn keep_prepared<const K: u32, const F: PreparedForm>(
    four: F32x4,
    place: u32,
    words: Shared<u32>,
    scales: Shared<U32x2>,
) {
    if F.INTEGER {
        let codes = quantise4(four);
        if place < K / 4 {
            keep_codes(codes, place, place, words, scales);
        }
    } else if place < K / 4 {
        store(words, place * 4, as_words(four));
    }
}

/// The first value of A of a number between the halves.
#[device]
pub fn start_of_value<const K: u32, const N: Narrowed>(value: u32, seat: u32, of: NarrowedRows) -> u32 {
    ((value / N.RANK.max(1) * of.seats + seat - 1) * N.RANK + value % N.RANK.max(1)) * K
}

/// Multiplies a row in shared memory by a row of A, four chunks to a sum. A collective of the warp.
#[device]
pub fn narrow_row<const K: u32, const N: Narrowed>(
    start: u32,
    of: NarrowedRows,
    words: Shared<u32>,
    scales: Shared<U32x2>,
) -> f32 {
    let mut total = 0.0f32;
    for four in 0u32..fours_of(K) {
        let mut chunks = regs(0.0f32, 4);
        #[unroll]
        for chunk in 0u32..4 {
            let first = (four * 4 + chunk) * 1024 + lane_id() * 16;
            let mut sum = 0.0f32;
            #[unroll]
            for turn in 0u32..2 {
                let at = first + turn * 512;
                if at < K {
                    let low = load::<U32x4>(of.a, (start + at) / 2);
                    let high = load::<U32x4>(of.a, (start + at) / 2 + 4);
                    sum = sum + narrow_part(at, low, high, K / N.UNIT, words, scales);
                }
            }
            chunks[chunk] = sum;
        }
        #[unroll]
        for chunk in 0u32..4 {
            chunks[chunk] = warp_sum(chunks[chunk]);
        }
        let sum = chunks[0u32] + chunks[1u32] + chunks[2u32] + chunks[3u32];
        total = if four == 0 { sum } else { total + sum };
    }
    total
}

/// A row of activations a block, and with adapters so many more for what lies between their halves. Every row is
/// computed, in use or not: rows are independent.
#[kernel(block = R.WARPS * 32, dependent, dynamic_shared, slots(
    input(at: u32) -> F32x4,
    update(at: u32) -> F32x4,
    branch(at: u32) -> F32x4,
    scale(value: f32) -> f32,
    residual(value: F32x4, at: u32) -> F32x4
))]
pub fn prepare_rows<const R: RowPrologue, const F: PreparedForm, const N: Narrowed>(
    norms: PrologueNorms,
    out: PreparedOut,
    strides: PrologueStrides,
    narrowed: NarrowedRows,
    wide: WideBank,
) {
    require!(R.K % 32 == 0);
    require!(!R.BRANCHED || R.RESIDUAL);
    require!(!(R.RESIDUAL || R.NORMED) || R.K <= R.PIECES * R.WARPS * 128);
    require!(!F.FINE || F.INTEGER && !F.PANELS);
    require!(N.VALUES % 16 == 0 && (N.VALUES == 0 || !F.FINE) && N.UNIT == 16);
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
    let words = shared::<u32>(if N.VALUES == 0 {
        4
    } else if F.INTEGER {
        R.K / 4
    } else {
        R.K
    });
    let scales = shared::<U32x2>(if N.VALUES > 0 && F.INTEGER { R.K / 32 } else { 1 });
    let row = block_idx();
    let threads = R.WARPS * 32;
    let places = R.K / 4;

    let narrows = N.VALUES > 0 && block_idx_y() > 0;
    let first_value = if narrows { (block_idx_y() - 1) * 16 } else { 0 };
    let mut seat = u32x2(1, 0);
    if narrows {
        seat = load::<U32x2>(narrowed.row_seats, row * 2);
    }
    copy_norms(posts, nexts, norms.update, norms.branch, norms.post, norms.next);
    let by = scale(1.0);
    grid_launch_dependents();
    if narrows && seat.x > 0 {
        // Its rows of A are in L2 when the activations are there.
        for value in (warp_id()..16).by(R.WARPS) {
            let start = start_of_value(first_value + value, seat.x, narrowed);
            for line in (lane_id() * 64..R.K).by(2048) {
                prefetch(narrowed.a, (start + line) / 2);
            }
        }
        if !is_repeated(row, seat.x, narrowed.row_seats) {
            prefetch_wide(seat.x, first_value / 16 * threads + thread_idx(), N.VALUES / 16 * threads, wide);
        }
    }
    grid_dependency_wait();
    // Whole warps, because to quantise is a collective: the lanes past the end have zeros, which are not kept.
    let end = if seat.x > 0 { places } else { 0 };
    for start in (0u32..end).by(R.PIECES * threads) {
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
            take_update(residual, &mut held, &updates, factor, by, row * R.K, !narrows, posts);
        }
        if R.NORMED {
            weigh(&mut held, nexts, of_residual);
        }
        #[unroll]
        for p in 0u32..R.PIECES {
            let place = start + thread_idx() + p * threads;
            if narrows {
                keep_prepared(held[p], place, words, scales);
            } else {
                write_prepared(held[p], row, place, out);
            }
        }
    }
    if F.PANELS && !narrows && row + 1 == grid_dim() {
        pad_panel(row, out);
    }
    if R.NORMED || narrows {
        barrier();
        let mut after = 1.0f32;
        if R.NORMED && seat.x > 0 {
            after = inverse_rms_of_chunks(of_residual, R.K);
        }
        if R.NORMED && !narrows && thread_idx() == 0 {
            out.factor[row] = after;
        }
        if narrows {
            cp_async_wait(0);
            for own in (warp_id()..16).by(R.WARPS) {
                let value = first_value + own;
                let mut number = 0.0f32;
                if seat.x > 0 {
                    number = narrow_row(start_of_value(value, seat.x, narrowed), narrowed, words, scales)
                        * (after * f32::from_bits(seat.y));
                }
                if lane_id() == 0 {
                    narrowed.out[row * N.VALUES + value] = number;
                }
            }
        }
    }
}
