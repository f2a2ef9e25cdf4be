//! A step of a tile: 128 values of K, from memory to the fragments of a warp.

use gemma4c_dsl::prelude::*;

use super::views::{GemmRing, GemmRows, GemmWeights};
/// Steps of a slice are those from `steps * slice / SLICES` on.
#[device]
pub fn first_step(slice: u32, slices: u32, k: u32) -> u32 {
    k.div_ceil(128) * slice / slices
}

/// Chunks of 16 bytes of a row of a step in the ring: 16 and some more, so that a quarter of a warp reads all banks.
#[device]
pub fn row_chunks(unit: u32) -> u32 {
    if unit == 16 {
        17
    } else if unit == 8 {
        20
    } else {
        18
    }
}

/// Where the weights of this lane's rows begin, in units: of each 16 rows of the matrix, rows g and g + 8; of eight
/// gated ones, gate and value. Rows past the end repeat the last one.
#[device]
pub fn row_units<const UNIT: u32, const TILES: u32, const GEGLU: bool>(
    units: &mut Regs<u32>,
    output: u32,
    first: u32,
    outputs: u32,
    k: u32,
) {
    #[unroll]
    for m in 0..TILES {
        let column = output + m * if GEGLU { 8 } else { 16 } + lane_id() / 4;
        let low = column.min(outputs - 1);
        let high = if GEGLU { low + outputs } else { (column + 8).min(outputs - 1) };
        units[m * 2] = (first + low) * (k / UNIT);
        units[m * 2 + 1] = (first + high) * (k / UNIT);
    }
}

/// The unit of a row that a lane multiplies: the last one stands for those past the end.
#[device]
pub fn unit_at<const UNIT: u32, const WHOLE: bool>(start: u32, step: u32, l: u32, k: u32) -> u32 {
    let unit = step * (128 / UNIT) + l * 4 + lane_id() % 4;
    start + if WHOLE { unit } else { unit.min(k / UNIT - 1) }
}

/// Issues the copies of a step's codes that this lane multiplies, and of the scales of its quad's rows, where that step
/// is `wanted`: `codes_at` and `scales_at` are its stage.
#[device]
pub fn copy_weights<const UNIT: u32, const SCALED: bool, const WHOLE: bool, const TILES: u32>(
    weights: GemmWeights,
    ring: GemmRing,
    codes_at: u32,
    scales_at: u32,
    units: &Regs<u32>,
    step: u32,
    wanted: bool,
    k: u32,
) {
    if wanted {
        let quad = lane_id() % 4;
        #[unroll]
        for i in 0..TILES * 2 {
            #[unroll]
            for l in 0..32 / UNIT {
                let to = ring.codes.offset(codes_at + lane_id());
                // One address serves all loads of a whole step.
                let from = weights.codes.offset(unit_at(units[i], step, if WHOLE { 0 } else { l }, k));
                cp_async16(to, (i * (32 / UNIT) + l) * 32, from, if WHOLE { l * 4 } else { 0 });
            }
        }
        if SCALED {
            // Two words of each row: the first two lanes of a quad bring row g's, the others row g + 8's.
            #[unroll]
            for m in 0..TILES {
                let start = if quad >= 2 { units[m * 2 + 1] } else { units[m * 2] } / (64 / UNIT);
                let last = if WHOLE { step * 2 + 1 } else { k / 64 - 1 };
                let word = (step * 2 + quad % 2).min(last);
                let to = scales_at + m * 32 + (quad / 2 * 8 + lane_id() / 4) * 2 + quad % 2;
                cp_async4(ring.scales, to, weights.scales, start + word);
            }
        }
    }
}

/// Loads what lies beside a step's codes, where rows are not SCALED.
#[device(slots(side(unit: u32, more: u32) -> U32x4))]
pub fn load_sides<const UNIT: u32, const WHOLE: bool, const TILES: u32>(
    sides: &mut Regs<U32x4>,
    units: &Regs<u32>,
    step: u32,
    k: u32,
) {
    #[unroll]
    for i in 0..TILES * 2 {
        #[unroll]
        for l in 0..32 / UNIT {
            sides[i * (32 / UNIT) + l] = side(unit_at(units[i], step, l, k), 0);
        }
    }
}

/// Chunk `chunk` of a row of a step, in the ring: where 32 values are a lane's, every other eight chunks change places
/// with their neighbours, so that lanes two apart read different banks.
#[device]
pub fn chunk_place<const UNIT: u32>(chunk: u32) -> u32 {
    if UNIT == 32 { chunk ^ (chunk >> 3 & 1) } else { chunk }
}

/// Fills the rows of all stages that the batch does not have with zeros, by the warps of a slice: nobody copies them.
#[device]
pub fn clear_absent_rows<const UNIT: u32, const ROWS: u32, const ACROSS: u32, const STAGES: u32>(
    ring: Shared<BF16>,
    stage_values: u32,
    present: u32,
) {
    let stride = row_chunks(UNIT);
    for at in (present * stride + thread_idx() % (ACROSS * 32)..ROWS * stride).by(ACROSS * 32) {
        #[unroll]
        for stage in 0..STAGES {
            store(ring, stage * stage_values + at * 8, U32x4::ZERO);
        }
    }
}

/// Issues the copies of a step's activations, by the warps of its slice; zeros past the end of K.
#[device]
pub fn copy_activations_of_step<
    const UNIT: u32,
    const WHOLE: bool,
    const ROWS: u32,
    const ACROSS: u32,
    const PAIRS: u32,
>(
    ring: Shared<BF16>,
    rows: GemmRows,
    first_row: u32,
    end: u32,
    step: u32,
    k: u32,
) {
    let stride = row_chunks(UNIT);
    let threads = ACROSS * 32;
    let thread = thread_idx() % threads;
    #[unroll]
    for i in 0..(ROWS * 16 + threads - 1) / threads {
        let at = thread + i * threads;
        let row = at / 16;
        let chunk = at % 16;
        if row < ROWS && first_row + row < end {
            let to = row * stride + chunk_place(chunk);
            let place = step * 16 + chunk;
            if WHOLE || place < k / 8 {
                let mut from = first_row + row;
                if PAIRS > 0 {
                    from = rows.order[from] / PAIRS.max(1);
                }
                cp_async16(ring, to * 8, rows.x, from * k + place * 8);
            } else {
                store(ring, to * 8, U32x4::ZERO);
            }
        }
    }
}

/// Eight values of row `i` of a lane's rows in a step: part `p` of load `l`.
#[device(slots(decode(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4))]
pub fn eight_of<const UNIT: u32, const SCALED: bool, const WHOLE: bool>(
    ring: GemmRing,
    sides: &Regs<U32x4>,
    start: u32,
    step: u32,
    i: u32,
    l: u32,
    p: u32,
    k: u32,
) -> U32x4 {
    let codes = ring.codes[(i * (32 / UNIT) + l) * 32 + lane_id()];
    let mut beside = sides[i * (32 / UNIT) + l];
    let mut unit = unit_at(start, step, l, k);
    if SCALED {
        // A word has the scales of 64 values.
        let quad = lane_id() % 4;
        unit = l * 4 + quad;
        beside = u32x4(ring.scales[i / 2 * 32 + (i % 2 * 8 + lane_id() / 4) * 2 + unit / (64 / UNIT)], 0, 0, 0);
    }
    decode(codes, beside, unit, p)
}

/// Multiplies a step.
#[device(slots(decode(codes: U32x4, side: U32x4, unit: u32, part: u32) -> U32x4))]
pub fn multiply_step<const UNIT: u32, const ROWS: u32, const TILES: u32, const SCALED: bool, const WHOLE: bool>(
    ring: GemmRing,
    sides: &mut Regs<U32x4>,
    units: &Regs<u32>,
    step: u32,
    sums: &mut Regs<F32x4>,
    k: u32,
) {
    let quad = lane_id() % 4;
    #[unroll]
    for l in 0..32 / UNIT {
        #[unroll]
        for p in 0..(UNIT / 8).max(1) {
            // Eight values of both rows of each tile: of f32 four.
            let mut low = regs(U32x4::ZERO, TILES);
            let mut high = regs(U32x4::ZERO, TILES);
            #[unroll]
            for m in 0..TILES {
                low[m] = eight_of(decode, ring, sides, units[m * 2], step, m * 2, l, p, k);
                high[m] = eight_of(decode, ring, sides, units[m * 2 + 1], step, m * 2 + 1, l, p, k);
            }
            let chunk = if UNIT == 4 { l * 2 + quad / 2 } else { l * (UNIT / 2) + quad * (UNIT / 8) + p };
            #[unroll]
            for n in 0..ROWS / 8 {
                let place = (n * 8 + lane_id() / 4) * row_chunks(UNIT) + chunk_place(chunk);
                let eight = load::<U32x4>(ring.x, place * 8);
                let mut first = u32x2(eight.x, eight.y);
                if UNIT == 4 && quad % 2 == 1 {
                    first = u32x2(eight.z, eight.w);
                }
                #[unroll]
                for m in 0..TILES {
                    let at = m * (ROWS / 8) + n;
                    sums[at] = mma_m16n8k16_bf16(u32x4(low[m].x, high[m].x, low[m].y, high[m].y), first, sums[at]);
                }
                if UNIT > 4 {
                    #[unroll]
                    for m in 0..TILES {
                        let at = m * (ROWS / 8) + n;
                        let left = u32x4(low[m].z, high[m].z, low[m].w, high[m].w);
                        sums[at] = mma_m16n8k16_bf16(left, u32x2(eight.z, eight.w), sums[at]);
                    }
                }
            }
        }
    }
}
