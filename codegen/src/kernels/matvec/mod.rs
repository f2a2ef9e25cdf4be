//! The matrix-vector product of decode: one row of activations times repacked weights of any type.
//!
//! Its time is the weights' way from memory, so the kernel is a pipeline of 16-byte loads: each lane keeps ROWS x DEPTH units
//! on their way, and issues the next one as soon as it has used one, across the ends of rows. The grid is as large as the
//! GPU, not as the matrix: a warp goes on to its next rows without a pause. The activations lie in shared memory, int8 with
//! a scale for each 32 values, or f32 for float weights.
//!
//! Each row is summed in the same order, whatever the grid and however many rows of activations there are ([`rows`](crate::kernels::rows)). The order is made for
//! tensor cores, which can keep few sums for an output. A row is cut in four stretches of eight lanes each (STRETCHED). A lane of a stretch (of Q8_0, a pair of lanes) takes every
//! eighth block of 32 values (every fourth), one fused multiply-add a block. A tree adds the lanes of a stretch, and the stretches are added in order. Where a quarter of the lanes would have no unit, eight of them
//! take all stretches of a row one after the other, and the sums are the same. A product that tensor cores do
//! not have, of float weights or of activations with fine codes, is not STRETCHED: all lanes take units in turn, and a tree adds them.
//!
//! One kernel serves all: a weight format ([`formats`]), a prologue (how activations arrive) and an epilogue ([`slots`]) are
//! device functions in its slots. Several matrices that share their input and their type are one matrix, stacked; with PAIRED
//! the upper half of the rows is joined to the lower, as gate and up are. [`Product`] is what a plan asks for; how many of everything is [`shape`]'s choice.
//!
//! Results that leave as int8 are rounded by blocks that have whole groups of 32. Where groups do not divide evenly among the SMs, all SMs have as many as each can have (SPREADS). What is left leaves as
//! floats, and the product that reads it rounds those (LOOSE). So every SM reads weights for as long, and nobody waits for another block.

pub mod adapter;
pub mod formats;
pub mod parts;
mod product;
pub mod prologue;
pub mod shape;
pub mod slots;
pub mod steps;
mod sums;

use gemma4c_dsl::prelude::*;

use crate::kernels::quantise::{fine_codes, quantise4, quantise4_alone, quantise4_unbounded};
use adapter::{
    Adapted, AdapterPlaces, changes_of, clear_spent, fetch_wide, pairs_before, prefetch_narrow, receive_narrow,
    send_narrow,
};
use parts::{
    Unit, UnitActivations, activations_at, chunk_slots, dot_fine, fetch, inverse_rms_of_chunks, keep_codes, keep_fine,
    part_at, second_part_at,
};
pub use product::{LaunchShape, Pairs, Product, Prologue};
use prologue::{copy_norms, load_update, take_update, weigh};
use slots::as_words;
use steps::{lane_units, step_units, stretch_of};
pub use sums::lanes_sum;
use sums::{lane_of_row, row_of_lane, rows_sum};

/// Whether all lanes have the same number of steps, a multiple of DEPTH: there is no end to mind.
#[device]
pub fn is_exact<const K: u32, const UNIT: u32, const LANES: u32, const DEPTH: u32, const STRETCHED: bool>() -> bool {
    let all_are_full = !STRETCHED || K / UNIT == lane_units() * (LANES / 8);
    all_are_full && lane_units() % (step_units() * DEPTH) == 0
}

/// Whether all units of a row are on their way to its lanes: each round of the loop is a row's last.
#[device]
pub fn is_whole<const K: u32, const UNIT: u32, const LANES: u32, const DEPTH: u32, const STRETCHED: bool>() -> bool {
    step_units() * DEPTH >= lane_units()
}

/// Whether all lanes have that step of a round.
#[device]
pub fn is_full<const K: u32, const UNIT: u32, const LANES: u32, const DEPTH: u32, const STRETCHED: bool>(
    step: u32,
) -> bool {
    let last = if STRETCHED { (LANES / 8 - 1) * lane_units() } else { 0 };
    is_exact() || is_whole() && last + (step + 1) * step_units() <= K / UNIT
}

/// The first unit of a lane in every row.
#[device]
pub fn first_unit<const K: u32, const UNIT: u32, const LANES: u32, const STRETCHED: bool>() -> u32 {
    let lane = lane_id() % LANES;
    if STRETCHED { lane / 8 * lane_units() + lane % 8 } else { lane }
}

/// The unit of `codes` that row `r` of a lane's rows needs at `at`: out-of-range rows are clamped to the last row, and their results dropped.
#[device]
pub fn unit_of<
    const K: u32,
    const UNIT: u32,
    const LANES: u32,
    const DEPTH: u32,
    const STRETCHED: bool,
    const PAIRED: bool,
>(
    first: u32,
    r: u32,
    at: u32,
    rows: u32,
) -> u32 {
    let units = K / UNIT;
    let output = (first + if PAIRED { r / 2 } else { r }).min(rows - 1);
    let row = if PAIRED { output + r % 2 * rows } else { output };
    row * units + if is_exact() { at } else { at.min(units - 1) }
}

/// Starts a unit on its way: of row `r` of a lane's rows, `step` steps behind `at`. With EVEN no row is out of range, and a lane's rows and steps lie at constant distances: one address serves all of them, or all of a half.
/// With RAGGED it is `held` where it is not `wanted`, or where the row has ended, and nothing is read. So there is no branch, and no place behind a row's end to avoid; but the compiler asks for all units of a round
/// together, so that it pays only where many steps have such places.
#[device(slots(side(unit: u32, more: u32) -> U32x4))]
pub fn fetch_of_row<
    const K: u32,
    const UNIT: u32,
    const LANES: u32,
    const DEPTH: u32,
    const STRETCHED: bool,
    const PAIRED: bool,
    const EVEN: bool,
    const RAGGED: bool,
>(
    codes: Weights<U32x4>,
    first: u32,
    r: u32,
    at: u32,
    step: u32,
    stop: u32,
    rows: u32,
    wanted: bool,
    held: Unit,
) -> Unit {
    let units = K / UNIT;
    let row = if PAIRED && r % 2 == 1 { first + rows } else { first } * units;
    let behind = if PAIRED { r / 2 } else { r } * units;
    let steps = step * step_units();
    let is_there = wanted && (is_full(step) || at + steps < stop);
    let number = row + if is_full(step) { at } else { (at + steps).min(units - 1) };
    let more = behind + if is_full(step) { steps } else { 0 };
    if !EVEN {
        fetch(side, codes, unit_of(first, r, at + steps, rows))
    } else if RAGGED {
        Unit {
            codes: load_streamed_if::<U32x4>(codes.offset(row + at), behind + steps, is_there, held.codes),
            side: side(number, more),
        }
    } else {
        Unit { codes: load_streamed::<U32x4>(codes.offset(number), more), side: side(number, more) }
    }
}

/// The output that a block's own of that number is. Whole groups go to blocks in turn, so that these read one stretch of memory together, then the next. With SPREADS a block's groups are neighbours,
/// and its loose outputs lie `gap` further on.
#[device]
pub fn output_at<const SHARE: u32, const SPREADS: bool>(own: u32, gap: u32) -> u32 {
    if SHARE == 0 {
        own
    } else if SPREADS {
        own + if own < SHARE { block_idx() * SHARE } else { gap }
    } else {
        (own / 32 * grid_dim() + block_idx()) * 32 + own % 32
    }
}

/// `out = W · x`. LANES lanes share a row, DEPTH units of it are on their way to a lane, for each of ROWS rows.
///
/// The prologue loads activations as float4 vectors, PIECES of them a thread at a time. With norms that is all of them: a
/// thread keeps its share in registers from the one load to the last use, so that a norm costs a sum over the block and no
/// second way to memory. `min_blocks = 1` lets ptxas use the whole register file;
/// otherwise it caps registers and serialises the loads.
#[kernel(block = WARPS * 32, min_blocks = 1, dependent, dynamic_shared, slots(
    side(unit: u32, more: u32) -> U32x4,
    dot(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32,
    two_dots(first: Unit, second: Unit, number: u32, x: UnitActivations, total: f32) -> f32,
    ready(part: u32) -> U32x4,
    ready_group(group: u32) -> U32x2,
    input(at: u32) -> F32x4,
    update(at: u32) -> F32x4,
    branch(at: u32) -> F32x4,
    scale(value: f32) -> f32,
    residual(value: F32x4, at: u32) -> F32x4,
    join(value: f32, up: f32) -> f32,
    epilogue(value: f32, row: u32) -> f32,
    keep(four: F32x4, at: u32) -> F32x4
))]
pub fn matvec<
    const K: u32,
    const UNIT: u32,
    const INTEGER: bool,
    const SUMMED: bool,
    const LANES: u32,
    const ROWS: u32,
    const DEPTH: u32,
    const WARPS: u32,
    const PIECES: u32,
    const PAIRED: bool,
    const READY: bool,
    const RESIDUAL: bool,
    const BRANCHED: bool,
    const NORMED: bool,
    const FINE: bool,
    const STRETCHED: bool,
    const JOINED: bool,
    const SHARES_ROWS: bool,
    const SHARE: u32,
    const SPREADS: bool,
    const LOOSE: u32,
    const EVEN: bool,
    const RAGGED: bool,
    const EPSILON: f32,
    const A: Adapted,
>(
    codes: Weights<U32x4>,
    update_norm: Weights<f32>,
    branch_norm: Weights<f32>,
    post_norm: Weights<f32>,
    next_norm: Weights<f32>,
    out: Output<f32>,
    rows: u32,
    adapter: AdapterPlaces,
) {
    require!(K % 32 == 0 && 32 % LANES == 0 && ROWS <= LANES);
    require!(!PAIRED || ROWS % 2 == 0);
    require!(!READY || INTEGER);
    require!(!BRANCHED || RESIDUAL);
    require!(!(RESIDUAL || NORMED) || K <= PIECES * WARPS * 128);
    // Lanes with fine codes go ways of their own, so they cannot be joined.
    require!(!FINE || INTEGER && !READY && !JOINED);
    require!(!SHARES_ROWS || JOINED && ROWS % 2 == 0);
    require!(!STRETCHED || ROWS <= 4 && (!JOINED || SHARES_ROWS || ROWS == 1));
    require!(SHARE % 32 == 0 && (!SPREADS || SHARE > 0));
    require!(LOOSE % 32 == 0 && LOOSE < K && (LOOSE == 0 || READY));
    require!(!STRETCHED || INTEGER && LANES % 8 == 0 && (LANES == 8 || LANES == 32 || K / UNIT <= LANES));
    // Where eight lanes have all stretches, a round is a whole row.
    require!(!STRETCHED || LANES > 8 || K / UNIT <= 8 * DEPTH);
    // With FINE the second digits of all values, then the third ones, follow the first.
    let x_words = shared::<u32>(if FINE {
        3 * K / 4
    } else if INTEGER {
        K / 4
    } else {
        K
    });
    let x_scales = shared::<U32x2>(if INTEGER { K / 32 } else { 1 });
    let fine_sums = shared::<i32>(if FINE { K / 32 } else { 1 });
    // Of the post-norm, then those of the branches.
    let posts = shared::<f32>(if BRANCHED {
        3 * K
    } else if RESIDUAL {
        K
    } else {
        4
    });
    let nexts = shared::<f32>(if NORMED { K } else { 4 });
    // Sums of squares of chunks: of both branches, of what they make together, of the residual.
    let of_branches = shared::<f32>(if BRANCHED { 2 * chunk_slots(K) } else { 4 });
    let of_updates = shared::<f32>(if RESIDUAL { chunk_slots(K) } else { 4 });
    let of_residual = shared::<f32>(if NORMED { chunk_slots(K) } else { 4 });
    let results = shared::<f32>(if SHARE > 0 { SHARE } else { 1 });
    // What lies between the halves of the adapters' pairs, and whether it is there.
    let narrow = shared::<f32>(if A.RANK > 0 { pairs_before(A.HAS, 3) * A.RANK } else { 4 });
    let narrowed = shared::<u64>(1);
    let units = K / UNIT;

    let lane = lane_id() % LANES;
    let outputs = if PAIRED { ROWS / 2 } else { ROWS };
    let warp_outputs = 32 / LANES * outputs;
    // All warps share out all outputs; or a block has whole int8 groups, and its outputs are numbered from 0. With SPREADS all blocks have equally many groups, and what is left of the outputs
    // leaves as floats: a block's part of that follows its groups.
    let loose_first = grid_dim() * SHARE;
    let loose_tasks = if SPREADS { (rows - loose_first) / warp_outputs } else { 0 };
    let loose_from = loose_tasks * block_idx() / grid_dim();
    let loose_to = loose_tasks * (block_idx() + 1) / grid_dim();
    let gap = if SPREADS { loose_first + loose_from * warp_outputs - SHARE } else { 0 };
    let own_groups = if SPREADS { SHARE / 32 } else { (rows / 32 + grid_dim() - 1 - block_idx()) / grid_dim() };
    let end = if SHARE > 0 { own_groups * 32 + (loose_to - loose_from) * warp_outputs } else { rows };
    let own_warp = if SHARE > 0 { warp_id() } else { block_idx() * WARPS + warp_id() };
    let all_warps = if SHARE > 0 { WARPS } else { grid_dim() * WARPS };
    let mut base = own_warp * warp_outputs;
    let own = lane_id() / LANES * outputs;
    let start = first_unit();
    let stop = (start - start % step_units() + lane_units()).min(units);
    let mut at = start;

    // The first weights are on their way before the activations are there, and before them what is little and comes first.
    let threads = WARPS * 32;
    let places = K / 4;
    copy_norms(posts, nexts, update_norm, branch_norm, post_norm, next_norm);
    let by = scale(1.0);
    let mut ahead = regs(Unit::ZERO, ROWS * DEPTH);
    if base < end {
        let here = output_at(base, gap) + own;
        #[unroll]
        for d in 0..DEPTH {
            #[unroll]
            for r in 0..ROWS {
                ahead[d * ROWS + r] = fetch_of_row(side, codes, here, r, at, d, stop, rows, true, ahead[d * ROWS + r]);
            }
        }
    }

    if A.RANK > 0 && thread_idx() == 0 {
        mbarrier_init(narrowed, 0u32, 1);
    }
    grid_launch_dependents();
    grid_dependency_wait();
    let mut seat = U32x2::ZERO;
    if A.RANK > 0 {
        // Before the loads of the activations: it is there when they are, and nobody asks for it earlier.
        seat = load::<U32x2>(adapter.seat, 0u32);
    }
    if READY {
        // All of a thread's loads, then all of its stores: a store waits for its load, and loads behind it would wait too.
        let whole = K - LOOSE;
        let mut parts = regs(U32x4::ZERO, (K - LOOSE) / (WARPS * 512) + 1);
        let mut groups = regs(U32x2::ZERO, (K - LOOSE) / (WARPS * 1024) + 1);
        let mut loose = regs(F32x4::ZERO, LOOSE / (WARPS * 128) + 1);
        #[unroll]
        for p in 0..(whole / 16).div_ceil(threads) {
            parts[p] = ready((thread_idx() + p * threads).min(whole / 16 - 1));
        }
        #[unroll]
        for p in 0..(whole / 32).div_ceil(threads) {
            groups[p] = ready_group((thread_idx() + p * threads).min(whole / 32 - 1));
        }
        #[unroll]
        for p in 0..(LOOSE / 4).div_ceil(threads) {
            loose[p] = input((thread_idx() + p * threads).min(LOOSE / 4 - 1) * 4);
        }
        #[unroll]
        for p in 0..(whole / 16).div_ceil(threads) {
            let part = thread_idx() + p * threads;
            if part < whole / 16 {
                store(x_words, part_at(part, units), parts[p]);
            }
        }
        #[unroll]
        for p in 0..(whole / 32).div_ceil(threads) {
            let group = thread_idx() + p * threads;
            if group < whole / 32 {
                x_scales[group] = groups[p];
            }
        }
        #[unroll]
        for p in 0..(LOOSE / 4).div_ceil(threads) {
            let four = quantise4(loose[p]);
            let place = whole / 4 + thread_idx() + p * threads;
            if place < places {
                keep_codes(four, part_at(place / 4, units) + place % 4, place, x_words, x_scales);
            }
        }
    } else {
        // Whole warps, because to quantise is a collective: the lanes past the end have zeros, which are not kept.
        for start in (0..places).by(PIECES * threads) {
            let mut held = regs(F32x4::ZERO, PIECES);
            #[unroll]
            for p in 0..PIECES {
                let place = start + thread_idx() + p * threads;
                if places % (PIECES * threads) == 0 || place < places {
                    held[p] = input(place * 4);
                }
            }
            if RESIDUAL {
                let mut updates = regs(F32x4::ZERO, PIECES);
                let factor = load_update(update, branch, &mut updates, 0, 0, posts, of_branches, of_updates);
                take_update(residual, &mut held, &updates, factor, by, 0, block_idx() == 0, posts);
            }
            if NORMED {
                weigh(&mut held, nexts, of_residual);
            }
            #[unroll]
            for p in 0..PIECES {
                let place = start + thread_idx() + p * threads;
                let part = if INTEGER { place / 4 } else { place };
                let to = part_at(part, units);
                let is_there = places % (PIECES * threads) == 0 || place < places;
                if INTEGER {
                    let four = if FINE {
                        quantise4_unbounded(held[p])
                    } else if SUMMED {
                        quantise4(held[p])
                    } else {
                        quantise4_alone(held[p])
                    };
                    if is_there {
                        keep_codes(four, to + place % 4, place, x_words, x_scales);
                    }
                    if FINE && warp_any(f32::from_bits(four.y) < 0.0) {
                        let fine = fine_codes(held[p], four.x, f32::from_bits(four.w));
                        if is_there {
                            keep_fine(fine, to + place % 4, place, x_words, fine_sums);
                        }
                    }
                } else if is_there {
                    store(x_words, to, as_words(held[p]));
                }
            }
        }
    }
    if A.RANK > 0 && seat.x > 0 {
        prefetch_narrow(seat.x, adapter);
        clear_spent(adapter);
    }
    let mut wide = regs(0u32, if A.RANK > 0 { (32 / LANES * ROWS + 3) / 4 * (A.RANK / 16) } else { 1 });
    if A.RANK > 0 && seat.x > 0 && base < end {
        fetch_wide(output_at(base, gap), rows, seat.x, adapter, &mut wide);
    }
    barrier();
    if A.RANK > 0 {
        send_narrow(seat.x, adapter, x_words, x_scales);
    }
    let mut has_narrow = false;

    // The norm's factor, which the results take, is computed when the first of them is there: until then a warp has better things to do.
    let mut after = 1.0f32;
    let mut is_first = NORMED;
    // Of all rows, for each stretch that a lane has.
    let mut sums = regs(0.0f32, 4 * ROWS);
    while base < end {
        let row_ends = is_whole() || at - start + step_units() * DEPTH >= lane_units();
        let next_at = if row_ends { start } else { at + step_units() * DEPTH };
        let next_base = if row_ends { base + all_warps * warp_outputs } else { base };
        let here = output_at(base, gap) + own;
        let has_next = next_base < end;
        let there = if RAGGED && !has_next { here } else { output_at(next_base, gap) + own };
        #[unroll]
        for d in 0..DEPTH {
            // Without an end to mind, all places are one register and a constant.
            let unit = if is_full(d) { at + d * step_units() } else { (at + d * step_units()).min(units - 1) };
            let group = if is_full(d) { at * UNIT / 32 + d * (step_units() * UNIT / 32) } else { unit * UNIT / 32 };
            let is_there = is_full(d) || at + d * step_units() < stop;
            let first_sum = stretch_of(d) * ROWS;
            let mut x = activations_at(unit, group, units, x_words, x_scales);
            let is_fine = FINE && x.scale < 0.0;
            x.scale = x.scale.abs();
            if SHARES_ROWS {
                // A lane has the sums of every other row.
                let own_row = lane_id() % 2;
                #[unroll]
                for p in 0..ROWS / 2 {
                    let of_row = unit_of(here, p * 2 + own_row, at + d * step_units(), rows);
                    let first = ahead[d * ROWS + p * 2];
                    let with = two_dots(first, ahead[d * ROWS + p * 2 + 1], of_row, x, sums[first_sum + p]);
                    if is_there {
                        sums[first_sum + p] = with;
                    }
                }
            } else {
                #[unroll]
                for r in 0..ROWS {
                    let held = ahead[d * ROWS + r];
                    let of_row = unit_of(here, r, at + d * step_units(), rows);
                    let mut with = dot(held, of_row, x, sums[first_sum + r]);
                    if is_fine {
                        let second = second_part_at(unit, units);
                        with = dot_fine(dot, held, of_row, unit * 4, second, x.scale, fine_sums[group], with, x_words);
                    }
                    if is_there {
                        sums[first_sum + r] = with;
                    }
                }
            }
            // One branch for all rows, so that these share an address.
            if RAGGED || has_next {
                #[unroll]
                for r in 0..ROWS {
                    ahead[d * ROWS + r] =
                        fetch_of_row(side, codes, there, r, next_at, d, stop, rows, has_next, ahead[d * ROWS + r]);
                }
            }
        }
        if row_ends && is_first {
            after = inverse_rms_of_chunks(of_residual, K);
            is_first = false;
        }
        if row_ends {
            let mut value = 0.0f32;
            let mut up = 0.0f32;
            // The output that a lane has, or `outputs`.
            let mut output = lane;
            if STRETCHED {
                value = rows_sum(&mut sums);
                if PAIRED {
                    up = shfl_xor(value, lane_of_row(1));
                }
                let row = row_of_lane(lane);
                output = if lane != lane_of_row(row) || PAIRED && row % 2 == 1 {
                    outputs
                } else if PAIRED {
                    row / 2
                } else {
                    row
                };
            } else {
                // Lane i keeps output i.
                #[unroll]
                for r in 0..ROWS {
                    let sum = lanes_sum(sums[r], LANES, false, false);
                    let of_lane = if PAIRED { r / 2 } else { r };
                    if lane == of_lane && PAIRED && r % 2 == 1 {
                        up = sum;
                    } else if lane == of_lane {
                        value = sum;
                    }
                    sums[r] = 0.0;
                }
            }
            let mut changes = f32x2(0.0, 0.0);
            if A.RANK > 0 && seat.x > 0 {
                if !has_narrow && warp_id() == 0 {
                    receive_narrow(after * f32::from_bits(seat.y), adapter, narrow);
                    warp_barrier();
                    if lane_id() == 0 {
                        mbarrier_arrive(narrowed, 0u32);
                    }
                }
                if !has_narrow {
                    mbarrier_wait(narrowed, 0u32, 0);
                    has_narrow = true;
                }
                changes = changes_of(here - own, own + output.min(outputs - 1), rows, &wide, narrow);
                if has_next {
                    fetch_wide(there - own, rows, seat.x, adapter, &mut wide);
                }
            }
            let place = base + own + output;
            if output < outputs && place < end {
                let row = here + output;
                let mut first = value * after;
                let mut second = up * after;
                if A.RANK > 0 && seat.x > 0 {
                    first = first + changes.x;
                    second = second + changes.y;
                }
                let result = epilogue(join(first, second), row);
                if SPREADS && place >= SHARE {
                    out[row - loose_first] = result;
                } else if SHARE > 0 {
                    results[place] = result;
                } else {
                    out[row] = result;
                }
            }
        }
        at = if is_whole() { start } else { next_at };
        base = next_base;
    }
    if SHARE > 0 {
        barrier();
        // A warp takes a group: eight lanes four values each.
        for group in (warp_id()..own_groups).by(WARPS) {
            let place = group * 32 + lane_id() % 8 * 4;
            keep(load::<F32x4>(results, place), output_at(place, gap));
        }
    }
}
