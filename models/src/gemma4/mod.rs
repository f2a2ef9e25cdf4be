//! Gemma 4: its configuration, its tensors and its forward pass. Nothing else in the project names a model's parts.

mod config;
mod forward;
mod weights;

pub use config::{Attention, Config, ConfigError, Keys, Layer, Mixture, Reach};
pub use forward::{ModelError, graph};
