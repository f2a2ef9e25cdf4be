//! The two halves of an adapter's pair, each a launch of its own: `factor * A x`, which is as wide as the pair's rank,
//! and `y + B x`.
//!
//! One pair is for all rows; or, where rows are SEATED, each has the pair of its sequence's seat. A row without a seat
//! reads no weights: its narrow values are zeros, and its wide ones are what they were. Sums have an order that depends
//! on the pair alone, so a row has the same bits in any company.

use gemma4c_blocks::DType;
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

use super::attention::address::{record_of, row_of_record};
use super::geglu::StridedRows;
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
    grid_launch_dependents();
    grid_dependency_wait();
    let output = block_idx() * 256 + thread_idx();
    let first = block_idx_y() * 8;
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
                #[unroll]
                for i in 0..RANK {
                    sum = held[i].mul_add(x[row * RANK + i], sum);
                }
            }
            out[row * outputs + output] = y.values[row * y.stride + output] + sum;
        }
    }
}

/// A [`narrow_rows`] with a matrix of that type.
pub fn narrow_instance(dtype: DType, seated: bool) -> Result<Instance, InstanceError> {
    narrow_rows::Chosen { SEATED: seated, value: value(dtype) }.build()
}

/// Blocks of a [`narrow_rows`].
pub fn narrow_grid(rank: u32, rows: u32) -> [u32; 3] {
    [rank.div_ceil(8), rows, 1]
}

/// A [`widen_rows`] with a matrix of that type.
pub fn widen_instance(dtype: DType, rank: u32, seated: bool) -> Result<Instance, InstanceError> {
    widen_rows::Chosen { SEATED: seated, RANK: rank, value: value(dtype) }.build()
}

/// Blocks of a [`widen_rows`].
pub fn widen_grid(outputs: u32, rows: u32) -> [u32; 3] {
    [outputs.div_ceil(256), rows.div_ceil(8), 1]
}
