//! plan.bin.

mod vocab;

pub use vocab::{Merge, Sampling, Strings, TokenKind, Vocab};
