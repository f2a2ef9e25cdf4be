//! Rows of a quantised table, decoded.

use gemma4c_blocks::decode::decode_row;

use super::matmul::Matrix;
use super::parallel::rows_in_parallel;

/// Row `ids[r]` of the table into row r of `out`. Ids are below the table's row count: the caller has checked them.
pub fn gather(table: &Matrix, ids: &[u32], out: &mut [f32]) {
    assert_eq!(out.len(), ids.len() * table.cols);
    rows_in_parallel(out, table.cols, |first, piece| {
        for (out, id) in piece.chunks_exact_mut(table.cols).zip(&ids[first..]) {
            decode_row(table.dtype, table.row(*id as usize), out);
        }
    });
}

#[cfg(test)]
mod tests {
    use gemma4c_blocks::{DType, reference};

    use super::super::testing::Random;
    use super::*;

    #[test]
    fn rows_are_those_of_the_reference() {
        for dtype in DType::ALL {
            let (rows, cols) = (11, 512);
            let bytes = Random::new(1).encoded(dtype, rows * cols);
            let table = Matrix { dtype, bytes: &bytes, rows, cols };
            let ids: Vec<u32> = (0..200).map(|i| (i * 7 + 10) % rows as u32).collect();
            let mut out = vec![f32::NAN; ids.len() * cols];
            gather(&table, &ids, &mut out);
            let layout = dtype.layout();
            for (i, value) in out.iter().enumerate() {
                let element = ids[i / cols] as usize * cols + i % cols;
                let block = &bytes[element / layout.len * layout.bytes..][..layout.bytes];
                assert_eq!(*value, reference::value(layout, block, element % layout.len), "{dtype} {i}");
            }
        }
    }
}
