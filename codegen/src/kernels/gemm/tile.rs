//! A step of a warp's weights: 128 values of K of 16 rows of the matrix, from memory to the ring.

use gemma4c_dsl::prelude::*;

use super::views::{GemmRing, GemmWeights};

/// Steps of a slice are those from `steps * slice / SLICES` on.
#[device]
pub fn first_step(slice: u32, slices: u32, k: u32) -> u32 {
    k.div_ceil(128) * slice / slices
}

/// Words of a row of a step's codes in the ring: a unit more than it has, so that the same unit of eight rows lies in
/// all banks.
#[device]
pub fn row_words(unit: u32) -> u32 {
    512 / unit + 4
}

/// This lane's rows of the matrix, g and g + 8; of eight gated ones, gate and value. Rows past the end repeat the last
/// one.
#[device]
pub fn own_rows<const GEGLU: bool>(output: u32, first: u32, outputs: u32) -> U32x2 {
    let column = output + lane_id() / 4;
    let low = column.min(outputs - 1);
    let high = if GEGLU { low + outputs } else { (column + 8).min(outputs - 1) };
    u32x2(first + low, first + high)
}

/// Where a lane copies the weights of its rows from: for each, words of codes (0, 1) and the row's last unit (2, 3);
/// scales (4), of which it brings one word, and their row's last (5). Steps begin at `step`.
#[device(thin(aim_thin_rows))]
pub fn aim_own_rows<const UNIT: u32, const SCALED: bool>(aim: &mut Regs<u32>, rows: U32x2, step: u32, k: u32) {
    let quad = lane_id() % 4;
    let start = (step * (128 / UNIT) + quad) * 4;
    aim[0u32] = rows.x * (k / UNIT * 4) + start;
    aim[1u32] = rows.y * (k / UNIT * 4) + start;
    aim[2u32] = (rows.x + 1) * (k / UNIT * 4) - 4;
    aim[3u32] = (rows.y + 1) * (k / UNIT * 4) - 4;
    if SCALED {
        // The first two lanes of a quad bring row g's scales, the others row g + 8's.
        let row = if quad >= 2 { rows.y } else { rows.x };
        aim[4u32] = row * (k / 64) + step * 2 + quad % 2;
        aim[5u32] = (row + 1) * (k / 64) - 1;
    }
}

/// The same of units of 8 bytes, two in what a lane copies: the first two lanes of a quad have a step's four.
#[device]
pub fn aim_thin_rows(aim: &mut Regs<u32>, rows: U32x2, step: u32, k: u32) {
    let start = step * 8 + lane_id() % 2 * 4;
    aim[0u32] = rows.x * (k / 16) + start;
    aim[1u32] = rows.y * (k / 16) + start;
    aim[2u32] = (rows.x + 1) * (k / 16) - 4;
    aim[3u32] = (rows.y + 1) * (k / 16) - 4;
}

/// A warp's part of the first stage.
#[device]
pub fn warp_ring<const UNIT: u32, const SCALED: bool>(codes: Shared<u32>, scales: Shared<u32>) -> GemmRing {
    GemmRing {
        codes: codes.offset(warp_id() * 16 * row_words(UNIT)),
        scales: scales.offset(if SCALED { warp_id() * 32 } else { 0 }),
    }
}

/// A warp's ring from where a lane copies its quarter of two rows to.
#[device(thin(copied_thin_place))]
pub fn copied_place<const UNIT: u32, const SCALED: bool>(ring: GemmRing) -> GemmRing {
    let quad = lane_id() % 4;
    let scale = (quad / 2 * 8 + lane_id() / 4) * 2 + quad % 2;
    staged(ring, lane_id() / 4 * row_words(UNIT) + quad * 4, if SCALED { scale } else { 0 })
}

/// The same of units of 8 bytes.
#[device]
pub fn copied_thin_place<const UNIT: u32>(ring: GemmRing) -> GemmRing {
    staged(ring, lane_id() / 4 * row_words(UNIT) + lane_id() % 2 * 4, 0)
}

/// A warp's ring from where a lane reads what it decodes: the words that have its values, or a unit.
#[device(thin(read_thin_place))]
pub fn read_place<const UNIT: u32, const RAW: bool, const NEAR: bool, const SCALED: bool>(ring: GemmRing) -> GemmRing {
    let quad = lane_id() % 4;
    let mut word = quad * 4;
    if RAW && NEAR {
        word = if UNIT >= 16 { quad } else { quad * (16 / UNIT) };
    } else if RAW {
        word = if UNIT >= 16 { quad / 2 } else { quad * (8 / UNIT) };
    }
    staged(ring, lane_id() / 4 * row_words(UNIT) + word, if SCALED { lane_id() / 4 * 2 } else { 0 })
}

/// The same of units of 8 bytes.
#[device]
pub fn read_thin_place<const UNIT: u32>(ring: GemmRing) -> GemmRing {
    staged(ring, lane_id() / 4 * row_words(UNIT) + lane_id() % 4 * 2, 0)
}

/// The ring from so many words of codes and scales on: a stage.
#[device]
pub fn staged(ring: GemmRing, codes: u32, scales: u32) -> GemmRing {
    GemmRing { codes: ring.codes.offset(codes), scales: ring.scales.offset(scales) }
}

/// Issues the copies of a step's codes and scales to `ring`, a [`copied_place`] of a stage, where that step is
/// `wanted`, and moves on to the next. Past the end of a row its last unit stands for those that there are not.
#[device(thin(copy_thin_weights))]
pub fn copy_weights<const UNIT: u32, const SCALED: bool, const WHOLE: bool>(
    weights: GemmWeights,
    ring: GemmRing,
    aim: &mut Regs<u32>,
    wanted: bool,
) {
    if wanted {
        #[unroll]
        for i in 0u32..2 {
            #[unroll]
            for l in 0..32 / UNIT {
                // One address serves all copies of a whole step.
                let from = if WHOLE { aim[i] } else { (aim[i] + l * 16).min(aim[i + 2]) };
                let place = i * 8 * row_words(UNIT) + l * 16;
                cp_async16(ring.codes, place, weights.codes.offset(from), if WHOLE { l * 16 } else { 0 });
            }
        }
        if SCALED {
            cp_async4(ring.scales, 0, weights.scales, if WHOLE { aim[4u32] } else { aim[4u32].min(aim[5u32]) });
        }
    }
    aim[0u32] += 512 / UNIT;
    aim[1u32] += 512 / UNIT;
    aim[4u32] += 2;
}

/// The same of units of 8 bytes. Past the end of a row its last two stand for those that there are not.
#[device]
pub fn copy_thin_weights<const UNIT: u32>(weights: GemmWeights, ring: GemmRing, aim: &mut Regs<u32>, wanted: bool) {
    if wanted && lane_id() % 4 < 2 {
        #[unroll]
        for i in 0u32..2 {
            cp_async16(ring.codes, i * 8 * row_words(UNIT), weights.codes, aim[i].min(aim[i + 2]));
        }
    }
    aim[0u32] += 8;
    aim[1u32] += 8;
}

/// Unit `l * 4 + q` of a step of a row: the last one stands for those past the end.
#[device]
pub fn unit_at<const UNIT: u32, const WHOLE: bool>(row: u32, step: u32, l: u32, k: u32) -> u32 {
    let unit = step * (128 / UNIT) + l * 4 + lane_id() % 4;
    row * (k / UNIT) + if WHOLE { unit } else { unit.min(k / UNIT - 1) }
}

/// Loads what lies beside a step's codes, where a lane decodes units of its own.
#[device(slots(side(unit: u32, more: u32) -> U32x4))]
pub fn load_sides<const UNIT: u32, const WHOLE: bool>(sides: &mut Regs<U32x4>, rows: U32x2, step: u32, k: u32) {
    #[unroll]
    for l in 0..32 / UNIT {
        sides[l] = side(unit_at(rows.x, step, l, k), 0);
        sides[32 / UNIT + l] = side(unit_at(rows.y, step, l, k), 0);
    }
}
