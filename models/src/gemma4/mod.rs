//! Gemma 4: its configuration, its tensors and its forward pass, and those of its towers and drafters. Nothing else in
//! the project names a model's parts.

mod assistant;
mod audio;
mod clipped;
mod config;
mod files;
mod forward;
mod vision;
mod weights;

pub use assistant::{Centroids, DrafterConfig, DrafterError, DrafterGraph, drafter, token_order};
pub use audio::{AudioConfig, AudioError, AudioKind, AudioTower, audio_fits, audio_tower, has_audio};
pub use config::{Attention, Config, ConfigError, Keys, Layer, Mixture, Reach};
pub use files::{OpenError, QUANTISED, open, quantised};
pub use forward::{Beside, ModelError, graph, graph_with, merged};
pub use vision::{VisionConfig, VisionError, VisionTower, fits, vision_tower};
