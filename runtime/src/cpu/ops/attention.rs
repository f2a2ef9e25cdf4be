//! Attention with scale 1: causal, over a layer's keys and values, or of all rows over all rows.
//!
//! Keys are taken in segments of 256 absolute positions, as in split-KV attention. A segment's result for a query (the
//! largest score, the sum of the exponentials relative to it, the values weighted by them) depends on the query and the
//! segment alone, and segments are merged in order. So a long context can be shared among threads, and a chunk of rows
//! can walk through the segments together, with the same bits.

use std::ops::Range;

use rayon::prelude::*;

use super::super::kv::KvView;
use super::{lanes, math, tiles, vectorised};

/// Positions in a segment.
const SEGMENT: usize = 256;
/// Rows that go through the segments together, while a segment's keys and values are in the cache.
const ROWS: usize = 16;

/// Rows at consecutive positions of one sequence, whose own keys and values are appended already.
#[derive(Clone, Copy, Debug)]
pub struct Span<'a> {
    pub kv: KvView<'a>,
    pub first_position: usize,
    pub rows: usize,
}

/// Attends from the rows of `q` (n × heads · head_dim), which are those of `spans` one after the other, to all
/// positions of their own sequence up to their own; with a window, to the `window` latest of these, their own among
/// them. A row at a position in one of the ranges `ahead`, which are in order, sees the rest of its range as well.
///
/// Query head h reads key and value head `h / (heads / kv.heads())`.
pub fn attention(
    q: &[f32],
    spans: &[Span<'_>],
    window: Option<usize>,
    ahead: &[Range<usize>],
    heads: usize,
    out: &mut [f32],
) {
    let Some(Span { kv, .. }) = spans.first() else { return };
    let (kv_heads, width) = (kv.heads(), heads * kv.head_dim());
    let rows: usize = spans.iter().map(|span| span.rows).sum();
    assert!(heads.is_multiple_of(kv_heads) && q.len() == out.len() && q.len() == rows * width);

    let mut blocks = Blocks::default();
    let mut rows = q.chunks_exact(width).zip(out.chunks_exact_mut(width));
    for Span { kv, first_position, rows: count } in spans {
        let end = first_position + count;
        let reach = window.map_or(end, |window| (window + count).saturating_sub(1).min(end));
        assert!(kv.has_room_for(reach, end), "keys this call needs have been overwritten");
        blocks.add(*kv, heads, rows.by_ref().take(*count), |row| {
            let own = first_position + row;
            let last = ahead.iter().find(|range| range.contains(&own)).map_or(own + 1, |range| range.end);
            window.map_or(0, |window| (own + 1).saturating_sub(window))..last
        });
    }
    blocks.attend();
}

/// Attends from every row of `q` (n × heads · head_dim) to every row of `k` and `v`, which are as many and as wide.
pub fn full_attention(q: &[f32], k: &[f32], v: &[f32], heads: usize, width: usize, out: &mut [f32]) {
    assert!(width.is_multiple_of(heads) && q.len().is_multiple_of(width));
    assert!(k.len() == q.len() && v.len() == q.len() && out.len() == q.len());
    let all = q.len() / width;
    let mut blocks = Blocks::default();
    let rows = q.chunks_exact(width).zip(out.chunks_exact_mut(width));
    blocks.add(KvView::of_rows(k, v, heads, width / heads), heads, rows, |_| 0..all);
    blocks.attend();
}

/// All of a call, as pieces that threads can share.
#[derive(Default)]
struct Blocks<'a> {
    blocks: Vec<Block<'a>>,
    /// For each block where its rows' results go.
    outputs: Vec<Vec<&'a mut [f32]>>,
}

impl<'a> Blocks<'a> {
    /// Adds the queries of some rows, each with the place of its result; row i looks at `positions(i)`.
    fn add(
        &mut self,
        kv: KvView<'a>,
        heads: usize,
        rows: impl Iterator<Item = (&'a [f32], &'a mut [f32])>,
        positions: impl Fn(usize) -> Range<usize>,
    ) {
        let (kv_heads, group) = (kv.heads(), heads / kv.heads());
        // The query heads of a GQA group are adjacent in a row.
        let group_len = group * kv.head_dim();
        for (row, (q, out)) in rows.enumerate() {
            if row.is_multiple_of(ROWS) {
                let block = |head| Block { kv, head, group, rows: Vec::with_capacity(ROWS) };
                self.blocks.extend((0..kv_heads).map(block));
                self.outputs.extend((0..kv_heads).map(|_| Vec::with_capacity(ROWS)));
            }
            let (positions, first) = (positions(row), self.blocks.len() - kv_heads);
            for (head, (q, out)) in q.chunks_exact(group_len).zip(out.chunks_exact_mut(group_len)).enumerate() {
                self.blocks[first + head].rows.push(Row { q, positions: positions.clone() });
                self.outputs[first + head].push(out);
            }
        }
    }

    fn attend(self) {
        if self.blocks.is_empty() {
            return;
        }
        // Few blocks, as in decoding: several segments of each at a time, so that no thread is idle.
        let at_once = (2 * rayon::current_num_threads()).div_ceil(self.blocks.len());
        self.blocks.par_iter().zip(self.outputs).for_each(|(block, outputs)| block.attend(at_once, outputs));
    }
}

/// Some rows' queries for one key head.
struct Block<'a> {
    kv: KvView<'a>,
    head: usize,
    /// Query heads in the GQA group of this key head.
    group: usize,
    rows: Vec<Row<'a>>,
}

struct Row<'a> {
    /// The queries of the GQA group, one after the other.
    q: &'a [f32],
    /// The positions they attend to.
    positions: Range<usize>,
}

/// The running softmax state of each query of a block.
struct Partial {
    /// Per query: the largest score, and the sum of exponentials relative to it; zero if no position was in reach.
    weights: Vec<(f32, f32)>,
    /// Per query: the values weighted by those exponentials.
    values: Vec<f32>,
}

impl Block<'_> {
    fn attend(&self, at_once: usize, outputs: Vec<&mut [f32]>) {
        let reach = self.reach();
        let segments: Vec<usize> = (reach.start / SEGMENT..reach.end.div_ceil(SEGMENT)).collect();
        let mut state = self.nothing();
        for segments in segments.chunks(at_once) {
            match segments {
                [segment] => self.fold(&mut state, &self.partial(*segment)),
                _ => {
                    let partials: Vec<Partial> = segments.par_iter().map(|segment| self.partial(*segment)).collect();
                    partials.iter().for_each(|partial| self.fold(&mut state, partial));
                }
            }
        }
        let dim = self.kv.head_dim();
        let sums = state.weights.iter().map(|(_, sum)| *sum);
        let heads = outputs.into_iter().flat_map(|out| out.chunks_exact_mut(dim));
        for ((out, values), sum) in heads.zip(state.values.chunks_exact(dim)).zip(sums) {
            for (out, value) in out.iter_mut().zip(values) {
                *out = value / sum;
            }
        }
    }

    /// All positions that any of the rows looks at.
    fn reach(&self) -> Range<usize> {
        self.rows[0].positions.start..self.rows[self.rows.len() - 1].positions.end
    }

    fn nothing(&self) -> Partial {
        let queries = self.rows.len() * self.group;
        let weights = vec![(f32::NEG_INFINITY, 0.0); queries];
        Partial { weights, values: vec![0.0; queries * self.kv.head_dim()] }
    }

    fn partial(&self, segment: usize) -> Partial {
        let (dim, group) = (self.kv.head_dim(), self.group);
        let segment = segment * SEGMENT..(segment + 1) * SEGMENT;
        let seen = intersection(&segment, &self.reach());
        let keys: Vec<&[f32]> = seen.clone().map(|position| self.kv.key(position, self.head)).collect();
        let values: Vec<&[f32]> = seen.clone().map(|position| self.kv.value(position, self.head)).collect();
        let queries: Vec<&[f32]> = self.rows.iter().flat_map(|row| row.q.chunks_exact(dim)).collect();
        let mut scores = vec![0.0; queries.len() * seen.len()];
        tiles::all_dots(&keys, &queries, &mut scores.chunks_exact_mut(seen.len()).collect::<Vec<_>>());

        let mut partial = self.nothing();
        let scores_of_rows = scores.chunks_exact_mut(group * seen.len());
        let weights_of_rows = partial.weights.chunks_exact_mut(group);
        let values_of_rows = partial.values.chunks_exact_mut(group * dim);
        for (((row, scores), weights), out) in
            self.rows.iter().zip(scores_of_rows).zip(weights_of_rows).zip(values_of_rows)
        {
            // Scores beyond a row's own reach were computed along with its neighbours' and are left out.
            let own = intersection(&seen, &row.positions);
            if own.is_empty() {
                continue;
            }
            let own = own.start - seen.start..own.end - seen.start;
            for (scores, weights) in scores.chunks_exact_mut(seen.len()).zip(weights) {
                *weights = exponentials(&mut scores[own.clone()]);
            }
            let scores: Vec<&[f32]> = scores.chunks_exact(seen.len()).map(|scores| &scores[own.clone()]).collect();
            tiles::weighted_sums(&scores, &values[own], out);
        }
        partial
    }

    /// Merges the state of a later segment: the one with the smaller maximum score is rescaled to the other's.
    fn fold(&self, state: &mut Partial, later: &Partial) {
        let dim = self.kv.head_dim();
        let pairs = state.values.chunks_exact_mut(dim).zip(later.values.chunks_exact(dim));
        for (((largest, sum), (later_largest, later_sum)), (values, later_values)) in
            state.weights.iter_mut().zip(&later.weights).zip(pairs)
        {
            if *later_sum == 0.0 {
                continue;
            }
            let new = largest.max(*later_largest);
            let (factor, later_factor) = (math::exp(*largest - new), math::exp(later_largest - new));
            *largest = new;
            *sum = *sum * factor + later_sum * later_factor;
            for (value, later) in values.iter_mut().zip(later_values) {
                *value = *value * factor + later * later_factor;
            }
        }
    }
}

fn intersection(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

vectorised! {
    /// Replaces scores by exponentials relative to the largest; gives that score and their sum.
    fn exponentials(scores: &mut [f32]) -> (f32, f32) {
        let largest = lanes::largest(scores);
        for score in scores.iter_mut() {
            *score = math::exp(*score - largest);
        }
        (largest, lanes::sum(scores))
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::kv::{KvMemory, Pages};
    use super::super::testing::{Random, assert_close, with_threads};
    use super::*;

    const ALONE: Pages<'_> = Pages { table: &[0], entries: 1 };

    /// A layer to which random rows 0..positions have been appended.
    fn filled(capacity: usize, positions: usize, heads: usize, dim: usize) -> KvMemory {
        let (mut keys, mut values) = (Random::new(9), Random::new(10));
        let mut kv = KvMemory::of_layer(1, capacity, heads, dim);
        for position in 0..positions {
            kv.append(0, ALONE, position, &keys.values(heads * dim), &values.values(heads * dim));
        }
        kv
    }

    fn attended(q: &[f32], kv: &KvMemory, first: usize, window: Option<usize>, heads: usize) -> Vec<f32> {
        let mut out = vec![f32::NAN; q.len()];
        let kv = kv.view(0, ALONE);
        let span = Span { kv, first_position: first, rows: q.len() / (heads * kv.head_dim()) };
        attention(q, &[span], window, &[], heads, &mut out);
        out
    }

    fn exact(q: &[f32], kv: &KvMemory, first: usize, window: Option<usize>, heads: usize) -> Vec<f64> {
        let (mut out, kv) = (vec![], kv.view(0, ALONE));
        for (i, q) in q.chunks(kv.head_dim()).enumerate() {
            let (position, head) = (first + i / heads, i % heads / (heads / kv.heads()));
            let seen: Vec<usize> = (0..=position).filter(|p| window.is_none_or(|w| position - p < w)).collect();
            let dot = |key: &[f32]| key.iter().zip(q).map(|(k, q)| *k as f64 * *q as f64).sum::<f64>();
            let scores: Vec<f64> = seen.iter().map(|p| dot(kv.key(*p, head))).collect();
            let largest = scores.iter().fold(f64::NEG_INFINITY, |a, b| a.max(*b));
            let sum: f64 = scores.iter().map(|score| (score - largest).exp()).sum();
            let mut mixed = vec![0.0; kv.head_dim()];
            for (p, score) in seen.iter().zip(&scores) {
                for (mixed, value) in mixed.iter_mut().zip(kv.value(*p, head)) {
                    *mixed += (score - largest).exp() / sum * *value as f64;
                }
            }
            out.extend(mixed);
        }
        out
    }

    #[test]
    fn close_to_f64_for_every_grouping_and_window_edge() {
        for (kv_heads, group, dim) in [(1, 1, 32), (2, 2, 40), (1, 8, 64), (3, 5, 33), (1, 16, 32)] {
            let heads = kv_heads * group;
            for (first, rows) in [(0, 1), (0, 5), (240, 40), (600, 2)] {
                let kv = filled(first + rows, first + rows, kv_heads, dim);
                let q = Random::new(1).values(rows * heads * dim);
                for window in [None, Some(1), Some(2), Some(255), Some(256), Some(257), Some(10_000)] {
                    let out = attended(&q, &kv, first, window, heads);
                    assert_close(&out, &exact(&q, &kv, first, window, heads), 3e-6);
                }
            }
        }
    }

    #[test]
    fn pages_of_window_and_chunk_are_enough() {
        let (window, chunk, kv_heads, dim) = (300, 7, 2, 32);
        let whole = filled(1000, 1000, kv_heads, dim);
        for end in [7, 300, 307, 308, 614, 1000] {
            let ring = filled(window + chunk, end, kv_heads, dim);
            let q = Random::new(2).values(chunk * 4 * dim);
            let attend = |kv| attended(&q, kv, end - chunk, Some(window), 4);
            assert!(attend(&ring) == attend(&whole), "{end} positions");
        }
    }

    #[test]
    fn a_row_has_the_same_bits_alone_and_among_others_on_one_thread_and_on_two() {
        let (heads, kv_heads, dim, first, rows) = (8, 2, 64, 700, 64);
        let kv = filled(first + rows, first + rows, kv_heads, dim);
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

    /// Rows of several sequences in one call, in pages of any number: each has the bits it has alone.
    #[test]
    fn a_row_has_the_same_bits_among_rows_of_other_sequences() {
        let (heads, kv_heads, dim, width) = (4, 2, 32, 4 * 32);
        let tables: [&[u32]; 3] = [&[4, 0, 2], &[1], &[5, 3]];
        let ends = [700, 3, 300];
        for window in [None, Some(100)] {
            // Of a window the first sequence has two pages, over and over.
            let entries = if window.is_none() { 3 } else { 2 };
            let pages = |i: usize| Pages { table: tables[i], entries };
            let mut together = KvMemory::of_layer(6, 256, kv_heads, dim);
            let mut alone = vec![];
            let q = Random::new(5).values(3 * width);
            for (i, end) in ends.into_iter().enumerate() {
                let mut own = KvMemory::of_layer(1, 1000, kv_heads, dim);
                let mut random = Random::new(20 + i as u64);
                for position in 0..end {
                    let (keys, values) = (random.values(kv_heads * dim), random.values(kv_heads * dim));
                    own.append(0, ALONE, position, &keys, &values);
                    together.append(0, pages(i), position, &keys, &values);
                }
                alone.extend(attended(&q[i * width..][..width], &own, end - 1, window, heads));
            }
            let spans: Vec<Span> =
                (0..3).map(|i| Span { kv: together.view(0, pages(i)), first_position: ends[i] - 1, rows: 1 }).collect();
            let mut out = vec![f32::NAN; q.len()];
            attention(&q, &spans, window, &[], heads, &mut out);
            assert!(out == alone, "window {window:?}");
        }
    }

    #[test]
    fn full_attention_is_what_the_last_row_of_a_sequence_sees() {
        for (rows, heads, dim) in [(1, 1, 32), (63, 3, 64), (270, 2, 72)] {
            let width = heads * dim;
            let kv = filled(rows, rows, heads, dim);
            let [k, v] =
                kv.page(0).chunks_exact(rows * width).map(<[f32]>::to_vec).collect::<Vec<_>>().try_into().unwrap();
            let q = Random::new(4).values(rows * width);
            let mut out = vec![f32::NAN; q.len()];
            with_threads(2, || full_attention(&q, &k, &v, heads, width, &mut out));
            let alone = q.chunks(width).flat_map(|q| attended(q, &kv, rows - 1, None, heads));
            assert!(out == alone.collect::<Vec<_>>(), "{rows} rows");
        }
    }

    /// A row that sees ahead has the bits of the last row it sees, with a window that reaches as far back.
    #[test]
    fn rows_of_a_range_see_its_end() {
        let (heads, kv_heads, dim, width, window) = (4, 2, 32, 4 * 32, 100);
        let kv = filled(400, 400, kv_heads, dim);
        let (first, rows, ahead) = (250, 150, [260..300, 310..399]);
        let q = Random::new(6).values(rows * width);
        let span = Span { kv: kv.view(0, ALONE), first_position: first, rows };
        let mut out = vec![f32::NAN; q.len()];
        attention(&q, &[span], Some(window), &ahead, heads, &mut out);
        for (row, (q, out)) in q.chunks(width).zip(out.chunks(width)).enumerate() {
            let own = first + row;
            let last = ahead.iter().find(|range| range.contains(&own)).map_or(own, |range| range.end - 1);
            assert!(out == attended(q, &kv, last, Some(window + last - own), heads), "position {own}");
        }
    }

    #[test]
    fn scores_far_apart_do_not_overflow() {
        let mut kv = KvMemory::of_layer(1, 600, 1, 32);
        for position in 0..600 {
            kv.append(0, ALONE, position, &[position as f32 * 10.0; 32], &[position as f32; 32]);
        }
        assert_eq!(attended(&[1.0; 32], &kv, 599, None, 1), [599.0; 32]);
        assert_eq!(attended(&[-1.0; 32], &kv, 599, None, 1), [0.0; 32]);
    }
}
