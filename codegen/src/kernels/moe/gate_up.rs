//! Gate and up of the chosen experts, joined by GeGLU: a vector of hidden values for each choice of a row. A mixture
//! has a dense half too, of the same shape: its gate and up may come along, so that one launch reads both.

use gemma4c_blocks::DType;
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

use super::gathered::twin_sums;
use super::{Activations, ExpertShape, MixtureCodes, Spread, UnitFormat, depth, nothing_arrives, nothing_beside};
use crate::kernels::gelu::gelu;
use crate::kernels::matvec::formats::format;
use crate::kernels::matvec::parts::{Unit, UnitActivations, activations_at, part_at};

/// What a warp works on: a gate and its up, with DEPTH units of each to a lane in flight.
#[config]
pub struct GateUpTile {
    /// Hidden values of an expert: half the rows of its matrix.
    HIDDEN: u32,
    DEPTH: u32,
    WARPS: u32,
}

/// The unit with which the gate of task `task` starts: first the dense half's outputs, then those of the row's choices.
#[device]
pub fn gate_unit<const S: ExpertShape, const F: UnitFormat, const HIDDEN: u32>(
    task: u32,
    row: u32,
    ids: Input<u32>,
) -> u32 {
    let mut first = task;
    if task >= S.DENSE {
        first = ids[row * S.TOP + (task - S.DENSE) / HIDDEN] * 2 * HIDDEN + (task - S.DENSE) % HIDDEN;
    }
    first * (S.K / F.UNIT)
}

/// Issues the loads of a unit of a gate and of its up, `up_offset` units behind, into place `d` of those in flight.
#[device(slots(side(unit: u32, more: u32) -> U32x4))]
pub fn fetch_gate_and_up(
    codes: Weights<U32x4>,
    unit: u32,
    up_offset: u32,
    d: u32,
    ahead: &mut Regs<U32x4>,
    sides: &mut Regs<U32x4>,
) {
    #[unroll]
    for r in 0u32..2 {
        ahead[d * 2 + r] = load_streamed::<U32x4>(codes, unit + r * up_offset);
        sides[d * 2 + r] = side(unit + r * up_offset, 0);
    }
}

/// Loads a row's activations for both halves. Whole warps do, because to quantise is a collective: lanes past the end
/// load the last piece again, which is not stored.
#[device(slots(arrive(piece: u32) -> U32x4, dense_arrive(piece: u32) -> U32x4))]
pub fn load_activations<const S: ExpertShape, const F: UnitFormat, const WARPS: u32>(
    row: u32,
    arrived: &mut Regs<U32x4>,
    dense_arrived: &mut Regs<U32x4>,
) {
    let pieces = if F.INTEGER { S.K / 8 } else { S.K / 4 };
    #[unroll]
    for p in 0u32..pieces.div_ceil(WARPS * 32) {
        let piece = row * pieces + (thread_idx() + p * (WARPS * 32)).min(pieces - 1);
        arrived[p] = arrive(piece);
        dense_arrived[p] = dense_arrive(piece);
    }
}

/// Stores a piece of a vector of activations where the lanes look for it.
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

/// Stores the activations of both halves, the dense one's behind the experts'.
#[device]
pub fn keep_activations<const S: ExpertShape, const F: UnitFormat, const WARPS: u32>(
    arrived: &Regs<U32x4>,
    dense_arrived: &Regs<U32x4>,
    x_words: Shared<u32>,
    x_scales: Shared<U32x2>,
) {
    let pieces = if F.INTEGER { S.K / 8 } else { S.K / 4 };
    let dense_words = x_words.offset(if F.INTEGER { S.K / 4 } else { S.K });
    let dense_scales = x_scales.offset(if F.INTEGER { S.K / 32 } else { 0 });
    #[unroll]
    for p in 0u32..pieces.div_ceil(WARPS * 32) {
        let place = thread_idx() + p * (WARPS * 32);
        if place < pieces {
            keep_piece(arrived[p], place, x_words, x_scales);
            if S.DENSE > 0 {
                keep_piece(dense_arrived[p], place, dense_words, dense_scales);
            }
        }
    }
}

/// `GeGLU(W[ids[j]] · x)` for each choice j of a row, an expert's first HIDDEN rows gates, the others ups; and with
/// DENSE, that many values of `GeGLU(dense · dense_x)`. Blocks `[b, row]` share out the outputs of a row: a warp takes
/// one at a time, both its rows, and prefetches the next while it multiplies.
///
/// With PREFETCH_RECORD the number of rows is read before the wait: its writer has ended.
#[kernel(block = T.WARPS * 32, min_blocks = 1, dependent, waits_first, early(PREFETCH_RECORD, state), dynamic_shared,
    slots(
    side(unit: u32, more: u32) -> U32x4,
    dot(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32,
    arrive(piece: u32) -> U32x4,
    dense_side(unit: u32, more: u32) -> U32x4,
    dense_arrive(piece: u32) -> U32x4
))]
pub fn expert_geglu<const S: ExpertShape, const F: UnitFormat, const T: GateUpTile, const PREFETCH_RECORD: bool>(
    codes: MixtureCodes,
    ids: Input<u32>,
    state: Input<u32>,
    out: Output<f32>,
    dense_out: Output<f32>,
) {
    require!(S.K % 32 == 0);
    let units = S.K / F.UNIT;
    // The experts' activations, then the dense half's.
    let x_words = shared::<u32>(if F.INTEGER { S.K / 2 } else { 2 * S.K });
    let x_scales = shared::<U32x2>(if F.INTEGER { S.K / 16 } else { 1 });

    let row = block_idx_y();
    let tasks = S.DENSE + S.TOP * T.HIDDEN;
    let mut task = warp_id() * grid_dim() + block_idx();
    let mut at = lane_id();
    // Two arrays, where other kernels have one of units: of those the compiler makes two copies of the loop, one for
    // each half.
    let mut ahead = regs(U32x4::ZERO, 2 * T.DEPTH);
    let mut sides = regs(U32x4::ZERO, 2 * T.DEPTH);
    // The dense half's weights are prefetched before the choice is made.
    if task < S.DENSE {
        #[unroll]
        for d in 0u32..T.DEPTH {
            let unit = task * units + (at + d * 32).min(units - 1);
            fetch_gate_and_up(dense_side, codes.dense, unit, S.DENSE * units, d, &mut ahead, &mut sides);
        }
    }
    let mut rows = 0u32;
    if PREFETCH_RECORD {
        rows = state[1u32];
    }
    grid_dependency_wait();
    grid_launch_dependents();
    if !PREFETCH_RECORD {
        rows = state[1u32];
    }
    // The whole block returns: there is no such row.
    if row >= rows {
        return;
    }
    // Whether the first task needs it or not: a branch would wait for it.
    let expert = ids[row * S.TOP + ((task.max(S.DENSE) - S.DENSE) / T.HIDDEN).min(S.TOP - 1)];
    // The activations are loaded while the choice is in flight, and before the weights that wait for it.
    let mut arrived = regs(U32x4::ZERO, (S.K / if F.INTEGER { 8 } else { 4 } + T.WARPS * 32 - 1) / (T.WARPS * 32));
    let mut dense_arrived =
        regs(U32x4::ZERO, (S.K / if F.INTEGER { 8 } else { 4 } + T.WARPS * 32 - 1) / (T.WARPS * 32));
    load_activations(arrive, dense_arrive, row, &mut arrived, &mut dense_arrived);
    let mut first = if task < S.DENSE { task } else { expert * 2 * T.HIDDEN + (task - S.DENSE) % T.HIDDEN } * units;
    if task >= S.DENSE && task < tasks {
        #[unroll]
        for d in 0u32..T.DEPTH {
            let unit = first + (at + d * 32).min(units - 1);
            fetch_gate_and_up(side, codes.experts, unit, T.HIDDEN * units, d, &mut ahead, &mut sides);
        }
    }
    keep_activations(&arrived, &dense_arrived, x_words, x_scales);
    barrier();

    let vector_words = if F.INTEGER { S.K / 4 } else { S.K };
    let mut sums = regs(0.0f32, 2);
    while task < tasks {
        let height = if task < S.DENSE { S.DENSE } else { T.HIDDEN };
        let behind = if task < S.DENSE { vector_words / 4 } else { 0 };
        let groups = if task < S.DENSE { S.K / 32 } else { 0 };
        // Where all of a row is in flight, each turn of the loop is a row's last.
        let row_ends = 32 * T.DEPTH >= units || at - lane_id() + 32 * T.DEPTH >= units;
        let next_at = if row_ends { lane_id() } else { at + 32 * T.DEPTH };
        let next_task = if row_ends { task + grid_dim() * T.WARPS } else { task };
        let mut next_first = first;
        if row_ends && next_task < tasks {
            next_first = gate_unit(next_task, row, ids);
        }
        #[unroll]
        for d in 0u32..T.DEPTH {
            let unit = (at + d * 32).min(units - 1);
            let x = activations_at(behind + unit, groups + unit * F.UNIT / 32, units, x_words, x_scales);
            #[unroll]
            for r in 0u32..2 {
                let held = Unit { codes: ahead[d * 2 + r], side: sides[d * 2 + r] };
                let total = dot(held, first + r * height * units + unit, x, sums[r]);
                if at + d * 32 < units {
                    sums[r] = total;
                }
            }
            // One branch for both rows.
            let next = next_first + (next_at + d * 32).min(units - 1);
            if next_task < S.DENSE {
                fetch_gate_and_up(dense_side, codes.dense, next, S.DENSE * units, d, &mut ahead, &mut sides);
            } else if next_task < tasks {
                fetch_gate_and_up(side, codes.experts, next, T.HIDDEN * units, d, &mut ahead, &mut sides);
            }
        }
        if row_ends {
            let sum = twin_sums(32, sums[0], sums[1]);
            let up = shfl_xor(sum, 16);
            let value = gelu(sum) * up;
            if lane_id() == 0 && task < S.DENSE {
                dense_out[row * S.DENSE + task] = value;
            } else if lane_id() == 0 {
                out[row * S.TOP * T.HIDDEN + task - S.DENSE] = value;
            }
            sums[0] = 0.0;
            sums[1] = 0.0;
        }
        at = if 32 * T.DEPTH >= units { lane_id() } else { next_at };
        task = next_task;
        first = next_first;
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
    /// The writer of the number of rows has ended when it starts.
    pub prefetch_record: bool,
    /// SMs of the GPU.
    pub multiprocessors: u32,
}

impl GateUp {
    fn spread(&self) -> Spread {
        Spread::of(self.dense + self.top * self.hidden, self.multiprocessors)
    }

    /// Units of each of a lane's two rows in flight: of those that waste the fewest loads behind a row's end, the most.
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
            S: ExpertShape { K: self.k, TOP: self.top, DENSE: self.dense },
            F: UnitFormat::of(format),
            T: GateUpTile { HIDDEN: self.hidden, DEPTH: self.depth(), WARPS: spread.warps },
            PREFETCH_RECORD: self.prefetch_record,
            side: format.side,
            dot: format.dot,
            arrive: self.from.arrive(),
            dense_side,
            dense_arrive,
        }
        .build()
    }
}
