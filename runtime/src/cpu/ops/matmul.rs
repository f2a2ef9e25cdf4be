//! Matrix products with encoded weights: `out = x · Wᵀ`, with one matrix for all rows, or with the matrices of each
//! row's experts.

use std::ops::Range;

use gemma4c_blocks::DType;

use super::product::{self, Task};

/// A weight matrix as it lies in the file: `rows` outputs, each a row of `cols` inputs.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    pub dtype: DType,
    pub bytes: &'a [u8],
    pub rows: usize,
    pub cols: usize,
}

impl<'a> Matrix<'a> {
    /// The encoded row `index`.
    pub fn row(&self, index: usize) -> &'a [u8] {
        self.rows(index..index + 1)
    }

    /// One of `count` matrices that follow each other, of which this is the first.
    pub fn part(&self, number: usize, count: usize) -> Matrix<'a> {
        let bytes = self.bytes.len() / count;
        Matrix { bytes: &self.bytes[number * bytes..][..bytes], ..*self }
    }

    fn rows(&self, rows: Range<usize>) -> &'a [u8] {
        assert!(rows.end <= self.rows);
        let row_bytes = self.dtype.row_bytes(self.cols as u64).expect("rows are whole blocks") as usize;
        &self.bytes[rows.start * row_bytes..rows.end * row_bytes]
    }
}

/// The matrices of all experts, one after the other.
#[derive(Clone, Copy, Debug)]
pub struct Experts<'a> {
    pub dtype: DType,
    pub bytes: &'a [u8],
    pub experts: usize,
    /// Rows of each expert.
    pub rows: usize,
    pub cols: usize,
}

impl<'a> Experts<'a> {
    /// Some rows of one expert.
    fn matrix(&self, expert: usize, rows: Range<usize>) -> Matrix<'a> {
        assert!(expert < self.experts && rows.end <= self.rows);
        let all = Matrix { dtype: self.dtype, bytes: self.bytes, rows: self.experts * self.rows, cols: self.cols };
        let first = expert * self.rows;
        Matrix { bytes: all.rows(first + rows.start..first + rows.end), rows: rows.len(), ..all }
    }
}

/// `out[r] = W x[r]` for every row of `x` (n × cols) and `out` (n × rows).
pub fn matmul(w: &Matrix, x: &[f32], out: &mut [f32]) {
    if out.is_empty() {
        return;
    }
    let inputs: Vec<&[f32]> = x.chunks_exact(w.cols).collect();
    assert_eq!((x.len(), out.len()), (inputs.len() * w.cols, inputs.len() * w.rows));
    product::run(w.dtype, w.cols, tasks(w, &inputs, out.chunks_exact_mut(w.rows)));
}

/// The rows `rows` of expert `ids[slot]` times the slot's input, into `out` (slots × the range's length).
///
/// With k experts for each of n rows there are n × k slots. `x` holds one input for each row, which its k slots share
/// (n × cols), or one for each slot (n × k × cols).
pub fn expert_matmul(w: &Experts, ids: &[u32], x: &[f32], rows: Range<usize>, out: &mut [f32]) {
    if out.is_empty() {
        return;
    }
    let sharing = ids.len() / (x.len() / w.cols);
    assert_eq!((x.len() * sharing, out.len()), (ids.len() * w.cols, ids.len() * rows.len()));
    // Slots of one expert go together, so that its weights are decoded once.
    let mut slots: Vec<usize> = (0..ids.len()).collect();
    slots.sort_by_key(|slot| ids[*slot]);
    let inputs: Vec<&[f32]> = slots.iter().map(|slot| &x[slot / sharing * w.cols..][..w.cols]).collect();
    let mut outputs: Vec<Option<&mut [f32]>> = out.chunks_exact_mut(rows.len()).map(Some).collect();
    let mut all = Vec::new();
    let mut first = 0;
    for group in slots.chunk_by(|a, b| ids[*a] == ids[*b]) {
        let expert = w.matrix(ids[group[0]] as usize, rows.clone());
        let outputs = group.iter().map(|slot| outputs[*slot].take().expect("each slot has one expert"));
        all.extend(tasks(&expert, &inputs[first..first + group.len()], outputs));
        first += group.len();
    }
    product::run(w.dtype, w.cols, all);
}

/// Cuts the product into strips of outputs.
fn tasks<'a>(w: &Matrix<'a>, inputs: &'a [&'a [f32]], outputs: impl Iterator<Item = &'a mut [f32]>) -> Vec<Task<'a>> {
    let strip = product::strip_rows(w.dtype, w.rows, w.cols, inputs.len());
    let mut tasks: Vec<Task> = (0..w.rows)
        .step_by(strip)
        .map(|first| Task {
            weights: w.rows(first..(first + strip).min(w.rows)),
            inputs,
            outputs: Vec::with_capacity(inputs.len()),
        })
        .collect();
    for output in outputs {
        for (task, piece) in tasks.iter_mut().zip(output.chunks_mut(strip)) {
            task.outputs.push(piece);
        }
    }
    tasks
}

#[cfg(test)]
mod tests {
    use gemma4c_blocks::decode::decode_row;

    use super::super::testing::{Random, assert_close, with_threads};
    use super::*;

    fn product(w: &Matrix, x: &[f32]) -> Vec<f32> {
        let mut out = vec![f32::NAN; x.len() / w.cols * w.rows];
        matmul(w, x, &mut out);
        out
    }

    fn decoded(w: &Matrix) -> Vec<f32> {
        let mut values = vec![0.0; w.rows * w.cols];
        decode_row(w.dtype, w.bytes, &mut values);
        values
    }

    fn exact(w: &[f32], x: &[f32], cols: usize) -> Vec<f64> {
        let dot = |x: &[f32], w: &[f32]| x.iter().zip(w).map(|(x, w)| *x as f64 * *w as f64).sum();
        x.chunks(cols).flat_map(|x| w.chunks(cols).map(move |w| dot(x, w))).collect()
    }

    #[test]
    fn close_to_f64_in_every_format() {
        for dtype in DType::ALL {
            let block = dtype.layout().len;
            for (rows, cols) in [(1, 256), (3, 512), (37, 768), (301, 1280), (5, 33 * block)] {
                let bytes = Random::new(1).encoded(dtype, rows * cols);
                let w = Matrix { dtype, bytes: &bytes, rows, cols };
                for n in [1, 2, 5, 7] {
                    let x = Random::new(2).values(n * cols);
                    assert_close(&product(&w, &x), &exact(&decoded(&w), &x, cols), 2e-6);
                }
            }
        }
    }

    #[test]
    fn rows_of_floats_may_have_any_length() {
        for cols in [1, 31, 32, 33, 95] {
            let bytes = Random::new(3).encoded(DType::F16, 9 * cols);
            let w = Matrix { dtype: DType::F16, bytes: &bytes, rows: 9, cols };
            let x = Random::new(4).values(7 * cols);
            assert_close(&product(&w, &x), &exact(&decoded(&w), &x, cols), 1e-6);
            assert_eq!(product(&w, &x)[..9], product(&w, &x[..cols]));
        }
    }

    #[test]
    fn a_row_has_the_same_bits_alone_and_among_others_on_one_thread_and_on_two() {
        for dtype in DType::ALL {
            let (rows, cols) = (261, 512);
            let bytes = Random::new(5).encoded(dtype, rows * cols);
            let w = Matrix { dtype, bytes: &bytes, rows, cols };
            let x = Random::new(6).values(64 * cols);
            let all = with_threads(1, || product(&w, &x));
            assert!(all == with_threads(2, || product(&w, &x)), "{dtype}");
            for n in [1, 2, 3, 7, 13] {
                let chunked: Vec<f32> = x.chunks(n * cols).flat_map(|x| product(&w, x)).collect();
                assert!(all == chunked, "{dtype} in chunks of {n}");
            }
        }
    }

    #[test]
    fn experts_are_matrices_of_their_own() {
        for (dtype, n, k) in [(DType::Q8_0, 1, 2), (DType::Q4K, 9, 3), (DType::Q5_0, 64, 2), (DType::F32, 1, 1)] {
            let (experts, rows, cols) = (5, 70, 512);
            let bytes = Random::new(7).encoded(dtype, experts * rows * cols);
            let w = Experts { dtype, bytes: &bytes, experts, rows, cols };
            let mut random = Random::new(8);
            let ids: Vec<u32> = (0..n * k).map(|_| (random.bits() % experts as u64) as u32).collect();
            for (inputs, range) in [(n, 0..35), (n * k, 35..70), (n, 3..4)] {
                let x = random.values(inputs * cols);
                let run = || {
                    let mut out = vec![f32::NAN; n * k * range.len()];
                    expert_matmul(&w, &ids, &x, range.clone(), &mut out);
                    out
                };
                let out = with_threads(1, run);
                assert_eq!(out, with_threads(2, run));
                for (slot, out) in out.chunks(range.len()).enumerate() {
                    let input = &x[slot * inputs / (n * k) * cols..][..cols];
                    assert_eq!(out, product(&w.matrix(ids[slot] as usize, range.clone()), input));
                }
            }
        }
    }
}
