//! Down of the chosen experts, with their weighted sum: all choices of a row come back together. The dense half of the mixture
//! may come along, with a result of its own.

use gemma4c_blocks::DType;
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

use super::{Spread, depth, nothing_beside};
use crate::kernels::matvec::formats::format;
use crate::kernels::matvec::parts::{
    Unit, UnitActivations, activations_at, fetch, keep_codes, part_at, plain_activations,
};
use crate::kernels::matvec::slots::as_words;
use crate::kernels::quantise::quantise4;

/// Unit `place` of an output's rows of the experts, all choices of a row one after the other.
#[device]
pub fn down_unit<const K: u32, const UNIT: u32, const TOP: u32>(
    place: u32,
    row: u32,
    output: u32,
    outputs: u32,
    ids: Input<u32>,
) -> u32 {
    let expert = ids[row * TOP + place / (K / UNIT)];
    (expert * outputs + output) * (K / UNIT) + place % (K / UNIT)
}

/// `out[row] = Σ weights[j] * expert_scale[ids[j]] * (W[ids[j]] · x[j])` over the TOP choices j of a row; and with DENSE hidden
/// values, `dense_out[row] = dense · dense_x[row]`. The rows of an output, the dense one and one for each choice, are one long
/// row to its warp: lanes are full even where an expert is narrow, and all of the row is on its way at once. The dense half of several
/// rows may be computed ELSEWHERE: then its place in the long row is passed over, because it decides which lane adds what.
///
/// PIECES float4 vectors of activations a thread are loaded before the first is used.
#[kernel(block = WARPS * 32, min_blocks = 1, dependent, dynamic_shared, slots(
    side(unit: u32) -> U32x4,
    dot(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32,
    dense_side(unit: u32) -> U32x4
))]
pub fn expert_down<
    const K: u32,
    const UNIT: u32,
    const INTEGER: bool,
    const TOP: u32,
    const DENSE: u32,
    const ELSEWHERE: bool,
    const DEPTH: u32,
    const WARPS: u32,
    const PIECES: u32,
>(
    codes: Weights<U32x4>,
    dense_codes: Weights<U32x4>,
    expert_scale: Weights<f32>,
    x: Input<f32>,
    dense_x: Input<f32>,
    ids: Input<u32>,
    weights: Input<f32>,
    state: Input<u32>,
    out: Output<f32>,
    dense_out: Output<f32>,
    outputs: u32,
) {
    require!(K % 32 == 0 && DENSE % 32 == 0 && TOP <= 32 && DENSE + TOP * K <= PIECES * WARPS * 128);
    let x_words = shared::<u32>(if INTEGER { (DENSE + TOP * K) / 4 } else { DENSE + TOP * K });
    let x_scales = shared::<U32x2>(if INTEGER { (DENSE + TOP * K) / 32 } else { 1 });
    let factors = shared::<f32>(TOP);
    let before = DENSE / UNIT;
    let units = before + TOP * (K / UNIT);

    let row = block_idx_y();
    let mut output = warp_id() * grid_dim() + block_idx();
    // Whole steps of the dense half are passed over.
    let own_first = lane_id() + if ELSEWHERE { before / 32 * 32 } else { 0 };
    let mut at = own_first;
    let mut ahead = regs(Unit::ZERO, DEPTH);
    // The dense half's weights are on their way before the choice is known.
    #[unroll]
    for d in 0..DEPTH {
        if !ELSEWHERE && output < outputs && at + d * 32 < before {
            ahead[d] = fetch(dense_side, dense_codes, output * before + at + d * 32);
        }
    }
    grid_launch_dependents();
    grid_dependency_wait();
    // The whole block leaves: there is no such row.
    if row >= state[1u32] {
        return;
    }
    #[unroll]
    for d in 0..DEPTH {
        if output < outputs && at + d * 32 >= before && at + d * 32 < units {
            let unit = down_unit(at + d * 32 - before, row, output, outputs, ids);
            ahead[d] = fetch(side, codes, unit);
        }
    }

    let mut held = regs(F32x4::ZERO, PIECES);
    #[unroll]
    for p in 0..PIECES {
        let value = (thread_idx() + p * WARPS * 32) * 4;
        if value < DENSE && !ELSEWHERE {
            held[p] = load::<F32x4>(dense_x, row * DENSE + value);
        } else if value >= DENSE && value < DENSE + TOP * K {
            held[p] = load::<F32x4>(x, row * TOP * K + value - DENSE);
        }
    }
    if thread_idx() < TOP {
        factors[thread_idx()] = weights[row * TOP + thread_idx()] * expert_scale[ids[row * TOP + thread_idx()]];
    }
    #[unroll]
    for p in 0..PIECES {
        let place = thread_idx() + p * WARPS * 32;
        let inside = place * 4 < DENSE + TOP * K;
        let part = if INTEGER { place / 4 } else { place };
        let to = part_at(part, units);
        if INTEGER {
            let four = quantise4(held[p]);
            if inside {
                keep_codes(four, to + place % 4, place, x_words, x_scales);
            }
        } else if inside {
            store(x_words, to, as_words(held[p]));
        }
    }
    barrier();

    let mut sum = 0.0f32;
    let mut dense_sum = 0.0f32;
    while output < outputs {
        let row_ends = at - lane_id() + 32 * DEPTH >= units;
        let next_at = if row_ends { own_first } else { at + 32 * DEPTH };
        let next_output = if row_ends { output + grid_dim() * WARPS } else { output };
        #[unroll]
        for d in 0..DEPTH {
            let place = (at + d * 32).min(units - 1);
            let x_unit = activations_at(place, place * UNIT / 32, units, x_words, x_scales);
            let is_dense = place < before;
            let mut unit = output * before + place;
            let mut factor = 1.0f32;
            if !is_dense {
                unit = down_unit(place - before, row, output, outputs, ids);
                factor = factors[(place - before) / (K / UNIT)];
            }
            let product = dot(ahead[d], unit, x_unit, 0.0);
            if is_dense {
                dense_sum = dense_sum + product;
            } else if at + d * 32 < units {
                sum = product.mul_add(factor, sum);
            }
            let next = next_at + d * 32;
            if !ELSEWHERE && next_output < outputs && next < before {
                ahead[d] = fetch(dense_side, dense_codes, next_output * before + next);
            } else if next_output < outputs && next >= before && next < units {
                let unit = down_unit(next - before, row, next_output, outputs, ids);
                ahead[d] = fetch(side, codes, unit);
            }
        }
        if row_ends {
            let total = warp_sum(sum);
            if lane_id() == 0 {
                out[row * outputs + output] = total;
            }
            if DENSE > 0 && !ELSEWHERE {
                let total = warp_sum(dense_sum);
                if lane_id() == 0 {
                    dense_out[row * outputs + output] = total;
                }
            }
            sum = 0.0;
            dense_sum = 0.0;
        }
        at = next_at;
        output = next_output;
    }
}

/// The experts' part, plainly: a thread takes an output, and its choices one after the other.
#[kernel(block = 64, slots(
    side(unit: u32) -> U32x4,
    dot(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32
))]
pub fn expert_down_plain<const K: u32, const UNIT: u32, const INTEGER: bool, const TOP: u32>(
    codes: Weights<U32x4>,
    expert_scale: Weights<f32>,
    x: Input<u32>,
    xscale: Input<f32>,
    xsum: Input<i32>,
    ids: Input<u32>,
    weights: Input<f32>,
    state: Input<u32>,
    out: Output<f32>,
    outputs: u32,
) {
    let output = block_idx() * 64 + thread_idx();
    let row = block_idx_y();
    if output < outputs && row < state[1u32] {
        let words = if INTEGER { UNIT / 4 } else { UNIT };
        let mut value = 0.0f32;
        for j in 0..TOP {
            let mut product = 0.0f32;
            for i in 0..K / UNIT {
                let place = (row * TOP + j) * (K / UNIT) + i;
                let of_unit = plain_activations(place, words, x, xscale, xsum);
                let unit = down_unit(j * (K / UNIT) + i, row, output, outputs, ids);
                product = dot(fetch(side, codes, unit), unit, of_unit, product);
            }
            value = product.mul_add(weights[row * TOP + j] * expert_scale[ids[row * TOP + j]], value);
        }
        out[row * outputs + output] = value;
    }
}

/// The down product of the chosen experts, with their weighted sum: everything that decides its instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Down {
    pub dtype: DType,
    /// Values that come out.
    pub outputs: u32,
    /// Hidden values of an expert.
    pub k: u32,
    /// Experts that a row goes to.
    pub top: u32,
    /// Hidden values of a dense half of the same type, which comes along; 0 where none does.
    pub dense: u32,
    /// The dense half comes along with one row, but is computed elsewhere here: for several rows that read its weights once.
    pub dense_elsewhere: bool,
    /// SMs of the GPU.
    pub multiprocessors: u32,
}

impl Down {
    fn spread(&self) -> Spread {
        Spread::of(self.outputs, self.multiprocessors)
    }

    /// Blocks for `rows` rows.
    pub fn grid(&self, rows: u32) -> [u32; 3] {
        self.spread().grid(rows)
    }

    pub fn instance(&self) -> Result<Instance, InstanceError> {
        let (format, spread) = (format(self.dtype), self.spread());
        let values = self.dense + self.top * self.k;
        expert_down::Chosen {
            K: self.k,
            UNIT: format.unit,
            INTEGER: format.integer,
            TOP: self.top,
            DENSE: self.dense,
            ELSEWHERE: self.dense_elsewhere,
            DEPTH: depth(format, 1, values / format.unit, spread),
            WARPS: spread.warps,
            PIECES: values.div_ceil(spread.warps * 128),
            side: format.side,
            dot: format.dot,
            dense_side: if self.dense > 0 { format.side } else { nothing_beside::DEF },
        }
        .build()
    }

    /// The plain kernel, on a grid `[outputs.div_ceil(64), rows]`. It takes int8 or f32, as the format is.
    pub fn plain_instance(&self) -> Result<Instance, InstanceError> {
        let format = format(self.dtype);
        expert_down_plain::Chosen {
            K: self.k,
            UNIT: format.unit,
            INTEGER: format.integer,
            TOP: self.top,
            side: format.side,
            dot: format.dot,
        }
        .build()
    }
}
