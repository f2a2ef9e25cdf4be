//! Norms: RMS norms over whole rows or over each head of a row, and the mean that a layer norm takes off before one.

use super::parallel::rows_in_parallel;
use super::{lanes, vectorised};

/// `out = x * (mean(x²) + eps)^-0.5 * weight` over each `group` consecutive values; no weight means ones.
pub fn rms_norm(x: &[f32], weight: Option<&[f32]>, group: usize, eps: f32, out: &mut [f32]) {
    assert!(group > 0 && x.len() == out.len() && x.len().is_multiple_of(group));
    assert!(weight.is_none_or(|weight| weight.len() == group));
    rows_in_parallel(out, group, |row, out| norm_groups(&x[row * group..][..out.len()], weight, group, eps, out));
}

/// `out = x - mean(x)` over each row of `width`.
pub fn sub_mean(x: &[f32], width: usize, out: &mut [f32]) {
    assert!(width > 0 && x.len() == out.len() && x.len().is_multiple_of(width));
    rows_in_parallel(out, width, |row, out| centre_rows(&x[row * width..][..out.len()], width, out));
}

vectorised! {
    fn centre_rows(x: &[f32], width: usize, out: &mut [f32]) {
        for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
            let mean = lanes::sum(x) / width as f32;
            for (out, x) in out.iter_mut().zip(x) {
                *out = x - mean;
            }
        }
    }

    fn norm_groups(x: &[f32], weight: Option<&[f32]>, group: usize, eps: f32, out: &mut [f32]) {
        for (x, out) in x.chunks_exact(group).zip(out.chunks_exact_mut(group)) {
            let factor = 1.0 / (lanes::dot(x, x) / group as f32 + eps).sqrt();
            match weight {
                Some(weight) => {
                    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
                        *out = x * factor * weight;
                    }
                }
                None => {
                    for (out, x) in out.iter_mut().zip(x) {
                        *out = x * factor;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Random, assert_close, with_threads};
    use super::*;

    #[test]
    fn equals_the_formula() {
        for (groups, group) in [(1, 1), (3, 7), (2, 256), (5, 1536), (300, 255)] {
            let (x, weight) = (Random::new(3).values(groups * group), Random::new(4).values(group));
            for weight in [None, Some(weight.as_slice())] {
                let mut out = vec![f32::NAN; x.len()];
                rms_norm(&x, weight, group, 1e-6, &mut out);
                let exact = x.chunks(group).flat_map(|x| {
                    let mean = x.iter().map(|x| (*x as f64).powi(2)).sum::<f64>() / group as f64;
                    x.iter()
                        .enumerate()
                        .map(move |(i, x)| *x as f64 / (mean + 1e-6).sqrt() * weight.map_or(1.0, |w| w[i] as f64))
                });
                assert_close(&out, &exact.collect::<Vec<_>>(), 1e-6);
            }
        }
    }

    #[test]
    fn rows_lose_their_mean() {
        for (rows, width) in [(1, 1), (3, 7), (70, 6912)] {
            let x = Random::new(6).values(rows * width);
            let mut out = vec![f32::NAN; x.len()];
            sub_mean(&x, width, &mut out);
            let exact = x.chunks(width).flat_map(|x| {
                let mean = x.iter().map(|x| *x as f64).sum::<f64>() / width as f64;
                x.iter().map(move |x| *x as f64 - mean)
            });
            assert_close(&out, &exact.collect::<Vec<_>>(), 1e-6);
        }
    }

    #[test]
    fn zeros_and_tiny_values_stay_finite() {
        let mut out = [f32::NAN; 4];
        rms_norm(&[0.0; 4], None, 4, 1e-6, &mut out);
        assert_eq!(out, [0.0; 4]);
        rms_norm(&[1e-30; 4], None, 4, 1e-6, &mut out);
        assert!(out.iter().all(|out| (out / 1e-27 - 1.0).abs() < 1e-6));
    }

    #[test]
    fn independent_of_threads_and_neighbours() {
        let (x, group) = (Random::new(5).values(64 * 1537), 1537);
        let norm = |x: &[f32]| {
            let mut out = vec![0.0; x.len()];
            rms_norm(x, None, group, 1e-6, &mut out);
            out
        };
        let all = with_threads(1, || norm(&x));
        assert!(all == with_threads(2, || norm(&x)));
        assert!(all == x.chunks(group).flat_map(norm).collect::<Vec<_>>());
    }
}
