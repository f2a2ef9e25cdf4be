//! The two languages of gemma4c.
//!
//! `#[dataflow]` goes on a function that builds a graph; it names the nodes after the function's bindings.

pub use gemma4c_dsl_macros::dataflow;
