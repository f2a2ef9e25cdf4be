//! Down of the experts that several rows chose, with their weighted sum.
//!
//! A block owns neighbouring outputs and takes them of every expert that any of its rows chose: all blocks have the same work, however rows are
//! spread over experts, and the products of a row's choices end in the same block, which adds them up.

use gemma4c_blocks::DType;
use gemma4c_dsl::Instance;
use gemma4c_dsl::prelude::*;

use super::{
    BLOCK_WARPS, GatheredError, TASK_ROWS, block_rows, check, gather, gather_bytes, gathered_at, most_groups, pair_of,
    stage_vectors, twin_sums, vector_words,
};
use crate::kernels::matvec::formats::format;
use crate::kernels::matvec::lanes_sum;
use crate::kernels::matvec::parts::{Unit, UnitActivations, activations_at, fetch};
use crate::kernels::moe::down::{lanes_of, sum_of_choices};
use crate::kernels::moe::nothing_beside;

/// Starts a task on its way: DEPTH units to a lane of each of its outputs. Tasks past the last are the last one.
#[device(slots(side(unit: u32, more: u32) -> U32x4))]
pub fn fetch_task<
    const K: u32,
    const UNIT: u32,
    const LANES: u32,
    const TWINS: u32,
    const DEPTH: u32,
    const SHARE: u32,
>(
    task: u32,
    tasks: u32,
    first_output: u32,
    end: u32,
    outputs: u32,
    units_of: &mut Regs<Unit>,
    groups: Shared<U32x4>,
    codes: Weights<U32x4>,
) {
    let units = K / UNIT;
    let slots = SHARE.div_ceil(TWINS);
    let held = task.min(tasks - 1);
    let of = gathered_at(groups, held / slots);
    let output = first_output + held % slots * TWINS;
    #[unroll]
    for r in 0..TWINS {
        let row = of.expert * outputs + (output + r).min(end - 1);
        #[unroll]
        for d in 0..DEPTH {
            let unit = (lane_id() % LANES + d * LANES).min(units - 1);
            units_of[d * TWINS + r] = fetch(side, codes, row * units + unit);
        }
    }
}

/// Multiplies a task by its rows, and leaves the products. A collective of the warp, whose lanes may have several tasks.
#[device(slots(dot(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32))]
pub fn multiply_task<
    const K: u32,
    const UNIT: u32,
    const INTEGER: bool,
    const TOP: u32,
    const LANES: u32,
    const TWINS: u32,
    const DEPTH: u32,
    const SHARE: u32,
>(
    task: u32,
    tasks: u32,
    first_output: u32,
    end: u32,
    outputs: u32,
    first_row: u32,
    units_of: &mut Regs<Unit>,
    groups: Shared<U32x4>,
    x_words: Shared<u32>,
    x_scales: Shared<U32x2>,
    products: InOut<f32>,
) {
    let units = K / UNIT;
    let vector_words = if INTEGER { K / 4 } else { K };
    let vector_groups = if INTEGER { K / 32 } else { 0 };
    let slots = SHARE.div_ceil(TWINS);
    let held = task.min(tasks - 1);
    let of = gathered_at(groups, held / slots);
    let output = first_output + held % slots * TWINS;
    let lane = lane_id() % LANES;
    // Lanes whose rows are fewer than their neighbours' go along, and store nothing.
    let count = if task < tasks { of.count } else { 0 };
    let most = warp_max(count);
    #[unroll(1)]
    for i in 0u32..most {
        let pair = pair_of(of.low_pairs, of.high_pairs, i);
        let words = x_words.offset(pair * vector_words);
        let scales = x_scales.offset(pair * vector_groups);
        let mut sums = regs(0.0f32, TWINS);
        #[unroll]
        for d in 0..DEPTH {
            let unit = (lane + d * LANES).min(units - 1);
            let x_unit = activations_at(unit, unit * UNIT / 32, units, words, scales);
            #[unroll]
            for r in 0..TWINS {
                let row = of.expert * outputs + (output + r).min(end - 1);
                let total = dot(units_of[d * TWINS + r], row * units + unit, x_unit, sums[r]);
                if lane + d * LANES < units {
                    sums[r] = total;
                }
            }
        }
        let to = (first_row * TOP + pair) * outputs + output;
        if TWINS == 2 {
            let value = twin_sums(LANES, sums[0], sums[TWINS - 1]);
            let twin = lane / (LANES / 2);
            if lane % (LANES / 2) == 0 && i < count && output + twin < end {
                products[to + twin] = value;
            }
        } else {
            let value = lanes_sum(sums[0], LANES, false, false);
            if lane == 0 && i < count && output < end {
                products[to] = value;
            }
        }
    }
}

/// `out[row] = Σ weights[j] * expert_scale[ids[j]] * (W[ids[j]] · x[j])` over the TOP choices j of each row, as
/// [`expert_down`](crate::kernels::moe::down::expert_down) has it; and with DENSE hidden values, `dense_out[row] = dense · dense_x[row]`. Block `[b, t]` has SHARE outputs of
/// the ROWS rows from `t * ROWS` on. A task is TWINS outputs of an expert, which LANES lanes share: all of their units are on their way at once. What has
/// arrived is multiplied by one row of activations after the other. `products` are those of every choice.
#[kernel(block = WARPS * 32, min_blocks = 1, dependent, dynamic_shared, slots(
    side(unit: u32, more: u32) -> U32x4,
    dot(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32,
    dense_side(unit: u32, more: u32) -> U32x4
))]
pub fn gathered_down<
    const K: u32,
    const UNIT: u32,
    const INTEGER: bool,
    const EXPERTS: u32,
    const TOP: u32,
    const DENSE: u32,
    const ROWS: u32,
    const HEIGHT: u32,
    const GROUPS: u32,
    const LANES: u32,
    const TWINS: u32,
    const DEPTH: u32,
    const SHARE: u32,
    const HELD: u32,
    const WARPS: u32,
>(
    codes: Weights<U32x4>,
    dense_codes: Weights<U32x4>,
    expert_scale: Weights<f32>,
    x: Input<u32>,
    xscale: Input<f32>,
    xsum: Input<i32>,
    dense_x: Input<u32>,
    dense_xscale: Input<f32>,
    dense_xsum: Input<i32>,
    ids: Input<u32>,
    weights: Input<f32>,
    products: InOut<f32>,
    out: Output<f32>,
    dense_out: Output<f32>,
    outputs: u32,
    rows: u32,
) {
    require!(K % 32 == 0 && DENSE % 32 == 0 && 32 % LANES == 0 && K / UNIT <= LANES * DEPTH);
    require!(ROWS <= 32 && HEIGHT == 4 && (TWINS == 1 || TWINS == 2) && LANES >= 2);
    let x_words = shared::<u32>(ROWS * TOP * if INTEGER { K / 4 } else { K });
    let x_scales = shared::<U32x2>(if INTEGER { ROWS * TOP * K / 32 } else { 1 });
    let dense_words = shared::<u32>(if DENSE == 0 {
        4
    } else if INTEGER {
        ROWS * DENSE / 4
    } else {
        ROWS * DENSE
    });
    let dense_scales = shared::<U32x2>(if INTEGER && DENSE > 0 { ROWS * DENSE / 32 } else { 1 });
    let chosen = shared::<u32>(ROWS * TOP);
    let factors = shared::<f32>(ROWS * TOP);
    let masks = shared::<u32>(EXPERTS);
    let of_warps = shared::<u32>(WARPS);
    let groups = shared::<U32x4>(GROUPS);
    let before = DENSE / UNIT;
    let dense_steps = (before + 31) / 32;

    let first_output = block_idx() * SHARE;
    let end = (first_output + SHARE).min(outputs);
    // The dense half's weights are on their way before the choice is known, HELD outputs of a warp's.
    let mut dense_ahead = regs(Unit::ZERO, if DENSE > 0 { HELD * ((DENSE / UNIT + 31) / 32) } else { 1 });
    #[unroll]
    for round in 0..HELD {
        let output = first_output + round * WARPS + warp_id();
        #[unroll]
        for s in 0..(DENSE / UNIT + 31) / 32 {
            let unit = lane_id() + s * 32;
            if output < end && unit < before {
                dense_ahead[round * dense_steps + s] = fetch(dense_side, dense_codes, output * before + unit);
            }
        }
    }
    grid_launch_dependents();
    grid_dependency_wait();
    let first_row = block_idx_y() * ROWS;
    let here = (rows - first_row).min(ROWS);
    stage_vectors(K, first_row * TOP, here * TOP, x, xscale, xsum, x_words, x_scales);
    if DENSE > 0 {
        stage_vectors(DENSE, first_row, here, dense_x, dense_xscale, dense_xsum, dense_words, dense_scales);
    }
    for pair in (thread_idx()..here * TOP).by(WARPS * 32) {
        let place = first_row * TOP + pair;
        factors[pair] = weights[place] * expert_scale[ids[place]];
    }
    let all = gather(first_row, here, ids, chosen, masks, of_warps, groups);

    // A task is TWINS outputs of an expert's rows; those past the last are the last one's, and dropped.
    let tasks = all * SHARE.div_ceil(TWINS);
    let at_once = WARPS * 32 / LANES;
    let task = thread_idx() / LANES;
    // Two tasks are on their way, in registers of their own, so that memory always has one to bring.
    let mut even = regs(Unit::ZERO, TWINS * DEPTH);
    let mut odd = regs(Unit::ZERO, TWINS * DEPTH);
    fetch_task(side, task, tasks, first_output, end, outputs, &mut even, groups, codes);
    if DENSE == 0 {
        fetch_task(side, task + at_once, tasks, first_output, end, outputs, &mut odd, groups, codes);
    }
    cp_async_wait(0);
    barrier();

    if DENSE > 0 {
        #[unroll]
        for round in 0..(SHARE + WARPS - 1) / WARPS {
            let own = first_output + round * WARPS + warp_id();
            if own < end {
                if round >= HELD {
                    #[unroll]
                    for s in 0..(DENSE / UNIT + 31) / 32 {
                        let unit = (lane_id() + s * 32).min(before - 1);
                        dense_ahead[round % HELD * dense_steps + s] =
                            fetch(dense_side, dense_codes, own * before + unit);
                    }
                }
                for row in 0..here {
                    let words = dense_words.offset(row * if INTEGER { DENSE / 4 } else { DENSE });
                    let scales = dense_scales.offset(row * if INTEGER { DENSE / 32 } else { 0 });
                    let mut sum = 0.0f32;
                    #[unroll]
                    for s in 0..(DENSE / UNIT + 31) / 32 {
                        let unit = lane_id() + s * 32;
                        let held = unit.min(before - 1);
                        let x_unit = activations_at(held, held * UNIT / 32, before, words, scales);
                        // A unit's product is rounded before it is added.
                        let of = dense_ahead[round % HELD * dense_steps + s];
                        let product = dot(of, own * before + held, x_unit, 0.0);
                        if unit < before {
                            sum = sum + product;
                        }
                    }
                    let total = warp_sum(sum);
                    if lane_id() == 0 {
                        dense_out[(first_row + row) * outputs + own] = total;
                    }
                }
            }
        }
    }

    // Registers that the dense half had.
    if DENSE > 0 {
        fetch_task(side, task + at_once, tasks, first_output, end, outputs, &mut odd, groups, codes);
    }
    for start in (0..tasks).by(2 * at_once) {
        let own = start + task;
        multiply_task(
            dot,
            own,
            tasks,
            first_output,
            end,
            outputs,
            first_row,
            &mut even,
            groups,
            x_words,
            x_scales,
            products,
        );
        if start + 2 * at_once < tasks {
            fetch_task(side, own + 2 * at_once, tasks, first_output, end, outputs, &mut even, groups, codes);
        }
        if start + at_once < tasks {
            multiply_task(
                dot,
                own + at_once,
                tasks,
                first_output,
                end,
                outputs,
                first_row,
                &mut odd,
                groups,
                x_words,
                x_scales,
                products,
            );
        }
        if start + 3 * at_once < tasks {
            fetch_task(side, own + 3 * at_once, tasks, first_output, end, outputs, &mut odd, groups, codes);
        }
    }
    barrier();
    // As the lanes of one row add their choices.
    for place in (thread_idx()..here * (end - first_output)).by(WARPS * 32) {
        let row = place / (end - first_output);
        let own = first_output + place % (end - first_output);
        let mut of_choices = regs(0.0f32, TOP);
        #[unroll]
        for j in 0..TOP {
            of_choices[j] = products[((first_row + row) * TOP + j) * outputs + own];
        }
        out[(first_row + row) * outputs + own] = sum_of_choices(&mut of_choices, factors.offset(row * TOP));
    }
}

/// The down product of the experts that several rows chose, with their weighted sum: everything that decides its instance.
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

/// Units on their way to a lane beyond which it has one output at a time.
const MOST_TWIN_UNITS: u32 = 4;

/// Registers for the dense half's units, at most, where all of a warp's are on their way at once.
const MOST_DENSE_REGISTERS: u32 = 30;

impl GatheredDown {
    fn block_rows(&self) -> u32 {
        let integer = format(self.dtype).integer;
        let words = self.top * (vector_words(integer, self.k) + 1) + vector_words(integer, self.dense);
        let row_bytes = words * 4;
        let beside = gather_bytes(self.experts, self.top, self.rows.min(32));
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
        let dense_registers = rounds * (self.dense / format.unit).div_ceil(32) * (4 + format.side_words);
        let instance = gathered_down::Chosen {
            K: self.k,
            UNIT: format.unit,
            INTEGER: format.integer,
            EXPERTS: self.experts,
            TOP: self.top,
            DENSE: self.dense,
            ROWS: rows,
            HEIGHT: TASK_ROWS,
            GROUPS: most_groups(self.experts, self.top, rows),
            LANES: lanes,
            TWINS: if depth <= MOST_TWIN_UNITS { 2 } else { 1 },
            DEPTH: depth,
            SHARE: self.share(),
            HELD: if dense_registers <= MOST_DENSE_REGISTERS { rounds } else { 1 },
            WARPS: BLOCK_WARPS,
            side: format.side,
            dot: format.dot,
            dense_side: if self.dense > 0 { format.side } else { nothing_beside::DEF },
        }
        .build()?;
        Ok(instance)
    }
}
