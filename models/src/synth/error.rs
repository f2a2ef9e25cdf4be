//! Why no random model is written.

use std::path::PathBuf;

use gemma4c_blocks::DType;
use thiserror::Error;

use crate::gguf::{GgufError, WriteError};

#[derive(Debug, Error)]
pub enum SynthError {
    #[error("{preset} with {layers} layers: it must have {least} to {most}")]
    Layers { preset: &'static str, layers: u32, least: u32, most: u32 },
    #[error("massive channels of {0} times the others: it must be 1 to 100000")]
    Massive(f32),
    #[error("massive channels in {0}: its codes are too few to set single values")]
    MassiveType(DType),
    #[error("the vocabulary: {0}")]
    Vocabulary(GgufError),
    #[error(transparent)]
    Described(GgufError),
    #[error("{} has a vocabulary of {tokens} tokens; expected 1 to {limit}", path.display(), limit = u32::MAX)]
    VocabularySize { path: PathBuf, tokens: usize },
    #[error(transparent)]
    Write(#[from] WriteError),
}
