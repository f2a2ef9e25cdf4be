//! What can keep a model away. Each error says what to do about it.

use std::io;
use std::path::{Path, PathBuf};

/// Why a model was not found or not fetched.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    #[error("there is no place for models: none of HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME and HOME is set")]
    NoCache,
    #[error("HF_ENDPOINT is {endpoint:?}: it must begin with https:// or http://")]
    Endpoint { endpoint: String },
    #[error("SSL_CERT_FILE has no certificate in PEM that can be read")]
    Roots,
    #[error("cannot reach {host}: {why}; is there a network? Models that are here already run with HF_HUB_OFFLINE=1")]
    Unreachable { host: String, why: String },
    #[error("{host} cannot prove who it is: {why}; a proxy's own root certificates are read from SSL_CERT_FILE")]
    Untrusted { host: String, why: String },
    #[error(
        "{endpoint} has no repository {repository}, or none that may be read{}",
        if *has_token { ": check the name, and what the token in HF_TOKEN may read" }
        else { ": check the name; a private one needs a token in HF_TOKEN" }
    )]
    NoRepository { endpoint: String, repository: String, has_token: bool },
    #[error(
        "{repository} is gated: accept its terms at {endpoint}/{repository}, and set HF_TOKEN to a token of that account"
    )]
    Gated { endpoint: String, repository: String },
    #[error("{endpoint} refuses the token in HF_TOKEN: make a new one at {endpoint}/settings/tokens")]
    Token { endpoint: String },
    #[error("{host} has had too many requests: try again in {seconds} seconds, or set HF_TOKEN, which is allowed more")]
    TooMany { host: String, seconds: u64 },
    #[error("{address} was answered with status {status}")]
    Status { address: String, status: u16 },
    #[error("{address}: {why}")]
    Answer { address: String, why: String },
    #[error("HF_HUB_OFFLINE is set, and {repository} is not in {}", cache.display())]
    NotHere { repository: String, cache: PathBuf },
    #[error("HF_HUB_OFFLINE is set, and {file} of {repository} is not here as a whole")]
    NotWhole { repository: String, file: String },
    #[error("{repository} has no GGUF model{}", hint(repository))]
    NoModel { repository: String },
    #[error("{repository} has no {tag}: it has {known}")]
    NoTag { repository: String, tag: String, known: String },
    #[error("{repository}: {why}")]
    NoneFits { repository: String, why: String },
    #[error(
        "{file} arrived damaged: its {hash} is {found}, and should be {expected}; it was deleted, so fetch it again, and if \
         it is damaged again, look for a proxy in between"
    )]
    Damaged { file: String, hash: &'static str, expected: String, found: String },
    #[error(
        "{} has {free} bytes free, and {file} needs {needed} more: make room, or set HF_HOME to a folder that has it \
         (what has arrived stays, and is not fetched again)",
        folder.display()
    )]
    NoSpace { file: String, folder: PathBuf, needed: u64, free: u64 },
    #[error("{host} does not send parts of files (it answered a Range with status {status})")]
    NoRanges { host: String, status: u16 },
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot write {}", path.display())]
    Write { path: PathBuf, source: io::Error },
}

/// Many repositories have their models in another one beside them.
fn hint(repository: &str) -> String {
    match repository.to_ascii_lowercase().ends_with("gguf") {
        true => String::new(),
        false => format!(": look for one whose name ends in GGUF, such as {repository}-GGUF"),
    }
}

impl HubError {
    pub(crate) fn read(path: &Path) -> impl FnOnce(io::Error) -> HubError {
        move |source| HubError::Read { path: path.into(), source }
    }

    pub(crate) fn write(path: &Path) -> impl FnOnce(io::Error) -> HubError {
        move |source| HubError::Write { path: path.into(), source }
    }
}
