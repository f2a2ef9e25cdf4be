//! Products of many rows at once, in register tiles: every operand that is loaded serves several sums.
//!
//! A tile changes which sums are computed together, never the order within one: see [`lanes`].
//!
//! The loops that matter are functions of their own with nothing else in them. Whether the compiler turns such a loop
//! into vector code depends on its surroundings; a tile that falls apart is twenty times slower.

use std::sync::atomic::{Ordering, compiler_fence};

use multiversion::target::match_target;

use super::lanes::{self, LANES};
use super::vectorised;

/// 32 values of a row, one a lane.
type Step = [f32; LANES];

/// The lanes of A × B sums.
type Tile<const A: usize, const B: usize> = [[Step; B]; A];

/// Adds some steps of A and of B rows to a tile.
type Accumulate<const A: usize, const B: usize> = fn([&[Step]; A], [&[Step]; B], &mut Tile<A, B>);

vectorised! {
    /// `out[j][i] = a[i] · b[j]` for all pairs; rows of equal length.
    pub fn all_dots(a: &[&[f32]], b: &[&[f32]], out: &mut [&mut [f32]]) {
        // Sums that leave some registers for operands: 16 of 16 lanes in 32 wide ones, 8 of 8 in 16 narrower ones.
        match_target! {
            "x86_64+avx512f" => all_dots_tiled(a, b, out, tile_of_4_by_4),
            _ => all_dots_tiled(a, b, out, tile_of_4_by_2),
        }
    }

    fn tile_of_4_by_4(a: [&[Step]; 4], b: [&[Step]; 4], tile: &mut Tile<4, 4>) {
        accumulate_tile::<4, 4, 16>(a, b, tile);
    }

    fn tile_of_4_by_2(a: [&[Step]; 4], b: [&[Step]; 2], tile: &mut Tile<4, 2>) {
        accumulate_tile::<4, 2, 8>(a, b, tile);
    }

    /// One step of [`lanes::total`] for many sums: the first `width` lanes and the next `width` are added.
    fn halve(sums: &mut [Step], width: usize) {
        match width {
            16 => halve_to::<16>(sums),
            8 => halve_to::<8>(sums),
            _ => halve_to::<4>(sums),
        }
    }

    /// `out[h] = Σ weights[h][j] * rows[j]`, added up in the order of j; `out` has one row for each of `weights`.
    pub fn weighted_sums(weights: &[&[f32]], rows: &[&[f32]], out: &mut [f32]) {
        let width = out.len() / weights.len();
        out.fill(0.0);
        for (weights, out) in weights.chunks(2).zip(out.chunks_mut(2 * width)) {
            match weights {
                [first, second] => {
                    let (out, second_out) = out.split_at_mut(width);
                    add_weighted_to_two(first, second, rows, out, second_out);
                }
                _ => add_weighted(weights[0], rows, out),
            }
        }
    }
}

/// Steps that a tile takes at a time: B rows of them stay in the first-level cache while all rows of `a` pass.
const STEPS: usize = 32;

/// Steps of B rows, packed and aligned so that no vector load straddles a cache line.
#[repr(align(64))]
struct Panel<const B: usize>([[Step; STEPS]; B]);

/// Where a number of rows is no multiple of the tile's, the last tile overlaps the one before and computes the same
/// again.
#[inline(always)]
fn all_dots_tiled<const A: usize, const B: usize>(
    a: &[&[f32]],
    b: &[&[f32]],
    out: &mut [&mut [f32]],
    accumulate: Accumulate<A, B>,
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
    let first_a = |tile: usize| (tile * A).min(a.len() - A);
    let mut panel = Panel([[[0.0; LANES]; STEPS]; B]);
    let mut tiles = vec![[[[0.0; LANES]; B]; A]; a.len().div_ceil(A)];
    for first_b in (0..b.len()).step_by(B).map(|first| first.min(b.len() - B)) {
        let b: [_; B] = std::array::from_fn(|j| b[first_b + j].as_chunks::<LANES>());
        tiles.as_flattened_mut().as_flattened_mut().as_flattened_mut().fill(0.0);
        for first in (0..steps).step_by(STEPS) {
            let range = first..(first + STEPS).min(steps);
            for (panel, b) in panel.0.iter_mut().zip(&b) {
                panel[..range.len()].copy_from_slice(&b.0[range.clone()]);
            }
            let b = std::array::from_fn(|j| &panel.0[j][..range.len()]);
            for (t, tile) in tiles.iter_mut().enumerate() {
                accumulate(std::array::from_fn(|i| &a[first_a(t) + i].as_chunks().0[range.clone()]), b, tile);
            }
        }
        if !b[0].1.is_empty() {
            for (t, tile) in tiles.iter_mut().enumerate() {
                for (i, sums) in tile.iter_mut().enumerate() {
                    for (sums, b) in sums.iter_mut().zip(&b) {
                        lanes::accumulate_tail(sums, a[first_a(t) + i].as_chunks::<LANES>().1, b.1);
                    }
                }
            }
        }
        let sums = tiles.as_flattened_mut().as_flattened_mut();
        [16, 8, 4].into_iter().for_each(|width| halve(sums, width));
        for (t, tile) in tiles.iter().enumerate() {
            for (i, sums) in tile.iter().enumerate() {
                for (j, [s0, s1, s2, s3, ..]) in sums.iter().enumerate() {
                    out[first_b + j][first_a(t) + i] = (s0 + s2) + (s1 + s3);
                }
            }
        }
    }
}

/// Some steps of every pair of a row of `a` and a row of `b`. `WIDTH` lanes go through all steps before the next, so
/// that A × B × WIDTH sums stay in registers.
#[inline(always)]
fn accumulate_tile<const A: usize, const B: usize, const WIDTH: usize>(
    a: [&[Step]; A],
    b: [&[Step]; B],
    tile: &mut Tile<A, B>,
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

#[inline(always)]
fn halve_to<const WIDTH: usize>(sums: &mut [Step]) {
    for sums in sums {
        for lane in 0..WIDTH {
            sums[lane] += sums[lane + WIDTH];
        }
        compiler_fence(Ordering::SeqCst);
    }
}

/// Adds the weighted rows to `out`, four at a time.
#[inline(always)]
fn add_weighted(weights: &[f32], rows: &[&[f32]], out: &mut [f32]) {
    let ((weights, last_weights), (rows, last_rows)) = (weights.as_chunks::<4>(), rows.as_chunks::<4>());
    for (w, [a, b, c, d]) in weights.iter().zip(rows) {
        for ((((out, a), b), c), d) in out.iter_mut().zip(*a).zip(*b).zip(*c).zip(*d) {
            *out = w[3].mul_add(*d, w[2].mul_add(*c, w[1].mul_add(*b, w[0].mul_add(*a, *out))));
        }
    }
    for (w, row) in last_weights.iter().zip(last_rows) {
        for (out, x) in out.iter_mut().zip(*row) {
            *out = w.mul_add(*x, *out);
        }
    }
}

/// [`add_weighted`] with two sets of weights for the same rows, which are then read once.
#[inline(always)]
fn add_weighted_to_two(weights: &[f32], others: &[f32], rows: &[&[f32]], out: &mut [f32], other_out: &mut [f32]) {
    let whole = rows.len() / 4 * 4;
    let chunks = weights.as_chunks::<4>().0.iter().zip(others.as_chunks::<4>().0).zip(rows.as_chunks::<4>().0);
    for ((w, v), [a, b, c, d]) in chunks {
        let outs = out.iter_mut().zip(other_out.iter_mut());
        for (((((out, other), a), b), c), d) in outs.zip(*a).zip(*b).zip(*c).zip(*d) {
            *out = w[3].mul_add(*d, w[2].mul_add(*c, w[1].mul_add(*b, w[0].mul_add(*a, *out))));
            *other = v[3].mul_add(*d, v[2].mul_add(*c, v[1].mul_add(*b, v[0].mul_add(*a, *other))));
        }
    }
    add_weighted(&weights[whole..], &rows[whole..], out);
    add_weighted(&others[whole..], &rows[whole..], other_out);
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
            assert!(run(|a, b, out| all_dots_tiled(a, b, out, accumulate_tile::<4, 4, 16>)) == expected);
            assert!(run(|a, b, out| all_dots_tiled(a, b, out, accumulate_tile::<4, 2, 8>)) == expected);
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
