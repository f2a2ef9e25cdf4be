//! The product of several rows without tensor cores, for every type of weights: what float weights have, and few rows of any.
//!
//! As [`matvec`](crate::kernels::matvec::matvec), with several rows of activations in shared memory: a unit of weights that has
//! arrived is multiplied by each of them in turn. The lanes that share an output, the order of their units and the tree of their sums
//! are those of one row, and the functions too, so every row has the bits it has alone. More rows than a block holds are
//! the grid's y, and read the weights again.

use gemma4c_dsl::prelude::*;

use crate::kernels::matvec::parts::{Unit, UnitActivations, activations_at, dot_fine, fetch, part_at, second_part_at};
use crate::kernels::matvec::steps::{step_units, stretch_units};
use crate::kernels::matvec::{first_unit, is_exact, lanes_sum, unit_of};

/// Copies TILE rows of activations to shared memory: words of codes or floats, 16 bytes of them a part, and of integers the scales. All rows are on
/// their way at once. A row that is not there is the last one: its results are dropped.
#[device]
pub fn keep_rows_of_tile<
    const K: u32,
    const UNIT: u32,
    const INTEGER: bool,
    const FINE: bool,
    const WARPS: u32,
    const TILE: u32,
>(
    first: u32,
    rows: u32,
    x: Input<u32>,
    x_stride: u32,
    xscale: Input<f32>,
    xsum: Input<i32>,
    fine: Input<u32>,
    fine_sums: Input<i32>,
    words: Shared<u32>,
    scales: Shared<U32x2>,
    sums: Shared<i32>,
) {
    let parts = if INTEGER { K / 16 } else { K / 4 };
    let units = K / UNIT;
    let row_words = if FINE {
        3 * K / 4
    } else if INTEGER {
        K / 4
    } else {
        K
    };
    #[unroll(8)]
    for place in (thread_idx()..TILE * parts).by(WARPS * 32) {
        let row = (first + place / parts).min(rows - 1);
        let part = place % parts;
        let to = place / parts * row_words + part_at(part, units);
        store(words, to, load::<U32x4>(x, row * x_stride + part * 4));
        if FINE {
            store(words, K / 4 + to, load::<U32x4>(fine, row * (K / 2) + part * 4));
            store(words, K / 2 + to, load::<U32x4>(fine, row * (K / 2) + K / 4 + part * 4));
        }
    }
    if INTEGER {
        #[unroll(4)]
        for place in (thread_idx()..TILE * (K / 32)).by(WARPS * 32) {
            let from = (first + place / (K / 32)).min(rows - 1) * (K / 32) + place % (K / 32);
            scales[place] = u32x2(xscale[from].to_bits(), xsum[from] as u32);
            if FINE {
                sums[place] = fine_sums[from];
            }
        }
    }
}

/// `out[r] = W · x[r]` for TILE rows at a time. `x` is int8 codes or f32, as words, its rows `x_stride` words apart; with FACTORED each row's
/// results are multiplied by its `factor`. With SEPARATE a unit's product
/// is rounded before it is added. An epilogue reads what it multiplies by at `row`, the output plus `by_stride` for every row before.
#[kernel(block = WARPS * 32, min_blocks = 1, dependent, dynamic_shared, slots(
    side(unit: u32, more: u32) -> U32x4,
    dot(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32,
    change(four: F32x4, outputs: U32x2, rows: U32x2) -> F32x4,
    join(value: f32, up: f32) -> f32,
    epilogue(value: f32, row: u32) -> f32
))]
pub fn rows_matvec<
    const K: u32,
    const UNIT: u32,
    const INTEGER: bool,
    const LANES: u32,
    const ROWS: u32,
    const DEPTH: u32,
    const WARPS: u32,
    const TILE: u32,
    const PAIRED: bool,
    const FACTORED: bool,
    const FINE: bool,
    const STRETCHED: bool,
    const SEPARATE: bool,
    const JOINED: bool,
>(
    codes: Weights<U32x4>,
    x: Input<u32>,
    xscale: Input<f32>,
    xsum: Input<i32>,
    fine: Input<u32>,
    fine_sums: Input<i32>,
    factor: Input<f32>,
    out: Output<f32>,
    outputs: u32,
    rows: u32,
    x_stride: u32,
    by_stride: u32,
) {
    require!(K % 32 == 0 && 32 % LANES == 0 && ROWS <= LANES);
    require!(!PAIRED || ROWS % 2 == 0);
    require!(!FINE || INTEGER && !SEPARATE && !JOINED);
    require!(!STRETCHED || INTEGER && LANES % 8 == 0 && (LANES == 32 || K / UNIT <= LANES));
    // Words of a row of activations. With FINE the second digits of all values, then the third ones, follow the first.
    let row_words = if FINE {
        3 * K / 4
    } else if INTEGER {
        K / 4
    } else {
        K
    };
    let x_words = shared::<u32>(
        TILE * if FINE {
            3 * K / 4
        } else if INTEGER {
            K / 4
        } else {
            K
        },
    );
    let x_scales = shared::<U32x2>(if INTEGER { TILE * K / 32 } else { 1 });
    let sums_of_fine = shared::<i32>(if FINE { TILE * K / 32 } else { 1 });
    let factors = shared::<f32>(TILE);
    let units = K / UNIT;
    let groups = if INTEGER { K / 32 } else { 0 };
    let fine_groups = if FINE { K / 32 } else { 0 };

    let lane = lane_id() % LANES;
    let lane_outputs = if PAIRED { ROWS / 2 } else { ROWS };
    let warp_outputs = 32 / LANES * lane_outputs;
    let all_warps = grid_dim() * WARPS;
    let mut base = (block_idx() * WARPS + warp_id()) * warp_outputs;
    let own = lane_id() / LANES * lane_outputs;
    let start = first_unit();
    let stop = (start - start % step_units() + stretch_units()).min(units);
    let mut at = start;

    // The first weights are on their way before the activations are there.
    let mut ahead = regs(Unit::ZERO, ROWS * DEPTH);
    if base < outputs {
        #[unroll]
        for d in 0..DEPTH {
            #[unroll]
            for r in 0..ROWS {
                ahead[d * ROWS + r] = fetch(side, codes, unit_of(base + own, r, at + d * step_units(), outputs));
            }
        }
    }
    grid_launch_dependents();
    grid_dependency_wait();
    let first = block_idx_y() * TILE;
    keep_rows_of_tile(first, rows, x, x_stride, xscale, xsum, fine, fine_sums, x_words, x_scales, sums_of_fine);
    if thread_idx() < TILE {
        factors[thread_idx()] = if FACTORED { factor[(first + thread_idx()).min(rows - 1)] } else { 1.0 };
    }
    barrier();

    let mut sums = regs(0.0f32, ROWS * TILE);
    while base < outputs {
        let row_ends = at - start + step_units() * DEPTH >= stretch_units();
        let next_at = if row_ends { start } else { at + step_units() * DEPTH };
        let next_base = if row_ends { base + all_warps * warp_outputs } else { base };
        #[unroll]
        for d in 0..DEPTH {
            let unit = if is_exact() { at + d * step_units() } else { (at + d * step_units()).min(units - 1) };
            let group = if is_exact() { at * UNIT / 32 + d * (step_units() * UNIT / 32) } else { unit * UNIT / 32 };
            #[unroll]
            for i in 0..TILE {
                let words = x_words.offset(i * row_words);
                let mut of_unit = activations_at(unit, group, units, words, x_scales.offset(i * groups));
                let is_fine = FINE && of_unit.scale < 0.0;
                of_unit.scale = of_unit.scale.abs();
                #[unroll]
                for r in 0..ROWS {
                    let held = ahead[d * ROWS + r];
                    let number = unit_of(base + own, r, at + d * step_units(), outputs);
                    let mut total = dot(held, number, of_unit, if SEPARATE { 0.0 } else { sums[r * TILE + i] });
                    if SEPARATE {
                        total = sums[r * TILE + i] + total;
                    }
                    if is_fine {
                        let second = second_part_at(unit, units);
                        let of_fine = sums_of_fine[i * fine_groups + group];
                        total = dot_fine(dot, held, number, unit * 4, second, of_unit.scale, of_fine, total, words);
                    }
                    if is_exact() || at + d * step_units() < stop {
                        sums[r * TILE + i] = total;
                    }
                }
            }
            if next_base < outputs {
                #[unroll]
                for r in 0..ROWS {
                    let next = unit_of(next_base + own, r, next_at + d * step_units(), outputs);
                    ahead[d * ROWS + r] = fetch(side, codes, next);
                }
            }
        }
        if row_ends {
            let output = base + own + lane;
            #[unroll]
            for i in 0..TILE {
                // Lane i keeps output i.
                let mut value = 0.0f32;
                let mut up = 0.0f32;
                #[unroll]
                for r in 0..ROWS {
                    let sum = lanes_sum(sums[r * TILE + i], LANES, JOINED, STRETCHED);
                    let of_lane = if PAIRED { r / 2 } else { r };
                    if lane == of_lane && PAIRED && r % 2 == 1 {
                        up = sum;
                    } else if lane == of_lane {
                        value = sum;
                    }
                    sums[r * TILE + i] = 0.0;
                }
                let row = first + i;
                if lane < lane_outputs && output < outputs && row < rows {
                    let first = value * factors[i];
                    let second = up * factors[i];
                    let next = if PAIRED { output + outputs } else { output };
                    let four = change(f32x4(first, first, second, second), u32x2(output, next), u32x2(row, row));
                    out[row * outputs + output] = epilogue(join(four.x, four.z), row * by_stride + output);
                }
            }
        }
        at = next_at;
        base = next_base;
    }
}
