//! Rows of weights times rows of activations: what all matrix products come down to.
//!
//! Two ways, with equal bits (see [`lanes`]). One activation row: weights are decoded a few blocks at a time into
//! the first-level cache and multiplied at once. Several: a strip of weight rows is decoded into a scratch that stays in the
//! cache, then multiplied with all activation rows in register tiles.

use gemma4c_blocks::decode::{BlockFormat, decode_row, decode_row_as};
use gemma4c_blocks::{DType, with_format};
use rayon::prelude::*;

use super::lanes::{self, LANES};
use super::{tiles, vectorised};

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
    if inputs == 1 { (ENCODED / encoded).max(1) } else { (DECODED / decoded).clamp(4, 256) }
}

/// Runs the tasks on all threads.
pub fn run(dtype: DType, cols: usize, tasks: Vec<Task>) {
    let one = |scratch: &mut Vec<f32>, mut task: Task| match (task.inputs, task.outputs.as_mut_slice()) {
        ([input], [output]) => multiply_one(dtype, task.weights, input, output, &mut Piece([0.0; PIECE])),
        _ => multiply_many(task, dtype, cols, scratch),
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
}

/// Several activation rows: the strip is decoded whole, then multiplied in tiles.
fn multiply_many(task: Task, dtype: DType, cols: usize, scratch: &mut Vec<f32>) {
    let Task { weights, inputs, mut outputs } = task;
    scratch.resize(outputs[0].len() * cols, 0.0);
    decode_row(dtype, weights, scratch);
    let strip: Vec<&[f32]> = scratch.chunks_exact(cols).collect();
    tiles::all_dots(&strip, inputs, &mut outputs);
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

#[cfg(test)]
mod tests {
    use super::super::testing::Random;
    use super::*;

    /// The code for processors without wide vectors is in every binary, and hardly ever runs where tests do.
    #[test]
    fn the_version_for_any_cpu_gives_the_bits_of_the_one_for_this() {
        for dtype in DType::ALL {
            let (rows, cols) = (3, 768);
            let weights = Random::new(1).encoded(dtype, rows * cols);
            let x = Random::new(2).values(cols);
            let (mut this, mut any) = (vec![f32::NAN; rows], vec![f32::NAN; rows]);
            multiply_one(dtype, &weights, &x, &mut this, &mut Piece([0.0; PIECE]));
            with_format!(dtype, F => multiply_one_as::<F>(&weights, &x, &mut any, &mut Piece([0.0; PIECE])));
            assert_eq!(this, any, "{dtype}");
        }
    }
}
