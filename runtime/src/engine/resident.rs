//! One sequence that outlives its requests: what a [`Session`](crate::Session) asks of an engine.
//!
//! It has the first slot and the first pages in order, for as long as the engine is there. A request goes on from what
//! is in them, and leaves what it has written. Nobody else is admitted meanwhile.

use std::vec::Drain;

use super::device::Device;
use super::drafts::Speculation;
use super::pace::Work;
use super::pool::Pages;
use super::prefix::{Apart, Chain};
use super::request::{Event, Id, Request};
use super::sequence::{Sequence, Stage};
use super::state::{Engine, InFlight};
use crate::sampler::Recited;
use crate::soft::Placed;
use crate::{RuntimeError, Sampler};

impl<D: Device> Engine<D> {
    pub(crate) fn device_mut(&mut self) -> &mut D {
        &mut self.device
    }

    /// Sets the tokens that the host never picks.
    pub(crate) fn suppress(&mut self, tokens: &[u32]) -> Result<(), RuntimeError> {
        self.host_sampler = Sampler::new(self.host_sampler.sampling(), 0, tokens.to_vec())?;
        Ok(())
    }

    /// Exchanges how it speculates, with all that was learned, and the text that is said whatever is picked. No
    /// sequence is running.
    pub(crate) fn exchange(&mut self, speculation: &mut Speculation, recited: &mut Option<Recited>) {
        std::mem::swap(&mut self.speculation, speculation);
        std::mem::swap(&mut self.recited, recited);
    }

    /// Goes on with what is in the first slot: the first `read` tokens of the prompt. Soft tokens stand at some
    /// positions behind them. The device owes so many results of what it was given besides.
    pub(crate) fn resume(
        &mut self,
        request: Request,
        read: u32,
        soft: Vec<Placed>,
        owed: usize,
    ) -> Result<Id, RuntimeError> {
        let slot = self.pool.take_slot().ok_or_else(|| RuntimeError::Backend("no slot is free".into()))?;
        let chain = Chain::new(0, Apart::default(), Vec::new(), self.limits.full.rows);
        self.take_seat(slot, request.adapter)?;
        let last = request.prompt.last().copied();
        let mut sequence = Sequence::new(request, chain, slot, Pages::default(), read, &self.limits);
        (sequence.soft, sequence.positions) = (soft, self.limits.context);
        // A plan without a phase for prompts decodes their tokens.
        if let Some(pending) = last.filter(|_| self.limits.chunks.is_empty()) {
            sequence.stage = Stage::Generating { pending, position: read };
        }
        if self.speculation.reads_text() {
            sequence.keep_text();
        }
        let nobodys = || InFlight { rows: [].into(), work: Work::Unmeasured, waits: false, read: None };
        self.in_flight.extend(std::iter::repeat_with(nobodys).take(owed));
        let id = self.new_id();
        self.sequences.insert(id, sequence);
        Ok(id)
    }

    /// One turn, as [`Engine::step`].
    pub(crate) fn go_on(&mut self) -> Result<Drain<'_, Event>, RuntimeError> {
        self.turn()?;
        Ok(self.events.drain(..))
    }

    /// Ends the sequence, if it has not ended, and waits for what is in flight. Returns the positions that it has
    /// written, those in vain included.
    pub(crate) fn leave(&mut self, id: Id) -> Result<u32, RuntimeError> {
        self.cancel(id);
        let drained = self.drain();
        self.events.clear();
        drained.map(|()| self.written)
    }
}
