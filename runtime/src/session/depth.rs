//! How many tokens to draft in a round: as many as was asked for, or as many as pay.
//!
//! What pays follows from two things that every round shows: how often a draft is accepted, and what a round takes with so many drafts. A
//! choice changes how long a text takes and never what it is.

/// Of what was learned so far, what one more outcome counts.
const WEIGHT: f64 = 0.1;
/// Acceptance before anything was seen.
const HOPE: f64 = 0.7;
/// Rounds without drafts after which one is tried again: at first, and at most.
const FIRST_PAUSE: u32 = 16;
const LONGEST_PAUSE: u32 = 256;

/// The number of drafts of the rounds of one sequence.
#[derive(Clone, Debug)]
pub struct Depth {
    most: u32,
    rule: Rule,
}

#[derive(Clone, Debug)]
enum Rule {
    Fixed,
    Learned(Learned),
}

#[derive(Clone, Debug)]
struct Learned {
    acceptance: f64,
    /// Seconds of a round without drafts, and of each draft besides; `None` until there was one.
    round: Option<f64>,
    draft: Option<f64>,
    /// Rounds without drafts since the last one with some, and how many there are to be.
    idle: u32,
    pause: u32,
}

impl Depth {
    /// Always `most`.
    pub const fn fixed(most: u32) -> Depth {
        Depth { most, rule: Rule::Fixed }
    }

    /// As many as pay, of at most `most`.
    pub const fn learned(most: u32) -> Depth {
        let learned = Learned { acceptance: HOPE, round: None, draft: None, idle: 0, pause: FIRST_PAUSE };
        Depth { most, rule: Rule::Learned(learned) }
    }

    /// How many the next round should have, if there is room for them.
    pub fn next(&self) -> u32 {
        match &self.rule {
            Rule::Fixed => self.most,
            Rule::Learned(learned) => learned.next(self.most),
        }
    }

    /// Says how a round went.
    pub fn learn(&mut self, drafted: u32, accepted: u32, seconds: f64) {
        if let Rule::Learned(learned) = &mut self.rule {
            learned.learn(drafted, accepted, seconds);
        }
    }
}

impl Learned {
    fn next(&self, most: u32) -> u32 {
        match (self.round, self.draft) {
            // Costs come first: one round without drafts, one with.
            (None, _) => 0,
            (_, None) => most.min(2),
            (Some(round), Some(draft)) => {
                // Tokens a second, up to a factor.
                let pays = |drafts: u32| expected_tokens(self.acceptance, drafts) / (round + f64::from(drafts) * draft);
                let best = (0..=most).max_by(|a, b| pays(*a).total_cmp(&pays(*b)).then(b.cmp(a))).unwrap_or(0);
                if best == 0 && self.idle >= self.pause { most.min(1) } else { best }
            }
        }
    }

    fn learn(&mut self, drafted: u32, accepted: u32, seconds: f64) {
        let towards = |known: Option<f64>, seen: f64| Some(known.map_or(seen, |known| known + WEIGHT * (seen - known)));
        if drafted == 0 {
            self.round = towards(self.round, seconds);
            self.idle = self.idle.saturating_add(1);
            return;
        }
        if let Some(round) = self.round {
            self.draft = towards(self.draft, (seconds - round).max(0.0) / f64::from(drafted));
        }
        // A trial that was in vain makes the next one later.
        let was_trial = self.idle >= self.pause;
        self.pause = match was_trial && accepted == 0 {
            true => (2 * self.pause).min(LONGEST_PAUSE),
            false => FIRST_PAUSE,
        };
        self.idle = 0;
        for outcome in 0..drafted.min(accepted + 1) {
            let seen = if outcome < accepted { 1.0 } else { 0.0 };
            self.acceptance += WEIGHT * (seen - self.acceptance);
        }
    }
}

/// Tokens of a round, each of whose drafts is accepted with this probability if those before it are.
fn expected_tokens(acceptance: f64, drafts: u32) -> f64 {
    (0..=drafts).map(|n| acceptance.powi(n as i32)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rounds of a sequence whose drafts are accepted as `accept` says, on a clock of our own: tokens, seconds.
    fn play(depth: &mut Depth, rounds: u32, round: f64, draft: f64, mut accept: impl FnMut() -> bool) -> (u32, f64) {
        let (mut tokens, mut clock) = (0, 0.0);
        for _ in 0..rounds {
            let drafted = depth.next();
            let accepted = (0..drafted).take_while(|_| accept()).count() as u32;
            let seconds = round + f64::from(drafted) * draft;
            depth.learn(drafted, accepted, seconds);
            (tokens, clock) = (tokens + accepted + 1, clock + seconds);
        }
        (tokens, clock)
    }

    #[test]
    fn drafts_that_are_never_right_cost_almost_nothing() {
        let (tokens, seconds) = play(&mut Depth::learned(7), 1000, 1.0, 0.3, || false);
        assert_eq!(tokens, 1000);
        assert!(seconds < 1030.0, "{seconds}");
    }

    #[test]
    fn drafts_that_are_right_are_made_to_the_full_depth() {
        let mut depth = Depth::learned(7);
        let (tokens, seconds) = play(&mut depth, 100, 1.0, 0.1, || true);
        assert!(f64::from(tokens) > 4.0 * seconds, "{tokens} in {seconds}");
        assert_eq!(depth.next(), 7);
        // And not at all where a draft takes as long as a token.
        let mut depth = Depth::learned(7);
        play(&mut depth, 100, 1.0, 1.1, || true);
        assert_eq!(depth.next(), 0);
    }

    #[test]
    fn a_text_that_becomes_easy_is_noticed() {
        let mut depth = Depth::learned(7);
        play(&mut depth, 300, 1.0, 0.1, || false);
        assert_eq!(depth.next(), 0);
        play(&mut depth, 600, 1.0, 0.1, || true);
        assert_eq!(depth.next(), 7);
        assert_eq!(Depth::fixed(3).next(), 3);
    }
}
