//! How many tokens to draft in a round: as many as was asked for, or as many as pay.
//!
//! What pays follows from two things that every round shows: how often a draft is accepted, and what a round takes with so many drafts. A
//! choice changes how long a text takes and never what it is.

use std::collections::BTreeMap;

use crate::acceptance::Acceptance;

/// Of what a round was seen to take, what one more counts.
const WEIGHT: f64 = 0.1;
/// Rounds without drafts after which one is tried again: at first, and at most.
const FIRST_PAUSE: u32 = 16;
const LONGEST_PAUSE: u32 = 256;
/// Drafts of the first round that has some.
const FIRST_DRAFTS: u32 = 3;
/// Of what the last drafts cost that were tried, what more are hoped to cost.
const HOPED_SHARE: f64 = 0.5;

/// The number of drafts of the rounds of one sequence.
#[derive(Clone, Debug)]
pub struct Depth {
    most: u32,
    rule: Rule,
}

#[derive(Clone, Debug)]
enum Rule {
    Fixed,
    Learned(Box<Learned>),
}

#[derive(Clone, Debug)]
struct Learned {
    acceptance: Acceptance,
    /// Seconds of a round with so many drafts, of those that there were. What a draft more takes is not the same for all: a device may verify eight rows in
    /// the time of three.
    rounds: BTreeMap<u32, f64>,
    /// Rounds without drafts since the last one with some, and how many there are to be.
    idle: u32,
    pause: u32,
    /// Whether the drafts on their way are tried although they do not seem to pay.
    is_trial: bool,
}

impl Depth {
    /// Always `most`.
    pub const fn fixed(most: u32) -> Depth {
        Depth { most, rule: Rule::Fixed }
    }

    /// As many as pay, of at most `most`, by what is expected of them before the first.
    pub fn learned(most: u32, acceptance: Acceptance) -> Depth {
        let (rounds, idle) = (BTreeMap::new(), 0);
        let learned = Learned { acceptance, rounds, idle, pause: FIRST_PAUSE, is_trial: false };
        Depth { most, rule: Rule::Learned(Box::new(learned)) }
    }

    /// How many the next round should have, if there is room for them. Drafts that are looked up go by so many tokens.
    pub fn next(&self, matched: u32) -> u32 {
        match &self.rule {
            Rule::Fixed => self.most,
            Rule::Learned(learned) => learned.next(matched, self.most),
        }
    }

    /// Whether it is known what a round with so many takes, or of no interest.
    pub fn knows(&self, drafts: u32) -> bool {
        match &self.rule {
            Rule::Fixed => true,
            Rule::Learned(learned) => learned.rounds.contains_key(&drafts),
        }
    }

    /// Says that a round with so many begins; others may be on their way.
    pub fn begin(&mut self, drafts: u32) {
        if let Rule::Learned(learned) = &mut self.rule {
            learned.begin(drafts);
        }
    }

    /// Says how a round went.
    pub fn learn(&mut self, matched: u32, drafted: u32, accepted: u32, seconds: f64) {
        if let Rule::Learned(learned) = &mut self.rule {
            learned.learn(matched, drafted, accepted, seconds);
        }
    }
}

impl Learned {
    fn next(&self, matched: u32, most: u32) -> u32 {
        // Costs come first: one round without drafts, one with a few.
        match self.rounds.last_key_value() {
            None => return 0,
            Some((0, _)) => return most.min(FIRST_DRAFTS),
            Some(_) => {}
        }
        let odds = self.acceptance.odds(matched);
        // Tokens a second, up to a factor.
        let pays = |drafts: u32| odds.tokens(drafts) / self.seconds(drafts);
        let best = (0..=most).max_by(|a, b| pays(*a).total_cmp(&pays(*b)).then(b.cmp(a))).unwrap_or(0);
        if best == 0 && self.is_rested() { most.min(1) } else { best }
    }

    /// Whether there were so many rounds without drafts that one with some is a trial.
    const fn is_rested(&self) -> bool {
        self.idle >= self.pause
    }

    /// What a round takes with so many drafts. Between two numbers that were seen it lies between them. Beyond them more drafts are hoped to cost half of what the
    /// last ones did, since a device may verify eight rows in the time of five: where that is wrong, the first such round shows it.
    fn seconds(&self, drafts: u32) -> f64 {
        let mut below = self.rounds.range(..=drafts).rev();
        let (above, below, before) = (self.rounds.range(drafts..).next(), below.next(), below.next());
        let slope = |(a, low): (&u32, &f64), (b, high): (&u32, &f64)| (high - low) / f64::from(b - a);
        match (before, below, above) {
            (_, Some((seen, seconds)), _) if *seen == drafts => *seconds,
            (_, Some(low), Some(high)) => low.1 + slope(low, high) * f64::from(drafts - low.0),
            (Some(lower), Some(low), None) => {
                low.1 + HOPED_SHARE * slope(lower, low).max(0.0) * f64::from(drafts - low.0)
            }
            (_, Some((_, seconds)), _) | (_, None, Some((_, seconds))) => *seconds,
            (_, None, None) => f64::INFINITY,
        }
    }

    fn begin(&mut self, drafts: u32) {
        if drafts > 0 {
            (self.is_trial, self.idle) = (self.is_rested(), 0);
        }
    }

    fn learn(&mut self, matched: u32, drafted: u32, accepted: u32, seconds: f64) {
        let known = self.rounds.entry(drafted).or_insert(seconds);
        *known += WEIGHT * (seconds - *known);
        if drafted == 0 {
            self.idle = self.idle.saturating_add(1);
            return;
        }
        // A trial that was in vain makes the next one later, one that was not makes it sooner again; luck may be either.
        self.pause = match (self.is_trial, accepted) {
            (true, 0) => (2 * self.pause).min(LONGEST_PAUSE),
            (true, _) => (self.pause / 2).max(FIRST_PAUSE),
            (false, _) => FIRST_PAUSE,
        };
        self.is_trial = false;
        self.acceptance.learn(matched, drafted, accepted);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rounds of a sequence whose drafts are accepted as `accept` says, on a clock of our own: tokens, seconds.
    fn play(depth: &mut Depth, rounds: u32, round: f64, draft: f64, mut accept: impl FnMut() -> bool) -> (u32, f64) {
        let (mut tokens, mut clock) = (0, 0.0);
        for _ in 0..rounds {
            let drafted = depth.next(0);
            depth.begin(drafted);
            let accepted = (0..drafted).take_while(|_| accept()).count() as u32;
            let seconds = round + f64::from(drafted) * draft;
            depth.learn(0, drafted, accepted, seconds);
            (tokens, clock) = (tokens + accepted + 1, clock + seconds);
        }
        (tokens, clock)
    }

    #[test]
    fn drafts_that_are_never_right_cost_almost_nothing() {
        let (tokens, seconds) = play(&mut Depth::learned(7, Acceptance::DRAFTED), 1000, 1.0, 0.3, || false);
        assert_eq!(tokens, 1000);
        assert!(seconds < 1030.0, "{seconds}");
    }

    /// A long match is right to the end, a short one never, and a draft costs nothing: as many as there may be, and none.
    #[test]
    fn lookups_go_as_far_as_their_match_says() {
        let mut depth = Depth::learned(15, Acceptance::LOOKED_UP);
        for round in 0..60 {
            let (matched, is_right) = if round % 2 == 0 { (16, true) } else { (2, false) };
            let drafted = depth.next(matched);
            depth.begin(drafted);
            depth.learn(matched, drafted, if is_right { drafted } else { 0 }, 1.0 + 0.05 * f64::from(drafted));
        }
        assert_eq!((depth.next(16), depth.next(2)), (15, 0));
    }

    #[test]
    fn drafts_that_are_right_are_made_to_the_full_depth() {
        let mut depth = Depth::learned(7, Acceptance::DRAFTED);
        let (tokens, seconds) = play(&mut depth, 100, 1.0, 0.1, || true);
        assert!(f64::from(tokens) > 4.0 * seconds, "{tokens} in {seconds}");
        assert_eq!(depth.next(0), 7);
        // And not at all where a draft takes as long as a token.
        let mut depth = Depth::learned(7, Acceptance::DRAFTED);
        play(&mut depth, 100, 1.0, 1.1, || true);
        assert_eq!(depth.next(0), 0);
    }

    #[test]
    fn rows_that_cost_nothing_more_are_used() {
        // As an H200 verifies 1, 2 and up to 8 rows of E4B, with drafts of 93 microseconds.
        let seconds =
            |drafts: u32| [2.06, 2.6, 3.19][drafts.min(2) as usize] + f64::from(drafts.saturating_sub(2)) * 0.093;
        let (mut depth, mut clock, mut tokens, mut turn) = (Depth::learned(7, Acceptance::DRAFTED), 0.0, 0, 0u32);
        for _ in 0..60 {
            let drafted = depth.next(0);
            depth.begin(drafted);
            // Four of five are right.
            let right = |turn: &mut u32| {
                *turn += 1;
                !turn.is_multiple_of(5)
            };
            let accepted = (0..drafted).take_while(|_| right(&mut turn)).count() as u32;
            depth.learn(0, drafted, accepted, seconds(drafted));
            (clock, tokens) = (clock + seconds(drafted), tokens + accepted + 1);
        }
        assert!(f64::from(tokens) * 2.06 > 1.8 * clock, "{tokens} in {clock}");
    }

    #[test]
    fn a_lucky_trial_is_no_reason_for_many() {
        // One draft in eight is right, and one in three would have to be.
        let (mut turn, mut drafted) = (0u32, 0);
        let mut depth = Depth::learned(7, Acceptance::DRAFTED);
        play(&mut depth, 4000, 1.0, 0.4, || {
            (turn, drafted) = (turn + 1, drafted + 1);
            turn.is_multiple_of(8)
        });
        assert!(drafted < 80, "{drafted} drafts in 4000 rounds");
    }

    #[test]
    fn a_text_that_becomes_easy_is_noticed() {
        let mut depth = Depth::learned(7, Acceptance::DRAFTED);
        play(&mut depth, 300, 1.0, 0.1, || false);
        assert_eq!(depth.next(0), 0);
        play(&mut depth, 600, 1.0, 0.1, || true);
        assert_eq!(depth.next(0), 7);
        assert_eq!(Depth::fixed(3).next(0), 3);
    }
}
