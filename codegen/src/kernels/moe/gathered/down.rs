//! Down of the experts that several rows chose, with their weighted sum.
//!
//! A block owns neighbouring outputs and takes them of every expert that any of its rows chose: all blocks have the
//! same work, however rows are spread over experts, and the products of a row's choices end in the same block, which
//! adds them up.

use gemma4c_blocks::DType;
use gemma4c_dsl::Instance;
use gemma4c_dsl::prelude::*;

use super::{
    ActivationRows, BLOCK_WARPS, GatheredError, GatheredTile, block_rows, check, first_group, first_word, gather,
    gather_bytes, gathered_at, pair_of, stage_vectors, twin_sums, vector_words,
};
use crate::kernels::matvec::formats::format;
use crate::kernels::matvec::lanes_sum;
use crate::kernels::matvec::parts::{Unit, UnitActivations, activations_at, fetch};
use crate::kernels::moe::down::{dense_units, lanes_of, steps_of_dense, sum_of_choices};
use crate::kernels::moe::{ExpertChoice, ExpertShape, MixtureCodes, UnitFormat, nothing_beside};

/// The outputs of a block and of a task. LANES lanes share a task: TASK_OUTPUTS outputs of an expert, with DEPTH units
/// of each to a lane.
#[config]
pub struct GatheredDownTile {
    BLOCK_OUTPUTS: u32,
    TASK_OUTPUTS: u32,
    LANES: u32,
    DEPTH: u32,
    /// Outputs of the dense half that a warp has in flight.
    DENSE_AHEAD: u32,
}

/// Where results are written.
#[view]
pub struct DownResults {
    /// Of every choice, before the sum.
    pub products: InOut<f32>,
    pub out: Output<f32>,
    pub dense_out: Output<f32>,
}

/// The outputs and rows of a block, and its tasks.
#[registers]
pub struct DownBlock {
    /// Outputs of the matrix, and the block's: from `first_output` to before `end`.
    pub outputs: u32,
    pub first_output: u32,
    pub end: u32,
    pub first_row: u32,
    pub rows: u32,
    pub tasks: u32,
}

/// What the tasks of a block read from shared memory.
#[view]
pub struct DownTasks {
    groups: Shared<U32x4>,
    x_words: Shared<u32>,
    x_scales: Shared<U32x2>,
}

/// The activations of the dense half in shared memory.
#[view]
pub struct DenseVectors {
    words: Shared<u32>,
    scales: Shared<U32x2>,
}

/// Issues the loads of a task: DEPTH units to a lane of each of its outputs. Tasks past the last are clamped to it.
#[device(slots(side(unit: u32, more: u32) -> U32x4))]
pub fn fetch_task<const S: ExpertShape, const F: UnitFormat, const D: GatheredDownTile>(
    task: u32,
    block: DownBlock,
    units_of: &mut Regs<Unit>,
    groups: Shared<U32x4>,
    codes: Weights<U32x4>,
) {
    let units = S.K / F.UNIT;
    let slots = D.BLOCK_OUTPUTS.div_ceil(D.TASK_OUTPUTS);
    let held = task.min(block.tasks - 1);
    let of = gathered_at(groups, held / slots);
    let output = block.first_output + held % slots * D.TASK_OUTPUTS;
    #[unroll]
    for r in 0u32..D.TASK_OUTPUTS {
        let row = of.expert * block.outputs + (output + r).min(block.end - 1);
        #[unroll]
        for d in 0u32..D.DEPTH {
            let unit = (lane_id() % D.LANES + d * D.LANES).min(units - 1);
            units_of[d * D.TASK_OUTPUTS + r] = fetch(side, codes, row * units + unit);
        }
    }
}

/// Multiplies a task by its rows, and stores the products. A collective of the warp, whose lanes may have several
/// tasks.
#[device(slots(dot(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32))]
pub fn multiply_task<const S: ExpertShape, const F: UnitFormat, const D: GatheredDownTile>(
    task: u32,
    block: DownBlock,
    units_of: &mut Regs<Unit>,
    memory: DownTasks,
    products: InOut<f32>,
) {
    let units = S.K / F.UNIT;
    let slots = D.BLOCK_OUTPUTS.div_ceil(D.TASK_OUTPUTS);
    let held = task.min(block.tasks - 1);
    let of = gathered_at(memory.groups, held / slots);
    let output = block.first_output + held % slots * D.TASK_OUTPUTS;
    let lane = lane_id() % D.LANES;
    // Lanes whose rows are fewer than their neighbours' go along, and store nothing.
    let count = if task < block.tasks { of.count } else { 0 };
    let most = warp_max(count);
    #[unroll(1)]
    for i in 0u32..most {
        let pair = pair_of(of.low_pairs, of.high_pairs, i);
        let words = memory.x_words.offset(first_word(S.K, pair));
        let scales = memory.x_scales.offset(first_group(S.K, pair));
        let mut sums = regs(0.0f32, D.TASK_OUTPUTS);
        #[unroll]
        for d in 0u32..D.DEPTH {
            let unit = (lane + d * D.LANES).min(units - 1);
            let x_unit = activations_at(unit, unit * F.UNIT / 32, units, words, scales);
            #[unroll]
            for r in 0u32..D.TASK_OUTPUTS {
                let row = of.expert * block.outputs + (output + r).min(block.end - 1);
                let total = dot(units_of[d * D.TASK_OUTPUTS + r], row * units + unit, x_unit, sums[r]);
                if lane + d * D.LANES < units {
                    sums[r] = total;
                }
            }
        }
        let to = (block.first_row * S.TOP + pair) * block.outputs + output;
        if D.TASK_OUTPUTS == 2 {
            let value = twin_sums(D.LANES, sums[0], sums[D.TASK_OUTPUTS - 1]);
            let twin = lane / (D.LANES / 2);
            if lane % (D.LANES / 2) == 0 && i < count && output + twin < block.end {
                products[to + twin] = value;
            }
        } else {
            let value = lanes_sum(sums[0], D.LANES, false, false);
            if lane == 0 && i < count && output < block.end {
                products[to] = value;
            }
        }
    }
}

/// Issues the loads of the dense half's weights, DENSE_AHEAD outputs of a warp's.
#[device(slots(dense_side(unit: u32, more: u32) -> U32x4))]
pub fn prefetch_dense<const S: ExpertShape, const F: UnitFormat, const D: GatheredDownTile, const WARPS: u32>(
    block: DownBlock,
    codes: Weights<U32x4>,
    dense_ahead: &mut Regs<Unit>,
) {
    #[unroll]
    for round in 0u32..D.DENSE_AHEAD {
        let output = block.first_output + round * WARPS + warp_id();
        #[unroll]
        for s in 0u32..steps_of_dense() {
            let unit = lane_id() + s * 32;
            if output < block.end && unit < dense_units() {
                dense_ahead[round * steps_of_dense() + s] = fetch(dense_side, codes, output * dense_units() + unit);
            }
        }
    }
}

/// Multiplies the dense half's outputs of a warp by all rows of the block.
#[device(slots(
    dense_side(unit: u32, more: u32) -> U32x4,
    dot(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32
))]
pub fn multiply_dense<const S: ExpertShape, const F: UnitFormat, const D: GatheredDownTile, const WARPS: u32>(
    block: DownBlock,
    codes: Weights<U32x4>,
    dense_ahead: &mut Regs<Unit>,
    x: DenseVectors,
    dense_out: Output<f32>,
) {
    #[unroll]
    for round in 0u32..(D.BLOCK_OUTPUTS + WARPS - 1) / WARPS {
        let own = block.first_output + round * WARPS + warp_id();
        if own < block.end {
            if round >= D.DENSE_AHEAD {
                #[unroll]
                for s in 0u32..steps_of_dense() {
                    let unit = (lane_id() + s * 32).min(dense_units() - 1);
                    dense_ahead[round % D.DENSE_AHEAD * steps_of_dense() + s] =
                        fetch(dense_side, codes, own * dense_units() + unit);
                }
            }
            for row in 0u32..block.rows {
                let words = x.words.offset(first_word(S.DENSE, row));
                let scales = x.scales.offset(first_group(S.DENSE, row));
                let mut sum = 0.0f32;
                #[unroll]
                for s in 0u32..steps_of_dense() {
                    let unit = lane_id() + s * 32;
                    let held = unit.min(dense_units() - 1);
                    let x_unit = activations_at(held, held * F.UNIT / 32, dense_units(), words, scales);
                    // A unit's product is rounded before it is added.
                    let of = dense_ahead[round % D.DENSE_AHEAD * steps_of_dense() + s];
                    let product = dot(of, own * dense_units() + held, x_unit, 0.0);
                    if unit < dense_units() {
                        sum = sum + product;
                    }
                }
                let total = warp_sum(sum);
                if lane_id() == 0 {
                    dense_out[(block.first_row + row) * block.outputs + own] = total;
                }
            }
        }
    }
}

/// Adds up the products of each row's choices, each times its factor, as the lanes of one row do.
#[device]
pub fn sum_products<const S: ExpertShape, const WARPS: u32>(
    block: DownBlock,
    factors: Shared<f32>,
    results: DownResults,
) {
    let width = block.end - block.first_output;
    for place in (thread_idx()..block.rows * width).by(WARPS * 32) {
        let row = place / width;
        let own = block.first_output + place % width;
        let mut of_choices = regs(0.0f32, S.TOP);
        #[unroll]
        for j in 0u32..S.TOP {
            of_choices[j] = results.products[((block.first_row + row) * S.TOP + j) * block.outputs + own];
        }
        results.out[(block.first_row + row) * block.outputs + own] =
            sum_of_choices(&mut of_choices, factors.offset(row * S.TOP));
    }
}

/// `out[row] = Σ shares[j] * scales[ids[j]] * (W[ids[j]] · x[j])` over the TOP choices j of each row, as
/// [`expert_down`](crate::kernels::moe::down::expert_down) has it; and with DENSE hidden values, `dense_out[row] =
/// dense · dense_x[row]`. Block `[b, t]` has BLOCK_OUTPUTS outputs of the ROWS rows from `t * ROWS` on.
///
/// All loads of a task are in flight at once, and two tasks are: what has arrived is multiplied by one row of
/// activations after the other.
#[kernel(block = T.WARPS * 32, min_blocks = 1, dependent, dynamic_shared, slots(
    side(unit: u32, more: u32) -> U32x4,
    dot(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32,
    dense_side(unit: u32, more: u32) -> U32x4
))]
pub fn gathered_down<const S: ExpertShape, const F: UnitFormat, const T: GatheredTile, const D: GatheredDownTile>(
    codes: MixtureCodes,
    x: ActivationRows,
    dense_x: ActivationRows,
    choice: ExpertChoice,
    results: DownResults,
    outputs: u32,
    rows: u32,
) {
    require!(S.K % 32 == 0 && S.DENSE % 32 == 0 && 32 % D.LANES == 0 && S.K / F.UNIT <= D.LANES * D.DEPTH);
    require!(T.ROWS <= 32 && T.HEIGHT == 4 && (D.TASK_OUTPUTS == 1 || D.TASK_OUTPUTS == 2) && D.LANES >= 2);
    let staged_words = shared::<u32>(T.ROWS * S.TOP * if F.INTEGER { S.K / 4 } else { S.K });
    let staged_scales = shared::<U32x2>(if F.INTEGER { T.ROWS * S.TOP * S.K / 32 } else { 1 });
    let dense_words = shared::<u32>(if S.DENSE == 0 {
        4
    } else if F.INTEGER {
        T.ROWS * S.DENSE / 4
    } else {
        T.ROWS * S.DENSE
    });
    let dense_scales = shared::<U32x2>(if F.INTEGER && S.DENSE > 0 { T.ROWS * S.DENSE / 32 } else { 1 });
    let chosen = shared::<u32>(T.ROWS * S.TOP);
    let factors = shared::<f32>(T.ROWS * S.TOP);
    let masks = shared::<u32>(T.EXPERTS);
    let of_warps = shared::<u32>(T.WARPS);
    let groups = shared::<U32x4>(T.GROUPS);
    let memory = DownTasks { groups, x_words: staged_words, x_scales: staged_scales };
    let dense = DenseVectors { words: dense_words, scales: dense_scales };

    let mut block = DownBlock::ZERO;
    block.outputs = outputs;
    block.first_output = block_idx() * D.BLOCK_OUTPUTS;
    block.end = (block.first_output + D.BLOCK_OUTPUTS).min(outputs);
    block.first_row = block_idx_y() * T.ROWS;
    block.rows = (rows - block.first_row).min(T.ROWS);
    // The dense half's weights are prefetched before the choice is known.
    let mut dense_ahead =
        regs(Unit::ZERO, if S.DENSE > 0 { D.DENSE_AHEAD * ((S.DENSE / F.UNIT + 31) / 32) } else { 1 });
    prefetch_dense(dense_side, block, codes.dense, &mut dense_ahead);
    grid_launch_dependents();
    grid_dependency_wait();
    stage_vectors(S.K, block.first_row * S.TOP, block.rows * S.TOP, x, staged_words, staged_scales);
    if S.DENSE > 0 {
        stage_vectors(S.DENSE, block.first_row, block.rows, dense_x, dense_words, dense_scales);
    }
    // The share of each choice, times the scale of its expert.
    for pair in (thread_idx()..block.rows * S.TOP).by(T.WARPS * 32) {
        let place = block.first_row * S.TOP + pair;
        factors[pair] = choice.shares[place] * choice.scales[choice.ids[place]];
    }
    let all = gather(block.first_row, block.rows, choice.ids, chosen, masks, of_warps, groups);
    block.tasks = all * D.BLOCK_OUTPUTS.div_ceil(D.TASK_OUTPUTS);

    let at_once = T.WARPS * 32 / D.LANES;
    let task = thread_idx() / D.LANES;
    // Two tasks are in flight, in registers of their own, so that memory always has one to bring. Where there is a
    // dense half, the second takes the registers that this had.
    let mut even = regs(Unit::ZERO, D.TASK_OUTPUTS * D.DEPTH);
    let mut odd = regs(Unit::ZERO, D.TASK_OUTPUTS * D.DEPTH);
    fetch_task(side, task, block, &mut even, groups, codes.experts);
    if S.DENSE == 0 {
        fetch_task(side, task + at_once, block, &mut odd, groups, codes.experts);
    }
    cp_async_wait(0);
    barrier();
    if S.DENSE > 0 {
        multiply_dense(dense_side, dot, block, codes.dense, &mut dense_ahead, dense, results.dense_out);
        fetch_task(side, task + at_once, block, &mut odd, groups, codes.experts);
    }
    for start in (0u32..block.tasks).by(2 * at_once) {
        let own = start + task;
        multiply_task(dot, own, block, &mut even, memory, results.products);
        if start + 2 * at_once < block.tasks {
            fetch_task(side, own + 2 * at_once, block, &mut even, groups, codes.experts);
        }
        if start + at_once < block.tasks {
            multiply_task(dot, own + at_once, block, &mut odd, memory, results.products);
        }
        if start + 3 * at_once < block.tasks {
            fetch_task(side, own + 3 * at_once, block, &mut odd, groups, codes.experts);
        }
    }
    barrier();
    sum_products(block, factors, results);
}

/// The down product of the experts that several rows chose, with their weighted sum: everything that decides its
/// instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatheredDown {
    pub dtype: DType,
    /// Values that come out.
    pub outputs: u32,
    /// Hidden values of an expert.
    pub k: u32,
    pub experts: u32,
    /// Experts that a row goes to.
    pub top: u32,
    /// Hidden values of a dense half of the same type, which comes along; 0 where none does.
    pub dense: u32,
    pub rows: u32,
    /// SMs of the GPU, and the most shared memory of a block.
    pub multiprocessors: u32,
    pub shared_bytes: u32,
}

/// Units in flight to a lane beyond which it has one output at a time.
const MOST_TWIN_UNITS: u32 = 4;

/// Registers for the dense half's units, at most, where all of a warp's are in flight at once.
const MOST_DENSE_REGISTERS: u32 = 30;

impl GatheredDown {
    fn block_rows(&self) -> u32 {
        let integer = format(self.dtype).integer;
        let words = self.top * (vector_words(integer, self.k) + 1) + vector_words(integer, self.dense);
        let row_bytes = words * 4;
        let beside = gather_bytes(self.experts, self.top, self.rows.min(32)) + format(self.dtype).dot.table_bytes();
        block_rows(self.rows, row_bytes, beside, self.shared_bytes)
    }

    /// Outputs of a block.
    fn share(&self) -> u32 {
        self.outputs.div_ceil(self.multiprocessors.max(1))
    }

    pub fn grid(&self) -> [u32; 3] {
        [self.outputs.div_ceil(self.share()), self.rows.div_ceil(self.block_rows()), 1]
    }

    pub fn instance(&self) -> Result<Instance, GatheredError> {
        check(self.experts, [self.k, self.dense, 0])?;
        let (format, rows) = (format(self.dtype), self.block_rows());
        let lanes = lanes_of(self.k / format.unit);
        let depth = (self.k / format.unit).div_ceil(lanes);
        let rounds = self.share().div_ceil(BLOCK_WARPS);
        let dense_registers = rounds * (self.dense / format.unit).div_ceil(32) * format.words();
        let instance = gathered_down::Chosen {
            S: ExpertShape { K: self.k, TOP: self.top, DENSE: self.dense },
            F: UnitFormat::of(format),
            T: GatheredTile::of(self.experts, self.top, rows),
            D: GatheredDownTile {
                BLOCK_OUTPUTS: self.share(),
                TASK_OUTPUTS: if depth <= MOST_TWIN_UNITS { 2 } else { 1 },
                LANES: lanes,
                DEPTH: depth,
                DENSE_AHEAD: if dense_registers <= MOST_DENSE_REGISTERS { rounds } else { 1 },
            },
            side: format.side,
            dot: format.dot,
            dense_side: if self.dense > 0 { format.side } else { nothing_beside::DEF },
        }
        .build()?;
        Ok(instance)
    }
}
