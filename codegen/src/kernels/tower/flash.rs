//! Attention of all patches to all on tensor cores: a block takes 64 patches of one head, and passes over all patches
//! once, 64 at a time, with an online softmax in f32.
//!
//! Queries, keys, values and weights are rounded to bf16, sums are f32. A head whose length is no multiple of 16 is
//! padded with zeros, which change no score. Patches are read as f32 and rounded before they are stored to shared
//! memory: several blocks share an SM, so that one of them multiplies while another reads.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

use crate::kernels::attention::flash::row_max;

/// Patches of a tile.
const TILE: u32 = 64;
/// The longest head that a warp sums in its registers.
const LONGEST_HEAD: u32 = 128;

/// The online softmax of the two rows of scores that a lane of an accumulator has: row `lane / 4` of its warp's 16 is
/// `upper`, the eighth behind it `lower`. Totals are the lane's own; four lanes share a row.
#[registers]
pub struct PatchSoftmax {
    pub upper_max: f32,
    pub lower_max: f32,
    pub upper_total: f32,
    pub lower_total: f32,
}

/// The sum over the four lanes that share a row.
#[device]
pub fn quad_sum(value: f32) -> f32 {
    let pair = value + shfl_xor(value, 1);
    pair + shfl_xor(pair, 2)
}

/// Brings TILE patches of the block's head to shared memory, from patch `first` on: zeros beyond the last, and beyond
/// the head's end. Rows are padded by eight elements, so that the rows of an `ldmatrix` are in different banks.
#[device]
pub fn round_patches<const D: u32, const PADDED: u32>(tile: Shared<BF16>, x: Input<f32>, first: u32, count: u32) {
    let width = grid_dim() * D;
    for i in (thread_idx() * 4..64 * PADDED).by(512) {
        let row = first + i / PADDED;
        let column = i % PADDED;
        let mut four = F32x4::ZERO;
        if row < count && column < D {
            four = load::<F32x4>(x, row * width + block_idx() * D + column);
        }
        store(tile, i / PADDED * (PADDED + 8) + column, u32x2(pack_bf16(four.x, four.y), pack_bf16(four.z, four.w)));
    }
}

/// The scores of a warp's 16 queries and a tile of 64 keys. A collective of the warp.
#[device]
pub fn score_patches<const PADDED: u32>(scores: &mut Regs<F32x4>, queries: Shared<BF16>, keys: Shared<BF16>) {
    let lane = lane_id();
    #[unroll]
    for depth in (0..PADDED).by(16) {
        let a = ldmatrix_x4(queries, (warp_id() * 16 + lane % 16) * (PADDED + 8) + depth + lane / 16 * 8);
        #[unroll]
        for n in 0u32..4 {
            let key = n * 16 + lane / 16 * 8 + lane % 8;
            let b = ldmatrix_x4(keys, key * (PADDED + 8) + depth + lane / 8 % 2 * 8);
            scores[2 * n] = mma_m16n8k16_bf16(a, u32x2(b.x, b.y), scores[2 * n]);
            scores[2 * n + 1] = mma_m16n8k16_bf16(a, u32x2(b.z, b.w), scores[2 * n + 1]);
        }
    }
}

/// Turns the scores of the tile that starts at patch `first` into weights, the patches from `count` on hidden. The
/// result is what earlier sums are multiplied by: x of the upper row, y of the lower.
#[device]
pub fn weigh_patches(softmax: &mut PatchSoftmax, scores: &mut Regs<F32x4>, first: u32, count: u32) -> F32x2 {
    let mut upper = f32::NEG_INFINITY;
    let mut lower = f32::NEG_INFINITY;
    #[unroll]
    for n in 0u32..8 {
        let key = first + n * 8 + lane_id() % 4 * 2;
        let mut seen = scores[n];
        if first + 64 > count {
            seen = f32x4(
                if key < count { seen.x } else { f32::NEG_INFINITY },
                if key + 1 < count { seen.y } else { f32::NEG_INFINITY },
                if key < count { seen.z } else { f32::NEG_INFINITY },
                if key + 1 < count { seen.w } else { f32::NEG_INFINITY },
            );
        }
        upper = upper.max(seen.x.max(seen.y));
        lower = lower.max(seen.z.max(seen.w));
        scores[n] = seen;
    }
    // Every tile has a patch in use, so there is a largest score.
    upper = row_max(upper, softmax.upper_max);
    lower = row_max(lower, softmax.lower_max);
    let factors = f32x2(exp_fast(softmax.upper_max - upper), exp_fast(softmax.lower_max - lower));
    softmax.upper_max = upper;
    softmax.lower_max = lower;
    softmax.upper_total = softmax.upper_total * factors.x;
    softmax.lower_total = softmax.lower_total * factors.y;
    #[unroll]
    for n in 0u32..8 {
        let score = scores[n];
        let weight = f32x4(
            exp_fast(score.x - upper),
            exp_fast(score.y - upper),
            exp_fast(score.z - lower),
            exp_fast(score.w - lower),
        );
        softmax.upper_total = softmax.upper_total + (weight.x + weight.y);
        softmax.lower_total = softmax.lower_total + (weight.z + weight.w);
        scores[n] = weight;
    }
    factors
}

/// `sums = sums * factors + weights · values` of a tile. A collective of the warp.
#[device]
pub fn sum_patches<const PADDED: u32>(
    sums: &mut Regs<F32x4>,
    weights: &Regs<F32x4>,
    factors: F32x2,
    values: Shared<BF16>,
) {
    let lane = lane_id();
    #[unroll]
    for n in 0..PADDED / 8 {
        let sum = sums[n];
        sums[n] = f32x4(sum.x * factors.x, sum.y * factors.x, sum.z * factors.y, sum.w * factors.y);
    }
    #[unroll]
    for step in 0u32..4 {
        let near = weights[2 * step];
        let far = weights[2 * step + 1];
        let a = u32x4(
            pack_bf16(near.x, near.y),
            pack_bf16(near.z, near.w),
            pack_bf16(far.x, far.y),
            pack_bf16(far.z, far.w),
        );
        let key = step * 16 + lane % 16;
        #[unroll]
        for n in 0..PADDED / 16 {
            let b = ldmatrix_x4_trans(values, key * (PADDED + 8) + n * 16 + lane / 16 * 8);
            sums[2 * n] = mma_m16n8k16_bf16(a, u32x2(b.x, b.y), sums[2 * n]);
            sums[2 * n + 1] = mma_m16n8k16_bf16(a, u32x2(b.z, b.w), sums[2 * n + 1]);
        }
    }
}

/// `out = softmax(q · kᵀ) · v` over all patches. The grid is (heads, tiles of patches); PADDED is D up to a multiple of
/// 16.
#[kernel(block = 128)]
pub fn attention_patches<const D: u32, const PADDED: u32>(
    q: Input<f32>,
    k: Input<f32>,
    v: Input<f32>,
    grid: Input<u32>,
    out: Output<f32>,
) {
    require!(D % 4 == 0 && PADDED % 16 == 0 && PADDED >= D && PADDED <= 128);
    let queries = shared::<BF16>(64 * (PADDED + 8));
    let keys = shared::<BF16>(64 * (PADDED + 8));
    let values = shared::<BF16>(64 * (PADDED + 8));
    let first = block_idx_y() * 64;
    let count = grid[1u32];
    // The whole block returns: none of its patches is in use.
    if first >= count {
        return;
    }
    round_patches(queries, q, first, count);

    let mut softmax =
        PatchSoftmax { upper_max: f32::NEG_INFINITY, lower_max: f32::NEG_INFINITY, upper_total: 0.0, lower_total: 0.0 };
    let mut sums = regs(F32x4::ZERO, PADDED / 8);
    for at in (0..count).by(64) {
        barrier();
        round_patches(keys, k, at, count);
        round_patches(values, v, at, count);
        barrier();
        let mut scores = regs(F32x4::ZERO, 8);
        score_patches(&mut scores, queries, keys);
        let factors = weigh_patches(&mut softmax, &mut scores, at, count);
        sum_patches(&mut sums, &scores, factors, values);
    }

    let upper_total = quad_sum(softmax.upper_total);
    let lower_total = quad_sum(softmax.lower_total);
    let width = grid_dim() * D;
    let lane = lane_id();
    let upper = first + warp_id() * 16 + lane / 4;
    #[unroll]
    for n in 0..PADDED / 8 {
        let sum = sums[n];
        let column = n * 8 + lane % 4 * 2;
        let to = upper * width + block_idx() * D + column;
        if upper < count && column < D {
            store(out, to, f32x2(sum.x / upper_total, sum.y / upper_total));
        }
        if upper + 8 < count && column < D {
            store(out, to + 8 * width, f32x2(sum.z / lower_total, sum.w / lower_total));
        }
    }
}

/// An [`attention_patches`] of heads of `dim` values; `None` for heads that it does not take.
pub fn instance(dim: u32) -> Result<Option<Instance>, InstanceError> {
    if !dim.is_multiple_of(4) || dim > LONGEST_HEAD {
        return Ok(None);
    }
    attention_patches::Chosen { D: dim, PADDED: dim.next_multiple_of(16) }.build().map(Some)
}

/// Blocks for so many patches.
pub fn grid(heads: u32, patches: u32) -> [u32; 3] {
    [heads, patches.div_ceil(TILE), 1]
}
