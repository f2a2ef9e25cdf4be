//! Which units of a row a lane takes: its steps, and the stretches that they are of.

use gemma4c_dsl::prelude::*;

/// Units of a stretch: whole steps of its lanes, of at most four stretches. The last may be shorter or empty. A row that is not STRETCHED is one.
#[device]
pub fn stretch_units<const K: u32, const UNIT: u32, const STRETCHED: bool>() -> u32 {
    if STRETCHED { (K / UNIT).div_ceil(32) * 8 } else { K / UNIT }
}

/// Units from one step of a lane to the next.
#[device]
pub fn step_units<const LANES: u32, const STRETCHED: bool>() -> u32 {
    if STRETCHED { 8 } else { LANES }
}

/// Units from a lane's first step to behind its last: those of its stretch, or of all stretches where eight lanes take one after the other.
#[device]
pub fn lane_units<const K: u32, const UNIT: u32, const LANES: u32, const STRETCHED: bool>() -> u32 {
    if has_stretches() { K / UNIT } else { stretch_units() }
}

/// Whether a lane has more than one stretch.
#[device]
pub fn has_stretches<const K: u32, const UNIT: u32, const LANES: u32, const STRETCHED: bool>() -> bool {
    STRETCHED && LANES == 8 && K / UNIT > 8
}

/// The stretch that a step of a round belongs to, of those that a lane has.
#[device]
pub fn stretch_of<const K: u32, const UNIT: u32, const LANES: u32, const STRETCHED: bool>(step: u32) -> u32 {
    if has_stretches() { step * step_units() / stretch_units() } else { 0 }
}
