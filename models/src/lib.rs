//! .

pub mod gguf;
