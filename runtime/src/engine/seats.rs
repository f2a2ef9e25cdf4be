//! Adapters in seats: what each seat is filled with, and who has one.
//!
//! A seat is filled while nobody has it, so that a sequence has one adapter from its first row to its last. Whoever
//! waits to be admitted has its seat already. What is kept of a prompt belongs to the *filling*, a number that no two
//! fillings share, and to the strength: a seat that is filled again shares nothing with what was in it.

use gemma4c_plan::{SeatWeights, Seats};

use super::device::Device;
use super::prefix::Adapted;
use super::request::{Request, RequestError};
use super::state::Engine;
use crate::RuntimeError;

/// A sequence's adapter: the seat that it is in, counted from 1, and how strong it is; 1 is as it was trained.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Seated {
    pub seat: u32,
    pub strength: f32,
}

/// Why a seat is not filled or emptied, or a request does not get it.
#[derive(Debug, thiserror::Error)]
pub enum SeatError {
    #[error("the plan has no seats for adapters: compile it with --adapters")]
    NoSeats,
    #[error("there is no seat {seat} for an adapter: the plan has {count}, counted from 1")]
    NoSuchSeat { seat: u32, count: u32 },
    #[error("no adapter is in seat {seat}")]
    Empty { seat: u32 },
    #[error("seat {seat} is in use: {sequences} sequences run or wait with its adapter")]
    InUse { seat: u32, sequences: usize },
    #[error("an adapter's strength is {strength}, expected a number")]
    Strength { strength: f32 },
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
}

/// What is in the seats.
#[derive(Debug, Default)]
pub(super) struct Fillings {
    seat_count: u32,
    /// The filling of each seat, the first seat's first.
    now: Vec<Option<u64>>,
    latest: u64,
}

impl Fillings {
    pub fn new(seats: Option<Seats>) -> Fillings {
        let seat_count = seats.map_or(0, |seats| seats.count);
        Fillings { seat_count, now: vec![None; seat_count as usize], latest: 0 }
    }

    /// The place of a seat among all of them.
    fn index(&self, seat: u32) -> Result<usize, SeatError> {
        match (self.seat_count, seat) {
            (0, _) => Err(SeatError::NoSeats),
            (count, seat) if seat == 0 || seat > count => Err(SeatError::NoSuchSeat { seat, count }),
            _ => Ok(seat as usize - 1),
        }
    }

    /// What is in the seat that a request asks for; `None` where it asks for none.
    pub fn of(&self, request: &Request) -> Result<Option<Adapted>, SeatError> {
        let Some(Seated { seat, strength }) = request.adapter else { return Ok(None) };
        let filling = self.now[self.index(seat)?].ok_or(SeatError::Empty { seat })?;
        if !strength.is_finite() {
            return Err(SeatError::Strength { strength });
        }
        Ok(Some(Adapted { filling, strength: strength.to_bits() }))
    }
}

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
        let index = self.fillings.index(seat)?;
        self.fillings.latest += 1;
        self.fillings.now[index] = Some(self.fillings.latest);
        Ok(())
    }

    /// Takes the adapter out of a seat. Refused as [`Engine::fill_seat`] is; an empty seat stays empty.
    pub fn empty_seat(&mut self, seat: u32) -> Result<(), SeatError> {
        let index = self.fillings.index(seat)?;
        let sequences = self.sequences_in(seat);
        if sequences > 0 {
            return Err(SeatError::InUse { seat, sequences });
        }
        if let Some(filling) = self.fillings.now[index].take() {
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

    /// Whether a request can have the seat that it asks for.
    pub(super) fn check_seat(&self, request: &Request) -> Result<(), RequestError> {
        self.fillings.of(request)?;
        Ok(())
    }

    /// Tells the device which seat the sequence in a slot has.
    pub(super) fn take_seat(&mut self, slot: u32, adapter: Option<Seated>) -> Result<(), RuntimeError> {
        if self.limits.seats.is_none() {
            return Ok(());
        }
        self.device.seat(slot, adapter)
    }
}
