//! Models by name: which files of a Hugging Face repository a model consists of, where they are on this machine, and
//! how those that are missing get here.
//!
//! ```text
//! ModelName ──► Hub::look_up ──► Repository ──► pick::select ──► Selection ──► Hub::fetch ──► paths
//!               the hub, or the cache           no network, no disk            only what is missing
//! ```
//!
//! The Hugging Face cache is used as it is, with its environment variables, so a file that another program fetched is
//! found, and another program finds ours. Nothing here knows what is in a file: a format's name is the caller's to judge.

mod cache;
mod client;
mod download;
mod error;
mod hub;
mod listing;
mod name;
pub mod pick;
mod settings;

pub use error::HubError;
pub use hub::{Found, Hub, Progress};
pub use listing::{RemoteFile, Repository};
pub use name::ModelName;
pub use settings::Settings;
