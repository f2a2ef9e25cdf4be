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
use gemma4c_dsl::{Instance, InstanceError};

use super::attention::address::{record_of, row_of_record};
use super::geglu::StridedRows;
use super::matvec::Pairs;
use super::matvec::adapter::{fours_of, matrix_of, narrow_codes, narrow_floats, pairs_before, row_of_b};
use super::norm::sum4;
use super::values::value;

/// Whose rows they are: a record for each, `stride` words apart, and for each slot its seat, counted from 1, and the
/// bits of how strong the adapter in it is.
#[view]
pub struct SeatedRows {
    pub state: Input<u32>,
    pub seats: Input<u32>,
    pub stride: u32,
}

/// A row's seat and its strength; rows that are free have none.
#[device]
pub fn seat_of(row: u32, of: SeatedRows) -> U32x2 {
    let record = record_of(of.state, row, of.stride);
    let mut seat = U32x2::ZERO;
    if row_of_record(record, row, of.stride) < record.y {
        seat = load::<U32x2>(of.seats, record.w * 2);
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

/// All numbers between the halves of a product's pairs, RANK for each matrix that has one, of decoded rows: a block has
/// 16 of a row, each of its warps one. `seats_of` tells the product each row's seat.
#[kernel(block = 512, dependent, slots(
    sixteen(row: u32, at: u32, low: U32x4, high: U32x4) -> f32
))]
pub fn narrow_decoded<
    const K: u32,
    const RANK: u32,
    const PANELS: bool,
    const BF: bool,
    const FACTORED: bool,
    const SEATED: bool,
>(
    a: Weights<u32>,
    rows: SeatedRows,
    factor: Input<f32>,
    out: Output<f32>,
    seats_of: Output<u32>,
    seats: u32,
    strength: f32,
) {
    require!(RANK % 16 == 0);
    grid_launch_dependents();
    grid_dependency_wait();
    let value = block_idx() * 16 + warp_id();
    let row = block_idx_y();
    let mut seat = u32x2(1, strength.to_bits());
    if SEATED {
        seat = seat_of(row, rows);
    }
    if value == 0 && lane_id() == 0 {
        seats_of[row] = seat.x;
    }
    let mut total = 0.0f32;
    if seat.x > 0 {
        let start = ((value / RANK * seats + seat.x - 1) * RANK + value % RANK) * K;
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
        out[row * (grid_dim() * 16) + value] = total * by;
    }
}

/// What a product of decoded rows takes to add the second halves: B of all matrices, each with those of all seats; the numbers
/// between the halves, `values` a row, and the seat of each row. `has` has a bit for each matrix with a pair, which begin
/// with the rows 0, `second` and `third` of `rows`.
#[view]
pub struct WidePlaces {
    pub b: Weights<u32>,
    pub narrow: Input<f32>,
    pub row_seats: Input<u32>,
    pub values: u32,
    pub rank: u32,
    pub seats: u32,
    pub has: u32,
    pub second: u32,
    pub third: u32,
    pub rows: u32,
}

/// A result with what the adapter of its row adds: `at` counts the matrices' rows, then the rows of activations. The terms are
/// added as eight lanes do it for a row on its own.
#[device(fills(value, at))]
pub fn widened(value: f32, at: u32, of: WidePlaces) -> f32 {
    let row = at / of.rows;
    let output = at % of.rows;
    let matrix = matrix_of(output, of.second, of.third);
    let seat = of.row_seats[row];
    let mut result = value;
    if seat > 0 {
        let of_b = row_of_b(output, seat, of.seats, of.has, of.second, of.third, of.rows);
        let own_b = of.b.offset(of_b * (of.rank / 2));
        let own = of.narrow.offset(row * of.values + pairs_before(of.has, matrix) * of.rank);
        let mut sums = regs(0.0f32, 8);
        if of.has >> matrix & 1 == 1 && of.rank == 16 {
            // The usual rank: whole vectors.
            let low = load::<U32x4>(own_b, 0u32);
            let high = load::<U32x4>(own_b, 4u32);
            let first = load::<F32x4>(own, 0u32);
            let second = load::<F32x4>(own, 4u32);
            let third = load::<F32x4>(own, 8u32);
            let fourth = load::<F32x4>(own, 12u32);
            sums[0u32] = bf16_hi(low.x).mul_add(first.y, bf16_lo(low.x) * first.x);
            sums[1u32] = bf16_hi(low.y).mul_add(first.w, bf16_lo(low.y) * first.z);
            sums[2u32] = bf16_hi(low.z).mul_add(second.y, bf16_lo(low.z) * second.x);
            sums[3u32] = bf16_hi(low.w).mul_add(second.w, bf16_lo(low.w) * second.z);
            sums[4u32] = bf16_hi(high.x).mul_add(third.y, bf16_lo(high.x) * third.x);
            sums[5u32] = bf16_hi(high.y).mul_add(third.w, bf16_lo(high.y) * third.z);
            sums[6u32] = bf16_hi(high.z).mul_add(fourth.y, bf16_lo(high.z) * fourth.x);
            sums[7u32] = bf16_hi(high.w).mul_add(fourth.w, bf16_lo(high.w) * fourth.z);
        } else if of.has >> matrix & 1 == 1 {
            let each = of.rank / 16;
            #[unroll]
            for lane in 0u32..8 {
                for w in lane * each..lane * each + each {
                    let pair = own_b[w];
                    sums[lane] = bf16_lo(pair).mul_add(own[w * 2], sums[lane]);
                    sums[lane] = bf16_hi(pair).mul_add(own[w * 2 + 1], sums[lane]);
                }
            }
        }
        let even = sums[0u32] + sums[4u32] + (sums[2u32] + sums[6u32]);
        let odd = sums[1u32] + sums[5u32] + (sums[3u32] + sums[7u32]);
        result = value + (even + odd);
    }
    result
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
        SEATED: pairs.seated,
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
