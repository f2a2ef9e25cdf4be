//! Down of the chosen experts, with their weighted sum: all choices of a row come back together. The dense half of the
//! mixture may come along, with a result of its own.

use gemma4c_blocks::DType;
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

use super::{ExpertChoice, ExpertShape, MixtureCodes, Spread, UnitFormat, depth, nothing_beside};
use crate::kernels::matvec::formats::format;
use crate::kernels::matvec::lanes_sum;
use crate::kernels::matvec::parts::{Unit, UnitActivations, activations_at, fetch, keep_codes, part_at};
use crate::kernels::matvec::slots::as_words;
use crate::kernels::quantise::quantise4;

/// What a warp works on: an output, with DEPTH units to a lane in flight. LANES lanes share a choice's row.
#[config]
pub struct DownTile {
    WARPS: u32,
    LANES: u32,
    DEPTH: u32,
    /// float4 vectors of activations to a thread, all of which are loaded before the first is used.
    PIECES: u32,
    /// No warp has a second output.
    ONCE: bool,
}

/// The shared memory of a block.
#[view]
pub struct DownShared {
    /// The row's activations: the dense half's, then those of its choices.
    x_words: Shared<u32>,
    x_scales: Shared<U32x2>,
    /// What multiplies the products of the choices: they take no registers.
    shares: Shared<f32>,
    scales: Shared<f32>,
}

// ---- steps of a warp ------------------------------------------------------------------------------------------------

/// Units of the dense half's row.
#[device]
pub fn dense_units<const S: ExpertShape, const F: UnitFormat>() -> u32 {
    S.DENSE / F.UNIT
}

/// Units of a choice's row.
#[device]
pub fn choice_units<const S: ExpertShape, const F: UnitFormat>() -> u32 {
    S.K / F.UNIT
}

/// The first steps are the dense half's, a unit to a lane each.
#[device]
pub fn steps_of_dense<const S: ExpertShape, const F: UnitFormat>() -> u32 {
    dense_units().div_ceil(32)
}

/// The steps of one choice, or of the 32 / LANES that are side by side.
#[device]
pub fn steps_of_choice<const S: ExpertShape, const F: UnitFormat, const LANES: u32>() -> u32 {
    choice_units().div_ceil(LANES)
}

/// All steps of an output.
#[device]
pub fn steps_of_output<const S: ExpertShape, const F: UnitFormat, const LANES: u32>() -> u32 {
    steps_of_dense() + S.TOP.div_ceil(32 / LANES) * steps_of_choice()
}

/// The choice that a lane works on at a step of the experts: as many as there is room for, with LANES lanes each,
/// are side by side.
#[device]
pub fn choice_of<const S: ExpertShape, const F: UnitFormat, const LANES: u32>(step: u32) -> u32 {
    step / steps_of_choice() * (32 / LANES) + lane_id() / LANES
}

/// The unit of its choice's row that a lane has at a step; the last one has units for some lanes alone.
#[device]
pub fn unit_of_choice<const S: ExpertShape, const F: UnitFormat, const LANES: u32>(step: u32) -> u32 {
    step % steps_of_choice() * LANES + lane_id() % LANES
}

/// The weighted sum of the products of a row's choices, in the order in which a warp of one row adds them: choices that
/// the same lanes have, one after the other, then the lanes' tree.
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

// ---- stages ---------------------------------------------------------------------------------------------------------

/// Loads the experts of a lane's choices, whether there is such a row or not.
#[device]
pub fn load_experts<const S: ExpertShape, const T: DownTile>(row: u32, ids: Input<u32>, experts: &mut Regs<u32>) {
    #[unroll]
    for round in 0u32..(S.TOP * T.LANES + 31) / 32 {
        experts[round] = ids[row * S.TOP + (round * (32 / T.LANES) + lane_id() / T.LANES).min(S.TOP - 1)];
    }
}

/// Copies the shares and scales of a row's choices to shared memory, by the first warp. They are there after
/// `cp_async_wait()` and a barrier.
#[device]
pub fn copy_factors<const S: ExpertShape, const T: DownTile>(
    row: u32,
    experts: &Regs<u32>,
    choice: ExpertChoice,
    memory: DownShared,
) {
    #[unroll]
    for round in 0u32..(S.TOP * T.LANES + 31) / 32 {
        let of_row = round * (32 / T.LANES) + lane_id() / T.LANES;
        if warp_id() == 0 && lane_id() % T.LANES == 0 && of_row < S.TOP {
            cp_async4(memory.shares, of_row, choice.shares, row * S.TOP + of_row);
            cp_async4(memory.scales, of_row, choice.scales, experts[round]);
        }
    }
    cp_async_commit();
}

/// Issues the loads of a step of the dense half, into place `d` of those in flight.
#[device(slots(dense_side(unit: u32, more: u32) -> U32x4))]
pub fn fetch_dense_step<const S: ExpertShape, const F: UnitFormat>(
    codes: Weights<U32x4>,
    step: u32,
    output: u32,
    d: u32,
    ahead: &mut Regs<Unit>,
) {
    if lane_id() + step * 32 < dense_units() {
        ahead[d] = fetch(dense_side, codes, output * dense_units() + lane_id() + step * 32);
    }
}

/// Issues the loads of a step of the experts, counted from the first of these. Lanes that have no unit load the last
/// one, whose product is dropped.
#[device(slots(side(unit: u32, more: u32) -> U32x4))]
pub fn fetch_expert_step<const S: ExpertShape, const F: UnitFormat>(
    codes: Weights<U32x4>,
    step: u32,
    first_row: u32,
    d: u32,
    ahead: &mut Regs<Unit>,
) {
    ahead[d] = fetch(side, codes, first_row * choice_units() + unit_of_choice(step).min(choice_units() - 1));
}

/// Loads a row's activations of both halves, PIECES vectors to a thread.
#[device]
pub fn load_hidden<const S: ExpertShape, const T: DownTile>(
    x: Input<f32>,
    dense_x: Input<f32>,
    held: &mut Regs<F32x4>,
) {
    let values = S.DENSE + S.TOP * S.K;
    let of_dense = dense_x.offset(block_idx_y() * S.DENSE);
    let of_experts = x.offset(block_idx_y() * S.TOP * S.K);
    #[unroll]
    for p in 0u32..T.PIECES {
        let value = (thread_idx() + p * T.WARPS * 32) * 4;
        if (p + 1) * T.WARPS * 128 <= values || value < values {
            let is_dense = S.DENSE > 0 && value < S.DENSE;
            held[p] = load::<F32x4>(
                if is_dense { of_dense } else { of_experts },
                if is_dense { value } else { value - S.DENSE },
            );
        }
    }
}

/// Stores the activations in shared memory, quantised for integer formats. A collective of the warp.
#[device]
pub fn stage_hidden<const S: ExpertShape, const F: UnitFormat, const T: DownTile>(
    held: &Regs<F32x4>,
    memory: DownShared,
) {
    let values = S.DENSE + S.TOP * S.K;
    #[unroll]
    for p in 0u32..T.PIECES {
        let place = thread_idx() + p * T.WARPS * 32;
        let inside = (p + 1) * T.WARPS * 128 <= values || place * 4 < values;
        let part = if F.INTEGER { place / 4 } else { place };
        let to = part_at(part, dense_units() + S.TOP * choice_units());
        if F.INTEGER {
            let four = quantise4(held[p]);
            if inside {
                keep_codes(four, to + place % 4, place, memory.x_words, memory.x_scales);
            }
        } else if inside {
            store(memory.x_words, to, as_words(held[p]));
        }
    }
}

/// Adds the product of a step of the dense half. A unit's product is rounded before it is added.
#[device(slots(dot(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32))]
pub fn add_dense_step<const S: ExpertShape, const F: UnitFormat>(
    held: Unit,
    step: u32,
    output: u32,
    memory: DownShared,
    dense_sum: &mut f32,
) {
    let unit = (lane_id() + step * 32).min(dense_units() - 1);
    let units = dense_units() + S.TOP * choice_units();
    let x_unit = activations_at(unit, unit * F.UNIT / 32, units, memory.x_words, memory.x_scales);
    let of_unit = dot(held, output * dense_units() + unit, x_unit, 0.0);
    if lane_id() + step * 32 < dense_units() {
        *dense_sum = *dense_sum + of_unit;
    }
}

/// Adds the product of a step of the experts to that of its choice; where it is the choice's last, adds that, times its
/// factor, to the output. `first_row` is the row of all experts' matrix that the lane's expert has for the output.
#[device(slots(dot(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32))]
pub fn add_expert_step<const S: ExpertShape, const F: UnitFormat, const T: DownTile>(
    held: Unit,
    step: u32,
    first_row: u32,
    memory: DownShared,
    product: &mut f32,
    sum: &mut f32,
) {
    let choice = choice_of(step);
    let unit = unit_of_choice(step);
    let own = choice.min(S.TOP - 1);
    let place = dense_units() + own * choice_units() + unit.min(choice_units() - 1);
    let units = dense_units() + S.TOP * choice_units();
    let x_unit = activations_at(place, place * F.UNIT / 32, units, memory.x_words, memory.x_scales);
    let total = dot(held, first_row * choice_units() + unit.min(choice_units() - 1), x_unit, *product);
    if choice < S.TOP && unit < choice_units() {
        *product = total;
    }
    if step % steps_of_choice() == steps_of_choice() - 1 {
        let complete = lanes_sum(*product, T.LANES, false, false);
        if choice < S.TOP {
            *sum = complete.mul_add(memory.shares[own] * memory.scales[own], *sum);
        }
        *product = 0.0;
    }
}

/// `out[row] = Σ shares[j] * scales[ids[j]] * (W[ids[j]] · x[j])` over the TOP choices j of a row; and with DENSE
/// hidden values, `dense_out[row] = dense · dense_x[row]`. A warp has an output: the dense row, then a row for each
/// choice, which LANES lanes share. As lanes are few, most of them have work even where an expert is narrow, and all
/// loads of the output are in flight at once.
///
/// A choice's product is complete before its factor multiplies it: several rows compute it for all that chose the same
/// expert ([`gathered`](super::gathered)), and have the same bits.
///
/// With PREFETCH_CHOICE the choice is read before the wait, beside the dense half's first weights: its writer has
/// ended. The experts' weights are loaded behind the activations, for which all warps wait.
#[kernel(block = T.WARPS * 32, min_blocks = 1, dependent, early(PREFETCH_CHOICE, choice.ids, choice.shares, state),
    dynamic_shared, slots(
    side(unit: u32, more: u32) -> U32x4,
    dot(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32,
    dense_side(unit: u32, more: u32) -> U32x4
))]
pub fn expert_down<const S: ExpertShape, const F: UnitFormat, const T: DownTile, const PREFETCH_CHOICE: bool>(
    codes: MixtureCodes,
    x: Input<f32>,
    dense_x: Input<f32>,
    choice: ExpertChoice,
    state: Input<u32>,
    out: Output<f32>,
    dense_out: Output<f32>,
    outputs: u32,
) {
    require!(S.K % 32 == 0 && S.DENSE % 32 == 0 && S.TOP <= 32);
    require!(S.DENSE + S.TOP * S.K <= T.PIECES * T.WARPS * 128 && 32 % T.LANES == 0);
    let x_words = shared::<u32>(if F.INTEGER { (S.DENSE + S.TOP * S.K) / 4 } else { S.DENSE + S.TOP * S.K });
    let x_scales = shared::<U32x2>(if F.INTEGER { (S.DENSE + S.TOP * S.K) / 32 } else { 1 });
    let shares = shared::<f32>(S.TOP);
    let scales = shared::<f32>(S.TOP);
    let memory = DownShared { x_words, x_scales, shares, scales };
    let dense_steps = steps_of_dense();
    let steps = steps_of_output();
    let chunks = steps.div_ceil(T.DEPTH);

    let row = block_idx_y();
    let mut output = warp_id() * grid_dim() + block_idx();
    let mut ahead = regs(Unit::ZERO, T.DEPTH);
    if !PREFETCH_CHOICE {
        grid_launch_dependents();
        grid_dependency_wait();
    }
    // The choice is loaded with the number of rows, and both before all weights, whether there is such a row or not: a
    // branch on either would delay the weights.
    let rows = state[1u32];
    let mut experts = regs(0u32, (S.TOP * T.LANES + 31) / 32);
    load_experts(row, choice.ids, &mut experts);
    // The dense half's weights need no choice.
    #[unroll]
    for d in 0u32..T.DEPTH {
        if d < dense_steps && output < outputs {
            fetch_dense_step(dense_side, codes.dense, d, output, d, &mut ahead);
        }
    }
    order_loads();
    #[unroll]
    for round in 0u32..(S.TOP * T.LANES + 31) / 32 {
        experts[round] = if row < rows { experts[round] } else { 0 };
    }
    copy_factors(row, &experts, choice, memory);
    if PREFETCH_CHOICE {
        grid_launch_dependents();
        grid_dependency_wait();
    }
    // The whole block returns: there is no such row.
    if row >= rows {
        cp_async_wait(0);
        return;
    }

    let mut held = regs(F32x4::ZERO, T.PIECES);
    load_hidden(x, dense_x, &mut held);
    #[unroll]
    for d in 0u32..T.DEPTH {
        if d >= dense_steps && d < steps && output < outputs {
            let expert = experts[(d - dense_steps) / steps_of_choice()];
            fetch_expert_step(side, codes.experts, d - dense_steps, expert * outputs + output, d, &mut ahead);
        }
    }
    stage_hidden(&held, memory);
    cp_async_wait(0);
    barrier();

    let mut product = 0.0f32;
    let mut sum = 0.0f32;
    let mut dense_sum = 0.0f32;
    while output < outputs {
        let next_output = if T.ONCE { outputs } else { output + grid_dim() * T.WARPS };
        // Which step a unit belongs to is known to the compiler.
        #[unroll]
        for chunk in 0u32..chunks {
            #[unroll]
            for d in 0u32..T.DEPTH {
                let step = chunk * T.DEPTH + d;
                if step < dense_steps {
                    add_dense_step(dot, ahead[d], step, output, memory, &mut dense_sum);
                } else if step < steps {
                    let expert = experts[(step - dense_steps) / steps_of_choice()];
                    let first_row = expert * outputs + output;
                    add_expert_step(dot, ahead[d], step - dense_steps, first_row, memory, &mut product, &mut sum);
                }
                let is_last = chunk + 1 == chunks;
                let next = if is_last { d } else { step + T.DEPTH };
                let of_output = if is_last { next_output } else { output };
                if next < dense_steps && of_output < outputs {
                    fetch_dense_step(dense_side, codes.dense, next, of_output, d, &mut ahead);
                } else if next >= dense_steps && next < steps && of_output < outputs {
                    let expert = experts[(next - dense_steps) / steps_of_choice()];
                    let first_row = expert * outputs + of_output;
                    fetch_expert_step(side, codes.experts, next - dense_steps, first_row, d, &mut ahead);
                }
            }
        }
        let mut total = sum;
        let mut mask = 16u32;
        #[unroll]
        while mask >= T.LANES {
            total = total + shfl_xor(total, mask);
            mask = mask / 2;
        }
        if lane_id() == 0 {
            out[row * outputs + output] = total;
        }
        if S.DENSE > 0 {
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
    /// The writer of the choice has ended when it starts.
    pub prefetch_choice: bool,
    /// SMs of the GPU.
    pub multiprocessors: u32,
}

/// Lanes that share a choice's row of so many units: few, so that most have work, and so many that all of a row's units
/// are in flight at once.
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
            S: ExpertShape { K: self.k, TOP: self.top, DENSE: self.dense },
            F: UnitFormat::of(format),
            T: DownTile {
                WARPS: spread.warps,
                LANES: lanes,
                DEPTH: steps.min(depth(format, 1, values / format.unit, spread) + 1),
                PIECES: values.div_ceil(spread.warps * 128),
                ONCE: self.outputs <= self.grid(rows)[0] * spread.warps,
            },
            PREFETCH_CHOICE: self.prefetch_choice,
            side: format.side,
            dot: format.dot,
            dense_side: if self.dense > 0 { format.side } else { nothing_beside::DEF },
        }
        .build()
    }
}
