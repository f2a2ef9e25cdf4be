//! The matrix-vector product of decode: one row of activations times repacked weights of any type.
//!
//! Its time is the weights' way from memory, so the kernel is a pipeline of 16-byte loads: each lane keeps ROWS x DEPTH units
//! on their way, and issues the next one as soon as it has used one, across the ends of rows. The grid is as large as the
//! GPU, not as the matrix: a warp goes on to its next rows without a pause. The activations lie in shared memory, int8 with
//! a scale for each 32 values, or f32 for float weights. Each row is summed by the same lanes in the same order, whatever
//! the grid: results depend on the instance alone.
//!
//! One kernel serves all: a weight format ([`formats`]), a prologue (how activations arrive) and an epilogue ([`slots`]) are
//! device functions in its slots. Several matrices that share their input and their type are one matrix, stacked; with PAIRED
//! the upper half of the rows is joined to the lower, as gate and up are. How many of everything is [`shape`]'s choice.

pub mod formats;
mod instances;
pub mod shape;
pub mod slots;

use gemma4c_blocks::DType;
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{DeviceDef, Instance, InstanceError};

use crate::kernels::shapes::NORM_EPSILON;
use formats::format;
use shape::{LaunchShape, launch_shape};

pub use instances::instances;

/// The unit of `codes` that row `r` of a lane's rows needs at `at`: rows past the end read the last one.
#[device]
pub fn unit_of<const K: u32, const UNIT: u32, const LANES: u32, const DEPTH: u32, const PAIRED: bool>(
    first: u32,
    r: u32,
    at: u32,
    rows: u32,
) -> u32 {
    let units = K / UNIT;
    let output = (first + if PAIRED { r / 2 } else { r }).min(rows - 1);
    let row = if PAIRED { output + r % 2 * rows } else { output };
    row * units + if units % (LANES * DEPTH) == 0 { at } else { at.min(units - 1) }
}

/// The sum over the LANES lanes of a row.
#[device]
pub fn lanes_sum<const LANES: u32>(value: f32) -> f32 {
    let mut sum = value;
    let mut mask = LANES / 2;
    #[unroll]
    while mask > 0 {
        sum = sum + shfl_xor(sum, mask);
        mask = mask / 2;
    }
    sum
}

/// `out = W · x`. LANES lanes share a row, DEPTH units of it are on their way to a lane, for each of ROWS rows.
#[kernel(block = WARPS * 32, dependent, dynamic_shared, slots(
    side(unit: u32) -> U32x4,
    dot(codes: U32x4, side: U32x4, unit: u32, low: U32x4, high: U32x4, scale: f32, sum: i32, total: f32) -> f32,
    energy(piece: u32, round: i32, factor: f32) -> f32,
    arrive(piece: u32, kept: bool, first: f32, factor: f32) -> U32x4,
    join(value: f32, up: f32) -> f32,
    epilogue(value: f32, row: u32) -> f32
))]
pub fn matvec<
    const K: u32,
    const UNIT: u32,
    const INTEGER: bool,
    const LANES: u32,
    const ROWS: u32,
    const DEPTH: u32,
    const WARPS: u32,
    const PAIRED: bool,
    const NORMS: i32,
    const SCALED: bool,
    const EPSILON: f32,
>(
    codes: Weights<U32x4>,
    out: Output<f32>,
    rows: u32,
) {
    require!(K % 32 == 0 && 32 % LANES == 0 && ROWS <= LANES);
    require!(!PAIRED || ROWS % 2 == 0);
    let x_words = shared::<u32>(if INTEGER { K / 4 } else { K });
    let x_scales = shared::<U32x2>(if INTEGER { K / 32 } else { 1 });
    let units = K / UNIT;
    // A unit's activations are one or two parts of 16 bytes. Second parts lie behind all first ones, so that neighbouring
    // lanes read neighbouring parts.
    let two_parts = if INTEGER { UNIT == 32 } else { UNIT == 8 };

    let lane = lane_id() % LANES;
    let outputs = if PAIRED { ROWS / 2 } else { ROWS };
    let warp_outputs = 32 / LANES * outputs;
    let mut base = (block_idx() * WARPS + warp_id()) * warp_outputs;
    let own = lane_id() / LANES * outputs;
    let mut at = lane;

    // The first weights are on their way before the activations are there.
    let mut ahead = regs(U32x4::ZERO, ROWS * DEPTH);
    let mut sides = regs(U32x4::ZERO, ROWS * DEPTH);
    if base < rows {
        #[unroll]
        for d in 0..DEPTH {
            #[unroll]
            for r in 0..ROWS {
                let unit = unit_of(base + own, r, at + d * LANES, rows);
                ahead[d * ROWS + r] = load_streamed::<U32x4>(codes, unit);
                sides[d * ROWS + r] = side(unit);
            }
        }
    }

    grid_dependency_wait();
    grid_launch_dependents();
    let pieces = if INTEGER { K / 8 } else { K / 4 };
    let mut first = 1.0f32;
    let mut factor = 1.0f32;
    for round in 0..NORMS {
        let mut sum = 0.0f32;
        #[unroll(2)]
        for piece in (thread_idx()..pieces).by(WARPS * 32) {
            sum = sum + energy(piece, round, factor);
        }
        first = factor;
        factor = rsqrt(block_sum(sum) / K as f32 + EPSILON);
    }
    // Whole warps, because to quantise is a collective: the lanes past the end repeat the last piece, which is not kept.
    #[unroll(2)]
    for place in (thread_idx()..pieces.div_ceil(32) * 32).by(WARPS * 32) {
        let piece = place.min(pieces - 1);
        let arrived = arrive(piece, place < pieces, first, factor);
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

    let mut sums = regs(0.0f32, ROWS);
    while base < rows {
        let row_ends = at - lane + LANES * DEPTH >= units;
        let next_at = if row_ends { lane } else { at + LANES * DEPTH };
        let next_base = if row_ends { base + grid_dim() * WARPS * warp_outputs } else { base };
        #[unroll]
        for d in 0..DEPTH {
            let unit = (at + d * LANES).min(units - 1);
            let low = load::<U32x4>(x_words, unit * 4);
            let high = load::<U32x4>(x_words, if two_parts { (units + unit) * 4 } else { 0 });
            let x_scale = if INTEGER { x_scales[unit * UNIT / 32] } else { U32x2::ZERO };
            #[unroll]
            for r in 0..ROWS {
                let total = dot(
                    ahead[d * ROWS + r],
                    sides[d * ROWS + r],
                    unit_of(base + own, r, at + d * LANES, rows),
                    low,
                    high,
                    f32::from_bits(x_scale.x),
                    x_scale.y as i32,
                    sums[r],
                );
                if units % (LANES * DEPTH) == 0 || at + d * LANES < units {
                    sums[r] = total;
                }
                if next_base < rows {
                    let next = unit_of(next_base + own, r, next_at + d * LANES, rows);
                    ahead[d * ROWS + r] = load_streamed::<U32x4>(codes, next);
                    sides[d * ROWS + r] = side(next);
                }
            }
        }
        if row_ends {
            // Lane i keeps output i.
            let mut value = 0.0f32;
            let mut up = 0.0f32;
            #[unroll]
            for r in 0..ROWS {
                let sum = lanes_sum(sums[r]);
                let output = if PAIRED { r / 2 } else { r };
                if lane == output && PAIRED && r % 2 == 1 {
                    up = sum;
                } else if lane == output {
                    value = sum;
                }
                sums[r] = 0.0;
            }
            let row = base + own + lane;
            if lane < outputs && row < rows {
                out[row] = epilogue(join(value, up), row);
            }
        }
        at = next_at;
        base = next_base;
    }
}

/// The same product, plainly: a thread takes an output, activations are read where they are (int8 codes or f32 as words).
#[kernel(block = 64, slots(
    side(unit: u32) -> U32x4,
    dot(codes: U32x4, side: U32x4, unit: u32, low: U32x4, high: U32x4, scale: f32, sum: i32, total: f32) -> f32,
    join(value: f32, up: f32) -> f32,
    epilogue(value: f32, row: u32) -> f32
))]
pub fn matvec_plain<const K: u32, const UNIT: u32, const INTEGER: bool, const PAIRED: bool>(
    codes: Weights<U32x4>,
    x: Input<u32>,
    xscale: Input<f32>,
    xsum: Input<i32>,
    out: Output<f32>,
    rows: u32,
) {
    let row = block_idx() * 64 + thread_idx();
    if row < rows {
        let words = if INTEGER { UNIT / 4 } else { UNIT };
        let mut value = 0.0f32;
        let mut up = 0.0f32;
        for i in 0..K / UNIT {
            let low = load::<U32x4>(x, i * words);
            let high = load::<U32x4>(x, i * words + words - 4);
            let scale = if INTEGER { xscale[i * UNIT / 32] } else { 1.0 };
            let sum = if INTEGER { xsum[i * UNIT / 32] } else { 0 };
            let unit = row * (K / UNIT) + i;
            value = dot(codes[unit], side(unit), unit, low, high, scale, sum, value);
            if PAIRED {
                let unit = (rows + row) * (K / UNIT) + i;
                up = dot(codes[unit], side(unit), unit, low, high, scale, sum, up);
            }
        }
        out[row] = epilogue(join(value, up), row);
    }
}

/// How the activations arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prologue {
    /// Quantised by an earlier kernel: integer formats alone.
    Int8,
    /// f32; integer formats quantise them.
    Plain,
    /// The RMS norm of f32.
    Norm,
    /// A residual stream that is still to take a layer's normed part, and its scale if the product is `scaled`.
    Residual,
    /// The RMS norm of such a stream.
    ResidualNorm,
}

impl Prologue {
    fn norms(self) -> i32 {
        match self {
            Self::Int8 | Self::Plain => 0,
            Self::Norm | Self::Residual => 1,
            Self::ResidualNorm => 2,
        }
    }

    fn energy(self) -> &'static DeviceDef {
        match self {
            Self::Int8 | Self::Plain => slots::no_energy::DEF,
            Self::Norm => slots::norm_energy::DEF,
            Self::Residual => slots::residual_energy::DEF,
            Self::ResidualNorm => slots::residual_norm_energy::DEF,
        }
    }

    fn arrive(self) -> &'static DeviceDef {
        match self {
            Self::Int8 => slots::int8_input::DEF,
            Self::Plain => slots::f32_input::DEF,
            Self::Norm => slots::normed_input::DEF,
            Self::Residual => slots::residual_input::DEF,
            Self::ResidualNorm => slots::residual_normed_input::DEF,
        }
    }
}

/// A product: everything that decides its instance.
#[derive(Clone, Debug)]
pub struct Product {
    pub dtype: DType,
    /// Values that come out.
    pub outputs: u32,
    /// Values of a row.
    pub k: u32,
    /// The matrix has two rows for each output: all the first ones, then all the second. They are joined by GeGLU.
    pub geglu: bool,
    pub prologue: Prologue,
    /// The residual stream of the prologue is multiplied by a weight of one element.
    pub scaled: bool,
    /// Of the prologue's norms.
    pub epsilon: f32,
    /// Applied in order to each output.
    pub epilogue: Vec<&'static DeviceDef>,
}

/// Multiprocessors of the GPU that shapes are tuned on.
pub const TUNED_MULTIPROCESSORS: u32 = 132;

impl Product {
    pub fn new(dtype: DType, outputs: u32, k: u32, prologue: Prologue) -> Self {
        let epsilon = NORM_EPSILON;
        Self { dtype, outputs, k, geglu: false, prologue, scaled: false, epsilon, epilogue: Vec::new() }
    }

    /// Rows of the matrix.
    pub fn rows(&self) -> u64 {
        u64::from(self.outputs) * if self.geglu { 2 } else { 1 }
    }

    fn join(&self) -> &'static [&'static DeviceDef] {
        if self.geglu { &[slots::geglu::DEF] } else { &[] }
    }

    /// The shape for a GPU of that many multiprocessors.
    pub fn shape(&self, multiprocessors: u32) -> LaunchShape {
        launch_shape(self.dtype, self.outputs, self.k, self.geglu, multiprocessors)
    }

    /// The fast kernel, launched on `[shape.blocks]`.
    pub fn instance(&self, shape: LaunchShape) -> Result<Instance, InstanceError> {
        let format = format(self.dtype);
        Instance::of(matvec::DEF)
            .constant("K", self.k)
            .constant("UNIT", format.unit)
            .constant("INTEGER", format.integer)
            .constant("LANES", shape.lanes)
            .constant("ROWS", shape.rows)
            .constant("DEPTH", shape.depth)
            .constant("WARPS", shape.warps)
            .constant("PAIRED", self.geglu)
            .constant("NORMS", self.prologue.norms())
            .constant("SCALED", self.scaled)
            .constant("EPSILON", self.epsilon)
            .slot("side", &[format.side])
            .slot("dot", &[format.dot])
            .slot("energy", &[self.prologue.energy()])
            .slot("arrive", &[self.prologue.arrive()])
            .slot("join", self.join())
            .slot("epilogue", &self.epilogue)
            .build()
    }

    /// The plain kernel, launched on `[outputs.div_ceil(64)]`. It takes activations as they are, whatever the prologue.
    pub fn plain_instance(&self) -> Result<Instance, InstanceError> {
        let format = format(self.dtype);
        Instance::of(matvec_plain::DEF)
            .constant("K", self.k)
            .constant("UNIT", format.unit)
            .constant("INTEGER", format.integer)
            .constant("PAIRED", self.geglu)
            .slot("side", &[format.side])
            .slot("dot", &[format.dot])
            .slot("join", self.join())
            .slot("epilogue", &self.epilogue)
            .build()
    }
}
