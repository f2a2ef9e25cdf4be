//! What was measured on a GPU and decides a number of a rule, as data: a file a GPU.
//!
//! A question is a constant that was found by trying. Its rows are the values that were tried and how fast a whole plan was with each; the
//! compiler takes the fastest, so adding a row is all it takes to change a choice. Nothing else is here: what was tried and is no number of
//! a rule is told in docs/ledger.md. No step of a plan quotes a row, which may be of another model than the plan's.

mod h200;
mod table;

pub use h200::H200;
pub use table::{Measured, Question, Trial};
