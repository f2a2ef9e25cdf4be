//! The tests of the whole program: one module a topic, all of them in one binary.
//!
//! Every test binary links all of the workspace, and cargo runs one binary after another. One binary is linked once,
//! and its tests keep all cores busy to the end. Tests of plans in the simulator are a binary of their own
//! (`tests/sim/`), as their stacks fill the mappings that a process may have.

#![allow(clippy::unwrap_used)]

#[macro_use]
#[path = "../common/mod.rs"]
mod common;
#[path = "../../models/tests/support/counting_allocator.rs"]
mod counting_allocator;
#[path = "../common/skipped.rs"]
mod skipped;
#[path = "../../codegen/tests/support/mod.rs"]
mod support;

mod adapters;
mod adapters_of_towers;
mod audio;
mod batch;
mod bench;
mod by_name;
mod cache;
mod checkpoints;
mod chunks;
mod compile_cuda;
mod config;
mod demo;
mod diff;
mod draft;
mod drafted_batches;
mod driver;
mod edges;
mod embed;
mod engine;
mod engine_media;
mod faults;
mod golden;
mod help;
mod hostile_models;
mod hostile_plans;
mod inspect;
mod kernel_instances;
mod kernels_cli;
mod library;
mod massive;
mod memory;
mod outputs;
mod pages;
mod passes;
mod perplexity;
mod plan_faults;
mod run;
mod seats;
mod serve;
mod serve_media;
mod speculation;
mod targets;
mod test_gpu;
mod verify;
mod verify_golden;
mod vision;

/// It counts for each thread on its own, so that tests that do not ask see nothing of it.
#[global_allocator]
static ALLOCATOR: counting_allocator::CountingAllocator = counting_allocator::CountingAllocator;
