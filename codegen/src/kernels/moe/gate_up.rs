//! Gate and up of the chosen experts, joined by GeGLU: a vector of hidden values for each choice of a row. A mixture has a dense
//! half too, of the same shape: its gate and up may come along, so that one launch reads both.

use gemma4c_blocks::DType;
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

use super::gathered::twin_sums;
use super::{Activations, Spread, depth, nothing_arrives, nothing_beside};
use crate::kernels::gelu::gelu;
use crate::kernels::matvec::formats::format;
use crate::kernels::matvec::parts::{Unit, UnitActivations, activations_at, fetch, part_at, plain_activations};

/// The unit with which the gate of task `task` starts: first the dense half's outputs, then those of the row's choices.
#[device]
pub fn gate_unit<const K: u32, const UNIT: u32, const TOP: u32, const HIDDEN: u32, const DENSE: u32>(
    task: u32,
    row: u32,
    ids: Input<u32>,
) -> u32 {
    let mut first = task;
    if task >= DENSE {
        first = ids[row * TOP + (task - DENSE) / HIDDEN] * 2 * HIDDEN + (task - DENSE) % HIDDEN;
    }
    first * (K / UNIT)
}

/// Keeps a piece of a vector of activations where the lanes look for it.
#[device]
pub fn keep_piece<const K: u32, const UNIT: u32, const INTEGER: bool>(
    arrived: U32x4,
    piece: u32,
    x_words: Shared<u32>,
    x_scales: Shared<U32x2>,
) {
    let part = if INTEGER { piece / 2 } else { piece };
    let to = part_at(part, K / UNIT);
    if INTEGER {
        store(x_words, to + piece % 2 * 2, u32x2(arrived.x, arrived.y));
        if piece % 4 == 0 {
            x_scales[piece / 4] = u32x2(arrived.z, arrived.w);
        }
    } else {
        store(x_words, to, arrived);
    }
}

/// `GeGLU(W[ids[j]] · x)` for each choice j of a row, an expert's first HIDDEN rows gates, the others ups; and with DENSE, that
/// many values of `GeGLU(dense · dense_x)`. Blocks `[b, row]` share out the outputs of a row: a warp takes one at a time, both
/// its rows, with DEPTH units of each on their way to a lane, and goes on to the next without a pause. With KNOWN the number of rows is read before the wait: nobody
/// writes it who may still run.
#[kernel(block = WARPS * 32, min_blocks = 1, dependent, waits_first, early(KNOWN, state), dynamic_shared, slots(
    side(unit: u32, more: u32) -> U32x4,
    dot(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32,
    arrive(piece: u32) -> U32x4,
    dense_side(unit: u32, more: u32) -> U32x4,
    dense_arrive(piece: u32) -> U32x4
))]
pub fn expert_geglu<
    const K: u32,
    const UNIT: u32,
    const INTEGER: bool,
    const TOP: u32,
    const HIDDEN: u32,
    const DENSE: u32,
    const DEPTH: u32,
    const WARPS: u32,
    const KNOWN: bool,
>(
    codes: Weights<U32x4>,
    dense_codes: Weights<U32x4>,
    ids: Input<u32>,
    state: Input<u32>,
    out: Output<f32>,
    dense_out: Output<f32>,
) {
    require!(K % 32 == 0);
    let units = K / UNIT;
    // The experts' activations, then the dense half's.
    let x_words = shared::<u32>(if INTEGER { K / 2 } else { 2 * K });
    let x_scales = shared::<U32x2>(if INTEGER { K / 16 } else { 1 });

    let row = block_idx_y();
    let tasks = DENSE + TOP * HIDDEN;
    let mut task = warp_id() * grid_dim() + block_idx();
    let mut at = lane_id();
    // Two arrays, where other kernels have one of units: of those the compiler makes two copies of the loop, one for each half.
    let mut ahead = regs(U32x4::ZERO, 2 * DEPTH);
    let mut sides = regs(U32x4::ZERO, 2 * DEPTH);
    // The dense half's weights are on their way before the choice is made.
    if task < DENSE {
        #[unroll]
        for d in 0..DEPTH {
            #[unroll]
            for r in 0u32..2 {
                let unit = (task + r * DENSE) * units + (at + d * 32).min(units - 1);
                ahead[d * 2 + r] = load_streamed::<U32x4>(dense_codes, unit);
                sides[d * 2 + r] = dense_side(unit, 0);
            }
        }
    }
    let mut rows = 0u32;
    if KNOWN {
        rows = state[1u32];
    }
    grid_dependency_wait();
    grid_launch_dependents();
    if !KNOWN {
        rows = state[1u32];
    }
    // The whole block leaves: there is no such row.
    if row >= rows {
        return;
    }
    // Whether the first task needs it or not: a branch would wait for it.
    let expert = ids[row * TOP + ((task.max(DENSE) - DENSE) / HIDDEN).min(TOP - 1)];
    // The activations are asked for while the choice is on its way, and before the weights that wait for it. Whole warps, because to quantise is a collective: the lanes past the end repeat the last piece, which is not kept.
    let threads = WARPS * 32;
    let pieces = if INTEGER { K / 8 } else { K / 4 };
    let mut arrived = regs(U32x4::ZERO, (K / if INTEGER { 8 } else { 4 } + WARPS * 32 - 1) / (WARPS * 32));
    let mut dense_arrived = regs(U32x4::ZERO, (K / if INTEGER { 8 } else { 4 } + WARPS * 32 - 1) / (WARPS * 32));
    #[unroll]
    for p in 0u32..pieces.div_ceil(threads) {
        let piece = row * pieces + (thread_idx() + p * threads).min(pieces - 1);
        arrived[p] = arrive(piece);
        dense_arrived[p] = dense_arrive(piece);
    }
    let mut first = if task < DENSE { task } else { expert * 2 * HIDDEN + (task - DENSE) % HIDDEN } * units;
    if task >= DENSE && task < tasks {
        #[unroll]
        for d in 0..DEPTH {
            #[unroll]
            for r in 0u32..2 {
                let unit = first + r * HIDDEN * units + (at + d * 32).min(units - 1);
                ahead[d * 2 + r] = load_streamed::<U32x4>(codes, unit);
                sides[d * 2 + r] = side(unit, 0);
            }
        }
    }
    #[unroll]
    for p in 0u32..pieces.div_ceil(threads) {
        let place = thread_idx() + p * threads;
        if place < pieces {
            keep_piece(arrived[p], place, x_words, x_scales);
            if DENSE > 0 {
                keep_piece(
                    dense_arrived[p],
                    place,
                    x_words.offset(if INTEGER { K / 4 } else { K }),
                    x_scales.offset(if INTEGER { K / 32 } else { 0 }),
                );
            }
        }
    }
    barrier();

    let vector_words = if INTEGER { K / 4 } else { K };
    let mut sums = regs(0.0f32, 2);
    while task < tasks {
        let height = if task < DENSE { DENSE } else { HIDDEN };
        let behind = if task < DENSE { vector_words / 4 } else { 0 };
        let groups = if task < DENSE { K / 32 } else { 0 };
        // Where all of a row is on its way, each round is its last.
        let row_ends = 32 * DEPTH >= units || at - lane_id() + 32 * DEPTH >= units;
        let next_at = if row_ends { lane_id() } else { at + 32 * DEPTH };
        let next_task = if row_ends { task + grid_dim() * WARPS } else { task };
        let mut next_first = first;
        if row_ends && next_task < tasks {
            next_first = gate_unit(next_task, row, ids);
        }
        #[unroll]
        for d in 0..DEPTH {
            let unit = (at + d * 32).min(units - 1);
            let x = activations_at(behind + unit, groups + unit * UNIT / 32, units, x_words, x_scales);
            #[unroll]
            for r in 0u32..2 {
                let total = dot(
                    Unit { codes: ahead[d * 2 + r], side: sides[d * 2 + r] },
                    first + r * height * units + unit,
                    x,
                    sums[r],
                );
                if at + d * 32 < units {
                    sums[r] = total;
                }
            }
            // One branch for both rows.
            let next = next_first + (next_at + d * 32).min(units - 1);
            if next_task < DENSE {
                #[unroll]
                for r in 0u32..2 {
                    ahead[d * 2 + r] = load_streamed::<U32x4>(dense_codes, next + r * DENSE * units);
                    sides[d * 2 + r] = dense_side(next + r * DENSE * units, 0);
                }
            } else if next_task < tasks {
                #[unroll]
                for r in 0u32..2 {
                    ahead[d * 2 + r] = load_streamed::<U32x4>(codes, next + r * HIDDEN * units);
                    sides[d * 2 + r] = side(next + r * HIDDEN * units, 0);
                }
            }
        }
        if row_ends {
            let sum = twin_sums(32, sums[0], sums[1]);
            let up = shfl_xor(sum, 16);
            let value = gelu(sum) * up;
            if lane_id() == 0 && task < DENSE {
                dense_out[row * DENSE + task] = value;
            } else if lane_id() == 0 {
                out[row * TOP * HIDDEN + task - DENSE] = value;
            }
            sums[0] = 0.0;
            sums[1] = 0.0;
        }
        at = if 32 * DEPTH >= units { lane_id() } else { next_at };
        task = next_task;
        first = next_first;
    }
}

/// The experts' part, plainly: a thread takes an output of a choice, activations are read where they are.
#[kernel(block = 64, slots(
    side(unit: u32, more: u32) -> U32x4,
    dot(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32
))]
pub fn expert_geglu_plain<const K: u32, const UNIT: u32, const INTEGER: bool, const TOP: u32, const HIDDEN: u32>(
    codes: Weights<U32x4>,
    x: Input<u32>,
    xscale: Input<f32>,
    xsum: Input<i32>,
    ids: Input<u32>,
    state: Input<u32>,
    out: Output<f32>,
) {
    let output = block_idx() * 64 + thread_idx();
    let pair = block_idx_y();
    if output < HIDDEN && pair < state[1u32] * TOP {
        let words = if INTEGER { UNIT / 4 } else { UNIT };
        let mut gate = 0.0f32;
        let mut up = 0.0f32;
        for i in 0..K / UNIT {
            let place = pair / TOP * (K / UNIT) + i;
            let of_unit = plain_activations(place, words, x, xscale, xsum);
            let of_gate = (ids[pair] * 2 * HIDDEN + output) * (K / UNIT) + i;
            gate = dot(fetch(side, codes, of_gate), of_gate, of_unit, gate);
            let of_up = of_gate + HIDDEN * (K / UNIT);
            up = dot(fetch(side, codes, of_up), of_up, of_unit, up);
        }
        out[pair * HIDDEN + output] = gelu(gate) * up;
    }
}

/// The gate and up products of the chosen experts: everything that decides their instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GateUp {
    pub dtype: DType,
    /// Hidden values of an expert: half the rows of its matrix.
    pub hidden: u32,
    /// Values of a row.
    pub k: u32,
    /// Experts that a row goes to.
    pub top: u32,
    pub from: Activations,
    /// Hidden values of a dense half of the same type, which comes along; 0 where none does.
    pub dense: u32,
    /// Whoever writes the number of rows has ended when it starts.
    pub known: bool,
    /// SMs of the GPU.
    pub multiprocessors: u32,
}

impl GateUp {
    fn spread(&self) -> Spread {
        Spread::of(self.dense + self.top * self.hidden, self.multiprocessors)
    }

    /// Units of each of a lane's two rows on their way: of those that waste the fewest loads behind a row's end, the most.
    fn depth(&self) -> u32 {
        let format = format(self.dtype);
        let units = self.k / format.unit;
        let reach = depth(format, 2, units, self.spread());
        let loads = |depth: u32| units.div_ceil(32 * depth) * depth;
        (reach.div_ceil(2)..=reach).rev().min_by_key(|depth| loads(*depth)).unwrap_or(1)
    }

    /// Blocks for `rows` rows.
    pub fn grid(&self, rows: u32) -> [u32; 3] {
        self.spread().grid(rows)
    }

    pub fn instance(&self) -> Result<Instance, InstanceError> {
        let (format, spread, beside) = (format(self.dtype), self.spread(), self.dense > 0);
        let dense_side = if beside { format.side } else { nothing_beside::DEF };
        let dense_arrive = if beside { self.from.arrive() } else { nothing_arrives::DEF };
        expert_geglu::Chosen {
            K: self.k,
            UNIT: format.unit,
            INTEGER: format.integer,
            TOP: self.top,
            HIDDEN: self.hidden,
            DENSE: self.dense,
            DEPTH: self.depth(),
            WARPS: spread.warps,
            KNOWN: self.known,
            side: format.side,
            dot: format.dot,
            arrive: self.from.arrive(),
            dense_side,
            dense_arrive,
        }
        .build()
    }

    /// The plain kernel, on a grid `[hidden.div_ceil(64), rows * top]`. It takes int8 or f32, as the format is.
    pub fn plain_instance(&self) -> Result<Instance, InstanceError> {
        let format = format(self.dtype);
        expert_geglu_plain::Chosen {
            K: self.k,
            UNIT: format.unit,
            INTEGER: format.integer,
            TOP: self.top,
            HIDDEN: self.hidden,
            side: format.side,
            dot: format.dot,
        }
        .build()
    }
}
