//! `gelu(gate) * up`, element by element, where the product is not fused into the matrix product that made its inputs:
//! many rows, and (as [`super::per_layer::gate`]) the per-layer gate.
//!
//! A thread takes eight neighbouring values of a row; rows of the inputs have strides of their own, so that both may be
//! parts of a wider buffer.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

use super::gelu::gelu;
use super::outputs::{OutputForms, OutputRows, Outputs, write8};

/// Rows that may be parts of wider ones.
#[view]
pub struct StridedRows {
    pub values: Input<f32>,
    /// From a row to the next.
    pub stride: u32,
}

#[device]
pub fn geglu4(gate: F32x4, up: F32x4) -> F32x4 {
    f32x4(gelu(gate.x) * up.x, gelu(gate.y) * up.y, gelu(gate.z) * up.z, gelu(gate.w) * up.w)
}

/// `gelu(gate) * up`, rows of `width` values, in the wanted forms.
#[kernel(block = 128, dependent)]
pub fn geglu<const FORMS: OutputForms>(gate: StridedRows, up: StridedRows, out: OutputRows, width: u32) {
    let row = block_idx_y();
    let at = (block_idx() * block_dim() + thread_idx()) * 8;
    let inside = at < width;
    grid_launch_dependents();
    grid_dependency_wait();
    let mut low = F32x4::ZERO;
    let mut high = F32x4::ZERO;
    if inside {
        let from_gate = gate.values.offset(row * gate.stride + at);
        let from_up = up.values.offset(row * up.stride + at);
        low = geglu4(load::<F32x4>(from_gate, 0u32), load::<F32x4>(from_up, 0u32));
        high = geglu4(load::<F32x4>(from_gate, 4u32), load::<F32x4>(from_up, 4u32));
    }
    write8(low, high, row * width + at, inside, out);
}

/// A [`geglu`]. Widths and strides are multiples of 8; of 32, where int8 comes out.
pub fn instance(outputs: Outputs) -> Result<Instance, InstanceError> {
    geglu::Chosen { FORMS: outputs.config() }.build()
}

/// Blocks for `rows` rows of `width` values.
pub fn grid(instance: &Instance, width: u32, rows: u32) -> [u32; 3] {
    [width.div_ceil(instance.block() * 8), rows, 1]
}
