//! The product by warpgroups on Hopper: the arithmetic of [`gemm`](super::warps::gemm).
//!
//! ```text
//! codes and scales ──► cp.async, by whoever decodes them ──► ring of STAGES steps ──► 16 bits in registers ─┐
//! rows of activations ──► bulk copies, by a warp of its own ──► ring of X_STAGES steps ──────────────────────┴─► wgmma
//! ```
//!
//! A warp has 16 rows of the matrix and a ring of its own for their codes, so that it waits for nobody. The tensor
//! cores read activations from shared memory by themselves, once for 64 rows of the matrix; mbarriers say that a step of them
//! is there, or no longer read. While one half of a step is multiplied, the next is decoded.
//!
//! `wgmma` and `mma` add up 16 products alike, whatever the number of columns, so the two kernels agree to the bit.

use gemma4c_dsl::prelude::*;

use super::decode::{decode_and_exchange, decode_block};
use super::sums::{GemmOut, store_sums};
use super::tile::{
    aim_own_rows, copied_place, copy_weights, first_step, load_sides, own_rows, read_place, row_words, staged,
    warp_ring,
};
use super::views::{GemmTile, GemmWeights};

/// Starts the products of the decoded blocks from `first` to `end` of a step. A collective of the warpgroup.
#[device]
pub fn multiply_blocks<const ROWS: u32, H: Float>(
    sums: &mut Regs<f32>,
    left: &Regs<u32>,
    x: Shared<H>,
    first: u32,
    end: u32,
) {
    wgmma_fence(sums);
    #[unroll]
    for product in first * 2..end * 2 {
        let at = product * 4;
        // Tiles have 64 values of K.
        let right = product / 4 * ROWS * 64 + product % 4 * 16;
        wgmma_b16_held(sums, u32x4(left[at], left[at + 1], left[at + 2], left[at + 3]), x, right);
    }
    wgmma_commit();
}

/// `out = x · Wᵀ` as in [`gemm`](super::warps::gemm), of a slice a block: the blocks of a cluster have the slices of a
/// tile. Sorted pairs are the other kernel's: nobody reads `order`.
#[kernel(block = T.ACROSS * 32 + 32, min_blocks = T.RESIDENT, dependent, dynamic_shared, cluster = T.SLICES, slots(
    side(unit: u32, more: u32) -> U32x4,
    decode(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4,
    change(four: F32x4, outputs: U32x2, rows: U32x2) -> F32x4,
    epilogue(value: f32, at: u32) -> f32
))]
pub fn gemm_warpgroups<const T: GemmTile, const GEGLU: bool, H: Float, O: Float>(
    weights: GemmWeights,
    x: Tiles<H>,
    k: u32,
    order: Input<u32>,
    rows: u32,
    out: Output<O>,
    outputs: u32,
    by_stride: u32,
) {
    require!(T.ROWS % 32 == 0 && T.ROWS <= 128 && T.ACROSS % 4 == 0 && T.ACROSS <= T.X_STAGES * 4);
    require!(T.PAIRS == 0 && T.HELD == 1 && T.STAGES >= 2 && T.X_STAGES >= 2 && T.UNIT >= 8 && (T.RAW || T.UNIT >= 16));
    // First activations, then the sums of slices.
    let x_ring = shared::<H>(T.X_STAGES * T.ROWS * 128);
    let codes = shared::<u32>(T.STAGES * T.ACROSS * 16 * row_words(T.UNIT));
    let scales = shared::<u32>(if T.SCALED { T.STAGES * T.ACROSS * 32 } else { 1 });
    let full = shared::<u64>(T.X_STAGES);
    let empty = shared::<u64>(T.X_STAGES);

    let slice = if T.SLICES > 1 { cluster_rank() } else { 0 };
    let first = first_step(slice, T.SLICES, k);
    let steps = first_step(slice + 1, T.SLICES, k) - first;
    let of_warp = if GEGLU { 8u32 } else { 16u32 };
    let first_output = block_idx_y() / T.SLICES * T.ACROSS * of_warp;
    let code_stage = T.ACROSS * 16 * row_words(T.UNIT);
    let scale_stage = if T.SCALED { T.ACROSS * 32 } else { 0 };
    let multiplies = warp_id() < T.ACROSS;
    let ring = warp_ring(codes, scales);
    let copied = copied_place(ring);
    let read = read_place(ring);

    grid_launch_dependents();
    let own_weights = own_rows(first_output + warp_id() * of_warp, 0, outputs);
    let mut aim = regs(0u32, 6);
    if multiplies {
        aim_own_rows(&mut aim, own_weights, first, k);
        #[unroll]
        for stage in 0u32..T.STAGES - 1 {
            copy_weights(weights, staged(copied, stage * code_stage, stage * scale_stage), &mut aim, stage < steps);
            cp_async_commit();
        }
    }
    if thread_idx() == 0 {
        #[unroll]
        for stage in 0u32..T.X_STAGES {
            mbarrier_init(full, stage, 1);
            mbarrier_init(empty, stage, T.ACROSS);
        }
        fence_proxy_async();
    }
    barrier();
    grid_dependency_wait();

    let first_row = block_idx() * T.ROWS;
    let mut x_stage = 0u32;
    let mut sums = regs(0.0f32, T.ROWS / 2);
    if multiplies {
        let mut sides = regs(U32x4::ZERO, if T.RAW { 1 } else { 2 * (32 / T.UNIT) });
        if !T.RAW {
            load_sides(side, &mut sides, own_weights, first, k);
        }
        let mut left = regs(0u32, 32);
        let mut stage = 0u32;
        let mut parity = 0u32;
        let mut last = T.X_STAGES;
        for step in 0u32..steps {
            cp_async_wait(T.STAGES - 2);
            warp_barrier();
            let ahead = step + T.STAGES - 1;
            let slot = if stage == 0 { T.STAGES - 1 } else { stage - 1 };
            copy_weights(weights, staged(copied, slot * code_stage, slot * scale_stage), &mut aim, ahead < steps);
            cp_async_commit();
            let now = staged(read, stage * code_stage, stage * scale_stage);
            let x_now = x_ring.offset(x_stage * T.ROWS * 128);
            if T.RAW {
                // The products of the half before the last have read their left operands.
                wgmma_wait(1, &mut sums);
                decode_block(decode, now, &mut left, 0);
                decode_block(decode, now, &mut left, 1);
                mbarrier_wait(full, x_stage, parity);
                multiply_blocks(&mut sums, &left, x_now, 0, 2);
                wgmma_wait(1, &mut sums);
                decode_block(decode, now, &mut left, 2);
                decode_block(decode, now, &mut left, 3);
            } else {
                wgmma_wait(0, &mut sums);
                decode_and_exchange(decode, now, &sides, own_weights, &mut left, first + step, k);
                mbarrier_wait(full, x_stage, parity);
            }
            // The products of the step before have read its activations.
            warp_barrier();
            if lane_id() == 0 && last < T.X_STAGES {
                mbarrier_arrive(empty, last);
            }
            multiply_blocks(&mut sums, &left, x_now, if T.RAW { 2 } else { 0 }, 4);
            if !T.RAW && step + 1 < steps {
                load_sides(side, &mut sides, own_weights, first + step + 1, k);
            }
            last = x_stage;
            stage = if stage + 1 == T.STAGES { 0 } else { stage + 1 };
            x_stage += 1;
            if x_stage == T.X_STAGES {
                x_stage = 0;
                parity = 1 - parity;
            }
        }
        wgmma_wait(0, &mut sums);
    } else if lane_id() == 0 {
        let mut parity = 1u32;
        for step in 0u32..steps {
            mbarrier_wait(empty, x_stage, parity);
            mbarrier_arrive_expect(full, x_stage, T.ROWS * 256);
            #[unroll]
            for i in 0u32..T.ROWS / 16 {
                let half = i / (T.ROWS / 32);
                let row = first_row + i % (T.ROWS / 32) * 32;
                let to = x_stage * T.ROWS * 128 + i * 2048;
                tile_load(x_ring, to, x, (first + step) * 128 + half * 64, row, full, x_stage);
            }
            x_stage += 1;
            if x_stage == T.X_STAGES {
                x_stage = 0;
                parity = 1 - parity;
            }
        }
    }

    let mut fragments = regs(F32x4::ZERO, T.ROWS / 8);
    #[unroll]
    for n in 0u32..T.ROWS / 8 {
        fragments[n] = f32x4(sums[n * 4], sums[n * 4 + 1], sums[n * 4 + 2], sums[n * 4 + 3]);
    }
    let to = GemmOut::<O> { out, order, first_row, end: rows, outputs, by_stride };
    store_sums(change, epilogue, x_ring, &fragments, to, first_output);
}
