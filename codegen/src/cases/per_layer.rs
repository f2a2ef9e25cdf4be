//! Cases of the per-layer embeddings: tables of every type, rows, layers that leave warps over, tokens beyond the table.

use gemma4c_blocks::{DType, reference};
use gemma4c_dsl::harness::{Bound, Case, Random};

use super::gather::{elements, table};
use super::geglu;
use super::norm::normed;
use crate::kernels::outputs::Outputs;
use crate::kernels::per_layer;

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
        .buffer("tokens", tokens)
        .buffer("weight", weight)
        .buffer("value_tensor", elements(dtype, bytes))
        .scalar("layers", layers as u32)
        .scalar("vocabulary", vocabulary as u32)
        .scalar("projected_scale", projected_scale)
        .scalar("gathered_scale", gathered_scale)
        .scalar("out_scale", out_scale)
        .scalar("epsilon", 1e-6f32)
        .expect("out", expected, Bound::Within { absolute: 2e-6 + largest * 1e-6, relative: 4e-6 })
}

pub fn cases() -> Vec<Case> {
    let gate = |layers: usize, rows, outputs| geglu::Shape { width: 256, rows, strides: (256, 256 * layers), outputs };
    let mut cases: Vec<Case> = DType::ALL.into_iter().map(|dtype| inputs(dtype, 256, 2, &[1])).collect();
    cases.extend([
        inputs(DType::Q8_0, 256, 35, &[2]),
        inputs(DType::Q5K, 256, 5, &[0, u32::MAX, 1]),
        inputs(DType::BF16, 32, 1, &[2, 0]),
        geglu::case("gate of a layer among 35", gate(35, 1, Outputs::INT8)),
        geglu::case("gate of a layer among 6, many rows", gate(6, 4, Outputs::BF16)),
    ]);
    cases
}
