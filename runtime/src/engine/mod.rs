//! Many sequences over one loaded model: admission, prompts in chunks between decodes, prefixes that are kept.
//!
//! ```text
//! submit ──► waiting ──► admitted: a slot, and pages for all it may need ──► prefill, chunk by chunk ──► decode ──► finished
//!             (clients take turns)            (a kept prefix is not computed again; short prompts share a chunk)      (all rows at once)
//! ```
//!
//! [`Engine::step`] is one turn: some of the waiting prompts' tokens, then one decode of all running rows. It blocks
//! for no longer than the device takes, calls nobody back, and returns what happened as [`Event`]s. A request's memory
//! is reserved when it is admitted, so nothing is ever evicted half-way. An answer depends on its request alone: not on
//! neighbours, slots, block numbers, or what was kept.
//!
//! Text, templates and networks are somebody else's: here are token ids. Threads too: an engine is driven by one.

mod admission;
mod attachment;
mod depths;
mod device;
mod device_backend;
mod device_cpu;
mod drafts;
pub(crate) mod inspect;
mod media;
mod pace;
mod pool;
mod prefix;
mod prompts;
mod request;
mod resident;
mod results;
mod rounds;
mod seated;
mod seats;
mod sequence;
mod speculate;
mod state;
mod turns;

pub use attachment::Attachment;
pub use device::{AskedRow, Chunk, Device, Limits, Mask, Picked, Picking, Row};
pub use device_backend::{BackendDevice, BackendOptions};
pub use device_cpu::{CpuDevice, CpuOptions};
pub(crate) use drafts::Speculation;
pub use drafts::{DraftCounts, DraftSource, Drafts, Guess};
pub use pace::Gap;
pub use request::{BoxedRule, Demand, Event, Finish, Fork, Id, LONGEST_SALT, Request, RequestError, Rule};
pub use seated::{SeatError, Seated};
pub use state::{Engine, Occupation, Options};
