//! What only the patches of a picture need: they lie in a grid, and each has a column and a row in it.

use gemma4c_blocks::decode::decode_row;

use super::matmul::Matrix;
use super::parallel::rows_in_parallel;
use super::rope::RopeTable;

/// Patches in rows of `columns` each, row after row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    pub columns: usize,
    pub rows: usize,
}

impl Grid {
    pub const fn patches(&self) -> usize {
        self.columns * self.rows
    }

    /// Where patch `index` lies along an axis: 0 counts columns, 1 rows.
    fn coordinate(&self, index: usize, axis: usize) -> usize {
        if axis == 0 { index % self.columns } else { index / self.columns }
    }

    /// The coordinates of all patches along an axis.
    fn coordinates(&self, axis: usize) -> Vec<usize> {
        (0..self.patches()).map(|index| self.coordinate(index, axis)).collect()
    }
}

/// The row of `table` at each patch's coordinate along `axis`. The table has as many rows as the grid is long: the
/// caller has checked it.
pub fn axis_rows(table: &Matrix, grid: Grid, axis: usize, out: &mut [f32]) {
    assert_eq!(out.len(), grid.patches() * table.cols);
    rows_in_parallel(out, table.cols, |first, piece| {
        for (index, out) in (first..).zip(piece.chunks_exact_mut(table.cols)) {
            decode_row(table.dtype, table.row(grid.coordinate(index, axis)), out);
        }
    });
}

/// Rotates the rows of `x`: of each head of `head_dim` the first half by the patch's column, the second by its row.
/// `table` is of half a head.
pub fn grid_rope(x: &mut [f32], width: usize, head_dim: usize, grid: Grid, table: &RopeTable) {
    let half = head_dim / 2;
    let [by_column, by_row] = [0, 1].map(|axis| table.angles(&grid.coordinates(axis)));
    rows_in_parallel(x, width, |first, piece| {
        for (index, row) in (first..).zip(piece.chunks_exact_mut(width)) {
            for head in row.chunks_exact_mut(head_dim) {
                let (left, right) = head.split_at_mut(half);
                by_column.turn(index, left);
                by_row.turn(index, right);
            }
        }
    });
}

/// The mean of each square of `side` by `side` patches, whose rows are `width` wide, squares row by row.
pub fn grid_mean(x: &[f32], grid: Grid, side: usize, width: usize, out: &mut [f32]) {
    let squares = Grid { columns: grid.columns / side, rows: grid.rows / side };
    assert!(x.len() == grid.patches() * width && out.len() == squares.patches() * width);
    let share = 1.0 / (side * side) as f32;
    rows_in_parallel(out, width, |first, piece| {
        for (index, out) in (first..).zip(piece.chunks_exact_mut(width)) {
            let (column, row) = (squares.coordinate(index, 0) * side, squares.coordinate(index, 1) * side);
            out.fill(0.0);
            for patch in (row..row + side).flat_map(|row| (column..column + side).map(move |c| row * grid.columns + c))
            {
                for (out, x) in out.iter_mut().zip(&x[patch * width..][..width]) {
                    *out += x;
                }
            }
            out.iter_mut().for_each(|out| *out *= share);
        }
    });
}

#[cfg(test)]
mod tests {
    use gemma4c_blocks::DType;

    use super::super::testing::{Random, assert_close, with_threads};
    use super::*;

    const GRID: Grid = Grid { columns: 30, rows: 18 };

    #[test]
    fn rows_of_either_axis() {
        let (cols, bytes) = (4, Random::new(1).encoded(DType::F32, 30 * 4));
        let values: Vec<f32> = bytes.chunks(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        let table = Matrix { dtype: DType::F32, bytes: &bytes, rows: 30, cols };
        for axis in [0, 1] {
            let mut out = vec![f32::NAN; GRID.patches() * cols];
            axis_rows(&table, GRID, axis, &mut out);
            for (i, out) in out.chunks(cols).enumerate() {
                let at = [i % 30, i / 30][axis];
                assert_eq!(out, &values[at * cols..][..cols], "patch {i}, axis {axis}");
            }
        }
    }

    #[test]
    fn halves_of_a_head_turn_with_column_and_row() {
        for (heads, head_dim) in [(1, 4), (3, 64), (2, 72)] {
            let (width, quarter) = (heads * head_dim, head_dim / 4);
            let x = Random::new(2).values(GRID.patches() * width);
            let table = RopeTable::new(100.0, head_dim / 2, None);
            let rotated = |threads| {
                let mut out = x.clone();
                with_threads(threads, || grid_rope(&mut out, width, head_dim, GRID, &table));
                out
            };
            let out = rotated(1);
            assert!(out == rotated(2));
            let exact = (0..x.len()).map(|at| {
                let (patch, i) = (at / width, at % head_dim);
                let position = if i < 2 * quarter { patch % 30 } else { patch / 30 };
                let (start, pair) = (at - i % (2 * quarter), i % quarter);
                let angle = position as f64 * 100f64.powf(-4.0 * pair as f64 / head_dim as f64);
                let (a, b) = (x[start + pair] as f64, x[start + pair + quarter] as f64);
                let is_first = i % (2 * quarter) < quarter;
                if is_first { a * angle.cos() - b * angle.sin() } else { b * angle.cos() + a * angle.sin() }
            });
            assert_close(&out, &exact.collect::<Vec<_>>(), 3e-6);
        }
    }

    #[test]
    fn means_of_squares() {
        for (side, width) in [(1, 5), (3, 192), (6, 7)] {
            let x = Random::new(3).values(GRID.patches() * width);
            let (columns, rows) = (30 / side, 18 / side);
            let mut out = vec![f32::NAN; columns * rows * width];
            grid_mean(&x, GRID, side, width, &mut out);
            let exact = (0..out.len()).map(|at| {
                let (square, i) = (at / width, at % width);
                let (left, top) = (square % columns * side, square / columns * side);
                let of = |n: usize| x[((top + n / side) * 30 + left + n % side) * width + i] as f64;
                (0..side * side).map(of).sum::<f64>() / (side * side) as f64
            });
            assert_close(&out, &exact.collect::<Vec<_>>(), 1e-6);
        }
    }
}
