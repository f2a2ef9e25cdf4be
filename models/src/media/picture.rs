//! A picture as pixels.

/// A picture's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pixels {
    pub width: u32,
    pub height: u32,
}

/// A picture: 8 bits for each of red, green and blue, row by row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rgb {
    pub size: Pixels,
    pub bytes: Vec<u8>,
}
