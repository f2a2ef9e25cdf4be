//! Rows of weights times rows of activations: what all matrix products come down to.
//!
//! Two ways, with equal bits (see [`lanes`]). One activation row: weights are decoded a few blocks at a time into
//! the first-level cache and multiplied at once. Several: a strip of weight rows is decoded into a scratch that stays in the
//! cache, then multiplied with all activation rows in register tiles.

use gemma4c_blocks::decode::{BlockFormat, decode_row_as};
use gemma4c_blocks::{DType, with_format};
use rayon::prelude::*;

use super::lanes::{self, LANES};
use super::vectorised;

/// A strip of weight rows, the activation rows to multiply it with, and where the products go.
pub struct Task<'a> {
    /// Encoded rows, as many as an output piece has values.
    pub weights: &'a [u8],
    pub inputs: &'a [&'a [f32]],
    /// One piece an input.
    pub outputs: Vec<&'a mut [f32]>,
}

/// Weight rows in a strip for `inputs` activation rows: enough work to be worth a thread's while, few enough to share, and
/// decoded they must fit the second-level cache.
pub fn strip_rows(dtype: DType, cols: usize, inputs: usize) -> usize {
    const ENCODED: usize = 256 << 10;
    const DECODED: usize = 512 << 10;
    let decoded = size_of::<f32>() * cols.max(1);
    let encoded = (cols / dtype.layout().len * dtype.layout().bytes).max(1);
    if inputs == 1 { (ENCODED / encoded).max(1) } else { (DECODED / decoded).clamp(TILE_WEIGHTS, 256) }
}

/// Runs the tasks on all threads.
pub fn run(dtype: DType, cols: usize, tasks: Vec<Task>) {
    let one = |scratch: &mut Vec<f32>, task: Task| {
        let Task { weights, inputs, mut outputs } = task;
        match (inputs, outputs.as_mut_slice()) {
            ([input], [output]) => multiply_one(dtype, weights, input, output, &mut Piece([0.0; PIECE])),
            (_, outputs) => multiply_many(dtype, weights, cols, inputs, outputs, scratch),
        }
    };
    if tasks.len() == 1 {
        return tasks.into_iter().for_each(|task| one(&mut Vec::new(), task));
    }
    tasks.into_par_iter().for_each_init(Vec::new, one);
}

vectorised! {
    fn multiply_one(dtype: DType, weights: &[u8], input: &[f32], output: &mut [f32], piece: &mut Piece) {
        with_format!(dtype, F => multiply_one_as::<F>(weights, input, output, piece));
    }

    fn multiply_many(
        dtype: DType,
        weights: &[u8],
        cols: usize,
        inputs: &[&[f32]],
        outputs: &mut [&mut [f32]],
        scratch: &mut Vec<f32>,
    ) {
        let rows = outputs[0].len();
        scratch.resize(rows * cols, 0.0);
        with_format!(dtype, F => decode_strip::<F>(weights, cols, scratch));
        let strip: Vec<&[f32]> = scratch.chunks_exact(cols).collect();
        multiply_tiles(&strip, inputs, outputs);
    }
}

/// Values decoded before they are multiplied: few enough that the processor still decodes the next piece while it multiplies
/// this one.
const PIECE: usize = 256;

#[repr(align(64))]
struct Piece([f32; PIECE]);

#[inline(always)]
fn multiply_one_as<F: BlockFormat>(weights: &[u8], input: &[f32], output: &mut [f32], piece: &mut Piece) {
    let row_bytes = weights.len() / output.len();
    for (row, output) in weights.chunks_exact(row_bytes).zip(output) {
        let mut acc = [0.0; LANES];
        for (blocks, x) in row.chunks(PIECE / F::LEN * F::BYTES).zip(input.chunks(PIECE)) {
            let w = &mut piece.0[..x.len()];
            decode_row_as::<F>(blocks, w);
            lanes::accumulate_row(&mut acc, w, x);
        }
        *output = lanes::total(acc);
    }
}

#[inline(always)]
fn decode_strip<F: BlockFormat>(weights: &[u8], cols: usize, strip: &mut [f32]) {
    let row_bytes = weights.len() / (strip.len() / cols);
    for (row, decoded) in weights.chunks_exact(row_bytes).zip(strip.chunks_exact_mut(cols)) {
        decode_row_as::<F>(row, decoded);
    }
}

const TILE_WEIGHTS: usize = 4;
const TILE_INPUTS: usize = 4;

/// All products of a decoded strip, tile by tile. Where a size is no multiple of the tile, the last tile overlaps the one before
/// and computes the same values again.
#[inline(always)]
fn multiply_tiles(strip: &[&[f32]], inputs: &[&[f32]], outputs: &mut [&mut [f32]]) {
    let mut i = 0;
    while i < inputs.len() {
        if inputs.len() < TILE_INPUTS || strip.len() < TILE_WEIGHTS {
            for (w, output) in strip.iter().zip(outputs[i].iter_mut()) {
                *output = lanes::dot(w, inputs[i]);
            }
            i += 1;
            continue;
        }
        let first_input = i.min(inputs.len() - TILE_INPUTS);
        let mut j = 0;
        while j < strip.len() {
            let first_weight = j.min(strip.len() - TILE_WEIGHTS);
            let w: [&[f32]; TILE_WEIGHTS] = std::array::from_fn(|k| strip[first_weight + k]);
            let x: [&[f32]; TILE_INPUTS] = std::array::from_fn(|k| inputs[first_input + k]);
            let products = lanes::dot_tile(w, x);
            for (k, products) in products.iter().enumerate() {
                for (l, product) in products.iter().enumerate() {
                    outputs[first_input + l][first_weight + k] = *product;
                }
            }
            j += TILE_WEIGHTS;
        }
        i += TILE_INPUTS;
    }
}
