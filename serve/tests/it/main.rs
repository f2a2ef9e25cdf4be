//! The server over a tiny model on the CPU, seen from outside: every byte of a stream, every error, and what is left after faults.

#![allow(clippy::unwrap_used)]

mod api;
mod faults;
mod forms;
mod predictions;
mod responses;
mod schemas;
mod support;
