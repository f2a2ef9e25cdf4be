//! Picks the next token from a row of logits.
//!
//! The random number of a token is a function of (seed, position) and nothing else, so a sequence can be resumed,
//! replayed or moved to another device and still be the same.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use gemma4c_plan::Sampling;

use crate::RuntimeError;
use crate::penalties::{Penalised, Penalties};
use crate::ranges::{self, within};

/// A seed that nobody can foresee.
pub fn any_seed() -> u64 {
    RandomState::new().hash_one(0)
}

/// The sampling that a rule in range means: top-p 0 keeps the likeliest token, as the smallest positive number does.
pub(crate) fn effective(sampling: Sampling) -> Sampling {
    Sampling { top_p: sampling.top_p.max(f32::MIN_POSITIVE), ..sampling }
}

/// A sampling rule with its seed.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    seed: u64,
    suppress: Vec<u32>,
    /// Candidates of the current row, kept between calls to save an allocation for each token.
    candidates: Vec<(f32, u32)>,
    recited: Option<Recited>,
    penalised: Option<Penalised>,
    /// The current row as penalties leave it.
    changed: Vec<f32>,
}

/// A text that is picked whatever the logits are.
#[derive(Clone, Debug, Default)]
pub(crate) struct Recited {
    /// By position in the sequence, the prompt's included.
    text: Vec<u32>,
    /// What the rule would have picked, pick after pick.
    own: Vec<u32>,
}

impl Recited {
    /// The token for a position for which a rule has picked this one.
    pub fn say(&mut self, position: u64, own: Option<u32>) -> Option<u32> {
        self.own.extend(own);
        self.text.get(position as usize).copied().or(own)
    }
}

impl Sampler {
    /// Temperature 0 always takes the largest logit; `top_k` 0 keeps all. Tokens in `suppress` are never picked.
    pub fn new(sampling: Sampling, seed: u64, suppress: Vec<u32>) -> Result<Sampler, RuntimeError> {
        within("a temperature", sampling.temperature, &ranges::TEMPERATURE)?;
        within("a top-p", sampling.top_p, &ranges::TOP_P)?;
        Ok(Sampler::of(effective(sampling), seed, suppress))
    }

    fn of(sampling: Sampling, seed: u64, suppress: Vec<u32>) -> Sampler {
        let (candidates, changed) = (Vec::new(), Vec::new());
        Sampler { sampling, seed, suppress, candidates, recited: None, penalised: None, changed }
    }

    /// From now on picks from logits that these penalties have changed. Those that change nothing cost nothing.
    pub fn set_penalties(&mut self, penalties: Penalties) -> Result<(), RuntimeError> {
        penalties.check()?;
        let temperature = self.sampling.temperature;
        let penalised = |penalties| Penalised::new(penalties, temperature, Arc::default(), (&self.suppress[..]).into());
        self.penalised = Some(penalties).filter(Penalties::is_needed).map(penalised);
        Ok(())
    }

    /// An answer to a prompt begins: penalties count from here.
    pub fn begin(&mut self, prompt: &[u32]) {
        if let Some(Penalised { penalties, temperature, suppress, .. }) = self.penalised.take() {
            self.penalised = Some(Penalised::new(penalties, temperature, prompt.into(), suppress));
        }
    }

    /// Goes on with another seed.
    pub fn set_seed(&mut self, seed: u64) {
        self.seed = seed;
    }

    /// From now on picks the tokens of a text at their positions, whatever the logits are: how fast a model would write
    /// it can so be measured on weights that would not.
    pub fn recite(&mut self, text: &[u32]) {
        self.recited = Some(Recited { text: text.to_vec(), own: Vec::new() });
    }

    /// The text that is picked whatever the logits are, for whoever picks in its place.
    pub(crate) fn recited(&mut self) -> &mut Option<Recited> {
        &mut self.recited
    }

    /// The penalties, for whoever picks in its place.
    pub(crate) const fn penalised(&self) -> Option<&Penalised> {
        self.penalised.as_ref()
    }

    /// What the rule would have picked since [`Sampler::recite`].
    pub fn own_picks(&self) -> &[u32] {
        self.recited.as_ref().map_or(&[], |recited| &recited.own)
    }

    /// Goes on by another rule, which a sampler was made with before: what is out of range has been refused there.
    pub(crate) fn set(&mut self, sampling: Sampling, seed: u64) {
        (self.sampling, self.seed) = (effective(sampling), seed);
    }

    pub(crate) fn set_suppress(&mut self, tokens: &[u32]) {
        self.suppress = tokens.to_vec();
    }

    /// Another by this rule, which has been found in range, with the same tokens that are never picked.
    pub(crate) fn by(&self, sampling: Sampling, seed: u64) -> Sampler {
        Sampler::of(effective(sampling), seed, self.suppress.clone())
    }

    pub fn sampling(&self) -> Sampling {
        self.sampling
    }

    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Tokens never picked.
    pub fn suppress(&self) -> &[u32] {
        &self.suppress
    }

    /// The token for the sequence's `position`; `None` for an empty row or one in which nothing can be picked.
    pub fn pick(&mut self, logits: &[f32], position: u64) -> Option<u32> {
        let own = match self.penalised.take() {
            None => self.pick_by_rule(logits, position),
            Some(mut penalised) => {
                let mut changed = std::mem::take(&mut self.changed);
                changed.clear();
                changed.extend_from_slice(logits);
                penalised.penalise(&mut changed);
                penalised.leave_out_unlikely(&mut changed);
                let own = self.pick_by_rule(&changed, position);
                own.into_iter().for_each(|token| penalised.picked(token));
                (self.penalised, self.changed) = (Some(penalised), changed);
                own
            }
        };
        match &mut self.recited {
            None => own,
            Some(recited) => recited.say(position, own),
        }
    }

    fn pick_by_rule(&mut self, logits: &[f32], position: u64) -> Option<u32> {
        let candidates = &mut self.candidates;
        candidates.clear();
        let may_be_picked = |(x, token): &(f32, u32)| !x.is_nan() && !self.suppress.contains(token);
        candidates.extend(logits.iter().copied().zip(0..).filter(may_be_picked));
        // Larger first; of equal ones the lower id, so that a tie has one answer.
        let order = |a: &(f32, u32), b: &(f32, u32)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
        if self.sampling.temperature == 0.0 {
            return candidates.iter().min_by(|a, b| order(a, b)).map(|(_, t)| *t);
        }
        let top_k = self.sampling.top_k as usize;
        if top_k > 0 && top_k < candidates.len() {
            candidates.select_nth_unstable_by(top_k - 1, order);
            candidates.truncate(top_k);
        }
        candidates.sort_unstable_by(order);
        let largest = candidates.first()?.0;
        let weight = |x: f32| (((x - largest) / self.sampling.temperature) as f64).exp();
        let total: f64 = candidates.iter().map(|(x, _)| weight(*x)).sum();
        let mut kept = 0.0;
        let nucleus = candidates.iter().position(|(x, _)| {
            kept += weight(*x);
            kept >= total * self.sampling.top_p as f64
        });
        candidates.truncate(nucleus.map_or(candidates.len(), |n| n + 1));
        let mut rest = uniform(self.seed, position) * candidates.iter().map(|(x, _)| weight(*x)).sum::<f64>();
        let picked = candidates.iter().find(|(x, _)| {
            rest -= weight(*x);
            rest < 0.0
        });
        picked.or(candidates.last()).map(|(_, t)| *t)
    }
}

/// The largest value's index, the lowest of equals; `None` for an empty row.
pub fn argmax(row: &[f32]) -> Option<u32> {
    row.iter().zip(0..).max_by(|a, b| a.0.total_cmp(b.0).then(b.1.cmp(&a.1))).map(|(_, i)| i)
}

/// A number in 0..1 from Philox 4x32-10 with the seed as key and the position as counter.
fn uniform(seed: u64, position: u64) -> f64 {
    const MULTIPLIERS: [u64; 2] = [0xD251_1F53, 0xCD9E_8D57];
    const STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
    let mut counter = [position as u32, (position >> 32) as u32, 0, 0];
    let mut key = [seed as u32, (seed >> 32) as u32];
    for _ in 0..10 {
        let products = [MULTIPLIERS[0] * counter[0] as u64, MULTIPLIERS[1] * counter[2] as u64];
        counter = [
            (products[1] >> 32) as u32 ^ counter[1] ^ key[0],
            products[1] as u32,
            (products[0] >> 32) as u32 ^ counter[3] ^ key[1],
            products[0] as u32,
        ];
        key = [key[0].wrapping_add(STEPS[0]), key[1].wrapping_add(STEPS[1])];
    }
    // 24 bits: what a GPU kernel computing in f32 can reproduce exactly.
    (counter[0] >> 8) as f64 / (1u64 << 24) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(temperature: f32, top_k: u32, top_p: f32) -> Sampler {
        Sampler::new(Sampling { temperature, top_k, top_p }, 7, vec![]).unwrap()
    }

    /// The first block of Philox 4x32-10 with counter 0 and key 0, from the generator's published test vectors.
    #[test]
    fn philox_agrees_with_its_published_vector() {
        assert_eq!(uniform(0, 0), (0x6627_e8d5u32 >> 8) as f64 / (1u64 << 24) as f64);
    }

    #[test]
    fn greedy_takes_the_largest_and_of_equals_the_first() {
        assert_eq!(sampler(0.0, 64, 0.95).pick(&[1.0, 3.0, 3.0, f32::NAN], 0), Some(1));
        assert_eq!(argmax(&[1.0, 3.0, 3.0]), Some(1));
        assert_eq!(sampler(0.0, 64, 0.95).pick(&[], 0), None);
    }

    #[test]
    fn a_text_is_recited_to_its_end_and_the_rules_picks_are_kept() {
        let mut s = sampler(0.0, 64, 0.95);
        s.recite(&[7, 7, 2]);
        assert_eq!((s.pick(&[1.0, 3.0, 2.0], 2), s.pick(&[5.0, 3.0, 2.0], 3)), (Some(2), Some(0)));
        let recited = s.recited().as_mut().unwrap();
        assert_eq!((recited.say(0, Some(1)), recited.say(3, None)), (Some(7), None));
        assert_eq!(s.own_picks(), [1, 0, 1]);
    }

    #[test]
    fn suppressed_tokens_are_never_picked() {
        let mut s = Sampler::new(Sampling::default(), 7, vec![0, 2]).unwrap();
        assert!((0..100).all(|i| s.pick(&[9.0, 0.0, 9.0], i) == Some(1)));
    }

    #[test]
    fn frequencies_follow_the_softmax_within_the_nucleus() {
        let logits = [2.0f32, 1.0, 0.0, -1.0];
        let mut s = sampler(1.0, 3, 1.0);
        let mut counts = [0usize; 4];
        (0..40_000).for_each(|i| counts[s.pick(&logits, i).unwrap() as usize] += 1);
        let total: f64 = logits[..3].iter().map(|x| (*x as f64).exp()).sum();
        for (i, count) in counts.iter().enumerate() {
            let expected = if i < 3 { (logits[i] as f64).exp() / total } else { 0.0 };
            assert!((*count as f64 / 40_000.0 - expected).abs() < 0.01, "{counts:?}");
        }
        let mut narrow = sampler(1.0, 0, 0.5);
        assert!((0..100).all(|i| narrow.pick(&logits, i) == Some(0)));
    }

    #[test]
    fn settings_out_of_range_are_refused() {
        for (t, p) in [(-1.0, 0.9), (2.1, 0.9), (f32::NAN, 0.9), (1.0, -0.1), (1.0, 1.1), (1.0, f32::NAN)] {
            assert!(Sampler::new(Sampling { temperature: t, top_k: 1, top_p: p }, 0, vec![]).is_err(), "{t} {p}");
        }
        assert!(within("a number", 0.01, &ranges::REPETITION_PENALTY).is_ok());
    }

    #[test]
    fn a_top_p_of_0_is_the_likeliest_token() {
        let mut s = sampler(2.0, 0, 0.0);
        assert!((0..100).all(|i| s.pick(&[0.9, 1.0, 0.95], i) == Some(1)));
    }

    #[test]
    fn penalties_begin_anew_with_an_answer() {
        let mut s = sampler(0.0, 64, 0.95);
        s.set_penalties(Penalties { presence: 1.5, repetition: 2.0, ..Penalties::default() }).unwrap();
        let logits = [1.0, 3.0, 2.0];
        s.begin(&[1]);
        // Token 1 is in the prompt, so it counts half; then 2 was picked and is penalised as well.
        assert_eq!((s.pick(&logits, 0), s.pick(&logits, 1)), (Some(2), Some(1)));
        s.begin(&[0]);
        assert_eq!(s.pick(&logits, 0), Some(1));
        s.set_penalties(Penalties::default()).unwrap();
        assert!(s.penalised().is_none());
    }
}
