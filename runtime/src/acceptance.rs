//! How many drafts there are, and how often they are right, as that is seen.
//!
//! The drafts of a drafter are all alike: each is right with the same probability if those before it are. Tokens that
//! were looked up in the text are not. Where few tokens matched, the place is often another one, and the first draft
//! tells; behind a first draft that is right the text goes on as it did there. So two probabilities are learned of
//! them, that of the first draft and that of every later one, and both by how many tokens matched.

/// Drafts in a row of a drafter, at most: with the token before them as many rows as a decode of several verifies well.
pub const MOST_DRAFTS: u32 = 7;

/// Tokens in a row that are looked up, at most. They cost nothing to make, so rows are worth computing that few of them
/// reach: with the token before them they fill a decode of sixteen.
pub const MOST_LOOKED_UP: u32 = 15;

/// Of what was learned so far, what one more outcome counts.
const WEIGHT: f64 = 0.1;
/// The same of drafts of which a round has many: those of a drafter, and those behind the first that were looked up. An
/// outcome is all or nothing: with a tenth the rate that is seen strays by a tenth from the one that there is, and the
/// number of drafts that pay with it.
const SMALL_WEIGHT: f64 = 0.03;
/// Acceptance before anything was seen.
pub(crate) const HOPE: f64 = 0.7;
/// How many outcomes what was known before counts as.
const PRIOR_WEIGHT: u32 = 3;

/// How likely the drafts of a round are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Odds {
    /// That the first is right.
    pub first: f64,
    /// That a later one is right if those before it are.
    pub rest: f64,
}

impl Odds {
    /// The probability that so many drafts are all right.
    pub fn kept(self, drafts: u32) -> f64 {
        match drafts.checked_sub(1) {
            None => 1.0,
            Some(later) => self.first * self.rest.powi(later as i32),
        }
    }

    /// Tokens of a round with so many drafts: those that are right, and the one after them.
    pub fn tokens(self, drafts: u32) -> f64 {
        (0..=drafts).map(|drafts| self.kept(drafts)).sum()
    }
}

/// What is known of the drafts of a sequence, or of many.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Acceptance {
    Drafted(Rate),
    LookedUp([Found; CLASSES]),
}

/// A probability, as it is learned.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rate {
    rate: f64,
    outcomes: u32,
}

/// Of drafts by matches of about one length.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    first: Rate,
    rest: Rate,
}

/// Lengths of matches that are told apart: 2, 3, 4 to 7, 8 to 15, and more.
const CLASSES: usize = 5;

fn class(matched: u32) -> usize {
    match matched {
        0..=2 => 0,
        3 => 1,
        4..=7 => 2,
        8..=15 => 3,
        16.. => 4,
    }
}

impl Default for Acceptance {
    fn default() -> Acceptance {
        Acceptance::DRAFTED
    }
}

impl Acceptance {
    /// Of a drafter, before anything was seen.
    pub const DRAFTED: Acceptance = Acceptance::Drafted(Rate::expected(HOPE));
    /// Of lookups, before anything was seen.
    pub const LOOKED_UP: Acceptance =
        Acceptance::LookedUp([Found { first: Rate::expected(HOPE), rest: Rate::expected(HOPE) }; CLASSES]);

    /// What to expect of another sequence, of which nothing was seen.
    pub fn of_another(&self) -> Acceptance {
        let anew = |rate: Rate| Rate::expected(rate.rate);
        match self {
            Acceptance::Drafted(rate) => Acceptance::Drafted(anew(*rate)),
            Acceptance::LookedUp(found) => {
                Acceptance::LookedUp(found.map(|found| Found { first: anew(found.first), rest: anew(found.rest) }))
            }
        }
    }

    /// How likely the next drafts are; those that are looked up go by so many tokens.
    pub fn odds(&self, matched: u32) -> Odds {
        match self {
            Acceptance::Drafted(rate) => Odds { first: rate.rate, rest: rate.rate },
            Acceptance::LookedUp(found) => {
                let found = &found[class(matched)];
                Odds { first: found.first.rate, rest: found.rest.rate }
            }
        }
    }

    /// Says how many of some drafts were right. Those behind the first wrong one tell nothing.
    pub fn learn(&mut self, matched: u32, drafted: u32, accepted: u32) {
        for outcome in 0..drafted.min(accepted + 1) {
            let is_right = outcome < accepted;
            match self {
                Acceptance::Drafted(rate) => rate.learn(is_right, SMALL_WEIGHT),
                Acceptance::LookedUp(found) if outcome == 0 => found[class(matched)].first.learn(is_right, WEIGHT),
                Acceptance::LookedUp(found) => found[class(matched)].rest.learn(is_right, SMALL_WEIGHT),
            }
        }
    }
}

impl Rate {
    const fn expected(rate: f64) -> Rate {
        Rate { rate, outcomes: 0 }
    }

    fn learn(&mut self, is_right: bool, least_weight: f64) {
        let weight = (1.0 / f64::from(self.outcomes + PRIOR_WEIGHT)).max(least_weight);
        self.rate += weight * (f64::from(u8::from(is_right)) - self.rate);
        self.outcomes = self.outcomes.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lookups_learn_by_the_length_of_the_match_and_apart_from_the_first_draft() {
        let mut acceptance = Acceptance::LOOKED_UP;
        for _ in 0..50 {
            acceptance.learn(2, 4, 0);
            acceptance.learn(20, 15, 15);
            // One in two places is the right one, and from there the text goes on for long.
            acceptance.learn(5, 15, 0);
            acceptance.learn(5, 15, 15);
        }
        let (short, middle, long) = (acceptance.odds(2), acceptance.odds(4), acceptance.odds(100));
        assert!(short.kept(1) < 0.05 && short.tokens(15) < 1.2, "{short:?}");
        assert!(long.kept(15) > 0.9 && long.tokens(15) > 15.0, "{long:?}");
        assert!((0.4..0.6).contains(&middle.first) && middle.rest > 0.95, "{middle:?}");
        assert_eq!(acceptance.odds(3), Acceptance::LOOKED_UP.odds(3), "of a length that was not seen");
        assert_eq!(acceptance.of_another().odds(5), middle);
    }

    #[test]
    fn the_drafts_of_a_drafter_are_alike() {
        let mut acceptance = Acceptance::DRAFTED;
        (0..50).for_each(|_| acceptance.learn(0, 3, 1));
        let odds = acceptance.odds(0);
        assert_eq!((odds, odds.first), (acceptance.odds(9), odds.rest));
        assert!((0.4..0.6).contains(&odds.first) && (odds.kept(2) - odds.first * odds.first).abs() < 1e-9, "{odds:?}");
    }
}
