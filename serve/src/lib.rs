//! A server over an engine, of OpenAI's and other APIs: HTTP, text and JSON on one side, token ids on the other.
//!
//! ```text
//! connection ─► fields, template, tokenizer ─► engine's thread ─► tokens ─► language, stop strings ─► events or one answer
//! ```
//!
//! All of tokio and the HTTP server is in this crate. It imports the runtime for its engine and `models` for text, and
//! sees neither compiler nor device. It prints nothing: whoever starts it is told when it is ready, and what became of
//! each request (`record.rs`).

mod about;
mod adapters;
mod answer;
mod anthropic;
mod app;
mod body;
mod chat;
mod clock;
mod completions;
mod connection;
mod constrain;
mod dialect;
mod dialogue;
mod dispatcher;
mod error;
mod exchange;
mod fields;
mod follow;
mod generation;
mod grammar;
mod guide;
mod hand;
mod house;
mod http;
mod keys;
mod language;
mod llama;
mod logprobs;
mod loops;
mod media;
mod memory;
mod metrics;
mod models;
mod ollama;
mod page;
mod penalties;
mod process;
mod progress;
mod prompt;
mod raw;
mod record;
mod reply;
mod responses;
mod rules;
mod schema;
mod scrape;
mod server;
mod slot;
mod speech;
mod sse;
mod state;
mod structure;
mod tokens;
mod tools;
mod transcription;
mod translated;
mod worker;

pub use adapters::{Named, SeatingError, check_name};
pub use answer::{Answer, Part};
pub use clock::date_and_time;
pub use connection::Stall;
pub use dialogue::{Dialogue, DialogueError};
pub use exchange::Deadlines;
pub use house::Room;
pub use media::AllowedHosts;
pub use process::{Running, run, start};
pub use record::{Notice, RequestLine, Sink};
pub use server::{Offer, Options, ServeError};
pub use speech::{Speech, SpeechError};
pub use state::QueueLimits;
pub use worker::{OpenError, Opener, ServedEngine};
