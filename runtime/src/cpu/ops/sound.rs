//! What only the frames of a sound need: convolutions along time, and attention over the rows just before.

use super::lanes;
use super::math;
use super::matmul::{Matrix, matmul};
use super::parallel::rows_in_parallel;

/// Floats of taps that are gathered at once before they are multiplied.
const GATHERED: usize = 1 << 20;

/// A 3 by 3 convolution over rows and columns of `channels` values, with stride 2 and zeros around. `width` is that of
/// a row of `x`, and a row of `weight` has the taps of one output: input channel, row, column. The taps of every output
/// are gathered and multiplied as rows.
pub fn halving_conv(weight: &Matrix, x: &[f32], width: usize, channels: usize, out: &mut [f32]) {
    let (rows, columns, taps) = (x.len() / width, width / channels, 9 * channels);
    let out_columns = columns.div_ceil(2);
    let out_width = out_columns * weight.rows;
    assert!(weight.cols == taps && out.len() == rows.div_ceil(2) * out_width);
    let rows_at_once = (GATHERED / (out_columns * taps)).max(1);
    let mut gathered = Vec::new();
    for (piece, out) in out.chunks_mut(rows_at_once * out_width).enumerate() {
        let first = piece * rows_at_once;
        gathered.clear();
        gathered.resize(out.len() / weight.rows * taps, 0.0);
        rows_in_parallel(&mut gathered, taps, |at, gathered| {
            for (at, taps) in (at..).zip(gathered.chunks_exact_mut(taps)) {
                let (row, column) = (first + at / out_columns, at % out_columns);
                for (tap, value) in taps.iter_mut().enumerate() {
                    let (channel, dy, dx) = (tap / 9, tap / 3 % 3, tap % 3);
                    // One less is before the first, which wraps around to beyond the last.
                    let (row, column) = ((2 * row + dy).wrapping_sub(1), (2 * column + dx).wrapping_sub(1));
                    if row < rows && column < columns {
                        *value = x[row * width + column * channels + channel];
                    }
                }
            }
        });
        matmul(weight, &gathered, out);
    }
}

/// `out[t] = Σ_j w[j] x[t - taps + 1 + j]` for every value of a row by itself; a row of `weight` has the taps of one
/// value.
pub fn causal_conv(weight: &Matrix, x: &[f32], out: &mut [f32]) {
    let (width, taps) = (weight.rows, weight.cols);
    assert!(x.len() == out.len() && x.len().is_multiple_of(width));
    let mut weights = vec![0.0; width * taps];
    for (row, out) in weights.chunks_exact_mut(taps).enumerate() {
        gemma4c_blocks::decode::decode_row(weight.dtype, weight.row(row), out);
    }
    rows_in_parallel(out, width, |first, piece| {
        for (row, out) in (first..).zip(piece.chunks_exact_mut(width)) {
            out.fill(0.0);
            for (tap, from) in (0..taps).filter_map(|tap| Some((tap, (row + tap + 1).checked_sub(taps)?))) {
                let x = &x[from * width..][..width];
                for ((out, x), weights) in out.iter_mut().zip(x).zip(weights.chunks_exact(taps)) {
                    *out = weights[tap].mul_add(*x, *out);
                }
            }
        }
    });
}

/// How rows look back.
pub struct Near<'a> {
    pub heads: usize,
    /// Rows that one sees, with itself.
    pub reach: usize,
    /// Scores stay below it.
    pub cap: f32,
    /// Makes of the sines and cosines of a distance what queries are multiplied by.
    pub distances: Matrix<'a>,
}

/// `softmax(cap * tanh((q·k + q·r) / cap)) v` over a row and those before it, where `r` depends on their distance.
pub fn near_attention(q: &[f32], k: &[f32], v: &[f32], near: &Near<'_>, out: &mut [f32]) {
    let width = near.distances.cols;
    let head_dim = width / near.heads;
    assert!(q.len() == out.len() && k.len() == out.len() && v.len() == out.len());
    let mut by_distance = vec![0.0; near.reach * width];
    matmul(&near.distances, &waves(near.reach, width), &mut by_distance);
    rows_in_parallel(out, width, |first, piece| {
        let mut scores = vec![0.0; near.reach];
        for (row, out) in (first..).zip(piece.chunks_exact_mut(width)) {
            let seen = near.reach.min(row + 1);
            for head in 0..near.heads {
                let columns = head * head_dim..(head + 1) * head_dim;
                let of = |all: &'_ [f32], row: usize| -> std::ops::Range<usize> {
                    debug_assert!((row + 1) * width <= all.len());
                    row * width + columns.start..row * width + columns.end
                };
                let query = &q[of(q, row)];
                for (distance, score) in scores[..seen].iter_mut().enumerate() {
                    let key = lanes::dot(query, &k[of(k, row - distance)]);
                    let place = lanes::dot(query, &by_distance[of(&by_distance, distance)]);
                    *score = near.cap * math::tanh((key + place) / near.cap);
                }
                let most = scores[..seen].iter().copied().fold(f32::NEG_INFINITY, f32::max);
                scores[..seen].iter_mut().for_each(|score| *score = math::exp(*score - most));
                let sum: f32 = scores[..seen].iter().sum();
                let out = &mut out[columns.clone()];
                out.fill(0.0);
                for (distance, weight) in scores[..seen].iter().enumerate() {
                    for (out, v) in out.iter_mut().zip(&v[of(v, row - distance)]) {
                        *out = (weight / sum).mul_add(*v, *out);
                    }
                }
            }
        }
    });
}

/// For each distance the sines, then the cosines, of its product with frequencies from 1 down to 1/10000. Taken in f64
/// and rounded once.
fn waves(reach: usize, width: usize) -> Vec<f32> {
    let half = width / 2;
    let frequency = move |i: usize| 10_000f64.powf(-(i as f64) / (half as f64 - 1.0));
    let row = |distance: usize| {
        let angle = move |i: usize| distance as f64 * frequency(i);
        (0..half).map(move |i| angle(i).sin() as f32).chain((0..half).map(move |i| angle(i).cos() as f32))
    };
    (0..reach).flat_map(row).collect()
}

#[cfg(test)]
mod tests {
    use gemma4c_blocks::DType;

    use super::super::testing::{Random, assert_close, with_threads};
    use super::*;

    fn floats(bytes: &[u8]) -> Vec<f32> {
        bytes.chunks(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    }

    #[test]
    fn convolutions_equal_their_formulae() {
        for (rows, columns, channels, outputs) in [(1, 2, 1, 3), (5, 8, 1, 4), (6, 7, 3, 2), (59, 64, 8, 5)] {
            let (width, taps) = (columns * channels, 9 * channels);
            let x = Random::new(1).values(rows * width);
            let bytes = Random::new(2).encoded(DType::F32, taps * outputs);
            let w = floats(&bytes);
            let matrix = Matrix { dtype: DType::F32, bytes: &bytes, rows: outputs, cols: taps };
            let (out_rows, out_columns) = (rows.div_ceil(2), columns.div_ceil(2));
            let run = |threads| {
                let mut out = vec![f32::NAN; out_rows * out_columns * outputs];
                with_threads(threads, || halving_conv(&matrix, &x, width, channels, &mut out));
                out
            };
            let out = run(1);
            assert!(out == run(2));
            let exact = (0..out.len()).map(|at| {
                let (row, column, output) = (at / outputs / out_columns, at / outputs % out_columns, at % outputs);
                let mut sum = 0.0;
                for (channel, dy, dx) in (0..taps).map(|tap| (tap / 9, tap / 3 % 3, tap % 3)) {
                    let (y, z) = (2 * row as i64 + dy as i64 - 1, 2 * column as i64 + dx as i64 - 1);
                    if (0..rows as i64).contains(&y) && (0..columns as i64).contains(&z) {
                        let value = x[y as usize * width + z as usize * channels + channel];
                        sum += value as f64 * w[output * taps + channel * 9 + dy * 3 + dx] as f64;
                    }
                }
                sum
            });
            assert_close(&out, &exact.collect::<Vec<_>>(), 1e-5);
        }
    }

    #[test]
    fn depthwise_convolutions_look_back_alone() {
        for (rows, width, taps) in [(1, 3, 5), (9, 4, 5), (40, 7, 3)] {
            let (x, bytes) = (Random::new(3).values(rows * width), Random::new(4).encoded(DType::F32, taps * width));
            let (w, mut out) = (floats(&bytes), vec![f32::NAN; rows * width]);
            causal_conv(&Matrix { dtype: DType::F32, bytes: &bytes, rows: width, cols: taps }, &x, &mut out);
            let exact = (0..out.len()).map(|at| {
                let (row, i) = (at / width, at % width);
                let tap = |j: usize| (row + j + 1).checked_sub(taps).map(|from| (from, w[i * taps + j]));
                (0..taps).filter_map(tap).map(|(from, w)| w as f64 * x[from * width + i] as f64).sum::<f64>()
            });
            assert_close(&out, &exact.collect::<Vec<_>>(), 1e-6);
        }
    }

    #[test]
    fn near_attention_equals_the_formula() {
        for (rows, heads, head_dim, reach) in [(1, 1, 4, 12), (30, 2, 6, 12), (5, 3, 8, 1)] {
            let width = heads * head_dim;
            let [q, k, v] = [5, 6, 7].map(|seed| Random::new(seed).values(rows * width));
            let bytes = Random::new(8).encoded(DType::F32, width * width);
            let (w, half) = (floats(&bytes), width / 2);
            let distances = Matrix { dtype: DType::F32, bytes: &bytes, rows: width, cols: width };
            let near = Near { heads, reach, cap: 0.7, distances };
            let run = |threads| {
                let mut out = vec![f32::NAN; rows * width];
                with_threads(threads, || near_attention(&q, &k, &v, &near, &mut out));
                out
            };
            let out = run(1);
            assert!(out == run(2));
            let wave = |distance: usize, i: usize| {
                let angle = distance as f64 * 10_000f64.powf(-((i % half) as f64) / (half as f64 - 1.0));
                if i < half { angle.sin() } else { angle.cos() }
            };
            let relative = |distance: usize, at: usize| {
                (0..width).map(|i| w[at * width + i] as f64 * wave(distance, i)).sum::<f64>()
            };
            let exact = (0..out.len()).map(|at| {
                let (row, i) = (at / width, at % width);
                let head = i / head_dim * head_dim;
                let score = |distance: usize| {
                    let dot = (head..head + head_dim).map(|j| {
                        let key = k[(row - distance) * width + j] as f64 + relative(distance, j);
                        q[row * width + j] as f64 * key
                    });
                    (0.7 * (dot.sum::<f64>() / 0.7).tanh()).exp()
                };
                let scores: Vec<f64> = (0..reach.min(row + 1)).map(score).collect();
                let mixed = scores.iter().enumerate().map(|(d, s)| s * v[(row - d) * width + i] as f64);
                mixed.sum::<f64>() / scores.iter().sum::<f64>()
            });
            assert_close(&out, &exact.collect::<Vec<_>>(), 1e-5);
        }
    }
}
