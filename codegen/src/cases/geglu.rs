//! Cases of the gated GELU: strides, widths that leave threads over, one row and many, gates at the far ends.

use gemma4c_dsl::harness::{Bound, Case, Random};

use super::norm::written;
use crate::kernels::geglu;
use crate::kernels::outputs::Outputs;

/// The formula in f64.
pub fn gelu(x: f32) -> f64 {
    let x = f64::from(x);
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * x * (1.0 + 0.044_715 * x * x)).tanh())
}

/// Where tanh nears -1 the sum `1 + tanh` keeps its absolute error, so the bound has an absolute part.
const CLOSE: Bound = Bound::Within { absolute: 2e-6, relative: 2e-6 };

pub struct Shape {
    pub width: usize,
    pub rows: usize,
    /// Row strides of gate and up.
    pub strides: (usize, usize),
    pub outputs: Outputs,
}

pub fn case(name: &str, shape: Shape) -> Case {
    let Shape { width, rows, strides: (gate_stride, up_stride), outputs } = shape;
    let mut random = Random::new(width as u64);
    let mut gate = random.floats(rows * gate_stride, -4.0, 4.0);
    let ends = [0.0, -0.0, 40.0, -40.0, 1e-8, -1e-8, 9.5, -9.5];
    gate[..8].copy_from_slice(&ends);
    let up = random.floats(rows * up_stride, -2.0, 2.0);
    let product =
        |row: usize, i: usize| (gelu(gate[row * gate_stride + i]) * f64::from(up[row * up_stride + i])) as f32;
    let expected: Vec<f32> =
        (0..rows).flat_map(|row| (0..width).map(move |i| (row, i))).map(|(row, i)| product(row, i)).collect();
    let instance = geglu::instance(outputs).expect("128 threads are a block");
    let grid = geglu::grid(&instance, width as u32, rows as u32);
    let case = Case::new(name, instance)
        .grid(grid)
        .buffer("gate_values", gate)
        .buffer("up_values", up)
        .scalar("width", width as u32)
        .scalar("gate_stride", gate_stride as u32)
        .scalar("up_stride", up_stride as u32);
    written(case, "out", outputs, &expected, CLOSE)
}

pub fn cases() -> Vec<Case> {
    let shape = |width, rows, strides, outputs| Shape { width, rows, strides, outputs };
    vec![
        case("8 values", shape(8, 1, (8, 8), Outputs::FLOATS)),
        case("one row of an expert", shape(704, 1, (704, 704), Outputs::INT8)),
        case("gate and up side by side", shape(704, 3, (1408, 1408), Outputs::INT8)),
        case("a wide row", shape(2112, 1, (2112, 2112), Outputs::BF16)),
        case(
            "many rows, all outputs",
            shape(96, 5, (96, 128), Outputs { floats: true, bf16: true, f16: true, int8: true }),
        ),
    ]
}
