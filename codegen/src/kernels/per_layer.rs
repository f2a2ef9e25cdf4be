//! Per-layer embeddings: an input of each layer that depends on the token, and how a layer takes it.
//!
//! Before layer 0, for all layers at once: `(norm(projection * d^-0.5) * weight + row of the table * 16) * 2^-0.5`, a
//! norm a layer's slice ([`per_layer_inputs`]). The table is the largest tensor of its model, of which a token needs
//! one row: it stays as it is in the file. In a layer: `gelu(gate) * slice`, which is the gated GELU over a strided
//! slice of those inputs, with no copy ([`gate`]). For a decoded row that and the projection after it are one launch
//! ([`step`]).

pub mod step;

use gemma4c_blocks::DType;
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

use super::geglu;
use super::outputs::Outputs;
use super::values::value;

/// What the terms and their sum are multiplied by.
#[view]
pub struct InputScales {
    pub projected: f32,
    pub gathered: f32,
    pub out: f32,
}

/// The token of each row, `stride` words after that of the row before.
#[view]
pub struct TokenRows {
    pub tokens: Input<u32>,
    pub stride: u32,
}

/// The inputs of all layers. A warp takes a layer's slice of DIM values in one row; the grid is
/// `[layers.div_ceil(WARPS), rows]`. Buffers are `[rows][layers][DIM]`, rows of the table `[layers][DIM]`. A token
/// beyond the table reads its last row.
#[kernel(block = WARPS * 32, dependent, slots(value(at: u64) -> f32))]
pub fn per_layer_inputs<const DIM: u32, const WARPS: u32>(
    projected: Input<f32>,
    rows: TokenRows,
    weight: Weights<f32>,
    out: Output<f32>,
    layers: u32,
    vocabulary: u32,
    scales: InputScales,
    epsilon: f32,
) {
    require!(DIM % 32 == 0);
    let lane = lane_id();
    let layer = block_idx() * WARPS + warp_id();
    let row = block_idx_y();
    let start = (row * layers + layer) * DIM;
    let mut weights = regs(0.0f32, DIM / 32);
    #[unroll]
    for p in 0..DIM / 32 {
        weights[p] = weight[lane + 32 * p];
    }

    grid_launch_dependents();
    grid_dependency_wait();
    if layer < layers {
        let token = rows.tokens[row * rows.stride].min(vocabulary - 1);
        let in_table = (token as u64 * layers as u64 + layer as u64) * DIM as u64;
        let mut gathered = regs(0.0f32, DIM / 32);
        let mut x = regs(0.0f32, DIM / 32);
        let mut squares = 0.0f32;
        #[unroll]
        for p in 0..DIM / 32 {
            gathered[p] = value(in_table + (lane + 32 * p) as u64) * scales.gathered;
            x[p] = projected[start + lane + 32 * p] * scales.projected;
            squares += x[p] * x[p];
        }
        let factor = rsqrt(warp_sum(squares) / DIM as f32 + epsilon);
        #[unroll]
        for p in 0..DIM / 32 {
            out[start + lane + 32 * p] = (x[p] * factor * weights[p] + gathered[p]) * scales.out;
        }
    }
}

/// A [`per_layer_inputs`] over slices of `dim` values and a table of that type.
pub fn inputs(dim: u32, table: DType) -> Result<Instance, InstanceError> {
    per_layer_inputs::Chosen { DIM: dim, WARPS: 4, value: value(table) }.build()
}

/// Blocks of a [`per_layer_inputs`].
pub fn grid(instance: &Instance, layers: u32, rows: u32) -> [u32; 3] {
    [layers.div_ceil(instance.block() / 32), rows, 1]
}

/// A layer's gate: [`geglu`] with the layer's slice of the inputs as `up`, whose stride is all layers' width.
pub fn gate(outputs: Outputs) -> Result<Instance, InstanceError> {
    geglu::instance(outputs)
}
