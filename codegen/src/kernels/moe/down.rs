//! Down of the chosen experts, with their weighted sum: all choices of a row come back together. The dense half of the mixture
//! may come along, with a result of its own.

use gemma4c_blocks::DType;
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

use super::{Spread, depth, nothing_beside};
use crate::kernels::matvec::formats::format;
use crate::kernels::matvec::lanes_sum;
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

/// The choice that a lane works on at a step of the experts: as many as LANES lanes each leave room for are side by side.
#[device]
pub fn choice_of<const K: u32, const UNIT: u32, const LANES: u32>(step: u32) -> u32 {
    step / (K / UNIT).div_ceil(LANES) * (32 / LANES) + lane_id() / LANES
}

/// The unit of its choice's row that a lane has at a step; the last one has units for some lanes alone.
#[device]
pub fn unit_of_choice<const K: u32, const UNIT: u32, const LANES: u32>(step: u32) -> u32 {
    step % (K / UNIT).div_ceil(LANES) * LANES + lane_id() % LANES
}

/// The weighted sum of the products of a row's choices, in the order in which a warp of one row adds them: choices that the same lanes
/// have, one after the other, then the lanes' tree.
#[device]
pub fn sum_of_choices<const TOP: u32, const LANES: u32>(products: &mut Regs<f32>, factors: Shared<f32>) -> f32 {
    let mut sums = regs(0.0f32, 32 / LANES);
    #[unroll]
    for j in 0..TOP {
        sums[j % (32 / LANES)] = products[j].mul_add(factors[j], sums[j % (32 / LANES)]);
    }
    let mut half = 16 / LANES;
    #[unroll]
    while half > 0 {
        #[unroll]
        for part in 0..16 / LANES {
            if part < half {
                sums[part] = sums[part] + sums[part + half];
            }
        }
        half = half / 2;
    }
    sums[0]
}

/// `out[row] = Σ weights[j] * expert_scale[ids[j]] * (W[ids[j]] · x[j])` over the TOP choices j of a row; and with DENSE hidden
/// values, `dense_out[row] = dense · dense_x[row]`. A warp has an output: the dense row, then a row for each choice, which LANES lanes share: as
/// lanes are few, most of them have work even where an expert is narrow, and all of the output is on its way at once.
///
/// A choice's product is complete before its factor multiplies it: several rows compute it for all that chose the same expert
/// ([`gathered`](super::gathered)), and have the same bits.
///
/// With EARLY the choice is read before the wait, beside the dense half's first weights: whoever chose has ended. The experts' weights come behind the activations, for which everybody waits.
///
/// PIECES float4 vectors of activations a thread are loaded before the first is used. With ONCE no warp has a second output.
#[kernel(block = WARPS * 32, min_blocks = 1, dependent, early(EARLY, ids, weights, state), dynamic_shared, slots(
    side(unit: u32, more: u32) -> U32x4,
    dot(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32,
    dense_side(unit: u32, more: u32) -> U32x4
))]
pub fn expert_down<
    const K: u32,
    const UNIT: u32,
    const INTEGER: bool,
    const TOP: u32,
    const DENSE: u32,
    const LANES: u32,
    const DEPTH: u32,
    const WARPS: u32,
    const PIECES: u32,
    const EARLY: bool,
    const ONCE: bool,
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
    require!(32 % LANES == 0);
    let x_words = shared::<u32>(if INTEGER { (DENSE + TOP * K) / 4 } else { DENSE + TOP * K });
    let x_scales = shared::<U32x2>(if INTEGER { (DENSE + TOP * K) / 32 } else { 1 });
    let shares = shared::<f32>(TOP);
    let scales = shared::<f32>(TOP);
    let before = DENSE / UNIT;
    let units = before + TOP * (K / UNIT);
    let dense_steps = before.div_ceil(32);
    let row_units = K / UNIT;
    let expert_steps = row_units.div_ceil(LANES);
    let steps = dense_steps + TOP.div_ceil(32 / LANES) * expert_steps;

    let chunks = steps.div_ceil(DEPTH);

    let row = block_idx_y();
    let mut output = warp_id() * grid_dim() + block_idx();
    let mut ahead = regs(Unit::ZERO, DEPTH);
    if !EARLY {
        grid_launch_dependents();
        grid_dependency_wait();
    }
    // The choice comes with the number of rows, whether there is such a row or not, and both before all weights. A branch on either would keep the weights waiting.
    let rows = state[1u32];
    let mut experts = regs(0u32, (TOP * LANES + 31) / 32);
    #[unroll]
    for round in 0..(TOP * LANES + 31) / 32 {
        experts[round] = ids[row * TOP + (round * (32 / LANES) + lane_id() / LANES).min(TOP - 1)];
    }
    // The dense half's weights need no choice.
    #[unroll]
    for d in 0..DEPTH {
        if d < dense_steps && output < outputs && lane_id() + d * 32 < before {
            ahead[d] = fetch(dense_side, dense_codes, output * before + lane_id() + d * 32);
        }
    }
    order_loads();
    #[unroll]
    for round in 0..(TOP * LANES + 31) / 32 {
        experts[round] = if row < rows { experts[round] } else { 0 };
    }
    // What multiplies the choices' products takes no registers.
    #[unroll]
    for round in 0..(TOP * LANES + 31) / 32 {
        let choice = round * (32 / LANES) + lane_id() / LANES;
        if warp_id() == 0 && lane_id() % LANES == 0 && choice < TOP {
            cp_async4(shares, choice, weights, row * TOP + choice);
            cp_async4(scales, choice, expert_scale, experts[round]);
        }
    }
    cp_async_commit();
    if EARLY {
        grid_launch_dependents();
        grid_dependency_wait();
    }
    // The whole block leaves: there is no such row.
    if row >= rows {
        cp_async_wait(0);
        return;
    }

    let values = DENSE + TOP * K;
    let mut held = regs(F32x4::ZERO, PIECES);
    #[unroll]
    for p in 0..PIECES {
        let value = (thread_idx() + p * WARPS * 32) * 4;
        let of_dense = dense_x.offset(row * DENSE);
        let of_experts = x.offset(row * TOP * K);
        if (p + 1) * WARPS * 128 <= values || value < values {
            let is_dense = DENSE > 0 && value < DENSE;
            held[p] = load::<F32x4>(
                if is_dense { of_dense } else { of_experts },
                if is_dense { value } else { value - DENSE },
            );
        }
    }
    #[unroll]
    for d in 0..DEPTH {
        if d >= dense_steps && d < steps && output < outputs {
            let unit = unit_of_choice(d - dense_steps);
            // Lanes that have none fetch the last unit, and leave it.
            let expert = experts[(d - dense_steps) / expert_steps];
            let held = unit.min(row_units - 1);
            ahead[d] = fetch(side, codes, (expert * outputs + output) * row_units + held);
        }
    }
    #[unroll]
    for p in 0..PIECES {
        let place = thread_idx() + p * WARPS * 32;
        let inside = (p + 1) * WARPS * 128 <= values || place * 4 < values;
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
    cp_async_wait(0);
    barrier();

    let mut product = 0.0f32;
    let mut sum = 0.0f32;
    let mut dense_sum = 0.0f32;
    while output < outputs {
        let next_output = if ONCE { outputs } else { output + grid_dim() * WARPS };
        // Which step a unit belongs to is known to the compiler.
        #[unroll]
        for chunk in 0..chunks {
            #[unroll]
            for d in 0..DEPTH {
                let step = chunk * DEPTH + d;
                if step < dense_steps {
                    let unit = (lane_id() + step * 32).min(before - 1);
                    let x_unit = activations_at(unit, unit * UNIT / 32, units, x_words, x_scales);
                    // A unit's product is rounded before it is added.
                    let of_unit = dot(ahead[d], output * before + unit, x_unit, 0.0);
                    if lane_id() + step * 32 < before {
                        dense_sum = dense_sum + of_unit;
                    }
                } else if step < steps {
                    let choice = choice_of(step - dense_steps);
                    let unit = unit_of_choice(step - dense_steps);
                    let own = choice.min(TOP - 1);
                    let place = before + own * row_units + unit.min(row_units - 1);
                    let x_unit = activations_at(place, place * UNIT / 32, units, x_words, x_scales);
                    let expert = experts[(step - dense_steps) / expert_steps];
                    let number = (expert * outputs + output) * row_units + unit.min(row_units - 1);
                    let total = dot(ahead[d], number, x_unit, product);
                    if choice < TOP && unit < row_units {
                        product = total;
                    }
                    if (step - dense_steps) % expert_steps == expert_steps - 1 {
                        let complete = lanes_sum(product, LANES, false, false);
                        if choice < TOP {
                            sum = complete.mul_add(shares[own] * scales[own], sum);
                        }
                        product = 0.0;
                    }
                }
                let is_last = chunk + 1 == chunks;
                let next = if is_last { d } else { step + DEPTH };
                let of_output = if is_last { next_output } else { output };
                if next < dense_steps && of_output < outputs {
                    if lane_id() + next * 32 < before {
                        ahead[d] = fetch(dense_side, dense_codes, of_output * before + lane_id() + next * 32);
                    }
                } else if next >= dense_steps && next < steps && of_output < outputs {
                    let expert = experts[(next - dense_steps) / expert_steps];
                    let unit = unit_of_choice(next - dense_steps).min(row_units - 1);
                    ahead[d] = fetch(side, codes, (expert * outputs + of_output) * row_units + unit);
                }
            }
        }
        let mut total = sum;
        let mut mask = 16u32;
        #[unroll]
        while mask >= LANES {
            total = total + shfl_xor(total, mask);
            mask = mask / 2;
        }
        if lane_id() == 0 {
            out[row * outputs + output] = total;
        }
        if DENSE > 0 {
            let total = warp_sum(dense_sum);
            if lane_id() == 0 {
                dense_out[row * outputs + output] = total;
            }
        }
        sum = 0.0;
        dense_sum = 0.0;
        output = next_output;
    }
}

/// The experts' part, plainly: a thread takes an output, and its choices one after the other.
#[kernel(block = 64, slots(
    side(unit: u32, more: u32) -> U32x4,
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
    /// Whoever chose has ended when it starts.
    pub early: bool,
    /// SMs of the GPU.
    pub multiprocessors: u32,
}

/// Lanes that share a choice's row of so many units: few, so that most have work, and so many that a row's units are on their way at once.
pub fn lanes_of(units: u32) -> u32 {
    [8, 16].into_iter().find(|lanes| units <= MOST_STEPS * lanes).unwrap_or(32)
}

/// Units of a choice's row to a lane, at most, before twice as many lanes share it.
const MOST_STEPS: u32 = 4;

impl Down {
    fn spread(&self) -> Spread {
        Spread::of(self.outputs, self.multiprocessors)
    }

    /// Blocks for `rows` rows.
    pub fn grid(&self, rows: u32) -> [u32; 3] {
        self.spread().grid(rows)
    }

    /// The instance for launches of `rows` rows.
    pub fn instance(&self, rows: u32) -> Result<Instance, InstanceError> {
        let (format, spread) = (format(self.dtype), self.spread());
        let values = self.dense + self.top * self.k;
        let units = self.k / format.unit;
        let lanes = lanes_of(units);
        let steps = (self.dense / format.unit).div_ceil(32) + self.top.div_ceil(32 / lanes) * units.div_ceil(lanes);
        expert_down::Chosen {
            K: self.k,
            UNIT: format.unit,
            INTEGER: format.integer,
            TOP: self.top,
            DENSE: self.dense,
            LANES: lanes,
            DEPTH: steps.min(depth(format, 1, values / format.unit, spread) + 1),
            WARPS: spread.warps,
            PIECES: values.div_ceil(spread.warps * 128),
            EARLY: self.early,
            ONCE: self.outputs <= self.grid(rows)[0] * spread.warps,
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
