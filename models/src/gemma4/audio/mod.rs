//! The tower that makes soft tokens of sound, from the projector file (mmproj) that comes beside a text model.
//!
//! One kind is a conformer over log-mel features, one projects raw samples. What is in neither metadata nor tensors is the model's: how far
//! attention reaches, the cap of its scores, and the constants that queries and keys are scaled by.

mod config;
mod forward;
mod weights;

use gemma4c_graph::{Builder, Graph, NodeId, VerifyError};

pub use config::{AudioConfig, AudioKind, has_audio};

use super::config::{Config, ConfigError};
use super::weights::WeightsError;
use crate::gguf::Header;

/// A tower as a graph over the frames of one sound.
#[derive(Debug)]
pub struct AudioTower {
    pub graph: Graph,
    /// Values that a person may want to see, by the names that the reference data has for them.
    pub stages: Vec<(String, NodeId)>,
}

/// Why a projector file gives no tower for sound.
#[derive(Debug, thiserror::Error)]
pub enum AudioError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("clip.audio.projector_type is `{found}`; `gemma4a` and `gemma4ua` are read")]
    Kind { found: String },
    #[error(
        "the projector makes soft tokens {projection} wide of sound, the model is {hidden} wide: they belong to different sizes"
    )]
    OtherSize { projection: u32, hidden: u32 },
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error("the declared tower is not well-formed: {0}")]
    Graph(#[from] VerifyError),
}

/// Whether a projector's soft tokens fit a text model.
pub fn audio_fits(audio: &AudioConfig, text: &Config) -> Result<(), AudioError> {
    match audio.projection == text.hidden {
        true => Ok(()),
        false => Err(AudioError::OtherSize { projection: audio.projection, hidden: text.hidden }),
    }
}

/// The tower in `file`, from the frames of a sound to soft tokens.
pub fn audio_tower(file: &Header, config: &AudioConfig) -> Result<AudioTower, AudioError> {
    let mut g = Builder::new();
    let weights = weights::declare(file, config, &mut g)?;
    let stages = forward::forward(&mut g, config, &weights);
    Ok(AudioTower { graph: g.finish()?, stages })
}
