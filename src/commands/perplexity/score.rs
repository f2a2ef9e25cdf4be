//! The arithmetic: from a row of logits to a token's score, from scores to figures.
//!
//! Logits are f32, everything after them is f64. Sums go in one order, that of the tokens, so that a run that was
//! interrupted ends with the same bits.

use std::fmt;

/// The logarithms of a row's probabilities.
#[derive(Clone, Copy)]
pub struct LogSoftmax<'a> {
    logits: &'a [f32],
    largest: f64,
    /// The logarithm of the sum of all exponentials, once the largest logit is taken off.
    log_sum: f64,
}

impl<'a> LogSoftmax<'a> {
    /// Of a row of finite logits.
    pub fn new(logits: &'a [f32]) -> LogSoftmax<'a> {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max) as f64;
        let sum: f64 = logits.iter().map(|logit| (*logit as f64 - largest).exp()).sum();
        LogSoftmax { logits, largest, log_sum: sum.ln() }
    }

    pub fn nll(&self, token: u32) -> f64 {
        self.nll_at(self.logits[token as usize])
    }

    /// Of a token with this logit. The largest goes first: its difference to another is exact or nearly so, whatever
    /// their size.
    fn nll_at(&self, logit: f32) -> f64 {
        self.log_sum - (logit as f64 - self.largest)
    }

    /// The Kullback-Leibler divergence of `other` from this one, KL(self ‖ other): what is lost where `other` is taken
    /// for this one.
    pub fn divergence(&self, other: &LogSoftmax<'_>) -> f64 {
        let term = |(p, q): (&f32, &f32)| {
            let (p, q) = (self.nll_at(*p), other.nll_at(*q));
            (-p).exp() * (q - p)
        };
        self.logits.iter().zip(other.logits).map(term).sum()
    }
}

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

    /// Logits whose probabilities are these, moved by a constant that changes nothing.
    fn logits<const N: usize>(probabilities: [f32; N], moved: f32) -> [f32; N] {
        probabilities.map(|p| p.log2() * std::f32::consts::LN_2 + moved)
    }

    #[test]
    fn a_tokens_score_is_the_logarithm_of_its_probability() {
        // Four equal logits: each token has a quarter, wherever the logits lie.
        for level in [-1e30f32, -5.0, 0.0, 80.0, 1e30] {
            close(LogSoftmax::new(&[level; 4]).nll(2), 4f64.ln());
        }
        // exp(0) : exp(1000): nothing overflows, and the lesser one is 1000 away.
        let row = [0.0, 1000.0];
        close(LogSoftmax::new(&row).nll(1), 0.0);
        close(LogSoftmax::new(&row).nll(0), 1000.0);
    }

    #[test]
    fn divergence_is_of_the_other_from_the_first() {
        // KL((1/2, 1/4, 1/4) ‖ (1/4, 1/4, 1/2)) = 1/2 ln 2 + 0 - 1/4 ln 2.
        let (p, q) = (logits([0.5, 0.25, 0.25], 3.0), logits([0.25, 0.25, 0.5], -7.0));
        let (p, q) = (LogSoftmax::new(&p), LogSoftmax::new(&q));
        assert!((p.divergence(&q) - 0.25 * 2f64.ln()).abs() < 1e-6);
        assert_eq!(p.divergence(&p), 0.0);
        // It is no distance: from (3/4, 1/4) to (1/2, 1/2) and back are two numbers.
        let (p, q) = (logits([0.75, 0.25], 0.0), logits([0.5, 0.5], 0.0));
        let (p, q) = (LogSoftmax::new(&p), LogSoftmax::new(&q));
        let there = 0.75 * 1.5f64.ln() + 0.25 * 0.5f64.ln();
        let back = 0.5 * (0.5f64 / 0.75).ln() + 0.5 * 2f64.ln();
        assert!((p.divergence(&q) - there).abs() < 1e-6 && (q.divergence(&p) - back).abs() < 1e-6);
    }

    /// A token that the reference rules out weighs nothing, one that it expects and the other rules out weighs much.
    #[test]
    fn tokens_without_probability_are_no_trouble() {
        let (sure, even) = ([0.0, -2000.0], [0.0, 0.0]);
        let (sure, even) = (LogSoftmax::new(&sure), LogSoftmax::new(&even));
        close(sure.divergence(&even), 2f64.ln());
        close(even.divergence(&sure), 0.5 * (0.5f64.ln()) + 0.5 * (0.5f64.ln() + 2000.0));
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
