//! The product of several rows on int8 tensor cores by tiles that a warp sums in registers, where there are mbarriers: Hopper and later.
//!
//! The order of an output's sums is that of one row: four stretches of blocks, CLASSES sums in each, by the block's number modulo that. So a warp takes a stretch of a tile, 16 rows of weights by up to 32 of activations, and
//! keeps its sums of every result ([`warp_tile`](super::warp_tile)). Four warps have the stretches of a tile, and meet once, at its end. A block has GROUPS such tiles of weights and SPLITS of activations.
//!
//! COPIERS threads of their own keep STAGES steps on their way ([`stretches`](super::stretches)) and wait for nothing but a free stage; the warps that multiply wait for nothing but a full one, and four of them for each
//! other at a tile's end. A block is persistent over tiles, so the next tile's weights are on their way while this one ends. Activations that fit shared memory stay there
//! (RESIDENT), else they come with every stage of weights. With ROUNDED the results are left as the next product reads them ([`rounded`](super::rounded)).

use gemma4c_dsl::prelude::*;

use super::rounded::{held_panel, hold_results, leave_rounded};
use super::stretches::{rows_of_copier, runs, stage_rows, stage_tile};
use super::warp_tile::{end_stretch, lane_places, leave_results, leave_stretch, multiply_stage, results_of_stretches};

/// `out[r] = W · x[r]` for SPLITS · EIGHTS · 8 rows at a time, with int8 activations. As [`rows_matvec`](super::cores::rows_matvec) in all else.
#[kernel(block = OWN * GROUPS * SPLITS * 32 + COPIERS, min_blocks = 1, dependent, dynamic_shared, slots(
    bytes(word: u32, side: U32x4, index: u32) -> U32x2,
    start(sum: i32) -> i32,
    whole(first: i32, second: i32, factors: U32x4) -> f32,
    factors(side: U32x4, number: u32) -> U32x4,
    change(four: F32x4, outputs: U32x2, rows: U32x2) -> F32x4,
    join(value: f32, up: f32) -> f32,
    epilogue(value: f32, row: u32) -> f32
))]
pub fn rows_tiles<
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
    const ROUNDED: bool,
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
    to_codes: Output<u32>,
    to_scales: Output<f32>,
    to_sums: Output<i32>,
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
    require!(COPIERS % 32 == 0 && STAGES >= 2);
    // Four tiles of joined outputs are a group of 32.
    require!(!ROUNDED || PAIRED && GROUPS % 4 == 0);
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
    // Stages that have come, and those that all warps have read; the sums of a tile that are there, and have been read.
    let full = shared::<u64>(STAGES);
    let empty = shared::<u64>(STAGES);
    let there = shared::<u64>(GROUPS * SPLITS);
    let read = shared::<u64>(GROUPS * SPLITS);
    // Joined results of whole groups, those that are there, and those that have been rounded.
    let held = shared::<f32>(if ROUNDED { GROUPS / 4 * SPLITS * EIGHTS * held_panel() } else { 4 });
    let joined = shared::<u64>(if ROUNDED { GROUPS / 4 * SPLITS } else { 1 });
    let rounded = shared::<u64>(if ROUNDED { GROUPS / 4 * SPLITS } else { 1 });

    let steps = STRETCH.div_ceil(STEP);
    let set_outputs = if PAIRED { 8u32 } else { 16u32 };
    let tile_outputs = GROUPS * set_outputs;
    let tiles = outputs.div_ceil(tile_outputs);
    let own_tiles = if block_idx() < tiles { (tiles - block_idx()).div_ceil(grid_dim()) } else { 0 };
    let all_steps = own_tiles * (steps * runs());
    let first = block_idx_y() * (SPLITS * EIGHTS * 8);
    let warps = OWN * GROUPS * SPLITS;
    if thread_idx() == 0 {
        for stage in 0..STAGES {
            mbarrier_init(full, stage, COPIERS);
            mbarrier_init(empty, stage, warps);
        }
        for set in 0..GROUPS * SPLITS {
            mbarrier_init(there, set, OWN);
            mbarrier_init(read, set, OWN);
        }
        if ROUNDED {
            for group in 0..(GROUPS / 4).max(1) * SPLITS {
                mbarrier_init(joined, group, if OWN == 1 { 4 } else { 4 * EIGHTS });
                mbarrier_init(rounded, group, if OWN == 1 { 4 } else { 4 * EIGHTS });
            }
        }
    }
    grid_launch_dependents();
    barrier();

    let mut base = block_idx() * tile_outputs;
    let mut run = 0u32;
    let mut step = 0u32;
    let mut stage = 0u32;
    let mut parity = 0u32;
    if warp_id() >= warps {
        let copier = thread_idx() - warps * 32;
        let mut of_codes = regs(0u32, GROUPS * 16 * OWN * STEP * PARTS / COPIERS);
        let mut of_sides = regs(0u32, (GROUPS * 16 * OWN * STEP * PARTS / SHARING + COPIERS - 1) / COPIERS);
        // The first weights are on their way before the activations are there.
        for at in 0..STAGES {
            if at < all_steps {
                let of_tile = base + at / (steps * runs()) * (grid_dim() * tile_outputs);
                rows_of_copier(copier, of_tile, outputs, &mut of_codes, &mut of_sides);
                stage_tile(
                    copier,
                    &mut of_codes,
                    &mut of_sides,
                    at / steps % runs(),
                    at % steps,
                    at,
                    codes,
                    high,
                    scales,
                    supers,
                    ring,
                    sides,
                );
            }
        }
        grid_dependency_wait();
        for at in 0..all_steps {
            if at == STAGES || step == 0 && run == 0 {
                rows_of_copier(copier, base, outputs, &mut of_codes, &mut of_sides);
            }
            if at >= STAGES {
                mbarrier_wait(empty, stage, parity);
                stage_tile(
                    copier,
                    &mut of_codes,
                    &mut of_sides,
                    run,
                    step,
                    stage,
                    codes,
                    high,
                    scales,
                    supers,
                    ring,
                    sides,
                );
            }
            if !RESIDENT || at < steps * runs() {
                stage_rows(copier, run, step, stage, first, rows, x, xscale, xsum, x_words, x_scales, x_sums);
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
                run = run + 1;
            }
            if run == runs() {
                run = 0;
                base = base + grid_dim() * tile_outputs;
            }
        }
    } else {
        grid_dependency_wait();
        // The warps of a tile. Those of a short stretch are not all on one scheduler.
        let set = warp_id() / OWN;
        let own = (warp_id() + set) % OWN;
        let group = set % GROUPS;
        let split = set / GROUPS;
        let to = (set * OWN + own) * (EIGHTS * 32);
        // Which groups of 32 joined outputs: they are four tiles of weights.
        let of_groups = split * (GROUPS / 4) + group / 4;
        let mut totals = regs(0.0f32, EIGHTS * 4 * CLASSES);
        let mut values = regs(0.0f32, EIGHTS * 4);
        places[thread_idx()] = lane_places(group, split, own);
        let mut tile_parity = 0u32;
        for at in 0..all_steps {
            mbarrier_wait(full, stage, parity);
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
                step = 0;
                end_stretch(&mut totals, &mut values, OWN == 4 || run == 0);
                run = run + 1;
            }
            if run == runs() {
                let output = base + group * set_outputs;
                if ROUNDED && own < EIGHTS {
                    mbarrier_wait(rounded, of_groups, 1 - tile_parity);
                }
                if OWN == 1 {
                    #[unroll]
                    for n in 0..EIGHTS {
                        let value = f32x4(values[n * 4], values[n * 4 + 1], values[n * 4 + 2], values[n * 4 + 3]);
                        let row = first + (split * EIGHTS + n) * 8;
                        if ROUNDED {
                            let panel = held.offset((of_groups * EIGHTS + n) * held_panel());
                            let eighth = group % 4;
                            hold_results(
                                change, join, epilogue, value, output, outputs, eighth, row, rows, by_stride, factor,
                                panel,
                            );
                        } else {
                            leave_results(
                                change, join, epilogue, value, output, outputs, row, rows, by_stride, factor, out,
                            );
                        }
                    }
                } else {
                    mbarrier_wait(read, set, 1 - tile_parity);
                    leave_stretch(&mut values, to, sums);
                    warp_barrier();
                    if lane_id() == 0 {
                        mbarrier_arrive(there, set);
                    }
                    mbarrier_wait(there, set, tile_parity);
                    if own < EIGHTS {
                        let value =
                            results_of_stretches((set * OWN * EIGHTS + own) * 32 + lane_id(), EIGHTS * 32, sums);
                        let row = first + (split * EIGHTS + own) * 8;
                        if ROUNDED {
                            let panel = held.offset((of_groups * EIGHTS + own) * held_panel());
                            let eighth = group % 4;
                            hold_results(
                                change, join, epilogue, value, output, outputs, eighth, row, rows, by_stride, factor,
                                panel,
                            );
                        } else {
                            leave_results(
                                change, join, epilogue, value, output, outputs, row, rows, by_stride, factor, out,
                            );
                        }
                    }
                    warp_barrier();
                    if lane_id() == 0 {
                        mbarrier_arrive(read, set);
                    }
                }
                if ROUNDED && own < EIGHTS {
                    warp_barrier();
                    if lane_id() == 0 {
                        mbarrier_arrive(joined, of_groups);
                    }
                    mbarrier_wait(joined, of_groups, tile_parity);
                    let members = if OWN == 1 { 4 } else { 4 * EIGHTS };
                    for half in (own * 4 + group % 4..EIGHTS * 2).by(members) {
                        let panel = held.offset((of_groups * EIGHTS + half / 2) * held_panel());
                        let row = first + (split * EIGHTS + half / 2) * 8;
                        let base = base + group / 4 * 32;
                        leave_rounded(base, outputs, row, half % 2, rows, panel, to_codes, to_scales, to_sums);
                    }
                    warp_barrier();
                    if lane_id() == 0 {
                        mbarrier_arrive(rounded, of_groups);
                    }
                }
                tile_parity = 1 - tile_parity;
                run = 0;
                base = base + grid_dim() * tile_outputs;
            }
        }
    }
}
