//! The sums over a row's lanes, in the order that decides a product's bits.
//!
//! [`lanes_sum`] is that order, a row at a time. [`rows_sum`] keeps it for all rows of a lane with a third of the shuffles, of which an SM starts one a cycle: where lanes meet, each goes on with half of
//! the rows, so that there are fewer to add the fewer lanes are left to meet.

use gemma4c_dsl::prelude::*;

use super::steps::{has_stretches, stretch_of};

/// The sum over the lanes of a row, for the first of them: a tree, or a tree for each stretch and then the stretches in order. JOINED lanes are pairs of which both have the same.
/// A collective of the warp.
#[device]
pub fn lanes_sum(value: f32, lanes: u32, joined: bool, stretched: bool) -> f32 {
    let mut sum = value;
    let mut mask = if stretched { lanes.min(8) / 2 } else { lanes / 2 };
    #[unroll]
    while mask > if joined { 1 } else { 0 } {
        sum = sum + shfl_xor(sum, mask);
        mask = mask / 2;
    }
    if stretched {
        let own = sum;
        #[unroll]
        for s in 1u32..lanes / 8 {
            sum = sum + shfl_xor(own, s * 8);
        }
        // A stretch that is not there counts as zero: a plain one is left of a negative one.
        sum = sum + 0.0;
    }
    sum
}

/// Adds `count` sums from `first` on, a power of two of them, of lanes that are `mask` apart. The one lane goes on with the first half of them, the other with the second; with the only one go on both.
/// A collective of the warp.
#[device]
pub fn share_out(sums: &mut Regs<f32>, first: u32, count: u32, mask: u32) {
    let has_second = lane_id() / mask % 2 == 1;
    #[unroll]
    for i in 0..count / 2 {
        let kept = if has_second { sums[first + i + count / 2] } else { sums[first + i] };
        let given = if has_second { sums[first + i] } else { sums[first + i + count / 2] };
        sums[first + i] = kept + shfl_xor(given, mask);
    }
    if count <= 1 {
        sums[first] = sums[first] + shfl_xor(sums[first], mask);
    }
}

/// The sums over the lanes of ROWS stretched rows, in the order of [`lanes_sum`]: each of a row's first eight lanes gets that of its [`row_of_lane`]. The sums start anew. Those of a stretch lie behind
/// those of the one before. With SHARES_ROWS even lanes have sums of even rows, odd lanes of odd ones. A collective of the warp.
#[device]
pub fn rows_sum<
    const K: u32,
    const UNIT: u32,
    const LANES: u32,
    const STRETCHED: bool,
    const ROWS: u32,
    const JOINED: bool,
    const SHARES_ROWS: bool,
>(
    sums: &mut Regs<f32>,
) -> f32 {
    let count = if SHARES_ROWS { ROWS / 2 } else { ROWS };
    #[unroll]
    for s in 0u32..4 {
        if s <= stretch_of((K / UNIT - 1) / 8) {
            share_out(sums, s * ROWS, count, 4);
            share_out(sums, s * ROWS, count / 2, 2);
            if !JOINED {
                share_out(sums, s * ROWS, count / 4, 1);
            }
        }
    }
    let mut sum = sums[0];
    #[unroll]
    for s in 1u32..4 {
        if has_stretches() {
            sum = sum + sums[s * ROWS];
        } else if s < LANES / 8 {
            sum = sum + shfl_xor(sums[0], s * 8);
        }
    }
    #[unroll]
    for r in 0u32..4 * ROWS {
        sums[r] = 0.0;
    }
    // A stretch that is not there counts as zero: a plain one is left of a negative one.
    sum + 0.0
}

/// The row whose sum a lane of a row's first eight has behind [`rows_sum`].
#[device]
pub fn row_of_lane<const ROWS: u32, const SHARES_ROWS: bool>(lane: u32) -> u32 {
    if SHARES_ROWS { lane / (16 / ROWS) * 2 + lane % 2 } else { lane / (8 / ROWS) }
}

/// The first lane that has a row's sum behind [`rows_sum`].
#[device]
pub fn lane_of_row<const ROWS: u32, const SHARES_ROWS: bool>(row: u32) -> u32 {
    if SHARES_ROWS { row / 2 * (16 / ROWS) + row % 2 } else { row * (8 / ROWS) }
}
