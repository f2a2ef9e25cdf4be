//! Gate and up of the experts that several rows chose, joined by GeGLU.
//!
//! A block takes 32 neighbouring outputs of an expert at a time, a group of int8 values: they are rounded here, once, where down of one row rounds
//! them in every block. The block's warps share the outputs out and meet when all are there; the weights of the next ones are on their way by then.

use gemma4c_blocks::DType;
use gemma4c_dsl::Instance;
use gemma4c_dsl::prelude::*;

use super::{
    BLOCK_WARPS, GatheredError, TASK_ROWS, block_rows, check, gather, gather_bytes, gathered_at, most_groups, pair_of,
    stage_vectors, twin_sums, vector_words,
};
use crate::kernels::gelu::gelu;
use crate::kernels::matvec::formats::format;
use crate::kernels::matvec::parts::{Unit, UnitActivations, activations_at, fetch};
use crate::kernels::moe::nothing_beside;
use crate::kernels::quantise::quantise4;

/// What a block does at once: 32 outputs of an expert, or of the dense half, for a few rows.
#[registers]
pub struct GateUpTask {
    /// Rows of the matrix from a gate to its up.
    pub height: u32,
    /// The gate that is the warp's first: of the whole matrix.
    pub gate: u32,
    /// The first of the 32 outputs.
    pub base: u32,
    /// The rows, as [`Gathered`](super::Gathered) has them; the dense half's activations lie behind those of the experts.
    pub count: u32,
    pub rows: u32,
    pub low_pairs: u32,
    pub high_pairs: u32,
}

/// Task `number`: those of the dense half come first, and those of the same weights follow each other.
#[device]
pub fn gate_up_task<const TOP: u32, const HIDDEN: u32, const DENSE: u32, const ROWS: u32, const HEIGHT: u32>(
    number: u32,
    here: u32,
    groups: Shared<U32x4>,
) -> GateUpTask {
    let tiles = here.div_ceil(HEIGHT);
    let dense_tasks = if DENSE > 0 { tiles * (DENSE / 32) } else { 0 };
    let mut task = GateUpTask::ZERO;
    if DENSE > 0 && number < dense_tasks {
        let tile = number % tiles;
        task.height = DENSE;
        task.base = number / tiles * 32;
        task.gate = task.base + warp_id();
        task.count = (here - tile * HEIGHT).min(HEIGHT);
        task.rows = (ROWS + tile * HEIGHT) * 0x01010101 + 0x03020100;
    } else {
        let of = gathered_at(groups, (number - dense_tasks) / (HIDDEN / 32));
        task.count = of.count;
        task.rows = of.rows;
        task.low_pairs = of.low_pairs;
        task.high_pairs = of.high_pairs;
        task.height = HIDDEN;
        task.base = (number - dense_tasks) % (HIDDEN / 32) * 32;
        task.gate = of.expert * 2 * HIDDEN + task.base + warp_id();
    }
    task
}

/// The task of a block's window, with the warp's gate.
#[device]
pub fn task_of_window<const K: u32, const UNIT: u32, const DEPTH: u32, const WARPS: u32>(
    window: u32,
    here: u32,
    groups: Shared<U32x4>,
) -> GateUpTask {
    let step = window / (K / UNIT).div_ceil(32 * DEPTH);
    let mut task = gate_up_task(block_idx() + step / (32 / WARPS) * grid_dim(), here, groups);
    task.gate = task.gate + step % (32 / WARPS) * WARPS;
    task
}

/// Starts a window on its way.
#[device(slots(side(unit: u32, more: u32) -> U32x4, dense_side(unit: u32, more: u32) -> U32x4))]
pub fn fetch_window<const K: u32, const UNIT: u32, const DENSE: u32, const DEPTH: u32, const WARPS: u32>(
    window: u32,
    here: u32,
    dense_tasks: u32,
    units_of: &mut Regs<Unit>,
    groups: Shared<U32x4>,
    codes: Weights<U32x4>,
    dense_codes: Weights<U32x4>,
) {
    let units = K / UNIT;
    let windows = units.div_ceil(32 * DEPTH);
    let task = task_of_window(window, here, groups);
    let number = block_idx() + window / windows / (32 / WARPS) * grid_dim();
    let at = lane_id() + window % windows * (32 * DEPTH);
    #[unroll]
    for d in 0..DEPTH {
        #[unroll]
        for r in 0u32..2 {
            let unit = (task.gate + r * task.height) * units + (at + d * 32).min(units - 1);
            if DENSE > 0 && number < dense_tasks {
                units_of[d * 2 + r] = fetch(dense_side, dense_codes, unit);
            } else {
                units_of[d * 2 + r] = fetch(side, codes, unit);
            }
        }
    }
}

/// Multiplies a window by its rows; where it is the last of a task's, joins gates and ups and leaves them. A collective of the block.
#[device(slots(dot(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32))]
pub fn multiply_window<
    const K: u32,
    const UNIT: u32,
    const INTEGER: bool,
    const TOP: u32,
    const HIDDEN: u32,
    const DENSE: u32,
    const ROWS: u32,
    const HEIGHT: u32,
    const DEPTH: u32,
    const WARPS: u32,
>(
    window: u32,
    here: u32,
    first_row: u32,
    dense_tasks: u32,
    units_of: &mut Regs<Unit>,
    sums: &mut Regs<f32>,
    groups: Shared<U32x4>,
    x_words: Shared<u32>,
    x_scales: Shared<U32x2>,
    joined: Shared<f32>,
    out: Output<f32>,
    out_xq: Output<u32>,
    out_xscale: Output<f32>,
    out_xsum: Output<i32>,
    dense_out: Output<f32>,
    dense_out_xq: Output<u32>,
    dense_out_xscale: Output<f32>,
    dense_out_xsum: Output<i32>,
) {
    let units = K / UNIT;
    let row_words = if INTEGER { K / 4 } else { K };
    let row_groups = if INTEGER { K / 32 } else { 0 };
    let passes = 32 / WARPS;
    let windows = units.div_ceil(32 * DEPTH);
    let step = window / windows;
    let task = task_of_window(window, here, groups);
    let at = window % windows * (32 * DEPTH);
    let row_ends = window % windows == windows - 1;
    let turn = step / passes % 2 * (HEIGHT * 64);
    let output = step % passes * WARPS + warp_id();
    // Two rows at a time: what becomes of a unit before it is multiplied is the same for both.
    #[unroll(1)]
    for i in (0u32..task.count).by(2) {
        let mut of_rows = regs(0.0f32, 4);
        // Sums of a row that has several windows wait for the next one.
        if windows > 1 {
            #[unroll]
            for k in 0..HEIGHT {
                if k / 2 == i / 2 {
                    of_rows[k % 2 * 2] = sums[k * 2];
                    of_rows[k % 2 * 2 + 1] = sums[k * 2 + 1];
                }
            }
        }
        let row = byte_of(task.rows, i);
        let words = x_words.offset(row * row_words);
        let scales = x_scales.offset(row * row_groups);
        if i + 1 < task.count {
            let other = byte_of(task.rows, i + 1);
            let other_words = x_words.offset(other * row_words);
            let other_scales = x_scales.offset(other * row_groups);
            #[unroll]
            for d in 0..DEPTH {
                let held = (lane_id() + at + d * 32).min(units - 1);
                let is_unit = lane_id() + at + d * 32 < units;
                let x_unit = activations_at(held, held * UNIT / 32, units, words, scales);
                let x_other = activations_at(held, held * UNIT / 32, units, other_words, other_scales);
                #[unroll]
                for r in 0u32..2 {
                    let number = (task.gate + r * task.height) * units + held;
                    let first = dot(units_of[d * 2 + r], number, x_unit, of_rows[r]);
                    let second = dot(units_of[d * 2 + r], number, x_other, of_rows[2 + r]);
                    if is_unit {
                        of_rows[r] = first;
                        of_rows[2 + r] = second;
                    }
                }
            }
        } else {
            #[unroll]
            for d in 0..DEPTH {
                let held = (lane_id() + at + d * 32).min(units - 1);
                let is_unit = lane_id() + at + d * 32 < units;
                let x_unit = activations_at(held, held * UNIT / 32, units, words, scales);
                #[unroll]
                for r in 0u32..2 {
                    let number = (task.gate + r * task.height) * units + held;
                    let first = dot(units_of[d * 2 + r], number, x_unit, of_rows[r]);
                    if is_unit {
                        of_rows[r] = first;
                    }
                }
            }
        }
        if row_ends {
            // Of both, be there one or two: their shuffles overlap.
            #[unroll]
            for k in 0u32..2 {
                let sum = twin_sums(32, of_rows[k * 2], of_rows[k * 2 + 1]);
                if lane_id() % 16 == 0 && i + k < task.count {
                    joined[turn + (i + k) * 64 + lane_id() / 16 * 32 + output] = sum;
                }
                of_rows[k * 2] = 0.0;
                of_rows[k * 2 + 1] = 0.0;
            }
        }
        if windows > 1 {
            #[unroll]
            for k in 0..HEIGHT {
                if k / 2 == i / 2 {
                    sums[k * 2] = of_rows[k % 2 * 2];
                    sums[k * 2 + 1] = of_rows[k % 2 * 2 + 1];
                }
            }
        }
    }
    if row_ends && step % passes == passes - 1 {
        barrier();
        // Warps take turns: eight lanes have a row, four values each.
        if warp_id() == step / passes % WARPS {
            let i = lane_id() / 8;
            let from = turn + i.min(task.count - 1) * 64 + lane_id() % 8 * 4;
            let gates = load::<F32x4>(joined, from);
            let ups = load::<F32x4>(joined, from + 32);
            let four =
                f32x4(gelu(gates.x) * ups.x, gelu(gates.y) * ups.y, gelu(gates.z) * ups.z, gelu(gates.w) * ups.w);
            let place = task.base + lane_id() % 8 * 4;
            if DENSE > 0 && block_idx() + step / passes * grid_dim() < dense_tasks {
                let to = (first_row + byte_of(task.rows, i) - ROWS) * DENSE + place;
                leave_joined(four, to, i < task.count, dense_out, dense_out_xq, dense_out_xscale, dense_out_xsum);
            } else {
                let to = (first_row * TOP + pair_of(task.low_pairs, task.high_pairs, i)) * HIDDEN + place;
                leave_joined(four, to, i < task.count, out, out_xq, out_xscale, out_xsum);
            }
        }
    }
}

/// `GeGLU(W[ids[j]] · x)` for each choice j of each row, as [`expert_geglu`](crate::kernels::moe::gate_up::expert_geglu) has it; and with DENSE, that many
/// values of `GeGLU(dense · dense_x)` of each row. Block `[b, t]` takes every `[blocks]`-th task of the ROWS rows from `t * ROWS` on. Activations are int8 codes or f32, as
/// words. QUANTISED results are left as int8, others as f32.
///
/// A window is DEPTH units to a lane of a gate and its up. Two of them are on their way to registers; what has arrived is multiplied by one row of
/// activations after the other.
#[kernel(block = WARPS * 32, min_blocks = 1, dependent, dynamic_shared, slots(
    side(unit: u32, more: u32) -> U32x4,
    dot(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32,
    dense_side(unit: u32, more: u32) -> U32x4
))]
pub fn gathered_geglu<
    const K: u32,
    const UNIT: u32,
    const INTEGER: bool,
    const EXPERTS: u32,
    const TOP: u32,
    const HIDDEN: u32,
    const DENSE: u32,
    const ROWS: u32,
    const HEIGHT: u32,
    const GROUPS: u32,
    const DEPTH: u32,
    const WARPS: u32,
    const QUANTISED: bool,
>(
    codes: Weights<U32x4>,
    dense_codes: Weights<U32x4>,
    x: Input<u32>,
    xscale: Input<f32>,
    xsum: Input<i32>,
    dense_x: Input<u32>,
    dense_xscale: Input<f32>,
    dense_xsum: Input<i32>,
    ids: Input<u32>,
    out: Output<f32>,
    out_xq: Output<u32>,
    out_xscale: Output<f32>,
    out_xsum: Output<i32>,
    dense_out: Output<f32>,
    dense_out_xq: Output<u32>,
    dense_out_xscale: Output<f32>,
    dense_out_xsum: Output<i32>,
    rows: u32,
) {
    require!(K % 32 == 0 && HIDDEN % 32 == 0 && DENSE % 32 == 0 && 32 % WARPS == 0 && ROWS <= 32 && HEIGHT == 4);
    // The experts' activations, then the dense half's.
    let x_words = shared::<u32>((if DENSE > 0 { 2 } else { 1 }) * ROWS * if INTEGER { K / 4 } else { K });
    let x_scales = shared::<U32x2>(if INTEGER { (if DENSE > 0 { 2 } else { 1 }) * ROWS * K / 32 } else { 1 });
    let chosen = shared::<u32>(ROWS * TOP);
    let masks = shared::<u32>(EXPERTS);
    let of_warps = shared::<u32>(WARPS);
    let groups = shared::<U32x4>(GROUPS);
    // Gates and ups of two tasks in turn: whoever is ahead writes the other one.
    let joined = shared::<f32>(2 * HEIGHT * 64);
    let units = K / UNIT;
    let row_words = if INTEGER { K / 4 } else { K };
    let row_groups = if INTEGER { K / 32 } else { 0 };

    let first_row = block_idx_y() * ROWS;
    let here = (rows - first_row).min(ROWS);
    let dense_tasks = if DENSE > 0 { here.div_ceil(HEIGHT) * (DENSE / 32) } else { 0 };
    // Two windows are on their way, in registers of their own, so that memory always has one to bring.
    let mut even = regs(Unit::ZERO, 2 * DEPTH);
    let mut odd = regs(Unit::ZERO, 2 * DEPTH);
    // The dense half's weights are on their way before the choice is made. Its first window is there, whatever the rows chose.
    if block_idx() < dense_tasks {
        fetch_window(side, dense_side, 0, here, dense_tasks, &mut even, groups, codes, dense_codes);
    }
    grid_launch_dependents();
    grid_dependency_wait();
    stage_vectors(K, first_row, here, x, xscale, xsum, x_words, x_scales);
    if DENSE > 0 {
        stage_vectors(
            K,
            first_row,
            here,
            dense_x,
            dense_xscale,
            dense_xsum,
            x_words.offset(ROWS * row_words),
            x_scales.offset(ROWS * row_groups),
        );
    }
    let tasks = gather(first_row, here, ids, chosen, masks, of_warps, groups) * (HIDDEN / 32) + dense_tasks;
    let own_tasks = if block_idx() < tasks { (tasks - block_idx()).div_ceil(grid_dim()) } else { 0 };
    let all_windows = own_tasks * (32 / WARPS) * units.div_ceil(32 * DEPTH);
    if block_idx() >= dense_tasks && all_windows > 0 {
        fetch_window(side, dense_side, 0, here, dense_tasks, &mut even, groups, codes, dense_codes);
    }
    if all_windows > 1 {
        fetch_window(side, dense_side, 1, here, dense_tasks, &mut odd, groups, codes, dense_codes);
    }
    cp_async_wait(0);
    barrier();

    let mut sums = regs(0.0f32, 2 * HEIGHT);
    for window in (0..all_windows).by(2) {
        multiply_window(
            dot,
            window,
            here,
            first_row,
            dense_tasks,
            &mut even,
            &mut sums,
            groups,
            x_words,
            x_scales,
            joined,
            out,
            out_xq,
            out_xscale,
            out_xsum,
            dense_out,
            dense_out_xq,
            dense_out_xscale,
            dense_out_xsum,
        );
        if window + 2 < all_windows {
            fetch_window(side, dense_side, window + 2, here, dense_tasks, &mut even, groups, codes, dense_codes);
        }
        if window + 1 < all_windows {
            multiply_window(
                dot,
                window + 1,
                here,
                first_row,
                dense_tasks,
                &mut odd,
                &mut sums,
                groups,
                x_words,
                x_scales,
                joined,
                out,
                out_xq,
                out_xscale,
                out_xsum,
                dense_out,
                dense_out_xq,
                dense_out_xscale,
                dense_out_xsum,
            );
            if window + 3 < all_windows {
                fetch_window(side, dense_side, window + 3, here, dense_tasks, &mut odd, groups, codes, dense_codes);
            }
        }
    }
}

/// Stores four values, eight lanes to a group of 32; lanes that are not `inside` store nothing. A collective of the warp.
#[device]
pub fn leave_joined<const QUANTISED: bool>(
    four: F32x4,
    to: u32,
    inside: bool,
    out: Output<f32>,
    xq: Output<u32>,
    xscale: Output<f32>,
    xsum: Output<i32>,
) {
    if QUANTISED {
        let rounded = quantise4(four);
        if inside {
            xq[to / 4] = rounded.x;
            if to % 32 == 0 {
                xscale[to / 32] = f32::from_bits(rounded.y);
                xsum[to / 32] = rounded.z as i32;
            }
        }
    } else if inside {
        store(out, to, four);
    }
}

/// The gate and up products of the experts that several rows chose: everything that decides their instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatheredGateUp {
    pub dtype: DType,
    /// Hidden values of an expert: half the rows of its matrix.
    pub hidden: u32,
    /// Values of a row.
    pub k: u32,
    pub experts: u32,
    /// Experts that a row goes to.
    pub top: u32,
    /// Hidden values of a dense half of the same type, which comes along; 0 where none does.
    pub dense: u32,
    pub rows: u32,
    /// The results are left as int8.
    pub quantised: bool,
    /// SMs of the GPU, and the most shared memory of a block.
    pub multiprocessors: u32,
    pub shared_bytes: u32,
}

/// Registers of a lane for units on their way, and once more for those that are multiplied.
const AHEAD_REGISTERS: u32 = 32;

impl GatheredGateUp {
    fn block_rows(&self) -> u32 {
        let vectors = if self.dense > 0 { 2 } else { 1 };
        let row_bytes = vectors * vector_words(format(self.dtype).integer, self.k) * 4;
        let beside = gather_bytes(self.experts, self.top, self.rows.min(32)) + 2 * TASK_ROWS * 64 * 4;
        block_rows(self.rows, row_bytes, beside, self.shared_bytes)
    }

    pub fn grid(&self) -> [u32; 3] {
        let rows = self.block_rows();
        let of_experts = most_groups(self.experts, self.top, rows) * (self.hidden / 32);
        let tasks = of_experts + rows.div_ceil(TASK_ROWS) * (self.dense / 32);
        [tasks.min(self.multiprocessors), self.rows.div_ceil(rows), 1]
    }

    pub fn instance(&self) -> Result<Instance, GatheredError> {
        check(self.experts, [self.k, self.hidden, self.dense])?;
        let (format, rows) = (format(self.dtype), self.block_rows());
        let steps = (self.k / format.unit).div_ceil(32);
        let depth = (AHEAD_REGISTERS / ((4 + format.side_words) * 2)).clamp(1, steps);
        let instance = gathered_geglu::Chosen {
            K: self.k,
            UNIT: format.unit,
            INTEGER: format.integer,
            EXPERTS: self.experts,
            TOP: self.top,
            HIDDEN: self.hidden,
            DENSE: self.dense,
            ROWS: rows,
            HEIGHT: TASK_ROWS,
            GROUPS: most_groups(self.experts, self.top, rows),
            // Equal loops: no load of the last one is idle.
            DEPTH: steps.div_ceil(steps.div_ceil(depth)),
            WARPS: BLOCK_WARPS,
            QUANTISED: self.quantised,
            side: format.side,
            dot: format.dot,
            dense_side: if self.dense > 0 { format.side } else { nothing_beside::DEF },
        }
        .build()?;
        Ok(instance)
    }
}
