//! What a projector file says about its vision tower.

use super::super::config::{ConfigError, MOST_LAYERS, in_range, positive};
use super::error::VisionError;
use crate::gguf::{Array, FromValue, Header};

/// Patches along the square that becomes one soft token, where the file does not say.
const USUAL_POOL: u32 = 3;
/// Pixels along a patch, at most.
const LONGEST_PATCH: u32 = 64;

/// A vision tower.
#[derive(Clone, Debug, PartialEq)]
pub struct VisionConfig {
    pub name: Option<String>,
    pub width: u32,
    /// The layers; `None` where patches are projected without any.
    pub encoder: Option<Encoder>,
    /// Pixels along a patch.
    pub patch: u32,
    /// Patches along the square of a soft token.
    pub pool: u32,
    /// Width of a soft token.
    pub projection: u32,
    pub eps: f32,
}

/// The layers of a tower.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encoder {
    pub layers: u32,
    pub heads: u32,
    pub head_dim: u32,
    pub ffn: u32,
}

impl VisionConfig {
    pub fn read(file: &Header) -> Result<VisionConfig, VisionError> {
        let meta = file.metadata();
        let short = |text: &str| text.chars().take(40).collect();
        let found = meta.str("general.architecture").map_err(ConfigError::from)?;
        if found != "clip" {
            return Err(VisionError::NotAProjector { found: short(found) });
        }
        if !meta.optional("clip.has_vision_encoder").map_err(ConfigError::from)?.unwrap_or(false) {
            return Err(VisionError::NoVision);
        }
        let kind = meta.str("clip.vision.projector_type").map_err(ConfigError::from)?;
        match kind {
            "gemma4v" => Ok(sizes(file, true)?),
            "gemma4uv" => Ok(sizes(file, false)?),
            _ => Err(VisionError::Kind { found: short(kind) }),
        }
    }

    /// Numbers of a patch.
    pub const fn patch_width(&self) -> u32 {
        3 * self.patch * self.patch
    }
}

fn sizes(file: &Header, has_encoder: bool) -> Result<VisionConfig, ConfigError> {
    let meta = file.metadata();
    let number = |key: &'static str| in_range(key, meta.u32(key)?);
    let unusable = |key: &'static str, why: String| Err(ConfigError::Unusable { key, why });
    let width = number("clip.vision.embedding_length")?;
    let patch = number("clip.vision.patch_size")?;
    let pool = meta.optional("clip.vision.projector.scale_factor")?.unwrap_or(USUAL_POOL);
    if patch > LONGEST_PATCH {
        return unusable("clip.vision.patch_size", format!("is {patch}, expected 1 to {LONGEST_PATCH}"));
    }
    if !(1..=16).contains(&pool) {
        return unusable("clip.vision.projector.scale_factor", format!("is {pool}, expected 1 to 16"));
    }
    // Without an encoder a soft token is one patch, as large as the square of several that it would be of.
    let (patch, pool) = if has_encoder { (patch, pool) } else { (patch * pool, 1) };
    let config = VisionConfig {
        name: meta.optional::<&str>("general.name")?.map(str::to_string),
        width,
        encoder: if has_encoder { Some(encoder(file, width)?) } else { None },
        patch,
        pool,
        projection: number("clip.vision.projection_dim")?,
        eps: positive(
            "clip.vision.attention.layer_norm_epsilon",
            meta.f32("clip.vision.attention.layer_norm_epsilon")?,
        )?,
    };
    // Gemma's towers take pixels from 0 to 1 as they are; a file that wants others is of another model.
    for (key, usual) in [("clip.vision.image_mean", 0.0), ("clip.vision.image_std", 1.0)] {
        let Some(array) = meta.optional::<Array<'_>>(key)? else { continue };
        if let Some(value) = array.iter().find(|value| f32::from_value(*value) != Some(usual)) {
            return unusable(key, format!("has {value}, expected {usual} for every channel"));
        }
    }
    Ok(config)
}

fn encoder(file: &Header, width: u32) -> Result<Encoder, ConfigError> {
    let meta = file.metadata();
    let number = |key: &'static str| in_range(key, meta.u32(key)?);
    let unusable = |key: &'static str, why: String| Err(ConfigError::Unusable { key, why });
    let layers = number("clip.vision.block_count")?;
    let heads = number("clip.vision.attention.head_count")?;
    if layers > MOST_LAYERS {
        return unusable("clip.vision.block_count", format!("is {layers}, expected 1 to {MOST_LAYERS}"));
    }
    if !u64::from(width).is_multiple_of(4 * u64::from(heads)) {
        let why = format!("is {heads}: a row of {width} is not so many heads of four quarters");
        return unusable("clip.vision.attention.head_count", why);
    }
    Ok(Encoder { layers, heads, head_dim: width / heads, ffn: number("clip.vision.feed_forward_length")? })
}
