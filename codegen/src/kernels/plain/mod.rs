//! Every operation of a graph on its own, plainly, in f32, for any number of rows: what a plan is made of where nothing
//! is fused, and what fused kernels are held against in a whole model.
//!
//! Weights are read in their GGUF layout ([`super::values`]), and nothing is rounded to int8 or bf16. Operations
//! that have such a kernel already are not here: the gather, the norm (`norm::plain`, a group a row) and attention
//! (`attention::plain`).
//!
//! The kernels start before their predecessor ends (programmatic dependent launch). They compute every row of the grid;
//! rows beyond those in use hold numbers that nobody reads. Where a row's input is a place in memory (an expert, a
//! position of the cache), rows beyond `state[1]` are not written.

pub mod experts;
pub mod map;
pub mod product;
pub mod rope;
pub mod rows;
