//! Causal attention over a layer's keys and values, with scale 1.
//!
//! Keys are taken in segments of 256 absolute positions. A segment's scores, their maximum, exponentials and weighted values depend
//! on the query and the segment alone, and segments are folded in order; so a long context can be shared
//! among threads, or a chunk of rows walked through by one, with the same bits.

use std::ops::Range;

use rayon::prelude::*;

use super::super::kv::KvLayer;
use super::{lanes, math, vectorised};

/// Positions in a segment.
const SEGMENT: usize = 256;

/// Attends from the rows of `q` (n × heads · head_dim), which are at `first_position` and on, to all positions up to their own;
/// with a window, to the `window` latest of these, their own among them.
///
/// The rows' own keys and values are in `kv` already. Query head h reads key and value head `h / (heads / kv.heads())`.
pub fn attention(q: &[f32], kv: &KvLayer, first_position: usize, window: Option<usize>, heads: usize, out: &mut [f32]) {
    let (group, width) = (heads / kv.heads(), heads * kv.head_dim());
    assert!(heads.is_multiple_of(kv.heads()) && q.len() == out.len() && q.len().is_multiple_of(width));
    let rows = q.len() / width;
    let reach = window.map_or(first_position + rows, |window| (window + rows - 1).min(first_position + rows));
    assert!(reach <= kv.capacity(), "keys this call needs have been overwritten");

    // The heads that share a key head lie side by side in a row: one query of the row.
    let query_len = group * kv.head_dim();
    let queries: Vec<Query> = q
        .chunks_exact(query_len)
        .enumerate()
        .map(|(i, q)| {
            let end = first_position + i / kv.heads() + 1;
            Query { q, head: i % kv.heads(), first: window.map_or(0, |window| end.saturating_sub(window)), end }
        })
        .collect();
    let mut outputs: Vec<&mut [f32]> = out.chunks_exact_mut(query_len).collect();
    outputs.par_iter_mut().zip(&queries).for_each(|(out, query)| {
        let partials: Vec<Partial> =
            query.segments().into_par_iter().map(|segment| partial(query, kv, group, segment)).collect();
        fold(&partials, out);
    });
}

/// What the heads of one row that share a key head ask for: positions `first..end` of that head.
struct Query<'a> {
    q: &'a [f32],
    head: usize,
    first: usize,
    end: usize,
}

impl Query<'_> {
    fn segments(&self) -> Range<usize> {
        self.first / SEGMENT..self.end.div_ceil(SEGMENT)
    }
}

/// A segment's contribution, for each head of a query: values weighted by exponentials relative to the largest score.
struct Partial {
    heads: Vec<PartialHead>,
}

struct PartialHead {
    largest: f32,
    sum: f32,
    values: Vec<f32>,
}

vectorised! {
    fn partial(query: &Query, kv: &KvLayer, group: usize, segment: usize) -> Partial {
        let positions = query.first.max(segment * SEGMENT)..query.end.min((segment + 1) * SEGMENT);
        let dim = kv.head_dim();
        let mut scores = [0.0; SEGMENT];
        let scores = &mut scores[..positions.len()];
        let heads = (0..group).map(|head| {
            let q = &query.q[head * dim..][..dim];
            for (score, position) in scores.iter_mut().zip(positions.clone()) {
                *score = lanes::dot(q, kv.key(position, query.head));
            }
            let largest = scores.iter().fold(f32::NEG_INFINITY, |a, b| a.max(*b));
            for score in scores.iter_mut() {
                *score = math::exp(*score - largest);
            }
            let mut values = vec![0.0f32; dim];
            for (weight, position) in scores.iter().zip(positions.clone()) {
                for (out, value) in values.iter_mut().zip(kv.value(position, query.head)) {
                    *out = weight.mul_add(*value, *out);
                }
            }
            PartialHead { largest, sum: lanes::sum(scores), values }
        });
        Partial { heads: heads.collect() }
    }

    /// Folds the segments in order: whenever a larger score turns up, what has been summed shrinks to it.
    fn fold(partials: &[Partial], out: &mut [f32]) {
        let dim = partials[0].heads[0].values.len();
        for (head, out) in out.chunks_exact_mut(dim).enumerate() {
            out.fill(0.0);
            let (mut largest, mut sum) = (f32::NEG_INFINITY, 0.0f32);
            for partial in partials.iter().map(|partial| &partial.heads[head]) {
                let new = largest.max(partial.largest);
                let (old_factor, factor) = (math::exp(largest - new), math::exp(partial.largest - new));
                largest = new;
                sum = sum * old_factor + partial.sum * factor;
                for (out, value) in out.iter_mut().zip(&partial.values) {
                    *out = *out * old_factor + value * factor;
                }
            }
            for out in out {
                *out /= sum;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Random, assert_close, with_threads};
    use super::*;

    /// A layer filled with random rows 0..positions, chunk by chunk as a session would.
    fn filled(capacity: usize, positions: usize, heads: usize, dim: usize) -> (KvLayer, Vec<f32>, Vec<f32>) {
        let len = positions * heads * dim;
        let (keys, values) = (Random::new(9).values(len), Random::new(10).values(len));
        let mut kv = KvLayer::new(capacity, heads, dim);
        for (i, (k, v)) in keys.chunks(heads * dim).zip(values.chunks(heads * dim)).enumerate() {
            kv.append(i, k, v);
        }
        (kv, keys, values)
    }

    fn attended(q: &[f32], kv: &KvLayer, first: usize, window: Option<usize>, heads: usize) -> Vec<f32> {
        let mut out = vec![f32::NAN; q.len()];
        attention(q, kv, first, window, heads, &mut out);
        out
    }

    fn exact(
        q: &[f32],
        keys: &[f32],
        values: &[f32],
        first: usize,
        window: Option<usize>,
        heads: usize,
        kv_heads: usize,
        dim: usize,
    ) -> Vec<f64> {
        let mut out = vec![];
        for (i, q) in q.chunks(dim).enumerate() {
            let (position, head) = (first + i / heads, i % heads / (heads / kv_heads));
            let row = |rows: &'_ [f32], p: usize| {
                rows[(p * kv_heads + head) * dim..][..dim].iter().map(|x| *x as f64).collect::<Vec<_>>()
            };
            let seen: Vec<usize> = (0..=position).filter(|p| window.is_none_or(|w| position - p < w)).collect();
            let scores: Vec<f64> =
                seen.iter().map(|p| row(keys, *p).iter().zip(q).map(|(k, q)| k * *q as f64).sum()).collect();
            let largest = scores.iter().fold(f64::NEG_INFINITY, |a, b| a.max(*b));
            let sum: f64 = scores.iter().map(|s| (s - largest).exp()).sum();
            let mut head_out = vec![0.0; dim];
            for (p, score) in seen.iter().zip(&scores) {
                for (out, v) in head_out.iter_mut().zip(row(values, *p)) {
                    *out += (score - largest).exp() / sum * v;
                }
            }
            out.extend(head_out);
        }
        out
    }

    #[test]
    fn close_to_f64_for_every_grouping_and_window_edge() {
        for (kv_heads, group, dim) in [(1, 1, 32), (2, 2, 40), (1, 8, 64), (3, 5, 33), (1, 16, 32)] {
            let heads = kv_heads * group;
            for (first, rows) in [(0, 1), (0, 5), (255, 3), (600, 2)] {
                let (kv, keys, values) = filled(first + rows, first + rows, kv_heads, dim);
                let q = Random::new(1).values(rows * heads * dim);
                for window in [None, Some(1), Some(2), Some(255), Some(256), Some(257), Some(10_000)] {
                    let out = attended(&q, &kv, first, window, heads);
                    assert_close(&out, &exact(&q, &keys, &values, first, window, heads, kv_heads, dim), 3e-6);
                }
            }
        }
    }

    #[test]
    fn a_ring_of_window_and_chunk_is_enough() {
        let (window, chunk, kv_heads, dim) = (300, 7, 2, 32);
        let (whole, ..) = filled(1000, 1000, kv_heads, dim);
        for end in [7, 300, 307, 308, 614, 1000] {
            let (ring, ..) = filled(window + chunk, end, kv_heads, dim);
            let q = Random::new(2).values(chunk * 4 * dim);
            let attend = |kv| attended(&q, kv, end - chunk, Some(window), 4);
            assert!(attend(&ring) == attend(&whole), "{end} positions");
        }
    }

    #[test]
    fn a_row_has_the_same_bits_alone_and_among_others_on_one_thread_and_on_two() {
        let (heads, kv_heads, dim, first, rows) = (8, 2, 64, 700, 64);
        let (kv, ..) = filled(first + rows, first + rows, kv_heads, dim);
        let q = Random::new(3).values(rows * heads * dim);
        for window in [None, Some(512)] {
            let all = with_threads(1, || attended(&q, &kv, first, window, heads));
            assert!(all == with_threads(2, || attended(&q, &kv, first, window, heads)));
            for n in [1, 7, 33] {
                let width = heads * dim;
                let parts = q.chunks(n * width).enumerate();
                let chunked: Vec<f32> =
                    parts.flat_map(|(i, q)| attended(q, &kv, first + i * n, window, heads)).collect();
                assert!(all == chunked, "in chunks of {n}");
            }
        }
    }

    #[test]
    fn scores_far_apart_do_not_overflow() {
        let mut kv = KvLayer::new(600, 1, 32);
        for position in 0..600 {
            kv.append(position, &[position as f32 * 10.0; 32], &[position as f32; 32]);
        }
        assert_eq!(attended(&[1.0; 32], &kv, 599, None, 1), [599.0; 32]);
        assert_eq!(attended(&[-1.0; 32], &kv, 599, None, 1), [0.0; 32]);
    }
}
