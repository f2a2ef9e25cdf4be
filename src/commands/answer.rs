//! What `run` answers, for a program.

use gemma4c_runtime::engine::Finish;
use serde_json::{Value, json};

use super::speed::Speed;

/// What was generated, and how that went.
pub struct Answer {
    pub text: String,
    pub thoughts: String,
    pub tokens: Vec<u32>,
    pub finish: Finish,
    /// Tokens of the whole prompt.
    pub prompt_tokens: usize,
    pub speed: Speed,
}

impl Answer {
    /// As `run --json` prints it; `tokens`, `text` and `finish_reason` are what `run --file` writes. Without chance
    /// there is no seed.
    pub fn json(&self, text: Option<&str>, seed: Option<u64>) -> Value {
        let mut fields = json!({
            "tokens": self.tokens,
            "text": text,
            "finish_reason": self.finish.name(),
            "seed": seed,
            "prompt_tokens": self.prompt_tokens,
            "timings": self.speed.json(),
        });
        if !self.thoughts.is_empty() {
            fields["reasoning"] = self.thoughts.as_str().into();
        }
        fields
    }
}
