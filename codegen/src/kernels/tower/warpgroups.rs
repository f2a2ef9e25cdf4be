//! Attention of all patches to all by warpgroups, on Hopper: a warpgroup takes 64 patches of a head and passes over all
//! patches once, 128 at a time, with an online softmax in f32.
//!
//! ```text
//! tiles of keys and values ─► bulk copies by one warp ─► ring of STAGES ─► wgmma: scores ─► powers of two ─► wgmma: sums
//! ```
//!
//! [`heads`](super::heads) has written the tiles as wgmma reads them, so a stage is two bulk copies. The warpgroups of
//! a block share its stages and are not synchronised with each other: while one takes powers, the products of another
//! are in flight. A row's weights are summed as f32, before they are rounded to bf16 for their product.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{DeviceDef, Instance, InstanceError};

use super::flash::{PatchSoftmax, quad_sum};
use super::heads::{HeadTiles, PatchTiling};
use crate::arch::Arch;
use crate::kernels::attention::flash::row_max;

/// The tiles of all heads, `blocks` 128s of patches each.
#[view]
pub struct PatchTiles {
    q: Input<BF16>,
    k: Input<BF16>,
    v: Input<BF16>,
    blocks: u32,
}

/// A block's shared memory: the queries of its warpgroups, and a ring of STAGES tiles of keys and of values with two
/// barriers each. `arrived` is the queries' barrier.
#[view]
pub struct PatchRing {
    queries: Shared<BF16>,
    keys: Shared<BF16>,
    values: Shared<BF16>,
    full: Shared<u64>,
    empty: Shared<u64>,
    arrived: Shared<u64>,
}

/// The producer, one thread: copies the queries of the block's patches, from patch `first` on, then the `steps` tiles
/// of keys and values.
#[device]
pub fn copy_patch_tiles<const T: PatchTiling, const WARPGROUPS: u32, const STAGES: u32>(
    ring: PatchRing,
    tiles: PatchTiles,
    first: u32,
    steps: u32,
) {
    let of_head = block_idx() * tiles.blocks;
    mbarrier_arrive_expect(ring.arrived, 0u32, WARPGROUPS * T.TILES * 8192);
    for group in 0..WARPGROUPS {
        // Tiles are whole 128s of patches; a warpgroup beyond the last stores nothing.
        let row = (first + group * 64).min(tiles.blocks * 128 - 64);
        for tile in 0u32..T.TILES {
            let from = ((of_head + row / 128) * T.TILES + tile) as u64 * 8192 + (row % 128 * 64) as u64;
            bulk_load(ring.queries, (group * T.TILES + tile) * 4096, tiles.q, from, 4096, ring.arrived, 0u32);
        }
    }
    let mut stage = 0u32;
    let mut parity = 1u32;
    for step in 0..steps {
        mbarrier_wait(ring.empty, stage, parity);
        mbarrier_arrive_expect(ring.full, stage, T.TILES * 16384 + T.VALUES * 256);
        let at = (of_head + step) as u64;
        let of_keys = T.TILES * 8192;
        bulk_load(ring.keys, stage * of_keys, tiles.k, at * of_keys as u64, of_keys, ring.full, stage);
        let of_values = T.VALUES * 128;
        bulk_load(ring.values, stage * of_values, tiles.v, at * of_values as u64, of_values, ring.full, stage);
        stage += 1;
        if stage == STAGES {
            stage = 0;
            parity = 1 - parity;
        }
    }
}

/// The scores of a warpgroup's 64 queries and a tile of 128 keys. A collective of the warpgroup.
#[device]
pub fn score_patch_tile<const PADDED: u32>(scores: &mut Regs<f32>, queries: Shared<BF16>, keys: Shared<BF16>) {
    #[unroll]
    for i in 0u32..64 {
        scores[i] = 0.0;
    }
    wgmma_fence(scores);
    #[unroll]
    for step in 0..PADDED / 16 {
        let q_step = queries.offset(step / 4 * 4096 + step % 4 * 16);
        wgmma_bf16(scores, q_step, keys.offset(step / 4 * 8192 + step % 4 * 16));
    }
    wgmma_commit();
    wgmma_wait(0, scores);
}

/// Hides the keys of a tile that are not in use: the tile has `left` of them.
#[device]
pub fn hide_unused_patches(scores: &mut Regs<f32>, left: u32) {
    #[unroll]
    for i in (0u32..64).by(4) {
        let key = i * 2 + lane_id() % 4 * 2;
        if key >= left {
            scores[i] = f32::NEG_INFINITY;
            scores[i + 2] = f32::NEG_INFINITY;
        }
        if key + 1 >= left {
            scores[i + 1] = f32::NEG_INFINITY;
            scores[i + 3] = f32::NEG_INFINITY;
        }
    }
}

/// Turns the scores of a tile into weights, powers of two less the largest score so far. The result is what earlier
/// sums are multiplied by: x of the upper row, y of the lower.
#[device]
pub fn weigh_patch_tile(softmax: &mut PatchSoftmax, scores: &mut Regs<f32>) -> F32x2 {
    let mut upper = f32::NEG_INFINITY;
    let mut lower = f32::NEG_INFINITY;
    #[unroll]
    for i in (0u32..64).by(4) {
        upper = upper.max(scores[i].max(scores[i + 1]));
        lower = lower.max(scores[i + 2].max(scores[i + 3]));
    }
    // Every tile has a patch in use, so there is a largest score.
    upper = row_max(upper, softmax.upper_max);
    lower = row_max(lower, softmax.lower_max);
    let factors = f32x2(exp2_fast(softmax.upper_max - upper), exp2_fast(softmax.lower_max - lower));
    softmax.upper_max = upper;
    softmax.lower_max = lower;
    softmax.upper_total = softmax.upper_total * factors.x;
    softmax.lower_total = softmax.lower_total * factors.y;
    #[unroll]
    for i in (0u32..64).by(4) {
        scores[i] = exp2_fast(scores[i] - upper);
        scores[i + 1] = exp2_fast(scores[i + 1] - upper);
        scores[i + 2] = exp2_fast(scores[i + 2] - lower);
        scores[i + 3] = exp2_fast(scores[i + 3] - lower);
        softmax.upper_total = softmax.upper_total + (scores[i] + scores[i + 1]);
        softmax.lower_total = softmax.lower_total + (scores[i + 2] + scores[i + 3]);
    }
    factors
}

/// `sums = sums * factors + weights · values` of a tile. A collective of the warpgroup.
#[device]
pub fn add_patch_values<const VALUES: u32>(
    sums: &mut Regs<f32>,
    weights: &Regs<f32>,
    factors: F32x2,
    values: Shared<BF16>,
) {
    #[unroll]
    for i in (0..VALUES / 2).by(4) {
        sums[i] = sums[i] * factors.x;
        sums[i + 1] = sums[i + 1] * factors.x;
        sums[i + 2] = sums[i + 2] * factors.y;
        sums[i + 3] = sums[i + 3] * factors.y;
    }
    wgmma_fence(sums);
    #[unroll]
    for step in 0u32..8 {
        let fragment = u32x4(
            pack_bf16(weights[step * 8], weights[step * 8 + 1]),
            pack_bf16(weights[step * 8 + 2], weights[step * 8 + 3]),
            pack_bf16(weights[step * 8 + 4], weights[step * 8 + 5]),
            pack_bf16(weights[step * 8 + 6], weights[step * 8 + 7]),
        );
        wgmma_b16_held(sums, fragment, values, step / 4 * VALUES * 64 + step % 4 * 16);
    }
    wgmma_commit();
    wgmma_wait(0, sums);
}

/// `out = softmax(q · kᵀ) · v` over all patches. The grid is (heads, tiles of 64 * WARPGROUPS patches).
#[kernel(block = WARPGROUPS * 128 + 32, min_blocks = 1, dynamic_shared, slots(epilogue(value: f32, at: u32) -> f32))]
pub fn patch_attention<const T: PatchTiling, const WARPGROUPS: u32, const STAGES: u32>(
    tiles: PatchTiles,
    grid: Input<u32>,
    out: Output<BF16>,
) {
    require!(T.D % 8 == 0 && T.PADDED % 16 == 0 && T.PADDED <= T.TILES * 64 && T.VALUES % 32 == 0 && T.VALUES <= 128);
    let queries = shared::<BF16>(WARPGROUPS * T.TILES * 4096);
    let keys = shared::<BF16>(STAGES * T.TILES * 8192);
    let values = shared::<BF16>(STAGES * T.VALUES * 128);
    let full = shared::<u64>(STAGES);
    let empty = shared::<u64>(STAGES);
    let arrived = shared::<u64>(1);
    let first = block_idx_y() * WARPGROUPS * 64;
    let count = grid[1u32];
    // The whole block returns: none of its patches is in use.
    if first >= count {
        return;
    }
    if thread_idx() == 0 {
        for stage in 0..STAGES {
            mbarrier_init(full, stage, 1);
            mbarrier_init(empty, stage, WARPGROUPS * 4);
        }
        mbarrier_init(arrived, 0u32, 1);
        fence_proxy_async();
    }
    barrier();
    let steps = count.div_ceil(128);

    if warp_id() == WARPGROUPS * 4 {
        if lane_id() == 0 {
            copy_patch_tiles(PatchRing { queries, keys, values, full, empty, arrived }, tiles, first, steps);
        }
        return;
    }

    let lane = lane_id();
    let group_queries = queries.offset(warp_id() / 4 * T.TILES * 4096);
    let mut softmax =
        PatchSoftmax { upper_max: f32::NEG_INFINITY, lower_max: f32::NEG_INFINITY, upper_total: 0.0, lower_total: 0.0 };
    let mut sums = regs(0.0f32, T.VALUES / 2);
    let mut scores = regs(0.0f32, 64);
    let mut stage = 0u32;
    let mut parity = 0u32;
    mbarrier_wait(arrived, 0u32, 0);
    for step in 0..steps {
        mbarrier_wait(full, stage, parity);
        score_patch_tile(&mut scores, group_queries, keys.offset(stage * T.TILES * 8192));
        if step * 128 + 128 > count {
            hide_unused_patches(&mut scores, count - step * 128);
        }
        let factors = weigh_patch_tile(&mut softmax, &mut scores);
        add_patch_values(&mut sums, &scores, factors, values.offset(stage * T.VALUES * 128));
        warp_barrier();
        if lane == 0 {
            mbarrier_arrive(empty, stage);
        }
        stage += 1;
        if stage == STAGES {
            stage = 0;
            parity = 1 - parity;
        }
    }

    let upper_total = quad_sum(softmax.upper_total);
    let lower_total = quad_sum(softmax.lower_total);
    let width = grid_dim() * T.D;
    let upper = first + warp_id() * 16 + lane / 4;
    #[unroll]
    for i in (0u32..T.VALUES / 2).by(4) {
        let column = i * 2 + lane % 4 * 2;
        let at = upper * width + block_idx() * T.D + column;
        if upper < count && column < T.D {
            let left = epilogue(sums[i] / upper_total, at);
            store(out, at, pack_bf16(left, epilogue(sums[i + 1] / upper_total, at + 1)));
        }
        if upper + 8 < count && column < T.D {
            let below = at + 8 * width;
            let left = epilogue(sums[i + 2] / lower_total, below);
            store(out, below, pack_bf16(left, epilogue(sums[i + 3] / lower_total, below + 1)));
        }
    }
}

/// Attention of so many patches by warpgroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PatchAttention {
    pub tiles: HeadTiles,
    pub warpgroups: u32,
}

impl PatchAttention {
    /// The warpgroups of a block whose waves over the SMs take the fewest passes: three hide each other's softmax best.
    pub fn choose(tiles: HeadTiles, heads: u32, patches: u32, multiprocessors: u32) -> PatchAttention {
        let waves = |warpgroups: &u32| {
            let each = (heads * patches.div_ceil(64 * warpgroups)).div_ceil(multiprocessors);
            u64::from(each) * u64::from(*warpgroups)
        };
        // Of longer heads the sums of three do not fit the registers.
        let most = if tiles.values() <= 64 { 3u32 } else { 2 };
        let warpgroups = (2..=most).rev().min_by_key(waves).unwrap_or(2);
        PatchAttention { tiles, warpgroups }
    }

    /// Stages of the ring: as many as shared memory holds, and no more than help.
    fn stages(&self) -> u32 {
        let of_stage = self.tiles.tiles() * 16384 + self.tiles.values() * 256;
        let of_queries = self.warpgroups * self.tiles.tiles() * 8192;
        ((Arch::Sm90a.max_shared_bytes_per_block() - of_queries - 2048) / of_stage).min(4)
    }

    /// The kernel, with what is done to each value of its result.
    pub fn instance(&self, epilogue: Vec<&'static DeviceDef>) -> Result<Instance, InstanceError> {
        let (tiling, stages) = (self.tiles.tiling(), self.stages());
        patch_attention::Chosen { T: tiling, WARPGROUPS: self.warpgroups, STAGES: stages, epilogue }.build()
    }

    /// Its grid.
    pub fn grid(&self, heads: u32, patches: u32) -> [u32; 3] {
        [heads, patches.div_ceil(64 * self.warpgroups), 1]
    }
}
