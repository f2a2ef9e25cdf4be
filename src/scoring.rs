//! How a text is scored: cut into windows, and each token by the logits before it. Logits are f32, everything after them
//! is f64.

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

/// How a text is cut into windows: the way llama.cpp's perplexity tool does it.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    /// Of each window.
    pub tokens: usize,
    /// Whether every token of a window is scored, as far as there is one before it.
    pub all: bool,
}

impl Cut {
    /// The token in the middle is the first whose logits count, so the one after it is the first to be scored.
    pub fn first_scored(self) -> usize {
        if self.all { 1 } else { self.tokens / 2 + 1 }
    }

    /// Tokens of a window, at least: in fewer nothing is scored.
    pub fn least(self) -> usize {
        if self.all { 2 } else { 3 }
    }

    /// The windows of a text's tokens; what does not fill the last is left out. Where the vocabulary asks for a
    /// beginning-of-sequence token, it takes the place of each window's first, so that windows neither overlap nor
    /// shift.
    pub fn windows(self, ids: &[u32], bos: Option<u32>) -> impl Iterator<Item = Vec<u32>> {
        ids.chunks_exact(self.tokens).map(move |tokens| {
            let mut tokens = tokens.to_vec();
            tokens[0] = bos.unwrap_or(tokens[0]);
            tokens
        })
    }
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
    fn the_second_half_is_what_follows_the_token_in_the_middle() {
        let scored = |tokens, all| tokens - Cut { tokens, all }.first_scored();
        // llama.cpp scores n - 1 - n/2 tokens of a window of n.
        assert_eq!([3, 4, 5, 512].map(|n| scored(n, false)), [1, 1, 2, 255]);
        assert_eq!([2, 3, 512].map(|n| scored(n, true)), [1, 2, 511]);
        assert_eq!([true, false].map(|all| Cut { tokens: 2, all }.least()), [2, 3]);
        let windows: Vec<_> = Cut { tokens: 3, all: true }.windows(&[1, 2, 3, 4, 5, 6, 7], Some(9)).collect();
        assert_eq!(windows, [[9, 2, 3], [9, 5, 6]]);
    }
}
