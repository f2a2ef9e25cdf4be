//! A picture's file to its pixels.
//!
//! PNG, JPEG, WebP and the first frame of a GIF, told apart by their first bytes. What is transparent lies on white, as
//! in transformers, and a photograph is turned the way its camera says. Of 16 bits the upper 8 count. Both are Pillow's
//! arithmetic, to the bit. Only grey of 16 bits without transparency differs: Pillow makes everything white that is
//! brighter than 255 of 65,535.

use std::io::Cursor;

use image::error::LimitErrorKind;
use image::{DynamicImage, ImageDecoder, ImageError, ImageFormat, ImageReader, Limits};

use super::picture::{Pixels, Rgb};

/// Pixels of a picture, at most: more than any camera's, and 200 MB as bytes.
pub const MOST_PIXELS: u64 = 1 << 26;
/// Bytes that a decoded pixel may take: transparency and 16 bits for each value are the most a format has.
const PIXEL_BYTES: u64 = 8;
/// Bytes that everything but the pixels may take. Colour profiles and texts are compressed, so that a small file may
/// hold large ones.
const OTHER_BYTES: u64 = 32 << 20;

/// Why a file gives no picture.
#[derive(Debug, thiserror::Error)]
pub enum PictureError {
    #[error("it is not a picture in PNG, JPEG, WebP or GIF")]
    Unknown,
    #[error("it is in the format {name}: PNG, JPEG, WebP and GIF are read")]
    Unsupported { name: &'static str },
    #[error("it has {width} x {height} pixels, {MOST_PIXELS} in all are the most that are read")]
    TooLarge { width: u32, height: u32 },
    #[error("decoding it would take more memory than its pixels and {OTHER_BYTES} bytes")]
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
    let unknown = |_| if is_svg(bytes) { PictureError::Unsupported { name: "svg" } } else { PictureError::Unknown };
    let format = image::guess_format(bytes).map_err(unknown)?;
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
    let (width, height) = decoder(bytes, format, OTHER_BYTES)?.dimensions();
    if u64::from(width) * u64::from(height) > MOST_PIXELS {
        return Err(PictureError::TooLarge { width, height });
    }
    if width == 0 || height == 0 {
        return Err(PictureError::Empty);
    }
    let pixels = u64::from(width) * u64::from(height);
    let mut decoder = decoder(bytes, format, OTHER_BYTES + PIXEL_BYTES * pixels)?;
    let orientation = decoder.orientation()?;
    let mut picture = DynamicImage::from_decoder(decoder)?;
    picture.apply_orientation(orientation);
    let (width, height) = (picture.width(), picture.height());
    Ok(Rgb { size: Pixels { width, height }, bytes: on_white(picture) })
}

/// Red, green and blue of each pixel, over white where the picture is transparent.
fn on_white(picture: DynamicImage) -> Vec<u8> {
    let high = |value: u16| (value >> 8) as u8;
    match picture {
        DynamicImage::ImageLumaA8(picture) => {
            picture.pixels().flat_map(|pixel| [blend(pixel.0[0], pixel.0[1]); 3]).collect()
        }
        DynamicImage::ImageRgba8(picture) => picture.pixels().flat_map(|pixel| blend_pixel(pixel.0)).collect(),
        DynamicImage::ImageLuma16(picture) => picture.pixels().flat_map(|pixel| [high(pixel.0[0]); 3]).collect(),
        DynamicImage::ImageLumaA16(picture) => {
            picture.pixels().flat_map(|pixel| [blend(high(pixel.0[0]), high(pixel.0[1])); 3]).collect()
        }
        DynamicImage::ImageRgb16(picture) => picture.into_raw().into_iter().map(high).collect(),
        DynamicImage::ImageRgba16(picture) => {
            picture.pixels().flat_map(|pixel| blend_pixel(pixel.0.map(high))).collect()
        }
        opaque => opaque.into_rgb8().into_raw(),
    }
}

fn blend_pixel([red, green, blue, alpha]: [u8; 4]) -> [u8; 3] {
    [red, green, blue].map(|value| blend(value, alpha))
}

/// A value over white, rounded to the nearest.
fn blend(value: u8, alpha: u8) -> u8 {
    let (value, alpha) = (u32::from(value), u32::from(alpha));
    ((value * alpha + 255 * (255 - alpha) + 127) / 255) as u8
}

fn decoder(bytes: &[u8], format: ImageFormat, memory: u64) -> Result<impl ImageDecoder, PictureError> {
    let mut limits = Limits::no_limits();
    limits.max_alloc = Some(memory);
    let mut reader = ImageReader::with_format(Cursor::new(bytes), format);
    reader.limits(limits);
    Ok(reader.into_decoder()?)
}

/// Drawings are text, and nobody here draws them.
fn is_svg(bytes: &[u8]) -> bool {
    let text = bytes.trim_ascii_start();
    let head = &text[..text.len().min(1024)];
    text.starts_with(b"<") && head.windows(4).any(|four| four == b"<svg")
}

/// Whether the data of a JPEG end with the mark that ends a picture. Within the data a byte 0xff is followed by a zero,
/// so that the mark is nothing else; segments before them may hold pictures of their own, with their own marks.
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
