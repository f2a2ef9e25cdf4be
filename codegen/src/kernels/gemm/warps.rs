//! The product of few rows, and of any on GPUs without `wgmma`: warps multiply with `mma.m16n8k16`, each for itself.

use gemma4c_dsl::prelude::*;

use super::sums::{GemmOut, store_sums};
use super::tile::{
    clear_absent_rows, copy_activations_of_step, copy_weights, first_step, load_sides, multiply_step, row_chunks,
    row_units,
};
use super::views::{GemmRing, GemmRows, GemmTile, GemmWeights};

/// `out = x · Wᵀ`, of bf16 activations and repacked weights; with GEGLU the matrix holds gates, then what they gate.
/// With PAIRS rows are pairs of a row and an expert, of which so many neighbouring ones share a row of x; tile m is of
/// group m, and results are stored as the pairs were before they were sorted. Rows of what an epilogue takes are
/// `by_stride` apart. `k` is a multiple of 32.
#[kernel(block = T.ACROSS * T.HELD * 32, dependent, dynamic_shared, cluster = T.SLICES / T.HELD, slots(
    side(unit: u32, more: u32) -> U32x4,
    decode(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4,
    epilogue(value: f32, at: u32) -> f32
))]
pub fn gemm<const T: GemmTile, const GEGLU: bool, const PAIRS: u32, O: Float>(
    weights: GemmWeights,
    rows: GemmRows,
    out: Output<O>,
    outputs: u32,
    by_stride: u32,
    k: u32,
) {
    // So that sums fit where activations were.
    require!(T.ROWS % 8 == 0 && T.SLICES % T.HELD == 0 && T.STAGES >= 2 && T.ACROSS * T.TILES <= 8);
    require!(T.UNIT == 4 || T.UNIT == 8 || T.UNIT == 16 || T.UNIT == 32);
    // First activations, then the sums of slices.
    let x = shared::<BF16>(T.STAGES * T.HELD * T.ROWS * row_chunks(T.UNIT) * 8);
    let codes = shared::<U32x4>(T.STAGES * T.HELD * T.ACROSS * T.TILES * (2048 / T.UNIT));
    let scales = shared::<u32>(if T.SCALED { T.STAGES * T.HELD * T.ACROSS * T.TILES * 32 } else { 1 });

    let cluster = T.SLICES / T.HELD;
    let rank = if cluster > 1 { cluster_rank() } else { 0 };
    let own = warp_id() / T.ACROSS;
    let slice = rank * T.HELD + own;
    let first = first_step(slice, T.SLICES, k);
    let steps = first_step(slice + 1, T.SLICES, k) - first;
    // No slice has more.
    let turns = k.div_ceil(128).div_ceil(T.SLICES);
    let of_tile = if GEGLU { T.ACROSS * T.TILES * 8 } else { T.ACROSS * T.TILES * 16 };
    let first_output = block_idx_y() / cluster * of_tile;
    let warp_output = first_output + warp_id() % T.ACROSS * (of_tile / T.ACROSS);

    // A stage of the whole block: activations of its slices, codes of its warps.
    let x_stage = T.HELD * T.ROWS * row_chunks(T.UNIT) * 8;
    let code_stage = T.HELD * T.ACROSS * T.TILES * (2048 / T.UNIT);
    let scale_stage = if T.SCALED { T.HELD * T.ACROSS * T.TILES * 32 } else { 0 };
    let ring = GemmRing {
        x: x.offset(own * T.ROWS * row_chunks(T.UNIT) * 8),
        codes: codes.offset(warp_id() * T.TILES * (2048 / T.UNIT)),
        scales: scales.offset(if T.SCALED { warp_id() * T.TILES * 32 } else { 0 }),
    };

    grid_launch_dependents();
    let mut units = regs(0u32, T.TILES * 2);
    if PAIRS == 0 {
        row_units(&mut units, warp_output, 0, outputs, k);
        #[unroll]
        for stage in 0u32..T.STAGES - 1 {
            copy_weights(
                weights,
                ring,
                stage * code_stage,
                stage * scale_stage,
                &units,
                first + stage,
                stage < steps,
                k,
            );
        }
    }
    grid_dependency_wait();

    let mut end = rows.count;
    let mut first_row = block_idx() * T.ROWS;
    if PAIRS > 0 {
        end = 0;
        if block_idx() < rows.groups[0u32].x {
            let group = rows.groups[block_idx() + 1];
            first_row = group.x;
            end = group.y;
            row_units(&mut units, warp_output, group.z * if GEGLU { 2 * outputs } else { outputs }, outputs, k);
        }
    }
    // The whole cluster leaves: there are no such rows.
    if first_row >= end {
        return;
    }

    clear_absent_rows(ring.x, x_stage, end - first_row);
    #[unroll]
    for stage in 0u32..T.STAGES - 1 {
        if PAIRS > 0 {
            copy_weights(
                weights,
                ring,
                stage * code_stage,
                stage * scale_stage,
                &units,
                first + stage,
                stage < steps,
                k,
            );
        }
        if stage < steps {
            copy_activations_of_step(ring.x.offset(stage * x_stage), rows, first_row, end, first + stage, k);
        }
        cp_async_commit();
    }
    let mut sides = regs(U32x4::ZERO, T.TILES * 2 * (32 / T.UNIT));
    if !T.SCALED {
        load_sides(side, &mut sides, &units, first, k);
    }
    let mut sums = regs(F32x4::ZERO, T.TILES * (T.ROWS / 8));
    let mut stage = 0u32;
    for turn in 0..turns {
        cp_async_wait(T.STAGES - 2);
        // A slice's activations are copied by its own warps.
        if T.ACROSS == 1 {
            warp_barrier();
        } else {
            barrier();
        }
        let ahead = turn + T.STAGES - 1;
        let slot = if stage == 0 { T.STAGES - 1 } else { stage - 1 };
        copy_weights(weights, ring, slot * code_stage, slot * scale_stage, &units, first + ahead, ahead < steps, k);
        if ahead < steps {
            copy_activations_of_step(ring.x.offset(slot * x_stage), rows, first_row, end, first + ahead, k);
        }
        cp_async_commit();
        if turn < steps {
            let now = GemmRing {
                x: ring.x.offset(stage * x_stage),
                codes: ring.codes.offset(stage * code_stage),
                scales: ring.scales.offset(stage * scale_stage),
            };
            multiply_step(decode, now, &mut sides, &units, first + turn, &mut sums, k);
            if !T.SCALED && turn + 1 < steps {
                load_sides(side, &mut sides, &units, first + turn + 1, k);
            }
        }
        stage = if stage + 1 == T.STAGES { 0 } else { stage + 1 };
    }

    let to = GemmOut::<O> { out, order: rows.order, first_row, end, outputs, by_stride };
    store_sums(epilogue, x, &sums, to, first_output);
}
