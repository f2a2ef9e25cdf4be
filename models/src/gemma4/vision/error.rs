//! Why a projector file gives no vision tower for a model.

use gemma4c_graph::VerifyError;

use super::super::config::ConfigError;
use super::super::weights::WeightsError;
use crate::adapter::AdapterError;

/// Why a projector file gives no tower for a model.
#[derive(Debug, thiserror::Error)]
pub enum VisionError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("general.architecture is `{found}`, expected `clip`: this is not a projector file (mmproj)")]
    NotAProjector { found: String },
    #[error("the projector has no vision encoder (clip.has_vision_encoder)")]
    NoVision,
    #[error("clip.vision.projector_type is `{found}`; `gemma4v` and `gemma4uv` are read")]
    Kind { found: String },
    #[error(
        "the projector{} makes soft tokens {projection} wide, the model{} is {hidden} wide: they belong to different sizes",
        called(projector),
        called(model)
    )]
    OtherSize { projector: Option<String>, projection: u32, model: Option<String>, hidden: u32 },
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error(transparent)]
    Adapter(#[from] AdapterError),
    #[error("the declared tower is not well-formed: {0}")]
    Graph(#[from] VerifyError),
}

fn called(name: &Option<String>) -> String {
    name.as_ref().map_or(String::new(), |name| format!(" `{name}`"))
}
