//! The tests of model files, tokenizer, chat templates and synthetic models, in one binary.

#![allow(clippy::unwrap_used)]

#[path = "../support/counting_allocator.rs"]
mod counting_allocator;
#[allow(dead_code, reason = "shared with tests that use all of it")]
#[path = "../../../tests/common/golden.rs"]
mod golden;
#[path = "../../../tests/common/skipped.rs"]
mod skipped;

mod adapters;
mod audio;
mod chat;
mod checkpoint;
mod drafter;
mod gguf_errors;
mod gguf_golden;
mod gguf_hostile;
mod gguf_roundtrip;
mod media;
mod synth;
mod tokenizer;
mod vision;
mod vocab_metadata;

/// It counts for each thread on its own, so that tests that do not ask see nothing of it.
#[global_allocator]
static ALLOCATOR: counting_allocator::CountingAllocator = counting_allocator::CountingAllocator;
