//! Rotary position embedding on halves: element i of a head pairs with i + head_dim / 2.

use std::sync::{Arc, Mutex, PoisonError};

use super::parallel::rows_in_parallel;

/// The frequencies of one kind of layer, and the angles last asked for.
///
/// All layers of a kind share one and rotate the same positions in a pass, so the sines and cosines of a pass are worth
/// keeping.
#[derive(Debug)]
pub struct RopeTable {
    /// One a pair: `base^(-2i / head_dim) / factor`.
    inverse_frequencies: Vec<f32>,
    latest: Mutex<Arc<Angles>>,
}

/// Cosine and sine of each pair's angle, for each position.
#[derive(Debug, Default)]
pub(super) struct Angles {
    positions: Vec<usize>,
    cos_sin: Vec<(f32, f32)>,
}

impl Angles {
    /// Rotates one head of the row whose position was the `row`-th.
    #[inline(always)]
    pub(super) fn turn(&self, row: usize, head: &mut [f32]) {
        let pairs = head.len() / 2;
        let (left, right) = head.split_at_mut(pairs);
        for ((left, right), (cos, sin)) in left.iter_mut().zip(right).zip(&self.cos_sin[row * pairs..]) {
            (*left, *right) = (*left * cos - *right * sin, *right * cos + *left * sin);
        }
    }
}

impl RopeTable {
    /// `factors` divide the frequencies, one a pair; a huge factor leaves its pair as it is.
    pub fn new(base: f32, head_dim: usize, factors: Option<&[f32]>) -> RopeTable {
        let pairs = head_dim / 2;
        assert!(head_dim.is_multiple_of(2) && factors.is_none_or(|factors| factors.len() == pairs));
        let frequency = |i: usize| (base as f64).powf(-2.0 * i as f64 / head_dim as f64) as f32;
        let inverse_frequencies = match factors {
            Some(factors) => factors.iter().enumerate().map(|(i, factor)| frequency(i) / factor).collect(),
            None => (0..pairs).map(frequency).collect(),
        };
        RopeTable { inverse_frequencies, latest: Mutex::default() }
    }

    /// Whether the two rotate alike, so that one could serve for both.
    pub fn same_as(&self, other: &RopeTable) -> bool {
        self.inverse_frequencies == other.inverse_frequencies
    }

    pub(super) fn angles(&self, positions: &[usize]) -> Arc<Angles> {
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        if latest.positions != positions {
            let cos_sin = positions
                .iter()
                .flat_map(|position| self.inverse_frequencies.iter().map(move |f| *position as f32 * f))
                // The angle is rounded to f32, as in the reference implementation; its sine and cosine are exact.
                .map(|angle| (angle as f64).sin_cos())
                .map(|(sin, cos)| (cos as f32, sin as f32))
                .collect();
            *latest = Arc::new(Angles { positions: positions.to_vec(), cos_sin });
        }
        latest.clone()
    }
}

/// Rotates the rows of `x`, each of `heads` heads; row r is at `positions[r]`.
pub fn rope(x: &mut [f32], heads: usize, head_dim: usize, positions: &[usize], table: &RopeTable) {
    let (width, pairs) = (heads * head_dim, head_dim / 2);
    assert!(pairs == table.inverse_frequencies.len() && x.len() == positions.len() * width);
    let angles = table.angles(positions);
    rows_in_parallel(x, width, |first, piece| {
        for (index, row) in (first..).zip(piece.chunks_exact_mut(width)) {
            row.chunks_exact_mut(head_dim).for_each(|head| angles.turn(index, head));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Random, assert_close, with_threads};
    use super::*;

    fn rotated(x: &[f32], heads: usize, head_dim: usize, first_position: usize, table: &RopeTable) -> Vec<f32> {
        let mut x = x.to_vec();
        let positions: Vec<usize> = (first_position..).take(x.len() / (heads * head_dim)).collect();
        rope(&mut x, heads, head_dim, &positions, table);
        x
    }

    #[test]
    fn equals_the_formula() {
        for (rows, heads, head_dim, first) in [(1, 1, 2, 0), (1, 4, 256, 1), (7, 3, 6, 1000), (64, 2, 512, 3)] {
            let x = Random::new(1).values(rows * heads * head_dim);
            let factors: Vec<f32> = (0..head_dim / 2).map(|i| if i < head_dim / 8 { 1.0 } else { 1e30 }).collect();
            for factors in [None, Some(factors.as_slice())] {
                let out = rotated(&x, heads, head_dim, first, &RopeTable::new(1e4, head_dim, factors));
                let half = head_dim / 2;
                let exact = (0..x.len()).map(|at| {
                    let (row, i) = (at / (heads * head_dim), at % head_dim);
                    let (head, pair) = (&x[at - i..at - i + head_dim], i % half);
                    let frequency = 1e4f64.powf(-2.0 * pair as f64 / head_dim as f64);
                    let angle = (first + row) as f64 * frequency / factors.map_or(1.0, |f| f[pair] as f64);
                    let (a, b) = (head[pair] as f64, head[pair + half] as f64);
                    if i < half { a * angle.cos() - b * angle.sin() } else { b * angle.cos() + a * angle.sin() }
                });
                // The angle itself is rounded: at position 1000 that is 3e-5.
                assert_close(&out, &exact.collect::<Vec<_>>(), 1e-4);
            }
        }
    }

    #[test]
    fn position_zero_and_huge_factors_change_nothing() {
        let x = Random::new(2).values(512);
        assert_eq!(rotated(&x, 1, 512, 0, &RopeTable::new(1e6, 512, None)), x);
        assert_eq!(rotated(&x, 1, 512, 131_071, &RopeTable::new(1e6, 512, Some(&[1e30; 256]))), x);
    }

    #[test]
    fn tables_are_the_same_if_they_rotate_alike() {
        let table = RopeTable::new(1e4, 256, None);
        assert!(table.same_as(&RopeTable::new(1e4, 256, Some(&[1.0; 128]))));
        let others = [
            RopeTable::new(1e6, 256, None),
            RopeTable::new(1e4, 512, None),
            RopeTable::new(1e4, 256, Some(&[2.0; 128])),
        ];
        assert!(others.iter().all(|other| !table.same_as(other)));
    }

    #[test]
    fn independent_of_threads_and_neighbours() {
        let (x, table) = (Random::new(3).values(64 * 2048), RopeTable::new(1e4, 256, None));
        let all = with_threads(1, || rotated(&x, 8, 256, 40, &table));
        assert!(all == with_threads(2, || rotated(&x, 8, 256, 40, &table)));
        let alone = x.chunks(2048).enumerate().flat_map(|(i, row)| rotated(row, 8, 256, 40 + i, &table));
        assert!(all == alone.collect::<Vec<_>>());
        // Positions in any order, as rows of several sequences have them.
        let (positions, mut some) = ([57, 3, 57, 40], x[..4 * 2048].to_vec());
        rope(&mut some, 8, 256, &positions, &table);
        let alone = x.chunks(2048).zip(positions).flat_map(|(row, at)| rotated(row, 8, 256, at, &table));
        assert!(some == alone.collect::<Vec<_>>());
    }
}
