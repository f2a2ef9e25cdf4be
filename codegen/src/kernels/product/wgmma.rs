//! The matrix product of prefill on Hopper over bf16 weights: those of a file, or a copy of them.
//!
//! A block makes tiles of the result, 64 rows to a warpgroup, one after the other. Tiles of both operands, 64 values deep, go
//! round a ring in shared memory: while one step is multiplied, its successors are on their way, copied asynchronously by
//! the threads that multiply; while a result is stored, those of the next one. Products are asynchronous too: a step is
//! started before its predecessor has ended, so that the tensor cores do not wait for barriers.
//!
//! Every output is summed along K sixteen values at a time, in order, whatever the tile: what the tensor core makes of
//! sixteen products and a sum depends on them alone. So a row's result does not depend on the rows beside it, on the
//! size of its chunk, nor on which tile was chosen.
//!
//! With `geglu` the matrix holds the gates' rows, then those of the values they gate, and a tile takes as many of each:
//! a thread holds both, and stores `gelu(gate) * value`.
//!
//! With PAIRS the rows are pairs of a row and an expert, sorted by expert (`moe::group`): a tile is of one group, and has its
//! expert's weights.
//!
//! With SPLIT x is several matrices of as many rows, `x_part` values apart, and each `part_columns` columns of the result are of the next one: products that read different
//! values are one launch. With RAGGED `k` may end within a step, after a multiple of 8 values: zeros follow there.

use gemma4c_dsl::prelude::*;

use crate::kernels::gelu::gelu_by_exp;

/// The row (x) and column (y) of tiles in which tile `tile` of `tiles` stands: down, 16 rows of tiles at a time, before
/// across. Neighbours share either weights or activations, so that blocks that run together read little more than they need
/// from L2.
#[device]
pub fn tile_place(tile: u32, tiles: U32x2) -> U32x2 {
    let first_down = tile / (16 * tiles.y) * 16;
    let rest = tile % (16 * tiles.y);
    let together = (tiles.x - first_down).min(16);
    u32x2(first_down + rest % together, rest / together)
}

/// The rows of the `down`-th row of tiles of `height`: the first, the one behind the last, and the first row of their weights.
#[device]
pub fn tile_rows<const GEGLU: bool, const PAIRS: u32>(
    down: u32,
    height: u32,
    rows: u32,
    outputs: u32,
    groups: Input<U32x4>,
) -> U32x4 {
    let mut found = u32x4(down * height, rows, 0, 0);
    if PAIRS > 0 {
        let group = groups[down + 1];
        found = u32x4(group.x, group.y, group.z * if GEGLU { 2 * outputs } else { outputs }, 0);
    }
    found
}

/// Where this thread copies a tile's operands from: the same 16 bytes of every so many rows. Rows and columns past the end
/// repeat the last one.
#[device]
pub fn aim_copies<const COLUMNS: u32, const WARPGROUPS: u32, const GEGLU: bool, const PAIRS: u32, const SPLIT: bool>(
    x_from: &mut Regs<u32>,
    w_from: &mut Regs<u32>,
    place: U32x2,
    groups: Input<U32x4>,
    order: Input<u32>,
    rows: u32,
    outputs: u32,
    k: u32,
    x_part: u32,
    part_columns: u32,
) {
    let columns = if GEGLU { COLUMNS / 2 } else { COLUMNS };
    let mut first_value = thread_idx() % 8 * 8;
    if SPLIT {
        first_value += place.y * columns / part_columns * x_part;
    }
    let part = tile_rows(place.x, WARPGROUPS * 64, rows, outputs, groups);
    #[unroll]
    for i in 0u32..4 {
        let mut row = (part.x + thread_idx() / 8 + i * WARPGROUPS * 16).min(part.y - 1);
        if PAIRS > 0 {
            row = order[row] / PAIRS.max(1);
        }
        x_from[i] = row * k + first_value;
    }
    #[unroll]
    for i in 0..COLUMNS / (16 * WARPGROUPS) {
        let at = thread_idx() / 8 + i * WARPGROUPS * 16;
        let column = (place.y * columns + at % columns).min(outputs - 1) + at / columns * outputs;
        w_from[i] = (part.z + column) * k + thread_idx() % 8 * 8;
    }
}

/// Starts to copy the operands of a step to a place in the ring, unless all tiles are done, and moves on to the next step.
#[device]
pub fn copy_ahead<const COLUMNS: u32, const WARPGROUPS: u32, const RAGGED: bool>(
    x_to: Shared<BF16>,
    w_to: Shared<BF16>,
    x: Input<BF16>,
    weights: Weights<BF16>,
    x_from: &mut Regs<u32>,
    w_from: &mut Regs<u32>,
    tile: &mut u32,
    step: &mut u32,
    tiles: U32x2,
    groups: Input<U32x4>,
    order: Input<u32>,
    rows: u32,
    outputs: u32,
    k: u32,
    x_part: u32,
    part_columns: u32,
) {
    if RAGGED && *tile < tiles.x * tiles.y && *step * 64 + thread_idx() % 8 * 8 >= k {
        let row = thread_idx() / 8;
        let place = row * 64 + (thread_idx() % 8 ^ row % 8) * 8;
        #[unroll]
        for i in 0u32..4 {
            store(x_to, place + i * WARPGROUPS * 1024, U32x4::ZERO);
        }
        #[unroll]
        for i in 0..COLUMNS / (16 * WARPGROUPS) {
            store(w_to, place + i * WARPGROUPS * 1024, U32x4::ZERO);
        }
    } else if *tile < tiles.x * tiles.y {
        // Piece p of row r lies where piece p ^ r % 8 would: eight rows of a column of pieces lie in different banks.
        let row = thread_idx() / 8;
        let place = row * 64 + (thread_idx() % 8 ^ row % 8) * 8;
        #[unroll]
        for i in 0u32..4 {
            cp_async16(x_to, place + i * WARPGROUPS * 1024, x, x_from[i] + *step * 64);
        }
        #[unroll]
        for i in 0..COLUMNS / (16 * WARPGROUPS) {
            cp_async16(w_to, place + i * WARPGROUPS * 1024, weights, w_from[i] + *step * 64);
        }
    }
    cp_async_commit();
    *step += 1;
    if *step == k.div_ceil(64) {
        *step = 0;
        *tile += grid_dim();
        if *tile < tiles.x * tiles.y {
            aim_copies(x_from, w_from, tile_place(*tile, tiles), groups, order, rows, outputs, k, x_part, part_columns);
        }
    }
}

/// Stores what a thread has of a tile: of rows `first_row` and `first_row + 8`, those before `end`, at rows `to` of the result, from column `first_column` on.
#[device(slots(epilogue(value: f32, at: u32) -> f32))]
pub fn store_results<const COLUMNS: u32, const GEGLU: bool, O: Float>(
    sums: &mut Regs<f32>,
    out: Output<O>,
    first_row: u32,
    end: u32,
    to: &mut Regs<u32>,
    first_column: u32,
    outputs: u32,
) {
    let columns = if GEGLU { COLUMNS / 2 } else { COLUMNS };
    let odd = lane_id() % 2 == 1;
    #[unroll]
    for i in (0u32..columns / 2).by(8) {
        #[unroll]
        for lower in 0u32..2 {
            // Columns 2 t and 2 t + 1 of two neighbouring groups of eight.
            let from = i + lower * 2;
            let mut near = f32x2(sums[from], sums[from + 1]);
            let mut far = f32x2(sums[from + 4], sums[from + 5]);
            if GEGLU {
                let gated = from + COLUMNS / 4;
                near = f32x2(gelu_by_exp(near.x) * sums[gated], gelu_by_exp(near.y) * sums[gated + 1]);
                far = f32x2(gelu_by_exp(far.x) * sums[gated + 4], gelu_by_exp(far.y) * sums[gated + 5]);
            }
            // Two lanes exchange, so that one has four neighbours of the first group, the other of the second.
            let got_x = shfl_xor(if odd { near.x } else { far.x }, 1);
            let got_y = shfl_xor(if odd { near.y } else { far.y }, 1);
            let four = if odd { f32x4(got_x, got_y, far.x, far.y) } else { f32x4(near.x, near.y, got_x, got_y) };
            let column = first_column + i * 2 + lane_id() % 2 * 8 + lane_id() % 4 / 2 * 4;
            if first_row + lower * 8 < end && column < outputs {
                let at = to[lower] * outputs + column;
                let low = f32x2(epilogue(four.x, at), epilogue(four.y, at + 1));
                let high = f32x2(epilogue(four.z, at + 2), epilogue(four.w, at + 3));
                store_floats4(out, at, f32x4(low.x, low.y, high.x, high.y));
            }
        }
    }
}

/// Stores what a thread has of a tile whose rows are those of `part`: at its own rows or, of sorted pairs, at those that they come from.
#[device(slots(epilogue(value: f32, at: u32) -> f32))]
pub fn store_part<const COLUMNS: u32, const GEGLU: bool, const PAIRS: u32, O: Float>(
    sums: &mut Regs<f32>,
    out: Output<O>,
    order: Input<u32>,
    part: U32x4,
    first_column: u32,
    outputs: u32,
) {
    let first_row = part.x + warp_id() * 16 + lane_id() / 4;
    let mut to = regs(0u32, 2);
    #[unroll]
    for lower in 0u32..2 {
        to[lower] = first_row + lower * 8;
        if PAIRS > 0 && first_row + lower * 8 < part.y {
            to[lower] = order[first_row + lower * 8];
        }
    }
    store_results(epilogue, sums, out, first_row, part.y, &mut to, first_column, outputs);
}

/// `out = x · Wᵀ`, both bf16. A block makes tiles of 64 * WARPGROUPS rows and COLUMNS columns, every so many of them as there
/// are blocks; half as many columns where GEGLU gates them. `k` is a multiple of 64, or of 8 where it is RAGGED, `outputs` of 4.
#[kernel(block = WARPGROUPS * 128, min_blocks = 1, dynamic_shared, slots(epilogue(value: f32, at: u32) -> f32))]
pub fn product_wgmma<
    const WARPGROUPS: u32,
    const COLUMNS: u32,
    const STAGES: u32,
    const GEGLU: bool,
    const PAIRS: u32,
    const SPLIT: bool,
    const RAGGED: bool,
    O: Float,
>(
    weights: Weights<BF16>,
    x: Input<BF16>,
    groups: Input<U32x4>,
    order: Input<u32>,
    state: Input<u32>,
    out: Output<O>,
    outputs: u32,
    k: u32,
    x_part: u32,
    part_columns: u32,
) {
    require!(COLUMNS % 32 == 0 && COLUMNS <= 256 && COLUMNS % (16 * WARPGROUPS) == 0);
    require!(STAGES >= 3 && STAGES <= 7);
    let x_ring = shared::<BF16>(STAGES * WARPGROUPS * 4096);
    let w_ring = shared::<BF16>(STAGES * COLUMNS * 64);
    let columns = if GEGLU { COLUMNS / 2 } else { COLUMNS };

    let rows = state[1u32];
    let mut down = rows.div_ceil(WARPGROUPS * 64);
    if PAIRS > 0 {
        down = groups[0u32].x;
    }
    let tiles = u32x2(down, outputs.div_ceil(columns));
    let steps = k.div_ceil(64);
    // The whole block leaves: there are fewer tiles than blocks.
    if block_idx() >= tiles.x * tiles.y {
        return;
    }

    // Copies are STAGES - 2 steps ahead of the products, also from one tile to the next.
    let mut ahead_tile = block_idx();
    let mut ahead_step = 0u32;
    let mut ahead_stage = STAGES - 2;
    let mut x_from = regs(0u32, 4);
    let mut w_from = regs(0u32, COLUMNS / (16 * WARPGROUPS));
    aim_copies(
        &mut x_from,
        &mut w_from,
        tile_place(ahead_tile, tiles),
        groups,
        order,
        rows,
        outputs,
        k,
        x_part,
        part_columns,
    );
    #[unroll]
    for stage in 0..STAGES - 2 {
        let x_to = x_ring.offset(stage * WARPGROUPS * 4096);
        let w_to = w_ring.offset(stage * COLUMNS * 64);
        copy_ahead(
            x_to,
            w_to,
            x,
            weights,
            &mut x_from,
            &mut w_from,
            &mut ahead_tile,
            &mut ahead_step,
            tiles,
            groups,
            order,
            rows,
            outputs,
            k,
            x_part,
            part_columns,
        );
    }

    let mut sums = regs(0.0f32, COLUMNS / 2);
    let mut stage = 0u32;
    for tile in (block_idx()..tiles.x * tiles.y).by(grid_dim()) {
        #[unroll]
        for i in 0..COLUMNS / 2 {
            sums[i] = 0.0;
        }
        for step in 0..steps {
            // Everybody's copies of this step have landed, and everybody's products of the last step but one are done.
            cp_async_wait(STAGES - 3);
            fence_proxy_async();
            barrier();
            let x_tile = x_ring.offset((stage * WARPGROUPS + warp_id() / 4) * 4096);
            let w_tile = w_ring.offset(stage * COLUMNS * 64);
            wgmma_fence(&mut sums);
            #[unroll]
            for i in 0u32..4 {
                wgmma_bf16(&mut sums, x_tile.offset(i * 16), w_tile.offset(i * 16));
            }
            wgmma_commit();
            let x_to = x_ring.offset(ahead_stage * WARPGROUPS * 4096);
            let w_to = w_ring.offset(ahead_stage * COLUMNS * 64);
            copy_ahead(
                x_to,
                w_to,
                x,
                weights,
                &mut x_from,
                &mut w_from,
                &mut ahead_tile,
                &mut ahead_step,
                tiles,
                groups,
                order,
                rows,
                outputs,
                k,
                x_part,
                part_columns,
            );
            stage = if stage + 1 == STAGES { 0 } else { stage + 1 };
            ahead_stage = if ahead_stage + 1 == STAGES { 0 } else { ahead_stage + 1 };
            wgmma_wait(1, &mut sums);
        }
        wgmma_wait(0, &mut sums);

        let place = tile_place(tile, tiles);
        let part = tile_rows(place.x, WARPGROUPS * 64, rows, outputs, groups);
        store_part(epilogue, &mut sums, out, order, part, place.y * columns, outputs);
    }
}
