//! The ring of stages through which a tensor-core product gets its weights and activations, by `cp.async`.
//!
//! A step is LANES pieces of 16 bytes of every row: CLASSES units, of PARTS pieces each. COPIERS threads copy it together, whole steps of a row at a
//! time: pieces of a row that warps fetched for themselves, 32 or 64 bytes each, came at half the memory's rate. In shared memory a row of weights
//! is 16 bytes longer than a step, so that `ldmatrix` reads eight rows without bank conflicts.

use gemma4c_dsl::prelude::*;

/// The number of a step's unit that is the warp's `j`-th: a warp has every WARPS-th, so that the first levels of the lanes' tree are within a
/// thread.
#[device]
pub fn own_unit<const WARPS: u32>(j: u32) -> u32 {
    warp_id() + j * WARPS
}

/// The row of the matrix that is column `column` of a tile. Out-of-range columns are clamped to the last output, and their results dropped.
#[device]
pub fn weight_row<const COLUMNS: u32, const PAIRED: bool>(base: u32, column: u32, outputs: u32) -> u32 {
    let half = if PAIRED { COLUMNS / 2 } else { COLUMNS };
    (base + column % half).min(outputs - 1) + column / half * outputs
}

/// Words that lie beside a piece: its scales, what scales them, and its high bits.
#[device]
pub fn side_words<const SUPERS: u32, const HIGH: u32>() -> u32 {
    (if SUPERS > 0 { 2 } else { 1 }) + HIGH
}

/// What lies beside a piece, in the order of the format's side function.
#[device]
pub fn side_at<const SUPERS: u32, const HIGH: u32>(at: u32, sides: Shared<u32>) -> U32x4 {
    let words = side_words();
    let first = sides[at * words];
    let second = if words > 1 { sides[at * words + 1] } else { 0 };
    let third = if words > 2 { sides[at * words + 2] } else { 0 };
    let fourth = if words > 3 { sides[at * words + 3] } else { 0 };
    if HIGH == 2 { u32x4(third, fourth, first, second) } else { u32x4(first, second, third, fourth) }
}

/// From a slot of a stage's sides to the next, in sides: two more than there are columns, for the banks' sake.
#[device]
pub fn side_stride<const COLUMNS: u32>() -> u32 {
    COLUMNS + 2
}

/// Where the sides of a step's piece start: SHARING neighbours have the same words.
#[device]
pub fn sides_of<const LANES: u32, const SHARING: u32>(stage: u32, piece: u32) -> u32 {
    (stage * (LANES / SHARING) + piece / SHARING) * side_stride()
}

/// Starts a stage's weights on their way, shared out among THREADS threads of which this is `thread`: LANES pieces of every row of a tile, and what
/// lies beside them. Neighbouring threads have neighbouring pieces. Pieces past the end of a row are its last, which is not used.
#[device]
pub fn stage_weights<
    const PIECES: u32,
    const LANES: u32,
    const COPIERS: u32,
    const COLUMNS: u32,
    const PAIRED: bool,
    const SHARING: u32,
    const SCALES: u32,
    const SUPERS: u32,
    const HIGH: u32,
>(
    thread: u32,
    base: u32,
    outputs: u32,
    step: u32,
    stage: u32,
    codes: Weights<U32x4>,
    high: Weights<u32>,
    scales: Weights<u32>,
    supers: Weights<u32>,
    ring: Shared<U32x4>,
    sides: Shared<u32>,
) {
    let piece = thread % LANES;
    let number = if PIECES % LANES == 0 { step * LANES + piece } else { (step * LANES + piece).min(PIECES - 1) };
    #[unroll]
    for p in 0..COLUMNS * LANES / COPIERS {
        let column = thread / LANES + p * (COPIERS / LANES);
        let from = weight_row(base, column, outputs) * PIECES + number;
        cp_async16(ring, (stage * COLUMNS + column) * (LANES + 1) + piece, codes, from);
    }
    let slots = LANES / SHARING;
    for place in (thread..COLUMNS * slots).by(COPIERS) {
        let column = place / slots;
        let first = place % slots * SHARING;
        let number = if PIECES % LANES == 0 { step * LANES + first } else { (step * LANES + first).min(PIECES - 1) };
        let from = weight_row(base, column, outputs) * PIECES + number;
        let to = (sides_of(stage, first) + column) * side_words();
        cp_async4(sides, to, scales, from / SCALES);
        if SUPERS > 0 {
            cp_async4(sides, to + 1, supers, from / SUPERS.max(1));
        }
        let behind = to + side_words() - HIGH;
        if HIGH > 0 {
            cp_async4(sides, behind, high, from * HIGH);
        }
        if HIGH > 1 {
            cp_async4(sides, behind + 1, high, from * HIGH + 1);
        }
    }
}

/// Units of activations that shared memory has places for: all of a row, or those of all stages.
#[device]
pub fn unit_places<const K: u32, const CLASSES: u32, const STAGES: u32, const RESIDENT: bool>() -> u32 {
    if RESIDENT { K / 32 } else { STAGES * CLASSES }
}

/// Where the activations of a step's unit lie, of eight rows: RESIDENT ones at the unit's own place. Eight rows of a unit's scales lie together, and
/// so do eight rows of 16 bytes of its codes.
#[device]
pub fn place_of<const CLASSES: u32, const RESIDENT: bool>(step: u32, stage: u32, unit: u32, eight: u32) -> u32 {
    eight * unit_places() + (if RESIDENT { step } else { stage }) * CLASSES + unit
}

/// Starts the activations of a step on their way, shared out as the weights are. In PANELS of eight rows they lie in memory as they will in shared
/// memory; else row by row.
#[device]
pub fn stage_activations<
    const K: u32,
    const CLASSES: u32,
    const COPIERS: u32,
    const TILE: u32,
    const RESIDENT: bool,
    const SUMS: bool,
    const PANELS: bool,
>(
    thread: u32,
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
    let units = K / 32;
    let left = units - step * CLASSES;
    if PANELS {
        #[unroll(4)]
        for place in (thread..TILE * CLASSES * 2).by(COPIERS) {
            let eight = place / (CLASSES * 16);
            let part = place % (CLASSES * 16);
            if part / 16 < left {
                let from = (first / 8 + eight).min((rows - 1) / 8) * units + step * CLASSES;
                let to = place_of(step, stage, 0, eight);
                cp_async16(words, (to * 16 + part) * 4, x, (from * 16 + part) * 4);
            }
        }
        for place in (thread..TILE * CLASSES / 4).by(COPIERS) {
            let eight = place / (CLASSES * 2);
            let part = place % (CLASSES * 2);
            if part / 2 < left {
                let from = (first / 8 + eight).min((rows - 1) / 8) * units + step * CLASSES;
                let to = place_of(step, stage, 0, eight);
                cp_async16(scales, to * 8 + part * 4, xscale, from * 8 + part * 4);
                if SUMS {
                    cp_async16(sums, to * 8 + part * 4, xsum, from * 8 + part * 4);
                }
            }
        }
    } else {
        #[unroll(4)]
        for place in (thread..TILE * CLASSES * 2).by(COPIERS) {
            let row = place / 2 % TILE;
            let part = place / (2 * TILE) * 2 + place % 2;
            if part / 2 < left {
                let from = (first + row).min(rows - 1) * (K / 4) + step * (CLASSES * 8) + part * 4;
                let to = place_of(step, stage, 0, row / 8) * 2 + part;
                cp_async16(words, (to * 8 + row % 8) * 4, x, from);
            }
        }
        for place in (thread..TILE * CLASSES).by(COPIERS) {
            let row = place % TILE;
            let unit = place / TILE;
            if unit < left {
                let from = (first + row).min(rows - 1) * units + step * CLASSES + unit;
                let to = place_of(step, stage, unit, row / 8) * 8 + row % 8;
                cp_async4(scales, to, xscale, from);
                if SUMS {
                    cp_async4(sums, to, xsum, from);
                }
            }
        }
    }
}
