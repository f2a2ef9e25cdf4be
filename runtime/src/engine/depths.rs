//! How many tokens to guess for each sequence of a batch: as many as make the most tokens a second of all of them.
//!
//! A draft is worth the probability that it is kept, which falls with every draft before it. So drafts are taken in the order of that, whosever they
//! are, and where to stop follows from what decodes of so many rows take. No draft at all is one of the choices: then decodes are queued behind each other.

use crate::acceptance::Odds;

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
}
