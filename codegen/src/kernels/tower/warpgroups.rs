//! Attention of all patches to all by warpgroups, on Hopper: a warpgroup takes 64 patches of a head and passes over all patches once, 128 at a time, with an online
//! softmax in f32.
//!
//! ```text
//! tiles of keys and values ──► bulk copies, by one warp ──► ring of STAGES ──► wgmma: scores ──► powers of two in registers ──► wgmma: sums
//! ```
//!
//! [`heads`](super::heads) has left the tiles as wgmma reads them, so a stage is two bulk copies. Several warpgroups share a block's stages and run by themselves: while one takes
//! powers, another one's products are made. What is left of a weight after rounding to bf16 is what it is multiplied and summed with.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{DeviceDef, Instance, InstanceError};

use super::heads::HeadTiles;
use crate::arch::Arch;
use crate::kernels::attention::flash::row_max;

/// `out = softmax(q · kᵀ) · v` over all patches. The grid is (heads, tiles of 64 * WARPGROUPS patches); `blocks` are the 128s of patches that there is room for.
#[kernel(block = WARPGROUPS * 128 + 32, min_blocks = 1, dynamic_shared, slots(epilogue(value: f32, at: u32) -> f32))]
pub fn patch_attention<
    const D: u32,
    const PADDED: u32,
    const TILES: u32,
    const VALUES: u32,
    const WARPGROUPS: u32,
    const STAGES: u32,
>(
    q: Input<BF16>,
    k: Input<BF16>,
    v: Input<BF16>,
    grid: Input<u32>,
    out: Output<BF16>,
    blocks: u32,
) {
    require!(D % 8 == 0 && PADDED % 16 == 0 && PADDED <= TILES * 64 && VALUES % 32 == 0 && VALUES <= 128);
    let queries = shared::<BF16>(WARPGROUPS * TILES * 4096);
    let keys = shared::<BF16>(STAGES * TILES * 8192);
    let values = shared::<BF16>(STAGES * VALUES * 128);
    let full = shared::<u64>(STAGES);
    let empty = shared::<u64>(STAGES);
    let arrived = shared::<u64>(1);
    let head = block_idx();
    let first = block_idx_y() * WARPGROUPS * 64;
    let count = grid[1u32];
    // The whole block leaves: there are no such patches.
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
    let seen = count.div_ceil(128);

    if warp_id() == WARPGROUPS * 4 {
        if lane_id() == 0 {
            mbarrier_arrive_expect(arrived, 0u32, WARPGROUPS * TILES * 8192);
            for group in 0..WARPGROUPS {
                // There is room for whole 128s; a warpgroup beyond stores nothing.
                let row = (first + group * 64).min(blocks * 128 - 64);
                for tile in 0..TILES {
                    let from = ((head * blocks + row / 128) * TILES + tile) as u64 * 8192 + (row % 128 * 64) as u64;
                    bulk_load(queries, (group * TILES + tile) * 4096, q, from, 4096, arrived, 0u32);
                }
            }
            let mut stage = 0u32;
            let mut parity = 1u32;
            for block in 0..seen {
                mbarrier_wait(empty, stage, parity);
                mbarrier_arrive_expect(full, stage, TILES * 16384 + VALUES * 256);
                let at = (head * blocks + block) as u64;
                let of_keys = TILES * 8192;
                bulk_load(keys, stage * of_keys, k, at * of_keys as u64, of_keys, full, stage);
                let of_values = VALUES * 128;
                bulk_load(values, stage * of_values, v, at * of_values as u64, of_values, full, stage);
                stage += 1;
                if stage == STAGES {
                    stage = 0;
                    parity = 1 - parity;
                }
            }
        }
        return;
    }

    let lane = lane_id();
    let own = queries.offset(warp_id() / 4 * TILES * 4096);
    let mut upper_max = f32::NEG_INFINITY;
    let mut lower_max = f32::NEG_INFINITY;
    let mut upper_total = 0.0f32;
    let mut lower_total = 0.0f32;
    let mut sums = regs(0.0f32, VALUES / 2);
    let mut scores = regs(0.0f32, 64);
    let mut stage = 0u32;
    let mut parity = 0u32;
    mbarrier_wait(arrived, 0u32, 0);
    for block in 0..seen {
        #[unroll]
        for i in 0u32..64 {
            scores[i] = 0.0;
        }
        mbarrier_wait(full, stage, parity);
        let k_tile = keys.offset(stage * TILES * 8192);
        wgmma_fence(&mut scores);
        #[unroll]
        for step in 0..PADDED / 16 {
            let q_step = own.offset(step / 4 * 4096 + step % 4 * 16);
            wgmma_bf16(&mut scores, q_step, k_tile.offset(step / 4 * 8192 + step % 4 * 16));
        }
        wgmma_commit();
        wgmma_wait(0, &mut scores);

        if block * 128 + 128 > count {
            #[unroll]
            for i in (0u32..64).by(4) {
                let key = block * 128 + i * 2 + lane % 4 * 2;
                if key >= count {
                    scores[i] = f32::NEG_INFINITY;
                    scores[i + 2] = f32::NEG_INFINITY;
                }
                if key + 1 >= count {
                    scores[i + 1] = f32::NEG_INFINITY;
                    scores[i + 3] = f32::NEG_INFINITY;
                }
            }
        }
        let mut upper_now = f32::NEG_INFINITY;
        let mut lower_now = f32::NEG_INFINITY;
        #[unroll]
        for i in (0u32..64).by(4) {
            upper_now = upper_now.max(scores[i].max(scores[i + 1]));
            lower_now = lower_now.max(scores[i + 2].max(scores[i + 3]));
        }
        // Every tile has a patch, so there is a largest score.
        upper_now = row_max(upper_now, upper_max);
        lower_now = row_max(lower_now, lower_max);
        let upper_factor = exp2_fast(upper_max - upper_now);
        let lower_factor = exp2_fast(lower_max - lower_now);
        upper_max = upper_now;
        lower_max = lower_now;
        upper_total = upper_total * upper_factor;
        lower_total = lower_total * lower_factor;
        #[unroll]
        for i in (0u32..64).by(4) {
            scores[i] = exp2_fast(scores[i] - upper_now);
            scores[i + 1] = exp2_fast(scores[i + 1] - upper_now);
            scores[i + 2] = exp2_fast(scores[i + 2] - lower_now);
            scores[i + 3] = exp2_fast(scores[i + 3] - lower_now);
            upper_total = upper_total + (scores[i] + scores[i + 1]);
            lower_total = lower_total + (scores[i + 2] + scores[i + 3]);
        }
        #[unroll]
        for i in (0..VALUES / 2).by(4) {
            sums[i] = sums[i] * upper_factor;
            sums[i + 1] = sums[i + 1] * upper_factor;
            sums[i + 2] = sums[i + 2] * lower_factor;
            sums[i + 3] = sums[i + 3] * lower_factor;
        }
        let v_tile = values.offset(stage * VALUES * 128);
        wgmma_fence(&mut sums);
        #[unroll]
        for step in 0u32..8 {
            let weights = u32x4(
                pack_bf16(scores[step * 8], scores[step * 8 + 1]),
                pack_bf16(scores[step * 8 + 2], scores[step * 8 + 3]),
                pack_bf16(scores[step * 8 + 4], scores[step * 8 + 5]),
                pack_bf16(scores[step * 8 + 6], scores[step * 8 + 7]),
            );
            wgmma_bf16_held(&mut sums, weights, v_tile.offset(step / 4 * VALUES * 64 + step % 4 * 16));
        }
        wgmma_commit();
        wgmma_wait(0, &mut sums);
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
    upper_total = upper_total + shfl_xor(upper_total, 1);
    upper_total = upper_total + shfl_xor(upper_total, 2);
    lower_total = lower_total + shfl_xor(lower_total, 1);
    lower_total = lower_total + shfl_xor(lower_total, 2);
    let width = grid_dim() * D;
    let upper = first + warp_id() * 16 + lane / 4;
    #[unroll]
    for i in (0..VALUES / 2).by(4) {
        let column = i * 2 + lane % 4 * 2;
        let at = upper * width + head * D + column;
        if upper < count && column < D {
            let left = epilogue(sums[i] / upper_total, at);
            store(out, at, pack_bf16(left, epilogue(sums[i + 1] / upper_total, at + 1)));
        }
        if upper + 8 < count && column < D {
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

    /// Stages in the ring: as many as there is room for, and no more than help.
    fn stages(&self) -> u32 {
        let of_stage = self.tiles.tiles() * 16384 + self.tiles.values() * 256;
        let of_queries = self.warpgroups * self.tiles.tiles() * 8192;
        ((Arch::Sm90a.max_shared_bytes_per_block() - of_queries - 2048) / of_stage).min(4)
    }

    /// The kernel, with what is done to each value of its result.
    pub fn instance(&self, epilogue: Vec<&'static DeviceDef>) -> Result<Instance, InstanceError> {
        patch_attention::Chosen {
            D: self.tiles.dim,
            PADDED: self.tiles.padded(),
            TILES: self.tiles.tiles(),
            VALUES: self.tiles.values(),
            WARPGROUPS: self.warpgroups,
            STAGES: self.stages(),
            epilogue,
        }
        .build()
    }

    /// Its grid.
    pub fn grid(&self, heads: u32, patches: u32) -> [u32; 3] {
        [heads, patches.div_ceil(64 * self.warpgroups), 1]
    }
}
