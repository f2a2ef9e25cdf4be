//! What a request demands of its tokens beyond temperature, top-k and top-p: biases, penalties, a least length, a grammar.

use std::collections::BTreeMap;
use std::sync::Arc;

use gemma4c_runtime::engine::{Demand, Mask, Rule};

/// Penalties and biases of a request.
#[derive(Clone, Debug)]
pub struct Penalties {
    pub presence: f32,
    pub frequency: f32,
    pub repetition: f32,
    pub min_p: f32,
    pub biases: Arc<[(u32, f32)]>,
}

impl Penalties {
    fn is_needed(&self) -> bool {
        let Penalties { presence, frequency, repetition, min_p, biases } = self;
        *presence != 0.0 || *frequency != 0.0 || *repetition != 1.0 || *min_p > 0.0 || !biases.is_empty()
    }
}

/// Decides which tokens may come next.
pub trait Guide: Send {
    /// Whether the next token is restricted.
    fn is_active(&self) -> bool;

    /// Takes from what may come.
    fn restrict(&mut self, allowed: &mut Mask);

    /// Whether an answer is complete when it has its form, and ends then.
    fn has_form(&self) -> bool;

    fn picked(&mut self, token: u32);

    fn copy(&self) -> Box<dyn Guide>;
}

/// All rules of one sequence.
pub struct Rules {
    pub penalties: Penalties,
    pub temperature: f32,
    /// Tokens before it may end.
    pub least: u32,
    pub stop: Arc<[u32]>,
    pub prompt: Arc<[u32]>,
    pub suppress: Arc<[u32]>,
    /// How often a token was picked.
    pub counts: BTreeMap<u32, u32>,
    pub picked: u32,
    pub guide: Option<Box<dyn Guide>>,
}

impl Clone for Rules {
    fn clone(&self) -> Rules {
        Rules {
            penalties: self.penalties.clone(),
            temperature: self.temperature,
            least: self.least,
            stop: Arc::clone(&self.stop),
            prompt: Arc::clone(&self.prompt),
            suppress: Arc::clone(&self.suppress),
            counts: self.counts.clone(),
            picked: self.picked,
            guide: self.guide.as_ref().map(|guide| guide.copy()),
        }
    }
}

impl Rules {
    /// Whether a sequence has any.
    pub fn is_needed(&self) -> bool {
        self.guide.is_some() || self.demand() != Demand::Nothing
    }

    /// Whether it must not end yet.
    fn is_too_short(&self) -> bool {
        self.picked < self.least && !self.stop.is_empty()
    }

    fn penalise(&self, logits: &mut [f32]) {
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

    /// Leaves out what is far less likely than the likeliest.
    fn leave_out_unlikely(&self, logits: &mut [f32]) {
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

impl Rule for Rules {
    fn demand(&self) -> Demand {
        if self.penalties.is_needed() {
            return Demand::Logits;
        }
        match self.is_too_short() || self.guide.as_ref().is_some_and(|guide| guide.is_active()) {
            true => Demand::Mask,
            false => Demand::Nothing,
        }
    }

    fn restrict(&mut self, allowed: &mut Mask) {
        let is_too_short = self.is_too_short();
        match self.guide.as_mut().filter(|guide| guide.is_active()) {
            Some(guide) => guide.restrict(allowed),
            // A form that is complete may allow nothing but the end.
            None if is_too_short => self.stop.iter().for_each(|token| allowed.forbid(*token)),
            None => {}
        }
    }

    fn apply(&mut self, logits: &mut [f32]) {
        self.penalise(logits);
        let mut allowed = Mask::all(logits.len() as u32);
        self.restrict(&mut allowed);
        allowed.apply(logits);
        self.leave_out_unlikely(logits);
    }

    fn picked(&mut self, token: u32) {
        self.picked += 1;
        if self.penalties.is_needed() {
            *self.counts.entry(token).or_default() += 1;
        }
        if let Some(guide) = &mut self.guide {
            guide.picked(token);
        }
    }

    fn copy(&self) -> Box<dyn Rule> {
        Box::new(self.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(penalties: Penalties) -> Rules {
        Rules {
            penalties,
            temperature: 1.0,
            least: 0,
            stop: [3].into(),
            prompt: [0].into(),
            suppress: [2].into(),
            counts: BTreeMap::new(),
            picked: 0,
            guide: None,
        }
    }

    const NONE: fn() -> Penalties =
        || Penalties { presence: 0.0, frequency: 0.0, repetition: 1.0, min_p: 0.0, biases: Arc::default() };

    #[test]
    fn penalties_count_what_was_picked() {
        let mut rules = rules(Penalties { presence: 1.0, frequency: 0.5, biases: [(3, -2.0)].into(), ..NONE() });
        assert_eq!(rules.demand(), Demand::Logits);
        rules.picked(1);
        rules.picked(1);
        let mut logits = [4.0, 4.0, 4.0, 4.0];
        rules.apply(&mut logits);
        assert_eq!(logits, [4.0, 2.0, 4.0, 2.0]);
        let mut rules = Rules { penalties: Penalties { repetition: 2.0, ..NONE() }, ..rules };
        rules.apply(&mut logits);
        assert_eq!(logits, [2.0, 1.0, 4.0, 2.0]);
    }

    #[test]
    fn an_answer_may_not_end_before_its_least_length() {
        let mut rules = Rules { least: 1, ..rules(NONE()) };
        assert_eq!(rules.demand(), Demand::Mask);
        let mut logits = [0.0; 4];
        rules.apply(&mut logits);
        assert!(logits[3].is_nan() && logits[0] == 0.0);
        let mut allowed = Mask::all(4);
        rules.restrict(&mut allowed);
        assert!(!allowed.allows(3) && allowed.allows(0));
        rules.picked(0);
        assert_eq!(rules.demand(), Demand::Nothing);
    }

    #[test]
    fn min_p_is_measured_at_what_can_be_picked() {
        let mut rules = rules(Penalties { min_p: 0.5, ..NONE() });
        let mut logits = [1.0, 0.9, 9.0, 0.0];
        rules.apply(&mut logits);
        assert_eq!(logits.map(f32::is_nan), [false, false, true, true]);
    }
}
