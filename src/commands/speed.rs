//! How fast an answer came, for a person and for a program.

use std::time::Duration;

use gemma4c_runtime::Counts;
use serde_json::{Value, json};

/// How an answer went.
pub struct Speed {
    /// Tokens of the prompt that were computed.
    pub prompt: usize,
    pub prefill: Duration,
    pub written: u32,
    pub decode: Duration,
    /// The context, where it ended the answer.
    pub full: Option<usize>,
    /// Where tokens were guessed.
    pub drafts: Option<Counts>,
}

impl Speed {
    /// Tokens a second.
    pub fn prefill_rate(&self) -> f64 {
        per_second(self.prompt as f64, self.prefill)
    }

    /// Tokens a second. The first one comes out of the prompt's pass.
    pub fn decode_rate(&self) -> f64 {
        per_second(self.written.saturating_sub(1) as f64, self.decode)
    }

    /// For a person, on stderr.
    pub fn report(&self) {
        self.lines().iter().for_each(|line| eprintln!("{line}"));
    }

    /// What a person is told of it.
    pub fn lines(&self) -> Vec<String> {
        let mut lines: Vec<String> = self.full_context().into_iter().collect();
        lines.push(format!(
            "[prefill: {} tokens, {:.1} tokens/s; decode: {} tokens, {:.1} tokens/s]",
            self.prompt,
            self.prefill_rate(),
            self.written,
            self.decode_rate()
        ));
        if let Some(Counts { rounds, drafted, accepted, .. }) = self.drafts {
            let share = 100.0 * accepted as f64 / (drafted as f64).max(1.0);
            lines.push(format!("[drafts: {accepted} of {drafted} accepted ({share:.0} %), {rounds} passes]"));
        }
        lines
    }

    /// The same for a program. Tokens of the prompt that were kept from before are not counted.
    pub fn json(&self) -> Value {
        let mut fields = json!({
            "prefill_tokens": self.prompt,
            "prefill_seconds": self.prefill.as_secs_f64(),
            "decode_tokens": self.written,
            "decode_seconds": self.decode.as_secs_f64(),
        });
        if let Some(Counts { rounds, drafted, accepted, .. }) = self.drafts {
            fields["drafts"] = json!({ "drafted": drafted, "accepted": accepted, "passes": rounds });
        }
        fields
    }

    /// Says so where the context ended the answer.
    pub fn report_full_context(&self) {
        self.full_context().into_iter().for_each(|line| eprintln!("{line}"));
    }

    fn full_context(&self) -> Option<String> {
        self.full.map(|context| format!("[the context of {context} positions is full]"))
    }
}

fn per_second(n: f64, time: Duration) -> f64 {
    if n > 0.0 { n / time.as_secs_f64().max(1e-9) } else { 0.0 }
}
