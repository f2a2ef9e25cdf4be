//! The table: one [`Layout`] a format.
//!
//! Every value of every format is `scale * code + minimum`, where the code is a number assembled from one or two bit
//! planes (low bits, high bits), optionally looked up in a codebook, or one of several that an index finds in a grid.
//! The formats differ only in the numbers below.
//!
//! Most formats are GGUF's. The last ones are what a checkpoint's weights become when they are loaded: a checkpoint
//! keeps codes and scales in tensors of their own, and a block has them side by side.

use serde::{Deserialize, Serialize};

use crate::grids::{self, Grid};

/// Element type of a stored tensor. The discriminants are ours and stable: they are written into plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum DType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
    IQ4NL,
    IQ4XS,
    Q2K,
    Q3K,
    IQ2XXS,
    IQ2XS,
    IQ2S,
    IQ3XXS,
    IQ3S,
    MXFP4,
    NVFP4,
    I2,
    I4,
    I4Z,
    I8,
    F8,
    F8S,
}

/// Where the bits of element `i` lie: bits `shift .. shift + bits` of byte `offset + run * (i / span) + i % run`, with
/// `span = run * 8 / bits` and `shift = bits * (i % span / run)`. A `run` of 16 in a block of 32 is the planar nibble
/// order of ggml (byte j holds elements j and j + 16), not neighbours in one byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plane {
    pub offset: usize,
    pub bits: usize,
    pub run: usize,
}

impl Plane {
    /// Byte index and shift of element `i`.
    pub const fn locate(&self, i: usize) -> (usize, usize) {
        let span = self.run * 8 / self.bits;
        (self.offset + self.run * (i / span) + i % self.run, self.bits * (i % span / self.run))
    }
}

/// How the integer code of an element is read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Codes {
    /// Not quantised: the element is a little-endian float of the type's own width.
    Float,
    /// A signed byte.
    Signed { plane: Plane },
    /// `low | high << low.bits`, minus `zero`.
    Unsigned { low: Plane, high: Option<Plane>, zero: i32 },
    /// The low bits index a table of levels.
    Table { low: Plane, levels: &'static [i8; 16] },
    /// A float of 8 bits, e4m3.
    E4M3 { plane: Plane },
    /// An index finds four or eight magnitudes together in a grid; each has a sign of its own.
    Grid { grid: &'static Grid, index: Index, signs: Signs },
}

/// Where the indices of a group of 32 values lie: one for each entry of the grid, in the order of the values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Index {
    /// Entry `e` of group `g` has its low bits at `offset + group * g + step * e`: `bits` of them, in one byte or two.
    pub offset: usize,
    pub group: usize,
    pub step: usize,
    pub bits: usize,
    /// The bits above, `.1` for each entry, in the byte `.0 + g`.
    pub high: Option<(usize, usize)>,
}

/// Where the signs of a group of 32 values lie, eight at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signs {
    /// A byte for eight values, bit i for value i: byte `4 * group + eight` from `offset` on.
    Bytes { offset: usize },
    /// Seven bits for eight values, the eighth is their parity: bits `7 * eight` of the word at `offset + group * step`.
    Word { offset: usize, step: usize },
    /// The same in the upper seven bits of the 16 that hold the index.
    BesideIndex,
}

/// The factor of an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    One,
    /// One half-precision factor for the block.
    Half {
        offset: usize,
    },
    /// `half * s`, `s` one of eight 6-bit integers packed with the minima into 12 bytes, one for each sub-block of 32.
    Packed6 {
        half: usize,
        packed: usize,
    },
    /// `half * s`, `s` a signed byte for each sub-block of 16.
    Bytes16 {
        half: usize,
        bytes: usize,
    },
    /// `half * (s - 32)`, `s` = 4 low bits from `low`, 2 high bits from the u16 at `high`, one for each sub-block of
    /// 32.
    Split6 {
        half: usize,
        high: usize,
        low: usize,
    },
    /// `half * (s - 32)`, `s` of 6 bits, one for each sub-block of 16: the low nibbles of 8 bytes, their high nibbles,
    /// and the upper two bits in 4 bytes more.
    Split6By16 {
        half: usize,
        packed: usize,
    },
    /// `half * s`, `s` the low nibble of a byte for each sub-block of 16.
    LowNibbles16 {
        half: usize,
        bytes: usize,
    },
    /// `half * (2 s + 1) * unit`, `s` of 4 bits, `unit` a power of two.
    Odd {
        half: usize,
        field: OddField,
        /// `unit` is two to the power of less this.
        shift: u32,
    },
    /// A bfloat16 factor for the block.
    Brain {
        offset: usize,
    },
    /// A factor in single precision for the block.
    Single {
        offset: usize,
    },
    /// A power of two for the block: an exponent of 8 bits, halved, because levels are doubled.
    Exponent {
        offset: usize,
    },
    /// `single * e`, `e` an unsigned float of 8 bits (e4m3) for each sub-block of 16, halved, because levels are
    /// doubled.
    Floats16 {
        single: usize,
        bytes: usize,
    },
}

/// Where the 4 bits of a [`Scale::Odd`] lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OddField {
    /// For each sub-block of 16: nibbles, the low one first.
    Nibbles16 { offset: usize },
    /// For each sub-block of 32: nibbles, the low one first.
    Nibbles32 { offset: usize },
    /// For each sub-block of 32: the top of the word at `offset + step * group`.
    Word { offset: usize, step: usize },
}

/// What is added after scaling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Minimum {
    Zero,
    /// One half-precision addend for the block.
    Half {
        offset: usize,
    },
    /// `-half * m`, `m` the 6-bit minimum of the sub-block of 32, packed beside the scales.
    Packed6 {
        half: usize,
        packed: usize,
    },
    /// `-half * m`, `m` the high nibble of a byte for each sub-block of 16.
    HighNibbles16 {
        half: usize,
        bytes: usize,
    },
    /// `-scale * z`, `z` the integer of 16 bits that stands for zero.
    ZeroPoint {
        offset: usize,
    },
}

/// What the factor of a block is stored as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Factor {
    Half,
    Brain,
    Single,
    Exponent,
}

impl Scale {
    /// Where a block has its factor, and what that is stored as; factors of sub-blocks are multiplied with it.
    pub const fn factor(&self) -> Option<(usize, Factor)> {
        match *self {
            Scale::One => None,
            Scale::Half { offset: half }
            | Scale::Packed6 { half, .. }
            | Scale::Bytes16 { half, .. }
            | Scale::Split6 { half, .. }
            | Scale::Split6By16 { half, .. }
            | Scale::LowNibbles16 { half, .. }
            | Scale::Odd { half, .. } => Some((half, Factor::Half)),
            Scale::Brain { offset } => Some((offset, Factor::Brain)),
            Scale::Single { offset: single } | Scale::Floats16 { single, .. } => Some((single, Factor::Single)),
            Scale::Exponent { offset } => Some((offset, Factor::Exponent)),
        }
    }
}

impl Minimum {
    /// Where a block has an addend in half precision, if it has one.
    pub const fn half(&self) -> Option<usize> {
        match *self {
            Minimum::Half { offset: half } | Minimum::Packed6 { half, .. } | Minimum::HighNibbles16 { half, .. } => {
                Some(half)
            }
            Minimum::Zero | Minimum::ZeroPoint { .. } => None,
        }
    }
}

/// One block format.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Layout {
    pub dtype: DType,
    pub name: &'static str,
    /// The type's number in GGUF files, if they have it.
    pub ggml_id: Option<u32>,
    /// Values in a block.
    pub len: usize,
    /// Bytes in a block.
    pub bytes: usize,
    /// Bytes in a block of a GGUF file: fewer where the file keeps a factor in a tensor of its own.
    pub file_bytes: usize,
    pub codes: Codes,
    pub scale: Scale,
    pub minimum: Minimum,
}

/// The non-linear levels of the IQ4 formats.
pub(crate) const IQ4_LEVELS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// Twice the floats of 4 bits (e2m1).
pub(crate) const FP4_LEVELS: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

const fn plane(offset: usize, bits: usize, run: usize) -> Plane {
    Plane { offset, bits, run }
}

const fn unsigned(low: Plane, high: Option<Plane>, zero: i32) -> Codes {
    Codes::Unsigned { low, high, zero }
}

/// The grid formats have their half in front.
const fn odd(field: OddField, shift: u32) -> Scale {
    Scale::Odd { half: 0, field, shift }
}

const fn float(dtype: DType, name: &'static str, ggml_id: u32, bytes: usize) -> Layout {
    Layout {
        dtype,
        name,
        ggml_id: Some(ggml_id),
        len: 1,
        bytes,
        file_bytes: bytes,
        codes: Codes::Float,
        scale: Scale::One,
        minimum: Minimum::Zero,
    }
}

#[rustfmt::skip]
const LAYOUTS: [Layout; 28] = [
    float(DType::F32, "f32", 0, 4),
    float(DType::F16, "f16", 1, 2),
    float(DType::BF16, "bf16", 30, 2),
    Layout { dtype: DType::Q4_0, name: "q4_0", ggml_id: Some(2), len: 32, bytes: 18, file_bytes: 18,
        codes: unsigned(plane(2, 4, 16), None, 8),
        scale: Scale::Half { offset: 0 }, minimum: Minimum::Zero },
    Layout { dtype: DType::Q4_1, name: "q4_1", ggml_id: Some(3), len: 32, bytes: 20, file_bytes: 20,
        codes: unsigned(plane(4, 4, 16), None, 0),
        scale: Scale::Half { offset: 0 }, minimum: Minimum::Half { offset: 2 } },
    Layout { dtype: DType::Q5_0, name: "q5_0", ggml_id: Some(6), len: 32, bytes: 22, file_bytes: 22,
        codes: unsigned(plane(6, 4, 16), Some(plane(2, 1, 1)), 16),
        scale: Scale::Half { offset: 0 }, minimum: Minimum::Zero },
    Layout { dtype: DType::Q5_1, name: "q5_1", ggml_id: Some(7), len: 32, bytes: 24, file_bytes: 24,
        codes: unsigned(plane(8, 4, 16), Some(plane(4, 1, 1)), 0),
        scale: Scale::Half { offset: 0 }, minimum: Minimum::Half { offset: 2 } },
    Layout { dtype: DType::Q8_0, name: "q8_0", ggml_id: Some(8), len: 32, bytes: 34, file_bytes: 34,
        codes: Codes::Signed { plane: plane(2, 8, 32) },
        scale: Scale::Half { offset: 0 }, minimum: Minimum::Zero },
    Layout { dtype: DType::Q4K, name: "q4_k", ggml_id: Some(12), len: 256, bytes: 144, file_bytes: 144,
        codes: unsigned(plane(16, 4, 32), None, 0),
        scale: Scale::Packed6 { half: 0, packed: 4 }, minimum: Minimum::Packed6 { half: 2, packed: 4 } },
    Layout { dtype: DType::Q5K, name: "q5_k", ggml_id: Some(13), len: 256, bytes: 176, file_bytes: 176,
        codes: unsigned(plane(48, 4, 32), Some(plane(16, 1, 32)), 0),
        scale: Scale::Packed6 { half: 0, packed: 4 }, minimum: Minimum::Packed6 { half: 2, packed: 4 } },
    Layout { dtype: DType::Q6K, name: "q6_k", ggml_id: Some(14), len: 256, bytes: 210, file_bytes: 210,
        codes: unsigned(plane(0, 4, 64), Some(plane(128, 2, 32)), 32),
        scale: Scale::Bytes16 { half: 208, bytes: 192 }, minimum: Minimum::Zero },
    Layout { dtype: DType::IQ4NL, name: "iq4_nl", ggml_id: Some(20), len: 32, bytes: 18, file_bytes: 18,
        codes: Codes::Table { low: plane(2, 4, 16), levels: &IQ4_LEVELS },
        scale: Scale::Half { offset: 0 }, minimum: Minimum::Zero },
    Layout { dtype: DType::IQ4XS, name: "iq4_xs", ggml_id: Some(23), len: 256, bytes: 136, file_bytes: 136,
        codes: Codes::Table { low: plane(8, 4, 16), levels: &IQ4_LEVELS },
        scale: Scale::Split6 { half: 0, high: 2, low: 4 }, minimum: Minimum::Zero },
    Layout { dtype: DType::Q2K, name: "q2_k", ggml_id: Some(10), len: 256, bytes: 84, file_bytes: 84,
        codes: unsigned(plane(16, 2, 32), None, 0),
        scale: Scale::LowNibbles16 { half: 80, bytes: 0 }, minimum: Minimum::HighNibbles16 { half: 82, bytes: 0 } },
    Layout { dtype: DType::Q3K, name: "q3_k", ggml_id: Some(11), len: 256, bytes: 110, file_bytes: 110,
        codes: unsigned(plane(32, 2, 32), Some(plane(0, 1, 32)), 4),
        scale: Scale::Split6By16 { half: 108, packed: 96 }, minimum: Minimum::Zero },
    Layout { dtype: DType::IQ2XXS, name: "iq2_xxs", ggml_id: Some(16), len: 256, bytes: 66, file_bytes: 66,
        codes: Codes::Grid { grid: &grids::IQ2_XXS, index: Index { offset: 2, group: 8, step: 1, bits: 8, high: None },
            signs: Signs::Word { offset: 6, step: 8 } },
        scale: odd(OddField::Word { offset: 6, step: 8 }, 3), minimum: Minimum::Zero },
    Layout { dtype: DType::IQ2XS, name: "iq2_xs", ggml_id: Some(17), len: 256, bytes: 74, file_bytes: 74,
        codes: Codes::Grid { grid: &grids::IQ2_XS, index: Index { offset: 2, group: 8, step: 2, bits: 9, high: None },
            signs: Signs::BesideIndex },
        scale: odd(OddField::Nibbles16 { offset: 66 }, 3), minimum: Minimum::Zero },
    Layout { dtype: DType::IQ2S, name: "iq2_s", ggml_id: Some(22), len: 256, bytes: 82, file_bytes: 82,
        codes: Codes::Grid { grid: &grids::IQ2_S,
            index: Index { offset: 2, group: 4, step: 1, bits: 8, high: Some((66, 2)) },
            signs: Signs::Bytes { offset: 34 } },
        scale: odd(OddField::Nibbles16 { offset: 74 }, 3), minimum: Minimum::Zero },
    Layout { dtype: DType::IQ3XXS, name: "iq3_xxs", ggml_id: Some(18), len: 256, bytes: 98, file_bytes: 98,
        codes: Codes::Grid { grid: &grids::IQ3_XXS, index: Index { offset: 2, group: 8, step: 1, bits: 8, high: None },
            signs: Signs::Word { offset: 66, step: 4 } },
        scale: odd(OddField::Word { offset: 66, step: 4 }, 2), minimum: Minimum::Zero },
    Layout { dtype: DType::IQ3S, name: "iq3_s", ggml_id: Some(21), len: 256, bytes: 110, file_bytes: 110,
        codes: Codes::Grid { grid: &grids::IQ3_S,
            index: Index { offset: 2, group: 8, step: 1, bits: 8, high: Some((66, 1)) },
            signs: Signs::Bytes { offset: 74 } },
        scale: odd(OddField::Nibbles32 { offset: 106 }, 0), minimum: Minimum::Zero },
    Layout { dtype: DType::MXFP4, name: "mxfp4", ggml_id: Some(39), len: 32, bytes: 17, file_bytes: 17,
        codes: Codes::Table { low: plane(1, 4, 16), levels: &FP4_LEVELS },
        scale: Scale::Exponent { offset: 0 }, minimum: Minimum::Zero },
    // A file's blocks of NVFP4 have 36 bytes. The factor is a tensor of its own there, and loading puts it in front.
    Layout { dtype: DType::NVFP4, name: "nvfp4", ggml_id: Some(40), len: 64, bytes: 40, file_bytes: 36,
        codes: Codes::Table { low: plane(8, 4, 8), levels: &FP4_LEVELS },
        scale: Scale::Floats16 { single: 0, bytes: 4 }, minimum: Minimum::Zero },
    Layout { dtype: DType::I2, name: "i2", ggml_id: None, len: 32, bytes: 10, file_bytes: 10,
        codes: unsigned(plane(2, 2, 8), None, 2),
        scale: Scale::Brain { offset: 0 }, minimum: Minimum::Zero },
    Layout { dtype: DType::I4, name: "i4", ggml_id: None, len: 32, bytes: 18, file_bytes: 18,
        codes: unsigned(plane(2, 4, 16), None, 8),
        scale: Scale::Brain { offset: 0 }, minimum: Minimum::Zero },
    Layout { dtype: DType::I4Z, name: "i4_z", ggml_id: None, len: 32, bytes: 20, file_bytes: 20,
        codes: unsigned(plane(4, 4, 16), None, 0),
        scale: Scale::Brain { offset: 0 }, minimum: Minimum::ZeroPoint { offset: 2 } },
    Layout { dtype: DType::I8, name: "i8", ggml_id: None, len: 32, bytes: 34, file_bytes: 34,
        codes: Codes::Signed { plane: plane(2, 8, 32) },
        scale: Scale::Brain { offset: 0 }, minimum: Minimum::Zero },
    Layout { dtype: DType::F8, name: "f8", ggml_id: None, len: 32, bytes: 34, file_bytes: 34,
        codes: Codes::E4M3 { plane: plane(2, 8, 32) },
        scale: Scale::Brain { offset: 0 }, minimum: Minimum::Zero },
    Layout { dtype: DType::F8S, name: "f8_s", ggml_id: None, len: 32, bytes: 36, file_bytes: 36,
        codes: Codes::E4M3 { plane: plane(4, 8, 32) },
        scale: Scale::Single { offset: 0 }, minimum: Minimum::Zero },
];

impl DType {
    pub const ALL: [DType; 28] = {
        let mut all = [DType::F32; 28];
        let mut i = 0;
        while i < all.len() {
            all[i] = LAYOUTS[i].dtype;
            i += 1;
        }
        all
    };

    pub const fn layout(self) -> &'static Layout {
        &LAYOUTS[self as usize]
    }

    /// The type's name, as in `synth -q NAME` and in every report.
    pub const fn name(self) -> &'static str {
        self.layout().name
    }

    pub fn from_name(name: &str) -> Option<DType> {
        Self::ALL.into_iter().find(|t| t.name() == name)
    }

    /// The types that GGUF files have.
    pub fn of_files() -> impl Iterator<Item = DType> {
        Self::ALL.into_iter().filter(|t| t.layout().ggml_id.is_some())
    }

    pub fn from_ggml_id(id: u32) -> Option<DType> {
        Self::ALL.into_iter().find(|t| t.layout().ggml_id == Some(id))
    }

    /// Bytes of a row of `len` values; `None` where a row does not divide into whole blocks or the size overflows.
    pub const fn row_bytes(self, len: u64) -> Option<u64> {
        let layout = self.layout();
        if !len.is_multiple_of(layout.len as u64) {
            return None;
        }
        (len / layout.len as u64).checked_mul(layout.bytes as u64)
    }

    /// The same in a GGUF file.
    pub const fn file_row_bytes(self, len: u64) -> Option<u64> {
        let layout = self.layout();
        match len.is_multiple_of(layout.len as u64) {
            true => (len / layout.len as u64).checked_mul(layout.file_bytes as u64),
            false => None,
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_indexed_by_discriminant() {
        for (i, layout) in LAYOUTS.iter().enumerate() {
            assert_eq!(layout.dtype as usize, i, "{}", layout.name);
            assert!(layout.ggml_id.is_none_or(|id| DType::from_ggml_id(id) == Some(layout.dtype)), "{}", layout.name);
            assert_eq!(DType::from_name(layout.name), Some(layout.dtype));
        }
    }

    /// Every element of every plane lies inside its block, and no two elements share a bit.
    #[test]
    fn planes_tile_their_bytes() {
        for layout in &LAYOUTS {
            let planes: Vec<Plane> = match layout.codes {
                Codes::Float | Codes::Grid { .. } => vec![],
                Codes::Signed { plane } | Codes::E4M3 { plane } => vec![plane],
                Codes::Unsigned { low, high, .. } => std::iter::once(low).chain(high).collect(),
                Codes::Table { low, .. } => vec![low],
            };
            let mut used = vec![0u8; layout.bytes];
            for p in planes {
                for i in 0..layout.len {
                    let (byte, shift) = p.locate(i);
                    let mask = (((1u16 << p.bits) - 1) << shift) as u8;
                    assert_eq!(used[byte] & mask, 0, "{} element {i}", layout.name);
                    used[byte] |= mask;
                }
            }
        }
    }
}
