//! The product of several rows by [tiles](super::tiles) where there are no mbarriers: all warps copy and multiply, with a barrier of the block at every step.
//!
//! Everything else is as there, by the same functions in the same order.

use gemma4c_dsl::prelude::*;

use super::stretches::{rows_of_copier, runs, stage_rows, stage_tile};
use super::warp_tile::{end_stretch, lane_places, leave_results, leave_stretch, multiply_stage, results_of_stretches};

/// As [`rows_tiles`](super::tiles::rows_tiles).
#[kernel(block = COPIERS, min_blocks = 1, dependent, dynamic_shared, slots(
    bytes(word: u32, side: U32x4, index: u32) -> U32x2,
    start(sum: i32) -> i32,
    whole(first: i32, second: i32, factors: U32x4) -> f32,
    factors(side: U32x4, number: u32) -> U32x4,
    change(four: F32x4, outputs: U32x2, rows: U32x2) -> F32x4,
    join(value: f32, up: f32) -> f32,
    epilogue(value: f32, row: u32) -> f32
))]
pub fn rows_tiles_in_steps<
    const K: u32,
    const PARTS: u32,
    const PIECES: u32,
    const HALVES: bool,
    const MINIMUM: bool,
    const SHARING: u32,
    const SCALES: u32,
    const SUPERS: u32,
    const HIGH: u32,
    const PERIOD: u32,
    const CLASSES: u32,
    const STRETCH: u32,
    const OWN: u32,
    const STEP: u32,
    const GROUPS: u32,
    const SPLITS: u32,
    const EIGHTS: u32,
    const COPIERS: u32,
    const STAGES: u32,
    const RESIDENT: bool,
    const PANELS: bool,
    const PAIRED: bool,
    const FACTORED: bool,
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
    require!(K % 32 == 0 && (PARTS == 1 || PARTS == 2) && PIECES == K / 32 * PARTS);
    // The order of sums: four stretches of whole turns of blocks.
    require!(STRETCH == (K / 32 + 4 * CLASSES - 1) / (4 * CLASSES) * CLASSES && (OWN == 1 || OWN == 4));
    require!(
        (CLASSES == 4 || CLASSES == 8)
            && STEP % CLASSES == 0
            && (EIGHTS == 1 || EIGHTS == 2 || EIGHTS == 4)
            && OWN * STEP * PARTS % SHARING == 0
    );
    require!(COPIERS % (OWN * STEP * PARTS) == 0 && GROUPS * 16 * OWN * STEP * PARTS % COPIERS == 0);
    // `cp_async_wait` counts to four.
    require!(COPIERS == OWN * GROUPS * SPLITS * 32 && STAGES >= 2 && STAGES <= 6);
    // Per stage: a step of every row of a tile, and what lies beside its pieces.
    let ring = shared::<U32x4>(STAGES * GROUPS * 16 * (OWN * STEP * PARTS + 1));
    let sides = shared::<u32>(
        STAGES * (OWN * STEP * PARTS / SHARING) * (GROUPS * 16 + 2) * (HIGH + if SUPERS > 0 { 2 } else { 1 }),
    );
    // Blocks of activations, eight rows each.
    let x_words = shared::<u32>(SPLITS * EIGHTS * 64 * if RESIDENT { 4 * STRETCH } else { STAGES * OWN * STEP });
    let x_scales = shared::<f32>(SPLITS * EIGHTS * 8 * if RESIDENT { 4 * STRETCH } else { STAGES * OWN * STEP });
    let x_sums = shared::<i32>(if !MINIMUM {
        1
    } else if RESIDENT {
        SPLITS * EIGHTS * 8 * (4 * STRETCH)
    } else {
        SPLITS * EIGHTS * 8 * (STAGES * OWN * STEP)
    });
    // Where each thread's part of a stage lies.
    let places = shared::<U32x2>(OWN * GROUPS * SPLITS * 32);
    // The sums of the stretches, where each has a warp of its own.
    let sums = shared::<F32x4>(if OWN == 1 { 1 } else { OWN * GROUPS * SPLITS * EIGHTS * 32 });

    let steps = STRETCH.div_ceil(STEP);
    let set_outputs = if PAIRED { 8u32 } else { 16u32 };
    let tile_outputs = GROUPS * set_outputs;
    let tiles = outputs.div_ceil(tile_outputs);
    let own_tiles = if block_idx() < tiles { (tiles - block_idx()).div_ceil(grid_dim()) } else { 0 };
    let all_steps = own_tiles * (steps * runs());
    let first = block_idx_y() * (SPLITS * EIGHTS * 8);

    // The first weights are on their way before the activations are there.
    let mut next_base = block_idx() * tile_outputs;
    let mut next_run = 0u32;
    let mut next_step = 0u32;
    let mut of_codes = regs(0u32, GROUPS * 16 * OWN * STEP * PARTS / COPIERS);
    let mut of_sides = regs(0u32, (GROUPS * 16 * OWN * STEP * PARTS / SHARING + COPIERS - 1) / COPIERS);
    for stage in 0..STAGES - 1 {
        if stage < all_steps {
            rows_of_copier(thread_idx(), next_base, outputs, &mut of_codes, &mut of_sides);
            stage_tile(
                thread_idx(),
                &mut of_codes,
                &mut of_sides,
                next_run,
                next_step,
                stage,
                codes,
                high,
                scales,
                supers,
                ring,
                sides,
            );
            next_step = next_step + 1;
            if next_step == steps {
                next_step = 0;
                next_run = next_run + 1;
            }
            if next_run == runs() {
                next_run = 0;
                next_base = next_base + grid_dim() * tile_outputs;
            }
        }
    }
    grid_launch_dependents();
    grid_dependency_wait();
    for stage in 0..STAGES - 1 {
        if stage < all_steps && (!RESIDENT || stage < steps * runs()) {
            let run = stage / steps % runs();
            stage_rows(
                thread_idx(),
                run,
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
    // The warps of a tile. Those of a short stretch are not all on one scheduler.
    let set = warp_id() / OWN;
    let own = (warp_id() + set) % OWN;
    let group = set % GROUPS;
    let split = set / GROUPS;
    let to = (set * OWN + own) * (EIGHTS * 32);
    let mut totals = regs(0.0f32, EIGHTS * 4 * CLASSES);
    let mut values = regs(0.0f32, EIGHTS * 4);
    places[thread_idx()] = lane_places(group, split, own);
    let mut base = block_idx() * tile_outputs;
    let mut run = 0u32;
    let mut step = 0u32;
    let mut stage = 0u32;
    for at in 0..all_steps {
        // This stage is there for all warps, and none still reads the one before, or the sums.
        cp_async_wait(STAGES - 2);
        barrier();
        if at + STAGES - 1 < all_steps {
            let free = if stage == 0 { STAGES - 1 } else { stage - 1 };
            // Anew for every step: they would take registers from the sums.
            rows_of_copier(thread_idx(), next_base, outputs, &mut of_codes, &mut of_sides);
            stage_tile(
                thread_idx(),
                &mut of_codes,
                &mut of_sides,
                next_run,
                next_step,
                free,
                codes,
                high,
                scales,
                supers,
                ring,
                sides,
            );
            if !RESIDENT || at + STAGES - 1 < steps * runs() {
                stage_rows(
                    thread_idx(),
                    next_run,
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
                next_run = next_run + 1;
            }
            if next_run == runs() {
                next_run = 0;
                next_base = next_base + grid_dim() * tile_outputs;
            }
        }
        cp_async_commit();
        multiply_stage(
            bytes,
            start,
            whole,
            factors,
            &mut totals,
            places,
            base,
            outputs,
            group,
            own,
            run,
            step,
            stage,
            ring,
            sides,
            x_words,
            x_scales,
            x_sums,
        );
        stage = if stage == STAGES - 1 { 0 } else { stage + 1 };
        step = step + 1;
        if step == steps {
            step = 0;
            end_stretch(&mut totals, &mut values, OWN == 4 || run == 0);
            run = run + 1;
        }
        if run == runs() {
            let output = base + group * set_outputs;
            if OWN == 1 {
                #[unroll]
                for n in 0..EIGHTS {
                    let value = f32x4(values[n * 4], values[n * 4 + 1], values[n * 4 + 2], values[n * 4 + 3]);
                    let row = first + (split * EIGHTS + n) * 8;
                    leave_results(change, join, epilogue, value, output, outputs, row, rows, by_stride, factor, out);
                }
            } else {
                leave_stretch(&mut values, to, sums);
                barrier();
                if own < EIGHTS {
                    let value = results_of_stretches((set * OWN * EIGHTS + own) * 32 + lane_id(), EIGHTS * 32, sums);
                    let row = first + (split * EIGHTS + own) * 8;
                    leave_results(change, join, epilogue, value, output, outputs, row, rows, by_stride, factor, out);
                }
            }
            run = 0;
            base = base + grid_dim() * tile_outputs;
        }
    }
    cp_async_wait(0);
}
