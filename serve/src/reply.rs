//! What comes back of a request, from the engine's thread to the task that waits for it.

use std::time::Instant;

use gemma4c_runtime::engine::Finish;

use crate::error::ApiError;
use crate::logprobs::Logprobs;

/// What comes back of a request.
#[derive(Debug)]
pub enum Reply {
    /// Its first sequence has its memory; so many tokens of the prompt were kept from before.
    Admitted {
        cached: u32,
        at: Instant,
    },
    /// How likely a token of the prompt was.
    Prompt {
        choice: usize,
        logprobs: Logprobs,
    },
    /// Of so many tokens that were guessed, the first `accepted` come next.
    Drafted {
        choice: usize,
        drafted: u32,
        accepted: u32,
    },
    Token {
        choice: usize,
        token: u32,
        logprobs: Option<Logprobs>,
        at: Instant,
    },
    Finished {
        choice: usize,
        reason: Finish,
        at: Instant,
    },
    /// All of it has ended.
    Failed(ApiError),
}
