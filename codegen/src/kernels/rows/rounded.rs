//! What a product by [tiles](super::tiles) does where its reader wants int8: gate and up are joined, rounded and left as the next product reads them.
//!
//! 32 neighbouring results of a row share a scale, and four warps have eight of them each. They meet in shared memory, a panel of eight rows at a time, and the same
//! warps round what lies there: four rows a warp and turn, eight lanes to a row. The bits are those of [`prepare`](super::prepare), and so is the
//! place: panels of eight rows, of which the last one is filled up with zeros. So several rows do without a launch between the two products.

use gemma4c_dsl::prelude::*;

use super::warp_tile::changed;
use crate::kernels::quantise::quantise4;

/// Values from a row of a panel to the next: four more than a group has, so that a warp's writes go to different banks.
#[device]
pub fn held_stride() -> u32 {
    36
}

/// Values of a panel: eight rows of a group of 32.
#[device]
pub fn held_panel() -> u32 {
    8 * held_stride()
}

/// Holds the results of eight rows of activations from row `row` on, and of the eight outputs from `base` on, which are the `eighth` of their group: zeros where there are none.
#[device(slots(
    change(four: F32x4, outputs: U32x2, rows: U32x2) -> F32x4,
    join(value: f32, up: f32) -> f32,
    epilogue(value: f32, row: u32) -> f32
))]
pub fn hold_results(
    value: F32x4,
    base: u32,
    outputs: u32,
    eighth: u32,
    row: u32,
    rows: u32,
    by_stride: u32,
    factor: Input<f32>,
    held: Shared<f32>,
) {
    let output = base + lane_id() / 4;
    let first = row + lane_id() % 4 * 2;
    let four = changed(change, value, output, output, outputs, first, rows, factor);
    let mut joined = f32x2(0.0, 0.0);
    if first < rows && output < outputs {
        joined.x = epilogue(join(four.x, four.z), first * by_stride + output);
    }
    if first + 1 < rows && output < outputs {
        joined.y = epilogue(join(four.y, four.w), (first + 1) * by_stride + output);
    }
    let to = lane_id() % 4 * (2 * held_stride()) + eighth * 8 + lane_id() / 4;
    held[to] = joined.x;
    held[to + held_stride()] = joined.y;
}

/// Rounds four rows of a panel that all its results are in, from row `row` on, which `half` says of the panel, and leaves them: outputs `base` to `base + 31` of `outputs`. A collective of the warp.
#[device]
pub fn leave_rounded(
    base: u32,
    outputs: u32,
    row: u32,
    half: u32,
    rows: u32,
    held: Shared<f32>,
    to_codes: Output<u32>,
    to_scales: Output<f32>,
    to_sums: Output<i32>,
) {
    let in_panel = half * 4 + lane_id() / 8;
    let word = lane_id() % 8;
    let four = quantise4(load::<F32x4>(held, in_panel * held_stride() + word * 4));
    if row < rows && base < outputs {
        let part = row / 8 * (outputs / 16) + base / 16 + word / 4;
        to_codes[(part * 8 + in_panel) * 4 + word % 4] = four.x;
        if word == 0 {
            let group = (row / 8 * (outputs / 32) + base / 32) * 8 + in_panel;
            to_scales[group] = f32::from_bits(four.y);
            to_sums[group] = four.z as i32;
        }
    }
}
