//! The product by warps, each for itself, with `mma.m16n8k16`: of few rows, of sorted pairs, and on GPUs without
//! `wgmma`.
//!
//! A block copies the activations of its slices once, or in two parts that take turns where they are too many, so that
//! its warps wait for each other only when a part begins, not at every step.

use gemma4c_dsl::prelude::*;

use super::decode::{decode_and_exchange, decode_block, words_of};
use super::sums::{GemmOut, store_sums};
use super::tile::{
    aim_own_rows, copied_place, copy_weights, first_step, load_sides, own_rows, read_place, row_words, staged,
    warp_ring,
};
use super::views::{GemmRing, GemmRows, GemmTile, GemmWeights};
use crate::kernels::attention::tensor::tensor_product;

/// Values from a row of a part of the activations in shared memory to the next: as many more than it has that what the
/// lanes of a warp read together lies in different banks.
#[device]
pub fn row_stride(steps: u32, near: bool) -> u32 {
    steps * 128 + if near { 16 } else { 8 }
}

/// Fills the rows of a slice's parts that the batch does not have with zeros, by the warps of the slice: nobody copies
/// them.
#[device]
pub fn clear_absent_rows<const ROWS: u32, const ACROSS: u32, const X_PARTS: u32, H: Float>(
    parts: Shared<H>,
    part_values: u32,
    stride: u32,
    present: u32,
) {
    for at in ((present * stride + thread_idx() % (ACROSS * 32) * 8)..ROWS * stride).by(ACROSS * 256) {
        #[unroll]
        for part in 0..X_PARTS {
            store(parts, part * part_values + at, U32x4::ZERO);
        }
    }
}

/// Issues the copies of a part of the activations, by the warps of its slice: of `steps` steps from `step` on, zeros
/// past the end of K.
#[device]
pub fn copy_part_of_activations<
    const WHOLE: bool,
    const ACROSS: u32,
    const PAIRS: u32,
    const X_STAGES: u32,
    const NEAR: bool,
    H: Float,
>(
    part: Shared<H>,
    rows: GemmRows<H>,
    first_row: u32,
    end: u32,
    step: u32,
    steps: u32,
    k: u32,
) {
    let pieces = X_STAGES * 16;
    let last = k / 8 - step * 16;
    let all = (end - first_row) * pieces;
    // Every block begins elsewhere: if all asked for the same lines at once, one slice of L2 would serve them.
    let start = block_idx_y() * 64 % all;
    for number in (thread_idx() % (ACROSS * 32)..all).by(ACROSS * 32) {
        let at = if number + start < all { number + start } else { number + start - all };
        let row = at / pieces;
        let piece = at % pieces;
        if piece < steps * 16 {
            let to = row * row_stride(X_STAGES, NEAR) + piece * 8;
            if WHOLE || piece < last {
                let mut from = first_row + row;
                if PAIRS > 0 {
                    from = rows.order[from] / PAIRS.max(1);
                }
                cp_async16(part, to, rows.x, from * k + (step * 16 + piece) * 8);
            } else {
                store(part, to, U32x4::ZERO);
            }
        }
    }
}

/// Where a lane reads its part of the first rows of activations from.
#[device]
pub fn read_x_place<const X_STAGES: u32, const NEAR: bool, H: Float>(x: Shared<H>) -> Shared<H> {
    let near = lane_id() / 4 * row_stride(X_STAGES, NEAR) + lane_id() % 4 * 4;
    let far = lane_id() % 8 * row_stride(X_STAGES, NEAR) + lane_id() / 8 * 8;
    x.offset(if NEAR { near } else { far })
}

/// Multiplies a step, whose activations are behind `x`, a [`read_x_place`].
#[device(slots(decode(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4))]
pub fn multiply_step<
    const UNIT: u32,
    const BF: bool,
    const RAW: bool,
    const NEAR: bool,
    const ROWS: u32,
    const X_STAGES: u32,
    H: Float,
>(
    ring: GemmRing,
    x: Shared<H>,
    sides: &Regs<U32x4>,
    own: U32x2,
    step: u32,
    sums: &mut Regs<F32x4>,
    k: u32,
) {
    let mut left = regs(0u32, 32);
    if !RAW {
        decode_and_exchange(decode, ring, sides, own, &mut left, step, k);
    }
    #[unroll]
    for block in 0u32..4 {
        if RAW {
            decode_block(decode, ring, &mut left, block);
        }
        let at = block * 8;
        let first = u32x4(left[at], left[at + 1], left[at + 2], left[at + 3]);
        let second = u32x4(left[at + 4], left[at + 5], left[at + 6], left[at + 7]);
        #[unroll]
        for n in 0..ROWS / 8 {
            let at = n * 8 * row_stride(X_STAGES, NEAR) + block * 32;
            let right =
                if NEAR { words_of(load::<U32x2>(x, at), load::<U32x2>(x, at + 16)) } else { ldmatrix_x4(x, at) };
            sums[n] = tensor_product(first, u32x2(right.x, right.y), sums[n]);
            sums[n] = tensor_product(second, u32x2(right.z, right.w), sums[n]);
        }
    }
}

/// `out = x · Wᵀ`, of activations in 16 bits and repacked weights; with GEGLU the matrix holds gates, then what they
/// gate. With PAIRS rows are pairs of a row and an expert, of which so many neighbouring ones share a row of x; tile m is of
/// group m, and results are stored as the pairs were before they were sorted. Rows of what an epilogue takes are
/// `by_stride` apart. `k` is a multiple of 32.
#[kernel(block = T.ACROSS * T.HELD * 32, dependent, dynamic_shared, cluster = T.SLICES / T.HELD, slots(
    side(unit: u32, more: u32) -> U32x4,
    decode(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4,
    change(four: F32x4, outputs: U32x2, rows: U32x2) -> F32x4,
    epilogue(value: f32, at: u32) -> f32
))]
pub fn gemm<const T: GemmTile, const GEGLU: bool, H: Float, O: Float>(
    weights: GemmWeights,
    rows: GemmRows<H>,
    out: Output<O>,
    outputs: u32,
    by_stride: u32,
    k: u32,
) {
    require!(T.ROWS % 8 == 0 && T.SLICES % T.HELD == 0 && T.STAGES >= 2 && T.NEAR == T.RAW);
    require!(T.UNIT == 4 || T.UNIT == 8 || T.UNIT == 16 || T.UNIT == 32);
    require!(T.RAW || T.UNIT >= 16);
    // A part is copied when its turn begins, and read when the next one has begun: its copies have ended by then.
    require!(T.X_PARTS == 1 || T.X_PARTS == 2 && T.X_STAGES + 1 >= T.STAGES);
    // So that sums fit where activations were.
    require!(T.SLICES == 1 || T.ACROSS * 32 <= T.X_PARTS * (T.X_STAGES * 128 + 8));
    // First activations, then the sums of slices.
    let x = shared::<H>(T.X_PARTS * T.HELD * T.ROWS * row_stride(T.X_STAGES, T.NEAR));
    let codes = shared::<u32>(T.STAGES * T.HELD * T.ACROSS * 16 * row_words(T.UNIT));
    let scales = shared::<u32>(if T.SCALED { T.STAGES * T.HELD * T.ACROSS * 32 } else { 1 });

    let cluster = T.SLICES / T.HELD;
    let rank = if cluster > 1 { cluster_rank() } else { 0 };
    let own = warp_id() / T.ACROSS;
    let slice = rank * T.HELD + own;
    let first = first_step(slice, T.SLICES, k);
    let steps = first_step(slice + 1, T.SLICES, k) - first;
    // No slice has more.
    let turns = k.div_ceil(128).div_ceil(T.SLICES);
    let of_warp = if GEGLU { 8u32 } else { 16u32 };
    let first_output = block_idx_y() / cluster * T.ACROSS * of_warp;
    let warp_output = first_output + warp_id() % T.ACROSS * of_warp;

    // A slice's parts of the activations are one behind the other; a stage of codes is of the whole block.
    let x_part = T.ROWS * row_stride(T.X_STAGES, T.NEAR);
    let own_x = x.offset(own * T.X_PARTS * x_part);
    let code_stage = T.HELD * T.ACROSS * 16 * row_words(T.UNIT);
    let scale_stage = if T.SCALED { T.HELD * T.ACROSS * 32 } else { 0 };
    let ring = warp_ring(codes, scales);
    let copied = copied_place(ring);
    let read = read_place(ring);

    grid_launch_dependents();
    let mut aim = regs(0u32, 6);
    let mut own_weights = own_rows(warp_output, 0, outputs);
    if T.PAIRS == 0 {
        aim_own_rows(&mut aim, own_weights, first, k);
        #[unroll]
        for stage in 0u32..T.STAGES - 1 {
            copy_weights(weights, staged(copied, stage * code_stage, stage * scale_stage), &mut aim, stage < steps);
            cp_async_commit();
        }
    }
    grid_dependency_wait();

    let mut end = rows.count;
    let mut first_row = block_idx() * T.ROWS;
    if T.PAIRS > 0 {
        end = 0;
        if block_idx() < rows.groups[0u32].x {
            let group = rows.groups[block_idx() + 1];
            first_row = group.x;
            end = group.y;
            own_weights = own_rows(warp_output, group.z * if GEGLU { 2 * outputs } else { outputs }, outputs);
            aim_own_rows(&mut aim, own_weights, first, k);
        }
    }
    // The whole cluster leaves: there are no such rows.
    if first_row >= end {
        return;
    }

    let present = end.min(first_row + T.ROWS);
    copy_part_of_activations(own_x, rows, first_row, present, first, steps.min(T.X_STAGES), k);
    if T.PAIRS > 0 {
        #[unroll]
        for stage in 0u32..T.STAGES - 1 {
            copy_weights(weights, staged(copied, stage * code_stage, stage * scale_stage), &mut aim, stage < steps);
            cp_async_commit();
        }
    } else {
        cp_async_commit();
    }
    clear_absent_rows(own_x, x_part, row_stride(T.X_STAGES, T.NEAR), present - first_row);
    let mut sides = regs(U32x4::ZERO, if T.RAW { 1 } else { 2 * (32 / T.UNIT) });
    if !T.RAW {
        load_sides(side, &mut sides, own_weights, first, k);
    }
    let mut sums = regs(F32x4::ZERO, T.ROWS / 8);
    let read_x = read_x_place(own_x);
    // Where the part of the activations begins whose turn it is, and the step of it.
    let mut part = 0u32;
    let mut place = 0u32;
    // Pairs' activations came with their first weights; those of rows come after weights that were known before.
    if T.PAIRS == 0 {
        cp_async_wait(0);
    }
    // By whole turns of the ring, so that its places are constants.
    for round in (0..turns).by(T.STAGES) {
        #[unroll]
        for stage in 0u32..T.STAGES {
            let turn = round + stage;
            if turn < turns {
                cp_async_wait(T.STAGES - 2);
                // Codes are read by the warp that copied them, activations by all of the block; of two parts the other
                // one has been read by then.
                if place == 0 {
                    barrier();
                } else {
                    warp_barrier();
                }
                let ahead = turn + T.STAGES - 1;
                let slot = (stage + T.STAGES - 1) % T.STAGES;
                copy_weights(weights, staged(copied, slot * code_stage, slot * scale_stage), &mut aim, ahead < steps);
                if T.X_PARTS > 1 && place == 0 && turn + T.X_STAGES < steps {
                    let next = turn + T.X_STAGES;
                    let to = own_x.offset(x_part - part);
                    let count = (steps - next).min(T.X_STAGES);
                    copy_part_of_activations(to, rows, first_row, present, first + next, count, k);
                }
                cp_async_commit();
                if turn < steps {
                    let now = staged(read, stage * code_stage, stage * scale_stage);
                    let x_now = read_x.offset(part + place * 128);
                    multiply_step(decode, now, x_now, &sides, own_weights, first + turn, &mut sums, k);
                    if !T.RAW && turn + 1 < steps {
                        load_sides(side, &mut sides, own_weights, first + turn + 1, k);
                    }
                }
                place += 1;
                if T.X_PARTS > 1 && place == T.X_STAGES {
                    place = 0;
                    part = x_part - part;
                }
            }
        }
    }

    let to = GemmOut::<O> { out, order: rows.order, first_row, end, outputs, by_stride };
    store_sums(change, epilogue, x, &sums, to, first_output);
}
