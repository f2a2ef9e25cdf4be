//! One sequence of tokens through a model, on whatever runs its plan.

use std::ops::Range;
use std::sync::Arc;

use gemma4c_plan::{Plan, RowCount, Value};

use crate::backend::Backend;
use crate::cpu::{Executor, Pass, Room, Span, Tap};
use crate::cuda::{CudaBackend, OnGpu};
use crate::feed::{Feeder, Want};
use crate::{ModelLocation, RuntimeError};

pub use generate::{End, Request};
pub use media::{Patches, Soft};

mod generate;
mod media;

/// Which of the tokens fed want logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    None,
    Last,
    All,
}

/// A loaded model and the sequence it has seen so far.
pub struct Session {
    plan: Arc<Plan>,
    engine: Engine,
    seen: Vec<u32>,
    /// Positions whose keys and values were written since the last reset: beyond `seen` where the sequence went back.
    written: u32,
    media: media::Media,
}

/// What runs the plan.
enum Engine {
    Cpu(Box<Executor>),
    Cuda(Feeder, Box<CudaBackend>),
    Other(Feeder, Box<dyn Backend>),
}

impl Engine {
    /// Everything but the CPU takes tokens the same way.
    fn device(&mut self) -> Option<(&mut Feeder, &mut dyn Backend)> {
        match self {
            Engine::Cpu(_) => None,
            Engine::Cuda(feeder, backend) => Some((feeder, backend.as_mut())),
            Engine::Other(feeder, backend) => Some((feeder, backend.as_mut())),
        }
    }
}

impl Session {
    /// Runs on this machine's processor: maps the model's files, checks that they are the plan's, and reserves all memory the
    /// sequence will ever need.
    pub fn on_cpu(plan: Plan, location: &ModelLocation) -> Result<Session, RuntimeError> {
        let room = Room::for_one(&plan);
        let plan = Arc::new(plan);
        let engine = Engine::Cpu(Box::new(Executor::open(Arc::clone(&plan), location, room)?));
        Ok(Session { plan, engine, seen: Vec::new(), written: 0, media: media::Media::default() })
    }

    /// Runs on the first GPU, by the program of the plan that fits it. All its memory is allocated and all weights are loaded; `progress` is told the bytes done and the
    /// bytes there are.
    pub fn on_cuda(
        plan: Plan,
        location: &ModelLocation,
        on: &OnGpu,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Session, RuntimeError> {
        let (plan, mut backend) = CudaBackend::open(plan, location, on, progress)?;
        let feeder = Feeder::new(&plan).ok_or(RuntimeError::NoProgram)?;
        feeder.start(&mut backend)?;
        Ok(Session {
            plan,
            engine: Engine::Cuda(feeder, Box::new(backend)),
            seen: Vec::new(),
            written: 0,
            media: media::Media::default(),
        })
    }

    /// Runs on a backend that somebody else made and loaded for this plan.
    pub fn with_backend(plan: Plan, mut backend: Box<dyn Backend>) -> Result<Session, RuntimeError> {
        let feeder = Feeder::new(&plan).ok_or(RuntimeError::NoProgram)?;
        feeder.start(backend.as_mut())?;
        let engine = Engine::Other(feeder, backend);
        Ok(Session { plan: Arc::new(plan), engine, seen: Vec::new(), written: 0, media: media::Media::default() })
    }

    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The device's name, for a person.
    pub fn device_name(&self) -> String {
        match &self.engine {
            Engine::Cpu(_) => "cpu".into(),
            Engine::Cuda(_, backend) => backend.name(),
            Engine::Other(_, backend) => backend.name(),
        }
    }

    /// The GPU's side of it, where it runs on one.
    pub fn cuda(&mut self) -> Option<&mut CudaBackend> {
        match &mut self.engine {
            Engine::Cuda(_, backend) => Some(backend),
            _ => None,
        }
    }

    /// The device's side of it, where it does not run on the CPU.
    pub fn backend(&mut self) -> Option<&mut dyn Backend> {
        self.engine.device().map(|(_, backend)| backend)
    }

    /// Most tokens of a prompt that are computed at once.
    pub fn chunk(&self) -> u32 {
        match &self.engine {
            Engine::Cpu(_) => self.plan.program.chunk,
            Engine::Cuda(feeder, _) | Engine::Other(feeder, _) => feeder.chunk(),
        }
    }

    /// How the next `tokens` tokens are cut into chunks.
    pub fn pieces(&self, tokens: usize) -> Vec<Range<usize>> {
        self.media.pieces(&self.plan.program, self.seen.len(), tokens, self.chunk() as usize)
    }

    /// How many tokens have been fed.
    pub fn position(&self) -> u32 {
        self.seen.len() as u32
    }

    /// Forgets the sequence.
    pub fn reset(&mut self) {
        self.seen.clear();
        self.written = 0;
    }

    /// Goes back to the sequence's first `position` tokens. A sliding layer keeps its window and a few rows besides, so it cannot go
    /// back further than that.
    pub fn truncate(&mut self, position: u32) -> Result<(), RuntimeError> {
        if position > self.position() || !self.remembers(position) {
            return Err(RuntimeError::Forgotten { to: position, from: self.position() });
        }
        self.seen.truncate(position as usize);
        Ok(())
    }

    /// Goes back to what the sequence and `tokens` have in common, but not all of `tokens`: at least one is left to feed.
    /// Returns how many are kept.
    pub fn keep_prefix(&mut self, tokens: &[u32]) -> usize {
        let common = std::iter::zip(&self.seen, tokens).take_while(|(a, b)| a == b).count();
        let kept = common.min(tokens.len().saturating_sub(1));
        match self.truncate(kept as u32) {
            Ok(()) => kept,
            Err(_) => {
                self.reset();
                0
            }
        }
    }

    /// Whether every layer still has the rows that the token at `position` looks back on.
    fn remembers(&self, position: u32) -> bool {
        let there = |window: Option<u32>, rows: u32| {
            let oldest_there = self.written.saturating_sub(rows);
            window.is_none_or(|window| position == 0 || (position + 1).saturating_sub(window) >= oldest_there)
        };
        match (&self.engine, &self.plan.cuda) {
            (Engine::Cuda(..) | Engine::Other(..), Some(cuda)) => {
                cuda.program.kv_layout.caches.iter().all(|cache| there(cache.window, cache.rows))
            }
            _ => self.plan.program.caches.iter().all(|cache| there(cache.window, cache.capacity)),
        }
    }

    /// Appends a prompt's tokens to the sequence, in chunks of at most `chunk` (or of the plan's size), and calls `logits`
    /// with each asked row, in order: the index of its token among `tokens`, and the row.
    pub fn feed(
        &mut self,
        tokens: &[u32],
        asked: Asked,
        chunk: Option<u32>,
        mut logits: impl FnMut(usize, &[f32]),
    ) -> Result<(), RuntimeError> {
        self.check(tokens)?;
        let position = self.position();
        match self.engine.device() {
            None => return self.feed_tapped(tokens, asked, chunk, &mut |_, _, _| {}, &mut logits),
            Some((feeder, backend)) => {
                feeder.feed(backend, tokens, position, chunk, Want::Logits(asked, &mut logits))?;
            }
        }
        self.append(tokens);
        Ok(())
    }

    /// The same on the CPU, with every intermediate value of every chunk shown to `tap`.
    pub fn feed_tapped(
        &mut self,
        tokens: &[u32],
        asked: Asked,
        chunk: Option<u32>,
        tap: &mut Tap<'_>,
        logits: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), RuntimeError> {
        self.check(tokens)?;
        let Engine::Cpu(executor) = &mut self.engine else { return Err(RuntimeError::NoTaps) };
        let program = &self.plan.program;
        let vocab_size = self.plan.model.vocab_size as usize;
        let most = if asked == Asked::All { program.asked.min(program.chunk) } else { program.chunk };
        let chunk = chunk.unwrap_or(most).clamp(1, most) as usize;
        let position = self.seen.len();
        for Range { start: first, end } in self.media.pieces(program, position, tokens.len(), chunk) {
            let piece = &tokens[first..end];
            let is_last = end == tokens.len();
            let rows = match asked {
                Asked::All => 0..piece.len(),
                Asked::Last if is_last => piece.len() - 1..piece.len(),
                _ => 0..0,
            };
            let rows: Vec<usize> = rows.collect();
            let span = Span { slot: 0, first_position: self.seen.len() + first, rows: piece.len() };
            let positions = span.first_position..span.first_position + span.rows;
            let soft = self.media.within(positions, self.plan.model.hidden as usize);
            // A picture that must not be cut may be more rows than a pass has logits for: the pass is repeated.
            let most = program.asked as usize;
            let parts = if rows.is_empty() { vec![&rows[..]] } else { rows.chunks(most).collect() };
            for (part, asked) in parts.into_iter().enumerate() {
                let is_new = |name: &str| {
                    let of_asked = |value: &Value| value.rows == RowCount::Asked && value.name == name;
                    part == 0 || program.values.iter().any(of_asked)
                };
                let pass = Pass { tokens: piece, spans: &[span], asked, soft: &soft, picture: None };
                let out = executor.run(&pass, &mut |name, width, values| {
                    if is_new(name) {
                        tap(name, width, values);
                    }
                });
                for (row, values) in asked.iter().zip(out.chunks_exact(vocab_size)) {
                    logits(first + row, values);
                }
            }
        }
        self.append(tokens);
        Ok(())
    }

    /// Appends one token the way generated ones are, and calls `logits` with the row after it.
    pub fn decode(&mut self, token: u32, mut logits: impl FnMut(&[f32])) -> Result<(), RuntimeError> {
        self.check(&[token])?;
        let position = self.position();
        match self.engine.device() {
            None => return self.feed(&[token], Asked::Last, None, |_, row| logits(row)),
            Some((feeder, backend)) => logits(feeder.decode(backend, token, position)?),
        }
        self.append(&[token]);
        Ok(())
    }

    /// Waits until everything fed is computed.
    pub fn wait(&mut self) -> Result<(), RuntimeError> {
        self.engine.device().map_or(Ok(()), |(_, backend)| backend.wait())
    }

    fn append(&mut self, tokens: &[u32]) {
        self.seen.extend_from_slice(tokens);
        self.written = self.written.max(self.position());
    }

    /// Nothing is fed unless all of it can be.
    fn check(&self, tokens: &[u32]) -> Result<(), RuntimeError> {
        if tokens.is_empty() {
            return Err(RuntimeError::NoTokens);
        }
        let (context, vocab_size) = (self.plan.program.context, self.plan.model.vocab_size);
        if let Some(&token) = tokens.iter().find(|t| **t >= vocab_size) {
            return Err(RuntimeError::TokenOutOfRange { token, vocab_size });
        }
        let (used, wanted) = (self.position(), self.seen.len() as u64 + tokens.len() as u64);
        match wanted > context as u64 {
            true => Err(RuntimeError::ContextOverflow { context, used, wanted }),
            false => Ok(()),
        }
    }
}
