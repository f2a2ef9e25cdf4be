//! The matrix product of prefill on Hopper without a copy of the weights: each warpgroup decodes the weights that it multiplies, to registers.
//!
//! ```text
//! rows of activations ──► cp.async ──► ring of steps ──► right operand ─┐
//! codes of the weights ──► registers, DEPTH steps ahead ──► bf16, a step ahead ──► left operand ──► wgmma
//! ```
//!
//! The product is made on its side: 64 columns of the result to a warpgroup, up to 256 rows of activations. So a weight is decoded once for 256 rows, by the thread
//! that multiplies it, and never lies in shared memory. While a step is multiplied, the next one is decoded.
//!
//! The values are those of a bf16 copy, and the order of sums along K is that of [`product_wgmma`](super::wgmma::product_wgmma): both give the same bits, so that a
//! plan's answers do not depend on the memory that it was given.

use gemma4c_dsl::prelude::*;

use super::fragments::decode_step;
use super::wgmma::{tile_place, tile_rows};
use crate::kernels::gelu::gelu_by_exp;

/// Where this thread copies a tile's activations from: the same 16 bytes of every so many rows. Rows past the end repeat the last one.
#[device]
pub fn aim_activations<const WARPGROUPS: u32, const ROWS: u32, const GEGLU: bool, const PAIRS: u32>(
    x_from: &mut Regs<u32>,
    place: U32x2,
    groups: Input<U32x4>,
    order: Input<u32>,
    rows: u32,
    outputs: u32,
    k: u32,
) {
    let part = tile_rows(place.x, ROWS, rows, outputs, groups);
    #[unroll]
    for i in 0..ROWS / (WARPGROUPS * 16) {
        let mut row = (part.x + thread_idx() / 8 + i * WARPGROUPS * 16).min(part.y - 1);
        if PAIRS > 0 {
            row = order[row] / PAIRS.max(1);
        }
        x_from[i] = row * k + thread_idx() % 8 * 8;
    }
}

/// Starts to copy the activations of a step to the ring, unless all tiles are done, and moves on to the next step.
#[device]
pub fn bring_activations<
    const WARPGROUPS: u32,
    const ROWS: u32,
    const STAGES: u32,
    const GEGLU: bool,
    const PAIRS: u32,
>(
    ring: Shared<BF16>,
    x: Input<BF16>,
    x_from: &mut Regs<u32>,
    tile: &mut u32,
    step: &mut u32,
    slot: &mut u32,
    tiles: U32x2,
    groups: Input<U32x4>,
    order: Input<u32>,
    rows: u32,
    outputs: u32,
    k: u32,
) {
    if *tile < tiles.x * tiles.y {
        // Piece p of row r lies where piece p ^ r % 8 would: eight rows of a column of pieces lie in different banks.
        let row = thread_idx() / 8;
        let place = *slot * ROWS * 64 + row * 64 + (thread_idx() % 8 ^ row % 8) * 8;
        #[unroll]
        for i in 0..ROWS / (WARPGROUPS * 16) {
            cp_async16(ring, place + i * WARPGROUPS * 1024, x, x_from[i] + *step * 64);
        }
        *slot = if *slot + 1 == STAGES { 0 } else { *slot + 1 };
        *step += 1;
        if *step == k / 64 {
            *step = 0;
            *tile += grid_dim();
            if *tile < tiles.x * tiles.y {
                aim_activations(x_from, tile_place(*tile, tiles), groups, order, rows, outputs, k);
            }
        }
    }
    cp_async_commit();
}

/// The rows of the matrix that this lane multiplies, both in units of 64 values: of a warp's 16 columns, columns g (x) and g + 8 (y); of eight gated ones, gate and value.
#[device]
pub fn aim_weights<const WARPGROUPS: u32, const ROWS: u32, const GEGLU: bool, const PAIRS: u32>(
    place: U32x2,
    groups: Input<U32x4>,
    rows: u32,
    outputs: u32,
    k: u32,
) -> U32x2 {
    let first = tile_rows(place.x, ROWS, rows, outputs, groups).z;
    let of_tile = if GEGLU { WARPGROUPS * 32 } else { WARPGROUPS * 64 };
    let column = place.y * of_tile + warp_id() * if GEGLU { 8u32 } else { 16u32 } + lane_id() / 4;
    let low = first + column.min(outputs - 1);
    let high = if GEGLU { low + outputs } else { first + (column + 8).min(outputs - 1) };
    u32x2(low * (k / 64), high * (k / 64))
}

/// Loads what this lane decodes of a step into part `part` of the registers, unless all tiles are done, and moves on to the next step. A tile has a multiple of DEPTH
/// steps here: the last one comes again, in vain.
#[device(slots(side(unit: u32, more: u32) -> U32x4))]
pub fn bring_weights<
    const UNIT: u32,
    const RAW: bool,
    const DEPTH: u32,
    const WARPGROUPS: u32,
    const ROWS: u32,
    const GEGLU: bool,
    const PAIRS: u32,
>(
    codes: Weights<U32x4>,
    held: &mut Regs<U32x4>,
    beside: &mut Regs<U32x4>,
    units: &mut Regs<u32>,
    part: u32,
    from: &mut U32x2,
    tile: &mut u32,
    step: &mut u32,
    tiles: U32x2,
    groups: Input<U32x4>,
    rows: u32,
    outputs: u32,
    k: u32,
) {
    if *tile < tiles.x * tiles.y {
        let quad = lane_id() % 4;
        let at = (*step).min(k / 64 - 1);
        if UNIT == 32 {
            // Of both rows' two units, one a lane.
            let row = if quad >= 2 { from.y } else { from.x };
            units[part * 4] = (row + at) * 2 + quad % 2;
            held[part * 4] = load::<U32x4>(codes, units[part * 4]);
            beside[part * 4] = side(units[part * 4], 0);
        } else {
            // Of both rows, the lane's 16 values.
            #[unroll]
            for i in 0..32 / UNIT {
                let row = if i * UNIT < 16 { from.x } else { from.y };
                let unit = (row + at) * (64 / UNIT) + quad * (16 / UNIT) + i % (16 / UNIT).max(1);
                units[part * 4 + i] = unit;
                held[part * 4 + i] = load::<U32x4>(codes, unit);
                beside[part * 4 + i] = side(unit, 0);
            }
        }
        if RAW {
            beside[part * 4] = side((from.x + at) * (64 / UNIT), 0);
            beside[part * 4 + 1] = side((from.y + at) * (64 / UNIT), 0);
        }
        *step += 1;
        if *step == (k / 64).div_ceil(DEPTH) * DEPTH {
            *step = 0;
            *tile += grid_dim();
            if *tile < tiles.x * tiles.y {
                *from = aim_weights(tile_place(*tile, tiles), groups, rows, outputs, k);
            }
        }
    }
}

/// Stores a value of the result: of row `row`, of which the tile has those before `end`, and column `column`.
#[device(slots(epilogue(value: f32, at: u32) -> f32))]
pub fn store_value<const PAIRS: u32, O: Float>(
    out: Output<O>,
    order: Input<u32>,
    row: u32,
    end: u32,
    column: u32,
    outputs: u32,
    value: f32,
) {
    if row < end && column < outputs {
        let mut to = row;
        if PAIRS > 0 {
            to = order[row];
        }
        let at = to * outputs + column;
        out[at] = O::from_f32(epilogue(value, at));
    }
}

/// Stores the sums of a product that was made on its side: a thread has neighbouring rows of two columns, or of a gate and what it gates.
#[device(slots(epilogue(value: f32, at: u32) -> f32))]
pub fn store_across<const ROWS: u32, const GEGLU: bool, const PAIRS: u32, O: Float>(
    sums: &mut Regs<f32>,
    out: Output<O>,
    order: Input<u32>,
    groups: Input<U32x4>,
    place: U32x2,
    of_tile: u32,
    rows: u32,
    outputs: u32,
) {
    let part = tile_rows(place.x, ROWS, rows, outputs, groups);
    let column = place.y * of_tile + warp_id() * if GEGLU { 8u32 } else { 16u32 } + lane_id() / 4;
    #[unroll]
    for i in (0u32..ROWS / 2).by(4) {
        #[unroll]
        for e in 0u32..2 {
            let row = part.x + i * 2 + lane_id() % 4 * 2 + e;
            // A group of pairs may end before the tile does, and before the next group's first.
            let end = part.y.min(part.x + ROWS);
            if GEGLU {
                let value = gelu_by_exp(sums[i + e]) * sums[i + 2 + e];
                store_value(epilogue, out, order, row, end, column, outputs, value);
            } else {
                store_value(epilogue, out, order, row, end, column, outputs, sums[i + e]);
                store_value(epilogue, out, order, row, end, column + 8, outputs, sums[i + 2 + e]);
            }
        }
    }
}

/// `out = x · Wᵀ`, of bf16 activations and repacked weights. A block makes tiles of ROWS rows and 64 * WARPGROUPS columns, every so many of them as there are
/// blocks; half as many columns where GEGLU gates them. `k` is a multiple of 64.
#[kernel(block = WARPGROUPS * 128, min_blocks = 1, dynamic_shared, slots(
    side(unit: u32, more: u32) -> U32x4,
    decode(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4,
    epilogue(value: f32, at: u32) -> f32
))]
pub fn product_decoding<
    const UNIT: u32,
    const RAW: bool,
    const BRAIN: bool,
    const DEPTH: u32,
    const WARPGROUPS: u32,
    const ROWS: u32,
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
    require!(
        ROWS % 32 == 0
            && ROWS % (WARPGROUPS * 16) == 0
            && ROWS <= 256
            && STAGES >= DEPTH + 3
            && (UNIT == 8 || UNIT == 16 || UNIT == 32)
    );
    require!(DEPTH == 2 || DEPTH == 4);
    let ring = shared::<BF16>(STAGES * ROWS * 64);

    let rows = state[1u32];
    let of_tile = if GEGLU { WARPGROUPS * 32 } else { WARPGROUPS * 64 };
    let mut down = rows.div_ceil(ROWS);
    if PAIRS > 0 {
        down = groups[0u32].x;
    }
    let tiles = u32x2(down, outputs.div_ceil(of_tile));
    let steps = k / 64;
    // The whole block leaves: there are fewer tiles than blocks.
    if block_idx() >= tiles.x * tiles.y {
        return;
    }

    // Activations are STAGES - 2 steps ahead of the products, codes DEPTH, decoded weights one, also from one tile to the next.
    let mut x_from = regs(0u32, ROWS / (WARPGROUPS * 16));
    let mut x_tile = block_idx();
    let mut x_step = 0u32;
    let mut x_slot = 0u32;
    aim_activations(&mut x_from, tile_place(x_tile, tiles), groups, order, rows, outputs, k);
    #[unroll]
    for stage in 0..STAGES - 2 {
        bring_activations(
            ring,
            x,
            &mut x_from,
            &mut x_tile,
            &mut x_step,
            &mut x_slot,
            tiles,
            groups,
            order,
            rows,
            outputs,
            k,
        );
    }
    let mut held = regs(U32x4::ZERO, DEPTH * 4);
    let mut beside = regs(U32x4::ZERO, DEPTH * 4);
    let mut units = regs(0u32, DEPTH * 4);
    let mut left = regs(U32x4::ZERO, 8);
    let mut w_tile = block_idx();
    let mut w_step = 0u32;
    let mut w_from = aim_weights(tile_place(w_tile, tiles), groups, rows, outputs, k);
    #[unroll]
    for part in 0..DEPTH {
        bring_weights(
            side,
            codes,
            &mut held,
            &mut beside,
            &mut units,
            part,
            &mut w_from,
            &mut w_tile,
            &mut w_step,
            tiles,
            groups,
            rows,
            outputs,
            k,
        );
    }
    decode_step(decode, &mut held, &mut beside, &mut units, &mut left, 0, 0);
    bring_weights(
        side,
        codes,
        &mut held,
        &mut beside,
        &mut units,
        0,
        &mut w_from,
        &mut w_tile,
        &mut w_step,
        tiles,
        groups,
        rows,
        outputs,
        k,
    );

    cp_async_wait(STAGES - 2 - DEPTH);
    fence_proxy_async();

    let mut sums = regs(0.0f32, ROWS / 2);
    let mut slot = 0u32;
    for tile in (block_idx()..tiles.x * tiles.y).by(grid_dim()) {
        #[unroll]
        for i in 0..ROWS / 2 {
            sums[i] = 0.0;
        }
        for step in (0..steps).by(DEPTH) {
            #[unroll]
            for part in 0..DEPTH {
                if step + part < steps {
                    // Everybody's activations of this step are there, and everybody's products of the last step but one are done.
                    barrier();
                    let x_tile_of_step = ring.offset(slot * ROWS * 64);
                    wgmma_fence(&mut sums);
                    #[unroll]
                    for i in 0u32..4 {
                        wgmma_b16_held(&mut sums, left[part % 2 * 4 + i], x_tile_of_step, i * 16);
                    }
                    wgmma_commit();
                    bring_activations(
                        ring,
                        x,
                        &mut x_from,
                        &mut x_tile,
                        &mut x_step,
                        &mut x_slot,
                        tiles,
                        groups,
                        order,
                        rows,
                        outputs,
                        k,
                    );
                    slot = if slot + 1 == STAGES { 0 } else { slot + 1 };
                    wgmma_wait(1, &mut sums);
                } else {
                    wgmma_wait(0, &mut sums);
                }
                // The products of the step before have read their left operands: the next step's take their place.
                decode_step(decode, &mut held, &mut beside, &mut units, &mut left, (part + 1) % DEPTH, (part + 1) % 2);
                if part == DEPTH - 1 {
                    // The activations of the next DEPTH steps have landed here. The fence waits for loads too: it comes once for all of them, and before the
                    // next codes are asked for.
                    cp_async_wait(STAGES - 2 - DEPTH);
                    fence_proxy_async();
                }
                bring_weights(
                    side,
                    codes,
                    &mut held,
                    &mut beside,
                    &mut units,
                    (part + 1) % DEPTH,
                    &mut w_from,
                    &mut w_tile,
                    &mut w_step,
                    tiles,
                    groups,
                    rows,
                    outputs,
                    k,
                );
            }
        }
        wgmma_wait(0, &mut sums);

        store_across(epilogue, &mut sums, out, order, groups, tile_place(tile, tiles), of_tile, rows, outputs);
    }
}
