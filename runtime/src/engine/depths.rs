//! How many tokens to guess for each sequence of a batch: as many as make the most tokens a second of all of them.
//!
//! A draft is worth the probability that it is kept, which falls with every draft before it. So drafts are taken in the
//! order of that, whosever they are, and where to stop follows from what decodes of so many rows take. No draft at all
//! is one of the choices: then decodes are queued behind each other. A single sequence whose rounds the device closes
//! by itself has the same choice by what such rounds take. A choice changes how long a text takes and never what it is.

use super::pace::ClosedRounds;
use crate::acceptance::Odds;

/// Decodes without drafts after which some are tried again: at first, and at most.
const FIRST_PAUSE: u32 = 16;
const LONGEST_PAUSE: u32 = 256;
/// Drafts of the first closed round that has some.
const FIRST_DRAFTS: u32 = 3;

/// When drafts that do not seem to pay are tried again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Trials {
    /// Decodes without drafts since the last with some, and how many there are to be before some are tried.
    idle: u32,
    pause: u32,
}

impl Default for Trials {
    fn default() -> Trials {
        Trials { idle: 0, pause: FIRST_PAUSE }
    }
}

impl Trials {
    /// A decode without drafts is queued.
    pub fn pass_by(&mut self) {
        self.idle = self.idle.saturating_add(1);
    }

    /// Whether there were so many decodes without drafts that one with some is a trial.
    pub const fn is_due(&self) -> bool {
        self.idle >= self.pause
    }

    /// A decode with drafts begins. Returns whether it is a trial.
    pub fn begin(&mut self) -> bool {
        let is_trial = self.is_due();
        self.idle = 0;
        is_trial
    }

    /// How a decode with drafts went. A trial in vain makes the next one later, one that was not makes it sooner again;
    /// luck may be either.
    pub fn learn(&mut self, is_trial: bool, is_vain: bool) {
        self.pause = match is_trial {
            true if is_vain => (2 * self.pause).min(LONGEST_PAUSE),
            true => (self.pause / 2).max(FIRST_PAUSE),
            false => FIRST_PAUSE,
        };
    }
}

/// How many drafts the next round of a single sequence has that the device closes by itself, of at most `most`.
pub(super) fn of_closed_round(odds: Odds, most: u32, times: &ClosedRounds, is_trial_due: bool) -> u32 {
    // Costs come first: one round without drafts, one with a few.
    match times.most() {
        None => return 0,
        Some(0) => return most.min(FIRST_DRAFTS),
        Some(_) => {}
    }
    // Tokens a second, up to a factor.
    let pays = |drafts: u32| odds.tokens(drafts) / times.seconds(drafts);
    let best = (0..=most).max_by(|a, b| pays(*a).total_cmp(&pays(*b)).then(b.cmp(a))).unwrap_or(0);
    if best == 0 && is_trial_due { most.min(1) } else { best }
}

/// A sequence for which tokens may be guessed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Candidate {
    /// How likely its drafts are.
    pub odds: Odds,
    /// Drafts that it may have.
    pub most: u32,
}

/// What decodes take, in seconds.
pub(super) struct Costs<'a> {
    /// Of a row for each sequence, queued behind another such decode.
    pub plain: f64,
    /// Of so many rows, for which the host waits.
    pub round: &'a dyn Fn(u32) -> f64,
    /// Of a token of the drafter.
    pub draft: f64,
}

/// How many drafts each has, so that they have the most tokens a second together, with at most so many rows in all.
pub(super) fn best(candidates: &[Candidate], rows: u32, costs: &Costs<'_>) -> Vec<u32> {
    let count = candidates.len() as u32;
    let mut drafts: Vec<(f64, usize)> = Vec::new();
    for (index, candidate) in candidates.iter().enumerate() {
        drafts.extend((1..=candidate.most).map(|depth| (candidate.odds.kept(depth), index)));
    }
    drafts.sort_by(|a, b| b.0.total_cmp(&a.0));
    drafts.truncate(rows.saturating_sub(count) as usize);
    let mut tokens = f64::from(count);
    let (mut fastest, mut taken) = (tokens / costs.plain, 0);
    for (made, (probability, _)) in (1u32..).zip(&drafts) {
        tokens += probability;
        let rate = tokens / ((costs.round)(count + made) + f64::from(made) * costs.draft);
        if rate > fastest {
            (fastest, taken) = (rate, made as usize);
        }
    }
    let mut depths = vec![0; candidates.len()];
    drafts[..taken].iter().for_each(|(_, index)| depths[*index] += 1);
    depths
}

/// The same number of drafts for all that may have them, as far as rows allow.
pub(super) fn even(candidates: &[Candidate], depth: u32, rows: u32) -> Vec<u32> {
    let mut free = rows.saturating_sub(candidates.len() as u32);
    let mut depths = vec![0; candidates.len()];
    for level in 0..depth {
        for (depth, candidate) in depths.iter_mut().zip(candidates) {
            if free > 0 && *depth == level && candidate.most > level {
                (*depth, free) = (*depth + 1, free - 1);
            }
        }
    }
    depths
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::acceptance::Acceptance;

    fn of(acceptances: &[f64]) -> Vec<Candidate> {
        acceptances.iter().map(|rate| with_most(*rate, 7)).collect()
    }

    fn with_most(rate: f64, most: u32) -> Candidate {
        Candidate { odds: Odds { first: rate, rest: rate }, most }
    }

    /// Rows cost the more, the more of them there are: 2 ms, and a tenth of one for each.
    fn costs(draft: f64) -> Costs<'static> {
        Costs { plain: 2.1, round: &|rows| 2.0 + 0.1 * f64::from(rows.next_power_of_two()), draft }
    }

    #[test]
    fn drafts_go_to_whom_they_serve() {
        assert_eq!(best(&of(&[0.9]), 64, &costs(0.0)), [7]);
        assert_eq!(best(&of(&[0.0]), 64, &costs(0.0)), [0]);
        assert_eq!(best(&of(&[0.9, 0.0, 0.9]), 64, &costs(0.0)), [7, 0, 6], "sixteen rows");
        // A drafter's tokens cost something too.
        assert_eq!(best(&of(&[0.9, 0.3, 0.9]), 64, &costs(0.3)), [3, 0, 2]);
        assert_eq!(best(&of(&[0.9, 0.9]), 64, &costs(3.0)), [0, 0]);
        // Where all rows are taken there is none to guess for.
        assert_eq!(best(&of(&[0.9, 0.9, 0.9]), 4, &costs(0.0)), [1, 0, 0]);
        assert_eq!(best(&of(&[0.9, 0.9]), 2, &costs(0.0)), [0, 0]);
        assert_eq!(best(&[with_most(0.9, 2)], 64, &costs(0.0)), [2]);
    }

    #[test]
    fn a_first_draft_that_may_be_wrong_is_no_reason_to_make_few() {
        let costs = Costs { plain: 1.0, round: &|rows| 1.0 + 0.04 * f64::from(rows), draft: 0.0 };
        let looked_up = |first, rest| [Candidate { odds: Odds { first, rest }, most: 15 }];
        assert_eq!(best(&looked_up(0.5, 0.98), 64, &costs), [15]);
        assert_eq!(best(&looked_up(0.5, 0.5), 64, &costs), [3]);
        assert_eq!(best(&looked_up(0.02, 0.98), 64, &costs), [0]);
    }

    #[test]
    fn decodes_that_are_queued_ahead_are_not_given_up_for_little() {
        let costs = Costs { plain: 1.0, round: &|_| 1.5, draft: 0.0 };
        assert_eq!(best(&of(&[0.3]), 8, &costs), [0]);
        assert_eq!(best(&of(&[0.5]), 8, &costs), [7]);
    }

    #[test]
    fn a_depth_that_was_asked_for_is_shared_out() {
        assert_eq!(even(&of(&[0.1, 0.1, 0.1]), 3, 64), [3, 3, 3]);
        assert_eq!(even(&of(&[0.1, 0.1, 0.1]), 3, 8), [2, 2, 1]);
        assert_eq!(even(&[with_most(0.1, 1), with_most(0.1, 0)], 3, 8), [1, 0]);
        assert_eq!(even(&of(&[0.1, 0.1]), 3, 2), [0, 0]);
    }

    /// One sequence whose device closes its rounds.
    struct Alone {
        acceptance: Acceptance,
        times: ClosedRounds,
        trials: Trials,
    }

    impl Alone {
        fn new() -> Alone {
            Alone { acceptance: Acceptance::DRAFTED, times: ClosedRounds::default(), trials: Trials::default() }
        }

        fn next(&self) -> u32 {
            of_closed_round(self.acceptance.odds(0), 7, &self.times, self.trials.is_due())
        }

        /// A round that takes as long as `seconds` says, of whose drafts those are right up to the first that is not:
        /// how many it had, and its tokens.
        fn round(&mut self, seconds: impl Fn(u32) -> f64, mut is_right: impl FnMut() -> bool) -> (u32, u32) {
            let drafted = self.next();
            let is_trial = drafted > 0 && self.trials.begin();
            if drafted == 0 {
                self.trials.pass_by();
            }
            let accepted = (0..drafted).take_while(|_| is_right()).count() as u32;
            self.times.measured(drafted, seconds(drafted));
            if drafted > 0 {
                self.trials.learn(is_trial, accepted == 0);
                self.acceptance.learn(0, drafted, accepted);
            }
            (drafted, accepted + 1)
        }

        /// So many rounds: their tokens, and the seconds that they took.
        fn play(
            &mut self,
            rounds: u32,
            seconds: impl Fn(u32) -> f64,
            mut is_right: impl FnMut() -> bool,
        ) -> (u32, f64) {
            let (mut tokens, mut clock) = (0, 0.0);
            for _ in 0..rounds {
                let (drafted, made) = self.round(&seconds, &mut is_right);
                (tokens, clock) = (tokens + made, clock + seconds(drafted));
            }
            (tokens, clock)
        }
    }

    fn rounds_of(round: f64, draft: f64) -> impl Fn(u32) -> f64 {
        move |drafts| round + f64::from(drafts) * draft
    }

    #[test]
    fn drafts_that_are_never_right_cost_almost_nothing() {
        let (tokens, seconds) = Alone::new().play(1000, rounds_of(1.0, 0.3), || false);
        assert_eq!(tokens, 1000);
        assert!(seconds < 1030.0, "{seconds}");
    }

    #[test]
    fn drafts_that_are_right_are_made_to_the_full_depth() {
        let mut alone = Alone::new();
        let (tokens, seconds) = alone.play(100, rounds_of(1.0, 0.1), || true);
        assert!(f64::from(tokens) > 4.0 * seconds, "{tokens} in {seconds}");
        assert_eq!(alone.next(), 7);
        // And not at all where a draft takes as long as a token.
        let mut alone = Alone::new();
        alone.play(100, rounds_of(1.0, 1.1), || true);
        assert_eq!(alone.next(), 0);
    }

    #[test]
    fn rows_that_cost_nothing_more_are_used() {
        // As an H200 verifies 1, 2 and up to 8 rows of E4B, with drafts of 93 microseconds.
        let seconds =
            |drafts: u32| [2.06, 2.6, 3.19][drafts.min(2) as usize] + f64::from(drafts.saturating_sub(2)) * 0.093;
        // Four of five are right.
        let mut turn = 0u32;
        let (tokens, clock) = Alone::new().play(60, seconds, || {
            turn += 1;
            !turn.is_multiple_of(5)
        });
        assert!(f64::from(tokens) * 2.06 > 1.8 * clock, "{tokens} in {clock}");
    }

    #[test]
    fn a_lucky_trial_is_no_reason_for_many() {
        // One draft in eight is right, and one in three would have to be.
        let (mut turn, mut drafted) = (0u32, 0);
        Alone::new().play(4000, rounds_of(1.0, 0.4), || {
            (turn, drafted) = (turn + 1, drafted + 1);
            turn.is_multiple_of(8)
        });
        assert!(drafted < 80, "{drafted} drafts in 4000 rounds");
    }

    #[test]
    fn a_text_that_becomes_easy_is_noticed() {
        let mut alone = Alone::new();
        alone.play(300, rounds_of(1.0, 0.1), || false);
        assert_eq!(alone.next(), 0);
        alone.play(600, rounds_of(1.0, 0.1), || true);
        assert_eq!(alone.next(), 7);
    }
}
