//! Repacked weights as data: which planes a matrix becomes, and where each value lies in them.
//!
//! GGUF blocks interleave codes and scales in 18 to 210 bytes, aligned to 2, so a GPU could not read them 16 bytes at a
//! time. A repacked matrix holds the same bits as separate planes, row-major by (row, group of 32 values), each
//! starting at a multiple of 16 bytes:
//!
//! | plane | content of a group |
//! |---|---|
//! | `codes` | low bits: 16 bytes of nibbles, byte j = elements j and j + 16; or 32 bytes; or floats as they are |
//! | `high` | high bits: one word, bit i = element i, next to two bits bit j of byte i = element 4 j + i; or 8 bytes, byte j = elements j, j + 8, j + 16, j + 24 |
//! | `scales` | the group's own factors: halves, or small integers that `supers` scale |
//! | `supers` | half-precision factors, one or two for each 256 values |
//!
//! Rows follow each other without gaps, so matrices of one type and width stacked on each other are one matrix, and a
//! range of rows is a matrix. Everything here follows from [`Layout`]; the functions on bytes are plain and slow, the
//! oracle of the kernels that repack and multiply.

use gemma4c_blocks::narrow::fp8_to_f32;
use gemma4c_blocks::{Codes, DType, Layout, Minimum, Plane, Scale};
use gemma4c_dsl::{BF16, ElementType, F16, Float};

use super::formats::packing::{Packing, grid_code, odd_scale};

/// Values of a group: what shares a scale, and what activations are quantised by.
pub const GROUP: usize = 32;
/// Every plane starts at a multiple of this, and is padded to one.
pub const ALIGNMENT: u64 = 16;

/// How a plane is made from blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// The bytes as they are: floats.
    Verbatim,
    /// Bits of every element: from their place in a block to their place in a group of 32.
    Bits { from: Plane, to: Plane },
    /// Nibbles of every element, from their place in a block: in words with four of the group's first half and four of its
    /// second, each four in order, because a table is looked up with four neighbouring nibbles.
    Quads { from: Plane },
    /// `count` 16-bit fields, at `offset` of every block.
    Halves { offset: usize, count: usize },
    /// `count` bytes, at `offset` of every block.
    Bytes { offset: usize, count: usize },
    /// `count` unsigned floats of 8 bits (e4m3), at `offset` of every block, without the bit that counts for nothing; the
    /// code that would be no number becomes zero, which it stands for.
    UnsignedFloats { offset: usize, count: usize },
    /// A scale and a minimum of 6 bits, as two bytes for each group of 32.
    Packed6 { packed: usize },
    /// A 6-bit scale less 32, as one signed byte for each group of 32.
    Split6 { high: usize, low: usize },
    /// Words put together from several fields.
    Packed(Packing),
}

/// One plane of a repacked matrix. (A [`Plane`] of a block says where bits lie in it.)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightPlane {
    pub name: &'static str,
    /// Bytes for each `per` values of a row.
    pub bytes: usize,
    pub per: usize,
    pub content: Content,
}

impl WeightPlane {
    const fn is_codes(&self) -> bool {
        matches!(self.name.as_bytes(), b"codes")
    }

    /// Bytes of the plane of a matrix, padded.
    pub const fn total_bytes(&self, rows: u64, k: u64) -> u64 {
        (rows * (k / self.per as u64) * self.bytes as u64).next_multiple_of(ALIGNMENT)
    }

    /// What the products read the plane as: whole words, so that nothing is widened on load.
    pub const fn element(&self) -> ElementType {
        match (self.content, self.bytes) {
            (Content::Verbatim, _) | (_, 16 | 32) => ElementType::U32x4,
            (_, 8) if !self.is_codes() => ElementType::U32x2,
            // Units of 8 bytes, for thin instances.
            (_, 8) => ElementType::U32x4,
            _ => ElementType::U32,
        }
    }
}

/// Where third bits lie in a repacked group.
const THIRD_BITS: Plane = Plane { offset: 0, bits: 1, run: 4 };

/// Where bits lie in a repacked group.
const fn packed_plane(bits: usize) -> Plane {
    let run = match bits {
        1 => 1,
        2 => 8,
        4 => 16,
        _ => 32,
    };
    Plane { offset: 0, bits, run }
}

/// Byte and shift of element `i` of a group of [`Content::Quads`].
pub const fn place_in_quads(i: usize) -> (usize, usize) {
    (i % 16 / 4 * 4 + i / 16 * 2 + i % 4 / 2, i % 2 * 4)
}

/// The planes of a type, `codes` first.
pub fn planes(dtype: DType) -> Vec<WeightPlane> {
    let layout = dtype.layout();
    let bits_to = |name, from: Plane, to| {
        let content = Content::Bits { from, to };
        WeightPlane { name, bytes: GROUP * from.bits / 8, per: GROUP, content }
    };
    let bits = |name, from: Plane| bits_to(name, from, packed_plane(from.bits));
    let halves = |name, per, offset, count| WeightPlane {
        name,
        bytes: 2 * count,
        per,
        content: Content::Halves { offset, count },
    };
    let mut planes = match layout.codes {
        Codes::Float => {
            return vec![WeightPlane { name: "codes", bytes: layout.bytes, per: 1, content: Content::Verbatim }];
        }
        Codes::Table { low: from, .. } if matches!(dtype, DType::MXFP4 | DType::NVFP4) => {
            vec![WeightPlane { name: "codes", bytes: GROUP / 2, per: GROUP, content: Content::Quads { from } }]
        }
        Codes::Signed { plane: low } | Codes::Table { low, .. } | Codes::E4M3 { plane: low } => {
            vec![bits("codes", low)]
        }
        Codes::Grid { .. } => return planes_of_grid(dtype),
        Codes::Unsigned { low, high: Some(high), .. } if low.bits == 2 => {
            vec![bits("codes", low), bits_to("high", high, THIRD_BITS)]
        }
        Codes::Unsigned { low, high, .. } => {
            std::iter::once(bits("codes", low)).chain(high.map(|high| bits("high", high))).collect()
        }
    };
    // A block's minimum is stored next to its scale, so that both are one pair of halves.
    let with_minimum = if layout.minimum == Minimum::Zero { 1 } else { 2 };
    match layout.scale {
        Scale::One => {}
        Scale::Half { offset } | Scale::Brain { offset } => {
            planes.push(halves("scales", layout.len, offset, with_minimum));
        }
        // A word, as two halves.
        Scale::Single { offset } => planes.push(halves("scales", layout.len, offset, 2)),
        Scale::Exponent { offset } => {
            let content = Content::Bytes { offset, count: 1 };
            planes.push(WeightPlane { name: "scales", bytes: 1, per: GROUP, content });
        }
        Scale::Floats16 { single, bytes } => {
            let content = Content::UnsignedFloats { offset: bytes, count: layout.len / 16 };
            planes.push(WeightPlane { name: "scales", bytes: 2, per: GROUP, content });
            planes.push(halves("supers", layout.len, single, 2));
        }
        Scale::Packed6 { half, packed } => {
            planes.push(WeightPlane { name: "scales", bytes: 2, per: GROUP, content: Content::Packed6 { packed } });
            planes.push(halves("supers", layout.len, half, with_minimum));
        }
        Scale::Bytes16 { half, bytes } | Scale::LowNibbles16 { half, bytes } => {
            // Two bytes for each group: copied as 16-bit fields.
            let content = Content::Halves { offset: bytes, count: layout.len / GROUP };
            planes.push(WeightPlane { name: "scales", bytes: 2, per: GROUP, content });
            planes.push(halves("supers", layout.len, half, with_minimum));
        }
        Scale::Split6By16 { half, .. } => {
            let content = Content::Packed(Packing::ScalesQ3K);
            planes.push(WeightPlane { name: "scales", bytes: 2, per: GROUP, content });
            planes.push(halves("supers", layout.len, half, 1));
        }
        Scale::Split6 { half, high, low } => {
            planes.push(WeightPlane { name: "scales", bytes: 1, per: GROUP, content: Content::Split6 { high, low } });
            planes.push(halves("supers", layout.len, half, 1));
        }
        // Those of a grid type.
        Scale::Odd { .. } => {}
    }
    planes
}

/// The planes of a grid type: indices with their signs, or signs of their own; scales, and the half that scales them.
fn planes_of_grid(dtype: DType) -> Vec<WeightPlane> {
    let plane = |name, bytes, content| WeightPlane { name, bytes, per: GROUP, content };
    let packed = |name, bytes, packing| plane(name, bytes, Content::Packed(packing));
    let half = |name| WeightPlane { name, bytes: 2, per: 256, content: Content::Halves { offset: 0, count: 1 } };
    let indices = plane("codes", 8, Content::Bytes { offset: 2, count: 64 });
    match dtype {
        DType::IQ2XXS => vec![
            packed("codes", 8, Packing::CodesIQ2XXS),
            WeightPlane { name: "scales", bytes: 4, per: 256, content: Content::Packed(Packing::ScalesIQ2XXS) },
            half("supers"),
        ],
        DType::IQ2XS => vec![
            packed("codes", 8, Packing::CodesIQ2XS),
            plane("scales", 1, Content::Bytes { offset: 66, count: 8 }),
            half("supers"),
        ],
        DType::IQ2S => {
            vec![packed("codes", 8, Packing::CodesIQ2S), packed("scales", 2, Packing::ScalesIQ2S), half("supers")]
        }
        DType::IQ3XXS => vec![indices, packed("high", 4, Packing::SignsIQ3XXS), half("scales")],
        _ => {
            let signs = Content::Bits { from: Plane { offset: 74, bits: 1, run: 1 }, to: THIRD_BITS };
            vec![indices, plane("high", 4, signs), packed("scales", 2, Packing::ScalesIQ3S), half("supers")]
        }
    }
}

/// Why bytes are not a matrix.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanesError {
    #[error("a row of {k} values of {dtype} is not whole blocks")]
    Row { dtype: DType, k: usize },
    #[error("{rows} rows of {k} values of {dtype} take {expected} bytes of blocks, {found} were given")]
    Blocks { dtype: DType, rows: usize, k: usize, expected: u64, found: usize },
}

/// A repacked matrix on the host.
#[derive(Clone, Debug, PartialEq)]
pub struct Repacked {
    pub dtype: DType,
    pub rows: usize,
    /// Values of a row.
    pub k: usize,
    /// In the order of [`planes`], each padded to [`ALIGNMENT`].
    pub planes: Vec<(WeightPlane, Vec<u8>)>,
}

impl Repacked {
    /// Repacks GGUF blocks, one field at a time as the table says.
    pub fn from_blocks(dtype: DType, rows: usize, k: usize, blocks: &[u8]) -> Result<Self, PlanesError> {
        let row_bytes = dtype.row_bytes(k as u64).ok_or(PlanesError::Row { dtype, k })?;
        let expected = row_bytes.saturating_mul(rows as u64);
        if expected != blocks.len() as u64 {
            return Err(PlanesError::Blocks { dtype, rows, k, expected, found: blocks.len() });
        }
        let layout = dtype.layout();
        let pack = |plane: WeightPlane| {
            let mut bytes: Vec<u8> = blocks
                .chunks_exact(layout.bytes)
                .flat_map(|block| repack_block(layout, plane.content, block))
                .collect();
            bytes.resize(plane.total_bytes(rows as u64, k as u64) as usize, 0);
            (plane, bytes)
        };
        Ok(Self { dtype, rows, k, planes: planes(dtype).into_iter().map(pack).collect() })
    }

    pub fn plane(&self, name: &str) -> Option<&[u8]> {
        self.planes.iter().find(|(plane, _)| plane.name == name).map(|(_, bytes)| bytes.as_slice())
    }

    /// The bytes of `name` that belong to value `i` of `row`.
    fn field(&self, name: &str, row: usize, i: usize) -> &[u8] {
        let found = self.planes.iter().find(|(plane, _)| plane.name == name);
        found.map_or(&[], |(plane, bytes)| {
            let at = (row * self.k + i) / plane.per * plane.bytes;
            &bytes[at..at + plane.bytes]
        })
    }

    fn bits(&self, name: &str, row: usize, i: usize, bits: usize) -> i32 {
        let field = self.field(name, row, i);
        let content = self.planes.iter().find(|(plane, _)| plane.name == name).map(|(plane, _)| plane.content);
        let (byte, shift) = match content {
            Some(Content::Quads { .. }) => place_in_quads(i % GROUP),
            Some(Content::Bits { to, .. }) => to.locate(i % GROUP),
            _ => packed_plane(bits).locate(i % GROUP),
        };
        i32::from(field[byte]) >> shift & ((1 << bits) - 1)
    }

    /// The integer that value `i` of `row` is a multiple of its scale by; zero for floats.
    pub fn code(&self, row: usize, i: usize) -> i32 {
        match self.dtype.layout().codes {
            Codes::Float => 0,
            Codes::Signed { .. } => self.bits("codes", row, i, 8) as i8 as i32,
            Codes::Unsigned { low, high, zero } => {
                let high = high.map_or(0, |high| self.bits("high", row, i, high.bits) << low.bits);
                (self.bits("codes", row, i, low.bits) | high) - zero
            }
            Codes::Table { levels, .. } => levels[self.bits("codes", row, i, 4) as usize].into(),
            Codes::E4M3 { .. } => 0,
            Codes::Grid { .. } => {
                let [codes, high, scales] = ["codes", "high", "scales"].map(|name| self.field(name, row, i));
                grid_code(self.dtype, codes, high, scales, i % GROUP)
            }
        }
    }

    /// Value `i` of `row`, the same bits as its block decodes to.
    pub fn value(&self, row: usize, i: usize) -> f32 {
        let layout = self.dtype.layout();
        let scales = || self.field("scales", row, i);
        let supers = || self.field("supers", row, i);
        let scale = match layout.scale {
            Scale::One => return gemma4c_blocks::reference::value(layout, self.field("codes", row, i), 0),
            Scale::Half { .. } => half_of(scales(), 0),
            Scale::Packed6 { .. } => half_of(supers(), 0) * f32::from(scales()[0]),
            Scale::Bytes16 { .. } | Scale::Split6By16 { .. } => {
                half_of(supers(), 0) * f32::from(scales()[i % GROUP / 16] as i8)
            }
            Scale::LowNibbles16 { .. } => half_of(supers(), 0) * f32::from(scales()[i % GROUP / 16] & 15),
            Scale::Odd { shift, .. } => {
                let half = if self.dtype == DType::IQ3XXS { scales() } else { supers() };
                let odd = odd_scale(self.dtype, self.field("high", row, i), scales(), i % 256 / GROUP, i % GROUP);
                half_of(half, 0) * odd / (1u32 << shift) as f32
            }
            Scale::Split6 { .. } => half_of(supers(), 0) * f32::from(scales()[0] as i8),
            Scale::Brain { .. } => brain_of(scales()),
            Scale::Single { .. } => single_of(scales()),
            Scale::Exponent { .. } => f32::powi(2.0, i32::from(scales()[0]) - 128),
            Scale::Floats16 { .. } => single_of(supers()) * (fp8_to_f32(scales()[i % GROUP / 16]) * 0.5),
        };
        if let Codes::E4M3 { .. } = layout.codes {
            return scale * fp8_to_f32(self.field("codes", row, i)[i % GROUP]);
        }
        let scaled = scale * self.code(row, i) as f32;
        // As in the blocks: without a minimum nothing is added, so that -0.0 stays.
        match layout.minimum {
            Minimum::Zero => scaled,
            Minimum::Half { .. } => scaled + half_of(scales(), 1),
            Minimum::Packed6 { .. } => scaled + -(half_of(supers(), 1) * f32::from(scales()[1])),
            Minimum::ZeroPoint { .. } => scaled + -(scale * f32::from(u16::from_le_bytes([scales()[2], scales()[3]]))),
            Minimum::HighNibbles16 { .. } => {
                scaled + -(half_of(supers(), 1) * f32::from(scales()[i % GROUP / 16] >> 4))
            }
        }
    }

    /// All values, row by row.
    pub fn dequantise(&self) -> Vec<f32> {
        (0..self.rows).flat_map(|row| (0..self.k).map(move |i| self.value(row, i))).collect()
    }
}

fn half_of(field: &[u8], index: usize) -> f32 {
    F16::from_bits(u16::from_le_bytes([field[2 * index], field[2 * index + 1]])).to_f32()
}

fn brain_of(field: &[u8]) -> f32 {
    BF16::from_bits(u16::from_le_bytes([field[0], field[1]])).to_f32()
}

fn single_of(field: &[u8]) -> f32 {
    f32::from_le_bytes([field[0], field[1], field[2], field[3]])
}

/// What one block gives to a plane.
fn repack_block(layout: &Layout, content: Content, block: &[u8]) -> Vec<u8> {
    match content {
        Content::Verbatim => block.to_vec(),
        Content::Bits { from, to } => {
            let mut out = vec![0; layout.len * to.bits / 8];
            for i in 0..layout.len {
                let (byte, shift) = from.locate(i);
                let code = u32::from(block[byte]) >> shift & ((1 << from.bits) - 1);
                let (byte, shift) = to.locate(i % GROUP);
                out[i / GROUP * GROUP * to.bits / 8 + byte] |= (code << shift) as u8;
            }
            out
        }
        Content::Quads { from } => {
            let mut out = vec![0; layout.len / 2];
            for i in 0..layout.len {
                let (byte, shift) = from.locate(i);
                let (to, to_shift) = place_in_quads(i % GROUP);
                out[i / GROUP * (GROUP / 2) + to] |= (block[byte] >> shift & 15) << to_shift;
            }
            out
        }
        Content::Halves { offset, count } => block[offset..offset + 2 * count].to_vec(),
        Content::Bytes { offset, count } => block[offset..offset + count].to_vec(),
        Content::UnsignedFloats { offset, count } => {
            let unsigned = |code: &u8| if code & 0x7f == 0x7f { 0 } else { code & 0x7f };
            block[offset..offset + count].iter().map(unsigned).collect()
        }
        Content::Packed6 { packed } => {
            let s = &block[packed..packed + 12];
            let first = |k: usize| [s[k] & 63, s[k + 4] & 63];
            let last = |k: usize| [s[k + 4] & 15 | s[k - 4] >> 6 << 4, s[k + 4] >> 4 | s[k] >> 6 << 4];
            (0..layout.len / GROUP).flat_map(|k| if k < 4 { first(k) } else { last(k) }).collect()
        }
        Content::Packed(packing) => packing.pack(block),
        Content::Split6 { high, low } => {
            let high = u16::from_le_bytes([block[high], block[high + 1]]);
            let scale = |k: usize| u16::from(block[low + k / 2] >> (4 * (k % 2)) & 15) | (high >> (2 * k) & 3) << 4;
            (0..layout.len / GROUP).map(|k| (scale(k) as i32 - 32) as u8).collect()
        }
    }
}
