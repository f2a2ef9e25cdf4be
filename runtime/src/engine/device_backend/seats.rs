//! Seats on a backend: their matrices, and which seat each slot and each row has.

use gemma4c_plan::SeatWeights;
use gemma4c_plan::cuda::{Range, Region, SEAT_WORDS};

use super::super::seated::Seated;
use super::BackendDevice;
use crate::RuntimeError;

impl BackendDevice {
    pub(super) fn write_seat(&mut self, seat: u32, weights: &SeatWeights) -> Result<(), RuntimeError> {
        if !weights.fit(&self.seat_bytes) {
            return Err(RuntimeError::OtherPlan);
        }
        let Some(seats) = self.limits.seats else { return Err(RuntimeError::NoSeats) };
        // Each of the reserved weights has a matrix for every seat, and they follow each other.
        let mut bank = 0;
        for matrix in &weights.matrices {
            let bytes = matrix.len() as u64;
            let offset = bank + bytes * u64::from(seat - 1);
            self.backend.write(Range { region: Region::Seats, offset, bytes }, matrix)?;
            bank += bytes * u64::from(seats.count);
        }
        Ok(())
    }

    pub(super) fn write_slot_seat(&mut self, slot: u32, adapter: Option<Seated>) -> Result<(), RuntimeError> {
        let at = self.places.seat_entry(slot).ok_or(RuntimeError::NoSeats)?;
        let words = adapter.map_or([0; SEAT_WORDS as usize], |Seated { seat, strength }| [seat, strength.to_bits()]);
        self.seated[slot as usize] = words;
        self.write(at, &words)
    }

    /// Copies the seats of rows' slots to the entries of `count` rows from `first` on, of which the last may be free. The
    /// asked row's entry follows those of the decoded rows.
    pub(super) fn write_row_seats(
        &mut self,
        first: u32,
        count: u32,
        slots: impl Iterator<Item = u32>,
    ) -> Result<(), RuntimeError> {
        let Some(at) = self.places.seat_entry(self.layout.slots + first) else { return Ok(()) };
        let mut words: Vec<u32> = slots.flat_map(|slot| self.seated[slot as usize]).collect();
        words.resize((count * SEAT_WORDS) as usize, 0);
        self.write(at, &words)
    }
}
