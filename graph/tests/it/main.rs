//! The tests of graphs, in one binary: their texts, what is refused, and the passes.

#![allow(clippy::unwrap_used)]

mod passes;
mod refusals;
mod text;
