//! What changes logits before a token is picked from them: penalties on tokens that came before, biases, and min-p.
//!
//! A session's [`Sampler`](crate::Sampler) and the rules of a server's requests apply the same, with the same ranges.
//! Which tokens a grammar allows is not decided here.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::RuntimeError;
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
    /// Added to the logits of tokens.
    pub biases: Arc<[(u32, f32)]>,
}

impl Default for Penalties {
    fn default() -> Penalties {
        Penalties { presence: 0.0, frequency: 0.0, repetition: 1.0, min_p: 0.0, biases: Arc::default() }
    }
}

impl Penalties {
    /// Refuses what is out of range.
    pub fn check(&self) -> Result<(), RuntimeError> {
        within("a presence penalty", self.presence, &ranges::PRESENCE_PENALTY)?;
        within("a frequency penalty", self.frequency, &ranges::FREQUENCY_PENALTY)?;
        within("a repetition penalty", self.repetition, &ranges::REPETITION_PENALTY)?;
        within("a min-p", self.min_p, &ranges::MIN_P)
    }

    /// Whether they change anything.
    pub fn is_needed(&self) -> bool {
        *self != Penalties::default()
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
}

impl Penalised {
    /// At the beginning of an answer.
    pub fn new(penalties: Penalties, temperature: f32, prompt: Arc<[u32]>, suppress: Arc<[u32]>) -> Penalised {
        Penalised { penalties, temperature, prompt, suppress, counts: BTreeMap::new() }
    }

    pub fn picked(&mut self, token: u32) {
        if self.penalties.is_needed() {
            *self.counts.entry(token).or_default() += 1;
        }
    }

    /// Applies penalties and biases.
    pub fn penalise(&self, logits: &mut [f32]) {
        let Penalties { presence, frequency, repetition, ref biases, .. } = self.penalties;
        if repetition != 1.0 {
            let mut seen: Vec<u32> = self.prompt.iter().copied().chain(self.counts.keys().copied()).collect();
            seen.sort_unstable();
            seen.dedup();
            for token in seen {
                if let Some(logit) = logits.get_mut(token as usize) {
                    *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
                }
            }
        }
        for (token, count) in &self.counts {
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit -= presence + frequency * *count as f32;
            }
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
