//! A picture's file to its pixels.
//!
//! PNG, JPEG, WebP and the first frame of a GIF, told apart by their first bytes. Transparency is dropped, as the reference drops it, and
//! a photograph is turned the way its camera says.

use std::io::Cursor;

use image::error::LimitErrorKind;
use image::{DynamicImage, ImageDecoder, ImageError, ImageFormat, ImageReader, Limits};

use super::{Pixels, Rgb};

/// Pixels of a picture, at most: more than any camera's, and 200 MB as bytes.
pub const MOST_PIXELS: u64 = 1 << 26;
/// Bytes that decoding may take: the pixels with transparency in 16 bits each, which is the most a format has.
const MOST_BYTES: u64 = 8 * MOST_PIXELS;

/// Why a file gives no picture.
#[derive(Debug, thiserror::Error)]
pub enum PictureError {
    #[error("it is not a picture in PNG, JPEG, WebP or GIF")]
    Unknown,
    #[error("it is in the format {name}: PNG, JPEG, WebP and GIF are read")]
    Unsupported { name: &'static str },
    #[error("it has {width} x {height} pixels, {MOST_PIXELS} in all are the most that are read")]
    TooLarge { width: u32, height: u32 },
    #[error("decoding it would take more than {MOST_BYTES} bytes")]
    TooMuchMemory,
    #[error("it has no pixels")]
    Empty,
    #[error("the file is cut: its picture does not end")]
    Cut,
    #[error("it is damaged: {0}")]
    Damaged(String),
    #[error("a budget of {budget} soft tokens leaves nothing of it")]
    Budget { budget: u32 },
}

impl From<ImageError> for PictureError {
    fn from(error: ImageError) -> PictureError {
        match error {
            ImageError::Limits(limits) if limits.kind() == LimitErrorKind::InsufficientMemory => {
                PictureError::TooMuchMemory
            }
            ImageError::IoError(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => PictureError::Cut,
            // Theirs may run over several lines.
            other => PictureError::Damaged(other.to_string().split_whitespace().collect::<Vec<_>>().join(" ")),
        }
    }
}

/// Decodes a picture's file.
pub fn decode(bytes: &[u8]) -> Result<Rgb, PictureError> {
    let format = image::guess_format(bytes).map_err(|_| PictureError::Unknown)?;
    match format {
        ImageFormat::Png | ImageFormat::WebP | ImageFormat::Gif => {}
        // Its decoder makes up what is missing.
        ImageFormat::Jpeg if !jpeg_ends(bytes) => return Err(PictureError::Cut),
        ImageFormat::Jpeg => {}
        other => {
            let name = other.extensions_str().first().copied().unwrap_or("unknown");
            return Err(PictureError::Unsupported { name });
        }
    }
    let mut limits = Limits::no_limits();
    limits.max_alloc = Some(MOST_BYTES);
    let mut reader = ImageReader::with_format(Cursor::new(bytes), format);
    reader.limits(limits);
    let mut decoder = reader.into_decoder()?;
    let (width, height) = decoder.dimensions();
    if u64::from(width) * u64::from(height) > MOST_PIXELS {
        return Err(PictureError::TooLarge { width, height });
    }
    if width == 0 || height == 0 {
        return Err(PictureError::Empty);
    }
    let orientation = decoder.orientation()?;
    let mut picture = DynamicImage::from_decoder(decoder)?;
    picture.apply_orientation(orientation);
    let picture = picture.into_rgb8();
    let (width, height) = picture.dimensions();
    Ok(Rgb { size: Pixels { width, height }, bytes: picture.into_raw() })
}

/// Whether the data of a JPEG end with the mark that ends a picture. Within the data a byte 0xff is followed by a zero, so that the mark is
/// nothing else; segments before them may hold pictures of their own, with their own marks.
fn jpeg_ends(bytes: &[u8]) -> bool {
    const START_OF_SCAN: u8 = 0xda;
    let mut at = 2;
    while let Some([0xff, marker, high, low]) = bytes.get(at..at + 4) {
        match *marker {
            START_OF_SCAN => return bytes[at..].windows(2).any(|two| two == [0xff, 0xd9]),
            // Fill bytes before a marker.
            0xff => at += 1,
            _ => at += 2 + usize::from(u16::from_be_bytes([*high, *low])),
        }
    }
    false
}
