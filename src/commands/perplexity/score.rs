//! The arithmetic: from scores of tokens to figures. Sums go in one order, that of the tokens, so that a run that was
//! interrupted ends with the same bits.

use std::fmt;

/// What was found of scored tokens, a value each, in their order.
#[derive(Clone, Debug, PartialEq)]
pub struct Scores {
    /// Negative log-likelihoods.
    pub nll: Vec<f64>,
    pub against: Option<Against>,
}

/// The same tokens by the other plan, and how far this one is from it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Against {
    pub nll: Vec<f64>,
    pub kl: Vec<f64>,
    /// Whether both find the same token likeliest.
    pub same_top: Vec<bool>,
}

impl Scores {
    pub fn new(has_against: bool) -> Scores {
        Scores { nll: Vec::new(), against: has_against.then(Against::default) }
    }

    pub fn append(&mut self, later: &Scores) {
        self.nll.extend(&later.nll);
        if let (Some(all), Some(later)) = (&mut self.against, &later.against) {
            all.nll.extend(&later.nll);
            all.kl.extend(&later.kl);
            all.same_top.extend(&later.same_top);
        }
    }
}

/// A mean and its standard error, which one value alone has not.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mean {
    pub mean: f64,
    pub error: Option<f64>,
}

impl Mean {
    pub fn of(values: &[f64]) -> Mean {
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        let error = (values.len() > 1).then(|| (squares / (count - 1.0) / count).sqrt());
        Mean { mean, error }
    }
}

impl fmt::Display for Mean {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.6}", self.mean)?;
        self.error.map_or(Ok(()), |error| write!(f, " ± {error:.6}"))
    }
}

/// The value below which this fraction of all lies; between two values the straight line, as llama.cpp has it. 0 of
/// none.
pub fn percentile(values: &[f64], fraction: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    let place = fraction.clamp(0.0, 1.0) * last as f64;
    let below = place as usize;
    let (low, high) = (sorted[below], sorted[(below + 1).min(last)]);
    low + (high - low) * (place - below as f64)
}

/// The share of those that are true; 0 of none.
pub fn share(values: &[bool]) -> f64 {
    values.iter().filter(|value| **value).count() as f64 / values.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-12, "{a} is not {b}");
    }

    #[test]
    fn the_error_of_a_mean_is_the_deviation_of_one_over_the_root_of_their_number() {
        // Around 5 the squares sum to 32: deviation √(32 / 7), error √(32 / 7 / 8).
        let Mean { mean, error } = Mean::of(&[2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]);
        close(mean, 5.0);
        close(error.expect("eight values"), (4f64 / 7.0).sqrt());
        assert_eq!(Mean::of(&[3.0]), Mean { mean: 3.0, error: None });
        assert_eq!(Mean::of(&[3.0, 3.0]).to_string(), "3.000000 ± 0.000000");
        assert_eq!(Mean::of(&[3.0]).to_string(), "3.000000");
    }

    #[test]
    fn percentiles_lie_on_the_line_between_two_values() {
        let values: Vec<f64> = (0..=100).rev().map(f64::from).collect();
        close(percentile(&values, 0.99), 99.0);
        // The last of 0, 1, 2, 3 has place 3; 0.99 of that is 2.97.
        close(percentile(&[3.0, 0.0, 2.0, 1.0], 0.99), 2.97);
        close(percentile(&[0.0, 10.0], 0.5), 5.0);
        close(percentile(&[7.0], 0.99), 7.0);
        close(percentile(&[1.0, 2.0], 1.0), 2.0);
        close(percentile(&[], 0.99), 0.0);
        close(share(&[true, false, true, true]), 0.75);
    }

    #[test]
    fn scores_follow_each_other() {
        let part = |nll, same| {
            let against = Against { nll: vec![nll + 1.0], kl: vec![nll / 2.0], same_top: vec![same] };
            Scores { nll: vec![nll], against: Some(against) }
        };
        let mut all = Scores::new(true);
        all.append(&part(1.0, true));
        all.append(&part(2.0, false));
        let against = Against { nll: vec![2.0, 3.0], kl: vec![0.5, 1.0], same_top: vec![true, false] };
        assert_eq!(all, Scores { nll: vec![1.0, 2.0], against: Some(against) });
    }
}
