//! The dense half of a mixture for several rows, on int8 tensor cores, where there are mbarriers: Hopper and later.
//!
//! It multiplies as [`rows_mma`](super::mma::rows_mma) does, with the same functions in the same order. The difference is who copies: COPIERS threads of their own keep
//! STAGES steps on their way and wait for nothing but a free stage, and the warps that multiply wait for nothing but a full one. No barrier of the
//! block holds all of them up at every step.

use gemma4c_dsl::prelude::*;

use super::mma::multiply;
use super::stages::{stage_activations, stage_weights};
use super::sums::{leave_sums, tree_sum};

/// `out[r] = W · x[r]` for TILE rows at a time, with int8 activations. As [`rows_matvec`](super::cores::rows_matvec) in all else.
#[kernel(block = WARPS * 32 + COPIERS, min_blocks = 1, dependent, dynamic_shared, slots(
    bytes(word: u32, side: U32x4, index: u32) -> U32x2,
    start(sum: i32) -> i32,
    whole(first: i32, second: i32, factors: U32x4) -> f32,
    factors(side: U32x4, number: u32) -> U32x4,
    join(value: f32, up: f32) -> f32,
    epilogue(value: f32, row: u32) -> f32
))]
pub fn rows_stream<
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
    require!(WARPS <= CLASSES && (LANES == 2 * WARPS || LANES == 4 * WARPS) && WARPS <= 16);
    require!(LANES % SHARING == 0 && COPIERS % 32 == 0 && COLUMNS * LANES % COPIERS == 0 && COPIERS % LANES == 0);
    require!(TILE == 8 || TILE % 16 == 0);
    require!(COLUMNS % 16 == 0 && STAGES >= 2);
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
    // Stages that have come, and those that all warps have read; sums that are there, and have been read.
    let full = shared::<u64>(STAGES);
    let empty = shared::<u64>(STAGES);
    let summed = shared::<u64>(2);

    let units = K / 32;
    let steps = units.div_ceil(CLASSES);
    let tile_outputs = if PAIRED { COLUMNS / 2 } else { COLUMNS };
    let tiles = outputs.div_ceil(tile_outputs);
    let own_tiles = if block_idx() < tiles { (tiles - block_idx()).div_ceil(grid_dim()) } else { 0 };
    let all_steps = own_tiles * steps;
    let first = block_idx_y() * TILE;
    if thread_idx() == 0 {
        for stage in 0..STAGES {
            mbarrier_init(full, stage, COPIERS);
            mbarrier_init(empty, stage, WARPS);
        }
        mbarrier_init(summed, 0u32, WARPS);
        mbarrier_init(summed, 1u32, WARPS);
    }
    grid_launch_dependents();
    barrier();

    let mut base = block_idx() * tile_outputs;
    let mut step = 0u32;
    let mut stage = 0u32;
    let mut parity = 0u32;
    if warp_id() >= WARPS {
        let copier = thread_idx() - WARPS * 32;
        // The first weights are on their way before the activations are there.
        for at in 0..STAGES {
            if at < all_steps {
                let tile = at / steps;
                let of_tile = base + tile * (grid_dim() * tile_outputs);
                stage_weights(copier, of_tile, outputs, at % steps, at, codes, high, scales, supers, ring, sides);
            }
        }
        grid_dependency_wait();
        for at in 0..all_steps {
            if at >= STAGES {
                mbarrier_wait(empty, stage, parity);
                stage_weights(copier, base, outputs, step, stage, codes, high, scales, supers, ring, sides);
            }
            if !RESIDENT || at < steps {
                stage_activations(copier, step, stage, first, rows, x, xscale, xsum, x_words, x_scales, x_sums);
            }
            cp_async_arrive(full, stage);
            stage = stage + 1;
            if stage == STAGES {
                stage = 0;
                parity = if at >= STAGES { 1 - parity } else { 0 };
            }
            step = step + 1;
            if step == steps {
                step = 0;
                base = base + grid_dim() * tile_outputs;
            }
        }
    } else {
        grid_dependency_wait();
        let mut totals = regs(0.0f32, CLASSES / WARPS * COLUMNS * TILE / 32);
        let mut read = 1u32;
        if thread_idx() < TILE {
            after[thread_idx()] = if FACTORED { factor[(first + thread_idx()).min(rows - 1)] } else { 1.0 };
        }
        for at in 0..all_steps {
            mbarrier_wait(full, stage, parity);
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
            warp_barrier();
            if lane_id() == 0 {
                mbarrier_arrive(empty, stage);
            }
            stage = stage + 1;
            if stage == STAGES {
                stage = 0;
                parity = 1 - parity;
            }
            step = step + 1;
            if step == steps {
                mbarrier_wait(summed, 1u32, read);
                leave_sums(&mut totals, sums);
                warp_barrier();
                if lane_id() == 0 {
                    mbarrier_arrive(summed, 0u32);
                }
                read = 1 - read;
                mbarrier_wait(summed, 0u32, read);
                for place in (thread_idx()..TILE * tile_outputs).by(WARPS * 32) {
                    let row = place / tile_outputs;
                    let column = place % tile_outputs;
                    let value = tree_sum(row, column, sums);
                    let up = if PAIRED { tree_sum(row, column + tile_outputs, sums) } else { 0.0 };
                    let output = base + column;
                    if output < outputs && first + row < rows {
                        let by = after[row];
                        let of_row = first + row;
                        out[of_row * outputs + output] =
                            epilogue(join(value * by, up * by), of_row * by_stride + output);
                    }
                }
                warp_barrier();
                if lane_id() == 0 {
                    mbarrier_arrive(summed, 1u32);
                }
                step = 0;
                base = base + grid_dim() * tile_outputs;
            }
        }
    }
}
