//! Gate and up of the experts that several rows chose, joined by GeGLU.
//!
//! A block takes 32 neighbouring outputs of an expert at a time, a group of int8 values: they are rounded here, once,
//! where down of one row rounds them in every block. The block's warps share the outputs out and meet when all are
//! there; the weights of the next ones are in flight by then.

use gemma4c_blocks::DType;
use gemma4c_dsl::Instance;
use gemma4c_dsl::prelude::*;

use super::{
    ActivationRows, GatheredError, GatheredTile, TASK_ROWS, block_rows, check, first_group, first_word, gather,
    gather_bytes, gathered_at, most_groups, pair_of, stage_vectors, twin_sums, vector_words,
};
use crate::kernels::geglu::geglu4;
use crate::kernels::matvec::formats::format;
use crate::kernels::matvec::parts::{Unit, UnitActivations, activations_at, fetch};
use crate::kernels::moe::{ExpertShape, MixtureCodes, UnitFormat, nothing_beside};
use crate::kernels::outputs::{OutputForms, OutputRows, Outputs, write4};

/// The rows of a block, and its tasks of the dense half.
#[registers]
pub struct GateUpBlock {
    pub first_row: u32,
    pub rows: u32,
    pub dense_tasks: u32,
}

/// What a block does at once: 32 outputs of an expert, or of the dense half, for a few rows.
#[registers]
pub struct GateUpTask {
    /// Rows of the matrix from a gate to its up.
    pub height: u32,
    /// The gate that is the warp's first: of the whole matrix.
    pub gate: u32,
    /// The first of the 32 outputs.
    pub base: u32,
    /// The rows, as [`Gathered`](super::Gathered) has them; the dense half's activations are behind those of the
    /// experts.
    pub count: u32,
    pub rows: u32,
    pub low_pairs: u32,
    pub high_pairs: u32,
}

/// A window: DEPTH units to a lane of a gate and its up.
#[config]
pub struct GateUpWindow {
    /// Hidden values of an expert: half the rows of its matrix.
    HIDDEN: u32,
    DEPTH: u32,
}

/// What the windows of a block read and write in shared memory.
#[view]
pub struct GateUpShared {
    groups: Shared<U32x4>,
    /// The experts' activations, then the dense half's.
    x_words: Shared<u32>,
    x_scales: Shared<U32x2>,
    /// Gates and ups of two tasks in turn: a warp that is ahead writes the other one.
    joined: Shared<f32>,
}

/// Task `number`: those of the dense half come first, and those of the same weights follow each other.
#[device]
pub fn gate_up_task<const S: ExpertShape, const T: GatheredTile, const HIDDEN: u32>(
    number: u32,
    block: GateUpBlock,
    groups: Shared<U32x4>,
) -> GateUpTask {
    let tiles = block.rows.div_ceil(T.HEIGHT);
    let mut task = GateUpTask::ZERO;
    if S.DENSE > 0 && number < block.dense_tasks {
        let tile = number % tiles;
        task.height = S.DENSE;
        task.base = number / tiles * 32;
        task.gate = task.base + warp_id();
        task.count = (block.rows - tile * T.HEIGHT).min(T.HEIGHT);
        task.rows = (T.ROWS + tile * T.HEIGHT) * 0x01010101 + 0x03020100;
    } else {
        let of = gathered_at(groups, (number - block.dense_tasks) / (HIDDEN / 32));
        task.count = of.count;
        task.rows = of.rows;
        task.low_pairs = of.low_pairs;
        task.high_pairs = of.high_pairs;
        task.height = HIDDEN;
        task.base = (number - block.dense_tasks) % (HIDDEN / 32) * 32;
        task.gate = of.expert * 2 * HIDDEN + task.base + warp_id();
    }
    task
}

/// The task of a block's window, with the warp's gate.
#[device]
pub fn task_of_window<const S: ExpertShape, const F: UnitFormat, const DEPTH: u32, const WARPS: u32>(
    window: u32,
    block: GateUpBlock,
    groups: Shared<U32x4>,
) -> GateUpTask {
    let step = window / (S.K / F.UNIT).div_ceil(32 * DEPTH);
    let mut task = gate_up_task(block_idx() + step / (32 / WARPS) * grid_dim(), block, groups);
    task.gate = task.gate + step % (32 / WARPS) * WARPS;
    task
}

/// Issues the loads of a window.
#[device(slots(side(unit: u32, more: u32) -> U32x4, dense_side(unit: u32, more: u32) -> U32x4))]
pub fn fetch_window<const S: ExpertShape, const F: UnitFormat, const DEPTH: u32, const WARPS: u32>(
    window: u32,
    block: GateUpBlock,
    units_of: &mut Regs<Unit>,
    groups: Shared<U32x4>,
    codes: MixtureCodes,
) {
    let units = S.K / F.UNIT;
    let windows = units.div_ceil(32 * DEPTH);
    let task = task_of_window(window, block, groups);
    let number = block_idx() + window / windows / (32 / WARPS) * grid_dim();
    let at = lane_id() + window % windows * (32 * DEPTH);
    #[unroll]
    for d in 0..DEPTH {
        #[unroll]
        for r in 0u32..2 {
            let unit = (task.gate + r * task.height) * units + (at + d * 32).min(units - 1);
            if S.DENSE > 0 && number < block.dense_tasks {
                units_of[d * 2 + r] = fetch(dense_side, codes.dense, unit);
            } else {
                units_of[d * 2 + r] = fetch(side, codes.experts, unit);
            }
        }
    }
}

/// Makes `gelu(gate) * up` of a task's gates and ups, and writes it, by one warp: warps take turns. `turn` is the
/// number of the block's task.
#[device]
pub fn join_task<const S: ExpertShape, const T: GatheredTile, const HIDDEN: u32, const FORMS: OutputForms>(
    turn: u32,
    task: GateUpTask,
    block: GateUpBlock,
    joined: Shared<f32>,
    out: OutputRows,
    dense_out: OutputRows,
) {
    if warp_id() == turn % T.WARPS {
        // Eight lanes have a row, four values each.
        let i = lane_id() / 8;
        let from = turn % 2 * (T.HEIGHT * 64) + i.min(task.count - 1) * 64 + lane_id() % 8 * 4;
        let gates = load::<F32x4>(joined, from);
        let ups = load::<F32x4>(joined, from + 32);
        let four = geglu4(gates, ups);
        let place = task.base + lane_id() % 8 * 4;
        if S.DENSE > 0 && block_idx() + turn * grid_dim() < block.dense_tasks {
            let to = (block.first_row + byte_of(task.rows, i) - T.ROWS) * S.DENSE + place;
            write4(four, to, i < task.count, dense_out);
        } else {
            let to = (block.first_row * S.TOP + pair_of(task.low_pairs, task.high_pairs, i)) * HIDDEN + place;
            write4(four, to, i < task.count, out);
        }
    }
}

/// Multiplies a window by its rows; where it is the last of a task's, joins gates and ups. A collective of the block.
#[device(slots(dot(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32))]
pub fn multiply_window<
    const S: ExpertShape,
    const F: UnitFormat,
    const T: GatheredTile,
    const W: GateUpWindow,
    const FORMS: OutputForms,
>(
    window: u32,
    block: GateUpBlock,
    units_of: &mut Regs<Unit>,
    sums: &mut Regs<f32>,
    memory: GateUpShared,
    out: OutputRows,
    dense_out: OutputRows,
) {
    let units = S.K / F.UNIT;
    let passes = 32 / T.WARPS;
    let windows = units.div_ceil(32 * W.DEPTH);
    let step = window / windows;
    let task = task_of_window(window, block, memory.groups);
    let at = window % windows * (32 * W.DEPTH);
    let row_ends = window % windows == windows - 1;
    let turn = step / passes % 2 * (T.HEIGHT * 64);
    let output = step % passes * T.WARPS + warp_id();
    // Two rows at a time: what becomes of a unit before it is multiplied is the same for both.
    #[unroll(1)]
    for i in (0u32..task.count).by(2) {
        let mut of_rows = regs(0.0f32, 4);
        // Sums of a row that has several windows wait for the next one.
        if windows > 1 {
            #[unroll]
            for k in 0u32..T.HEIGHT {
                if k / 2 == i / 2 {
                    of_rows[k % 2 * 2] = sums[k * 2];
                    of_rows[k % 2 * 2 + 1] = sums[k * 2 + 1];
                }
            }
        }
        let row = byte_of(task.rows, i);
        let words = memory.x_words.offset(first_word(S.K, row));
        let scales = memory.x_scales.offset(first_group(S.K, row));
        if i + 1 < task.count {
            let other = byte_of(task.rows, i + 1);
            let other_words = memory.x_words.offset(first_word(S.K, other));
            let other_scales = memory.x_scales.offset(first_group(S.K, other));
            #[unroll]
            for d in 0u32..W.DEPTH {
                let held = (lane_id() + at + d * 32).min(units - 1);
                let is_unit = lane_id() + at + d * 32 < units;
                let x_unit = activations_at(held, held * F.UNIT / 32, units, words, scales);
                let x_other = activations_at(held, held * F.UNIT / 32, units, other_words, other_scales);
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
            for d in 0u32..W.DEPTH {
                let held = (lane_id() + at + d * 32).min(units - 1);
                let is_unit = lane_id() + at + d * 32 < units;
                let x_unit = activations_at(held, held * F.UNIT / 32, units, words, scales);
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
                    memory.joined[turn + (i + k) * 64 + lane_id() / 16 * 32 + output] = sum;
                }
                of_rows[k * 2] = 0.0;
                of_rows[k * 2 + 1] = 0.0;
            }
        }
        if windows > 1 {
            #[unroll]
            for k in 0u32..T.HEIGHT {
                if k / 2 == i / 2 {
                    sums[k * 2] = of_rows[k % 2 * 2];
                    sums[k * 2 + 1] = of_rows[k % 2 * 2 + 1];
                }
            }
        }
    }
    if row_ends && step % passes == passes - 1 {
        barrier();
        join_task(step / passes, task, block, memory.joined, out, dense_out);
    }
}

/// `GeGLU(W[ids[j]] · x)` for each choice j of each row, as
/// [`expert_geglu`](crate::kernels::moe::gate_up::expert_geglu) has it; and with DENSE, that many values of
/// `GeGLU(dense · dense_x)` of each row. Block `[b, t]` takes every `[blocks]`-th task of the ROWS rows from `t * ROWS`
/// on.
///
/// Two windows are in flight to registers; what has arrived is multiplied by one row of activations after the other.
#[kernel(block = T.WARPS * 32, min_blocks = 1, dependent, dynamic_shared, slots(
    side(unit: u32, more: u32) -> U32x4,
    dot(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32,
    dense_side(unit: u32, more: u32) -> U32x4
))]
pub fn gathered_geglu<
    const S: ExpertShape,
    const F: UnitFormat,
    const T: GatheredTile,
    const W: GateUpWindow,
    const FORMS: OutputForms,
>(
    codes: MixtureCodes,
    x: ActivationRows,
    dense_x: ActivationRows,
    ids: Input<u32>,
    out: OutputRows,
    dense_out: OutputRows,
    rows: u32,
) {
    require!(S.K % 32 == 0 && W.HIDDEN % 32 == 0 && S.DENSE % 32 == 0 && 32 % T.WARPS == 0);
    require!(T.ROWS <= 32 && T.HEIGHT == 4);
    let staged_words =
        shared::<u32>((if S.DENSE > 0 { 2 } else { 1 }) * T.ROWS * if F.INTEGER { S.K / 4 } else { S.K });
    let staged_scales =
        shared::<U32x2>(if F.INTEGER { (if S.DENSE > 0 { 2 } else { 1 }) * T.ROWS * S.K / 32 } else { 1 });
    let chosen = shared::<u32>(T.ROWS * S.TOP);
    let masks = shared::<u32>(T.EXPERTS);
    let of_warps = shared::<u32>(T.WARPS);
    let groups = shared::<U32x4>(T.GROUPS);
    let joined = shared::<f32>(2 * T.HEIGHT * 64);
    let memory = GateUpShared { groups, x_words: staged_words, x_scales: staged_scales, joined };

    let mut block = GateUpBlock::ZERO;
    block.first_row = block_idx_y() * T.ROWS;
    block.rows = (rows - block.first_row).min(T.ROWS);
    block.dense_tasks = if S.DENSE > 0 { block.rows.div_ceil(T.HEIGHT) * (S.DENSE / 32) } else { 0 };
    // Two windows are in flight, in registers of their own, so that memory always has one to bring.
    let mut even = regs(Unit::ZERO, 2 * W.DEPTH);
    let mut odd = regs(Unit::ZERO, 2 * W.DEPTH);
    // The dense half's weights are prefetched before the choice is made. Its first window is there, whatever the rows
    // chose.
    if block_idx() < block.dense_tasks {
        fetch_window(side, dense_side, 0, block, &mut even, groups, codes);
    }
    grid_launch_dependents();
    grid_dependency_wait();
    stage_vectors(S.K, block.first_row, block.rows, x, staged_words, staged_scales);
    if S.DENSE > 0 {
        let dense_words = staged_words.offset(first_word(S.K, T.ROWS));
        let dense_scales = staged_scales.offset(first_group(S.K, T.ROWS));
        stage_vectors(S.K, block.first_row, block.rows, dense_x, dense_words, dense_scales);
    }
    let all = gather(block.first_row, block.rows, ids, chosen, masks, of_warps, groups);
    let tasks = all * (W.HIDDEN / 32) + block.dense_tasks;
    let own_tasks = if block_idx() < tasks { (tasks - block_idx()).div_ceil(grid_dim()) } else { 0 };
    let all_windows = own_tasks * (32 / T.WARPS) * (S.K / F.UNIT).div_ceil(32 * W.DEPTH);
    if block_idx() >= block.dense_tasks && all_windows > 0 {
        fetch_window(side, dense_side, 0, block, &mut even, groups, codes);
    }
    if all_windows > 1 {
        fetch_window(side, dense_side, 1, block, &mut odd, groups, codes);
    }
    cp_async_wait(0);
    barrier();

    let mut sums = regs(0.0f32, 2 * T.HEIGHT);
    for window in (0u32..all_windows).by(2) {
        multiply_window(dot, window, block, &mut even, &mut sums, memory, out, dense_out);
        if window + 2 < all_windows {
            fetch_window(side, dense_side, window + 2, block, &mut even, groups, codes);
        }
        if window + 1 < all_windows {
            multiply_window(dot, window + 1, block, &mut odd, &mut sums, memory, out, dense_out);
            if window + 3 < all_windows {
                fetch_window(side, dense_side, window + 3, block, &mut odd, groups, codes);
            }
        }
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
    /// The results are written as int8.
    pub quantised: bool,
    /// SMs of the GPU, and the most shared memory of a block.
    pub multiprocessors: u32,
    pub shared_bytes: u32,
}

/// Registers of a lane for units in flight, and once more for those that are multiplied.
const AHEAD_REGISTERS: u32 = 32;

impl GatheredGateUp {
    fn block_rows(&self) -> u32 {
        let vectors = if self.dense > 0 { 2 } else { 1 };
        let row_bytes = vectors * vector_words(format(self.dtype).integer, self.k) * 4;
        let tables = format(self.dtype).dot.table_bytes();
        let beside = gather_bytes(self.experts, self.top, self.rows.min(32)) + 2 * TASK_ROWS * 64 * 4 + tables;
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
        let depth = (AHEAD_REGISTERS / (format.words() * 2)).clamp(1, steps);
        let instance = gathered_geglu::Chosen {
            S: ExpertShape { K: self.k, TOP: self.top, DENSE: self.dense },
            F: UnitFormat::of(format),
            T: GatheredTile::of(self.experts, self.top, rows),
            // Equal loops: no load of the last one is idle.
            W: GateUpWindow { HIDDEN: self.hidden, DEPTH: steps.div_ceil(steps.div_ceil(depth)) },
            FORMS: if self.quantised { Outputs::INT8 } else { Outputs::FLOATS }.config(),
            side: format.side,
            dot: format.dot,
            dense_side: if self.dense > 0 { format.side } else { nothing_beside::DEF },
        }
        .build()?;
        Ok(instance)
    }
}
