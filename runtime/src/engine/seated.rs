//! Whose adapter a sequence has, and what is in which seat: the words that device, requests, prefixes and engine share.

use gemma4c_plan::Seats;

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

/// An adapter as kept prefixes know it: keys and values are those of one filling of a seat, at one strength.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Adapted {
    /// No two fillings share a number.
    pub filling: u64,
    /// The bits of it.
    pub strength: u32,
}

/// What is in the seats.
#[derive(Debug)]
pub(super) struct Fillings {
    /// The filling of each seat, the first seat's first.
    now: Vec<Option<u64>>,
    latest: u64,
}

impl Fillings {
    pub fn new(seats: Option<Seats>) -> Fillings {
        Fillings { now: vec![None; seats.map_or(0, |seats| seats.count as usize)], latest: 0 }
    }

    fn at(&mut self, seat: u32) -> Result<&mut Option<u64>, SeatError> {
        self.check(seat)?;
        Ok(&mut self.now[seat as usize - 1])
    }

    /// Whether there is such a seat.
    pub fn check(&self, seat: u32) -> Result<(), SeatError> {
        match (self.now.len() as u32, seat) {
            (0, _) => Err(SeatError::NoSeats),
            (count, seat) if seat == 0 || seat > count => Err(SeatError::NoSuchSeat { seat, count }),
            _ => Ok(()),
        }
    }

    /// Notes that something new is in a seat.
    pub fn fill(&mut self, seat: u32) -> Result<(), SeatError> {
        self.latest += 1;
        let latest = self.latest;
        *self.at(seat)? = Some(latest);
        Ok(())
    }

    /// Notes that nothing is in a seat, and returns the filling that was.
    pub fn empty(&mut self, seat: u32) -> Result<Option<u64>, SeatError> {
        Ok(self.at(seat)?.take())
    }

    /// The adapter that a request asks for; `None` where it asks for none.
    pub fn of(&self, asked: Option<Seated>) -> Result<Option<Adapted>, SeatError> {
        let Some(Seated { seat, strength }) = asked else { return Ok(None) };
        self.check(seat)?;
        let filling = self.now[seat as usize - 1].ok_or(SeatError::Empty { seat })?;
        if !strength.is_finite() {
            return Err(SeatError::Strength { strength });
        }
        Ok(Some(Adapted { filling, strength: strength.to_bits() }))
    }
}
