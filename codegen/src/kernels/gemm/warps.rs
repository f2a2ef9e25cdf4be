//! The product by warps, each for itself, with `mma.m16n8k16`: on GPUs without `wgmma`, and of few sorted rows.

use gemma4c_dsl::prelude::*;

use super::decode::{decode_and_exchange, decode_block};
use super::sums::{GemmOut, store_sums};
use super::tile::{
    aim_own_rows, copied_place, copy_weights, first_step, load_sides, own_rows, read_place, row_words, staged,
    warp_ring,
};
use super::views::{GemmRing, GemmRows, GemmTile, GemmWeights};
use crate::kernels::attention::tensor::tensor_product;

/// Values from a row of a step in shared memory to the next: 16 bytes more than it has, so that eight rows lie in
/// different banks.
#[device]
pub fn row_stride() -> u32 {
    136
}

/// Fills the rows of all stages that the batch does not have with zeros, by the warps of a slice: nobody copies them.
#[device]
pub fn clear_absent_rows<const ROWS: u32, const ACROSS: u32, const STAGES: u32, H: Float>(
    ring: Shared<H>,
    stage_values: u32,
    present: u32,
) {
    let pieces = row_stride() / 8;
    for at in (present * pieces + thread_idx() % (ACROSS * 32)..ROWS * pieces).by(ACROSS * 32) {
        #[unroll]
        for stage in 0..STAGES {
            store(ring, stage * stage_values + at * 8, U32x4::ZERO);
        }
    }
}

/// Issues the copies of a step's activations, by the warps of its slice; zeros past the end of K.
#[device]
pub fn copy_activations_of_step<const WHOLE: bool, const ROWS: u32, const ACROSS: u32, const PAIRS: u32, H: Float>(
    ring: Shared<H>,
    rows: GemmRows<H>,
    first_row: u32,
    end: u32,
    step: u32,
    k: u32,
) {
    let threads = ACROSS * 32;
    let thread = thread_idx() % threads;
    #[unroll]
    for i in 0..(ROWS * 16 + threads - 1) / threads {
        let row = (thread + i * threads) / 16;
        let piece = (thread + i * threads) % 16;
        if row < ROWS && first_row + row < end {
            let to = row * row_stride() + piece * 8;
            let place = step * 16 + piece;
            if WHOLE || place < k / 8 {
                let mut from = first_row + row;
                if PAIRS > 0 {
                    from = rows.order[from] / PAIRS.max(1);
                }
                cp_async16(ring, to, rows.x, from * k + place * 8);
            } else {
                store(ring, to, U32x4::ZERO);
            }
        }
    }
}

/// Multiplies a step.
#[device(slots(decode(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4))]
pub fn multiply_step<
    const UNIT: u32,
    const BF: bool,
    const RAW: bool,
    const SCALED: bool,
    const WHOLE: bool,
    const ROWS: u32,
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
        #[unroll]
        for n in 0..ROWS / 8 {
            let row = n * 8 + lane_id() % 8;
            let right = ldmatrix_x4(x, row * row_stride() + block * 32 + lane_id() / 8 * 8);
            let first = u32x4(left[at], left[at + 1], left[at + 2], left[at + 3]);
            sums[n] = tensor_product(first, u32x2(right.x, right.y), sums[n]);
            let second = u32x4(left[at + 4], left[at + 5], left[at + 6], left[at + 7]);
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
    // So that sums fit where activations were.
    require!(T.ROWS % 8 == 0 && T.SLICES % T.HELD == 0 && T.STAGES >= 2 && T.ACROSS <= 8);
    require!(T.UNIT == 4 || T.UNIT == 8 || T.UNIT == 16 || T.UNIT == 32);
    require!(T.RAW || T.UNIT >= 16);
    // First activations, then the sums of slices.
    let x = shared::<H>(T.STAGES * T.HELD * T.ROWS * row_stride());
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

    // A stage of the whole block: activations of its slices, codes of its warps.
    let x_stage = T.HELD * T.ROWS * row_stride();
    let code_stage = T.HELD * T.ACROSS * 16 * row_words(T.UNIT);
    let scale_stage = if T.SCALED { T.HELD * T.ACROSS * 32 } else { 0 };
    let own_x = x.offset(own * T.ROWS * row_stride());
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

    clear_absent_rows(own_x, x_stage, end - first_row);
    #[unroll]
    for stage in 0u32..T.STAGES - 1 {
        let wanted = stage < steps;
        if T.PAIRS > 0 {
            copy_weights(weights, staged(copied, stage * code_stage, stage * scale_stage), &mut aim, wanted);
        }
        if wanted {
            copy_activations_of_step(own_x.offset(stage * x_stage), rows, first_row, end, first + stage, k);
        }
        cp_async_commit();
    }
    let mut sides = regs(U32x4::ZERO, if T.RAW { 1 } else { 2 * (32 / T.UNIT) });
    if !T.RAW {
        load_sides(side, &mut sides, own_weights, first, k);
    }
    let mut sums = regs(F32x4::ZERO, T.ROWS / 8);
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
        copy_weights(weights, staged(copied, slot * code_stage, slot * scale_stage), &mut aim, ahead < steps);
        if ahead < steps {
            copy_activations_of_step(own_x.offset(slot * x_stage), rows, first_row, end, first + ahead, k);
        }
        cp_async_commit();
        if turn < steps {
            let now = staged(read, stage * code_stage, stage * scale_stage);
            multiply_step(decode, now, own_x.offset(stage * x_stage), &sides, own_weights, first + turn, &mut sums, k);
            if !T.RAW && turn + 1 < steps {
                load_sides(side, &mut sides, own_weights, first + turn + 1, k);
            }
        }
        stage = if stage + 1 == T.STAGES { 0 } else { stage + 1 };
    }

    let to = GemmOut::<O> { out, order: rows.order, first_row, end, outputs, by_stride };
    store_sums(change, epilogue, x, &sums, to, first_output);
}
