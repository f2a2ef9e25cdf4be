//! plan.bin.

pub mod fingerprint;
mod vocab;

pub use vocab::{Merge, Sampling, Strings, TokenKind, Vocab};
