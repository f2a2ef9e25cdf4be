//! The product of many rows with repacked weights on Hopper: the arithmetic of [`gemm`](super::warps::gemm), by
//! warpgroups.
//!
//! ```text
//! codes and scales ──► cp.async ──► ring of STAGES steps ──► bf16 in registers, the left operand ──┐
//! rows of activations ──► registers, a step ahead ──► ring of three steps, the right operand ─────┴─► wgmma
//! ```
//!
//! A warp has 16 rows of the matrix, as in [`gemm`](super::warps::gemm), and its lanes decode the same values to the
//! same places of a left operand. The tensor cores read activations from shared memory by themselves, once for 64 rows
//! of the matrix, where `mma` needs them in the registers of every warp.
//!
//! **The same bits.** `wgmma` and `mma` add up 16 products alike, whatever the number of columns, so the two kernels
//! agree if each product has the same 16 values of K. A lane's values are a run of a weight row, and a product has four
//! of each lane of a quad: activations are stored in that order, a pair at a time, in the swizzle of 128 bytes.

use gemma4c_dsl::prelude::*;

use super::sums::{GemmOut, store_sums};
use super::tile::{copy_weights, eight_of, first_step, load_sides, row_units};
use super::views::{GemmRing, GemmRows, GemmTile, GemmWeights};

/// Steps of activations in shared memory: one that is multiplied, one that may still be, one that is written.
#[device]
pub fn x_stages() -> u32 {
    3
}

/// Loads what this thread brings of a step's activations: runs of eight; zeros past the last row and the end of K.
/// Threads of a warp bring four rows, so that what they store lies in different banks.
#[device]
pub fn fetch_activations<const UNIT: u32, const WHOLE: bool, const ROWS: u32, const ACROSS: u32, const PAIRS: u32>(
    held: &mut Regs<U32x4>,
    rows: GemmRows,
    first_row: u32,
    end: u32,
    step: u32,
    k: u32,
) {
    // Of the step's eight products, runs `pair` of a lane of the quad fill two.
    let pair = thread_idx() % 2 + thread_idx() / 32 % 2 * 2;
    let quad = thread_idx() / 2 % 4;
    let runs = UNIT / 8;
    let place = step * 128 + (pair / runs * 4 * runs + quad * runs + pair % runs) * 8;
    let own_row = first_row + thread_idx() / 8 % 4 + thread_idx() / 64 * 4;
    #[unroll]
    for i in 0..ROWS / (ACROSS * 2) {
        let row = own_row + i * (ACROSS * 2);
        held[i] = U32x4::ZERO;
        if (WHOLE || place < k) && row < end {
            let mut from = row;
            if PAIRS > 0 {
                from = rows.order[row] / PAIRS.max(1);
            }
            held[i] = load::<U32x4>(rows.x, from * k + place);
        }
    }
}

/// Stores them in a stage of the ring: two tiles of 64 values of K, in the order of the left operands.
#[device]
pub fn arrange_activations<const ROWS: u32, const ACROSS: u32>(ring: Shared<BF16>, held: &Regs<U32x4>) {
    let pair = thread_idx() % 2 + thread_idx() / 32 % 2 * 2;
    let quad = thread_idx() / 2 % 4;
    let own_row = thread_idx() / 8 % 4 + thread_idx() / 64 * 4;
    // A thread's rows are the same row of a pattern of eight.
    let turned = own_row % 8;
    let at = pair / 2 * ROWS * 64 + own_row * 64 + quad * 2;
    let piece = pair % 2 * 4;
    #[unroll]
    for i in 0..ROWS / (ACROSS * 2) {
        let row = at + i * (ACROSS * 128);
        store(ring, row + (piece ^ turned) * 8, held[i].x);
        store(ring, row + (piece + 1 ^ turned) * 8, held[i].y);
        store(ring, row + (piece + 2 ^ turned) * 8, held[i].z);
        store(ring, row + (piece + 3 ^ turned) * 8, held[i].w);
    }
}

/// Decodes half a step: the left operands of four products.
#[device(slots(decode(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4))]
pub fn decode_half<const UNIT: u32>(
    ring: GemmRing,
    sides: &Regs<U32x4>,
    units: &Regs<u32>,
    left: &mut Regs<U32x4>,
    step: u32,
    half: u32,
    k: u32,
) {
    #[unroll]
    for i in 0u32..2 {
        let run = half * 2 + i;
        let low = eight_of(decode, ring, sides, units[0u32], step, 0, run / (UNIT / 8), run % (UNIT / 8), k);
        let high = eight_of(decode, ring, sides, units[1u32], step, 1, run / (UNIT / 8), run % (UNIT / 8), k);
        left[run * 2] = u32x4(low.x, high.x, low.y, high.y);
        left[run * 2 + 1] = u32x4(low.z, high.z, low.w, high.w);
    }
}

/// `out = x · Wᵀ` as in [`gemm`](super::warps::gemm), of a slice a block: the blocks of a cluster have the slices of a
/// tile.
#[kernel(block = T.ACROSS * 32, min_blocks = T.RESIDENT, dependent, dynamic_shared, cluster = T.SLICES, slots(
    side(unit: u32, more: u32) -> U32x4,
    decode(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4,
    epilogue(value: f32, at: u32) -> f32
))]
pub fn gemm_warpgroups<const T: GemmTile, const GEGLU: bool, const PAIRS: u32, O: Float>(
    weights: GemmWeights,
    rows: GemmRows,
    out: Output<O>,
    outputs: u32,
    by_stride: u32,
    k: u32,
) {
    require!(T.ROWS % 32 == 0 && T.ROWS <= 128 && T.ACROSS % 4 == 0 && T.ROWS % (T.ACROSS * 2) == 0);
    require!(T.TILES == 1 && T.HELD == 1 && T.STAGES >= 2 && (T.UNIT == 8 || T.UNIT == 16 || T.UNIT == 32));
    // First activations, then the sums of slices.
    let x = shared::<BF16>(x_stages() * T.ROWS * 128);
    let codes = shared::<U32x4>(T.STAGES * T.ACROSS * (2048 / T.UNIT));
    let scales = shared::<u32>(if T.SCALED { T.STAGES * T.ACROSS * 32 } else { 1 });

    let slice = if T.SLICES > 1 { cluster_rank() } else { 0 };
    let first = first_step(slice, T.SLICES, k);
    let steps = first_step(slice + 1, T.SLICES, k) - first;
    // No slice has more.
    let turns = k.div_ceil(128).div_ceil(T.SLICES);
    let of_warp = if GEGLU { 8u32 } else { 16u32 };
    let first_output = block_idx_y() / T.SLICES * T.ACROSS * of_warp;
    let warp_output = first_output + warp_id() * of_warp;
    let code_stage = T.ACROSS * (2048 / T.UNIT);
    let scale_stage = if T.SCALED { T.ACROSS * 32 } else { 0 };
    let ring = GemmRing {
        x,
        codes: codes.offset(warp_id() * (2048 / T.UNIT)),
        scales: scales.offset(if T.SCALED { warp_id() * 32 } else { 0 }),
    };

    grid_launch_dependents();
    let mut units = regs(0u32, 2);
    if PAIRS == 0 {
        row_units(&mut units, warp_output, 0, outputs, k);
        #[unroll]
        for stage in 0u32..T.STAGES - 1 {
            let wanted = stage < steps;
            copy_weights(weights, ring, stage * code_stage, stage * scale_stage, &units, first + stage, wanted, k);
            cp_async_commit();
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
    if PAIRS > 0 {
        #[unroll]
        for stage in 0u32..T.STAGES - 1 {
            let wanted = stage < steps;
            copy_weights(weights, ring, stage * code_stage, stage * scale_stage, &units, first + stage, wanted, k);
            cp_async_commit();
        }
    }

    let mut held = regs(U32x4::ZERO, T.ROWS / (T.ACROSS * 2));
    fetch_activations(&mut held, rows, first_row, end, first, k);
    arrange_activations(x, &held);
    fence_proxy_async();
    if steps > 1 {
        fetch_activations(&mut held, rows, first_row, end, first + 1, k);
    }
    let mut sides = regs(U32x4::ZERO, 2 * (32 / T.UNIT));
    if !T.SCALED {
        load_sides(side, &mut sides, &units, first, k);
    }
    let mut left = regs(U32x4::ZERO, 8);
    let mut sums = regs(0.0f32, T.ROWS / 2);
    let mut stage = 0u32;
    let mut x_stage = 0u32;
    for turn in 0..turns {
        cp_async_wait(T.STAGES - 2);
        // This step is there for all, and the products of the last step but one are done.
        barrier();
        let x_next = if x_stage + 1 == x_stages() { 0 } else { x_stage + 1 };
        arrange_activations(x.offset(x_next * T.ROWS * 128), &held);
        // The fence waits for loads too: it comes before the next ones.
        fence_proxy_async();
        let ahead = turn + T.STAGES - 1;
        let slot = if stage == 0 { T.STAGES - 1 } else { stage - 1 };
        copy_weights(weights, ring, slot * code_stage, slot * scale_stage, &units, first + ahead, ahead < steps, k);
        cp_async_commit();
        if turn + 2 < steps {
            fetch_activations(&mut held, rows, first_row, end, first + turn + 2, k);
        }
        if turn < steps {
            let now = GemmRing {
                x: x.offset(x_stage * T.ROWS * 128),
                codes: ring.codes.offset(stage * code_stage),
                scales: ring.scales.offset(stage * scale_stage),
            };
            #[unroll]
            for half in 0u32..2 {
                // The products of the half before the last have read their left operands.
                wgmma_wait(1, &mut sums);
                decode_half(decode, now, &sides, &units, &mut left, first + turn, half, k);
                wgmma_fence(&mut sums);
                #[unroll]
                for i in 0u32..4 {
                    wgmma_bf16_held(&mut sums, left[half * 4 + i], now.x.offset(half * T.ROWS * 64 + i * 16));
                }
                wgmma_commit();
            }
            if !T.SCALED && turn + 1 < steps {
                load_sides(side, &mut sides, &units, first + turn + 1, k);
            }
        }
        stage = if stage + 1 == T.STAGES { 0 } else { stage + 1 };
        x_stage = x_next;
    }
    wgmma_wait(0, &mut sums);

    let mut fragments = regs(F32x4::ZERO, T.ROWS / 8);
    #[unroll]
    for n in 0u32..T.ROWS / 8 {
        fragments[n] = f32x4(sums[n * 4], sums[n * 4 + 1], sums[n * 4 + 2], sums[n * 4 + 3]);
    }
    let to = GemmOut::<O> { out, order: rows.order, first_row, end, outputs, by_stride };
    store_sums(epilogue, x, &fragments, to, first_output);
}
