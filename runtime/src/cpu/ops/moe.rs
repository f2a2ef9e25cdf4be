//! Mixture of experts, without its products: choosing the experts, and the weighted sum of their results.

use super::math;
use super::parallel::rows_in_parallel;

/// The experts chosen for each row, best first.
#[derive(Clone, Debug, PartialEq)]
pub struct Routes {
    /// Experts a row.
    pub k: usize,
    pub ids: Vec<u32>,
    /// Softmax over the chosen logits of a row.
    pub weights: Vec<f32>,
}

/// The `k` largest of each row of `experts` logits (of equals the lower index first), weighted by softmax among
/// themselves.
pub fn route(logits: &[f32], experts: usize, k: usize) -> Routes {
    assert!(0 < k && k <= experts && logits.len().is_multiple_of(experts));
    let rows = logits.len() / experts;
    let mut routes = Routes { k, ids: Vec::with_capacity(rows * k), weights: Vec::with_capacity(rows * k) };
    let mut order: Vec<u32> = Vec::with_capacity(experts);
    for row in logits.chunks_exact(experts) {
        order.clear();
        order.extend(0..experts as u32);
        order.sort_unstable_by(|a, b| row[*b as usize].total_cmp(&row[*a as usize]).then(a.cmp(b)));
        let best = &order[..k];
        let largest = row[best[0] as usize];
        let exps = best.iter().map(|id| math::exp(row[*id as usize] - largest));
        let sum: f32 = exps.clone().sum();
        routes.ids.extend(best);
        routes.weights.extend(exps.map(|exp| exp / sum));
    }
    routes
}

/// `out = Σ weight · scale[expert] · expert's row` over each row's experts; `x` holds k rows of `width` for each row of
/// `out`.
pub fn mix_experts(x: &[f32], routes: &Routes, scale: Option<&[f32]>, width: usize, out: &mut [f32]) {
    let k = routes.k;
    assert!(x.len() == routes.ids.len() * width && out.len() * k == x.len());
    rows_in_parallel(out, width, |first, piece| {
        for (row, out) in (first..).zip(piece.chunks_exact_mut(width)) {
            out.fill(0.0);
            for slot in row * k..(row + 1) * k {
                let factor = routes.weights[slot] * scale.map_or(1.0, |scale| scale[routes.ids[slot] as usize]);
                for (out, x) in out.iter_mut().zip(&x[slot * width..]) {
                    *out += factor * x;
                }
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Random, assert_close};
    use super::*;

    #[test]
    fn the_largest_logits_win_and_ties_go_to_the_lower_index() {
        let routes = route(&[1.0, 3.0, 3.0, 2.0, /**/ 5.0, 5.0, 5.0, 5.0], 4, 3);
        assert_eq!(routes.ids, [1, 2, 3, 0, 1, 2]);
        assert_close(&routes.weights[3..], &[1.0 / 3.0; 3], 1e-7);
    }

    #[test]
    fn weights_are_the_softmax_of_the_chosen() {
        let logits = Random::new(1).values(5 * 128);
        let routes = route(&logits, 128, 8);
        for row in 0..5 {
            let slots = row * 8..row * 8 + 8;
            let exps: Vec<f64> =
                routes.ids[slots.clone()].iter().map(|id| (logits[row * 128 + *id as usize] as f64).exp()).collect();
            let sum: f64 = exps.iter().sum();
            assert_close(&routes.weights[slots.clone()], &exps.iter().map(|e| e / sum).collect::<Vec<_>>(), 1e-6);
            let worst = exps.iter().fold(f64::INFINITY, |a, b| a.min(*b));
            let left_out = (0..128).filter(|id| !routes.ids[slots.clone()].contains(id));
            assert!(left_out.into_iter().all(|id| (logits[row * 128 + id as usize] as f64).exp() <= worst));
        }
    }

    #[test]
    fn mixing_is_a_weighted_sum() {
        let (rows, k, width) = (70, 3, 601);
        let x = Random::new(2).values(rows * k * width);
        let scale = Random::new(3).values(8);
        let routes = route(&Random::new(4).values(rows * 8), 8, k);
        for scale in [None, Some(scale.as_slice())] {
            let mut out = vec![f32::NAN; rows * width];
            mix_experts(&x, &routes, scale, width, &mut out);
            let exact = (0..rows * width).map(|at| {
                (0..k)
                    .map(|j| {
                        let slot = at / width * k + j;
                        let scale = scale.map_or(1.0, |s| s[routes.ids[slot] as usize]);
                        routes.weights[slot] as f64 * scale as f64 * x[slot * width + at % width] as f64
                    })
                    .sum()
            });
            assert_close(&out, &exact.collect::<Vec<f64>>(), 1e-6);
        }
    }
}
