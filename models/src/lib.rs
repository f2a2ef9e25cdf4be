//! .

pub mod chat;
pub mod gemma4;
pub mod gguf;
pub mod tokenizer;
