//! The tests of plan files, in one binary: the format, and what hostile bytes may do.

#![allow(clippy::unwrap_used)]

#[path = "../../../../models/tests/support/counting_allocator.rs"]
mod counting_allocator;
#[path = "../support/mod.rs"]
mod support;

mod format;
mod hostile;
mod pieces;
mod seats;

/// It counts for each thread on its own, so that tests that do not ask see nothing of it.
#[global_allocator]
static ALLOCATOR: counting_allocator::CountingAllocator = counting_allocator::CountingAllocator;
