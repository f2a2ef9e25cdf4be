//! What a projector file says about its tower for sound.

use super::super::config::{ConfigError, MOST_LAYERS, in_range};
use super::error::AudioError;
use crate::gguf::Header;

/// The file's epsilon is wrong in older files; this is the model's.
const EPS: f32 = 1e-6;

/// A tower for sound.
#[derive(Clone, Debug, PartialEq)]
pub struct AudioConfig {
    pub kind: AudioKind,
    /// Width of a soft token.
    pub projection: u32,
    pub eps: f32,
}

/// What lies between a sound and its projection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AudioKind {
    /// A conformer over frames of log-mel features.
    Conformer { bins: u32, width: u32, layers: u32, heads: u32, ffn: u32 },
    /// Nothing: a frame is so many samples.
    Samples { frame: u32 },
}

/// Whether a projector file has a tower for sound.
pub fn has_audio(file: &Header) -> Result<bool, AudioError> {
    Ok(file.metadata().optional("clip.has_audio_encoder").map_err(ConfigError::from)?.unwrap_or(false))
}

impl AudioConfig {
    pub fn read(file: &Header) -> Result<AudioConfig, AudioError> {
        let kind = file.metadata().str("clip.audio.projector_type").map_err(ConfigError::from)?;
        match kind {
            "gemma4a" => Ok(sizes(file, true)?),
            "gemma4ua" => Ok(sizes(file, false)?),
            _ => Err(AudioError::Kind { found: kind.chars().take(40).collect() }),
        }
    }
}

fn sizes(file: &Header, has_encoder: bool) -> Result<AudioConfig, ConfigError> {
    let meta = file.metadata();
    let number = |key: &'static str| in_range(key, meta.u32(key)?);
    let unusable = |key: &'static str, why: String| Err(ConfigError::Unusable { key, why });
    let width = number("clip.audio.embedding_length")?;
    let kind = if has_encoder {
        let (layers, heads) = (number("clip.audio.block_count")?, number("clip.audio.attention.head_count")?);
        let bins = number("clip.audio.num_mel_bins")?;
        if layers > MOST_LAYERS {
            return unusable("clip.audio.block_count", format!("is {layers}, expected 1 to {MOST_LAYERS}"));
        }
        if !width.is_multiple_of(heads) || !width.is_multiple_of(2) || width < 4 {
            let why = format!("is {heads}: a row of {width} is not so many heads, or has no two halves");
            return unusable("clip.audio.attention.head_count", why);
        }
        if !bins.is_multiple_of(4) || bins > 256 {
            return unusable("clip.audio.num_mel_bins", format!("is {bins}, expected a multiple of 4 up to 256"));
        }
        AudioKind::Conformer { bins, width, layers, heads, ffn: number("clip.audio.feed_forward_length")? }
    } else {
        AudioKind::Samples { frame: width }
    };
    // The width of a soft token is the text's, which the projection's tensor is held to; a file need not repeat it.
    let projection = match meta.optional("clip.audio.projection_dim")? {
        Some(width) => width,
        None => number("clip.vision.projection_dim")?,
    };
    Ok(AudioConfig { kind, projection, eps: EPS })
}
