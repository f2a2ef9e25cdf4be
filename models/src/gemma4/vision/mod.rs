//! The tower that makes soft tokens of pictures, from the projector file (mmproj) that comes beside a text model.
//!
//! Its sizes are in that file's metadata, its features (clipped products, standardised results) in the list of its
//! tensors. What is in neither is the model's: the base of the rotation, and that three by three patches make a soft
//! token. One kind has no encoder: a soft token is a projection of its pixels.

mod config;
mod error;
mod forward;
mod weights;

use gemma4c_graph::{Builder, Graph, NodeId};

pub use config::VisionConfig;
pub use error::VisionError;

use super::config::Config;
use crate::adapter::{self, Adapter, Model, Part};
use crate::gguf::Header;

/// A tower as a graph over the patches of one picture.
#[derive(Debug)]
pub struct VisionTower {
    pub graph: Graph,
    /// Values that a person may want to see, by the names that the reference data has for them.
    pub stages: Vec<(String, NodeId)>,
}

/// Whether a projector's soft tokens fit a text model.
pub fn fits(vision: &VisionConfig, text: &Config) -> Result<(), VisionError> {
    match vision.projection == text.hidden {
        true => Ok(()),
        false => Err(VisionError::OtherSize {
            projector: vision.name.clone(),
            projection: vision.projection,
            model: text.name.clone(),
            hidden: text.hidden,
        }),
    }
}

/// The tower in `file`, from the patches of a picture to soft tokens, with the adapters' pairs for it.
pub fn vision_tower(
    file: &Header,
    config: &VisionConfig,
    adapters: &[(&Adapter, f32)],
) -> Result<VisionTower, VisionError> {
    let mut g = Builder::new();
    let weights = weights::declare(file, config, &mut g)?;
    let tower = Model::Tower(Part::Vision);
    adapter::declare(adapters, tower, &mut g)?;
    let stages = forward::forward(&mut g, config, &weights);
    let graph = g.finish()?;
    adapter::check(adapters, tower, &graph)?;
    Ok(VisionTower { graph, stages })
}
