//! Why a projector file gives no tower for sound.

use gemma4c_graph::VerifyError;

use super::super::config::ConfigError;
use super::super::weights::WeightsError;
use crate::adapter::AdapterError;

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
    #[error(transparent)]
    Adapter(#[from] AdapterError),
    #[error("the declared tower is not well-formed: {0}")]
    Graph(#[from] VerifyError),
}
