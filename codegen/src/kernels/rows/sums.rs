//! The end of a tile of a tensor-core product: the sums of all classes of units meet in shared memory, and are added as the lanes of one row are.

use gemma4c_dsl::prelude::*;

/// Floats from a row of sums to the next: eight more than there are, so that the lanes of a half warp write to different banks.
#[device]
pub fn sums_stride<const COLUMNS: u32>() -> u32 {
    COLUMNS + 8
}

/// The sum of an output over all warps, in the order of `lanes_sum`, whose first levels are done.
#[device]
pub fn tree_sum<const WARPS: u32, const TILE: u32>(row: u32, column: u32, sums: Shared<f32>) -> f32 {
    let mut of = regs(0.0f32, WARPS);
    #[unroll]
    for w in 0..WARPS {
        of[w] = sums[(w * TILE + row) * sums_stride() + column];
    }
    let mut half = WARPS / 2;
    #[unroll]
    while half > 0 {
        #[unroll]
        for w in 0..WARPS / 2 {
            if w < half {
                of[w] = of[w] + of[w + half];
            }
        }
        half = half / 2;
    }
    of[0]
}

/// Leaves a warp's sums for the block, and starts them anew. The classes of a warp are WARPS apart, so they meet in the first levels of the tree.
#[device]
pub fn leave_sums<const CLASSES: u32, const WARPS: u32, const TILE: u32, const COLUMNS: u32>(
    totals: &mut Regs<f32>,
    sums: Shared<f32>,
) {
    let each = TILE.min(16) / 4;
    let tiles = COLUMNS / 8;
    // Sums of a class.
    let all = TILE.div_ceil(16) * tiles * each;
    #[unroll]
    for m in 0..TILE.div_ceil(16) {
        let row = warp_id() * TILE + m * 16 + lane_id() / 4;
        #[unroll]
        for n in 0..COLUMNS / 8 {
            let own = (m * tiles + n) * each;
            let mut meet = regs(0.0f32, 4);
            #[unroll]
            for e in 0..TILE.min(16) / 4 {
                let mut sum = totals[own + e];
                if CLASSES / WARPS == 2 {
                    sum = sum + totals[all + own + e];
                }
                if CLASSES / WARPS == 4 {
                    sum = sum + totals[2 * all + own + e] + (totals[all + own + e] + totals[3 * all + own + e]);
                }
                meet[e] = sum;
                #[unroll]
                for j in 0..CLASSES / WARPS {
                    totals[j * all + own + e] = 0.0;
                }
            }
            #[unroll]
            for half in 0..TILE.min(16) / 8 {
                let to = (row + half * 8) * sums_stride() + n * 8 + lane_id() % 4 * 2;
                store(sums, to, f32x2(meet[half * 2], meet[half * 2 + 1]));
            }
        }
    }
}
