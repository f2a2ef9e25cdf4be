//! How far what a device left is from what the CPU computed.
//!
//! A residual may have massive channels, thousands of times the others, which would dominate an rms. So massive values
//! and the others are compared separately; the worse of the two counts.

use super::numbers::Decoded;
use super::reference::Routing;

/// One value may be off by this many times the limit of its row: a product of two noisy factors is, where both are
/// large.
pub const PEAK: f64 = 20.0;

/// The distance of some rows from what they should be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Difference {
    /// Of the worst row: rms of the differences / rms of what it should be, of massive values or of the others.
    pub rms: f64,
    /// Of the worst value: its difference, beyond the grain of its numbers / what it should be and its row's rms,
    /// without massive values, together.
    pub peak: f64,
    /// That value.
    pub row: usize,
    pub column: usize,
    pub expected: f32,
    pub found: f32,
}

impl Difference {
    /// The error as a fraction of a limit: more than 1 is too much.
    pub fn share(&self, limit: f64) -> f64 {
        self.rms.max(self.peak / PEAK) / limit
    }
}

/// Squares of differences and of what they are differences from.
#[derive(Clone, Copy, Debug, Default)]
pub struct Squares {
    differences: f64,
    expected: f64,
    count: usize,
}

impl Squares {
    fn add(&mut self, expected: f32, found: f32) {
        self.differences += (found as f64 - expected as f64).powi(2);
        self.expected += (expected as f64).powi(2);
        self.count += 1;
    }

    fn relative(&self) -> f64 {
        ratio(self.differences.sqrt(), self.expected.sqrt())
    }
}

/// Differences of massive values, and of the others.
#[derive(Clone, Copy, Debug, Default)]
pub struct Apart {
    massive: Squares,
    others: Squares,
}

impl Apart {
    pub fn of(expected: &[f32], found: &[f32]) -> Apart {
        let mut apart = Apart::default();
        apart.add(expected, found);
        apart
    }

    pub fn add(&mut self, expected: &[f32], found: &[f32]) {
        let limit = massive_from(expected);
        for (expected, found) in expected.iter().zip(found) {
            let squares = if expected.abs() >= limit { &mut self.massive } else { &mut self.others };
            squares.add(*expected, *found);
        }
    }

    /// rms of the differences / rms of what it should be, of the worse of the two.
    pub fn relative(&self) -> f64 {
        self.massive.relative().max(self.others.relative())
    }

    /// Of what it should be, without massive values.
    fn others_rms(&self) -> f64 {
        (self.others.expected / self.others.count.max(1) as f64).sqrt()
    }
}

/// The size from which a value counts as massive: fifty times the 90th percentile. (Not the median: half of the outputs
/// of a GELU are nearly zero.)
fn massive_from(values: &[f32]) -> f32 {
    let mut sizes: Vec<f32> = values.iter().map(|value| value.abs()).collect();
    let large = sizes.len() * 9 / 10;
    match sizes.get(large) {
        Some(_) => match *sizes.select_nth_unstable_by(large, f32::total_cmp).1 {
            0.0 => f32::INFINITY,
            size => 50.0 * size,
        },
        None => f32::INFINITY,
    }
}

/// Compares rows of `width` values. What is not a number is infinitely far from anything.
pub fn compare(expected: &[f32], found: &Decoded, width: usize) -> Difference {
    let mut worst = Difference { rms: 0.0, peak: 0.0, row: 0, column: 0, expected: 0.0, found: 0.0 };
    for (row, (expected, values)) in expected.chunks_exact(width).zip(found.values.chunks_exact(width)).enumerate() {
        let apart = Apart::of(expected, values);
        let rms = apart.others_rms();
        for (column, (expected, found_value)) in expected.iter().zip(values).enumerate() {
            let difference = (*found_value as f64 - *expected as f64).abs();
            let beyond = (difference - found.grain(row * width + column) as f64).max(0.0);
            let peak = ratio(if difference.is_finite() { beyond } else { f64::INFINITY }, rms + expected.abs() as f64);
            if peak > worst.peak || (row, column) == (0, 0) {
                worst = Difference { peak, row, column, expected: *expected, found: *found_value, ..worst };
            }
        }
        worst.rms = worst.rms.max(apart.relative());
    }
    worst
}

/// The same of all rows together.
pub fn together(expected: &[f32], found: &[f32]) -> f64 {
    Apart::of(expected, found).relative()
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
    /// The largest loss of a row's choice: the difference of the CPU's scores of the right expert and of the chosen
    /// one, relative to the rms of the scores.
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
    fn massive_values_hide_nothing_and_are_not_let_off() {
        let mut expected: Vec<f32> = (0..256).map(|i| if i % 2 == 0 { 1.0 } else { -1.0 }).collect();
        (expected[37], expected[200]) = (20_000.0, -5_000.0);
        let off = |part: fn(f32) -> f32| {
            let found: Vec<f32> = expected.iter().map(|value| part(*value)).collect();
            compare(&expected, &decoded(&found), 256).rms
        };
        let small = off(|value| if value.abs() < 2.0 { value * 1.5 } else { value });
        let massive = off(|value| if value.abs() < 2.0 { value } else { value * 1.5 });
        assert!((small - 0.5).abs() < 1e-6 && (massive - 0.5).abs() < 1e-6, "{small} {massive}");
        // Many values next to nothing make none of the others massive.
        let expected: Vec<f32> = (0..256).map(|i| if i % 4 == 0 { 3.0 } else { 1e-6 }).collect();
        let found: Vec<f32> = expected.iter().map(|value| value + 1e-5).collect();
        assert!(compare(&expected, &decoded(&found), 256).rms < 1e-5);
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
