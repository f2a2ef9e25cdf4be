//! The two halves of an adapter's pair: `factor * A x`, which is as wide as the pair's rank, and `y + B x`.
//!
//! Plainly each is a launch of its own. Of several decoded rows the first halves of all matrices of a product are one
//! ([`narrow_decoded`]), over the activations that the product multiplies, and the product applies the second ones to its
//! results ([`widened`]). A decoded row on its own takes both with its product
//! ([`matvec`](crate::kernels::matvec::adapter)), in the same order and so to the same bits.
//!
//! One pair is for all rows; or, where rows are SEATED, each has the pair of its sequence's seat. A row without a seat
//! reads no weights: its narrow values are zeros, and its wide ones are what they were. Sums have an order that depends
//! on the pair alone, so a row has the same bits in any company.

use gemma4c_blocks::DType;
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{DeviceDef, Filled, Instance, InstanceError};

use super::attention::address::{record_of, row_of_record};
use super::geglu::StridedRows;
use super::matvec::Pairs;
use super::matvec::adapter::{
    fours_of, matrix_of, narrow_codes, narrow_floats, pairs_before, row_of_b, sum_of_eight, wide_pair,
};
use super::norm::sum4;
use super::values::value;

/// Whose rows they are: entries of a seat, counted from 1, and the bits of how strong the adapter in it is. Decoded rows
/// have an entry each; those of a prompt have that of their segment's slot, which its record in `state` tells.
#[view]
pub struct SeatedRows {
    pub state: Input<u32>,
    pub seats: Weights<u32>,
    pub segments: u32,
}

/// A row's seat and its strength; rows that are free have none.
#[device]
pub fn seat_of(row: u32, of: SeatedRows) -> U32x2 {
    let mut entry = row;
    let mut is_used = true;
    if of.segments == 1 {
        let record = record_of(of.state, row, 0);
        is_used = row_of_record(record, row, 0) < record.y;
        entry = record.w;
    }
    let mut seat = U32x2::ZERO;
    if is_used {
        seat = load::<U32x2>(of.seats, entry * 2);
    }
    seat
}

/// `out[row] = factor * A · x[row]`: a warp takes an output, its lanes every 32nd value of a row.
#[kernel(block = 256, dependent, slots(value(at: u64) -> f32))]
pub fn narrow_rows<const SEATED: bool>(
    x: Input<f32>,
    rows: SeatedRows,
    out: Output<f32>,
    k: u32,
    rank: u32,
    factor: f32,
) {
    grid_launch_dependents();
    grid_dependency_wait();
    let output = block_idx() * 8 + warp_id();
    let row = block_idx_y();
    let mut seat = u32x2(1, factor.to_bits());
    if SEATED {
        seat = seat_of(row, rows);
    }
    if output < rank {
        let mut sum = 0.0f32;
        if seat.x > 0 {
            let start = ((seat.x - 1) as u64 * rank as u64 + output as u64) * k as u64;
            for i in (lane_id()..k).by(32) {
                sum = value(start + i as u64).mul_add(x[row * k + i], sum);
            }
        }
        let sum = warp_sum(sum);
        if lane_id() == 0 {
            out[row * rank + output] = sum * f32::from_bits(seat.y);
        }
    }
}

/// The same of a prompt's rows in bf16, on tensor cores: a block takes 16 outputs of eight rows, which are of one sequence, and
/// its warps share out K. A lane takes 16 neighbouring values of a row, and gives four products four of each: which values
/// meet in a product does not matter, as long as both operands agree.
#[kernel(block = 256, dependent)]
pub fn narrow_tiles<const SEATED: bool>(
    a: Weights<u32>,
    x: Input<u32>,
    rows: SeatedRows,
    out: Output<f32>,
    k: u32,
    rank: u32,
    count: u32,
    factor: f32,
) {
    let sums = shared::<F32x4>(256);
    grid_launch_dependents();
    grid_dependency_wait();
    let first_row = block_idx_y() * 8;
    let own_row = (first_row + lane_id() / 4).min(count - 1);
    let mut seat = u32x2(1, factor.to_bits());
    if SEATED {
        seat = seat_of(first_row, rows);
    }
    let mut sum = F32x4::ZERO;
    if seat.x > 0 {
        let upper = ((seat.x - 1) * rank + block_idx() * 16 + lane_id() / 4) * k;
        for at in (warp_id() * 64 + lane_id() % 4 * 16..(k + 63) / 64 * 64).by(512) {
            let mut upper_words = regs(U32x4::ZERO, 2);
            let mut lower_words = regs(U32x4::ZERO, 2);
            let mut x_words = regs(U32x4::ZERO, 2);
            if at < k {
                #[unroll]
                for half in 0u32..2 {
                    upper_words[half] = load::<U32x4>(a, (upper + at) / 2 + half * 4);
                    lower_words[half] = load::<U32x4>(a, (upper + 8 * k + at) / 2 + half * 4);
                    x_words[half] = load::<U32x4>(x, (own_row * k + at) / 2 + half * 4);
                }
            }
            #[unroll]
            for half in 0u32..2 {
                let of_a = u32x4(upper_words[half].x, lower_words[half].x, upper_words[half].y, lower_words[half].y);
                sum = mma_m16n8k16_bf16(of_a, u32x2(x_words[half].x, x_words[half].y), sum);
                let of_a = u32x4(upper_words[half].z, lower_words[half].z, upper_words[half].w, lower_words[half].w);
                sum = mma_m16n8k16_bf16(of_a, u32x2(x_words[half].z, x_words[half].w), sum);
            }
        }
    }
    sums[warp_id() * 32 + lane_id()] = sum;
    barrier();
    if warp_id() == 0 {
        let mut total = sums[lane_id()];
        #[unroll]
        for warp in 1u32..8 {
            total = sum4(total, sums[warp * 32 + lane_id()]);
        }
        let by = f32::from_bits(seat.y);
        let output = block_idx() * 16 + lane_id() / 4;
        let row = first_row + lane_id() % 4 * 2;
        if row < count {
            out[row * rank + output] = total.x * by;
            out[row * rank + output + 8] = total.z * by;
        }
        if row + 1 < count {
            out[(row + 1) * rank + output] = total.y * by;
            out[(row + 1) * rank + output + 8] = total.w * by;
        }
    }
}

/// `out[row] = y[row] + B · x[row]`, of rows of RANK values: a thread takes an output of eight rows, and reads its row
/// of B once for those that have the same seat.
#[kernel(block = 256, dependent, slots(value(at: u64) -> f32))]
pub fn widen_rows<const SEATED: bool, const RANK: u32>(
    y: StridedRows,
    x: Input<f32>,
    rows: SeatedRows,
    out: Output<f32>,
    outputs: u32,
    count: u32,
) {
    let narrow = shared::<f32>(8 * RANK);
    grid_launch_dependents();
    grid_dependency_wait();
    let output = block_idx() * 256 + thread_idx();
    let first = block_idx_y() * 8;
    for at in (thread_idx()..8 * RANK).by(256) {
        let is_there = first + at / RANK < count;
        narrow[at] = if is_there { x[first * RANK + at] } else { 0.0 };
    }
    barrier();
    if output < outputs {
        let mut held = regs(0.0f32, RANK);
        let mut held_seat = 0u32;
        for row in first..(first + 8).min(count) {
            let mut seat = 1u32;
            if SEATED {
                seat = seat_of(row, rows).x;
            }
            if seat > 0 && seat != held_seat {
                let start = ((seat - 1) as u64 * outputs as u64 + output as u64) * RANK as u64;
                #[unroll]
                for i in 0..RANK {
                    held[i] = value(start + i as u64);
                }
                held_seat = seat;
            }
            let mut sum = 0.0f32;
            if seat > 0 {
                let own = narrow.offset((row - first) * RANK);
                if RANK % 4 == 0 {
                    #[unroll]
                    for i in 0..RANK / 4 {
                        let four = load::<F32x4>(own, i * 4);
                        sum = held[i * 4].mul_add(four.x, sum);
                        sum = held[i * 4 + 1].mul_add(four.y, sum);
                        sum = held[i * 4 + 2].mul_add(four.z, sum);
                        sum = held[i * 4 + 3].mul_add(four.w, sum);
                    }
                } else {
                    #[unroll]
                    for i in 0..RANK {
                        sum = held[i].mul_add(own[i], sum);
                    }
                }
            }
            out[row * outputs + output] = y.values[row * y.stride + output] + sum;
        }
    }
}

/// Sixteen values of A, two in a word, times sixteen codes with their group's scale, of which rows follow each other or lie
/// in PANELS of eight.
#[device]
pub fn sixteen_codes<const PANELS: bool, const K: u32>(
    row: u32,
    at: u32,
    low: U32x4,
    high: U32x4,
    xq: Input<u32>,
    xscale: Input<f32>,
) -> f32 {
    let part = if PANELS { (row / 8 * (K / 16) + at / 16) * 8 + row % 8 } else { row * (K / 16) + at / 16 };
    let group = if PANELS { (row / 8 * (K / 32) + at / 32) * 8 + row % 8 } else { row * (K / 32) + at / 32 };
    narrow_codes(load::<U32x4>(xq, part * 4), low, high) * xscale[group]
}

/// The same of floats, whose rows are `stride` apart.
#[device(fills(row, at, low, high))]
pub fn sixteen_floats(row: u32, at: u32, low: U32x4, high: U32x4, x: Input<f32>, stride: u32) -> f32 {
    let own = x.offset(row * stride + at);
    let first = narrow_floats(load::<U32x4>(own, 0u32), low.x, low.y, 0.0);
    let second = narrow_floats(load::<U32x4>(own, 4u32), low.z, low.w, first);
    let third = narrow_floats(load::<U32x4>(own, 8u32), high.x, high.y, second);
    narrow_floats(load::<U32x4>(own, 12u32), high.z, high.w, third)
}

/// The same of 16-bit floats: bf16, or f16 without BF.
#[device]
pub fn sixteen_halves<const K: u32, const BF: bool>(row: u32, at: u32, low: U32x4, high: U32x4, x: Input<u32>) -> f32 {
    let first = load::<U32x4>(x, (row * K + at) / 2);
    let second = load::<U32x4>(x, (row * K + at) / 2 + 4);
    let sum = narrow_pair(
        first.w,
        low.w,
        narrow_pair(first.z, low.z, narrow_pair(first.y, low.y, narrow_pair(first.x, low.x, 0.0))),
    );
    narrow_pair(
        second.w,
        high.w,
        narrow_pair(second.z, high.z, narrow_pair(second.y, high.y, narrow_pair(second.x, high.x, sum))),
    )
}

/// Two values.
#[device]
pub fn narrow_pair<const BF: bool>(x: u32, a: u32, sum: f32) -> f32 {
    let first = if BF { bf16_lo(x) } else { f16_lo(x) };
    let second = if BF { bf16_hi(x) } else { f16_hi(x) };
    second.mul_add(bf16_hi(a), first.mul_add(bf16_lo(a), sum))
}

/// The second halves that the product behind a launch will read: B of all matrices, as [`WidePlaces`] has them.
#[view]
pub struct WideBank {
    pub b: Weights<u32>,
    pub seats: u32,
    pub has: u32,
    pub second: u32,
    pub third: u32,
    pub rows: u32,
}

/// Whether a row before has the same seat. A collective of the warp.
#[device]
pub fn is_repeated(row: u32, seat: u32, row_seats: Weights<u32>) -> bool {
    let mut same = false;
    for other in (lane_id()..row).by(32) {
        if row_seats[other * 2] == seat {
            same = true;
        }
    }
    warp_any(same)
}

/// Brings the rows of B of a seat to L2, before the weights of their product fill the way to memory. Thread `at` of
/// `count` does its share, a line of neighbouring rows at a time.
#[device]
pub fn prefetch_wide<const RANK: u32>(seat: u32, at: u32, count: u32, of: WideBank) {
    let together = (64 / RANK.max(16)).max(1);
    for output in (at * together..of.rows).by(count * together) {
        if of.has >> matrix_of(output, of.second, of.third) & 1 == 1 {
            prefetch(of.b, row_of_b(output, seat, of.seats, of.has, of.second, of.third, of.rows) * (RANK / 2));
        }
    }
}

/// All numbers between the halves of a product's pairs, RANK for each matrix that has one, of decoded rows: a block has
/// 16 of a row, each of its warps one. `row_seats` has an entry for each row.
#[kernel(block = 512, dependent, slots(
    sixteen(row: u32, at: u32, low: U32x4, high: U32x4) -> f32
))]
pub fn narrow_decoded<const K: u32, const RANK: u32, const PANELS: bool, const BF: bool, const FACTORED: bool>(
    a: Weights<u32>,
    row_seats: Weights<u32>,
    wide: WideBank,
    factor: Input<f32>,
    out: Output<f32>,
    seats: u32,
) {
    require!(RANK % 16 == 0);
    let value = block_idx() * 16 + warp_id();
    let row = block_idx_y();
    let seat = load::<U32x2>(row_seats, row * 2);
    let start = ((value / RANK * seats + seat.x.max(1) - 1) * RANK + value % RANK) * K;
    grid_launch_dependents();
    // Its row of A is in L2 when the activations are there.
    for line in (lane_id() * 64..K).by(2048) {
        if seat.x > 0 {
            prefetch(a, (start + line) / 2);
        }
    }
    if seat.x > 0 && !is_repeated(row, seat.x, row_seats) {
        prefetch_wide(seat.x, block_idx() * 512 + thread_idx(), grid_dim() * 512, wide);
    }
    grid_dependency_wait();
    let mut total = 0.0f32;
    if seat.x > 0 {
        for four in 0u32..fours_of(K) {
            // Chunks as a row on its own has them, four to a sum.
            let mut chunks = regs(0.0f32, 4);
            #[unroll]
            for chunk in 0u32..4 {
                let first = (four * 4 + chunk) * 1024 + lane_id() * 16;
                let mut sum = 0.0f32;
                #[unroll]
                for turn in 0u32..2 {
                    let at = first + turn * 512;
                    if at < K {
                        let low = load::<U32x4>(a, (start + at) / 2);
                        let high = load::<U32x4>(a, (start + at) / 2 + 4);
                        sum = sum + sixteen(row, at, low, high);
                    }
                }
                chunks[chunk] = sum;
            }
            #[unroll]
            for chunk in 0u32..4 {
                chunks[chunk] = warp_sum(chunks[chunk]);
            }
            let sum = chunks[0u32] + chunks[1u32] + chunks[2u32] + chunks[3u32];
            total = if four == 0 { sum } else { total + sum };
        }
    }
    if lane_id() == 0 {
        let mut by = f32::from_bits(seat.y);
        if FACTORED {
            by = factor[row] * by;
        }
        out[row * (grid_dim() * 16) + value] = if seat.x > 0 { total * by } else { 0.0 };
    }
}

/// What a product of decoded rows takes to add the second halves: B of all matrices, each with those of all seats; the numbers
/// between the halves, `values` a row, and the entry of each row's seat. `has` has a bit for each matrix with a pair, which
/// begin with the rows 0, `second` and `third` of `rows`.
#[view]
pub struct WidePlaces {
    pub b: Weights<u32>,
    pub narrow: Input<f32>,
    pub row_seats: Weights<u32>,
    pub values: u32,
    pub rank: u32,
    pub seats: u32,
    pub has: u32,
    pub second: u32,
    pub third: u32,
    pub rows: u32,
}

/// The first word of an output's row of B, of a seat that is there.
#[device]
pub fn wide_start(output: u32, seat: u32, of: WidePlaces) -> u32 {
    row_of_b(output, seat, of.seats, of.has, of.second, of.third, of.rows) * (of.rank / 2)
}

/// The first of the numbers that an output's row of B is multiplied by.
#[device]
pub fn narrow_start(output: u32, row: u32, of: WidePlaces) -> u32 {
    row * of.values + pairs_before(of.has, matrix_of(output, of.second, of.third)) * of.rank
}

/// Whether an output's matrix has a pair.
#[device]
pub fn is_changed(output: u32, of: WidePlaces) -> bool {
    of.has >> matrix_of(output, of.second, of.third) & 1 == 1
}

/// The terms of a row of B of 16 values, added up as a row on its own has them.
#[device]
pub fn sum_of_sixteen(low: U32x4, high: U32x4, narrow: Input<f32>, start: u32) -> f32 {
    let first = load::<F32x4>(narrow, start);
    let second = load::<F32x4>(narrow, start + 4);
    let third = load::<F32x4>(narrow, start + 8);
    let fourth = load::<F32x4>(narrow, start + 12);
    let mut sums = regs(0.0f32, 8);
    sums[0u32] = wide_pair(low.x, first.x, first.y, 0.0);
    sums[1u32] = wide_pair(low.y, first.z, first.w, 0.0);
    sums[2u32] = wide_pair(low.z, second.x, second.y, 0.0);
    sums[3u32] = wide_pair(low.w, second.z, second.w, 0.0);
    sums[4u32] = wide_pair(high.x, third.x, third.y, 0.0);
    sums[5u32] = wide_pair(high.y, third.z, third.w, 0.0);
    sums[6u32] = wide_pair(high.z, fourth.x, fourth.y, 0.0);
    sums[7u32] = wide_pair(high.w, fourth.z, fourth.w, 0.0);
    sum_of_eight(&sums)
}

/// Four results with what adapters of rank 16 add: x and y are of the first output, z and w of the second; x and z of the
/// first row, y and w of the second. All rows of B are on their way before the first is there.
#[device(fills(four, outputs, rows))]
pub fn widened_by_sixteen(four: F32x4, outputs: U32x2, rows: U32x2, of: WidePlaces) -> F32x4 {
    let first = of.row_seats[rows.x * 2];
    let second = of.row_seats[rows.y * 2];
    let mut result = four;
    if first > 0 || second > 0 {
        // What is not there is read from another place, and dropped.
        let has_x = first > 0 && is_changed(outputs.x, of);
        let has_y = second > 0 && is_changed(outputs.x, of);
        let has_z = first > 0 && is_changed(outputs.y, of);
        let has_w = second > 0 && is_changed(outputs.y, of);
        let of_x = if has_x { wide_start(outputs.x, first, of) } else { 0 };
        let of_y = if has_y { wide_start(outputs.x, second, of) } else { 0 };
        let of_z = if has_z { wide_start(outputs.y, first, of) } else { 0 };
        let of_w = if has_w { wide_start(outputs.y, second, of) } else { 0 };
        let low_x = load::<U32x4>(of.b, of_x);
        let high_x = load::<U32x4>(of.b, of_x + 4);
        let low_y = load::<U32x4>(of.b, of_y);
        let high_y = load::<U32x4>(of.b, of_y + 4);
        let low_z = load::<U32x4>(of.b, of_z);
        let high_z = load::<U32x4>(of.b, of_z + 4);
        let low_w = load::<U32x4>(of.b, of_w);
        let high_w = load::<U32x4>(of.b, of_w + 4);
        let upper = if has_x || has_y { narrow_start(outputs.x, rows.x, of) } else { 0 };
        let upper_next = if has_x || has_y { narrow_start(outputs.x, rows.y, of) } else { 0 };
        let lower = if has_z || has_w { narrow_start(outputs.y, rows.x, of) } else { 0 };
        let lower_next = if has_z || has_w { narrow_start(outputs.y, rows.y, of) } else { 0 };
        let x = sum_of_sixteen(low_x, high_x, of.narrow, upper);
        let y = sum_of_sixteen(low_y, high_y, of.narrow, upper_next);
        let z = sum_of_sixteen(low_z, high_z, of.narrow, lower);
        let w = sum_of_sixteen(low_w, high_w, of.narrow, lower_next);
        result.x = if has_x { four.x + x } else { four.x };
        result.y = if has_y { four.y + y } else { four.y };
        result.z = if has_z { four.z + z } else { four.z };
        result.w = if has_w { four.w + w } else { four.w };
    }
    result
}

/// A result with what an adapter of any rank adds.
#[device]
pub fn with_change(value: f32, output: u32, row: u32, of: WidePlaces) -> f32 {
    let seat = of.row_seats[row * 2];
    let mut result = value;
    if seat > 0 && is_changed(output, of) {
        let b = of.b.offset(wide_start(output, seat, of));
        let t = of.narrow.offset(narrow_start(output, row, of));
        let each = of.rank / 16;
        let mut sums = regs(0.0f32, 8);
        #[unroll]
        for part in 0u32..8 {
            for w in part * each..part * each + each {
                sums[part] = wide_pair(b[w], t[w * 2], t[w * 2 + 1], sums[part]);
            }
        }
        result = value + sum_of_eight(&sums);
    }
    result
}

/// As [`widened_by_sixteen`], of any rank.
#[device(fills(four, outputs, rows))]
pub fn widened(four: F32x4, outputs: U32x2, rows: U32x2, of: WidePlaces) -> F32x4 {
    f32x4(
        with_change(four.x, outputs.x, rows.x, of),
        with_change(four.y, outputs.x, rows.y, of),
        with_change(four.z, outputs.y, rows.x, of),
        with_change(four.w, outputs.y, rows.y, of),
    )
}

/// What fills the slot of a product of decoded rows that adds these pairs' second halves.
pub fn change_of_rows(pairs: &Pairs) -> &'static DeviceDef {
    if pairs.rank == 16 { widened_by_sixteen::DEF } else { widened::DEF }
}

/// What the function takes.
pub fn change_arguments<M>(pairs: &Pairs, of: WidePlacesArguments<M>) -> Filled<M> {
    match pairs.rank {
        16 => widened_by_sixteen::Arguments { of }.into(),
        _ => widened::Arguments { of }.into(),
    }
}

/// How decoded rows arrive at a [`narrow_decoded`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arriving {
    Codes { in_panels: bool },
    Floats,
    BF16,
    F16,
}

/// A [`narrow_decoded`], on a grid of all sixteens of numbers of a row by all rows. `factored`: rows have a norm's factor.
pub fn decoded_instance(pairs: &Pairs, k: u32, arriving: Arriving, factored: bool) -> Result<Instance, InstanceError> {
    narrow_decoded::Chosen {
        K: k,
        RANK: pairs.rank,
        PANELS: arriving == Arriving::Codes { in_panels: true },
        BF: arriving == Arriving::BF16,
        FACTORED: factored,
        sixteen: match arriving {
            Arriving::Codes { .. } => sixteen_codes::DEF,
            Arriving::Floats => sixteen_floats::DEF,
            Arriving::BF16 | Arriving::F16 => sixteen_halves::DEF,
        },
    }
    .build()
}

/// A [`narrow_rows`] with a matrix of that type.
pub fn narrow_instance(dtype: DType, seated: bool) -> Result<Instance, InstanceError> {
    narrow_rows::Chosen { SEATED: seated, value: value(dtype) }.build()
}

/// Blocks of a [`narrow_rows`].
pub fn narrow_grid(rank: u32, rows: u32) -> [u32; 3] {
    [rank.div_ceil(8), rows, 1]
}

/// A [`narrow_tiles`], of a rank that is a multiple of 16 and widths that are multiples of 32.
pub fn tiles_instance(seated: bool) -> Result<Instance, InstanceError> {
    narrow_tiles::Chosen { SEATED: seated }.build()
}

/// Blocks of a [`narrow_tiles`].
pub fn tiles_grid(rank: u32, rows: u32) -> [u32; 3] {
    [rank / 16, rows.div_ceil(8), 1]
}

/// A [`widen_rows`] with a matrix of that type.
pub fn widen_instance(dtype: DType, rank: u32, seated: bool) -> Result<Instance, InstanceError> {
    widen_rows::Chosen { SEATED: seated, RANK: rank, value: value(dtype) }.build()
}

/// Blocks of a [`widen_rows`].
pub fn widen_grid(outputs: u32, rows: u32) -> [u32; 3] {
    [outputs.div_ceil(256), rows.div_ceil(8), 1]
}
