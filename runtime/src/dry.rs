//! DRY: a token is made less likely that would go on with what was said before, the more so the longer that is.
//!
//! Single words may come again as often as they like, which penalties on tokens do not allow; it is the second time
//! the same sentence begins that costs. What ends a match, such as a line's end, is a breaker: forms that repeat their
//! punctuation are left alone.

use std::collections::BTreeMap;
use std::sync::Arc;

/// How DRY is set. With a multiplier of 0 it does nothing.
#[derive(Clone, Debug, PartialEq)]
pub struct Dry {
    /// What the shortest match costs that costs anything.
    pub multiplier: f32,
    /// By how much more each further token of the match costs.
    pub base: f32,
    /// The longest match that is free is one shorter.
    pub allowed: u32,
    /// Tokens that are looked back at; 0 for all of them.
    pub latest: u32,
    /// Tokens that no match goes across, in order.
    pub breakers: Arc<[u32]>,
}

impl Default for Dry {
    fn default() -> Dry {
        Dry { multiplier: 0.0, base: 1.75, allowed: 2, latest: 0, breakers: Arc::default() }
    }
}

impl Dry {
    pub fn is_needed(&self) -> bool {
        self.multiplier != 0.0
    }
}

/// Longer matches cost no more than this one.
const LONGEST_MATCH: u32 = 256;

/// A text, and where in it the same was said as at its end.
#[derive(Clone, Debug, Default)]
pub struct Repeats {
    tokens: Vec<u32>,
    /// How many tokens up to each place, with that one, are the same as the latest.
    matches: Vec<u32>,
}

impl Repeats {
    /// Of a prompt.
    pub fn new(dry: &Dry, prompt: &[u32]) -> Repeats {
        let mut matches = vec![0; prompt.len()];
        // Up to the last breaker, which nothing matches.
        let is_breaker = |token: &u32| dry.breakers.binary_search(token).is_ok();
        let longest = prompt.iter().rev().take(LONGEST_MATCH as usize).take_while(|token| !is_breaker(token)).count();
        for (at, count) in matches.iter_mut().enumerate().take(prompt.len().saturating_sub(1)) {
            let pairs = prompt[..=at].iter().rev().zip(prompt.iter().rev()).take(longest);
            *count = pairs.take_while(|(earlier, latest)| earlier == latest).count() as u32;
        }
        Repeats { tokens: prompt.to_vec(), matches }
    }

    pub fn push(&mut self, dry: &Dry, token: u32) {
        if dry.breakers.binary_search(&token).is_ok() {
            self.matches.fill(0);
        } else {
            for at in (0..self.tokens.len()).rev() {
                let before = at.checked_sub(1).map_or(0, |before| self.matches[before]);
                self.matches[at] = if self.tokens[at] == token { (before + 1).min(LONGEST_MATCH) } else { 0 };
            }
        }
        self.tokens.push(token);
        self.matches.push(0);
    }

    /// Takes from the logits of tokens that would go on with a match.
    pub fn penalise(&self, dry: &Dry, logits: &mut [f32]) {
        let from = match dry.latest {
            0 => 0,
            latest => self.tokens.len().saturating_sub(latest as usize),
        };
        // Of a token that would go on with several, the longest counts.
        let mut longest: BTreeMap<u32, u32> = BTreeMap::new();
        for (count, next) in self.matches[from..].iter().zip(self.tokens[from..].iter().skip(1)) {
            if *count >= dry.allowed && *count > 0 && dry.breakers.binary_search(next).is_err() {
                let known = longest.entry(*next).or_default();
                *known = (*known).max(*count);
            }
        }
        for (token, count) in longest {
            if let Some(logit) = logits.get_mut(token as usize) {
                let cost = dry.multiplier * dry.base.powi((count - dry.allowed.min(count)) as i32);
                // Infinity less infinity is no number, and that means something else.
                *logit -= cost.clamp(f32::MIN / 4.0, f32::MAX / 4.0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn dry() -> Dry {
        Dry { multiplier: 1.0, base: 2.0, breakers: [9].into(), ..Dry::default() }
    }

    fn costs(dry: &Dry, tokens: &[u32]) -> Vec<f32> {
        let mut logits = [0.0; 10];
        Repeats::new(dry, tokens).penalise(dry, &mut logits);
        logits.map(|logit: f32| 0.0 - logit).to_vec()
    }

    #[test]
    fn what_would_go_on_costs_more_the_longer_it_is() {
        let cost = |tokens: &[u32]| costs(&dry(), tokens)[3];
        assert_eq!(cost(&[2, 3, 0, 2]), 0.0, "one token may come again");
        assert_eq!(cost(&[1, 2, 3, 0, 1, 2]), 1.0);
        assert_eq!(cost(&[0, 1, 2, 3, 5, 0, 1, 2]), 2.0);
        assert_eq!(cost(&[7, 1, 2, 3, 0, 1, 2, 3, 1, 2]), 1.0);
        assert_eq!(cost(&[1, 9, 2, 3, 0, 1, 9, 2]), 0.0, "nothing goes across a breaker");
        let back = Dry { latest: 4, ..dry() };
        assert_eq!(costs(&back, &[1, 2, 3, 0, 1, 2])[3], 0.0);
        assert_eq!(costs(&dry(), &[1, 2, 9, 0, 1, 2])[9], 0.0, "a breaker itself is free");
        assert!(costs(&Dry { base: 1e30, ..dry() }, &[4; 200])[4].is_finite());
        assert_eq!(costs(&dry(), &[]), [0.0; 10]);
    }

    proptest! {
        /// A text that grows is a text that was there at once, and both are what the definition says.
        #[test]
        fn growing_is_the_same_as_being(tokens in prop::collection::vec(prop_oneof![0..3_u32, Just(9)], 0..60), cut in 0..60_usize) {
            let dry = dry();
            let cut = cut.min(tokens.len());
            let mut grown = Repeats::new(&dry, &tokens[..cut]);
            tokens[cut..].iter().for_each(|token| grown.push(&dry, *token));
            let whole = Repeats::new(&dry, &tokens);
            prop_assert_eq!(&grown.matches, &whole.matches);
            for end in 1..tokens.len() {
                let same = |length: usize| {
                    let (earlier, latest) = (&tokens[..end], &tokens[tokens.len() - length..]);
                    earlier.ends_with(latest) && !latest.contains(&9)
                };
                let longest = (0..=end).rev().find(|length| same(*length)).unwrap_or(0);
                prop_assert_eq!(whole.matches[end - 1] as usize, longest, "{:?} up to {}", tokens, end);
            }
        }
    }
}
