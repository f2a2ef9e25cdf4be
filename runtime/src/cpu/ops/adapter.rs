//! The two halves of an adapter's pair: `factor * A x`, and `y + B x`.
//!
//! One pair is for all rows, or each row has the pair of its sequence's seat; a row without a seat is left as it is.
//! What other rows have does not matter: each row is a product of its own.

use super::elementwise;
use super::matmul::{Experts, Matrix, expert_matmul, matmul};

/// Where the sequence of a row sits.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Seat {
    /// Counted from 1; 0 is none.
    pub number: u32,
    /// How strong the adapter in it is for this sequence.
    pub strength: f32,
}

/// `out[r] = factor * A x[r]`. With seats, one for each row, `a` is the matrix of the first of all seats, which follow
/// each other, and the factor is the row's own.
pub fn narrow(a: &Matrix, seats: Option<&[Seat]>, factor: f32, x: &[f32], out: &mut [f32]) {
    let Some(seats) = seats else {
        matmul(a, x, out);
        out.iter_mut().for_each(|value| *value *= factor);
        return;
    };
    by_seat(a, seats, x, out);
    for (row, seat) in out.chunks_exact_mut(a.rows).zip(seats) {
        row.iter_mut().for_each(|value| *value *= seat.strength);
    }
}

/// `out[r] = y[r] + B x[r]`, likewise.
pub fn widen(b: &Matrix, seats: Option<&[Seat]>, y: &[f32], x: &[f32], out: &mut [f32]) {
    match seats {
        None => matmul(b, x, out),
        Some(seats) => by_seat(b, seats, x, out),
    }
    let change = out.to_vec();
    elementwise::add(y, &change, out);
}

/// The product of each row by the matrix of its seat; zeros where it has none.
fn by_seat(first: &Matrix, seats: &[Seat], x: &[f32], out: &mut [f32]) {
    let (columns, outputs) = (first.cols, first.rows);
    let seated: Vec<usize> = (0..seats.len()).filter(|row| seats[*row].number > 0).collect();
    let numbers: Vec<u32> = seated.iter().map(|row| seats[*row].number - 1).collect();
    let inputs: Vec<f32> = seated.iter().flat_map(|row| &x[row * columns..][..columns]).copied().collect();
    let mut products = vec![0.0; seated.len() * outputs];
    let row_bytes = first.dtype.row_bytes(columns as u64).expect("rows are whole blocks") as usize;
    let experts = first.bytes.len() / (row_bytes * outputs);
    let all = Experts { dtype: first.dtype, bytes: first.bytes, experts, rows: outputs, cols: columns };
    expert_matmul(&all, &numbers, &inputs, 0..outputs, &mut products);
    out.fill(0.0);
    for (row, product) in seated.into_iter().zip(products.chunks_exact(outputs)) {
        out[row * outputs..][..outputs].copy_from_slice(product);
    }
}

#[cfg(test)]
mod tests {
    use gemma4c_blocks::DType;

    use super::super::testing::{Random, assert_close, with_threads};
    use super::*;

    const SEATS: usize = 3;

    fn bytes_of(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    fn matrix(bytes: &[u8], rows: usize, cols: usize) -> Matrix<'_> {
        Matrix { dtype: DType::F32, bytes, rows, cols }
    }

    /// A pair of rank 8 for rows of 64 values, for each seat.
    fn pair() -> (Vec<u8>, Vec<u8>) {
        let mut random = Random::new(7);
        (bytes_of(&random.values(SEATS * 8 * 64)), bytes_of(&random.values(SEATS * 40 * 8)))
    }

    fn change(seats: Option<&[Seat]>, (a, b): (&[u8], &[u8]), y: &[f32], x: &[f32]) -> Vec<f32> {
        let (rows, mut narrowed, mut out) = (x.len() / 64, vec![f32::NAN; x.len() / 8], vec![f32::NAN; y.len()]);
        narrow(&matrix(a, 8, 64), seats, 0.5, x, &mut narrowed);
        assert_eq!(narrowed.len(), rows * 8);
        widen(&matrix(b, 40, 8), seats, y, &narrowed, &mut out);
        out
    }

    fn rows(count: usize) -> (Vec<f32>, Vec<f32>) {
        let mut random = Random::new(8);
        (random.values(count * 40), random.values(count * 64))
    }

    #[test]
    fn it_is_the_formula() {
        let ((a, b), (y, x)) = (pair(), rows(3));
        let floats = |bytes: &[u8]| -> Vec<f64> {
            bytes.chunks_exact(4).map(|four| f64::from(f32::from_le_bytes(four.try_into().unwrap()))).collect()
        };
        let (of_a, of_b) = (floats(&a[..8 * 64 * 4]), floats(&b[..40 * 8 * 4]));
        let found = change(None, (&a[..8 * 64 * 4], &b[..40 * 8 * 4]), &y, &x);
        let expected: Vec<f64> = (0..3 * 40)
            .map(|at| {
                let (row, output) = (at / 40, at % 40);
                let narrowed = |rank: usize| -> f64 {
                    (0..64).map(|k| of_a[rank * 64 + k] * f64::from(x[row * 64 + k])).sum::<f64>() * 0.5
                };
                f64::from(y[at]) + (0..8).map(|rank| of_b[output * 8 + rank] * narrowed(rank)).sum::<f64>()
            })
            .collect();
        assert_close(&found, &expected, 1e-5);
    }

    #[test]
    fn a_row_with_a_seat_is_what_it_is_alone_and_one_without_is_left_as_it_is() {
        let ((a, b), (y, x)) = (pair(), rows(5));
        let seats = [2, 0, 3, 2, 1].map(|number| Seat { number, strength: 0.5 });
        for threads in [1, 3] {
            let together = with_threads(threads, || change(Some(&seats), (&a, &b), &y, &x));
            for (row, seat) in seats.iter().enumerate() {
                let (y, x) = (&y[row * 40..][..40], &x[row * 64..][..64]);
                let alone = match seat.number as usize {
                    0 => y.to_vec(),
                    number => {
                        let part =
                            |bytes: &[u8]| bytes[bytes.len() / SEATS * (number - 1)..][..bytes.len() / SEATS].to_vec();
                        change(None, (&part(&a), &part(&b)), y, x)
                    }
                };
                let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&together[row * 40..][..40]), bits(&alone), "row {row}");
            }
        }
    }
}
