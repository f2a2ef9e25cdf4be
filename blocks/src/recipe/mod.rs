//! Recipes: how rows of a tensor are made of bytes in files that store it otherwise.
//!
//! A checkpoint has codes and scales in tensors of their own, vectors in 16 bits, experts one by one. Nothing of that
//! is expanded on disk: a plan says which bytes of which files a tensor's rows are made of, and by which of these
//! functions. Each makes any rows alone, so that a model of any size streams through a small buffer.
//!
//! A recipe also knows which bytes each of its inputs has ([`Recipe::inputs`]), so that whoever holds a recipe and the
//! places of its inputs can check that they fit before anything is read. The numbers in a recipe may come from a
//! hostile plan: what they imply is computed with checks.
//!
//! What it does not do: choose. Which recipe makes a tensor exactly is decided where files are read.

mod coded;
mod fault;
mod kinds;
mod make;
mod merge;
mod numbers;
mod quantise;

pub use fault::{BadScale, Fault};
pub use kinds::{First, Float, Input, MOST_INPUTS, Recipe, Scales, merged_type};
