//! How far what a device left is from what the CPU computed.

use super::numbers::Decoded;
use super::reference::Routing;

/// How many times a limit one value may be off: a product of two noisy factors is, where both are large.
pub const PEAK: f64 = 20.0;

/// The distance of some rows from what they should be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Difference {
    /// Of the worst row: rms of the differences / rms of what it should be.
    pub rms: f64,
    /// Of the worst value: its difference, beyond the grain of its numbers / what it should be and its row's rms together.
    pub peak: f64,
    /// That value.
    pub row: usize,
    pub column: usize,
    pub expected: f32,
    pub found: f32,
}

impl Difference {
    /// How much of a limit it takes: more than 1 is too much.
    pub fn share(&self, limit: f64) -> f64 {
        self.rms.max(self.peak / PEAK) / limit
    }
}

/// Compares rows of `width` values. What is not a number is infinitely far from anything.
pub fn compare(expected: &[f32], found: &Decoded, width: usize) -> Difference {
    let mut worst = Difference { rms: 0.0, peak: 0.0, row: 0, column: 0, expected: 0.0, found: 0.0 };
    for (row, (expected, values)) in expected.chunks_exact(width).zip(found.values.chunks_exact(width)).enumerate() {
        let rms = rms(expected);
        let mut squares = 0.0;
        for (column, (expected, found_value)) in expected.iter().zip(values).enumerate() {
            let difference = (*found_value as f64 - *expected as f64).abs();
            squares += difference * difference;
            let beyond = (difference - found.grain(row * width + column) as f64).max(0.0);
            let peak = ratio(if difference.is_finite() { beyond } else { f64::INFINITY }, rms + expected.abs() as f64);
            if peak > worst.peak || (row, column) == (0, 0) {
                worst = Difference { peak, row, column, expected: *expected, found: *found_value, ..worst };
            }
        }
        worst.rms = worst.rms.max(ratio((squares / width as f64).sqrt(), rms));
    }
    worst
}

/// The same of all rows together.
pub fn together(expected: &[f32], found: &[f32]) -> f64 {
    let squares: f64 = expected.iter().map(|e| (*e as f64).powi(2)).sum();
    let differences: f64 = expected.iter().zip(found).map(|(e, f)| (*f as f64 - *e as f64).powi(2)).sum();
    ratio(differences.sqrt(), squares.sqrt())
}

/// The root of the mean of the squares.
pub fn rms(values: &[f32]) -> f64 {
    (values.iter().map(|v| (*v as f64).powi(2)).sum::<f64>() / values.len().max(1) as f64).sqrt()
}

fn ratio(difference: f64, whole: f64) -> f64 {
    match difference / whole {
        _ if difference == 0.0 => 0.0,
        ratio if ratio.is_finite() => ratio,
        _ => f64::INFINITY,
    }
}

/// How a device's choice of experts differs from the CPU's.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rerouted {
    /// Rows with other experts, whatever their order.
    pub rows: Vec<usize>,
    /// The most that a row's choice lost: the CPU's scores of the expert taken and of the one that should have been, apart by
    /// so much of their rms.
    pub regret: f64,
    /// The place of that choice, and the two experts.
    pub row: usize,
    pub choice: usize,
    pub expected: u32,
    pub found: u32,
}

/// Compares the experts chosen.
pub fn routes(expected: &Routing<'_>, found: &[u32]) -> Rerouted {
    let mut rerouted = Rerouted::default();
    let rows = expected.logits.chunks_exact(expected.experts).zip(expected.ids.chunks_exact(expected.top));
    for (row, ((logits, wanted), taken)) in rows.zip(found.chunks_exact(expected.top)).enumerate() {
        let scale = rms(logits);
        for (choice, (&wanted, &taken)) in wanted.iter().zip(taken).enumerate() {
            let score = |id: u32| logits.get(id as usize).map_or(f64::INFINITY, |score| *score as f64);
            let regret = ratio((score(wanted) - score(taken)).abs(), scale);
            if wanted != taken && regret >= rerouted.regret {
                rerouted = Rerouted { regret, row, choice, expected: wanted, found: taken, ..rerouted };
            }
        }
        if wanted.iter().any(|id| !taken.contains(id)) {
            rerouted.rows.push(row);
        }
    }
    rerouted
}

#[cfg(test)]
mod tests {
    use super::super::numbers::Numbers;
    use super::*;

    fn decoded(values: &[f32]) -> Decoded {
        Numbers::F32.decode(&Numbers::F32.encode(values))
    }

    #[test]
    fn the_worst_row_and_the_worst_value_are_found() {
        let expected = [1.0, -1.0, 1.0, -1.0, /**/ 2.0, 2.0, -2.0, -2.0];
        let difference = compare(&expected, &decoded(&[1.0, -1.0, 1.0, -1.0, 2.0, 2.2, -2.0, -2.0]), 4);
        assert_eq!((difference.row, difference.column, difference.expected, difference.found), (1, 1, 2.0, 2.2));
        assert!((difference.rms - 0.05).abs() < 1e-6 && (difference.peak - 0.05).abs() < 1e-6, "{difference:?}");
        assert!(difference.share(0.051) < 1.0 && difference.share(0.049) > 1.0);
    }

    #[test]
    fn one_value_far_off_counts_in_a_long_row() {
        let expected = vec![1.0; 10_000];
        let mut found = expected.clone();
        found[4321] = 1.9;
        let difference = compare(&expected, &decoded(&found), 10_000);
        assert!(difference.rms < 0.01 && difference.share(0.01) > 1.0, "{difference:?}");
        assert_eq!(difference.column, 4321);
    }

    #[test]
    fn nothing_is_near_to_what_is_no_number() {
        for wrong in [f32::NAN, f32::INFINITY] {
            let difference = compare(&[1.0, 2.0, 3.0], &decoded(&[1.0, wrong, 3.0]), 3);
            assert_eq!((difference.rms, difference.column), (f64::INFINITY, 1));
            assert_eq!(together(&[1.0, 2.0], &[1.0, wrong]), f64::INFINITY);
        }
        assert_eq!(compare(&[0.0; 4], &decoded(&[0.0; 4]), 4).rms, 0.0);
        assert_eq!(compare(&[0.0; 4], &decoded(&[0.0, 1e-9, 0.0, 0.0]), 4).rms, f64::INFINITY);
    }

    #[test]
    fn rows_together_weigh_as_much_as_they_are_large() {
        assert_eq!(together(&[3.0, 4.0, 0.0, 0.0], &[3.0, 4.5, 0.0, 0.0]), 0.1);
    }

    #[test]
    fn a_choice_between_equals_costs_nothing() {
        let logits = [4.0, 3.0, 3.0, 0.0, /**/ 1.0, 2.0, 3.0, 4.0];
        let expected = Routing { experts: 4, top: 2, ids: vec![0, 1, 3, 2], logits: &logits };
        assert_eq!(routes(&expected, &[0, 1, 3, 2]), Rerouted::default());
        let swapped = routes(&expected, &[0, 2, 2, 3]);
        assert_eq!((swapped.rows.as_slice(), swapped.row), (&[0][..], 1), "another order is no other choice");
        let wrong = routes(&expected, &[0, 2, 0, 77]);
        assert_eq!((wrong.regret, wrong.expected, wrong.found), (f64::INFINITY, 2, 77));
    }
}
