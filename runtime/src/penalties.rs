//! What changes logits before a token is picked from them: penalties on tokens that came before, biases, and min-p.
//!
//! A session's [`Sampler`](crate::Sampler) and the rules of a server's requests apply the same, with the same ranges.
//! Which tokens a grammar allows is not decided here.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use crate::RuntimeError;
use crate::dry::{Dry, Repeats};
use crate::ranges::{self, within};

/// How far tokens are made less likely. The default changes nothing.
#[derive(Clone, Debug, PartialEq)]
pub struct Penalties {
    /// Taken from the logit of a token that was picked before.
    pub presence: f32,
    /// Taken from it each time it was picked.
    pub frequency: f32,
    /// Divides the logit of a token of the prompt or of the text, or multiplies it where it is negative.
    pub repetition: f32,
    /// A token is left out whose probability is below this share of the likeliest token's.
    pub min_p: f32,
    pub dry: Dry,
    /// Added to the logits of tokens.
    pub biases: Arc<[(u32, f32)]>,
    /// So many tokens count as having come before, the last ones of prompt and text; `None` for all of them.
    pub last: Option<u32>,
}

impl Default for Penalties {
    fn default() -> Penalties {
        let (dry, biases) = (Dry::default(), Arc::default());
        Penalties { presence: 0.0, frequency: 0.0, repetition: 1.0, min_p: 0.0, dry, biases, last: None }
    }
}

impl Penalties {
    /// Refuses what is out of range.
    pub fn check(&self) -> Result<(), RuntimeError> {
        within("a presence penalty", self.presence, &ranges::PRESENCE_PENALTY)?;
        within("a frequency penalty", self.frequency, &ranges::FREQUENCY_PENALTY)?;
        within("a repetition penalty", self.repetition, &ranges::REPETITION_PENALTY)?;
        within("a min-p", self.min_p, &ranges::MIN_P)?;
        within("a DRY multiplier", self.dry.multiplier, &ranges::DRY_MULTIPLIER)?;
        within("a DRY base", self.dry.base, &ranges::DRY_BASE)
    }

    /// Whether they change anything.
    pub fn is_needed(&self) -> bool {
        Penalties { last: None, ..self.clone() } != Penalties::default()
    }
}

/// The penalties of one sequence, with what they depend on.
#[derive(Clone, Debug, Default)]
pub struct Penalised {
    pub penalties: Penalties,
    /// Min-p compares probabilities at this temperature.
    pub temperature: f32,
    pub prompt: Arc<[u32]>,
    /// Tokens that are never picked.
    pub suppress: Arc<[u32]>,
    /// How often a token was picked.
    counts: BTreeMap<u32, u32>,
    repeats: Repeats,
    /// What was picked, where only the last of it counts.
    text: Vec<u32>,
}

impl Penalised {
    /// At the beginning of an answer.
    pub fn new(penalties: Penalties, temperature: f32, prompt: Arc<[u32]>, suppress: Arc<[u32]>) -> Penalised {
        let repeats = match penalties.dry.is_needed() {
            true => Repeats::new(&penalties.dry, &prompt),
            false => Repeats::default(),
        };
        let (counts, text) = (BTreeMap::new(), Vec::new());
        Penalised { penalties, temperature, prompt, suppress, counts, repeats, text }
    }

    pub fn picked(&mut self, token: u32) {
        if self.penalties.is_needed() {
            *self.counts.entry(token).or_default() += 1;
        }
        if self.penalties.dry.is_needed() {
            self.repeats.push(&self.penalties.dry, token);
        }
        if self.penalties.last.is_some() {
            self.text.push(token);
        }
    }

    /// The tokens of the prompt that count, and how often each of those that were picked since.
    fn before(&self) -> (&[u32], Cow<'_, BTreeMap<u32, u32>>) {
        let Some(last) = self.penalties.last else { return (&self.prompt, Cow::Borrowed(&self.counts)) };
        let tail = |tokens: usize, most: usize| tokens.saturating_sub(most)..tokens;
        let text = &self.text[tail(self.text.len(), last as usize)];
        let mut counts = BTreeMap::new();
        text.iter().for_each(|token| *counts.entry(*token).or_default() += 1);
        (&self.prompt[tail(self.prompt.len(), last as usize - text.len())], Cow::Owned(counts))
    }

    /// Applies penalties and biases.
    pub fn penalise(&self, logits: &mut [f32]) {
        let Penalties { presence, frequency, repetition, ref dry, ref biases, .. } = self.penalties;
        let (prompt, counts) = self.before();
        if repetition != 1.0 {
            let mut seen: Vec<u32> = prompt.iter().copied().chain(counts.keys().copied()).collect();
            seen.sort_unstable();
            seen.dedup();
            for token in seen {
                if let Some(logit) = logits.get_mut(token as usize) {
                    *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
                }
            }
        }
        for (token, count) in counts.iter() {
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit -= presence + frequency * *count as f32;
            }
        }
        if dry.is_needed() {
            self.repeats.penalise(dry, logits);
        }
        for (token, bias) in biases.iter() {
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit += bias;
            }
        }
    }

    /// Leaves out what is far less likely than the likeliest: min-p. It comes last, when everything else that cannot be
    /// picked is NaN.
    pub fn leave_out_unlikely(&self, logits: &mut [f32]) {
        let min_p = self.penalties.min_p;
        if min_p <= 0.0 || self.temperature <= 0.0 {
            return;
        }
        // Of what can be picked at all.
        let suppressed: Vec<(u32, f32)> =
            self.suppress.iter().filter_map(|token| Some((*token, *logits.get(*token as usize)?))).collect();
        suppressed.iter().for_each(|(token, _)| logits[*token as usize] = f32::NAN);
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let least = largest + self.temperature * min_p.ln();
        logits.iter_mut().filter(|logit| **logit < least).for_each(|logit| *logit = f32::NAN);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn penalised(penalties: Penalties) -> Penalised {
        Penalised::new(penalties, 1.0, [0].into(), [2].into())
    }

    #[test]
    fn penalties_count_what_was_picked() {
        let penalties = Penalties { presence: 1.0, frequency: 0.5, biases: [(3, -2.0)].into(), ..Penalties::default() };
        let mut sequence = penalised(penalties);
        sequence.picked(1);
        sequence.picked(1);
        let mut logits = [4.0, 4.0, 4.0, 4.0];
        sequence.penalise(&mut logits);
        assert_eq!(logits, [4.0, 2.0, 4.0, 2.0]);
        sequence.penalties = Penalties { repetition: 2.0, ..Penalties::default() };
        sequence.penalise(&mut logits);
        assert_eq!(logits, [2.0, 1.0, 4.0, 2.0]);
    }

    #[test]
    fn only_the_last_tokens_count_where_a_number_is_given() {
        let penalised = |last| {
            let penalties = Penalties { repetition: 2.0, frequency: 1.0, last: Some(last), ..Penalties::default() };
            let mut sequence = Penalised::new(penalties, 1.0, [0, 1].into(), [].into());
            [2, 3, 3].into_iter().for_each(|token| sequence.picked(token));
            let mut logits = [4.0; 4];
            sequence.penalise(&mut logits);
            logits
        };
        assert_eq!(penalised(9), [2.0, 2.0, 1.0, 0.0]);
        assert_eq!(penalised(4), [4.0, 2.0, 1.0, 0.0]);
        assert_eq!(penalised(2), [4.0, 4.0, 4.0, 0.0]);
        assert_eq!(penalised(1), [4.0, 4.0, 4.0, 1.0]);
        assert_eq!(penalised(0), [4.0; 4]);
        assert!(!Penalties { last: Some(3), ..Penalties::default() }.is_needed());
    }

    #[test]
    fn min_p_is_measured_at_what_can_be_picked() {
        let sequence = penalised(Penalties { min_p: 0.5, ..Penalties::default() });
        let mut logits = [1.0, 0.9, 9.0, 0.0];
        sequence.leave_out_unlikely(&mut logits);
        assert_eq!(logits.map(f32::is_nan), [false, false, true, true]);
    }

    #[test]
    fn penalties_out_of_range_are_refused_by_name() {
        let usual = Penalties::default;
        for (penalties, message) in [
            (Penalties { presence: -2.5, ..usual() }, "a presence penalty of -2.5 is out of range, expected -2 to 2"),
            (Penalties { frequency: 3.0, ..usual() }, "a frequency penalty of 3 is out of range, expected -2 to 2"),
            (
                Penalties { repetition: 0.0, ..usual() },
                "a repetition penalty of 0 is out of range, expected 0.01 to 100",
            ),
            (Penalties { min_p: f32::NAN, ..usual() }, "a min-p of NaN is out of range, expected 0 to 1"),
        ] {
            assert_eq!(penalties.check().unwrap_err().to_string(), message);
        }
        usual().check().unwrap();
    }
}
