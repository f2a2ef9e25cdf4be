//! The table: one [`Layout`] a format.
//!
//! Every value of every format is `scale * code + minimum`, where the code is an integer assembled from one or two
//! bit planes (low bits, high bits), optionally looked up in a codebook. The formats differ only in the numbers below.

use serde::{Deserialize, Serialize};

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
}

/// One block format.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Layout {
    pub dtype: DType,
    pub name: &'static str,
    /// The type's number in GGUF files.
    pub ggml_id: u32,
    /// Values in a block.
    pub len: usize,
    /// Bytes in a block.
    pub bytes: usize,
    pub codes: Codes,
    pub scale: Scale,
    pub minimum: Minimum,
}

/// The non-linear levels of the IQ4 formats.
pub(crate) const IQ4_LEVELS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

const fn plane(offset: usize, bits: usize, run: usize) -> Plane {
    Plane { offset, bits, run }
}

const fn unsigned(low: Plane, high: Option<Plane>, zero: i32) -> Codes {
    Codes::Unsigned { low, high, zero }
}

const fn float(dtype: DType, name: &'static str, ggml_id: u32, bytes: usize) -> Layout {
    Layout { dtype, name, ggml_id, len: 1, bytes, codes: Codes::Float, scale: Scale::One, minimum: Minimum::Zero }
}

#[rustfmt::skip]
const LAYOUTS: [Layout; 13] = [
    float(DType::F32, "f32", 0, 4),
    float(DType::F16, "f16", 1, 2),
    float(DType::BF16, "bf16", 30, 2),
    Layout { dtype: DType::Q4_0, name: "q4_0", ggml_id: 2, len: 32, bytes: 18,
        codes: unsigned(plane(2, 4, 16), None, 8),
        scale: Scale::Half { offset: 0 }, minimum: Minimum::Zero },
    Layout { dtype: DType::Q4_1, name: "q4_1", ggml_id: 3, len: 32, bytes: 20,
        codes: unsigned(plane(4, 4, 16), None, 0),
        scale: Scale::Half { offset: 0 }, minimum: Minimum::Half { offset: 2 } },
    Layout { dtype: DType::Q5_0, name: "q5_0", ggml_id: 6, len: 32, bytes: 22,
        codes: unsigned(plane(6, 4, 16), Some(plane(2, 1, 1)), 16),
        scale: Scale::Half { offset: 0 }, minimum: Minimum::Zero },
    Layout { dtype: DType::Q5_1, name: "q5_1", ggml_id: 7, len: 32, bytes: 24,
        codes: unsigned(plane(8, 4, 16), Some(plane(4, 1, 1)), 0),
        scale: Scale::Half { offset: 0 }, minimum: Minimum::Half { offset: 2 } },
    Layout { dtype: DType::Q8_0, name: "q8_0", ggml_id: 8, len: 32, bytes: 34,
        codes: Codes::Signed { plane: plane(2, 8, 32) },
        scale: Scale::Half { offset: 0 }, minimum: Minimum::Zero },
    Layout { dtype: DType::Q4K, name: "q4_k", ggml_id: 12, len: 256, bytes: 144,
        codes: unsigned(plane(16, 4, 32), None, 0),
        scale: Scale::Packed6 { half: 0, packed: 4 }, minimum: Minimum::Packed6 { half: 2, packed: 4 } },
    Layout { dtype: DType::Q5K, name: "q5_k", ggml_id: 13, len: 256, bytes: 176,
        codes: unsigned(plane(48, 4, 32), Some(plane(16, 1, 32)), 0),
        scale: Scale::Packed6 { half: 0, packed: 4 }, minimum: Minimum::Packed6 { half: 2, packed: 4 } },
    Layout { dtype: DType::Q6K, name: "q6_k", ggml_id: 14, len: 256, bytes: 210,
        codes: unsigned(plane(0, 4, 64), Some(plane(128, 2, 32)), 32),
        scale: Scale::Bytes16 { half: 208, bytes: 192 }, minimum: Minimum::Zero },
    Layout { dtype: DType::IQ4NL, name: "iq4_nl", ggml_id: 20, len: 32, bytes: 18,
        codes: Codes::Table { low: plane(2, 4, 16), levels: &IQ4_LEVELS },
        scale: Scale::Half { offset: 0 }, minimum: Minimum::Zero },
    Layout { dtype: DType::IQ4XS, name: "iq4_xs", ggml_id: 23, len: 256, bytes: 136,
        codes: Codes::Table { low: plane(8, 4, 16), levels: &IQ4_LEVELS },
        scale: Scale::Split6 { half: 0, high: 2, low: 4 }, minimum: Minimum::Zero },
];

impl DType {
    pub const ALL: [DType; 13] = {
        let mut all = [DType::F32; 13];
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

    pub fn from_ggml_id(id: u32) -> Option<DType> {
        Self::ALL.into_iter().find(|t| t.layout().ggml_id == id)
    }

    /// Bytes of a row of `len` values; `None` where a row does not divide into whole blocks or the size overflows.
    pub const fn row_bytes(self, len: u64) -> Option<u64> {
        let layout = self.layout();
        if !len.is_multiple_of(layout.len as u64) {
            return None;
        }
        (len / layout.len as u64).checked_mul(layout.bytes as u64)
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
            assert_eq!(DType::from_ggml_id(layout.ggml_id), Some(layout.dtype));
            assert_eq!(DType::from_name(layout.name), Some(layout.dtype));
        }
    }

    /// Every element of every plane lies inside its block, and no two elements share a bit.
    #[test]
    fn planes_tile_their_bytes() {
        for layout in &LAYOUTS {
            let planes: Vec<Plane> = match layout.codes {
                Codes::Float => vec![],
                Codes::Signed { plane } => vec![plane],
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
