//! Per-layer embeddings: what each layer is told of the token, and how a layer lets it in.
//!
//! Before layer 0, for all layers at once: `(norm(projection * d^-0.5) * weight + row of the table * 16) * 2^-0.5`, a norm a
//! layer's slice ([`per_layer_inputs`]). In a layer: `gelu(gate) * slice`, which is the gated GELU over a strided
//! slice of those inputs, with no copy ([`gate`]).

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

use super::geglu;
use super::outputs::Outputs;
use super::shapes::{MODELS, distinct};

/// The inputs of all layers. A warp takes a layer's slice of DIM values in one row; the grid is `[layers.div_ceil(WARPS),
/// rows]`. Buffers are `[rows][layers][DIM]`; `gathered_scale` is 1 where the gather has scaled already.
#[kernel(block = WARPS * 32, dependent)]
pub fn per_layer_inputs<const DIM: u32, const WARPS: u32>(
    projected: Input<f32>,
    gathered: Input<f32>,
    weight: Weights<f32>,
    out: Output<f32>,
    layers: u32,
    projected_scale: f32,
    gathered_scale: f32,
    out_scale: f32,
    epsilon: f32,
) {
    require!(DIM % 32 == 0);
    let lane = lane_id();
    let layer = block_idx() * WARPS + warp_id();
    let start = (block_idx_y() * layers + layer) * DIM;
    let mut weights = regs(0.0f32, DIM / 32);
    #[unroll]
    for p in 0..DIM / 32 {
        weights[p] = weight[lane + 32 * p];
    }

    grid_launch_dependents();
    grid_dependency_wait();
    if layer < layers {
        let mut x = regs(0.0f32, DIM / 32);
        let mut squares = 0.0f32;
        #[unroll]
        for p in 0..DIM / 32 {
            x[p] = projected[start + lane + 32 * p] * projected_scale;
            squares += x[p] * x[p];
        }
        let factor = rsqrt(warp_sum(squares) / DIM as f32 + epsilon);
        #[unroll]
        for p in 0..DIM / 32 {
            let at = start + lane + 32 * p;
            out[at] = (x[p] * factor * weights[p] + gathered[at] * gathered_scale) * out_scale;
        }
    }
}

/// A [`per_layer_inputs`] over slices of `dim` values.
pub fn inputs(dim: u32) -> Result<Instance, InstanceError> {
    Instance::of(per_layer_inputs::DEF).constant("DIM", dim).constant("WARPS", 4u32).build()
}

/// Blocks of a [`per_layer_inputs`].
pub fn grid(instance: &Instance, layers: u32, rows: u32) -> [u32; 3] {
    [layers.div_ceil(instance.block() / 32), rows, 1]
}

/// A layer's gate: [`geglu`] with the layer's slice of the inputs as `up`, whose stride is all layers' width.
pub fn gate(outputs: Outputs) -> Result<Instance, InstanceError> {
    geglu::instance(outputs)
}

pub fn instances() -> Vec<(String, Instance)> {
    let dims = distinct(MODELS.iter().filter_map(|model| model.per_layer));
    let named = |dim| inputs(dim).map(|instance| (format!("{dim} a layer"), instance));
    dims.into_iter().map(named).collect::<Result<_, _>>().expect("four warps are a block")
}
