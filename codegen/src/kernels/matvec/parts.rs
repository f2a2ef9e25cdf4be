//! Parts of the kernels that multiply units of weights by a row of activations: the matrix-vector product, the products of experts
//! and the per-layer step.
//!
//! Each of them keeps units on their way ([`fetch`]), multiplies the oldest by its activations ([`activations_at`], a format's `dot_*`)
//! and fetches the next one in its place. Which unit comes next is the kernel's own affair. Before that it norms and quantises the
//! activations: threads hold them as float4 vectors ([`leave_chunks`], [`inverse_rms_of_chunks`]), and keep them in
//! shared memory ([`keep_codes`], [`keep_fine`]).

use gemma4c_dsl::prelude::*;

use super::slots::square_sum;
use crate::kernels::norm::sum4;

// ---- units ----------------------------------------------------------------------------------------------------------

/// A unit of weights, on its way or there.
#[registers]
pub struct Unit {
    /// 16 bytes of the plane `codes`.
    pub codes: U32x4,
    /// What the format's `side_*` function fetched beside them.
    pub side: U32x4,
}

/// The activations that a unit is multiplied by: of integer formats 16 codes each, the group's scale and the sum of its 32
/// codes; of float formats four floats each.
#[registers]
pub struct UnitActivations {
    pub low: U32x4,
    pub high: U32x4,
    pub scale: f32,
    pub sum: i32,
}

/// Starts a unit on its way.
#[device(slots(side(unit: u32, more: u32) -> U32x4))]
pub fn fetch(codes: Weights<U32x4>, number: u32) -> Unit {
    Unit { codes: load_streamed::<U32x4>(codes, number), side: side(number, 0) }
}

/// The word with which 16 bytes of activations start in shared memory. Of a unit's two parts all second ones lie behind all first
/// ones, so that neighbouring lanes read neighbouring parts.
#[device]
pub fn part_at<const UNIT: u32, const INTEGER: bool>(part: u32, units: u32) -> u32 {
    let two_parts = if INTEGER { UNIT == 32 } else { UNIT == 8 };
    if two_parts { (part / 2 + part % 2 * units) * 4 } else { part * 4 }
}

/// The word with which a unit's second part starts. Without one, some word that is there.
#[device]
pub fn second_part_at<const UNIT: u32, const INTEGER: bool>(unit: u32, units: u32) -> u32 {
    let two_parts = if INTEGER { UNIT == 32 } else { UNIT == 8 };
    if two_parts { (units + unit) * 4 } else { 0 }
}

/// The activations of a unit, from shared memory.
#[device]
pub fn activations_at<const UNIT: u32, const INTEGER: bool>(
    unit: u32,
    group: u32,
    units: u32,
    words: Shared<u32>,
    scales: Shared<U32x2>,
) -> UnitActivations {
    let low = load::<U32x4>(words, unit * 4);
    let high = load::<U32x4>(words, second_part_at(unit, units));
    let scale = if INTEGER { scales[group] } else { U32x2::ZERO };
    UnitActivations { low, high, scale: f32::from_bits(scale.x), sum: scale.y as i32 }
}

/// `total` plus the product of a unit with the second and third digits of fine codes, which lie K / 4 words behind each other. `low`
/// and `high` are the words of the first digits, `size` is their scale, and `sum` the sum of the third digits.
#[device(slots(dot(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32))]
pub fn dot_fine<const K: u32>(
    unit: Unit,
    number: u32,
    low: u32,
    high: u32,
    size: f32,
    sum: i32,
    total: f32,
    words: Shared<u32>,
) -> f32 {
    let second = UnitActivations {
        low: load::<U32x4>(words, K / 4 + low),
        high: load::<U32x4>(words, K / 4 + high),
        scale: size / 128.0,
        sum: 0,
    };
    let with_second = dot(unit, number, second, total);
    let third = UnitActivations {
        low: load::<U32x4>(words, K / 2 + low),
        high: load::<U32x4>(words, K / 2 + high),
        scale: size / 32768.0,
        sum,
    };
    dot(unit, number, third, with_second)
}

// ---- activations ----------------------------------------------------------------------------------------------------

/// Keeps four codes at word `at`; the first of a group's eight threads also its scale and sum.
#[device]
pub fn keep_codes(quantised: U32x4, at: u32, place: u32, words: Shared<u32>, scales: Shared<U32x2>) {
    words[at] = quantised.x;
    if place % 8 == 0 {
        scales[place / 8] = u32x2(quantised.y, quantised.z);
    }
}

/// Keeps the second and third digits of four values whose first ones are at word `at`.
#[device]
pub fn keep_fine<const K: u32>(fine: U32x4, at: u32, place: u32, words: Shared<u32>, sums: Shared<i32>) {
    words[K / 4 + at] = fine.x;
    words[K / 2 + at] = fine.y;
    if place % 8 == 0 {
        sums[place / 8] = fine.z as i32;
    }
}

// ---- norms ----------------------------------------------------------------------------------------------------------

/// Floats of shared memory for the sums of squares of a row: one for each chunk of 128 values, in whole vectors.
#[device]
pub fn chunk_slots(width: u32) -> u32 {
    (width + 511) / 512 * 4
}

/// The mean of so many squares, correctly rounded: by a constant that takes three steps.
#[device]
pub fn mean_of(total: f32, width: u32) -> f32 {
    let share = 1.0 / width as f32;
    let near = total * share;
    near.mul_add(-(width as f32), total).mul_add(share, near)
}

/// Whether a place of a row of so many fours is there: always, if the block's threads hold that many.
#[device]
pub fn is_place<const PIECES: u32, const WARPS: u32>(place: u32, places: u32) -> bool {
    places == PIECES * WARPS * 32 || place < places
}

/// Four values of shared memory; zeros behind the last place.
#[device]
pub fn four_at<const PIECES: u32, const WARPS: u32>(values: Shared<f32>, place: u32, places: u32) -> F32x4 {
    let mut four = F32x4::ZERO;
    if is_place(place, places) {
        four = load::<F32x4>(values, place * 4);
    }
    four
}

/// Leaves the sum of squares of each chunk of 128 values, of which a warp holds one in each piece: the first `places` fours of a row. The chunks, and
/// so the bits of a norm, are the same however many warps share the row. A collective of the warp.
#[device]
pub fn leave_chunks<const PIECES: u32, const WARPS: u32>(values: &Regs<F32x4>, places: u32, of_chunks: Shared<f32>) {
    let mut squares = regs(0.0f32, PIECES);
    #[unroll]
    for p in 0..PIECES {
        // A warp that is behind the last chunk leaves nothing, whatever it holds.
        if places % 32 == 0 || thread_idx() + p * (WARPS * 32) < places {
            squares[p] = square_sum(values[p]);
        }
    }
    #[unroll]
    for p in 0..PIECES {
        let chunk = warp_id() + p * WARPS;
        let sum = warp_sum(squares[p]);
        if lane_id() == 0 && is_place(chunk * 32, places) {
            of_chunks[chunk] = sum;
        }
    }
}

/// The factor of an RMS norm over `width` values, from the sums of squares of their chunks. Everything waits for it, so four chains of sums
/// run side by side.
#[device]
pub fn inverse_rms_of_chunks<const EPSILON: f32>(squares: Shared<f32>, width: u32) -> f32 {
    let chunks = width.div_ceil(128);
    let mut total = F32x4::ZERO;
    #[unroll]
    for quad in 0..chunks / 4 {
        total = sum4(total, load::<F32x4>(squares, quad * 4));
    }
    if chunks % 4 > 0 {
        total.x = total.x + squares[chunks / 4 * 4];
    }
    if chunks % 4 > 1 {
        total.y = total.y + squares[chunks / 4 * 4 + 1];
    }
    if chunks % 4 > 2 {
        total.z = total.z + squares[chunks / 4 * 4 + 2];
    }
    rsqrt(mean_of(total.x + total.y + (total.z + total.w), width) + EPSILON)
}
