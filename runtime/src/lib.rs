//! Executes a plan: token ids in, logits or sampled ids out.
//!
//! ```text
//! Plan + model files ──► Session ──► feed(tokens) ──► logits ──► Sampler ──► next token
//! ```
//!
//! It knows plans and nothing of the compiler that made them. Text is somebody else's business too: a session speaks
//! token ids, so that it can be driven by tests, by a model without a vocabulary, and by whoever brings a tokenizer.

mod acceptance;
mod backend;
mod choose;
pub mod cpu;
pub mod cuda;
mod dry;
mod embedded;
pub mod engine;
mod error;
mod lookup;
pub mod machine;
mod map;
mod penalties;
pub mod ranges;
mod runs;
mod sampler;
mod session;
mod soft;
#[cfg(test)]
#[path = "../plan/tests/support/mod.rs"]
mod support;
mod weights;

pub use backend::{Backend, MemoryUse, Pick, Run};
pub use choose::{choose, named};
pub use cuda::{Chained, OnGpu, Span};
pub use dry::Dry;
pub use embedded::EmbeddedWeights;
pub use engine::{DraftSource, Finish, Guess};
pub use error::RuntimeError;
pub use map::ModelLocation;
pub use penalties::{Penalised, Penalties};
pub use sampler::{Sampler, any_seed, argmax};
pub use session::{Asked, Counts, Draft, MOST_DRAFTS, MOST_LOOKED_UP, Request, Session, Soft, Speculation};
pub use soft::{Patches, SoftRows, TowerLimits};
