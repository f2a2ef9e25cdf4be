//! Gate and up of the experts that several rows chose, joined by GeGLU.
//!
//! A block takes 32 neighbouring outputs of an expert at a time, a group of int8 values: they are rounded here, once, where down of one row rounds
//! them in every block. The block's warps share the outputs out and meet when all are there; the weights of the next ones are on their way by then.

use gemma4c_blocks::DType;
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

use super::{BLOCK_WARPS, Gathered, TASK_ROWS, block_rows, gather, gather_bytes, gathered_at, most_groups, pair_of, stage_vectors, vector_words};
use crate::kernels::gelu::gelu;
use crate::kernels::matvec::formats::format;
use crate::kernels::matvec::parts::{Unit, UnitActivations, activations_at};
use crate::kernels::quantise::quantise4;

/// The output of a task that is the warp's at a step of the block.
#[device]
pub fn output_of_step<const HIDDEN: u32, const WARPS: u32>(step: u32) -> u32 {
    let task = block_idx() + step / (32 / WARPS) * grid_dim();
    task % (HIDDEN / 32) * 32 + step % (32 / WARPS) * WARPS + warp_id()
}

/// Which of the block's rows have that step's expert.
#[device]
pub fn gathered_of_step<const HIDDEN: u32, const WARPS: u32>(step: u32, groups: Shared<U32x4>) -> Gathered {
    gathered_at(groups, (block_idx() + step / (32 / WARPS) * grid_dim()) / (HIDDEN / 32))
}

/// `GeGLU(W[ids[j]] · x)` for each choice j of each row, as [`expert_geglu`](crate::kernels::moe::gate_up::expert_geglu) has it. Block `[b, t]` takes every
/// `[blocks]`-th task of the ROWS rows from `t * ROWS` on. `x` is int8 codes or f32, as words. QUANTISED results are left as int8, others as f32.
#[kernel(block = WARPS * 32, min_blocks = 1, dependent, dynamic_shared, slots(
    side(unit: u32) -> U32x4,
    dot(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32
))]
pub fn gathered_geglu<
    const K: u32,
    const UNIT: u32,
    const INTEGER: bool,
    const EXPERTS: u32,
    const TOP: u32,
    const HIDDEN: u32,
    const ROWS: u32,
    const HEIGHT: u32,
    const GROUPS: u32,
    const DEPTH: u32,
    const WARPS: u32,
    const QUANTISED: bool,
>(
    codes: Weights<U32x4>,
    x: Input<u32>,
    xscale: Input<f32>,
    xsum: Input<i32>,
    ids: Input<u32>,
    out: Output<f32>,
    out_xq: Output<u32>,
    out_xscale: Output<f32>,
    out_xsum: Output<i32>,
    rows: u32,
) {
    require!(K % 32 == 0 && HIDDEN % 32 == 0 && 32 % WARPS == 0 && ROWS <= 32 && HEIGHT == 4);
    let x_words = shared::<u32>(ROWS * if INTEGER { K / 4 } else { K });
    let x_scales = shared::<U32x2>(if INTEGER { ROWS * K / 32 } else { 1 });
    let chosen = shared::<u32>(ROWS * TOP);
    let masks = shared::<u32>(EXPERTS);
    let of_warps = shared::<u32>(WARPS);
    let groups = shared::<U32x4>(GROUPS);
    // Of two tasks in turn: whoever is ahead writes the other one.
    let joined = shared::<f32>(2 * HEIGHT * 32);
    let units = K / UNIT;
    let row_words = if INTEGER { K / 4 } else { K };
    let row_groups = if INTEGER { K / 32 } else { 0 };
    let passes = 32 / WARPS;

    grid_launch_dependents();
    grid_dependency_wait();
    let first_row = block_idx_y() * ROWS;
    let here = (rows - first_row).min(ROWS);
    stage_vectors(first_row, here, x, xscale, xsum, x_words, x_scales);
    let tasks = gather(first_row, here, ids, chosen, masks, of_warps, groups) * (HIDDEN / 32);
    let own_tasks = if block_idx() < tasks { (tasks - block_idx()).div_ceil(grid_dim()) } else { 0 };
    let steps = own_tasks * passes;

    let mut step = 0u32;
    let mut at = lane_id();
    let mut of = Gathered::ZERO;
    let mut first = 0u32;
    let mut ahead = regs(Unit::ZERO, 2 * DEPTH);
    if steps > 0 {
        of = gathered_of_step(step, groups);
        first = (of.expert * 2 * HIDDEN + output_of_step(step)) * units;
        #[unroll]
        for d in 0..DEPTH {
            #[unroll]
            for r in 0u32..2 {
                let unit = first + r * HIDDEN * units + (at + d * 32).min(units - 1);
                ahead[d * 2 + r] = Unit { codes: load_streamed::<U32x4>(codes, unit), side: side(unit) };
            }
        }
    }
    cp_async_wait(0);
    barrier();

    let mut sums = regs(0.0f32, 2 * HEIGHT);
    while step < steps {
        let row_ends = at - lane_id() + 32 * DEPTH >= units;
        let next_at = if row_ends { lane_id() } else { at + 32 * DEPTH };
        let next_step = if row_ends { step + 1 } else { step };
        let mut next_of = of;
        let mut next_first = first;
        if row_ends && next_step < steps {
            next_of = gathered_of_step(next_step, groups);
            next_first = (next_of.expert * 2 * HIDDEN + output_of_step(next_step)) * units;
        }
        #[unroll]
        for d in 0..DEPTH {
            let unit = (at + d * 32).min(units - 1);
            #[unroll]
            for i in 0..HEIGHT {
                if i < of.count {
                    let row = byte_of(of.rows, i);
                    let words = x_words.offset(row * row_words);
                    let x_unit =
                        activations_at(unit, unit * UNIT / 32, units, words, x_scales.offset(row * row_groups));
                    #[unroll]
                    for r in 0u32..2 {
                        let number = first + r * HIDDEN * units + unit;
                        let total = dot(ahead[d * 2 + r], number, x_unit, sums[i * 2 + r]);
                        if at + d * 32 < units {
                            sums[i * 2 + r] = total;
                        }
                    }
                }
            }
            if next_step < steps {
                #[unroll]
                for r in 0u32..2 {
                    let next = next_first + r * HIDDEN * units + (next_at + d * 32).min(units - 1);
                    ahead[d * 2 + r] = Unit { codes: load_streamed::<U32x4>(codes, next), side: side(next) };
                }
            }
        }
        if row_ends {
            let turn = step / passes % 2 * (HEIGHT * 32);
            #[unroll]
            for i in 0..HEIGHT {
                if i < of.count {
                    let value = gelu(warp_sum(sums[i * 2])) * warp_sum(sums[i * 2 + 1]);
                    if lane_id() == 0 {
                        joined[turn + i * 32 + output_of_step(step) % 32] = value;
                    }
                    sums[i * 2] = 0.0;
                    sums[i * 2 + 1] = 0.0;
                }
            }
            if step % passes == passes - 1 {
                barrier();
                // Warps take turns: eight lanes have a row, four values each.
                if warp_id() == step / passes % WARPS {
                    let i = lane_id() / 8;
                    let four = load::<F32x4>(joined, turn + i.min(of.count - 1) * 32 + lane_id() % 8 * 4);
                    let place = first_row * TOP + pair_of(of, i);
                    let to = place * HIDDEN + output_of_step(step) / 32 * 32 + lane_id() % 8 * 4;
                    let mut rounded = U32x4::ZERO;
                    if QUANTISED {
                        rounded = quantise4(four);
                    }
                    if i < of.count {
                        if QUANTISED {
                            out_xq[to / 4] = rounded.x;
                            if lane_id() % 8 == 0 {
                                out_xscale[to / 32] = f32::from_bits(rounded.y);
                                out_xsum[to / 32] = rounded.z as i32;
                            }
                        } else {
                            store(out, to, four);
                        }
                    }
                }
            }
        }
        at = next_at;
        step = next_step;
        of = next_of;
        first = next_first;
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
    pub rows: u32,
    /// The results are left as int8.
    pub quantised: bool,
    /// SMs of the GPU, and the most shared memory of a block.
    pub multiprocessors: u32,
    pub shared_bytes: u32,
}

/// Registers of a lane for units on their way.
const AHEAD_REGISTERS: u32 = 60;

impl GatheredGateUp {
    fn block_rows(&self) -> u32 {
        let row_bytes = vector_words(format(self.dtype).integer, self.k) * 4;
        let beside = gather_bytes(self.experts, self.top, self.rows.min(32)) + 2 * TASK_ROWS * 32 * 4;
        block_rows(self.rows, row_bytes, beside, self.shared_bytes)
    }

    pub fn grid(&self) -> [u32; 3] {
        let rows = self.block_rows();
        let tasks = most_groups(self.experts, self.top, rows) * (self.hidden / 32);
        [tasks.min(self.multiprocessors), self.rows.div_ceil(rows), 1]
    }

    pub fn instance(&self) -> Result<Instance, InstanceError> {
        let (format, rows) = (format(self.dtype), self.block_rows());
        let steps = (self.k / format.unit).div_ceil(32);
        let depth = (AHEAD_REGISTERS / ((4 + format.side_words) * 2)).clamp(1, steps);
        gathered_geglu::Chosen {
            K: self.k,
            UNIT: format.unit,
            INTEGER: format.integer,
            EXPERTS: self.experts,
            TOP: self.top,
            HIDDEN: self.hidden,
            ROWS: rows,
            HEIGHT: TASK_ROWS,
            GROUPS: most_groups(self.experts, self.top, rows),
            // Equal loops: no load of the last one is idle.
            DEPTH: steps.div_ceil(steps.div_ceil(depth)),
            WARPS: BLOCK_WARPS,
            QUANTISED: self.quantised,
            side: format.side,
            dot: format.dot,
        }
        .build()
    }
}
