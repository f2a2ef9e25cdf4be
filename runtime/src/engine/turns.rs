//! One turn of an engine: who has room is admitted, then some of the prompts and one token for each running sequence.

use super::device::{Device, Row};
use super::pace::Work;
use super::request::Event;
use super::sequence::{Sequence, Stage};
use super::state::Engine;
use crate::RuntimeError;

impl<D: Device> Engine<D> {
    /// One turn: admits who has room, computes some of the prompts and one token for each running sequence.
    ///
    /// An error is the device's, and ends everything; what is one sequence's own is an event.
    pub fn step(&mut self) -> Result<Vec<Event>, RuntimeError> {
        self.turn()?;
        Ok(std::mem::take(&mut self.events))
    }

    pub(super) fn turn(&mut self) -> Result<(), RuntimeError> {
        self.admit()?;
        if !self.draining {
            self.queue_prompts()?;
        }
        if self.draining || !self.prompts_first || self.sequences.values().all(Sequence::has_read_all) {
            self.queue_decode()?;
        }
        self.collect_beyond(self.ahead)
    }

    /// Queues one decode: the latest once more, where the same rows go on, or else, once all tokens are known, one of
    /// those that are there. With drafts, where they pay.
    fn queue_decode(&mut self) -> Result<(), RuntimeError> {
        if !self.draining && self.go_on_in_rounds()? {
            return Ok(());
        }
        let ahead = self.in_flight.iter().filter(|result| matches!(result.work, Work::Decode(_))).count() as u32;
        let may_repeat = self.steady && self.batch.iter().all(|id| self.sequences[id].left > ahead);
        if may_repeat && !self.draining && !self.wants_round() {
            self.device.decode_again()?;
            return self.await_decode();
        }
        // Tokens are given out as they come: others must not wait for the last of them.
        self.draining = true;
        while !self.in_flight.is_empty() {
            self.collect()?;
            if !self.events.is_empty() && !self.in_flight.is_empty() {
                return Ok(());
            }
        }
        (self.draining, self.rounds) = (false, None);
        if self.begin_rounds()? || self.round()? {
            return Ok(());
        }
        let (mut rows, mut batch) = (Vec::new(), Vec::new());
        (self.steady, self.guided) = (self.recited.is_none(), false);
        for (id, sequence) in &self.sequences {
            let Stage::Generating { pending, position } = sequence.stage else { continue };
            let picking = sequence.picking(&self.device);
            self.steady &= !picking.logits;
            self.guided |= picking.masked;
            rows.push(Row { slot: sequence.slot, position, token: pending, picking });
            batch.push(*id);
        }
        self.batch = batch.into();
        self.steady &= !rows.is_empty();
        if !rows.is_empty() {
            self.began = (self.clock)();
            self.device.decode(&rows)?;
            self.await_decode()?;
        }
        Ok(())
    }
}
