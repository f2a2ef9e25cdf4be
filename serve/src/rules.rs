//! What a request demands of its tokens beyond temperature, top-k and top-p: biases, penalties, a least length, a
//! grammar.

use std::sync::Arc;

use gemma4c_runtime::Penalised;
use gemma4c_runtime::engine::{Demand, Mask, Rule};

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
    pub penalised: Penalised,
    /// Tokens before it may end.
    pub least: u32,
    pub stop: Arc<[u32]>,
    pub picked: u32,
    pub guide: Option<Box<dyn Guide>>,
}

impl Clone for Rules {
    fn clone(&self) -> Rules {
        Rules {
            penalised: self.penalised.clone(),
            least: self.least,
            stop: Arc::clone(&self.stop),
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
}

impl Rule for Rules {
    fn demand(&self) -> Demand {
        if self.penalised.penalties.is_needed() {
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
        self.penalised.penalise(logits);
        let mut allowed = Mask::all(logits.len() as u32);
        self.restrict(&mut allowed);
        allowed.apply(logits);
        self.penalised.leave_out_unlikely(logits);
    }

    fn picked(&mut self, token: u32) {
        self.picked += 1;
        self.penalised.picked(token);
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
    use gemma4c_runtime::Penalties;

    use super::*;

    fn rules(penalties: Penalties) -> Rules {
        let penalised = Penalised::new(penalties, 1.0, [0].into(), [2].into());
        Rules { penalised, least: 0, stop: [3].into(), picked: 0, guide: None }
    }

    #[test]
    fn penalties_are_applied_before_what_is_unlikely_is_left_out() {
        let mut rules = rules(Penalties { presence: 2.0, min_p: 0.5, ..Penalties::default() });
        assert_eq!(rules.demand(), Demand::Logits);
        rules.picked(1);
        let mut logits = [1.0, 2.0, 9.0, 0.9];
        rules.apply(&mut logits);
        assert_eq!(logits.map(f32::is_nan), [false, true, true, false]);
    }

    #[test]
    fn an_answer_may_not_end_before_its_least_length() {
        let mut rules = Rules { least: 1, ..rules(Penalties::default()) };
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
}
