//! Attention of all patches to all on tensor cores: a block takes 64 patches of one head, and passes over all patches once, 64 at a time, with an online softmax in f32.
//!
//! Queries, keys, values and weights are rounded to bf16, sums are f32. A head whose length is no multiple of 16 is filled up with zeros, which change no score. Patches
//! are read as f32 and rounded on their way to shared memory: several blocks share an SM, so that one of them multiplies while another reads.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

use crate::kernels::attention::flash::row_max;

/// Patches of a tile.
const TILE: u32 = 64;
/// The longest head that a warp sums in its registers.
const LONGEST_HEAD: u32 = 128;

/// Brings TILE patches of a head to shared memory, from patch `first` on: zeros beyond the last, and beyond the head's end. Rows are eight elements apart more
/// than they are long, so that the rows of a matrix load lie in different banks.
#[device]
pub fn round_patches<const D: u32, const PADDED: u32>(
    tile: Shared<BF16>,
    x: Input<f32>,
    first: u32,
    count: u32,
    width: u32,
    head: u32,
) {
    for i in (thread_idx() * 4..64 * PADDED).by(512) {
        let row = first + i / PADDED;
        let column = i % PADDED;
        let mut four = F32x4::ZERO;
        if row < count && column < D {
            four = load::<F32x4>(x, row * width + head * D + column);
        }
        store(tile, i / PADDED * (PADDED + 8) + column, u32x2(pack_bf16(four.x, four.y), pack_bf16(four.z, four.w)));
    }
}

/// `out = softmax(q · kᵀ) · v` over all patches. The grid is (heads, tiles of patches); PADDED is D, filled up.
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
    let head = block_idx();
    let first = block_idx_y() * 64;
    let width = grid_dim() * D;
    let count = grid[1u32];
    // The whole block leaves: there are no such patches.
    if first >= count {
        return;
    }
    round_patches(queries, q, first, count, width, head);

    // The warp's rows, and of these the lane's: `upper` and `upper + 8`.
    let lane = lane_id();
    let tile_row = warp_id() * 16;
    let mut upper_max = f32::NEG_INFINITY;
    let mut lower_max = f32::NEG_INFINITY;
    let mut upper_total = 0.0f32;
    let mut lower_total = 0.0f32;
    let mut sums = regs(F32x4::ZERO, PADDED / 8);
    for at in (0..count).by(64) {
        barrier();
        round_patches(keys, k, at, count, width, head);
        round_patches(values, v, at, count, width, head);
        barrier();
        let mut scores = regs(F32x4::ZERO, 8);
        #[unroll]
        for depth in (0..PADDED).by(16) {
            let a = ldmatrix_x4(queries, (tile_row + lane % 16) * (PADDED + 8) + depth + lane / 16 * 8);
            #[unroll]
            for n in 0u32..4 {
                let key = n * 16 + lane / 16 * 8 + lane % 8;
                let b = ldmatrix_x4(keys, key * (PADDED + 8) + depth + lane / 8 % 2 * 8);
                scores[2 * n] = mma_m16n8k16_bf16(a, u32x2(b.x, b.y), scores[2 * n]);
                scores[2 * n + 1] = mma_m16n8k16_bf16(a, u32x2(b.z, b.w), scores[2 * n + 1]);
            }
        }
        let mut upper_now = f32::NEG_INFINITY;
        let mut lower_now = f32::NEG_INFINITY;
        #[unroll]
        for n in 0u32..8 {
            let key = at + n * 8 + lane % 4 * 2;
            let mut seen = scores[n];
            if at + 64 > count {
                seen = f32x4(
                    if key < count { seen.x } else { f32::NEG_INFINITY },
                    if key + 1 < count { seen.y } else { f32::NEG_INFINITY },
                    if key < count { seen.z } else { f32::NEG_INFINITY },
                    if key + 1 < count { seen.w } else { f32::NEG_INFINITY },
                );
            }
            upper_now = upper_now.max(seen.x.max(seen.y));
            lower_now = lower_now.max(seen.z.max(seen.w));
            scores[n] = seen;
        }
        // Every tile has a patch, so there is a largest score.
        upper_now = row_max(upper_now, upper_max);
        lower_now = row_max(lower_now, lower_max);
        let upper_factor = exp_fast(upper_max - upper_now);
        let lower_factor = exp_fast(lower_max - lower_now);
        upper_max = upper_now;
        lower_max = lower_now;
        upper_total = upper_total * upper_factor;
        lower_total = lower_total * lower_factor;
        #[unroll]
        for n in 0u32..8 {
            let score = scores[n];
            let weight = f32x4(
                exp_fast(score.x - upper_now),
                exp_fast(score.y - upper_now),
                exp_fast(score.z - lower_now),
                exp_fast(score.w - lower_now),
            );
            upper_total = upper_total + (weight.x + weight.y);
            lower_total = lower_total + (weight.z + weight.w);
            scores[n] = weight;
        }
        #[unroll]
        for n in 0..PADDED / 8 {
            let sum = sums[n];
            sums[n] = f32x4(sum.x * upper_factor, sum.y * upper_factor, sum.z * lower_factor, sum.w * lower_factor);
        }
        #[unroll]
        for step in 0u32..4 {
            let near = scores[2 * step];
            let far = scores[2 * step + 1];
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
    upper_total = upper_total + shfl_xor(upper_total, 1);
    upper_total = upper_total + shfl_xor(upper_total, 2);
    lower_total = lower_total + shfl_xor(lower_total, 1);
    lower_total = lower_total + shfl_xor(lower_total, 2);
    let upper = first + tile_row + lane / 4;
    #[unroll]
    for n in 0..PADDED / 8 {
        let sum = sums[n];
        let column = n * 8 + lane % 4 * 2;
        let to = upper * width + head * D + column;
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
