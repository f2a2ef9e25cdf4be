//! Seats: room for adapters (LoRA) that come and go while a plan runs, and what one of them is filled with.
//!
//! A plan with seats has a bank of matrices, reserved among its weights, for each half of
//! each pair: the first seat's matrix, the second's, and so on. They hold zeros until somebody fills a seat. Which seat
//! a sequence has is said while the plan runs; seat 0 is none.

use serde::{Deserialize, Serialize};

/// Seats of a plan, at most.
pub const MOST_SEATS: u32 = 256;
/// The highest rank of an adapter in a seat.
pub const MOST_SEAT_RANK: u32 = 512;
/// Ranks of seats are multiples of this: kernels multiply whole tiles.
pub const SEAT_RANK_STEP: u32 = 16;

/// How many adapters a plan has room for at once, and their rank at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seats {
    pub count: u32,
    pub rank: u32,
}

/// An adapter as a seat takes it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SeatWeights {
    /// The pairs that it has; where it has none, a seat's matrices are zeros.
    pub pairs: u32,
    /// One seat's matrix for each of the plan's reserved weights, in their order: bf16, with zeros up
    /// to the seats' rank.
    pub matrices: Vec<Vec<u8>>,
}

impl SeatWeights {
    /// Whether they are as large as one seat of such a plan.
    pub fn fit(&self, seat_bytes: &[u64]) -> bool {
        self.matrices.iter().map(|matrix| matrix.len() as u64).eq(seat_bytes.iter().copied())
    }
}
