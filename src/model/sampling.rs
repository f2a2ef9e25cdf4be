//! How an answer is picked and where it ends.

use gemma4c_runtime::any_seed;

/// How tokens are picked, and where an answer ends. What is not set is as the model's authors advise.
///
/// ```
/// use gemma4c::Sampling;
///
/// let sampling = Sampling::default().temperature(0.7).top_k(40).seed(1).max_tokens(20).stop("\n\n");
/// assert_eq!(sampling.max_tokens, 20);
/// assert_eq!(Sampling::greedy().temperature, Some(0.0));
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 always takes the likeliest token, 2 is the most.
    pub temperature: Option<f32>,
    /// Consider only so many of the likeliest tokens; 0 considers all.
    pub top_k: Option<u32>,
    /// Consider only the likeliest tokens that together have this probability.
    pub top_p: Option<f32>,
    /// The same seed gives the same answer to the same prompt; without one each answer has its own.
    pub seed: Option<u64>,
    /// Tokens of an answer, at most: 256 unless set.
    pub max_tokens: u32,
    /// Texts before which an answer ends.
    pub stop: Vec<String>,
}

impl Default for Sampling {
    fn default() -> Sampling {
        Sampling { temperature: None, top_k: None, top_p: None, seed: None, max_tokens: 256, stop: Vec::new() }
    }
}

impl Sampling {
    /// Always the likeliest token.
    pub fn greedy() -> Sampling {
        Sampling::default().temperature(0.0)
    }

    /// Sets the temperature: 0 always takes the likeliest token, 2 is the most.
    pub fn temperature(mut self, temperature: f32) -> Sampling {
        self.temperature = Some(temperature);
        self
    }

    /// Considers only the `count` likeliest tokens; 0 considers all.
    pub fn top_k(mut self, count: u32) -> Sampling {
        self.top_k = Some(count);
        self
    }

    /// Considers only the likeliest tokens that together have this probability.
    pub fn top_p(mut self, probability: f32) -> Sampling {
        self.top_p = Some(probability);
        self
    }

    /// Sets the seed: the same one gives the same answer to the same prompt.
    pub fn seed(mut self, seed: u64) -> Sampling {
        self.seed = Some(seed);
        self
    }

    /// Ends an answer after so many tokens.
    pub fn max_tokens(mut self, count: u32) -> Sampling {
        self.max_tokens = count;
        self
    }

    /// Ends an answer before this text. May be called for several.
    pub fn stop(mut self, text: impl Into<String>) -> Sampling {
        self.stop.push(text.into());
        self
    }

    /// The rule, with the plan's where nothing is set.
    pub(crate) fn rule(&self, plan: gemma4c_plan::Sampling) -> gemma4c_plan::Sampling {
        gemma4c_plan::Sampling {
            temperature: self.temperature.unwrap_or(plan.temperature),
            top_k: self.top_k.unwrap_or(plan.top_k),
            top_p: self.top_p.unwrap_or(plan.top_p),
        }
    }

    /// The seed of an answer.
    pub(crate) fn seed_or_any(&self) -> u64 {
        self.seed.unwrap_or_else(any_seed)
    }
}
