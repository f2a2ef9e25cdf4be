//! Adapters in seats: filling and emptying them, and who has one.
//!
//! A seat is filled while nobody has it, so that a sequence has one adapter from its first row to its last. Whoever
//! waits to be admitted has its seat already. What is kept of a prompt belongs to the *filling*, a number that no two
//! fillings share, and to the strength: a seat that is filled again shares nothing with what was in it.

use gemma4c_plan::{SeatWeights, Seats};

use super::device::Device;
use super::request::Request;
use super::seated::{SeatError, Seated};
use super::state::Engine;
use crate::RuntimeError;

impl<D: Device> Engine<D> {
    /// The seats that the plan has for adapters.
    pub fn seats(&self) -> Option<Seats> {
        self.limits.seats
    }

    /// Puts an adapter into a seat, in place of the one that is there. Refused while a sequence, running or waiting,
    /// has that seat.
    pub fn fill_seat(&mut self, seat: u32, weights: &SeatWeights) -> Result<(), SeatError> {
        self.empty_seat(seat)?;
        self.device.fill_seat(seat, weights)?;
        self.fillings.fill(seat)
    }

    /// Takes the adapter out of a seat. Refused as [`Engine::fill_seat`] is; an empty seat stays empty.
    pub fn empty_seat(&mut self, seat: u32) -> Result<(), SeatError> {
        self.fillings.check(seat)?;
        let sequences = self.sequences_in(seat);
        if sequences > 0 {
            return Err(SeatError::InUse { seat, sequences });
        }
        if let Some(filling) = self.fillings.empty(seat)? {
            self.prefixes.forget_filling(filling, &mut self.pool);
        }
        Ok(())
    }

    /// Sequences, running or waiting, that have a seat.
    pub fn sequences_in(&self, seat: u32) -> usize {
        let waiting = self.waiting.iter().map(|(_, request, _)| request);
        let running = self.sequences.values().map(|sequence| &sequence.request);
        let has_it = |request: &&Request| request.adapter.is_some_and(|adapter| adapter.seat == seat);
        waiting.chain(running).filter(has_it).count()
    }

    /// Tells the device which seat the sequence in a slot has.
    pub(super) fn take_seat(&mut self, slot: u32, adapter: Option<Seated>) -> Result<(), RuntimeError> {
        if self.limits.seats.is_none() {
            return Ok(());
        }
        self.device.seat(slot, adapter)
    }
}
