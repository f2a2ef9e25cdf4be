//! Pictures and sound on their way into a model. Of a picture: a file to pixels, pixels to the size that a budget of
//! soft tokens gives, that to patches. Of a sound: a file to samples, these to the model's rate, that to frames.
//!
//! Everything is the same on every machine. Files are not trusted: what a picture may take in pixels and memory is
//! checked by its header, before anything is allocated for it; a sound is decoded no further than the longest that is
//! read.

mod decode;
mod mel;
mod patches;
mod picture;
mod place;
mod rate;
mod resample;
mod size;
mod sound;
mod split;

use gemma4c_plan::{MediaTokens, Vocab};

pub use decode::{MOST_PIXELS, PictureError, decode};
pub use mel::{Frames, HOP, frames};
pub use patches::{Patches, cut};
pub use picture::{Pixels, Rgb};
pub use place::{Grid, MediumError, PlacesError, around, expand};
pub use rate::at_rate;
pub use resample::resample;
pub use size::{BUDGETS, Cut, USUAL_BUDGET, target_size};
pub use sound::{MOST_SECONDS, MOST_SECONDS_IN_PIECES, RATE, SoundError, decode_sound, decode_sound_up_to};
pub use split::split;

/// The tokens that stand around pictures in a text; `None` where a vocabulary lacks one.
pub fn image_tokens(vocab: &Vocab) -> Option<MediaTokens> {
    media_tokens(vocab, ["<|image>", "<|image|>", "<image|>"])
}

/// Those around sound.
pub fn audio_tokens(vocab: &Vocab) -> Option<MediaTokens> {
    media_tokens(vocab, ["<|audio>", "<|audio|>", "<audio|>"])
}

fn media_tokens(vocab: &Vocab, [begin, placeholder, end]: [&str; 3]) -> Option<MediaTokens> {
    let id = |text: &str| (0..vocab.tokens.len()).position(|id| vocab.tokens.get(id) == Some(text));
    let id = |text: &str| id(text).and_then(|id| u32::try_from(id).ok());
    Some(MediaTokens { begin: id(begin)?, placeholder: id(placeholder)?, end: id(end)? })
}
