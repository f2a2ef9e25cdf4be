//! One sequence of tokens through a model.

use gemma4c_plan::Plan;

use crate::cpu::{Executor, Pass, Tap};
use crate::weights::Weights;
use crate::{ModelLocation, RuntimeError, machine};

/// Which of the tokens fed want logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    None,
    Last,
    All,
}

/// A loaded model and the sequence it has seen so far.
pub struct Session {
    executor: Executor,
    position: u32,
}

impl Session {
    /// Maps the model's files, checks that they are the plan's, and reserves all memory the sequence will ever need.
    pub fn open(plan: Plan, location: &ModelLocation) -> Result<Session, RuntimeError> {
        let needed = plan.program.cache_bytes().and_then(|kv| kv.checked_add(plan.program.arena_bytes));
        let needed = needed.unwrap_or(u64::MAX);
        if let Some(available) = machine::physical_memory().filter(|available| needed > *available) {
            let what = "keys, values and activations";
            return Err(RuntimeError::OutOfMemory { what, needed, available });
        }
        let weights = Weights::open(&plan, location)?;
        Ok(Session { executor: Executor::new(plan, weights), position: 0 })
    }

    pub fn plan(&self) -> &Plan {
        self.executor.plan()
    }

    /// How many tokens have been fed.
    pub fn position(&self) -> u32 {
        self.position
    }

    /// Forgets the sequence.
    pub fn reset(&mut self) {
        self.position = 0;
    }

    /// Appends tokens to the sequence, in chunks of at most `chunk` (or of the plan's size), and calls `logits` with each
    /// asked row, in order: the index of its token among `tokens`, and the row.
    pub fn feed(
        &mut self,
        tokens: &[u32],
        asked: Asked,
        chunk: Option<u32>,
        mut logits: impl FnMut(usize, &[f32]),
    ) -> Result<(), RuntimeError> {
        self.feed_tapped(tokens, asked, chunk, &mut |_, _, _| {}, &mut logits)
    }

    /// The same, with every intermediate value of every chunk shown to `tap`.
    pub fn feed_tapped(
        &mut self,
        tokens: &[u32],
        asked: Asked,
        chunk: Option<u32>,
        tap: &mut Tap<'_>,
        logits: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), RuntimeError> {
        self.check(tokens)?;
        let program = &self.plan().program;
        let vocab_size = self.plan().model.vocab_size as usize;
        let most = if asked == Asked::All { program.asked.min(program.chunk) } else { program.chunk };
        let chunk = chunk.unwrap_or(most).clamp(1, most) as usize;
        for (index, piece) in tokens.chunks(chunk).enumerate() {
            let first = index * chunk;
            let is_last = first + piece.len() == tokens.len();
            let rows = match asked {
                Asked::All => 0..piece.len(),
                Asked::Last if is_last => piece.len() - 1..piece.len(),
                _ => 0..0,
            };
            let pass = Pass { tokens: piece, first_position: self.position as usize, asked: rows.clone() };
            let out = self.executor.run(&pass, tap);
            for (row, values) in rows.zip(out.chunks_exact(vocab_size)) {
                logits(first + row, values);
            }
            self.position += piece.len() as u32;
        }
        Ok(())
    }

    /// Nothing is fed unless all of it can be.
    fn check(&self, tokens: &[u32]) -> Result<(), RuntimeError> {
        if tokens.is_empty() {
            return Err(RuntimeError::NoTokens);
        }
        let (context, vocab_size) = (self.plan().program.context, self.plan().model.vocab_size);
        if let Some(&token) = tokens.iter().find(|t| **t >= vocab_size) {
            return Err(RuntimeError::TokenOutOfRange { token, vocab_size });
        }
        let wanted = self.position as u64 + tokens.len() as u64;
        match wanted > context as u64 {
            true => Err(RuntimeError::ContextOverflow { context, used: self.position, wanted }),
            false => Ok(()),
        }
    }
}
