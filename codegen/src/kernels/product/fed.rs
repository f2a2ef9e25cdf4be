//! The matrix product of sorted rows on Hopper without a copy of the weights: warpgroups that decode feed warpgroups that multiply.
//!
//! ```text
//! codes of the weights ──► TEAM warpgroups, a step each in turn ──► bf16, right operand ─┐
//! rows of activations ──► cp.async, by the same ───────────────────► left operand ───────┴─► ring of steps ──► wgmma, by ROWS / 64 warpgroups
//! ```
//!
//! An expert has few rows, 128 of 2048, and a weight is decoded for no more than those. So the decoding must not stand in the way of the products: here it has warps of its own,
//! whose chains of load, decode and publish overlap ([`product_team`](super::team::product_team) says more). Unlike there the product is not made on its side: a tile of activations is
//! read for 128 columns, and a warpgroup whose 64 rows are past a group's end has nothing to multiply. The last group of an expert is rarely full.
//!
//! mbarriers say that a stage of the ring is full or empty; while a result is stored, the next tile's steps are decoded.
//!
//! The values are those of a bf16 copy, and the order of sums along K is that of [`product_wgmma`](super::wgmma::product_wgmma): both give the same bits, so that a
//! plan's answers do not depend on the memory that it was given.

use gemma4c_dsl::prelude::*;

use super::ring::multiply_ring;
use super::wgmma::{store_part, tile_place, tile_rows};

/// Where thread `own` of a decoder copies a tile's activations from, 16 bytes of every 16th row, and its rows of the matrix, in units of 64 values. Columns past the end repeat
/// the last one. Returns the tile's rows.
#[device]
pub fn aim_feeder<const UNIT: u32, const ROWS: u32, const COLUMNS: u32, const GEGLU: bool, const PAIRS: u32>(
    own: u32,
    x_from: &mut Regs<u32>,
    w_from: &mut Regs<u32>,
    place: U32x2,
    groups: Input<U32x4>,
    order: Input<u32>,
    rows: u32,
    outputs: u32,
    k: u32,
) -> u32 {
    let columns = if GEGLU { COLUMNS / 2 } else { COLUMNS };
    let part = tile_rows(place.x, ROWS, rows, outputs, groups);
    #[unroll]
    for i in 0..ROWS / 16 {
        let mut row = (part.x + own / 8 + i * 16).min(part.y - 1);
        if PAIRS > 0 {
            row = order[row] / PAIRS.max(1);
        }
        x_from[i] = row * k + own % 8 * 8;
    }
    #[unroll]
    for i in 0..COLUMNS / (2 * UNIT) {
        // The gates' columns come first, then those of what they gate.
        let at = own / (64 / UNIT) + i * UNIT * 2;
        let column = (place.y * columns + at % columns).min(outputs - 1) + at / columns * outputs;
        w_from[i] = (part.z + column) * (k / 64);
    }
    (part.y - part.x).min(ROWS)
}

/// `out = x · Wᵀ`, of bf16 activations and repacked weights. A block makes tiles of ROWS rows and COLUMNS columns, every so many of them as there are blocks; half as many
/// columns where GEGLU gates them. `k` is a multiple of 64, `outputs` of 4.
#[kernel(block = TEAM * 128 + ROWS * 2, min_blocks = 1, dynamic_shared, slots(
    side(unit: u32, more: u32) -> U32x4,
    decode(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4,
    epilogue(value: f32, at: u32) -> f32
))]
pub fn product_fed<
    const UNIT: u32,
    const TEAM: u32,
    const ROWS: u32,
    const COLUMNS: u32,
    const STAGES: u32,
    const GEGLU: bool,
    const PAIRS: u32,
    O: Float,
>(
    codes: Weights<U32x4>,
    x: Input<BF16>,
    groups: Input<U32x4>,
    order: Input<u32>,
    state: Input<u32>,
    out: Output<O>,
    outputs: u32,
    k: u32,
) {
    require!(ROWS % 64 == 0 && COLUMNS % 64 == 0 && COLUMNS <= 256 && (UNIT == 8 || UNIT == 16 || UNIT == 32));
    require!(STAGES > TEAM && TEAM >= 1);
    let x_ring = shared::<BF16>(STAGES * ROWS * 64);
    let w_ring = shared::<BF16>(STAGES * COLUMNS * 64);
    let full = shared::<u64>(STAGES);
    let empty = shared::<u64>(STAGES);

    let rows = state[1u32];
    let columns = if GEGLU { COLUMNS / 2 } else { COLUMNS };
    let mut down = rows.div_ceil(ROWS);
    if PAIRS > 0 {
        down = groups[0u32].x;
    }
    let tiles = u32x2(down, outputs.div_ceil(columns));
    let steps = k / 64;
    // The whole block leaves: there are fewer tiles than blocks.
    if block_idx() >= tiles.x * tiles.y {
        return;
    }
    if thread_idx() == 0 {
        for stage in 0..STAGES {
            mbarrier_init(full, stage, 128);
            mbarrier_init(empty, stage, ROWS / 16);
        }
    }
    // Where a tile has no row, its last tenant's lies, or nothing: both make results that nobody stores.
    for at in (thread_idx() * 8..STAGES * ROWS * 64).by((TEAM * 128 + ROWS * 2) * 8) {
        store(x_ring, at, U32x4::ZERO);
    }
    fence_proxy_async();
    barrier();

    if thread_idx() >= ROWS * 2 {
        let own = thread_idx() % 128;
        let all_steps = (tiles.x * tiles.y - block_idx()).div_ceil(grid_dim()) * steps;
        // The decoder's own steps: every TEAM-th of all tiles'. Activations and codes are one of them ahead.
        let first = (thread_idx() - ROWS * 2) / 128;
        let mut tile = block_idx() + first / steps * grid_dim();
        let mut step = first % steps;
        let mut x_from = regs(0u32, ROWS / 16);
        let mut w_from = regs(0u32, COLUMNS / (2 * UNIT));
        let mut held = regs(U32x4::ZERO, COLUMNS / (2 * UNIT));
        let mut beside = regs(U32x4::ZERO, COLUMNS / (2 * UNIT));
        let mut units = regs(0u32, COLUMNS / (2 * UNIT));
        let mut ahead_stage = first;
        let mut ahead_parity = 1u32;
        let mut stage = first;
        let row = own / 8;
        let x_place = row * 64 + (own % 8 ^ row % 8) * 8;
        let mut tile_height = 0u32;
        if first < all_steps {
            tile_height =
                aim_feeder(own, &mut x_from, &mut w_from, tile_place(tile, tiles), groups, order, rows, outputs, k);
        }
        for at in (first..all_steps + TEAM).by(TEAM) {
            // Nothing is held in the first round.
            if at >= first + TEAM {
                #[unroll]
                for i in 0..COLUMNS / (2 * UNIT) {
                    let line = own / (64 / UNIT) + i * UNIT * 2;
                    #[unroll]
                    for part in 0..UNIT / 8 {
                        let piece = own % (64 / UNIT) * (UNIT / 8) + part;
                        let to = stage * COLUMNS * 64 + line * 64 + (piece ^ line % 8) * 8;
                        store(w_ring, to, decode(held[i], beside[i], units[i], part));
                    }
                }
                cp_async_wait(0);
                fence_proxy_async();
                mbarrier_arrive(full, stage);
            }
            // The next step's loads come behind the fence, which would wait for them.
            if at < all_steps {
                #[unroll]
                for i in 0..COLUMNS / (2 * UNIT) {
                    units[i] = (w_from[i] + step) * (64 / UNIT) + own % (64 / UNIT);
                    held[i] = load::<U32x4>(codes, units[i]);
                    beside[i] = side(units[i], 0);
                }
                mbarrier_wait(empty, ahead_stage, ahead_parity);
                #[unroll]
                for i in 0..ROWS / 16 {
                    if row + i * 16 < tile_height {
                        let to = ahead_stage * ROWS * 64 + x_place + i * 1024;
                        cp_async16(x_ring, to, x, x_from[i] + step * 64);
                    }
                }
                cp_async_commit();
                stage = ahead_stage;
                ahead_stage += TEAM;
                if ahead_stage >= STAGES {
                    ahead_stage -= STAGES;
                    ahead_parity = 1 - ahead_parity;
                }
                step += TEAM;
                if step >= steps && at + TEAM < all_steps {
                    while step >= steps {
                        step -= steps;
                        tile += grid_dim();
                    }
                    let place = tile_place(tile, tiles);
                    tile_height = aim_feeder(own, &mut x_from, &mut w_from, place, groups, order, rows, outputs, k);
                }
            }
        }
    } else {
        let own_rows = warp_id() / 4 * 64;
        let mut sums = regs(0.0f32, COLUMNS / 2);
        let mut stage = 0u32;
        let mut parity = 0u32;
        for tile in (block_idx()..tiles.x * tiles.y).by(grid_dim()) {
            let place = tile_place(tile, tiles);
            let part = tile_rows(place.x, ROWS, rows, outputs, groups);
            let multiplies = part.x + own_rows < part.y;
            if multiplies {
                multiply_ring(
                    &mut sums,
                    COLUMNS / 2,
                    &mut stage,
                    &mut parity,
                    steps,
                    x_ring.offset(own_rows * 64),
                    ROWS * 64,
                    w_ring,
                    COLUMNS * 64,
                    full,
                    empty,
                );
                store_part(epilogue, &mut sums, out, order, part, place.y * columns, outputs);
            } else {
                for step in 0..steps {
                    mbarrier_wait(full, stage, parity);
                    warp_barrier();
                    if lane_id() == 0 {
                        mbarrier_arrive(empty, stage);
                    }
                    stage += 1;
                    if stage == STAGES {
                        stage = 0;
                        parity = 1 - parity;
                    }
                }
            }
        }
    }
}
