//! Rows of weights times rows of activations: what all matrix products come down to.
//!
//! There are two ways, with equal bits (see [`lanes`]). For a few activation rows, as in decode, weights are decoded
//! some blocks at a time into L1 and multiplied at once. For many, a strip of weight rows is decoded into a scratch
//! buffer that stays in L2, then multiplied with all activation rows in register tiles.

use gemma4c_blocks::decode::{BlockFormat, decode_row, decode_row_as};
use gemma4c_blocks::{DType, with_format};
use rayon::prelude::*;

use super::super::aligned::Aligned;
use super::lanes::{self, LANES};
use super::prefetch::fetch_ahead;
use super::{tiles, vectorised};

/// A strip of weight rows, the activation rows to multiply it with, and where the products go.
pub struct Task<'a> {
    /// Encoded rows, as many as an output piece has values.
    pub weights: &'a [u8],
    pub inputs: &'a [&'a [f32]],
    /// One piece an input.
    pub outputs: Vec<&'a mut [f32]>,
}

/// Up to this many activation rows are multiplied while the weights are decoded.
const FEW: usize = 3;

/// The weight rows in a strip, of `rows` in all, for `inputs` activation rows: several strips a thread, so that threads
/// end at about the same time; but enough work in each to be worth a task, and no more than fits L2 where a strip is
/// decoded as a whole.
pub fn strip_rows(dtype: DType, rows: usize, cols: usize, inputs: usize) -> usize {
    let layout = dtype.layout();
    let row_bytes = if inputs <= FEW { cols / layout.len * layout.bytes } else { cols * size_of::<f32>() };
    let (least, most) = if inputs <= FEW { (32 << 10, 256 << 10) } else { (128 << 10, 512 << 10) };
    let rows_in = |bytes: usize| (bytes / row_bytes.max(1)).max(1);
    let shared = rows.div_ceil(4 * rayon::current_num_threads()).clamp(rows_in(least), rows_in(most));
    // A register tile has four weight rows.
    shared.next_multiple_of(4)
}

/// Runs the tasks on all threads.
pub fn run(dtype: DType, cols: usize, tasks: Vec<Task>) {
    let one = |scratch: &mut Aligned, mut task: Task| match task.inputs.len() {
        ..=FEW => multiply_few(dtype, task.weights, task.inputs, &mut task.outputs, &mut Piece([0.0; PIECE])),
        _ => multiply_many(dtype, cols, task, scratch),
    };
    if tasks.len() == 1 {
        return tasks.into_iter().for_each(|task| one(&mut Aligned::default(), task));
    }
    tasks.into_par_iter().for_each_init(Aligned::default, one);
}

/// Many activation rows: the strip is decoded as a whole, then multiplied in tiles.
fn multiply_many(dtype: DType, cols: usize, mut task: Task, scratch: &mut Aligned) {
    let len = task.outputs[0].len() * cols;
    if scratch.as_slice().len() < len {
        *scratch = Aligned::zeros(len);
    }
    let scratch = &mut scratch.as_mut_slice()[..len];
    decode_row(dtype, task.weights, scratch);
    let strip: Vec<&[f32]> = scratch.chunks_exact(cols).collect();
    tiles::all_dots(&strip, task.inputs, &mut task.outputs);
}

vectorised! {
    /// At most [`FEW`] activation rows: each piece of a row is multiplied as soon as it is decoded.
    fn multiply_few(
        dtype: DType,
        weights: &[u8],
        inputs: &[&[f32]],
        outputs: &mut [&mut [f32]],
        piece: &mut Piece,
    ) {
        with_format!(
            dtype,
            F => multiply_one_to_three((F::LEN, F::BYTES), decode_row_as::<F>, weights, (inputs, outputs), piece),
            _ => {
                let layout = dtype.layout();
                let decode = |blocks: &[u8], out: &mut [f32]| decode_row(dtype, blocks, out);
                multiply_one_to_three((layout.len, layout.bytes), decode, weights, (inputs, outputs), piece)
            }
        );
    }
}

#[inline(always)]
fn multiply_one_to_three(
    block: (usize, usize),
    decode: impl Fn(&[u8], &mut [f32]),
    weights: &[u8],
    rows: (&[&[f32]], &mut [&mut [f32]]),
    piece: &mut Piece,
) {
    match rows {
        ([a], [x]) => multiply_few_as(block, decode, weights, ([a], [x]), piece),
        ([a, b], [x, y]) => multiply_few_as(block, decode, weights, ([a, b], [x, y]), piece),
        ([a, b, c], [x, y, z]) => multiply_few_as(block, decode, weights, ([a, b, c], [x, y, z]), piece),
        _ => unreachable!("one to three rows, and as many outputs"),
    }
}

/// Values decoded before they are multiplied: few enough that the processor still decodes the next piece while it
/// multiplies this one.
const PIECE: usize = 256;

#[repr(align(64))]
struct Piece([f32; PIECE]);

/// The lanes of a sum, between one piece and the next.
#[repr(align(64))]
struct Sums([f32; LANES]);

/// `block` is the values and the bytes that are decoded together.
#[inline(always)]
fn multiply_few_as<const N: usize>(
    block: (usize, usize),
    decode: impl Fn(&[u8], &mut [f32]),
    weights: &[u8],
    (inputs, mut outputs): ([&[f32]; N], [&mut [f32]; N]),
    piece: &mut Piece,
) {
    let inputs = inputs.map(|input| input.as_chunks::<PIECE>());
    let (pieces, rest) = (inputs[0].0.len(), inputs[0].1.len());
    let inputs = inputs.map(|(whole, rest_of)| (&whole[..pieces], &rest_of[..rest]));
    for (i, row) in weights.chunks_exact(weights.len() / outputs[0].len()).enumerate() {
        let mut sums = [const { Sums([0.0; LANES]) }; N];
        let mut blocks = row.chunks_exact(PIECE / block.0 * block.1);
        for (p, blocks) in (0..pieces).zip(blocks.by_ref()) {
            multiply_piece(&decode, blocks, inputs.map(|input| input.0[p].as_slice()), &mut piece.0, &mut sums);
        }
        if rest > 0 {
            multiply_piece(&decode, blocks.remainder(), inputs.map(|input| input.1), &mut piece.0[..rest], &mut sums);
        }
        for (sums, output) in sums.into_iter().zip(&mut outputs) {
            output[i] = lanes::total(sums.0);
        }
    }
}

#[inline(always)]
fn multiply_piece<const N: usize>(
    decode: &impl Fn(&[u8], &mut [f32]),
    blocks: &[u8],
    inputs: [&[f32]; N],
    decoded: &mut [f32],
    sums: &mut [Sums; N],
) {
    fetch_ahead(blocks);
    decode(blocks, decoded);
    for k in 0..N {
        lanes::accumulate_row(&mut sums[k].0, decoded, inputs[k]);
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
            let mut piece = Piece([0.0; PIECE]);
            multiply_few(dtype, &weights, &[&x], &mut [&mut this], &mut piece);
            with_format!(dtype, F => multiply_few_as((F::LEN, F::BYTES), decode_row_as::<F>, &weights, ([&x], [&mut any]), &mut piece));
            assert_eq!(this, any, "{dtype}");
        }
    }
}
