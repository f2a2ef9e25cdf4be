//! Products of many rows at once, in register tiles: every operand that is loaded serves several sums.
//!
//! A tile changes which sums are computed together, never the order within one: see [`lanes`].

use std::sync::atomic::{Ordering, compiler_fence};

use multiversion::target::match_target;

use super::lanes::{self, LANES};
use super::vectorised;

vectorised! {
    /// `out[j][i] = a[i] · b[j]` for all pairs; rows of equal length.
    pub fn all_dots(a: &[&[f32]], b: &[&[f32]], out: &mut [&mut [f32]]) {
        // As many sums as the registers hold: 16 of 16 lanes in 32 wide ones, 12 of 8 in 16 narrower ones.
        match_target! {
            "x86_64+avx512f" => all_dots_tiled::<4, 4, 16>(a, b, out),
            _ => all_dots_tiled::<4, 3, 8>(a, b, out),
        }
    }

    /// `out[h] = Σ weights[h][j] * rows[j]`, added up in the order of j; `out` is one row a row of `weights`.
    pub fn weighted_sums(weights: &[&[f32]], rows: &[&[f32]], out: &mut [f32]) {
        let width = out.len() / weights.len();
        out.fill(0.0);
        let (fours, rest) = weights.as_chunks::<4>();
        let (out_of_fours, out_of_rest) = out.split_at_mut(4 * fours.len() * width);
        for (weights, out) in fours.iter().zip(out_of_fours.chunks_exact_mut(4 * width)) {
            add_weighted_rows(*weights, rows, out);
        }
        for (weights, out) in rest.iter().zip(out_of_rest.chunks_exact_mut(width)) {
            add_weighted_rows([weights], rows, out);
        }
    }
}

/// Steps of 32 values that a tile takes at a time: B rows of them stay in the first-level cache while all rows of `a` pass.
const STEPS: usize = 32;

/// A piece of B rows, moved together and to a boundary that vectors do not straddle.
#[repr(align(64))]
struct Panel<const B: usize>([[[f32; LANES]; STEPS]; B]);

/// Where a number of rows is no multiple of the tile's, the last tile overlaps the one before and computes the same again.
#[inline(always)]
fn all_dots_tiled<const A: usize, const B: usize, const WIDTH: usize>(
    a: &[&[f32]],
    b: &[&[f32]],
    out: &mut [&mut [f32]],
) {
    if a.len() < A || b.len() < B {
        for (b, out) in b.iter().zip(out) {
            for (a, out) in a.iter().zip(out.iter_mut()) {
                *out = lanes::dot(a, b);
            }
        }
        return;
    }
    let steps = a[0].len() / LANES;
    let mut panel = Panel([[[0.0; LANES]; STEPS]; B]);
    let mut tiles = vec![[[[0.0; LANES]; B]; A]; a.len().div_ceil(A)];
    for first_b in (0..b.len()).step_by(B).map(|first| first.min(b.len() - B)) {
        tiles.fill([[[0.0; LANES]; B]; A]);
        let b: [_; B] = std::array::from_fn(|j| b[first_b + j].as_chunks::<LANES>());
        for first in (0..steps).step_by(STEPS) {
            let range = first..(first + STEPS).min(steps);
            for (panel, b) in panel.0.iter_mut().zip(&b) {
                panel[..range.len()].copy_from_slice(&b.0[range.clone()]);
            }
            for (t, tile) in tiles.iter_mut().enumerate() {
                let first_a = (t * A).min(a.len() - A);
                let a = std::array::from_fn(|i| &a[first_a + i].as_chunks().0[range.clone()]);
                accumulate_tile::<A, B, WIDTH>(a, std::array::from_fn(|j| &panel.0[j][..range.len()]), tile);
            }
        }
        for (t, tile) in tiles.iter_mut().enumerate() {
            let first_a = (t * A).min(a.len() - A);
            for (i, sums) in tile.iter_mut().enumerate() {
                let a_tail = a[first_a + i].as_chunks::<LANES>().1;
                for (j, sums) in sums.iter_mut().enumerate() {
                    lanes::accumulate_tail(sums, a_tail, b[j].1);
                    out[first_b + j][first_a + i] = lanes::total(*sums);
                }
            }
        }
    }
}

/// Some steps of every pair of a row of `a` and a row of the panel. `WIDTH` lanes go through all steps before the next, so that
/// A × B × WIDTH sums stay in registers.
#[inline(always)]
fn accumulate_tile<const A: usize, const B: usize, const WIDTH: usize>(
    a: [&[[f32; LANES]]; A],
    b: [&[[f32; LANES]]; B],
    tile: &mut [[[f32; LANES]; B]; A],
) {
    // Cut to a length the compiler sees is the same, so that one check serves all.
    let steps = a[0].len();
    let (a, b) = (a.map(|row| &row[..steps]), b.map(|row| &row[..steps]));
    for first in (0..LANES).step_by(WIDTH) {
        let mut sums = [[[0.0f32; WIDTH]; B]; A];
        for i in 0..A {
            for j in 0..B {
                sums[i][j].copy_from_slice(&tile[i][j][first..first + WIDTH]);
            }
        }
        for step in 0..steps {
            for i in 0..A {
                for j in 0..B {
                    for lane in 0..WIDTH {
                        let (a, b) = (a[i][step][first + lane], b[j][step][first + lane]);
                        sums[i][j][lane] = a.mul_add(b, sums[i][j][lane]);
                    }
                }
            }
        }
        for i in 0..A {
            for j in 0..B {
                tile[i][j][first..first + WIDTH].copy_from_slice(&sums[i][j]);
            }
        }
        // Keeps the compiler from vectorising the passes as one, for which the registers do not suffice.
        compiler_fence(Ordering::SeqCst);
    }
}

/// Adds the weighted rows to each row of `out`, four rows at a time.
#[inline(always)]
fn add_weighted_rows<const N: usize>(weights: [&[f32]; N], rows: &[&[f32]], out: &mut [f32]) {
    let (fours, rest) = rows.as_chunks::<4>();
    for (i, rows) in fours.iter().enumerate() {
        add_weighted(weights.map(|weights| *weights[4 * i..].first_chunk().expect("a weight a row")), *rows, out);
    }
    for (i, row) in rest.iter().enumerate() {
        add_weighted(weights.map(|weights| [weights[4 * fours.len() + i]]), [*row], out);
    }
}

#[inline(always)]
fn add_weighted<const N: usize, const ROWS: usize>(weights: [[f32; ROWS]; N], rows: [&[f32]; ROWS], out: &mut [f32]) {
    let width = rows[0].len();
    let rows = rows.map(|row| &row[..width]);
    let mut pieces = out.chunks_exact_mut(width);
    let mut out: [&mut [f32]; N] = std::array::from_fn(|_| pieces.next().expect("a row of out a row of weights"));
    for i in 0..width {
        for (out, weights) in out.iter_mut().zip(&weights) {
            for (weight, row) in weights.iter().zip(&rows) {
                out[i] = weight.mul_add(row[i], out[i]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::Random;
    use super::*;

    type AllDots = fn(&[&[f32]], &[&[f32]], &mut [&mut [f32]]);

    fn rows(values: &[f32], width: usize) -> Vec<&[f32]> {
        values.chunks_exact(width).collect()
    }

    #[test]
    fn every_tile_gives_the_bits_of_a_dot_product() {
        for (a_rows, b_rows, width) in [(1, 1, 32), (4, 3, 64), (7, 5, 96), (9, 13, 75), (4, 4, 31), (6, 7, 2100)] {
            let (a, b) = (Random::new(1).values(a_rows * width), Random::new(2).values(b_rows * width));
            let (a, b) = (rows(&a, width), rows(&b, width));
            let run = |f: AllDots| {
                let mut out = vec![f32::NAN; a_rows * b_rows];
                f(&a, &b, &mut out.chunks_exact_mut(a_rows).collect::<Vec<_>>());
                out
            };
            let expected: Vec<f32> = b.iter().flat_map(|b| a.iter().map(|a| lanes::dot(a, b))).collect();
            assert!(run(all_dots) == expected);
            assert!(run(all_dots_tiled::<4, 4, 16>) == expected);
            assert!(run(all_dots_tiled::<4, 3, 8>) == expected);
        }
    }

    #[test]
    fn weighted_sums_are_added_up_in_order() {
        for (heads, count, width) in [(1, 1, 1), (3, 5, 33), (4, 4, 64), (9, 255, 40)] {
            let (weights, values) = (Random::new(3).values(heads * count), Random::new(4).values(count * width));
            let (weights, values) = (rows(&weights, count), rows(&values, width));
            let mut out = vec![f32::NAN; heads * width];
            weighted_sums(&weights, &values, &mut out);
            for (i, out) in out.iter().enumerate() {
                let products = weights[i / width].iter().zip(&values);
                assert_eq!(*out, products.fold(0.0, |sum, (weight, row)| weight.mul_add(row[i % width], sum)));
            }
        }
    }
}
