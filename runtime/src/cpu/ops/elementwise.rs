//! Element-wise ops. Vectors given as `weight` repeat for every row.

use super::parallel::rows_in_parallel;
use super::{math, vectorised};

/// `out = a + b`.
pub fn add(a: &[f32], b: &[f32], out: &mut [f32]) {
    binary(a, b, out, |a, b| a + b);
}

/// `out = a * b`.
pub fn mul(a: &[f32], b: &[f32], out: &mut [f32]) {
    binary(a, b, out, |a, b| a * b);
}

/// `out = x * factor`.
pub fn scale(x: &[f32], factor: f32, out: &mut [f32]) {
    unary(x, out, |x, out| {
        for (out, x) in out.iter_mut().zip(x) {
            *out = x * factor;
        }
    });
}

/// `out = x * weight` for every row of x; a weight of one value scales everything.
pub fn mul_weight(x: &[f32], weight: &[f32], out: &mut [f32]) {
    by_weight(x, weight, out, |x, weight| x * weight);
}

/// `out = x + term`.
pub fn add_constant(x: &[f32], term: f32, out: &mut [f32]) {
    unary(x, out, |x, out| {
        for (out, x) in out.iter_mut().zip(x) {
            *out = x + term;
        }
    });
}

/// `out = x + weight` for every row of x; a weight of one value is added to everything.
pub fn add_weight(x: &[f32], weight: &[f32], out: &mut [f32]) {
    by_weight(x, weight, out, |x, weight| x + weight);
}

/// `out = max(x, weight)` for every row of x; a weight of one value bounds everything. A NaN stays one.
pub fn at_least(x: &[f32], weight: &[f32], out: &mut [f32]) {
    by_weight(x, weight, out, |x, weight| if x < weight { weight } else { x });
}

/// `out = min(x, weight)`, likewise.
pub fn at_most(x: &[f32], weight: &[f32], out: &mut [f32]) {
    by_weight(x, weight, out, |x, weight| if x > weight { weight } else { x });
}

/// GELU in its tanh form.
pub fn gelu_tanh(x: &[f32], out: &mut [f32]) {
    unary(x, out, gelu_tanh_piece);
}

/// `out = 1 / (1 + e^-x)`.
pub fn sigmoid(x: &[f32], out: &mut [f32]) {
    unary(x, out, sigmoid_piece);
}

/// `out = max(x, 0)`. A NaN stays one.
pub fn relu(x: &[f32], out: &mut [f32]) {
    by_weight(x, &[0.0], out, |x, zero| if x < zero { zero } else { x });
}

/// `out = cap * tanh(x / cap)`.
pub fn softcap(x: &[f32], cap: f32, out: &mut [f32]) {
    unary(x, out, |x, out| softcap_piece(x, cap, out));
}

fn by_weight(x: &[f32], weight: &[f32], out: &mut [f32], f: impl Fn(f32, f32) -> f32 + Sync) {
    assert!(!weight.is_empty() && x.len() == out.len() && x.len().is_multiple_of(weight.len()));
    if let [weight] = weight {
        return unary(x, out, |x, out| {
            for (out, x) in out.iter_mut().zip(x) {
                *out = f(*x, *weight);
            }
        });
    }
    let width = weight.len();
    rows_in_parallel(out, width, |row, piece| {
        for (out, x) in piece.chunks_exact_mut(width).zip(x[row * width..].chunks_exact(width)) {
            for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
                *out = f(*x, *weight);
            }
        }
    });
}

fn unary(x: &[f32], out: &mut [f32], f: impl Fn(&[f32], &mut [f32]) + Sync) {
    assert_eq!(x.len(), out.len());
    rows_in_parallel(out, 1, |first, piece| f(&x[first..first + piece.len()], piece));
}

fn binary(a: &[f32], b: &[f32], out: &mut [f32], f: impl Fn(f32, f32) -> f32 + Sync) {
    assert!(a.len() == out.len() && b.len() == out.len());
    rows_in_parallel(out, 1, |first, piece| {
        for ((out, a), b) in piece.iter_mut().zip(&a[first..]).zip(&b[first..]) {
            *out = f(*a, *b);
        }
    });
}

vectorised! {
    fn gelu_tanh_piece(x: &[f32], out: &mut [f32]) {
        for (out, x) in out.iter_mut().zip(x) {
            *out = math::gelu_tanh(*x);
        }
    }

    fn sigmoid_piece(x: &[f32], out: &mut [f32]) {
        for (out, x) in out.iter_mut().zip(x) {
            *out = 1.0 / (1.0 + math::exp(-*x));
        }
    }

    fn softcap_piece(x: &[f32], cap: f32, out: &mut [f32]) {
        for (out, x) in out.iter_mut().zip(x) {
            *out = cap * math::tanh(x / cap);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Random, assert_close};
    use super::*;

    /// Sizes on both sides of the threshold for threads, none a multiple of a vector.
    const SIZES: [usize; 4] = [1, 33, 1001, 100_003];

    #[test]
    fn values() {
        for n in SIZES {
            let (a, b) = (Random::new(1).values(n), Random::new(2).values(n));
            let mut out = vec![f32::NAN; n];
            let check = |exact: &dyn Fn(usize) -> f64, out: &[f32]| {
                assert_close(out, &(0..n).map(exact).collect::<Vec<_>>(), 1e-6);
            };
            add(&a, &b, &mut out);
            check(&|i| a[i] as f64 + b[i] as f64, &out);
            mul(&a, &b, &mut out);
            check(&|i| a[i] as f64 * b[i] as f64, &out);
            scale(&a, 1.5, &mut out);
            check(&|i| a[i] as f64 * 1.5, &out);
            add_constant(&a, -1.0, &mut out);
            check(&|i| a[i] as f64 - 1.0, &out);
            sigmoid(&a, &mut out);
            check(&|i| 1.0 / (1.0 + (-a[i] as f64).exp()), &out);
            relu(&a, &mut out);
            check(&|i| (a[i] as f64).max(0.0), &out);
            softcap(&a, 0.75, &mut out);
            check(&|i| 0.75 * (a[i] as f64 / 0.75).tanh(), &out);
            gelu_tanh(&a, &mut out);
            check(
                &|i| {
                    a[i] as f64 * 0.5 * (1.0 + (0.7978845608 * (a[i] as f64 + 0.044715 * (a[i] as f64).powi(3))).tanh())
                },
                &out,
            );
        }
    }

    #[test]
    fn bounds_may_be_infinite_and_leave_nan_alone() {
        let mut out = [0.0; 3];
        at_least(&[-1e30, 1.0, f32::NAN], &[f32::NEG_INFINITY], &mut out);
        assert!(out[..2] == [-1e30, 1.0] && out[2].is_nan());
        at_most(&[-1e30, 1.0, f32::NAN], &[0.5], &mut out);
        assert!(out[..2] == [-1e30, 0.5] && out[2].is_nan());
    }

    #[test]
    fn weights_repeat_for_every_row() {
        for (rows, width) in [(1, 1), (3, 5), (100_003, 1), (1001, 101)] {
            let (x, weight) = (Random::new(1).values(rows * width), Random::new(2).values(width));
            let mut out = vec![f32::NAN; x.len()];
            mul_weight(&x, &weight, &mut out);
            assert!(out.iter().enumerate().all(|(i, out)| *out == x[i] * weight[i % width]));
            add_weight(&x, &weight, &mut out);
            assert!(out.iter().enumerate().all(|(i, out)| *out == x[i] + weight[i % width]));
            at_least(&x, &weight, &mut out);
            assert!(out.iter().enumerate().all(|(i, out)| *out == x[i].max(weight[i % width])));
            at_most(&x, &weight, &mut out);
            assert!(out.iter().enumerate().all(|(i, out)| *out == x[i].min(weight[i % width])));
        }
    }
}
