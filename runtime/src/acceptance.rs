//! How many drafts there are, and how often they are right, as that is seen.

/// Drafts in a row, at most: with the token before them as many rows as a decode of several verifies well.
pub const MOST_DRAFTS: u32 = 7;

/// Of what was learned so far, what one more outcome counts.
const WEIGHT: f64 = 0.1;
/// Acceptance before anything was seen.
pub(crate) const HOPE: f64 = 0.7;
/// How many outcomes what was known before counts as.
const PRIOR_WEIGHT: u32 = 3;

/// The probability that a draft is right if those before it are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Acceptance {
    rate: f64,
    /// Drafts whose outcome was seen.
    outcomes: u32,
}

impl Acceptance {
    /// Before anything was seen.
    pub const fn expected(rate: f64) -> Acceptance {
        Acceptance { rate, outcomes: 0 }
    }

    pub const fn rate(self) -> f64 {
        self.rate
    }

    /// Says how many of some drafts were right. Those behind the first wrong one tell nothing.
    pub fn learn(&mut self, drafted: u32, accepted: u32) {
        for outcome in 0..drafted.min(accepted + 1) {
            let seen = if outcome < accepted { 1.0 } else { 0.0 };
            let weight = (1.0 / f64::from(self.outcomes + PRIOR_WEIGHT)).max(WEIGHT);
            self.rate += weight * (seen - self.rate);
            self.outcomes = self.outcomes.saturating_add(1);
        }
    }
}
