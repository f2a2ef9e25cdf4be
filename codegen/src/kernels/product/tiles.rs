//! The matrix product of prefill on Hopper over bf16 weights, where tiles are many: bulk copies bring both operands, and two warpgroups do nothing but multiply.
//!
//! ```text
//! rows of activations ─┐
//! rows of weights ─────┴─► bulk copies, by one thread ──► ring of steps ──► wgmma, 64 rows to a warpgroup
//! ```
//!
//! One thread asks for the tiles of a step, which come swizzled as wgmma reads them; mbarriers say that a stage of the ring is full or empty, so that no barrier holds everybody up.
//! While results are stored, the next tile's operands come.
//!
//! The order of sums along K is that of [`product_wgmma`](super::wgmma::product_wgmma), and so are the bits. That one is for few rows, for rows sorted by expert and for activations of several
//! matrices.

use gemma4c_dsl::prelude::*;

use super::ring::multiply_ring;
use super::wgmma::{store_results, tile_place};

/// `out = x · Wᵀ`, both bf16. A block makes tiles of 128 rows and COLUMNS columns, every so many of them as there are blocks; half as many columns where GEGLU gates them. `k` is a
/// multiple of 8, `outputs` of 4.
#[kernel(block = 288, min_blocks = 1, dynamic_shared, slots(epilogue(value: f32, at: u32) -> f32))]
pub fn product_tiles<const COLUMNS: u32, const STAGES: u32, const GEGLU: bool, O: Float>(
    weights: Tiles<BF16>,
    x: Tiles<BF16>,
    k: u32,
    state: Input<u32>,
    out: Output<O>,
    outputs: u32,
) {
    require!(COLUMNS % 64 == 0 && COLUMNS <= 256 && STAGES >= 2);
    let x_ring = shared::<BF16>(STAGES * 8192);
    let w_ring = shared::<BF16>(STAGES * COLUMNS * 64);
    let full = shared::<u64>(STAGES);
    let empty = shared::<u64>(STAGES);

    let columns = if GEGLU { COLUMNS / 2 } else { COLUMNS };
    let rows = state[1u32];
    let tiles = u32x2(rows.div_ceil(128), outputs.div_ceil(columns));
    let steps = k.div_ceil(64);
    // The whole block leaves: there are fewer tiles than blocks.
    if block_idx() >= tiles.x * tiles.y {
        return;
    }
    if thread_idx() == 0 {
        for stage in 0..STAGES {
            mbarrier_init(full, stage, 1);
            // A stage is free when the eight warps that multiply have read it.
            mbarrier_init(empty, stage, 8);
        }
        fence_proxy_async();
    }
    barrier();

    if warp_id() == 8 {
        if lane_id() == 0 {
            let mut stage = 0u32;
            let mut parity = 1u32;
            for tile in (block_idx()..tiles.x * tiles.y).by(grid_dim()) {
                let place = tile_place(tile, tiles);
                for step in 0..steps {
                    mbarrier_wait(empty, stage, parity);
                    mbarrier_arrive_expect(full, stage, (128 + COLUMNS) * 128);
                    #[unroll]
                    for i in 0u32..4 {
                        tile_load(x_ring, stage * 8192 + i * 2048, x, step * 64, place.x * 128 + i * 32, full, stage);
                    }
                    #[unroll]
                    for i in 0..COLUMNS / 32 {
                        // Gates, then what they gate.
                        let row = place.y * columns + i * 32 % columns + i * 32 / columns * outputs;
                        tile_load(w_ring, stage * COLUMNS * 64 + i * 2048, weights, step * 64, row, full, stage);
                    }
                    stage += 1;
                    if stage == STAGES {
                        stage = 0;
                        parity = 1 - parity;
                    }
                }
            }
        }
        return;
    }

    let mut sums = regs(0.0f32, COLUMNS / 2);
    let mut stage = 0u32;
    let mut parity = 0u32;
    let own_rows = x_ring.offset(warp_id() / 4 * 4096);
    for tile in (block_idx()..tiles.x * tiles.y).by(grid_dim()) {
        multiply_ring(
            &mut sums,
            COLUMNS / 2,
            &mut stage,
            &mut parity,
            steps,
            own_rows,
            8192,
            w_ring,
            COLUMNS * 64,
            full,
            empty,
        );
        let place = tile_place(tile, tiles);
        let first_row = place.x * 128 + warp_id() * 16 + lane_id() / 4;
        let mut to = regs(0u32, 2);
        to[0u32] = first_row;
        to[1u32] = first_row + 8;
        store_results(epilogue, &mut sums, out, first_row, rows, &mut to, place.y * columns, outputs);
    }
}
