//! Cases of the per-layer embeddings.

use gemma4c_dsl::harness::{Bound, Case, Random};

use super::geglu;
use super::norm::normed;
use crate::kernels::outputs::Outputs;
use crate::kernels::per_layer;

fn inputs(dim: usize, layers: usize, rows: usize, width: f32) -> Case {
    let mut random = Random::new((layers * rows) as u64);
    let count = rows * layers * dim;
    let (projected, gathered) = (random.floats(count, -60.0, 60.0), random.floats(count, -0.1, 0.1));
    let weight = random.floats(dim, 0.1, 2.0);
    let (projected_scale, gathered_scale, out_scale) = (width.sqrt().recip(), (dim as f32).sqrt(), 0.5f32.sqrt());
    let slice = |(slice, row): (&[f32], &[f32])| {
        let scaled: Vec<f32> = slice.iter().map(|x| x * projected_scale).collect();
        let normed = normed(&scaled, Some(&weight));
        let sum = normed
            .iter()
            .zip(row)
            .map(|(b, a)| (f64::from(*b) + f64::from(*a) * f64::from(gathered_scale)) * f64::from(out_scale));
        sum.map(|x| x as f32).collect::<Vec<_>>()
    };
    let expected: Vec<f32> = projected.chunks(dim).zip(gathered.chunks(dim)).flat_map(slice).collect();
    let instance = per_layer::inputs(dim as u32).expect("four warps are a block");
    let grid = per_layer::grid(&instance, layers as u32, rows as u32);
    Case::new(format!("{layers} layers of {dim}, {rows} rows"), instance)
        .grid(grid)
        .buffer("projected", projected)
        .buffer("gathered", gathered)
        .buffer("weight", weight)
        .scalar("layers", layers as u32)
        .scalar("projected_scale", projected_scale)
        .scalar("gathered_scale", gathered_scale)
        .scalar("out_scale", out_scale)
        .scalar("epsilon", 1e-6f32)
        .expect("out", expected, Bound::Within { absolute: 2e-6, relative: 4e-6 })
}

pub fn cases() -> Vec<Case> {
    let gate = |layers: usize, rows, outputs| geglu::Shape { width: 256, rows, strides: (256, 256 * layers), outputs };
    vec![
        inputs(256, 35, 1, 1536.0),
        inputs(256, 5, 3, 2560.0),
        inputs(32, 1, 2, 64.0),
        geglu::case("gate of a layer among 35", gate(35, 1, Outputs::INT8)),
        geglu::case("gate of a layer among 6, many rows", gate(6, 4, Outputs::BF16)),
    ]
}
