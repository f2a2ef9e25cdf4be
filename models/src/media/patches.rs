//! A picture in the size that its tower wants, cut into patches.

use super::decode::PictureError;
use super::picture::{Pixels, Rgb};
use super::resample::resample;
use super::size::{Cut, target_size};

/// A picture cut into squares, row by row of their grid.
#[derive(Clone, Debug, PartialEq)]
pub struct Patches {
    /// Of each patch all red values row by row, then all green ones, then all blue ones, from 0 to 1.
    pub values: Vec<f32>,
    pub columns: u32,
    pub rows: u32,
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
