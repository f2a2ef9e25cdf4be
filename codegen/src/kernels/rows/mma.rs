//! The dense half of a mixture for several rows, on int8 tensor cores: its sums are those of lanes, not of stretches, so [`tiles`](super::tiles) cannot have it.
//!
//! A unit is 32 values. Its dot is a sum of integers, so tensor cores make it exactly, whatever their order; the f32 sums keep the order of one row. A unit's number
//! modulo CLASSES is its class. A class has its own f32 sum for every output and row, as a lane of the one-row product has (of types with two pieces to a unit, a
//! pair of lanes): one fused multiply-add a unit, in the order of units. The classes are shared out among the warps of a block, so a
//! warp adds up its classes alone; at the end of a tile all sums meet in shared memory, and are added as the lanes' tree adds them.
//!
//! Weights are the right operand: eight rows of the matrix to a product, COLUMNS to a tile. Activations are the left one, 16 rows to a
//! product. A block is persistent over tiles; the next tile's weights are on their way while this one ends. Activations that fit shared
//! memory stay there (RESIDENT), else they come with every stage of weights.

use gemma4c_dsl::prelude::*;

use super::stages::{own_unit, place_of, side_at, side_words, sides_of, stage_activations, stage_weights, weight_row};
use super::sums::{leave_sums, tree_sum};
use crate::kernels::matvec::formats::{finish, finish_with_minimum};

/// The left operand of a unit: 16 rows of its activations, of which TILE = 8 has the upper eight as zeros.
#[device]
pub fn left_operand<const TILE: u32>(step: u32, stage: u32, unit: u32, m: u32, words: Shared<u32>) -> U32x4 {
    let matrix = lane_id() / 8;
    let half = if TILE == 8 { matrix % 2 } else { matrix / 2 };
    let eight = if TILE == 8 { 0 } else { m * 2 + matrix % 2 };
    let at = ((place_of(step, stage, unit, eight) * 2 + half) * 8 + lane_id() % 8) * 4;
    if TILE == 8 {
        let two = ldmatrix_x2(words, at);
        return u32x4(two.x, 0, two.y, 0);
    }
    ldmatrix_x4(words, at)
}

/// The dots of a unit, or of its first half where the HALVES have dots of their own.
#[device]
pub fn first_dot<const HALVES: bool>(left: U32x4, right: U32x2, from: I32x4) -> I32x4 {
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

/// What multiplies the dots of two neighbouring columns of a piece: the factors of the first (even) and the second (odd).
#[device(slots(factors(side: U32x4, number: u32) -> U32x4))]
pub fn factors_of<
    const PIECES: u32,
    const COLUMNS: u32,
    const PAIRED: bool,
    const SUPERS: u32,
    const HIGH: u32,
    const PERIOD: u32,
>(
    base: u32,
    column: u32,
    piece: u32,
    outputs: u32,
    at: u32,
    sides: Shared<u32>,
    even: &mut U32x4,
    odd: &mut U32x4,
) {
    // Where all rows start alike, the piece says which part of a word is its own.
    let mut number = piece;
    let mut next = piece;
    if PIECES % PERIOD != 0 {
        number = weight_row(base, column, outputs) * PIECES + piece;
        next = weight_row(base, column + 1, outputs) * PIECES + piece;
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

/// Adds a stage's products to the sums of the warp's classes. A lane's sums of a tile of eight columns are rows g and g + 8, columns 2t and
/// 2t + 1. The last step of a row may have fewer units than the others: it is CHECKED.
#[device(slots(
    bytes(word: u32, side: U32x4, index: u32) -> U32x2,
    start(sum: i32) -> i32,
    whole(first: i32, second: i32, factors: U32x4) -> f32,
    factors(side: U32x4, number: u32) -> U32x4
))]
pub fn multiply<
    const K: u32,
    const PARTS: u32,
    const SUMS: bool,
    const SHARING: u32,
    const LANES: u32,
    const CLASSES: u32,
    const WARPS: u32,
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
    let units = K / 32;
    let each = TILE.min(16) / 4;
    let tiles = COLUMNS / 8;
    let g = lane_id() / 4;
    let t = lane_id() % 4;
    // Two column tiles at a time: both pieces of a unit, or the pieces of two units.
    let mut raw = regs(U32x2::ZERO, COLUMNS / 8 * (LANES / WARPS / 2));
    #[unroll]
    for two in 0..LANES / WARPS / 2 {
        #[unroll]
        for n in 0..COLUMNS / 16 {
            let matrix = lane_id() / 8;
            let piece = if PARTS == 2 { own_unit(two) * 2 + matrix % 2 } else { own_unit(two * 2 + matrix % 2) };
            let row = stage * COLUMNS + (n * 2 + matrix / 2) * 8 + lane_id() % 8;
            let four = ldmatrix_x4(ring, row * (LANES + 1) + piece);
            raw[two * tiles + n * 2] = u32x2(four.x, four.y);
            raw[two * tiles + n * 2 + 1] = u32x2(four.z, four.w);
        }
    }
    #[unroll]
    for j in 0..CLASSES / WARPS {
        let unit = step * CLASSES + own_unit(j);
        let at = sides_of(stage, own_unit(j) * PARTS);
        // The right operands of the unit, and what multiplies them: columns 2t and 2t + 1.
        let mut right = regs(U32x2::ZERO, COLUMNS / 8);
        let mut even = regs(U32x4::ZERO, COLUMNS / 8);
        let mut odd = regs(U32x4::ZERO, COLUMNS / 8);
        #[unroll]
        for n in 0..COLUMNS / 8 {
            if PARTS == 2 {
                right[n] = raw[j * tiles + n];
            }
            if PARTS == 1 {
                let two = raw[j / 2 * tiles + n];
                right[n] = bytes(if j % 2 == 0 { two.x } else { two.y }, side_at(at + n * 8 + g, sides), t);
            }
            let mut first = U32x4::ZERO;
            let mut second = U32x4::ZERO;
            factors_of(factors, base, n * 8 + 2 * t, unit * PARTS, outputs, at, sides, &mut first, &mut second);
            even[n] = first;
            odd[n] = second;
        }
        #[unroll]
        for m in 0..TILE.div_ceil(16) {
            if !checked || unit < units {
                let left = left_operand(step, stage, own_unit(j), m, x_words);
                let lower = place_of(step, stage, own_unit(j), m * 2) * 8 + g;
                let upper = place_of(step, stage, own_unit(j), m * 2 + 1) * 8 + g;
                let scale = x_scales[lower];
                let upper_scale = if TILE != 8 { x_scales[upper] } else { 0.0 };
                let sum = if SUMS { x_sums[lower] } else { 0 };
                let upper_sum = if SUMS && TILE != 8 { x_sums[upper] } else { 0 };
                let from = i32x4(start(sum), start(sum), start(upper_sum), start(upper_sum));
                #[unroll]
                for n in 0..COLUMNS / 8 {
                    let first = first_dot(left, right[n], from);
                    let second = second_dot(left, right[n]);
                    let to = ((j * TILE.div_ceil(16) + m) * tiles + n) * each;
                    totals[to] = added(whole, first.x, second.x, even[n], sum, scale, totals[to]);
                    totals[to + 1] = added(whole, first.y, second.y, odd[n], sum, scale, totals[to + 1]);
                    if TILE != 8 {
                        totals[to + 2] =
                            added(whole, first.z, second.z, even[n], upper_sum, upper_scale, totals[to + 2]);
                        totals[to + 3] =
                            added(whole, first.w, second.w, odd[n], upper_sum, upper_scale, totals[to + 3]);
                    }
                }
            }
        }
    }
}

/// `out[r] = W · x[r]` for TILE rows at a time, with int8 activations. As [`rows_matvec`](super::cores::rows_matvec) in all else.
#[kernel(block = WARPS * 32, min_blocks = 1, dependent, dynamic_shared, slots(
    bytes(word: u32, side: U32x4, index: u32) -> U32x2,
    start(sum: i32) -> i32,
    whole(first: i32, second: i32, factors: U32x4) -> f32,
    factors(side: U32x4, number: u32) -> U32x4,
    join(value: f32, up: f32) -> f32,
    epilogue(value: f32, row: u32) -> f32
))]
pub fn rows_mma<
    const K: u32,
    const PARTS: u32,
    const PIECES: u32,
    const HALVES: bool,
    const MINIMUM: bool,
    const SUMS: bool,
    const SHARING: u32,
    const SCALES: u32,
    const SUPERS: u32,
    const HIGH: u32,
    const PERIOD: u32,
    const LANES: u32,
    const CLASSES: u32,
    const WARPS: u32,
    const COPIERS: u32,
    const TILE: u32,
    const COLUMNS: u32,
    const STAGES: u32,
    const RESIDENT: bool,
    const PANELS: bool,
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
    require!(K % 32 == 0 && (PARTS == 1 || PARTS == 2) && PIECES == K / 32 * PARTS && CLASSES * PARTS == LANES);
    require!(WARPS <= CLASSES && (LANES == 2 * WARPS || LANES == 4 * WARPS) && WARPS <= 16 && COPIERS == WARPS * 32);
    require!(LANES % SHARING == 0 && COLUMNS * LANES % COPIERS == 0 && COPIERS % LANES == 0);
    require!(TILE == 8 || TILE % 16 == 0);
    require!(COLUMNS % 16 == 0);
    // `cp_async_wait` counts to four.
    require!(STAGES >= 2 && STAGES <= 6);
    // Per stage: a step of every column, and what lies beside its pieces.
    let ring = shared::<U32x4>((LANES + 1) * STAGES * COLUMNS);
    let sides = shared::<u32>(LANES / SHARING * STAGES * (COLUMNS + 2) * (HIGH + if SUPERS > 0 { 2 } else { 1 }));
    let x_words = shared::<u32>(if RESIDENT { K / 4 * TILE } else { CLASSES * STAGES * 8 * TILE });
    let x_scales = shared::<f32>(if RESIDENT { K / 32 * TILE } else { CLASSES * STAGES * TILE });
    let x_sums = shared::<i32>(if !SUMS {
        1
    } else if RESIDENT {
        K / 32 * TILE
    } else {
        CLASSES * STAGES * TILE
    });
    // A sum of every warp for every output of the tile.
    let sums = shared::<f32>(WARPS * TILE * (COLUMNS + 8));
    let after = shared::<f32>(TILE);

    let units = K / 32;
    let steps = units.div_ceil(CLASSES);
    let tile_outputs = if PAIRED { COLUMNS / 2 } else { COLUMNS };
    let tiles = outputs.div_ceil(tile_outputs);
    let own_tiles = if block_idx() < tiles { (tiles - block_idx()).div_ceil(grid_dim()) } else { 0 };
    let all_steps = own_tiles * steps;
    let first = block_idx_y() * TILE;

    // The first weights are on their way before the activations are there.
    let mut next_base = block_idx() * tile_outputs;
    let mut next_step = 0u32;
    for stage in 0..STAGES - 1 {
        if stage < all_steps {
            stage_weights(thread_idx(), next_base, outputs, next_step, stage, codes, high, scales, supers, ring, sides);
            next_step = next_step + 1;
            if next_step == steps {
                next_step = 0;
                next_base = next_base + grid_dim() * tile_outputs;
            }
        }
    }
    grid_launch_dependents();
    grid_dependency_wait();
    for stage in 0..STAGES - 1 {
        if stage < all_steps && (!RESIDENT || stage < steps) {
            stage_activations(
                thread_idx(),
                stage % steps,
                stage,
                first,
                rows,
                x,
                xscale,
                xsum,
                x_words,
                x_scales,
                x_sums,
            );
        }
        cp_async_commit();
    }
    if thread_idx() < TILE {
        after[thread_idx()] = if FACTORED { factor[(first + thread_idx()).min(rows - 1)] } else { 1.0 };
    }

    let mut totals = regs(0.0f32, CLASSES / WARPS * COLUMNS * TILE / 32);
    let mut base = block_idx() * tile_outputs;
    let mut step = 0u32;
    let mut stage = 0u32;
    for at in 0..all_steps {
        // This stage is there for all warps, and none still reads the one before.
        cp_async_wait(STAGES - 2);
        barrier();
        if at + STAGES - 1 < all_steps {
            let free = if stage == 0 { STAGES - 1 } else { stage - 1 };
            stage_weights(thread_idx(), next_base, outputs, next_step, free, codes, high, scales, supers, ring, sides);
            if !RESIDENT || at + STAGES - 1 < steps {
                stage_activations(
                    thread_idx(),
                    next_step,
                    free,
                    first,
                    rows,
                    x,
                    xscale,
                    xsum,
                    x_words,
                    x_scales,
                    x_sums,
                );
            }
            next_step = next_step + 1;
            if next_step == steps {
                next_step = 0;
                next_base = next_base + grid_dim() * tile_outputs;
            }
        }
        cp_async_commit();
        if units % CLASSES == 0 || step + 1 < steps {
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
                x_words,
                x_scales,
                x_sums,
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
                x_words,
                x_scales,
                x_sums,
            );
        }
        stage = if stage == STAGES - 1 { 0 } else { stage + 1 };
        step = step + 1;
        if step == steps {
            // Nobody still reads the last sums.
            barrier();
            leave_sums(&mut totals, sums);
            barrier();
            for place in (thread_idx()..TILE * tile_outputs).by(WARPS * 32) {
                let row = place / tile_outputs;
                let column = place % tile_outputs;
                let value = tree_sum(row, column, sums);
                let up = if PAIRED { tree_sum(row, column + tile_outputs, sums) } else { 0.0 };
                let output = base + column;
                if output < outputs && first + row < rows {
                    let by = after[row];
                    let of_row = first + row;
                    out[of_row * outputs + output] = epilogue(join(value * by, up * by), of_row * by_stride + output);
                }
            }
            step = 0;
            base = base + grid_dim() * tile_outputs;
        }
    }
    cp_async_wait(0);
}
