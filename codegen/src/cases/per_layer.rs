//! Cases of the per-layer embeddings: tables of every type, rows, layers that leave warps over, tokens beyond the
//! table.

use gemma4c_blocks::{DType, reference};
use gemma4c_dsl::harness::{Bound, Case, Data, Random};

use super::gather::{elements, table};
use super::geglu;
use super::matvec::{Layer, error_of_sums, gelu, oracle, random_planes, rounded};
use super::norm::normed;
use crate::kernels::NORM_EPSILON;
use crate::kernels::matvec::formats::{format, types_with_kernels};
use crate::kernels::matvec::{Product, Prologue};
use crate::kernels::outputs::Outputs;
use crate::kernels::per_layer;
use crate::kernels::per_layer::step::Step;
use crate::kernels::planes::Repacked;

fn inputs(dtype: DType, dim: usize, layers: usize, tokens: &[u32]) -> Case {
    let (rows, vocabulary) = (tokens.len(), 3);
    let mut random = Random::new((layers * rows) as u64 + dtype as u64);
    let projected = random.floats(rows * layers * dim, -60.0, 60.0);
    let weight = random.floats(dim, 0.1, 2.0);
    let bytes = table(dtype, vocabulary * layers * dim, &mut random);
    let layout = dtype.layout();
    let blocks = bytes.chunks_exact(layout.bytes);
    let values: Vec<f32> =
        blocks.flat_map(|block| (0..layout.len).map(|i| reference::value(layout, block, i))).collect();
    let (projected_scale, gathered_scale, out_scale) = (1536f32.sqrt().recip(), (dim as f32).sqrt(), 0.5f32.sqrt());
    let slice = |(at, slice): (usize, &[f32])| {
        let scaled: Vec<f32> = slice.iter().map(|x| x * projected_scale).collect();
        let token = (tokens[at / layers] as usize).min(vocabulary - 1);
        let row = &values[(token * layers + at % layers) * dim..][..dim];
        let sum = normed(&scaled, Some(&weight)).into_iter().zip(row);
        let sum = sum.map(|(b, a)| (f64::from(b) + f64::from(*a) * f64::from(gathered_scale)) * f64::from(out_scale));
        sum.map(|x| x as f32).collect::<Vec<_>>()
    };
    let expected: Vec<f32> = projected.chunks(dim).enumerate().flat_map(slice).collect();
    // The table's values are of any size, and where the two terms cancel the error is that of the terms.
    let largest = values.iter().fold(1.0f32, |largest, x| largest.max(x.abs())) * gathered_scale;
    let instance = per_layer::inputs(dim as u32, dtype).expect("four warps are a block");
    let grid = per_layer::grid(&instance, layers as u32, rows as u32);
    Case::new(format!("{dtype}, {layers} layers of {dim}, {rows} rows"), instance)
        .grid(grid)
        .buffer("projected", projected)
        .buffer("rows_tokens", tokens)
        .buffer("weight", weight)
        .buffer("value_tensor", elements(dtype, bytes))
        .scalar("layers", layers as u32)
        .scalar("vocabulary", vocabulary as u32)
        .scalar("rows_stride", 1u32)
        .scalar("scales_projected", projected_scale)
        .scalar("scales_gathered", gathered_scale)
        .scalar("scales_out", out_scale)
        .scalar("epsilon", 1e-6f32)
        .expect("out", expected, Bound::Within { absolute: 2e-6 + largest * 1e-6, relative: 4e-6 })
}

/// A layer's gate and projection in one launch.
fn step(step: Step) -> Case {
    let (k, n) = (step.width as usize, step.inputs as usize);
    step_after(step, vec![Layer::random(k)], random_matrix(step.gate, n, k, 5))
}

/// Rows of several sequences: a cluster each.
fn step_of_rows(step: Step) -> Case {
    let (k, n) = (step.width as usize, step.inputs as usize);
    let rows = vec![Layer::random(k), Layer::massive(k, 900.0, false), Layer::random(k)];
    step_after(step, rows, random_matrix(step.gate, n, k, 5))
}

fn random_matrix(dtype: DType, rows: usize, k: usize, seed: u64) -> Repacked {
    Repacked { dtype, rows, k, planes: random_planes(dtype, rows, k, seed) }
}

/// The residual has massive channels, and the gate does not look at them: what it makes of the others must be right.
fn massive_step(size: f32) -> Case {
    let (gate, projection, width, inputs) = (DType::Q8_0, DType::Q8_0, 512, 256);
    let mut gate_matrix = random_matrix(gate, inputs, width, 5);
    for row in gate_matrix.planes[0].1.chunks_exact_mut(width) {
        for channel in Layer::MASSIVE {
            row[channel] = 0;
        }
    }
    let (width, inputs) = (width as u32, inputs as u32);
    let step = Step { gate, projection, width, inputs, cluster_size: 4, epsilon: NORM_EPSILON };
    let mut case = step_after(step, vec![Layer::massive(width as usize, size, false)], gate_matrix);
    case.name += &format!(", massive channels of {size}");
    case
}

fn step_after(step: Step, layers: Vec<Layer>, gate_matrix: Repacked) -> Case {
    let Step { gate, projection, width, inputs, cluster_size, epsilon } = step;
    let (k, n) = (width as usize, inputs as usize);
    let matrix = random_matrix(projection, k, n, 6);
    let of_product = Product { epsilon, ..Product::new(gate, inputs, width, Prologue::Residual) };
    // A row's inputs are part of a wider one.
    let by_stride = n + 32;
    let by = Random::new(7).floats(by_stride * layers.len(), -2.0, 2.0);
    let (mut residuals, mut gated, mut rows) = (Vec::new(), Vec::new(), Vec::new());
    for (layer, by) in layers.iter().zip(by.chunks(by_stride)) {
        let residual = layer.residual(&of_product);
        let gates = oracle(&gate_matrix, &rounded(gate, &residual, true)).into_iter().zip(by);
        let of_row: Vec<f32> = gates.map(|((sum, _), by)| (gelu(sum) * f64::from(*by)) as f32).collect();
        rows.extend(oracle(&matrix, &rounded(projection, &of_row, false)));
        (residuals, gated) = ([residuals, residual].concat(), [gated, of_row].concat());
    }
    // A gated value halfway between two codes may get either, and a sum has f32's error.
    let largest = |values: &mut dyn Iterator<Item = f32>| values.map(f32::abs).fold(0.0, f32::max);
    let code = largest(&mut gated.iter().copied()) / 127.0;
    let weight = largest(&mut (0..k * n).map(|at| matrix.value(at / n, at % n)));
    let size = rows.iter().map(|(_, size)| *size).fold(0.0, f64::max) as f32;
    let bound =
        Bound::Within { absolute: 2.0 * code * weight + size * error_of_sums(projection) as f32, relative: 1e-5 };
    let count = layers.len();
    let of_rows = if count > 1 { format!(", {count} rows") } else { String::new() };
    let name = format!("step, {gate} and {projection}, {width} and {inputs}, {cluster_size} blocks{of_rows}");
    let concat = |of: &dyn Fn(&Layer) -> &[f32]| layers.iter().flat_map(|layer| of(layer).to_vec()).collect::<Vec<_>>();
    let loosest = layers.iter().map(|layer| layer.close).find(|close| *close != layers[0].close);
    let mut case = Case::new(name, step.instance().expect("whole groups of rows"))
        .grid(step.grid(count as u32))
        .buffer("post_norm", layers[0].post_norm.clone())
        .buffer("rows_x", concat(&|layer| &layer.x))
        .buffer("rows_update", concat(&|layer| &layer.update))
        .buffer("by_values", by)
        .scalar("by_stride", by_stride as u32)
        .expect("residual", residuals, loosest.unwrap_or(layers[0].close))
        .expect("out", rows.iter().map(|(value, _)| *value as f32).collect::<Vec<_>>(), bound);
    for (of, prefix) in [(gate_matrix, "gate_"), (matrix, "")] {
        for (plane, bytes) in of.planes {
            let side = if plane.name == "codes" { "" } else { "side_" };
            case = case.buffer(&format!("{prefix}{side}{}", plane.name), Data::new(plane.element(), bytes));
        }
    }
    case
}

/// Every type; two types; widths that leave lanes, warps and blocks without work.
fn steps() -> impl Iterator<Item = Case> {
    let epsilon = NORM_EPSILON;
    let of = move |gate, projection, width, inputs, cluster_size| Step {
        gate,
        projection,
        width,
        inputs,
        cluster_size,
        epsilon,
    };
    let types = types_with_kernels().filter(|dtype| format(*dtype).integer);
    let every = types.map(move |dtype| of(dtype, dtype, 512, 256, 4));
    let others = [
        of(DType::Q8_0, DType::Q4_0, 1536, 256, 8),
        of(DType::Q4_0, DType::Q8_0, 2592, 32, 2),
        of(DType::Q8_0, DType::Q8_0, 96, 64, 16),
        Step { epsilon: 0.25, ..of(DType::Q4_1, DType::Q4_1, 160, 128, 2) },
    ];
    every.chain(others).map(step).chain([5_000.0, 50_000.0].map(massive_step)).chain([step_of_rows(of(
        DType::Q8_0,
        DType::Q4_0,
        512,
        256,
        4,
    ))])
}

pub fn cases() -> Vec<Case> {
    let gate = |layers: usize, rows, outputs| geglu::Shape { width: 256, rows, strides: (256, 256 * layers), outputs };
    let mut cases: Vec<Case> = types_with_kernels().map(|dtype| inputs(dtype, 256, 2, &[1])).collect();
    cases.extend([
        inputs(DType::Q8_0, 256, 35, &[2]),
        inputs(DType::Q5K, 256, 5, &[0, u32::MAX, 1]),
        inputs(DType::BF16, 32, 1, &[2, 0]),
        geglu::case("gate of a layer among 35", gate(35, 1, Outputs::INT8)),
        geglu::case("gate of a layer among 6, many rows", gate(6, 4, Outputs::BF16)),
    ]);
    cases.extend(steps());
    cases
}
