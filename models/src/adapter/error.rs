//! What can be wrong with an adapter, said so that a person knows which file, and which tensor or setting of it.
//!
//! Names come from files and may be anything: they are escaped and cut before they reach a terminal.

use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::checkpoint::{CheckpointError, shown};
use crate::gguf::GgufError;

/// Why an adapter is not applied.
#[derive(Debug, Error)]
pub enum AdapterError {
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error("{}: {fault}", path.display())]
    In { path: PathBuf, fault: Fault },
}

impl AdapterError {
    /// For `map_err`: a fault of a file or a folder.
    pub(super) fn within(path: &Path) -> impl Fn(Fault) -> AdapterError + use<> {
        let path = path.to_path_buf();
        move |fault| AdapterError::In { path: path.clone(), fault }
    }
}

/// A fault of an adapter.
#[derive(Debug, Error)]
pub enum Fault {
    #[error("tensor `{tensor}` {why}")]
    Tensor { tensor: String, why: String },
    #[error("{setting} {why}")]
    Setting { setting: String, why: String },
    #[error("not an adapter: {0}")]
    NotAdapter(String),
    #[error("the adapter has no pair of matrices")]
    Empty,
}

impl Fault {
    pub(super) fn tensor(name: &str, why: impl Into<String>) -> Fault {
        Fault::Tensor { tensor: shown(name), why: why.into() }
    }

    pub(super) fn setting(setting: &str, why: impl Into<String>) -> Fault {
        Fault::Setting { setting: setting.into(), why: why.into() }
    }
}
