//! The server over a tiny model on the CPU, seen from outside: every byte of a stream, every error, and what is left
//! after faults.

#![allow(clippy::unwrap_used)]

#[path = "../../../tests/common/adapter.rs"]
mod adapter;
#[allow(dead_code, reason = "shared with tests that use all of it")]
#[path = "../../../tests/common/golden.rs"]
mod golden;
#[path = "../../../tests/common/skipped.rs"]
mod skipped;

mod adapter_loading;
mod adapters;
mod anthropic;
mod api;
mod connections;
mod conversations;
mod faults;
mod films;
mod forms;
mod lines;
mod llama;
mod loops;
mod models;
mod mutations;
mod ollama;
mod predictions;
mod responses;
mod schemas;
mod schemas_both_ways;
mod seats;
mod seeing;
mod slow;
mod support;
mod transcriptions;

use mutations::Random;
