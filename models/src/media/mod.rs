//! Pictures and sound on their way into a model. Of a picture: a file to pixels, pixels to the size that a budget of soft tokens gives, that to patches. Of
//! a sound: a file to samples, these to the model's rate, that to frames.
//!
//! Everything is the same on every machine. Files are not trusted: what a picture may take in
//! pixels and memory is checked by its header, before anything is allocated for it; a sound is decoded no further than the longest that is read.

mod decode;
mod mel;
mod place;
mod rate;
mod resample;
mod size;
mod sound;

use gemma4c_plan::{MediaTokens, Vocab};

pub use decode::{MOST_PIXELS, PictureError, decode};
pub use mel::{Frames, HOP, frames};
pub use place::{Grid, MediumError, PlacesError, around, expand};
pub use rate::at_rate;
pub use resample::resample;
pub use size::{BUDGETS, Pixels, USUAL_BUDGET, target_size};
pub use sound::{MOST_SECONDS, RATE, SoundError, decode_sound};

/// A picture: 8 bits for each of red, green and blue, row by row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rgb {
    pub size: Pixels,
    pub bytes: Vec<u8>,
}

/// A picture cut into squares, row by row of their grid.
#[derive(Clone, Debug, PartialEq)]
pub struct Patches {
    /// Of each patch all red values row by row, then all green ones, then all blue ones, from 0 to 1.
    pub values: Vec<f32>,
    pub columns: u32,
    pub rows: u32,
}

/// How a tower wants its pictures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Pixels along a patch.
    pub patch: u32,
    /// Patches along the square of a soft token.
    pub pool: u32,
    /// Soft tokens of a picture, at most.
    pub budget: u32,
}

impl Cut {
    /// Brings a picture to its size and cuts it.
    pub fn patches(&self, picture: &Rgb) -> Result<Patches, PictureError> {
        Ok(cut(&self.resized(picture)?, self.patch))
    }

    /// The picture in the size in which it fills the budget.
    pub fn resized(&self, picture: &Rgb) -> Result<Rgb, PictureError> {
        Ok(resample(picture, target_size(picture.size, *self)?))
    }
}

/// Cuts a picture whose sides are whole patches.
pub fn cut(picture: &Rgb, patch: u32) -> Patches {
    let Pixels { width, height } = picture.size;
    let (columns, rows, side) = (width / patch, height / patch, patch as usize);
    let mut values = Vec::with_capacity(picture.bytes.len());
    for (row, column) in (0..rows as usize).flat_map(|row| (0..columns as usize).map(move |column| (row, column))) {
        for channel in 0..3 {
            for y in 0..side {
                let start = (row * side + y) * width as usize + column * side;
                let pixels = picture.bytes[start * 3..(start + side) * 3].chunks_exact(3);
                values.extend(pixels.map(|pixel| f32::from(pixel[channel]) * (1.0 / 255.0)));
            }
        }
    }
    Patches { values, columns, rows }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    /// Two patches of 2 by 2 beside each other.
    #[test]
    fn patches_have_their_channels_apart() {
        let bytes: Vec<u8> = (0..24).map(|i| i * 10).collect();
        let picture = Rgb { size: Pixels { width: 4, height: 2 }, bytes: bytes.clone() };
        let patches = cut(&picture, 2);
        assert_eq!((patches.columns, patches.rows), (2, 1));
        let of = |x: usize, y: usize, channel: usize| f32::from(bytes[(y * 4 + x) * 3 + channel]) / 255.0;
        let mut expected = vec![];
        for left in [0, 2] {
            for channel in 0..3 {
                expected.extend([(0, 0), (1, 0), (0, 1), (1, 1)].map(|(x, y)| of(left + x, y, channel)));
            }
        }
        assert!(patches.values.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-7));
        assert_eq!(patches.values.len(), expected.len());
    }
}
