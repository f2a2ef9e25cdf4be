//! The end of a tile of a tensor-core product: the sums of all classes of units meet in shared memory, and are added as the lanes of one row are.

use gemma4c_dsl::prelude::*;

/// The sum of an output's classes in the order of `lanes_sum`, whose first level is done: class c and c + LANES / 2 are one here.
#[device]
pub fn tree_sum<const LANES: u32, const TILE: u32, const COLUMNS: u32>(
    row: u32,
    column: u32,
    sums: Shared<f32>,
) -> f32 {
    let mut of = regs(0.0f32, 16);
    #[unroll]
    for c in 0..LANES / 2 {
        of[c] = sums[(c * TILE.min(16) + row) * COLUMNS + column];
    }
    if LANES == 32 {
        #[unroll]
        for c in 0u32..8 {
            of[c] = of[c] + of[c + 8];
        }
    }
    if LANES >= 16 {
        #[unroll]
        for c in 0u32..4 {
            of[c] = of[c] + of[c + 4];
        }
    }
    #[unroll]
    for c in 0u32..2 {
        of[c] = of[c] + of[c + 2];
    }
    of[0] + of[1]
}

/// Leaves a warp's sums of 16 rows for the block, the first level of the tree done, and starts them anew.
#[device]
pub fn leave_sums<const TILE: u32, const COLUMNS: u32>(m: u32, totals: &mut Regs<f32>, sums: Shared<f32>) {
    let each = TILE.min(16) / 4;
    let tiles = COLUMNS / 8;
    let row = lane_id() / 4;
    #[unroll]
    for i in 0u32..2 {
        let class = warp_id() * 2 + i;
        #[unroll]
        for n in 0..COLUMNS / 8 {
            let own = ((i * TILE.div_ceil(16) + m) * tiles + n) * each;
            let other = (((i + 2) * TILE.div_ceil(16) + m) * tiles + n) * each;
            #[unroll]
            for half in 0..TILE.min(16) / 8 {
                let to = (class * TILE.min(16) + row + half * 8) * COLUMNS + n * 8 + lane_id() % 4 * 2;
                let low = totals[own + half * 2] + totals[other + half * 2];
                let high = totals[own + half * 2 + 1] + totals[other + half * 2 + 1];
                store(sums, to, f32x2(low, high));
            }
            #[unroll]
            for e in 0..TILE.min(16) / 4 {
                totals[own + e] = 0.0;
                totals[other + e] = 0.0;
            }
        }
    }
}
