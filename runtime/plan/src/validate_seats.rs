//! What must hold of a plan's seats: the weights reserved for them are as large as it says, and read by nothing that
//! does not look at seats.

use gemma4c_blocks::DType;

use crate::seats::{MOST_SEAT_RANK, MOST_SEATS, SEAT_RANK_STEP};
use crate::{Plan, Seats, Weight};

pub(crate) fn check(plan: &Plan) -> Result<(), String> {
    let Some(Seats { count, rank }) = plan.model.seats else {
        return match plan.reserved().next() {
            Some((_, weight)) => Err(format!("{} is reserved for adapters, and the plan has no seats", weight.name)),
            None => Ok(()),
        };
    };
    let is_rank = (1..=MOST_SEAT_RANK).contains(&rank) && rank.is_multiple_of(SEAT_RANK_STEP);
    if !is_rank || !(1..=MOST_SEATS).contains(&count) || plan.reserved().next().is_none() {
        return Err(format!("{count} seats of rank {rank} make no sense"));
    }
    let is_bank = |weight: &Weight| {
        let [first, second, seats] = weight.dims[..] else { return false };
        let is_half = first == u64::from(rank) || second == u64::from(rank);
        weight.dtype == DType::BF16 && is_half && seats == u64::from(count)
    };
    if let Some((_, weight)) = plan.reserved().find(|(_, weight)| !is_bank(weight)) {
        let (name, dtype, dims) = (&weight.name, weight.dtype, &weight.dims);
        return Err(format!("{name} {dtype}{dims:?} does not hold {count} seats of rank {rank}"));
    }
    // Towers and drafters have no seats at hand.
    let towers = plan.towers.iter().map(|tower| &tower.program);
    let others = towers.chain(plan.drafter.iter().map(|drafter| &drafter.program));
    let mut read =
        others.flat_map(|program| &program.steps).filter_map(|step| plan.weights.get(step.op.weight()?.index()));
    match read.find(|weight| weight.is_reserved()) {
        Some(weight) => Err(format!("{} is reserved for adapters of the text, and read elsewhere", weight.name)),
        None => Ok(()),
    }
}
