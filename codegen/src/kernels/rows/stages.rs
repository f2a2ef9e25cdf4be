//! The ring of stages through which a warp of a tensor-core product gets its weights and activations, by `cp.async`.
//!
//! A step is LANES units of every row. All warps copy weights together, whole steps of a row at a time: pieces of a row that warps fetched for
//! themselves, 32 or 64 bytes each, came at half the memory's rate. Of a step a warp multiplies four units: two neighbours, and the two
//! LANES / 2 further on, so that the first level of the lanes' tree is within a thread. Activations it copies for itself. In shared memory a row of
//! weights is 16 bytes longer than a step, so that `ldmatrix` reads eight rows without bank conflicts.

use gemma4c_dsl::prelude::*;

/// The unit of a step that is the warp's `j`-th.
#[device]
pub fn unit_of_step<const LANES: u32>(step: u32, j: u32) -> u32 {
    step * LANES + warp_id() * 2 + j % 2 + j / 2 * (LANES / 2)
}

/// The row of the matrix that is column `column` of a tile. Out-of-range columns are clamped to the last output, and their results dropped.
#[device]
pub fn weight_row<const COLUMNS: u32, const PAIRED: bool>(base: u32, column: u32, outputs: u32) -> u32 {
    let half = if PAIRED { COLUMNS / 2 } else { COLUMNS };
    (base + column % half).min(outputs - 1) + column / half * outputs
}

/// Words that lie beside a unit: its scales, what scales them, and its high bits.
#[device]
pub fn side_words<const SUPERS: u32, const HIGH: u32>() -> u32 {
    (if SUPERS > 0 { 2 } else { 1 }) + HIGH
}

/// What lies beside a unit, in the order of the format's side function.
#[device]
pub fn side_at<const SUPERS: u32, const HIGH: u32>(at: u32, sides: Shared<u32>) -> U32x4 {
    let words = side_words();
    let first = sides[at * words];
    let second = if words > 1 { sides[at * words + 1] } else { 0 };
    let third = if words > 2 { sides[at * words + 2] } else { 0 };
    let fourth = if words > 3 { sides[at * words + 3] } else { 0 };
    if HIGH == 2 { u32x4(third, fourth, first, second) } else { u32x4(first, second, third, fourth) }
}

/// Which of a stage's sides is that of a step's unit: neighbours share theirs where it is the same words.
#[device]
pub fn side_slot<const SHARED_SIDES: bool>(unit: u32) -> u32 {
    if SHARED_SIDES { unit / 2 } else { unit }
}

/// The numbers of the first units that a thread copies for a tile: neighbouring threads have neighbouring units.
#[device]
pub fn first_units<const K: u32, const UNIT: u32, const LANES: u32, const COLUMNS: u32, const PAIRED: bool>(
    base: u32,
    outputs: u32,
    starts: &mut Regs<u32>,
) {
    #[unroll]
    for p in 0..COLUMNS / 8 {
        let piece = thread_idx() + p * (LANES * 8);
        let row = weight_row(base, piece / LANES, outputs);
        starts[p] = row * (K / UNIT) + (piece % LANES).min(K / UNIT - 1);
    }
}

/// Starts a stage's weights on their way: LANES units of every row of a tile, and what lies beside them. Units past the end of a row
/// are its last, which is not used.
#[device]
pub fn stage_weights<
    const K: u32,
    const UNIT: u32,
    const LANES: u32,
    const COLUMNS: u32,
    const SHARED_SIDES: bool,
    const SCALES: u32,
    const SUPERS: u32,
    const HIGH: u32,
>(
    starts: &Regs<u32>,
    step: u32,
    stage: u32,
    codes: Weights<U32x4>,
    high: Weights<u32>,
    scales: Weights<u32>,
    supers: Weights<u32>,
    ring: Shared<U32x4>,
    sides: Shared<u32>,
) {
    let units = K / UNIT;
    let slots = if SHARED_SIDES { LANES / 2 } else { LANES };
    #[unroll]
    for p in 0..COLUMNS / 8 {
        let piece = thread_idx() + p * (LANES * 8);
        let column = piece / LANES;
        let unit = piece % LANES;
        let last = units - 1 - unit.min(units - 1);
        let number = starts[p] + if units % LANES == 0 { step * LANES } else { (step * LANES).min(last) };
        cp_async16(ring, (stage * COLUMNS + column) * (LANES + 1) + unit, codes, number);
        if !SHARED_SIDES || unit % 2 == 0 {
            let to = ((stage * slots + side_slot(unit)) * COLUMNS + column) * side_words();
            cp_async4(sides, to, scales, number / SCALES);
            if SUPERS > 0 {
                cp_async4(sides, to + 1, supers, number / SUPERS.max(1));
            }
            let behind = to + side_words() - HIGH;
            if HIGH > 0 {
                cp_async4(sides, behind, high, number * HIGH);
            }
            if HIGH > 1 {
                cp_async4(sides, behind + 1, high, number * HIGH + 1);
            }
        }
    }
}

/// Starts the activations of a step's four units on their way. RESIDENT ones stay at the unit's own place.
#[device]
pub fn stage_activations<
    const K: u32,
    const UNIT: u32,
    const LANES: u32,
    const TILE: u32,
    const RESIDENT: bool,
    const SUMS: bool,
>(
    step: u32,
    stage: u32,
    first: u32,
    rows: u32,
    x: Input<u32>,
    xscale: Input<f32>,
    xsum: Input<i32>,
    words: Shared<u32>,
    scales: Shared<f32>,
    sums: Shared<i32>,
) {
    let units = K / UNIT;
    let parts = UNIT / 16;
    let scaled = UNIT / 8;
    // Neighbouring lanes copy neighbouring parts of a row.
    #[unroll]
    for p in 0..TILE * parts / 8 {
        let piece = lane_id() + p * 32;
        let row = piece / (2 * parts) % TILE;
        let j = piece / (2 * parts * TILE) * 2 + piece % (2 * parts) / parts;
        let part = piece % parts;
        let unit = unit_of_step(step, j);
        if unit < units {
            let place = if RESIDENT { unit } else { stage * 4 + j };
            let from = (first + row).min(rows - 1) * (K / 4) + (unit * parts + part) * 4;
            cp_async16(words, ((place * parts + part) * TILE + row) * 4, x, from);
        }
    }
    for piece in (lane_id()..TILE * scaled).by(32) {
        let row = if UNIT == 32 { piece / 2 % TILE } else { piece % TILE };
        let slot = if UNIT == 32 { piece % 2 + piece / (2 * TILE) * 2 } else { piece / TILE };
        let unit = unit_of_step(step, if UNIT == 32 { slot } else { slot * 2 });
        if unit < units {
            let group = unit * UNIT / 32;
            let place = if RESIDENT { group } else { stage * scaled + slot };
            let from = (first + row).min(rows - 1) * (K / 32) + group;
            cp_async4(scales, place * TILE + row, xscale, from);
            if SUMS {
                cp_async4(sums, place * TILE + row, xsum, from);
            }
        }
    }
}
