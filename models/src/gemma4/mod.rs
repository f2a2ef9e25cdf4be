//! Gemma 4: its configuration, its tensors and its forward pass, and those of its towers and drafters. Nothing else in the project names a model's parts.

mod assistant;
mod config;
mod forward;
mod vision;
mod weights;

pub use assistant::{Centroids, DrafterConfig, DrafterError, DrafterGraph, drafter, token_order};
pub use config::{Attention, Config, ConfigError, Keys, Layer, Mixture, Reach};
pub use forward::{ModelError, graph, graph_with_soft_tokens};
pub use vision::{VisionConfig, VisionError, VisionTower, fits, vision_tower};
