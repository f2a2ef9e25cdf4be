//! The shapes of a pair: what holds between its two matrices, whatever model they are for.

use super::error::Fault;

/// The dimensions of a matrix or of stacked ones, fastest first, without those of one that a writer left out or added.
pub fn matrix(name: &str, dims: &[u64]) -> Result<[u64; 3], Fault> {
    match *dims {
        [columns] => Ok([columns, 1, 1]),
        [columns, rows] => Ok([columns, rows, 1]),
        [columns, rows, experts] | [columns, rows, experts, 1] => Ok([columns, rows, experts]),
        _ => Err(Fault::tensor(name, format!("has the shape {dims:?}, which is no matrix"))),
    }
}

/// Checks that a pair's ranks are one, and returns it.
pub fn rank(a: (&str, [u64; 3]), b: (&str, [u64; 3])) -> Result<u64, Fault> {
    let ([_, of_a, experts_a], [of_b, _, experts_b]) = (a.1, b.1);
    if experts_a != experts_b {
        let why = format!("is for {experts_b} experts, and {} for {experts_a}", a.0);
        return Err(Fault::tensor(b.0, why));
    }
    match of_a == of_b {
        true => Ok(of_a),
        false => Err(Fault::tensor(b.0, format!("has rank {of_b}, and its A rank {of_a}"))),
    }
}
