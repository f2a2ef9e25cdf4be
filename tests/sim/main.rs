//! Whole plans in the simulator.
//!
//! A process of their own: every simulated thread has a stack and a guard page, and Linux gives a process 65,530
//! mappings.

mod adapters;
mod chain;
#[path = "../common/mod.rs"]
mod common;
mod company;
mod drafted_batches;
mod drafter;
mod golden;
mod masks;
mod narrow;
mod passes;
mod random_graphs;
mod seats;
mod simulated;
#[path = "../common/skipped.rs"]
mod skipped;
mod speculation;
mod stages;
mod targets;
