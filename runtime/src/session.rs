//! One sequence of tokens through a model, on whatever runs its plan: an engine's device, of which it has all, or the CPU's executor, which shows
//! every value on the way.

use std::ops::Range;
use std::sync::Arc;

use gemma4c_plan::{Plan, RowCount, Value};

use crate::backend::Backend;
use crate::cpu::{Executor, Pass, Room, Span, Tap};
use crate::cuda::{CudaBackend, OnGpu};
use crate::engine::{AskedRow, BackendDevice, BackendOptions, Chunk, Device, Limits, Picked, Picking, Row};
use crate::lookup::Lookup;
use crate::soft::TowerLimits;
use crate::{ModelLocation, RuntimeError};

pub use crate::acceptance::{MOST_DRAFTS, MOST_LOOKED_UP};
pub use crate::cpu::drafting::Draft;
pub use generate::{End, Request};
pub use media::Soft;
pub use speculate::{Counts, Source, Speculation};

mod depth;
mod draft;
mod generate;
mod media;
mod rounds;
mod speculate;

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
    on: On,
    seen: Vec<u32>,
    /// Positions whose keys and values were written since the last reset: beyond `seen` where the sequence went back.
    written: u32,
    media: media::Media,
    drafting: draft::Drafting,
    lookup: Lookup,
}

/// What runs the plan.
enum On {
    Cpu(Box<Executor>),
    Device(Box<BackendDevice>),
}

impl Session {
    /// Runs on this machine's processor: maps the model's files, checks that they are the plan's, and reserves all memory the
    /// sequence will ever need.
    pub fn on_cpu(plan: Plan, location: &ModelLocation) -> Result<Session, RuntimeError> {
        let room = Room::for_one(&plan);
        let plan = Arc::new(plan);
        let on = On::Cpu(Box::new(Executor::open(Arc::clone(&plan), location, room)?));
        Ok(Session::new(plan, on))
    }

    fn new(plan: Arc<Plan>, on: On) -> Session {
        let (media, drafting) = (media::Media::new(TowerLimits::of(&plan)), draft::Drafting::default());
        Session { plan, on, seen: Vec::new(), written: 0, media, drafting, lookup: Lookup::default() }
    }

    /// Runs on the first GPU, by the program of the plan that fits it. All its memory is allocated and all weights are loaded; `progress` is told the bytes done and the
    /// bytes there are.
    pub fn on_cuda(
        plan: Plan,
        location: &ModelLocation,
        on: &OnGpu,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Session, RuntimeError> {
        let (plan, backend) = CudaBackend::open(plan, location, on, progress)?;
        Session::on_device(plan, Box::new(backend))
    }

    /// Runs on a backend that somebody else made and loaded for this plan.
    pub fn with_backend(plan: Plan, backend: Box<dyn Backend>) -> Result<Session, RuntimeError> {
        Session::on_device(Arc::new(plan), backend)
    }

    /// The sequence has the first slot, and the first pages in order.
    fn on_device(plan: Arc<Plan>, backend: Box<dyn Backend>) -> Result<Session, RuntimeError> {
        let mut device = BackendDevice::for_any(&plan, backend, BackendOptions::default())?;
        let pages = device.limits().blocks_for(plan.program.context);
        device.set_pages(SLOT, &(0..pages).collect::<Vec<u32>>())?;
        let on = On::Device(Box::new(device));
        Ok(Session::new(plan, on))
    }

    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The device's name, for a person.
    pub fn device_name(&self) -> String {
        match &self.on {
            On::Cpu(_) => "cpu".into(),
            On::Device(device) => device.name(),
        }
    }

    fn device(&mut self) -> Option<&mut BackendDevice> {
        match &mut self.on {
            On::Cpu(_) => None,
            On::Device(device) => Some(device),
        }
    }

    /// The GPU's side of it, where it runs on one.
    pub fn cuda(&mut self) -> Option<&mut CudaBackend> {
        self.backend()?.concrete()?.downcast_mut()
    }

    /// The device's side of it, where it does not run on the CPU.
    pub fn backend(&mut self) -> Option<&mut dyn Backend> {
        self.device().map(BackendDevice::backend)
    }

    /// Most tokens of a prompt that are computed at once.
    pub fn chunk(&self) -> u32 {
        match &self.on {
            On::Cpu(_) => self.plan.program.chunk,
            On::Device(device) => device.limits().chunk(),
        }
    }

    /// How the next `tokens` tokens are cut into chunks.
    pub fn pieces(&self, tokens: usize) -> Vec<Range<usize>> {
        self.media.pieces(self.seen.len(), tokens, self.chunk() as usize)
    }

    /// How many tokens have been fed.
    pub fn position(&self) -> u32 {
        self.seen.len() as u32
    }

    /// Forgets the sequence.
    pub fn reset(&mut self) {
        self.seen.clear();
        self.written = 0;
        self.drafting.forget();
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
        match (&self.on, &self.plan.cuda) {
            (On::Device(_), Some(cuda)) => {
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
        if matches!(self.on, On::Cpu(_)) {
            return self.feed_tapped(tokens, asked, chunk, &mut |_, _, _| {}, &mut logits);
        }
        self.queue_prompt(tokens, asked, chunk, &mut logits)?;
        self.append(tokens);
        Ok(())
    }

    /// Feeds a device, whose results may still be on their way afterwards.
    fn queue_prompt(
        &mut self,
        tokens: &[u32],
        asked: Asked,
        chunk: Option<u32>,
        logits: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), RuntimeError> {
        let position = self.position();
        let On::Device(device) = &mut self.on else { return Ok(()) };
        match asked {
            Asked::None => self.drafting.forget(),
            _ => self.drafting.keep_on_device(position + tokens.len() as u32 - 1, 1),
        }
        if device.limits().chunks.is_empty() {
            // A plan without a phase for prompts decodes them.
            for (index, token) in tokens.iter().enumerate() {
                let wanted = asked == Asked::All || (asked == Asked::Last && index + 1 == tokens.len());
                let picking = Picking { logits: wanted, ..Picking::LOGITS };
                device.decode(&[Row { slot: SLOT, position: position + index as u32, token: *token, picking }])?;
                let row = oldest_of(1, device)?;
                if wanted {
                    logits(index, &row.logits);
                }
            }
            return Ok(());
        }
        // Rows that are asked for one by one look at the rings when all of the chunk is in them.
        let Limits { spare_rows, .. } = *device.limits();
        let most = device.limits().chunk().min(if asked == Asked::All { spare_rows } else { u32::MAX });
        let chunk = chunk.unwrap_or(most).clamp(1, most) as usize;
        for Range { start: first, end } in self.media.pieces(position as usize, tokens.len(), chunk) {
            let piece = &tokens[first..end];
            let is_last = end == tokens.len();
            let positions = position as usize + first..position as usize + end;
            let soft = self.media.within(positions);
            let row = |row: usize| AskedRow { chunk: 0, row: row as u32, picking: Picking::LOGITS };
            let last = (asked == Asked::Last && is_last).then(|| row(piece.len() - 1));
            let of_chunk = Chunk { slot: SLOT, position: position + first as u32, tokens: piece, soft: &soft };
            device.prefill(&[of_chunk], last.as_slice())?;
            if last.is_some() {
                logits(tokens.len() - 1, &oldest_of(1, device)?.logits);
            }
            // A row of logits may be a megabyte: each is given out before the next is computed.
            for at in 0..if asked == Asked::All { piece.len() } else { 0 } {
                device.ask(&[row(at)])?;
                logits(first + at, &oldest_of(1, device)?.logits);
            }
            collect_beyond(device, device.limits().ahead as usize)?;
        }
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
        let On::Cpu(executor) = &mut self.on else { return Err(RuntimeError::NoTaps) };
        let program = &self.plan.program;
        let vocab_size = self.plan.model.vocab_size as usize;
        let most = if asked == Asked::All { program.asked.min(program.chunk) } else { program.chunk };
        let chunk = chunk.unwrap_or(most).clamp(1, most) as usize;
        let position = self.seen.len();
        self.drafting.forget();
        let reads = self.plan.drafter.as_ref().map(|drafter| program.values[drafter.reads as usize].name.as_str());
        for Range { start: first, end } in self.media.pieces(position, tokens.len(), chunk) {
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
            let soft = self.media.within(positions);
            // A picture that must not be cut may be more rows than a pass has logits for: the pass is repeated.
            let most = program.asked as usize;
            let parts = if rows.is_empty() { vec![&rows[..]] } else { rows.chunks(most).collect() };
            for (part, asked) in parts.into_iter().enumerate() {
                let is_new = |name: &str| {
                    let of_asked = |value: &Value| value.rows == RowCount::Asked && value.name == name;
                    part == 0 || program.values.iter().any(of_asked)
                };
                let pass = Pass { tokens: piece, spans: &[span], asked, soft: &soft, ..Pass::default() };
                let first_asked = span.first_position + asked.first().copied().unwrap_or(0);
                let out = executor.run(&pass, &mut |name, width, values| {
                    if reads == Some(name) {
                        self.drafting.keep(first_asked, values, width);
                    }
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
        let Some(device) = self.device() else {
            return self.feed(&[token], Asked::Last, None, |_, row| logits(row));
        };
        device.decode(&[Row { slot: SLOT, position, token, picking: Picking::LOGITS }])?;
        logits(&oldest_of(1, device)?.logits);
        self.drafting.keep_on_device(position, 1);
        self.append(&[token]);
        Ok(())
    }

    /// Waits until everything fed is computed.
    pub fn wait(&mut self) -> Result<(), RuntimeError> {
        let Some(device) = self.device() else { return Ok(()) };
        collect_beyond(device, 0)?;
        device.backend().wait()
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

/// The one sequence's.
const SLOT: u32 = 0;

/// Waits until no more results than that are on their way.
fn collect_beyond(device: &mut BackendDevice, on_their_way: usize) -> Result<(), RuntimeError> {
    while device.on_their_way() > on_their_way {
        device.collect()?;
    }
    Ok(())
}

/// The one row of the oldest of the latest `count` results; those before it are nobody's.
fn oldest_of(count: u32, device: &mut BackendDevice) -> Result<Picked, RuntimeError> {
    collect_beyond(device, count as usize)?;
    device.collect()?.pop().ok_or_else(|| RuntimeError::Backend("no row was asked for".into()))
}
