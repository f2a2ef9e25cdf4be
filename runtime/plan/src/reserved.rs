//! Which of a plan's weights are stored, and which are reserved for the adapters of its seats.

use gemma4c_ops::WeightId;

use crate::{Plan, Weight};

impl Plan {
    /// The weights that seats are in, in the plan's order.
    pub fn reserved(&self) -> impl Iterator<Item = (WeightId, &Weight)> {
        (0..).map(WeightId).zip(&self.weights).filter(|(_, weight)| weight.is_reserved())
    }

    /// The weights that are stored somewhere.
    pub fn stored(&self) -> impl Iterator<Item = &Weight> {
        self.weights.iter().filter(|weight| !weight.is_reserved())
    }

    /// Bytes of all seats.
    pub fn reserved_bytes(&self) -> u64 {
        self.reserved().fold(0, |sum, (_, weight)| sum.saturating_add(weight.bytes))
    }

    /// Bytes of one seat's matrix in each of the reserved weights, in their order.
    pub fn seat_bytes(&self) -> Vec<u64> {
        let count = self.model.seats.map_or(1, |seats| u64::from(seats.count.max(1)));
        self.reserved().map(|(_, weight)| weight.bytes / count).collect()
    }
}
