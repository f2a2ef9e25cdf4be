//! The matrix product of prefill on Hopper without a copy of the weights: warpgroups that decode, and one that multiplies.
//!
//! ```text
//! codes of the weights ──► TEAM warpgroups, a step each in turn ──► bf16, left operand ─┐
//! rows of activations ──► cp.async, by the same ──────────────────► right operand ──────┴─► ring of steps ──► wgmma, by one warpgroup
//! ```
//!
//! To load, to decode and to publish a step is a chain of a thousand clocks, whatever the rows. The team's chains overlap, so that a step is multiplied every few hundred:
//! what short prompts need, whose tiles are too few to fill the SMs with more blocks. Long ones leave less to gain, and [`product_decoding`](super::decoding::product_decoding) reads
//! activations half as often.
//!
//! The product is made on its side: 64 columns of the result, up to 256 rows of activations, so that a decoded weight serves many rows. mbarriers say that a stage of
//! the ring is full or empty; no barrier of the block holds everybody up.
//!
//! The values are those of a bf16 copy, and the order of sums along K is that of [`product_wgmma`](super::wgmma::product_wgmma): both give the same bits, so that a
//! plan's answers do not depend on the memory that it was given.

use gemma4c_blocks::DType;
use gemma4c_dsl::DeviceDef;
use gemma4c_dsl::prelude::*;

use super::decode::{decode, decode_q8_0_by_fma, eight_bytes, part_nibbles};
use super::decoding::store_across;
use super::ring::multiply_ring;
use super::wgmma::{tile_place, tile_rows};
use crate::kernels::formats;
use crate::kernels::matvec::formats::half_in;

#[device]
pub fn decode_q4_0_by_fma(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4 {
    eight_bytes(part_nibbles(codes, part), 8.0, half_in(side.x, unit))
}

/// The function for a type's units: the same values as everywhere, where possible with fewer instructions.
pub fn decode_of_team(dtype: DType) -> &'static DeviceDef {
    match dtype {
        DType::Q8_0 => decode_q8_0_by_fma::DEF,
        DType::Q4_0 => decode_q4_0_by_fma::DEF,
        _ => formats::of(dtype).map_or_else(|| decode(dtype), |kernels| kernels.decode_by_fma),
    }
}

/// Where thread `own` of a decoder copies a tile's activations from, 16 bytes of every 16th row, and its rows of the matrix, in units of 64 values. Rows and columns past
/// the end repeat the last one.
#[device]
pub fn aim_decoder<const UNIT: u32, const ROWS: u32, const GEGLU: bool, const PAIRS: u32>(
    own: u32,
    x_from: &mut Regs<u32>,
    w_from: &mut Regs<u32>,
    place: U32x2,
    groups: Input<U32x4>,
    order: Input<u32>,
    rows: u32,
    outputs: u32,
    k: u32,
) {
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
    for i in 0..32 / UNIT {
        let at = own / (64 / UNIT) + i * UNIT * 2;
        // Of a warp's 16 rows of the left operand the first eight are gates, the others what they gate.
        let gated = (place.y * 32 + at / 16 * 8 + at % 8).min(outputs - 1) + at / 8 % 2 * outputs;
        let row = part.z + if GEGLU { gated } else { (place.y * 64 + at).min(outputs - 1) };
        w_from[i] = row * (k / 64);
    }
}

/// `out = x · Wᵀ`, of bf16 activations and repacked weights. A block makes tiles of ROWS rows and 64 columns, every so many of them as there are blocks; half as many
/// columns where GEGLU gates them. `k` is a multiple of 64.
#[kernel(block = TEAM * 128 + 128, min_blocks = 1, dynamic_shared, slots(
    side(unit: u32, more: u32) -> U32x4,
    decode(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4,
    epilogue(value: f32, at: u32) -> f32
))]
pub fn product_team<
    const UNIT: u32,
    const TEAM: u32,
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
    require!(ROWS % 32 == 0 && ROWS <= 256 && (UNIT == 8 || UNIT == 16 || UNIT == 32));
    require!(STAGES > TEAM && TEAM >= 1);
    let w_ring = shared::<BF16>(STAGES * 4096);
    let x_ring = shared::<BF16>(STAGES * ROWS * 64);
    let full = shared::<u64>(STAGES);
    let empty = shared::<u64>(STAGES);

    let rows = state[1u32];
    let of_tile = if GEGLU { 32u32 } else { 64u32 };
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
    if thread_idx() == 0 {
        for stage in 0..STAGES {
            mbarrier_init(full, stage, 128);
            mbarrier_init(empty, stage, 4);
        }
    }
    barrier();

    if warp_id() >= 4 {
        let own = thread_idx() % 128;
        let all_steps = (tiles.x * tiles.y - block_idx()).div_ceil(grid_dim()) * steps;
        // The decoder's own steps: every TEAM-th of all tiles'. Activations and codes are one of them ahead.
        let first = thread_idx() / 128 - 1;
        let mut tile = block_idx() + first / steps * grid_dim();
        let mut step = first % steps;
        let mut x_from = regs(0u32, ROWS / 16);
        let mut w_from = regs(0u32, 32 / UNIT);
        let mut held = regs(U32x4::ZERO, 32 / UNIT);
        let mut beside = regs(U32x4::ZERO, 32 / UNIT);
        let mut units = regs(0u32, 32 / UNIT);
        let mut ahead_stage = first;
        let mut ahead_parity = 1u32;
        let mut stage = first;
        let row = own / 8;
        let x_place = row * 64 + (own % 8 ^ row % 8) * 8;
        if first < all_steps {
            aim_decoder(own, &mut x_from, &mut w_from, tile_place(tile, tiles), groups, order, rows, outputs, k);
        }
        for at in (first..all_steps + TEAM).by(TEAM) {
            // Nothing is held in the first round.
            if at >= first + TEAM {
                #[unroll]
                for i in 0..32 / UNIT {
                    let line = own / (64 / UNIT) + i * UNIT * 2;
                    #[unroll]
                    for part in 0..UNIT / 8 {
                        let piece = own % (64 / UNIT) * (UNIT / 8) + part;
                        let to = stage * 4096 + line * 64 + (piece ^ line % 8) * 8;
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
                for i in 0..32 / UNIT {
                    units[i] = (w_from[i] + step) * (64 / UNIT) + own % (64 / UNIT);
                    held[i] = load::<U32x4>(codes, units[i]);
                    beside[i] = side(units[i], 0);
                }
                mbarrier_wait(empty, ahead_stage, ahead_parity);
                #[unroll]
                for i in 0..ROWS / 16 {
                    let to = ahead_stage * ROWS * 64 + x_place + i * 1024;
                    cp_async16(x_ring, to, x, x_from[i] + step * 64);
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
                    aim_decoder(
                        own,
                        &mut x_from,
                        &mut w_from,
                        tile_place(tile, tiles),
                        groups,
                        order,
                        rows,
                        outputs,
                        k,
                    );
                }
            }
        }
    } else {
        let mut sums = regs(0.0f32, ROWS / 2);
        let mut stage = 0u32;
        let mut parity = 0u32;
        for tile in (block_idx()..tiles.x * tiles.y).by(grid_dim()) {
            multiply_ring(
                &mut sums,
                ROWS / 2,
                &mut stage,
                &mut parity,
                steps,
                w_ring,
                4096,
                x_ring,
                ROWS * 64,
                full,
                empty,
            );
            store_across(epilogue, &mut sums, out, order, groups, tile_place(tile, tiles), of_tile, rows, outputs);
        }
    }
}
