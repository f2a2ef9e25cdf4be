//! An OpenAI server over an engine: HTTP, text and JSON on one side, token ids on the other.
//!
//! ```text
//! connection ─► fields, template, tokenizer ─► engine's thread ─► tokens ─► language, stop strings ─► events or one answer
//! ```
//!
//! All of tokio and the HTTP server is in this crate. It imports the runtime for its engine and `models` for text, and
//! sees neither compiler nor device. It prints nothing: whoever starts it is told when it is ready, and what became of
//! each request (`record.rs`).

mod answer;
mod app;
mod body;
mod chat;
mod completions;
mod connection;
mod constrain;
mod dialect;
mod dispatcher;
mod error;
mod exchange;
mod fields;
mod follow;
mod generation;
mod grammar;
mod guide;
mod http;
mod keys;
mod language;
mod logprobs;
mod media;
mod memory;
mod metrics;
mod page;
mod process;
mod progress;
mod prompt;
mod record;
mod reply;
mod responses;
mod rules;
mod schema;
mod server;
mod speech;
mod sse;
mod state;
mod structure;
mod tokens;
mod tools;
mod worker;

pub use answer::{Answer, Part};
pub use connection::Stall;
pub use exchange::Deadlines;
pub use media::AllowedHosts;
pub use process::{Running, run, start};
pub use record::{Notice, RequestLine, Sink};
pub use server::{Options, ServeError};
pub use speech::{Speech, SpeechError};
pub use state::QueueLimits;
pub use worker::ServedEngine;
