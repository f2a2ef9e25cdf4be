//! The CPU backend: runs the unfused steps of a plan in f32, straight from the mapped weights, on all cores.
//!
//! It is the oracle of every test and what runs on a machine without a GPU. Both want the same: one obvious order of
//! arithmetic that does not depend on chunks or threads.

mod aligned;
pub(crate) mod drafting;
mod executor;
pub mod kv;
pub mod ops;

pub use executor::{Executor, Pass, Picture, Room, Span, Tap};
pub use ops::adapter::Seat;
pub use ops::grid::Grid;
