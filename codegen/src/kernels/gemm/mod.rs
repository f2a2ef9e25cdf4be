//! The product of 1 to 128 rows with repacked weights of any type: 16-bit operands, f32 sums, one arithmetic whatever
//! the number of rows.
//!
//! ```text
//! codes and scales ──► cp.async ──► ring of STAGES steps ──► bf16 in the layout of an A fragment ─┐
//! rows of activations ──► cp.async ──► ring of STAGES steps ──► B fragments ─────────────────────┴─► mma.m16n8k16
//! ```
//!
//! Weights are the left operand (C^T = W X^T): 16 of their rows fill an `mma`, and one row of activations costs as much
//! as eight. So the kernel reads weights at the memory's speed for few rows and decodes a weight once for up to 128.
//!
//! **The arithmetic.** A weight is decoded to bf16, activations arrive in bf16. K is cut in slices, whose number follows
//! from the matrix alone ([`slices`]). A slice is one chain of `mma` into f32 accumulators, from zero, over its steps of
//! 128 values in order; the slices' sums are added in order. Nothing of this depends on the number of rows or on the
//! tile, and columns of an `mma` do not mix, so a row has the same bits alone and in any batch.
//!
//! **Everything in flight is in shared memory**, codes too, which a lane copies for itself and reads back: a wait for a
//! group of copies is exact, while loads to registers share the few scoreboards of a warp, so that each wait is for the
//! newest of them (measured: a fifth of the memory's speed).
//!
//! **The order of K in a step.** A lane's 16 bytes of codes are a run of one weight row. The lane multiplies what it loaded:
//! four values in a row fill its part of an `mma`, and the B fragment takes the activations of the same places. A sum
//! of 16 products does not mind which of them is which, so nothing is shuffled, and both fragments are 16-byte reads.
//!
//! **Slices.** Those of a matrix with few rows are shared out among the warps of a block and the blocks of a cluster, so
//! that every SM has weights to read. Their sums meet in shared memory, over DSMEM where there is a cluster.
//!
//! Rows past the end of the batch read the last one, and their results are dropped. Steps past the end of K multiply
//! zeros by the last weights of the row.

pub mod decode;
pub mod shape;
mod tile;

use gemma4c_dsl::prelude::*;

pub use shape::{Gemm, Shape};
use tile::{
    copy_activations_of_step, copy_weights, larger, load_sides, multiply_step, row_chunks, row_units, store_fragment,
    sum_of_slices,
};

/// How a block makes its tile: 16 TILES ACROSS rows of the matrix by ROWS rows of activations. HELD of the SLICES are
/// in a block, each of ACROSS warps; the others are in the other blocks of the cluster. Codes have UNIT values in 16
/// bytes; K is WHOLE steps of 128; a SCALED row has an f16 scale for each 32 values and nothing else beside its codes.
#[config]
pub struct GemmTile {
    pub UNIT: u32,
    pub SCALED: bool,
    pub WHOLE: bool,
    pub ROWS: u32,
    pub TILES: u32,
    pub ACROSS: u32,
    pub SLICES: u32,
    pub HELD: u32,
    pub STAGES: u32,
}

/// Repacked weights, as far as they are copied: scales in words of two, where rows are SCALED.
#[view]
pub struct GemmWeights {
    codes: Weights<U32x4>,
    scales: Weights<u32>,
}

/// The rows of activations: of a batch, or pairs of a row and an expert, sorted by expert and cut in groups.
#[view]
pub struct GemmRows {
    x: Input<U32x4>,
    groups: Input<U32x4>,
    order: Input<u32>,
    /// Rows of a batch.
    count: u32,
}

/// A warp's part of the rings: activations of its slice, codes and scales of its own.
#[view]
pub struct GemmRing {
    x: Shared<U32x4>,
    codes: Shared<U32x4>,
    scales: Shared<u32>,
}

/// Steps of a slice are those from `steps * slice / SLICES` on.
#[device]
pub fn first_step(slice: u32, slices: u32, k: u32) -> u32 {
    k.div_ceil(128) * slice / slices
}

/// `out = x · Wᵀ`, of bf16 activations and repacked weights; with GEGLU the matrix holds gates, then what they gate. With
/// PAIRS rows are pairs of a row and an expert, of which so many neighbouring ones share a row of x; tile m is of group
/// m, and results are stored as the pairs were before they were sorted. Rows of what an epilogue takes are `by_stride`
/// apart. `k` is a multiple of 32.
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
    require!(T.ROWS % 8 == 0 && T.SLICES % T.HELD == 0 && T.STAGES >= 2);
    require!(T.UNIT == 4 || T.UNIT == 8 || T.UNIT == 16 || T.UNIT == 32);
    // First activations and codes, then the sums of slices.
    let memory = shared::<U32x4>(larger(
        T.STAGES * T.HELD * (T.ROWS * row_chunks(T.UNIT) + T.ACROSS * T.TILES * (2048 / T.UNIT)),
        if T.SLICES > 1 { T.HELD * T.ACROSS * T.TILES * T.ROWS * 4 } else { 1 },
    ));
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

    // A stage of the whole block: activations of its slices, then codes of its warps.
    let x_stage = T.HELD * T.ROWS * row_chunks(T.UNIT);
    let code_stage = T.HELD * T.ACROSS * T.TILES * (2048 / T.UNIT);
    let scale_stage = if T.SCALED { T.HELD * T.ACROSS * T.TILES * 32 } else { 0 };
    let ring = GemmRing {
        x: memory.offset(own * T.ROWS * row_chunks(T.UNIT)),
        codes: memory.offset(T.STAGES * x_stage + warp_id() * T.TILES * (2048 / T.UNIT)),
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
        barrier();
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

    if T.SLICES == 1 {
        #[unroll]
        for m in 0u32..T.TILES {
            #[unroll]
            for n in 0u32..T.ROWS / 8 {
                let output = warp_output + m * if GEGLU { 8 } else { 16 };
                let sum = sums[m * (T.ROWS / 8) + n];
                store_fragment(epilogue, out, rows.order, sum, output, first_row + n * 8, end, outputs, by_stride);
            }
        }
    }
    if T.SLICES > 1 {
        // All fragments of the block's slices, then each warp of the cluster adds up its share of them.
        cp_async_wait(0);
        barrier();
        #[unroll]
        for m in 0u32..T.TILES {
            #[unroll]
            for n in 0u32..T.ROWS / 8 {
                let sum = sums[m * (T.ROWS / 8) + n];
                let number = (warp_id() * T.TILES + m) * (T.ROWS / 8) + n;
                memory[number * 32 + lane_id()] =
                    u32x4(sum.x.to_bits(), sum.y.to_bits(), sum.z.to_bits(), sum.w.to_bits());
            }
        }
        if cluster > 1 {
            cluster_barrier();
        } else {
            barrier();
        }
        let all = T.ACROSS * T.TILES * (T.ROWS / 8);
        let warps = T.ACROSS * T.HELD;
        for number in (rank * warps + warp_id()..all).by(cluster * warps) {
            let sum = sum_of_slices(memory, number);
            let output = first_output + number / (T.ROWS / 8) * if GEGLU { 8 } else { 16 };
            let row = first_row + number % (T.ROWS / 8) * 8;
            store_fragment(epilogue, out, rows.order, sum, output, row, end, outputs, by_stride);
        }
        if cluster > 1 {
            cluster_barrier();
        }
    }
}
