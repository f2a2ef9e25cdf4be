//! The drafter: a small program that guesses the next tokens from the model's own keys, values and hidden state, for
//! the model to verify.
//!
//! Its program is like the text's. A row of a pass is one sequence: a token that was chosen and not yet run, its
//! position, and a hidden state. It appends nothing: its caches are those of the text's program that it reads.

use serde::{Deserialize, Serialize};

use crate::list::at_most;
use crate::program::{Program, ValueIndex};

/// More tokens than any vocabulary of a model with a drafter has.
const MOST_TOKENS: usize = 1 << 20;

/// The drafter of a plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Drafter {
    /// From tokens and hidden states to logits. [`Program::caches`] are some of the text's, entry for entry.
    pub program: Program,
    /// The value of the text's program that is the hidden state of a first step: what its LM head reads.
    pub reads: ValueIndex,
    /// The value of the drafter's program that is the hidden state of its next step.
    pub hidden: ValueIndex,
    /// Every token once, in groups of which a step scores a few. Empty where all tokens are scored.
    #[serde(deserialize_with = "at_most::<MOST_TOKENS, _, _>")]
    pub token_order: Vec<u32>,
}
