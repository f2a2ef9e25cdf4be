//! Down of the chosen experts, with their weighted sum: all choices of a row come back together.

use gemma4c_blocks::DType;
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{DeviceDef, Instance, InstanceError};

use super::{Activations, depth};
use crate::kernels::matvec::formats::format;

/// Unit `place` of an output's rows, all choices of a row one after the other.
#[device]
pub fn down_unit<const K: u32, const UNIT: u32, const TOP: u32>(
    place: u32,
    row: u32,
    output: u32,
    outputs: u32,
    ids: Input<u32>,
) -> u32 {
    let expert = ids[row * TOP + place / (K / UNIT)];
    (expert * outputs + output.min(outputs - 1)) * (K / UNIT) + place % (K / UNIT)
}

/// `out[row] = Σ weights[j] * expert_scale[ids[j]] * (W[ids[j]] · x[j])` over the TOP choices j of a row. Block `[b, row]` takes
/// WARPS * OUTPUTS outputs. The rows of an output, one for each choice, are one long row to its warp: the warp's lanes are
/// full even where an expert is narrow.
#[kernel(block = WARPS * 32, dependent, dynamic_shared, slots(
    side(unit: u32) -> U32x4,
    dot(codes: U32x4, side: U32x4, unit: u32, low: U32x4, high: U32x4, scale: f32, sum: i32, total: f32) -> f32,
    arrive(piece: u32, kept: bool, first: f32, factor: f32) -> U32x4,
    epilogue(value: f32, at: u32) -> f32
))]
pub fn expert_down<
    const K: u32,
    const UNIT: u32,
    const INTEGER: bool,
    const TOP: u32,
    const OUTPUTS: u32,
    const DEPTH: u32,
    const WARPS: u32,
>(
    codes: Weights<U32x4>,
    expert_scale: Weights<f32>,
    ids: Input<u32>,
    weights: Input<f32>,
    state: Input<u32>,
    out: Output<f32>,
    outputs: u32,
) {
    require!(K % 32 == 0 && TOP <= 32);
    let x_words = shared::<u32>(if INTEGER { TOP * K / 4 } else { TOP * K });
    let x_scales = shared::<U32x2>(if INTEGER { TOP * K / 32 } else { 1 });
    let factors = shared::<f32>(TOP);
    let units = TOP * (K / UNIT);
    let two_parts = if INTEGER { UNIT == 32 } else { UNIT == 8 };

    grid_dependency_wait();
    grid_launch_dependents();
    let row = block_idx_y();
    // The whole block leaves: there is no such row.
    if row >= state[1u32] {
        return;
    }
    let first = (block_idx() * WARPS + warp_id()) * OUTPUTS;
    let mut ahead = regs(U32x4::ZERO, OUTPUTS * DEPTH);
    let mut sides = regs(U32x4::ZERO, OUTPUTS * DEPTH);
    #[unroll]
    for d in 0..DEPTH {
        let place = (lane_id() + d * 32).min(units - 1);
        #[unroll]
        for o in 0..OUTPUTS {
            let unit = down_unit(place, row, first + o, outputs, ids);
            ahead[d * OUTPUTS + o] = load_streamed::<U32x4>(codes, unit);
            sides[d * OUTPUTS + o] = side(unit);
        }
    }

    if thread_idx() < TOP {
        factors[thread_idx()] = weights[row * TOP + thread_idx()] * expert_scale[ids[row * TOP + thread_idx()]];
    }
    let pieces = if INTEGER { TOP * K / 8 } else { TOP * K / 4 };
    for place in (thread_idx()..pieces.div_ceil(32) * 32).by(WARPS * 32) {
        let piece = place.min(pieces - 1);
        let arrived = arrive(row * pieces + piece, place < pieces, 1.0, 1.0);
        let part = if INTEGER { piece / 2 } else { piece };
        let to = if two_parts { (part / 2 + part % 2 * units) * 4 } else { part * 4 };
        if place < pieces {
            if INTEGER {
                store(x_words, to + piece % 2 * 2, u32x2(arrived.x, arrived.y));
                if piece % 4 == 0 {
                    x_scales[piece / 4] = u32x2(arrived.z, arrived.w);
                }
            } else {
                store(x_words, to, arrived);
            }
        }
    }
    barrier();

    let mut sums = regs(0.0f32, OUTPUTS);
    for start in (0..units).by(32 * DEPTH) {
        #[unroll]
        for d in 0..DEPTH {
            let at = start + d * 32 + lane_id();
            let place = at.min(units - 1);
            let low = load::<U32x4>(x_words, place * 4);
            let high = load::<U32x4>(x_words, if two_parts { (units + place) * 4 } else { 0 });
            let x_scale = if INTEGER { x_scales[place * UNIT / 32] } else { U32x2::ZERO };
            let factor = factors[place / (K / UNIT)];
            #[unroll]
            for o in 0..OUTPUTS {
                let product = dot(
                    ahead[d * OUTPUTS + o],
                    sides[d * OUTPUTS + o],
                    down_unit(place, row, first + o, outputs, ids),
                    low,
                    high,
                    f32::from_bits(x_scale.x),
                    x_scale.y as i32,
                    0.0,
                );
                if at < units {
                    sums[o] = product.mul_add(factor, sums[o]);
                }
                if start + 32 * DEPTH < units {
                    let next = down_unit((at + 32 * DEPTH).min(units - 1), row, first + o, outputs, ids);
                    ahead[d * OUTPUTS + o] = load_streamed::<U32x4>(codes, next);
                    sides[d * OUTPUTS + o] = side(next);
                }
            }
        }
    }
    #[unroll]
    for o in 0..OUTPUTS {
        let sum = warp_sum(sums[o]);
        if lane_id() == 0 && first + o < outputs {
            out[row * outputs + first + o] = epilogue(sum, row * outputs + first + o);
        }
    }
}

/// The same, plainly: a thread takes an output, and its choices one after the other.
#[kernel(block = 64, slots(
    side(unit: u32) -> U32x4,
    dot(codes: U32x4, side: U32x4, unit: u32, low: U32x4, high: U32x4, scale: f32, sum: i32, total: f32) -> f32,
    epilogue(value: f32, at: u32) -> f32
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
                let low = load::<U32x4>(x, place * words);
                let high = load::<U32x4>(x, place * words + words - 4);
                let scale = if INTEGER { xscale[place * UNIT / 32] } else { 1.0 };
                let sum = if INTEGER { xsum[place * UNIT / 32] } else { 0 };
                let unit = down_unit(j * (K / UNIT) + i, row, output, outputs, ids);
                product = dot(codes[unit], side(unit), unit, low, high, scale, sum, product);
            }
            value = product.mul_add(weights[row * TOP + j] * expert_scale[ids[row * TOP + j]], value);
        }
        out[row * outputs + output] = epilogue(value, row * outputs + output);
    }
}

/// The down product of the chosen experts, with their weighted sum: everything that decides its instance.
#[derive(Clone, Debug)]
pub struct Down {
    pub dtype: DType,
    /// Values that come out.
    pub outputs: u32,
    /// Hidden values of an expert.
    pub k: u32,
    /// Experts that a row goes to.
    pub top: u32,
    pub from: Activations,
    /// Applied in order to each output, which is counted over all rows.
    pub epilogue: Vec<&'static DeviceDef>,
}

impl Down {
    /// Outputs of a warp, warps of a block.
    const SHARE: (u32, u32) = (2, 8);

    /// Blocks for `rows` rows.
    pub fn grid(&self, rows: u32) -> [u32; 3] {
        [self.outputs.div_ceil(Self::SHARE.0 * Self::SHARE.1), rows, 1]
    }

    pub fn instance(&self) -> Result<Instance, InstanceError> {
        let format = format(self.dtype);
        let (outputs, warps) = Self::SHARE;
        Instance::of(expert_down::DEF)
            .constant("K", self.k)
            .constant("UNIT", format.unit)
            .constant("INTEGER", format.integer)
            .constant("TOP", self.top)
            .constant("OUTPUTS", outputs)
            .constant("DEPTH", depth(format, outputs, self.top * self.k / format.unit))
            .constant("WARPS", warps)
            .slot("side", &[format.side])
            .slot("dot", &[format.dot])
            .slot("arrive", &[self.from.arrive()])
            .slot("epilogue", &self.epilogue)
            .build()
    }

    /// The plain kernel, on a grid `[outputs.div_ceil(64), rows]`. It takes int8 or f32, as the format is.
    pub fn plain_instance(&self) -> Result<Instance, InstanceError> {
        let format = format(self.dtype);
        Instance::of(expert_down_plain::DEF)
            .constant("K", self.k)
            .constant("UNIT", format.unit)
            .constant("INTEGER", format.integer)
            .constant("TOP", self.top)
            .slot("side", &[format.side])
            .slot("dot", &[format.dot])
            .slot("epilogue", &self.epilogue)
            .build()
    }
}
