//! Gate and up of the chosen experts, joined by GeGLU: a vector of hidden values for each (row, choice).

use gemma4c_blocks::DType;
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

use super::{Activations, depth};
use crate::kernels::gelu::gelu;
use crate::kernels::matvec::formats::format;
use crate::kernels::quantise::int8_code;

/// Outputs of a block: a group of activations, so that the block can quantise it.
const BLOCK_OUTPUTS: u32 = 32;

/// The first unit of row `r` of a warp's rows: gates are even, ups odd. Rows past the end read the last one.
#[device]
pub fn gate_up_row<const K: u32, const UNIT: u32>(expert: u32, first: u32, r: u32, outputs: u32) -> u32 {
    let output = (first + r / 2).min(outputs - 1);
    ((expert * 2 + r % 2) * outputs + output) * (K / UNIT)
}

/// `GeGLU(W[ids[pair]] · x[pair / TOP])` for each pair (row, choice), W's first `outputs` rows gates, the others ups. Block
/// `[b, pair]` takes 32 outputs; each of its warps OUTPUTS of them, with DEPTH units of each row on their way to a lane.
#[kernel(block = WARPS * 32, dependent, dynamic_shared, slots(
    side(unit: u32) -> U32x4,
    dot(codes: U32x4, side: U32x4, unit: u32, low: U32x4, high: U32x4, scale: f32, sum: i32, total: f32) -> f32,
    arrive(piece: u32, kept: bool, first: f32, factor: f32) -> U32x4,
    leave(value: f32, at: u32, kept: bool) -> u32
))]
pub fn expert_geglu<
    const K: u32,
    const UNIT: u32,
    const INTEGER: bool,
    const TOP: u32,
    const OUTPUTS: u32,
    const DEPTH: u32,
    const WARPS: u32,
>(
    codes: Weights<U32x4>,
    ids: Input<u32>,
    state: Input<u32>,
    outputs: u32,
) {
    require!(K % 32 == 0 && WARPS * OUTPUTS == 32);
    let x_words = shared::<u32>(if INTEGER { K / 4 } else { K });
    let x_scales = shared::<U32x2>(if INTEGER { K / 32 } else { 1 });
    let results = shared::<f32>(32);
    let units = K / UNIT;
    // Second parts of a unit's activations lie behind all first ones: neighbouring lanes read neighbouring parts.
    let two_parts = if INTEGER { UNIT == 32 } else { UNIT == 8 };

    grid_dependency_wait();
    grid_launch_dependents();
    let pair = block_idx_y();
    // The whole block leaves: there is no such row.
    if pair >= state[1u32] * TOP {
        return;
    }
    let expert = ids[pair];
    let first = block_idx() * 32 + warp_id() * OUTPUTS;
    let mut ahead = regs(U32x4::ZERO, 2 * OUTPUTS * DEPTH);
    let mut sides = regs(U32x4::ZERO, 2 * OUTPUTS * DEPTH);
    #[unroll]
    for d in 0..DEPTH {
        #[unroll]
        for r in 0..2 * OUTPUTS {
            let unit = gate_up_row(expert, first, r, outputs) + (lane_id() + d * 32).min(units - 1);
            ahead[d * 2 * OUTPUTS + r] = load_streamed::<U32x4>(codes, unit);
            sides[d * 2 * OUTPUTS + r] = side(unit);
        }
    }

    let pieces = if INTEGER { K / 8 } else { K / 4 };
    // Whole warps, because to quantise is a collective: the lanes past the end repeat the last piece, which is not kept.
    for place in (thread_idx()..pieces.div_ceil(32) * 32).by(WARPS * 32) {
        let piece = place.min(pieces - 1);
        let arrived = arrive(pair / TOP * pieces + piece, place < pieces, 1.0, 1.0);
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

    let mut sums = regs(0.0f32, 2 * OUTPUTS);
    for start in (0..units).by(32 * DEPTH) {
        #[unroll]
        for d in 0..DEPTH {
            let at = start + d * 32 + lane_id();
            let place = at.min(units - 1);
            let low = load::<U32x4>(x_words, place * 4);
            let high = load::<U32x4>(x_words, if two_parts { (units + place) * 4 } else { 0 });
            let x_scale = if INTEGER { x_scales[place * UNIT / 32] } else { U32x2::ZERO };
            #[unroll]
            for r in 0..2 * OUTPUTS {
                let row = gate_up_row(expert, first, r, outputs);
                let total = dot(
                    ahead[d * 2 * OUTPUTS + r],
                    sides[d * 2 * OUTPUTS + r],
                    row + place,
                    low,
                    high,
                    f32::from_bits(x_scale.x),
                    x_scale.y as i32,
                    sums[r],
                );
                if at < units {
                    sums[r] = total;
                }
                if start + 32 * DEPTH < units {
                    let next = row + (at + 32 * DEPTH).min(units - 1);
                    ahead[d * 2 * OUTPUTS + r] = load_streamed::<U32x4>(codes, next);
                    sides[d * 2 * OUTPUTS + r] = side(next);
                }
            }
        }
    }
    #[unroll]
    for o in 0..OUTPUTS {
        let gate = warp_sum(sums[2 * o]);
        let up = warp_sum(sums[2 * o + 1]);
        if lane_id() == 0 {
            results[warp_id() * OUTPUTS + o] = gelu(gate) * up;
        }
    }
    barrier();
    if warp_id() == 0 {
        let output = block_idx() * 32 + lane_id();
        leave(results[lane_id()], pair * outputs + output, output < outputs);
    }
}

/// Hidden values as they are.
#[device]
pub fn f32_output(value: f32, at: u32, kept: bool, out: Output<f32>) -> u32 {
    if kept {
        out[at] = value;
    }
    at
}

/// Hidden values in int8: the warp's 32 are a group. A collective.
#[device]
pub fn int8_output(value: f32, at: u32, kept: bool, xq: Output<u32>, xscale: Output<f32>, xsum: Output<i32>) -> u32 {
    let scale = warp_max(value.abs()) / 127.0;
    let code = int8_code(value, scale);
    let word = pack_bytes(code, shfl_down(code, 1), shfl_down(code, 2), shfl_down(code, 3));
    let sum = warp_sum(code);
    if at % 4 == 0 {
        xq[at / 4] = word;
    }
    if at % 32 == 0 {
        xscale[at / 32] = scale;
        xsum[at / 32] = sum;
    }
    at
}

/// The same, plainly: a thread takes an output of a pair, activations are read where they are.
#[kernel(block = 64, slots(
    side(unit: u32) -> U32x4,
    dot(codes: U32x4, side: U32x4, unit: u32, low: U32x4, high: U32x4, scale: f32, sum: i32, total: f32) -> f32
))]
pub fn expert_geglu_plain<const K: u32, const UNIT: u32, const INTEGER: bool, const TOP: u32>(
    codes: Weights<U32x4>,
    x: Input<u32>,
    xscale: Input<f32>,
    xsum: Input<i32>,
    ids: Input<u32>,
    state: Input<u32>,
    out: Output<f32>,
    outputs: u32,
) {
    let output = block_idx() * 64 + thread_idx();
    let pair = block_idx_y();
    if output < outputs && pair < state[1u32] * TOP {
        let words = if INTEGER { UNIT / 4 } else { UNIT };
        let mut gate = 0.0f32;
        let mut up = 0.0f32;
        for i in 0..K / UNIT {
            let place = pair / TOP * (K / UNIT) + i;
            let low = load::<U32x4>(x, place * words);
            let high = load::<U32x4>(x, place * words + words - 4);
            let scale = if INTEGER { xscale[place * UNIT / 32] } else { 1.0 };
            let sum = if INTEGER { xsum[place * UNIT / 32] } else { 0 };
            let gate_unit = gate_up_row(ids[pair], output, 0, outputs) + i;
            gate = dot(codes[gate_unit], side(gate_unit), gate_unit, low, high, scale, sum, gate);
            let up_unit = gate_up_row(ids[pair], output, 1, outputs) + i;
            up = dot(codes[up_unit], side(up_unit), up_unit, low, high, scale, sum, up);
        }
        out[pair * outputs + output] = gelu(gate) * up;
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
    /// Int8 needs `hidden` to be whole groups of 32.
    pub to: Activations,
}

impl GateUp {
    /// Outputs of a warp, warps of a block: enough warps that all of an expert's weights are on their way.
    const SHARE: (u32, u32) = (2, BLOCK_OUTPUTS / 2);

    /// Blocks for `rows` rows.
    pub fn grid(&self, rows: u32) -> [u32; 3] {
        [self.hidden.div_ceil(BLOCK_OUTPUTS), rows * self.top, 1]
    }

    pub fn instance(&self) -> Result<Instance, InstanceError> {
        let format = format(self.dtype);
        let (outputs, warps) = Self::SHARE;
        let leave = match self.to {
            Activations::F32 => f32_output::DEF,
            Activations::Int8 => int8_output::DEF,
        };
        Instance::of(expert_geglu::DEF)
            .constant("K", self.k)
            .constant("UNIT", format.unit)
            .constant("INTEGER", format.integer)
            .constant("TOP", self.top)
            .constant("OUTPUTS", outputs)
            .constant("DEPTH", depth(format, 2 * outputs, self.k / format.unit))
            .constant("WARPS", warps)
            .slot("side", &[format.side])
            .slot("dot", &[format.dot])
            .slot("arrive", &[self.from.arrive()])
            .slot("leave", &[leave])
            .build()
    }

    /// The plain kernel, on a grid `[hidden.div_ceil(64), rows * top]`. It takes int8 or f32, as the format is, and gives f32.
    pub fn plain_instance(&self) -> Result<Instance, InstanceError> {
        let format = format(self.dtype);
        Instance::of(expert_geglu_plain::DEF)
            .constant("K", self.k)
            .constant("UNIT", format.unit)
            .constant("INTEGER", format.integer)
            .constant("TOP", self.top)
            .slot("side", &[format.side])
            .slot("dot", &[format.dot])
            .build()
    }
}
