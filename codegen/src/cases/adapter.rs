//! Cases of an adapter's halves: one pair for all rows, and rows with seats of their own among them some without.

use gemma4c_blocks::DType;
use gemma4c_dsl::harness::{Bound, Case, Data, Random};
use gemma4c_dsl::{BF16, F16, Float};

use crate::kernels::adapter::{narrow_grid, narrow_instance, widen_grid, widen_instance};
use crate::kernels::attention::address::RECORD_WORDS;

const SEATS: usize = 3;
const FACTOR: f32 = 0.75;

pub fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for seated in [false, true] {
        for (dtype, rank, k, count) in [(DType::BF16, 16, 96, 5), (DType::F32, 4, 40, 1), (DType::F16, 32, 64, 9)] {
            all.extend([narrowed(dtype, rank, k, count, seated), widened(dtype, rank, k, count, seated)]);
        }
    }
    all
}

/// The seat of each row, and its strength; without seats all rows have the first pair.
fn seat(row: usize, seated: bool) -> (usize, f32) {
    let strength = 0.5 + row as f32 * 0.25;
    if seated { ((row * 2 + 1) % (SEATS + 1), strength) } else { (1, FACTOR) }
}

/// Rows have records; the seat of a row's slot, which is not its number. The last record of several is free.
fn with_seats(case: Case, count: usize, seated: bool) -> Case {
    let slot = |row: usize| count - 1 - row;
    let (mut records, mut seats) = (vec![0u32; count * RECORD_WORDS as usize], vec![0u32; count * 2]);
    for row in 0..count {
        let (number, strength) = seat(row, seated);
        let free = is_free(row, count);
        records[row * RECORD_WORDS as usize..][..4].copy_from_slice(&[9, u32::from(!free), 7, slot(row) as u32]);
        seats[slot(row) * 2..][..2].copy_from_slice(&[number as u32, strength.to_bits()]);
    }
    let (records, seats) = if seated { (records, seats) } else { (Vec::new(), Vec::new()) };
    case.buffer("rows_state", records).buffer("rows_seats", seats).scalar("rows_stride", RECORD_WORDS)
}

fn is_free(row: usize, count: usize) -> bool {
    count > 1 && row + 1 == count
}

/// The pair that a row has, as the place of its matrix among those of all seats.
fn pair_of(row: usize, count: usize, seated: bool) -> Option<usize> {
    let (number, _) = seat(row, seated);
    (number > 0 && !(seated && is_free(row, count))).then(|| number - 1)
}

/// Matrices of that type, and their values.
pub fn matrices(dtype: DType, values: usize) -> (Data, Vec<f32>) {
    let floats = Random::new(values as u64).floats(values, -1.0, 1.0);
    match dtype {
        DType::BF16 => {
            let rounded: Vec<BF16> = floats.into_iter().map(BF16::from_f32).collect();
            (rounded.clone().into(), rounded.into_iter().map(|value| value.to_f32()).collect())
        }
        DType::F16 => {
            let rounded: Vec<F16> = floats.into_iter().map(F16::from_f32).collect();
            (rounded.clone().into(), rounded.into_iter().map(|value| value.to_f32()).collect())
        }
        _ => (floats.clone().into(), floats),
    }
}

fn dot(a: &[f32], x: &[f32]) -> f64 {
    a.iter().zip(x).map(|(a, x)| f64::from(*a) * f64::from(*x)).sum()
}

fn narrowed(dtype: DType, rank: usize, k: usize, count: usize, seated: bool) -> Case {
    let pairs = if seated { SEATS } else { 1 };
    let (tensor, values) = matrices(dtype, pairs * rank * k);
    let x = Random::new(k as u64).floats(count * k, -2.0, 2.0);
    let of = |row: usize, output: usize| {
        let product = pair_of(row, count, seated)
            .map_or(0.0, |pair| dot(&values[(pair * rank + output) * k..][..k], &x[row * k..][..k]));
        (product * f64::from(seat(row, seated).1)) as f32
    };
    let expected: Vec<f32> = (0..count * rank).map(|at| of(at / rank, at % rank)).collect();
    let name = format!("{dtype}, {k} values to {rank}, {count} rows{}", if seated { " with seats" } else { "" });
    let case = Case::new(name, narrow_instance(dtype, seated).expect("256 threads are a block"))
        .grid(narrow_grid(rank as u32, count as u32))
        .buffer("value_tensor", tensor)
        .buffer("x", x.clone())
        .scalar("k", k as u32)
        .scalar("rank", rank as u32)
        .scalar("factor", FACTOR);
    with_seats(case, count, seated).expect("out", expected, Bound::Within { absolute: 2e-4, relative: 1e-5 })
}

fn widened(dtype: DType, rank: usize, outputs: usize, count: usize, seated: bool) -> Case {
    let pairs = if seated { SEATS } else { 1 };
    let (tensor, values) = matrices(dtype, pairs * outputs * rank);
    let mut random = Random::new(outputs as u64);
    let stride = outputs + 7;
    let (x, y) = (random.floats(count * rank, -2.0, 2.0), random.floats(count * stride, -2.0, 2.0));
    let of = |row: usize, output: usize| {
        let change = pair_of(row, count, seated)
            .map_or(0.0, |pair| dot(&values[(pair * outputs + output) * rank..][..rank], &x[row * rank..][..rank]));
        (f64::from(y[row * stride + output]) + change) as f32
    };
    let expected: Vec<f32> = (0..count * outputs).map(|at| of(at / outputs, at % outputs)).collect();
    let name = format!("{dtype}, {rank} values to {outputs}, {count} rows{}", if seated { " with seats" } else { "" });
    let case = Case::new(name, widen_instance(dtype, rank as u32, seated).expect("256 threads are a block"))
        .grid(widen_grid(outputs as u32, count as u32))
        .buffer("value_tensor", tensor)
        .buffer("y_values", y.clone())
        .scalar("y_stride", stride as u32)
        .buffer("x", x.clone())
        .scalar("outputs", outputs as u32)
        .scalar("count", count as u32);
    with_seats(case, count, seated).expect("out", expected, Bound::Within { absolute: 2e-4, relative: 1e-5 })
}
