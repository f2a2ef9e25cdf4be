//! The tower that makes soft tokens of sound, from the projector file (mmproj) that comes beside a text model.
//!
//! One kind is a conformer over log-mel features, one projects raw samples. What is in neither metadata nor tensors is
//! the model's: how far attention reaches, the cap of its scores, and the constants that queries and keys are scaled
//! by.

mod config;
mod error;
mod forward;
mod weights;

use gemma4c_graph::{Builder, Graph, NodeId};

pub use config::{AudioConfig, AudioKind, has_audio};
pub use error::AudioError;

use super::config::Config;
use crate::adapter::{self, Adapter, Model, Part};
use crate::gguf::Header;

/// A tower as a graph over the frames of one sound.
#[derive(Debug)]
pub struct AudioTower {
    pub graph: Graph,
    /// Values that a person may want to see, by the names that the reference data has for them.
    pub stages: Vec<(String, NodeId)>,
}

/// Whether a projector's soft tokens fit a text model.
pub fn audio_fits(audio: &AudioConfig, text: &Config) -> Result<(), AudioError> {
    match audio.projection == text.hidden {
        true => Ok(()),
        false => Err(AudioError::OtherSize { projection: audio.projection, hidden: text.hidden }),
    }
}

/// The tower in `file`, from the frames of a sound to soft tokens, with the adapters' pairs for it.
pub fn audio_tower(
    file: &Header,
    config: &AudioConfig,
    adapters: &[(&Adapter, f32)],
) -> Result<AudioTower, AudioError> {
    let mut g = Builder::new();
    let weights = weights::declare(file, config, &mut g)?;
    let tower = Model::Tower(Part::Audio);
    adapter::declare(adapters, tower, &mut g)?;
    let stages = forward::forward(&mut g, config, &weights);
    let graph = g.finish()?;
    adapter::check(adapters, tower, &graph)?;
    Ok(AudioTower { graph, stages })
}
