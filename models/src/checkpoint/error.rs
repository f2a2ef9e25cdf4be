//! What can be wrong with a checkpoint, said so that a person knows which file, which tensor or which key.
//!
//! Names come from files and may be anything: they are escaped and cut before they reach a terminal.

use std::path::PathBuf;

use thiserror::Error;

use crate::gguf::GgufError;

/// An error of the reader.
#[derive(Debug, Error)]
pub enum CheckpointError {
    /// A file that cannot be read or mapped.
    #[error(transparent)]
    File(#[from] GgufError),
    #[error("cannot read {}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{}: {fault}", path.display())]
    In { path: PathBuf, fault: Fault },
}

impl CheckpointError {
    /// For `map_err`: a fault of a file or a folder.
    pub(super) fn within(path: impl Into<PathBuf>) -> impl Fn(Fault) -> CheckpointError {
        let path = path.into();
        move |fault| CheckpointError::In { path: path.clone(), fault }
    }
}

/// A fault of a file, or of a folder as a whole.
#[derive(Debug, Error)]
pub enum Fault {
    #[error("not a folder with a checkpoint: it has no {0}")]
    Lacks(&'static str),
    #[error("{file} is missing: {why}")]
    MissingShard { file: String, why: String },
    #[error("not a safetensors file: its first 8 bytes say a header of {header} bytes, the file has {file}")]
    HeaderLength { header: u64, file: u64 },
    #[error("{what}: {why}")]
    Json { what: &'static str, why: String },
    #[error("tensor {tensor} {problem}")]
    Tensor { tensor: String, problem: String },
    #[error("{key} is {found}, expected {expected}")]
    Key { key: String, found: String, expected: String },
    #[error("{0} is missing")]
    MissingKey(&'static str),
    #[error("{what} is not supported: {why}")]
    Unsupported { what: String, why: String },
}

impl Fault {
    pub(super) fn tensor(name: &str, problem: impl Into<String>) -> Fault {
        Fault::Tensor { tensor: shown(name), problem: problem.into() }
    }

    pub(super) fn unsupported(what: impl Into<String>, why: impl Into<String>) -> Fault {
        Fault::Unsupported { what: what.into(), why: why.into() }
    }

    pub(super) fn key(key: &str, found: impl ToString, expected: impl Into<String>) -> Fault {
        Fault::Key { key: key.into(), found: found.to_string(), expected: expected.into() }
    }
}

/// A text of a file, short and on one line.
pub(super) fn shown(text: &str) -> String {
    const MOST: usize = 120;
    let cut: String = text.chars().take(MOST).flat_map(char::escape_debug).collect();
    let more = if text.chars().nth(MOST).is_some() { "…" } else { "" };
    format!("{cut}{more}")
}
