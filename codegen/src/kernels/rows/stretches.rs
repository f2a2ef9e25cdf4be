//! The ring of stages through which a product by [tiles](super::tiles) gets its weights and activations, by `cp.async`.
//!
//! A row of weights is four stretches of STRETCH blocks of 32 values, each summed by itself. OWN warps, four or one, have them: a stretch each, or all four in turn, run after run. A stage holds STEP blocks for each of these warps, of all rows of
//! a tile. COPIERS threads copy it together, neighbours neighbouring pieces of 16 bytes: runs shorter than 128 bytes come slowly. In shared memory a row of weights
//! is 16 bytes longer than its pieces, so that `ldmatrix` reads eight rows without bank conflicts.

use gemma4c_dsl::prelude::*;

use super::stages::side_words;

/// Pieces of 16 bytes of a row that a stage holds.
#[device]
pub fn stage_pieces<const PARTS: u32, const OWN: u32, const STEP: u32>() -> u32 {
    OWN * STEP * PARTS
}

/// Whether all stretches are whole, and whole stages.
#[device]
pub fn stages_are_whole<const K: u32, const STRETCH: u32, const STEP: u32>() -> bool {
    K / 32 == 4 * STRETCH && STRETCH % STEP == 0
}

/// Stretches that a warp has, in turn.
#[device]
pub fn runs<const OWN: u32>() -> u32 {
    4 / OWN
}

/// The number, in its row, of the first block that a stage holds for warp `own`.
#[device]
pub fn first_block<const STRETCH: u32, const STEP: u32>(own: u32, run: u32, step: u32) -> u32 {
    (own * runs() + run) * STRETCH + step * STEP
}

/// Blocks of a stretch of warp `own`: the last ones of a row may be shorter, or empty.
#[device]
pub fn stretch_blocks<const K: u32, const STRETCH: u32>(own: u32, run: u32) -> u32 {
    let before = first_block(own, run, 0);
    ((K / 32).max(before) - before).min(STRETCH)
}

/// The row of the matrix that is row `row` of a tile: 16 neighbours to a product; where they are PAIRED eight, and then those that are joined to them. Rows past the end are clamped to
/// the last one, and their results dropped.
#[device]
pub fn tile_row<const PAIRED: bool>(base: u32, row: u32, outputs: u32) -> u32 {
    if PAIRED {
        return (base + row / 16 * 8 + row % 8).min(outputs - 1) + row % 16 / 8 * outputs;
    }
    (base + row).min(outputs - 1)
}

/// The number, in its row, of a stage's piece. Pieces past the end of a row are its last, which is not used.
#[device]
pub fn piece_number<const PARTS: u32, const PIECES: u32, const STEP: u32>(piece: u32, run: u32, step: u32) -> u32 {
    let each = STEP * PARTS;
    let number = first_block(piece / each, run, step) * PARTS + piece % each;
    if stages_are_whole() { number } else { number.min(PIECES - 1) }
}

/// Where the sides of a stage's piece start: SHARING neighbours have the same words. Two more than there are rows, for the banks' sake.
#[device]
pub fn tile_sides_of<const SHARING: u32, const GROUPS: u32>(stage: u32, piece: u32) -> u32 {
    (stage * (stage_pieces() / SHARING) + piece / SHARING) * (GROUPS * 16 + 2)
}

/// The first pieces of the rows of weights that thread `thread` of COPIERS copies from, of a tile: those of codes, and of what lies beside them.
#[device]
pub fn rows_of_copier<
    const PARTS: u32,
    const PIECES: u32,
    const SHARING: u32,
    const OWN: u32,
    const STEP: u32,
    const GROUPS: u32,
    const COPIERS: u32,
>(
    thread: u32,
    base: u32,
    outputs: u32,
    of_codes: &mut Regs<u32>,
    of_sides: &mut Regs<u32>,
) {
    let pieces = stage_pieces();
    #[unroll]
    for p in 0..GROUPS * 16 * OWN * STEP * PARTS / COPIERS {
        of_codes[p] = tile_row(base, thread / pieces + p * (COPIERS / pieces), outputs) * PIECES;
    }
    let slots = pieces / SHARING;
    #[unroll]
    for p in 0..(GROUPS * 16 * OWN * STEP * PARTS / SHARING + COPIERS - 1) / COPIERS {
        of_sides[p] = tile_row(base, thread / slots + p * (COPIERS / slots), outputs) * PIECES;
    }
}

/// Starts a stage's weights on their way, shared out among COPIERS threads of which this is `thread`.
#[device]
pub fn stage_tile<
    const PARTS: u32,
    const SHARING: u32,
    const SCALES: u32,
    const SUPERS: u32,
    const HIGH: u32,
    const OWN: u32,
    const STEP: u32,
    const GROUPS: u32,
    const COPIERS: u32,
>(
    thread: u32,
    of_codes: &mut Regs<u32>,
    of_sides: &mut Regs<u32>,
    run: u32,
    step: u32,
    stage: u32,
    codes: Weights<U32x4>,
    high: Weights<u32>,
    scales: Weights<u32>,
    supers: Weights<u32>,
    ring: Shared<U32x4>,
    sides: Shared<u32>,
) {
    let pieces = stage_pieces();
    let piece = thread % pieces;
    let number = piece_number(piece, run, step);
    let to = ring.offset((stage * (GROUPS * 16) + thread / pieces) * (pieces + 1) + piece);
    #[unroll]
    for p in 0..GROUPS * 16 * OWN * STEP * PARTS / COPIERS {
        cp_async16(to, p * (COPIERS / pieces) * (pieces + 1), codes, of_codes[p] + number);
    }
    let slots = pieces / SHARING;
    let first = thread % slots * SHARING;
    let first_number = piece_number(first, run, step);
    let words = side_words();
    let beside = sides.offset((tile_sides_of(stage, first) + thread / slots) * words);
    #[unroll]
    for p in 0..(GROUPS * 16 * OWN * STEP * PARTS / SHARING + COPIERS - 1) / COPIERS {
        if GROUPS * 16 * slots % COPIERS == 0 || thread + p * COPIERS < GROUPS * 16 * slots {
            let at = of_sides[p] + first_number;
            let place = p * (COPIERS / slots) * words;
            cp_async4(beside, place, scales, at / SCALES);
            if SUPERS > 0 {
                cp_async4(beside, place + 1, supers, at / SUPERS.max(1));
            }
            if HIGH > 0 {
                cp_async4(beside, place + words - HIGH, high, at * HIGH);
            }
            if HIGH > 1 {
                cp_async4(beside, place + words - 1, high, at * HIGH + 1);
            }
        }
    }
}

/// Blocks of activations of eight rows that shared memory has places for.
#[device]
pub fn places_of_eight<const STRETCH: u32, const OWN: u32, const STEP: u32, const STAGES: u32, const RESIDENT: bool>()
-> u32 {
    if RESIDENT { 4 * STRETCH } else { STAGES * OWN * STEP }
}

/// Where the activations of a stage's block lie, of eight rows: block `block` of those that are for warp `own`. RESIDENT ones have a place for every block. Eight rows of a block's
/// scales lie together, and so do eight rows of 16 bytes of its codes.
#[device]
pub fn rows_place<const OWN: u32, const STEP: u32, const RESIDENT: bool>(
    eight: u32,
    own: u32,
    run: u32,
    step: u32,
    stage: u32,
    block: u32,
) -> u32 {
    if RESIDENT {
        return eight * places_of_eight() + first_block(own, run, step) + block;
    }
    eight * places_of_eight() + (stage * OWN + own) * STEP + block
}

/// Starts the activations of a step on their way, shared out as the weights are. In PANELS of eight rows they lie in memory as they will in shared
/// memory; else row by row.
#[device]
pub fn stage_rows<
    const K: u32,
    const MINIMUM: bool,
    const STRETCH: u32,
    const OWN: u32,
    const STEP: u32,
    const SPLITS: u32,
    const EIGHTS: u32,
    const COPIERS: u32,
    const PANELS: bool,
>(
    thread: u32,
    run: u32,
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
    let blocks = K / 32;
    let eights = SPLITS * EIGHTS;
    if PANELS {
        let last = (rows - 1) / 8;
        #[unroll(4)]
        for place in (thread..eights * (OWN * STEP * 16)).by(COPIERS) {
            let eight = place / (OWN * STEP * 16);
            let own = place / (STEP * 16) % OWN;
            let part = place % (STEP * 16);
            let of_stretch = step * STEP + part / 16;
            let block = first_block(own, run, 0) + of_stretch;
            if stages_are_whole() || of_stretch < STRETCH && block < blocks {
                let at = (first / 8 + eight).min(last) * blocks + block;
                let to = rows_place(eight, own, run, step, stage, part / 16);
                cp_async16(words, (to * 16 + part % 16) * 4, x, (at * 16 + part % 16) * 4);
            }
        }
        for place in (thread..eights * (OWN * STEP * 2)).by(COPIERS) {
            let eight = place / (OWN * STEP * 2);
            let own = place / (STEP * 2) % OWN;
            let part = place % (STEP * 2);
            let of_stretch = step * STEP + part / 2;
            let block = first_block(own, run, 0) + of_stretch;
            if stages_are_whole() || of_stretch < STRETCH && block < blocks {
                let at = ((first / 8 + eight).min(last) * blocks + block) * 8 + part % 2 * 4;
                let to = rows_place(eight, own, run, step, stage, part / 2) * 8 + part % 2 * 4;
                cp_async16(scales, to, xscale, at);
                if MINIMUM {
                    cp_async16(sums, to, xsum, at);
                }
            }
        }
    } else {
        // Pairs of threads have a block of a row, so that few of a warp write to the same bank.
        #[unroll(4)]
        for place in (thread..eights * (OWN * STEP * 16)).by(COPIERS) {
            let row = place / 2 % (eights * 8);
            let own = place / (eights * 16) / STEP;
            let of_step = place / (eights * 16) % STEP;
            let block = first_block(own, run, 0) + step * STEP + of_step;
            if stages_are_whole() || step * STEP + of_step < STRETCH && block < blocks {
                let at = (first + row).min(rows - 1) * (K / 4) + block * 8 + place % 2 * 4;
                let to = rows_place(row / 8, own, run, step, stage, of_step) * 2 + place % 2;
                cp_async16(words, (to * 8 + row % 8) * 4, x, at);
            }
        }
        for place in (thread..eights * (OWN * STEP * 8)).by(COPIERS) {
            let row = place % (eights * 8);
            let own = place / (eights * 8) / STEP;
            let of_step = place / (eights * 8) % STEP;
            let block = first_block(own, run, 0) + step * STEP + of_step;
            if stages_are_whole() || step * STEP + of_step < STRETCH && block < blocks {
                let at = (first + row).min(rows - 1) * blocks + block;
                let to = rows_place(row / 8, own, run, step, stage, of_step) * 8 + row % 8;
                cp_async4(scales, to, xscale, at);
                if MINIMUM {
                    cp_async4(sums, to, xsum, at);
                }
            }
        }
    }
}
