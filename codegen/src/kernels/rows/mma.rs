//! The product of several rows on int8 tensor cores.
//!
//! A dot of a unit is a sum of integers, so tensor cores make it exactly, whatever their order; the f32 sums keep the order of one row. A unit's number
//! modulo LANES is its class. A class has its own f32 sum for every output and row, as a lane of the one-row product has: one
//! fused multiply-add a unit, in the order of units. The classes are shared out among the warps of a block, four to a warp, so a
//! warp adds up its classes alone; at the end of a tile all sums meet in shared memory, and are added as the lanes' tree adds them.
//!
//! Weights are the right operand: eight rows of the matrix to a product, COLUMNS to a tile. Activations are the left one, 16 rows to a
//! product. A block is persistent over tiles; the next tile's weights are on their way while this one ends. Activations that fit shared
//! memory stay there (RESIDENT), else they come with every stage of weights.

use gemma4c_dsl::prelude::*;

use super::stages::{
    first_units, side_at, side_slot, side_words, stage_activations, stage_weights, unit_of_step, weight_row,
};
use super::sums::{leave_sums, tree_sum};
use crate::kernels::matvec::formats::{finish, finish_with_minimum};

/// The left operand of a unit: 16 rows of its activations, of which TILE = 8 has the upper eight as zeros. Two units of 16 values are
/// as one of 32: the words of the second are z and w.
#[device]
pub fn left_operand<const UNIT: u32, const LANES: u32, const TILE: u32, const RESIDENT: bool>(
    step: u32,
    stage: u32,
    j: u32,
    m: u32,
    words: Shared<u32>,
) -> U32x4 {
    let matrix = lane_id() / 8;
    let half = if TILE == 8 { matrix % 2 } else { matrix / 2 };
    let row = if TILE == 8 { lane_id() % 8 } else { m * 16 + matrix % 2 * 8 + lane_id() % 8 };
    let of = if UNIT == 32 { j } else { j + half };
    let part = if UNIT == 32 { half } else { 0 };
    let place = if RESIDENT { unit_of_step(step, of) } else { stage * 4 + of };
    let at = ((place * (UNIT / 16) + part) * TILE + row) * 4;
    if TILE == 8 {
        let two = ldmatrix_x2(words, at);
        return u32x4(two.x, 0, two.y, 0);
    }
    ldmatrix_x4(words, at)
}

/// The dots of a unit's products, or of its first half where the HALVES have dots of their own. Of units of 16 values `i` says which.
#[device]
pub fn first_dot<const UNIT: u32, const HALVES: bool>(left: U32x4, right: U32x2, i: u32, from: I32x4) -> I32x4 {
    if UNIT == 16 {
        let words = if i == 0 { u32x2(left.x, left.y) } else { u32x2(left.z, left.w) };
        return mma_m16n8k16_s8(words, right.x, from);
    }
    if HALVES {
        return mma_m16n8k16_s8(u32x2(left.x, left.y), right.x, from);
    }
    mma_m16n8k32_s8(left, right, from)
}

/// The dots of the second half.
#[device]
pub fn second_dot<const HALVES: bool>(left: U32x4, right: U32x2) -> I32x4 {
    if HALVES {
        return mma_m16n8k16_s8(u32x2(left.z, left.w), right.y, I32x4::ZERO);
    }
    I32x4::ZERO
}

/// `total` plus a unit's product, which is rounded by itself where it is SEPARATE.
#[device(slots(whole(first: i32, second: i32, factors: U32x4) -> f32))]
pub fn added<const MINIMUM: bool, const SEPARATE: bool>(
    first: i32,
    second: i32,
    factors: U32x4,
    sum: i32,
    scale: f32,
    total: f32,
) -> f32 {
    let dot = whole(first, second, factors);
    let before = if SEPARATE { 0.0 } else { total };
    let mut after = 0.0f32;
    if MINIMUM {
        after = finish_with_minimum(dot, factors, sum, scale, before);
    }
    if !MINIMUM {
        after = finish(dot, factors, scale, before);
    }
    if SEPARATE { total + after } else { after }
}

/// What multiplies the dots of two neighbouring columns of a unit: the factors of the first (even) and the second (odd).
#[device(slots(factors(side: U32x4, number: u32) -> U32x4))]
pub fn factors_of<
    const K: u32,
    const UNIT: u32,
    const COLUMNS: u32,
    const PAIRED: bool,
    const SUPERS: u32,
    const HIGH: u32,
    const PERIOD: u32,
>(
    base: u32,
    column: u32,
    unit: u32,
    outputs: u32,
    at: u32,
    sides: Shared<u32>,
    even: &mut U32x4,
    odd: &mut U32x4,
) {
    // Where all rows start alike, the unit says which part of a word is its own.
    let units = K / UNIT;
    let mut number = unit;
    let mut next = unit;
    if units % PERIOD != 0 {
        number = weight_row(base, column, outputs) * units + unit;
        next = weight_row(base, column + 1, outputs) * units + unit;
    }
    if side_words() == 1 {
        let two = load::<U32x2>(sides, at + column);
        *even = factors(u32x4(two.x, 0, 0, 0), number);
        *odd = factors(u32x4(two.y, 0, 0, 0), next);
    } else {
        *even = factors(side_at(at + column, sides), number);
        *odd = factors(side_at(at + column + 1, sides), next);
    }
}

/// Adds a stage's products to the sums of its four classes. A lane's sums of a tile of eight columns are rows g and g + 8, columns 2t and
/// 2t + 1. The last step of a row may have fewer units than the others: it is CHECKED.
#[device(slots(
    bytes(word: u32, side: U32x4, index: u32) -> U32x2,
    start(sum: i32) -> i32,
    whole(first: i32, second: i32, factors: U32x4) -> f32,
    factors(side: U32x4, number: u32) -> U32x4
))]
pub fn multiply<
    const K: u32,
    const UNIT: u32,
    const SUMS: bool,
    const SHARED_SIDES: bool,
    const LANES: u32,
    const TILE: u32,
    const COLUMNS: u32,
    const RESIDENT: bool,
>(
    checked: bool,
    totals: &mut Regs<f32>,
    base: u32,
    step: u32,
    stage: u32,
    outputs: u32,
    ring: Shared<U32x4>,
    sides: Shared<u32>,
    x_words: Shared<u32>,
    x_scales: Shared<f32>,
    x_sums: Shared<i32>,
) {
    let units = K / UNIT;
    let slots = if SHARED_SIDES { LANES / 2 } else { LANES };
    let each = TILE.min(16) / 4;
    let tiles = COLUMNS / 8;
    let g = lane_id() / 4;
    let t = lane_id() % 4;
    let mut raw = regs(U32x4::ZERO, COLUMNS / 8);
    #[unroll]
    for n in 0..COLUMNS / 8 {
        let row = stage * COLUMNS + n * 8 + lane_id() % 8;
        raw[n] = ldmatrix_x4(ring, row * (LANES + 1) + unit_of_step(0, lane_id() / 8));
    }
    #[unroll]
    for pair in 0u32..2 {
        // The right operands of two units, and what multiplies them: columns 2t and 2t + 1.
        let mut right = regs(U32x2::ZERO, COLUMNS / 4);
        let mut even = regs(U32x4::ZERO, COLUMNS / 4);
        let mut odd = regs(U32x4::ZERO, COLUMNS / 4);
        #[unroll]
        for i in 0u32..2 {
            let j = pair * 2 + i;
            let at = (stage * slots + side_slot(unit_of_step(0, j))) * COLUMNS;
            let unit = unit_of_step(step, j);
            #[unroll]
            for n in 0..COLUMNS / 8 {
                let low = if i == 0 { raw[n].x } else { raw[n].y };
                let high = if i == 0 { raw[n].z } else { raw[n].w };
                let word = if pair == 0 { low } else { high };
                right[i * tiles + n] = bytes(word, side_at(at + n * 8 + g, sides), t);
                if UNIT == 16 && i == 1 {
                    // The two units of a group have one scale.
                    even[tiles + n] = even[n];
                    odd[tiles + n] = odd[n];
                } else {
                    let mut first = U32x4::ZERO;
                    let mut second = U32x4::ZERO;
                    factors_of(factors, base, n * 8 + 2 * t, unit, outputs, at, sides, &mut first, &mut second);
                    even[i * tiles + n] = first;
                    odd[i * tiles + n] = second;
                }
            }
        }
        #[unroll]
        for m in 0..TILE.div_ceil(16) {
            // Many sums leave few registers: what belongs to the next rows must not be computed ahead.
            if COLUMNS * TILE >= 1024 {
                warp_barrier();
            }
            let mut left = U32x4::ZERO;
            let mut scale = 0.0f32;
            let mut upper_scale = 0.0f32;
            let mut sum = 0i32;
            let mut upper_sum = 0i32;
            #[unroll]
            for i in 0u32..2 {
                let j = pair * 2 + i;
                let unit = unit_of_step(step, j);
                if !checked || unit < units {
                    if UNIT == 32 || i == 0 {
                        left = left_operand(step, stage, j, m, x_words);
                        let own = stage * (UNIT / 8) + if UNIT == 32 { j } else { pair };
                        let at = (if RESIDENT { unit * UNIT / 32 } else { own }) * TILE + m * 16 + g;
                        scale = x_scales[at];
                        if SUMS {
                            sum = x_sums[at];
                        }
                        if TILE != 8 {
                            upper_scale = x_scales[at + 8];
                        }
                        if SUMS && TILE != 8 {
                            upper_sum = x_sums[at + 8];
                        }
                    }
                    let from = i32x4(start(sum), start(sum), start(upper_sum), start(upper_sum));
                    #[unroll]
                    for n in 0..COLUMNS / 8 {
                        let of = right[i * tiles + n];
                        let first = first_dot(left, of, i, from);
                        let second = second_dot(left, of);
                        let low = even[i * tiles + n];
                        let high = odd[i * tiles + n];
                        let to = ((j * TILE.div_ceil(16) + m) * tiles + n) * each;
                        totals[to] = added(whole, first.x, second.x, low, sum, scale, totals[to]);
                        totals[to + 1] = added(whole, first.y, second.y, high, sum, scale, totals[to + 1]);
                        if TILE != 8 {
                            totals[to + 2] =
                                added(whole, first.z, second.z, low, upper_sum, upper_scale, totals[to + 2]);
                            totals[to + 3] =
                                added(whole, first.w, second.w, high, upper_sum, upper_scale, totals[to + 3]);
                        }
                    }
                }
            }
        }
    }
}

/// `out[r] = W · x[r]` for TILE rows at a time, with int8 activations. As [`rows_matvec`](super::cores::rows_matvec) in all else.
#[kernel(block = LANES * 8, min_blocks = 1, dependent, dynamic_shared, slots(
    bytes(word: u32, side: U32x4, index: u32) -> U32x2,
    start(sum: i32) -> i32,
    whole(first: i32, second: i32, factors: U32x4) -> f32,
    factors(side: U32x4, number: u32) -> U32x4,
    join(value: f32, up: f32) -> f32,
    epilogue(value: f32, row: u32) -> f32
))]
pub fn rows_mma<
    const K: u32,
    const UNIT: u32,
    const HALVES: bool,
    const MINIMUM: bool,
    const SUMS: bool,
    const SHARED_SIDES: bool,
    const SCALES: u32,
    const SUPERS: u32,
    const HIGH: u32,
    const PERIOD: u32,
    const LANES: u32,
    const TILE: u32,
    const COLUMNS: u32,
    const STAGES: u32,
    const RESIDENT: bool,
    const PAIRED: bool,
    const FACTORED: bool,
    const SEPARATE: bool,
>(
    codes: Weights<U32x4>,
    high: Weights<u32>,
    scales: Weights<u32>,
    supers: Weights<u32>,
    x: Input<u32>,
    xscale: Input<f32>,
    xsum: Input<i32>,
    factor: Input<f32>,
    out: Output<f32>,
    outputs: u32,
    rows: u32,
    by_stride: u32,
) {
    require!(K % 32 == 0 && (UNIT == 16 || UNIT == 32));
    require!(LANES == 8 || LANES == 16 || LANES == 32);
    require!(TILE == 8 || TILE % 16 == 0);
    require!(COLUMNS % if PAIRED { 16 } else { 8 } == 0);
    // `cp_async_wait` counts to four.
    require!(STAGES >= 2 && STAGES <= 6);
    // Per stage: a step of every column, and what lies beside its units.
    let ring = shared::<U32x4>((LANES + 1) * STAGES * COLUMNS);
    let sides = shared::<u32>(
        LANES / if SHARED_SIDES { 2 } else { 1 } * STAGES * COLUMNS * (HIGH + if SUPERS > 0 { 2 } else { 1 }),
    );
    let x_words = shared::<u32>(if RESIDENT { K / 4 * TILE } else { LANES * STAGES * (UNIT / 4) * TILE });
    let x_scales = shared::<f32>(if RESIDENT { K / 32 * TILE } else { LANES / 4 * STAGES * (UNIT / 8) * TILE });
    let x_sums = shared::<i32>(if !SUMS {
        1
    } else if RESIDENT {
        K / 32 * TILE
    } else {
        LANES / 4 * STAGES * (UNIT / 8) * TILE
    });
    // Of 16 rows: half as many sums as classes for every output of the tile.
    let sums = shared::<f32>(LANES / 2 * TILE.min(16) * COLUMNS);
    let after = shared::<f32>(TILE);

    let units = K / UNIT;
    let steps = units.div_ceil(LANES);
    let tile_outputs = if PAIRED { COLUMNS / 2 } else { COLUMNS };
    let tiles = outputs.div_ceil(tile_outputs);
    let own_tiles = if block_idx() < tiles { (tiles - block_idx()).div_ceil(grid_dim()) } else { 0 };
    let all_steps = own_tiles * steps;
    let first = block_idx_y() * TILE;

    // What is this warp's of the activations.
    let scaled = UNIT / 8;
    let own_words = x_words.offset(if RESIDENT { 0 } else { warp_id() * (STAGES * UNIT * TILE) });
    let own_scales = x_scales.offset(if RESIDENT { 0 } else { warp_id() * (STAGES * scaled * TILE) });
    let own_sums = x_sums.offset(if RESIDENT || !SUMS { 0 } else { warp_id() * (STAGES * scaled * TILE) });

    // The first weights are on their way before the activations are there.
    let mut next_base = block_idx() * tile_outputs;
    let mut next_step = 0u32;
    let mut starts = regs(0u32, COLUMNS / 8);
    first_units(next_base, outputs, &mut starts);
    for stage in 0..STAGES - 1 {
        if stage < all_steps {
            stage_weights(&starts, next_step, stage, codes, high, scales, supers, ring, sides);
            next_step = next_step + 1;
            if next_step == steps {
                next_step = 0;
                next_base = next_base + grid_dim() * tile_outputs;
                first_units(next_base, outputs, &mut starts);
            }
        }
    }
    grid_launch_dependents();
    grid_dependency_wait();
    for stage in 0..STAGES - 1 {
        if stage < all_steps && (!RESIDENT || stage < steps) {
            stage_activations(stage % steps, stage, first, rows, x, xscale, xsum, own_words, own_scales, own_sums);
        }
        cp_async_commit();
    }
    if thread_idx() < TILE {
        after[thread_idx()] = if FACTORED { factor[(first + thread_idx()).min(rows - 1)] } else { 1.0 };
    }

    let mut totals = regs(0.0f32, COLUMNS * TILE / 8);
    let mut base = block_idx() * tile_outputs;
    let mut step = 0u32;
    let mut stage = 0u32;
    for at in 0..all_steps {
        // This stage is there for all warps, and none still reads the one before.
        cp_async_wait(STAGES - 2);
        barrier();
        if at + STAGES - 1 < all_steps {
            let free = if stage == 0 { STAGES - 1 } else { stage - 1 };
            stage_weights(&starts, next_step, free, codes, high, scales, supers, ring, sides);
            if !RESIDENT || at + STAGES - 1 < steps {
                stage_activations(next_step, free, first, rows, x, xscale, xsum, own_words, own_scales, own_sums);
            }
            next_step = next_step + 1;
            if next_step == steps {
                next_step = 0;
                next_base = next_base + grid_dim() * tile_outputs;
                first_units(next_base, outputs, &mut starts);
            }
        }
        cp_async_commit();
        if units % LANES == 0 || step + 1 < steps {
            multiply(
                bytes,
                start,
                whole,
                factors,
                false,
                &mut totals,
                base,
                step,
                stage,
                outputs,
                ring,
                sides,
                own_words,
                own_scales,
                own_sums,
            );
        } else {
            multiply(
                bytes,
                start,
                whole,
                factors,
                true,
                &mut totals,
                base,
                step,
                stage,
                outputs,
                ring,
                sides,
                own_words,
                own_scales,
                own_sums,
            );
        }
        stage = if stage == STAGES - 1 { 0 } else { stage + 1 };
        step = step + 1;
        if step == steps {
            #[unroll]
            for m in 0..TILE.div_ceil(16) {
                // Nobody still reads the last sums.
                barrier();
                leave_sums(m, &mut totals, sums);
                barrier();
                for place in (thread_idx()..TILE.min(16) * tile_outputs).by(LANES * 8) {
                    let row = place / tile_outputs;
                    let column = place % tile_outputs;
                    let value = tree_sum(row, column, sums);
                    let up = if PAIRED { tree_sum(row, column + tile_outputs, sums) } else { 0.0 };
                    let output = base + column;
                    let of_row = first + m * 16 + row;
                    if output < outputs && of_row < rows {
                        let by = after[m * 16 + row];
                        out[of_row * outputs + output] =
                            epilogue(join(value * by, up * by), of_row * by_stride + output);
                    }
                }
            }
            step = 0;
            base = base + grid_dim() * tile_outputs;
        }
    }
    cp_async_wait(0);
}
