//! What a warp does in a product by [tiles](super::tiles): 16 rows of weights by EIGHTS times eight rows of activations, of one stretch of blocks.
//!
//! Weights are the left operand of the tensor cores, activations the right one, so a lane has rows g and g + 8 of the weights and columns 2t and 2t + 1 of every eight rows of activations. A block's dot is a
//! sum of integers, exact in any order. Its product is added to one of CLASSES f32 sums, by the block's number modulo CLASSES: all are the lane's own registers. Their sum is the stretch's. A warp adds up the stretches of its tile in turn; or four warps have one each and leave them in shared memory once, at the tile's end.

use gemma4c_dsl::prelude::*;

use super::mma::{first_dot, second_dot};
use super::stages::{side_at, side_words};
use super::stretches::{
    first_block, places_of_eight, rows_place, stage_pieces, stages_are_whole, stretch_blocks, tile_row, tile_sides_of,
};
use crate::kernels::matvec::formats::{finish, finish_with_minimum};

/// `total` plus a block's product.
#[device(slots(whole(first: i32, second: i32, factors: U32x4) -> f32))]
pub fn plus_block<const MINIMUM: bool>(
    first: i32,
    second: i32,
    factors: U32x4,
    sum: i32,
    scale: f32,
    total: f32,
) -> f32 {
    let dot = whole(first, second, factors);
    if MINIMUM {
        return finish_with_minimum(dot, factors, sum, scale, total);
    }
    finish(dot, factors, scale, total)
}

/// The left operand of a block: 16 rows of weights as signed bytes, of raw words of rows g and g + 8, both halves of each where a block has two PARTS.
#[device(slots(bytes(word: u32, side: U32x4, index: u32) -> U32x2))]
pub fn left_of<const PARTS: u32>(raw: U32x4, odd: bool, lower_side: U32x4, upper_side: U32x4) -> U32x4 {
    if PARTS == 2 {
        return raw;
    }
    let lower = bytes(if odd { raw.z } else { raw.x }, lower_side, lane_id() % 4);
    let upper = bytes(if odd { raw.w } else { raw.y }, upper_side, lane_id() % 4);
    u32x4(lower.x, upper.x, lower.y, upper.y)
}

/// Adds the products of CLASSES neighbouring blocks, of which the first is block `number` of a row; of a stretch that ends within them there are `left`. The memory is that of the lane: where it
/// reads its part of the first block from, so that all else is constant.
#[device(thin(multiply_thin_turn), slots(
    bytes(word: u32, side: U32x4, index: u32) -> U32x2,
    start(sum: i32) -> i32,
    whole(first: i32, second: i32, factors: U32x4) -> f32,
    factors(side: U32x4, number: u32) -> U32x4
))]
pub fn multiply_turn<
    const K: u32,
    const PARTS: u32,
    const PIECES: u32,
    const PERIOD: u32,
    const MINIMUM: bool,
    const SHARING: u32,
    const CLASSES: u32,
    const GROUPS: u32,
    const EIGHTS: u32,
>(
    totals: &mut Regs<f32>,
    number: u32,
    left: u32,
    lower_row: u32,
    upper_row: u32,
    ring: Shared<U32x4>,
    sides: Shared<u32>,
    x_words: Shared<u32>,
    x_scales: Shared<f32>,
    x_sums: Shared<i32>,
) {
    let mut raw = U32x4::ZERO;
    let mut lower_side = U32x4::ZERO;
    let mut upper_side = U32x4::ZERO;
    #[unroll]
    for c in 0..CLASSES {
        if K / 32 % CLASSES == 0 || c < left {
            // Both halves of a block's bytes, or the nibbles of two blocks.
            if PARTS == 2 || c % 2 == 0 {
                raw = ldmatrix_x4(ring, c * PARTS);
            }
            if c * PARTS % SHARING == 0 {
                let at = c * PARTS / SHARING * (GROUPS * 16 + 2);
                lower_side = side_at(at, sides);
                upper_side = side_at(at + 8, sides);
            }
            let weights = left_of(bytes, raw, c % 2 == 1, lower_side, upper_side);
            // Where all rows start alike, the piece says which part of a word is its own.
            let piece = (number + c) * PARTS;
            let lower_number = if PIECES % PERIOD == 0 { piece } else { lower_row * PIECES + piece };
            let upper_number = if PIECES % PERIOD == 0 { piece } else { upper_row * PIECES + piece };
            let lower = factors(lower_side, lower_number);
            let upper = factors(upper_side, upper_number);
            let from = i32x4(start(0), start(0), start(0), start(0));
            let mut pair = U32x4::ZERO;
            #[unroll]
            for n in 0..EIGHTS {
                let block = n * places_of_eight() + c;
                if EIGHTS == 1 {
                    let one = ldmatrix_x2(x_words, block * 64);
                    pair = u32x4(one.x, one.y, 0, 0);
                } else if n % 2 == 0 {
                    pair = ldmatrix_x4(x_words, block * 64);
                }
                let activations = if n % 2 == 0 { u32x2(pair.x, pair.y) } else { u32x2(pair.z, pair.w) };
                let scale = load::<F32x2>(x_scales, block * 8);
                let sum = if MINIMUM { load::<U32x2>(x_sums, block * 8) } else { u32x2(0, 0) };
                let first = first_dot(weights, activations, from);
                let second = second_dot(weights, activations);
                let to = (c * EIGHTS + n) * 4;
                totals[to] = plus_block(whole, first.x, second.x, lower, sum.x as i32, scale.x, totals[to]);
                totals[to + 1] = plus_block(whole, first.y, second.y, lower, sum.y as i32, scale.y, totals[to + 1]);
                totals[to + 2] = plus_block(whole, first.z, second.z, upper, sum.x as i32, scale.x, totals[to + 2]);
                totals[to + 3] = plus_block(whole, first.w, second.w, upper, sum.y as i32, scale.y, totals[to + 3]);
            }
        }
    }
}

/// The same of blocks with 8 bytes of codes, of which a lane reads all: what its four values are made of may be anywhere in them. `bytes` gets the first word, the second as what lies beside it last, and the block's number with
/// the lane's index. Where a type has minima they are those of both halves, the upper four bits of a byte each: integers whose products with the activations tensor cores sum too.
#[device(slots(
    bytes(word: u32, side: U32x4, index: u32) -> U32x2,
    start(sum: i32) -> i32,
    whole(first: i32, second: i32, factors: U32x4) -> f32,
    factors(side: U32x4, number: u32) -> U32x4
))]
pub fn multiply_thin_turn<
    const K: u32,
    const PIECES: u32,
    const PERIOD: u32,
    const MINIMUM: bool,
    const SHARING: u32,
    const CLASSES: u32,
    const GROUPS: u32,
    const EIGHTS: u32,
>(
    totals: &mut Regs<f32>,
    number: u32,
    left: u32,
    lower_row: u32,
    upper_row: u32,
    ring: Shared<U32x4>,
    sides: Shared<u32>,
    x_words: Shared<u32>,
    x_scales: Shared<f32>,
    x_sums: Shared<i32>,
) {
    let mut lower_side = U32x4::ZERO;
    let mut upper_side = U32x4::ZERO;
    #[unroll]
    for c in 0..CLASSES {
        if K / 32 % CLASSES == 0 || c < left {
            if c % SHARING == 0 {
                let at = c / SHARING * (GROUPS * 16 + 2);
                lower_side = side_at(at, sides);
                upper_side = side_at(at + 8, sides);
            }
            let piece = number + c;
            let lower_number = if PIECES % PERIOD == 0 { piece } else { lower_row * PIECES + piece };
            let upper_number = if PIECES % PERIOD == 0 { piece } else { upper_row * PIECES + piece };
            let low = load::<U32x2>(ring, c);
            let high = load::<U32x2>(ring, c + upper_offset());
            let beside_low = u32x4(lower_side.x, lower_side.y, lower_side.z, low.y);
            let beside_high = u32x4(upper_side.x, upper_side.y, upper_side.z, high.y);
            let lower_words = bytes(low.x, beside_low, lane_id() % 4 + lower_number % PERIOD * 4);
            let upper_words = bytes(high.x, beside_high, lane_id() % 4 + upper_number % PERIOD * 4);
            let weights = u32x4(lower_words.x, upper_words.x, lower_words.y, upper_words.y);
            let lower = factors(lower_side, lower_number);
            let upper = factors(upper_side, upper_number);
            let minima = u32x4(
                (lower.z >> 4 & 15) * 0x01010101,
                (upper.z >> 4 & 15) * 0x01010101,
                (lower.w >> 4 & 15) * 0x01010101,
                (upper.w >> 4 & 15) * 0x01010101,
            );
            let from = i32x4(start(0), start(0), start(0), start(0));
            let mut pair = U32x4::ZERO;
            #[unroll]
            for n in 0..EIGHTS {
                let block = n * places_of_eight() + c;
                if EIGHTS == 1 {
                    let one = ldmatrix_x2(x_words, block * 64);
                    pair = u32x4(one.x, one.y, 0, 0);
                } else if n % 2 == 0 {
                    pair = ldmatrix_x4(x_words, block * 64);
                }
                let activations = if n % 2 == 0 { u32x2(pair.x, pair.y) } else { u32x2(pair.z, pair.w) };
                let scale = load::<F32x2>(x_scales, block * 8);
                let first = first_dot(weights, activations, from);
                let second = second_dot(weights, activations);
                let mut sums = I32x4::ZERO;
                if MINIMUM {
                    sums = mma_m16n8k32_s8(minima, activations, I32x4::ZERO);
                }
                let to = (c * EIGHTS + n) * 4;
                totals[to] = plus_block(whole, first.x, second.x, lower, sums.x, scale.x, totals[to]);
                totals[to + 1] = plus_block(whole, first.y, second.y, lower, sums.y, scale.y, totals[to + 1]);
                totals[to + 2] = plus_block(whole, first.z, second.z, upper, sums.z, scale.x, totals[to + 2]);
                totals[to + 3] = plus_block(whole, first.w, second.w, upper, sums.w, scale.y, totals[to + 3]);
            }
        }
    }
}

/// Pieces from a row of weights to the one that is eight further on.
#[device]
pub fn upper_offset() -> u32 {
    8 * (stage_pieces() + 1)
}

/// Where the part of a stage's first block lies that a lane of warp `own` of tile (`group`, `split`) reads, of stage, run and step 0: its weights and what lies beside them (x), its activations and their scales
/// (y). Two places to a word: no array of shared memory has 65536 elements of theirs. They wait in shared memory: in registers the compiler would compute them anew at every stage.
#[device(thin(lane_thin_places))]
pub fn lane_places<const PARTS: u32, const OWN: u32, const STEP: u32, const EIGHTS: u32>(
    group: u32,
    split: u32,
    own: u32,
) -> U32x2 {
    let lane = lane_id();
    let matrix = lane / 8;
    // Rows and pieces of the lane's part of a matrix: eight rows by 16 bytes.
    let row = group * 16 + matrix % 2 * 8 + lane % 8;
    let ring = row * (stage_pieces() + 1) + own * STEP * PARTS + matrix / 2;
    let sides = (tile_sides_of(0, own * STEP * PARTS) + group * 16 + lane / 4) * side_words();
    let place = rows_place(split * EIGHTS, own, 0, 0, 0, 0);
    let other = if EIGHTS == 1 { 0 } else { matrix / 2 * places_of_eight() };
    let words = (place + other) * 64 + matrix % 2 * 32 + lane % 8 * 4;
    let columns = place * 8 + lane % 4 * 2;
    u32x2(ring | sides << 16, words | columns << 16)
}

/// The same of blocks with 8 bytes of codes: all of the first one of the lane's lower row.
#[device]
pub fn lane_thin_places<const PARTS: u32, const OWN: u32, const STEP: u32, const EIGHTS: u32>(
    group: u32,
    split: u32,
    own: u32,
) -> U32x2 {
    let lane = lane_id();
    let row = group * 16 + lane / 4;
    let ring = row * (stage_pieces() + 1) + own * STEP * PARTS;
    let sides = (tile_sides_of(0, own * STEP * PARTS) + row) * side_words();
    let place = rows_place(split * EIGHTS, own, 0, 0, 0, 0);
    let other = if EIGHTS == 1 { 0 } else { lane / 16 * places_of_eight() };
    let words = (place + other) * 64 + lane / 8 % 2 * 32 + lane % 8 * 4;
    let columns = place * 8 + lane % 4 * 2;
    u32x2(ring | sides << 16, words | columns << 16)
}

/// Adds a stage's products to the sums of warp `own` of those of a tile, which starts at output `base`.
#[device(slots(
    bytes(word: u32, side: U32x4, index: u32) -> U32x2,
    start(sum: i32) -> i32,
    whole(first: i32, second: i32, factors: U32x4) -> f32,
    factors(side: U32x4, number: u32) -> U32x4
))]
pub fn multiply_stage<
    const K: u32,
    const PARTS: u32,
    const MINIMUM: bool,
    const SHARING: u32,
    const CLASSES: u32,
    const STRETCH: u32,
    const STEP: u32,
    const GROUPS: u32,
>(
    totals: &mut Regs<f32>,
    places: Shared<U32x2>,
    base: u32,
    outputs: u32,
    group: u32,
    own: u32,
    run: u32,
    step: u32,
    stage: u32,
    ring: Shared<U32x4>,
    sides: Shared<u32>,
    x_words: Shared<u32>,
    x_scales: Shared<f32>,
    x_sums: Shared<i32>,
) {
    let lane = places[thread_idx()];
    let own_ring = ring.offset(lane.x % 65536 + stage * (GROUPS * 16 * (stage_pieces() + 1)));
    let own_sides = sides.offset(lane.x / 65536 + tile_sides_of(stage, 0) * side_words());
    let place = rows_place(0, 0, run, step, stage, 0);
    let own_words = x_words.offset(lane.y % 65536 + place * 64);
    let own_columns = lane.y / 65536 + place * 8;
    // Their numbers count where a row's pieces do not start with a whole word.
    let lower_row = tile_row(base, group * 16 + lane_id() / 4, outputs);
    let upper_row = tile_row(base, group * 16 + lane_id() / 4 + 8, outputs);
    let before = first_block(own, run, 0);
    let blocks = if stages_are_whole() { STRETCH } else { stretch_blocks(own, run) };
    // Not unrolled: what is loaded ahead for several turns does not fit the registers.
    #[unroll(1)]
    for turn in 0..STEP / CLASSES {
        let at = step * STEP + turn * CLASSES;
        if stages_are_whole() || at < blocks {
            multiply_turn(
                bytes,
                start,
                whole,
                factors,
                totals,
                before + at,
                blocks - at,
                lower_row,
                upper_row,
                own_ring.offset(turn * (CLASSES * PARTS)),
                own_sides.offset(turn * (CLASSES * PARTS / SHARING) * (GROUPS * 16 + 2) * side_words()),
                own_words.offset(turn * (CLASSES * 64)),
                x_scales.offset(own_columns + turn * (CLASSES * 8)),
                x_sums.offset(if MINIMUM { own_columns + turn * (CLASSES * 8) } else { 0 }),
            );
        }
    }
}

/// Adds the sum of a stretch that has ended to the lane's results, unless it is the first of them, and starts its sums anew.
#[device]
pub fn end_stretch<const CLASSES: u32, const EIGHTS: u32>(totals: &mut Regs<f32>, values: &mut Regs<f32>, first: bool) {
    #[unroll]
    for i in 0..EIGHTS * 4 {
        // As the lanes of one row: those half as many apart as there are, then a quarter.
        let mut of = regs(0.0f32, CLASSES);
        #[unroll]
        for c in 0..CLASSES {
            of[c] = totals[c * EIGHTS * 4 + i];
            totals[c * EIGHTS * 4 + i] = 0.0;
        }
        let mut half = CLASSES / 2;
        #[unroll]
        while half > 0 {
            #[unroll]
            for c in 0..CLASSES / 2 {
                if c < half {
                    of[c] = of[c] + of[c + half];
                }
            }
            half = half / 2;
        }
        values[i] = if first { of[0] } else { values[i] + of[0] };
    }
}

/// Leaves a warp's results for the four warps of its tile, at `to` and every 32 on.
#[device]
pub fn leave_stretch<const EIGHTS: u32>(values: &mut Regs<f32>, to: u32, sums: Shared<F32x4>) {
    #[unroll]
    for n in 0..EIGHTS {
        let of = f32x4(values[n * 4], values[n * 4 + 1], values[n * 4 + 2], values[n * 4 + 3]);
        sums[to + n * 32 + lane_id()] = of;
    }
}

/// The sum of the four stretches of a lane's results, which lie `apart` from each other.
#[device]
pub fn results_of_stretches(at: u32, apart: u32, sums: Shared<F32x4>) -> F32x4 {
    let first = sums[at];
    let second = sums[at + apart];
    let third = sums[at + 2 * apart];
    let fourth = sums[at + 3 * apart];
    f32x4(
        first.x + second.x + third.x + fourth.x,
        first.y + second.y + third.y + fourth.y,
        first.z + second.z + third.z + fourth.z,
        first.w + second.w + third.w + fourth.w,
    )
}

/// A lane's results of two rows of activations, changed: x and y are of output `lower`, z and w of `upper`, or of what the
/// first are joined to. Places behind the last ones are theirs.
#[device(slots(change(four: F32x4, outputs: U32x2, rows: U32x2) -> F32x4))]
pub fn changed<const PAIRED: bool, const FACTORED: bool>(
    value: F32x4,
    lower: u32,
    upper: u32,
    outputs: u32,
    first: u32,
    rows: u32,
    factor: Input<f32>,
) -> F32x4 {
    let own = u32x2(first.min(rows - 1), (first + 1).min(rows - 1));
    let mut four = value;
    if FACTORED {
        let by = f32x2(factor[own.x], factor[own.y]);
        four = f32x4(value.x * by.x, value.y * by.y, value.z * by.x, value.w * by.y);
    }
    let second = if PAIRED { lower.min(outputs - 1) + outputs } else { upper.min(outputs - 1) };
    change(four, u32x2(lower.min(outputs - 1), second), own)
}

/// Writes the results of eight rows of activations, from row `row` on: the lane's rows g and g + 8 of the weights, or what they are joined to. `base` is the first output of the 16.
#[device(slots(
    change(four: F32x4, outputs: U32x2, rows: U32x2) -> F32x4,
    join(value: f32, up: f32) -> f32,
    epilogue(value: f32, row: u32) -> f32
))]
pub fn leave_results<const PAIRED: bool>(
    value: F32x4,
    base: u32,
    outputs: u32,
    row: u32,
    rows: u32,
    by_stride: u32,
    factor: Input<f32>,
    out: Output<f32>,
) {
    let lower = base + lane_id() / 4;
    let upper = lower + 8;
    let first = row + lane_id() % 4 * 2;
    let four = changed(change, value, lower, upper, outputs, first, rows, factor);
    let own = first * outputs;
    if lower < outputs && first < rows {
        let at = first * by_stride + lower;
        out[own + lower] = epilogue(join(four.x, if PAIRED { four.z } else { 0.0 }), at);
        if first + 1 < rows {
            out[own + outputs + lower] = epilogue(join(four.y, if PAIRED { four.w } else { 0.0 }), at + by_stride);
        }
    }
    if !PAIRED && upper < outputs && first < rows {
        let at = first * by_stride + upper;
        out[own + upper] = epilogue(join(four.z, 0.0), at);
        if first + 1 < rows {
            out[own + outputs + upper] = epilogue(join(four.w, 0.0), at + by_stride);
        }
    }
}
