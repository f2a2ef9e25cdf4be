//! What recipes there are, and what each needs for which rows.

use serde::{Deserialize, Serialize};

use crate::DType;

/// How rows are made.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Recipe {
    /// The bytes as they are. Input: the rows.
    Copy,
    /// Floats as 32 bits. Input: the rows.
    Widen { from: Float },
    /// Divisors of the frequencies by which pairs are rotated: 1 for so many pairs, and for those that stand still a
    /// number that no angle survives. No input.
    RopeFactors { rotated: u32 },
    /// Integers of `bits` bits in words of 32. Inputs: rows of words; scales; zero points, packed along the rows, if they
    /// do not count from the middle of their range.
    Integers { bits: u8, has_zeros: bool, scales: Scales },
    /// Signed bytes. Inputs: rows of bytes; scales.
    Bytes { scales: Scales },
    /// Floats of 8 bits, 4 of them exponent. Inputs: rows of bytes; scales.
    Fp8 { scales: Scales },
    /// Floats of 4 bits. Inputs: rows of bytes, the even column in the lower half; 8-bit floats, one for each 16 columns;
    /// an f32 for all of it, which is a factor or what these scales are divided by.
    Nvfp4 { is_divisor: bool },
    /// Blocks of a GGUF file that keeps their factor elsewhere. Inputs: rows of its blocks; an f32 for all of them, if it
    /// has one.
    Factored { has_factor: bool },
    /// Blocks with the bytes that ggml's reference quantiser makes of floats. Input: the rows.
    Quantise { from: Float },
    /// Of `step` matrices whose columns take turns, number `of`: every `step`-th value of a row, `columns` of them, and
    /// zeros behind. Input: rows of all of them.
    Interleaved { from: Float, of: u32, step: u32, columns: u32 },
    /// Values that are zero: of every type, bytes that are zero. No input.
    Zeros,
    /// A matrix with the product of two small ones added, so many times. Inputs: its rows; all of the second; rows of
    /// the first.
    Merged { base: DType, times: f32, rank: u32, second: Float, first: First },
}

/// Of the first of two small matrices, whose rows have a value for each row of the second: its values, and whether the
/// columns of `step` matrices take turns, of which it is number `of`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct First {
    pub from: Float,
    pub of: u32,
    pub step: u32,
}

/// The type of a matrix to which another is added: its own where values of floats can be put into that, else the widest
/// that is not as wide as floats.
pub fn merged_type(base: DType) -> DType {
    match base {
        DType::F32 | DType::F16 | DType::BF16 | DType::Q4_0 => base,
        _ => DType::Q8_0,
    }
}

/// Scales in a tensor of their own: one for each block of so many rows and columns, the last ones cut off at the edge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scales {
    pub float: Float,
    pub rows: u32,
    pub columns: u32,
}

impl Scales {
    fn input(&self, columns: u64) -> Option<Input> {
        let row = columns
            .checked_div(self.columns.into())?
            .checked_add(u64::from(!columns.is_multiple_of(self.columns.into())))?;
        (self.rows > 0).then_some(())?;
        Some(Input { rows_each: self.rows.into(), bytes: row.checked_mul(self.float.bytes())? })
    }
}

/// A type of floats in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Float {
    F32,
    F16,
    BF16,
}

impl Float {
    pub const fn bytes(self) -> u64 {
        match self {
            Float::F32 => 4,
            Float::F16 | Float::BF16 => 2,
        }
    }

    /// The type of tensors of such floats.
    pub const fn dtype(self) -> DType {
        match self {
            Float::F32 => DType::F32,
            Float::F16 => DType::F16,
            Float::BF16 => DType::BF16,
        }
    }

    pub const fn of(dtype: DType) -> Option<Float> {
        match dtype {
            DType::F32 => Some(Float::F32),
            DType::F16 => Some(Float::F16),
            DType::BF16 => Some(Float::BF16),
            _ => None,
        }
    }
}

/// The bytes of an input: `bytes` for every `rows_each` rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Input {
    pub rows_each: u64,
    pub bytes: u64,
}

impl Input {
    /// So many bytes for every row.
    pub(super) const fn by_row(bytes: u64) -> Input {
        Input { rows_each: 1, bytes }
    }

    /// The bytes that `rows` rows from `first` on need: where they start in the input, and how many; `None` on overflow.
    pub fn of_rows(&self, first: u64, rows: u64) -> Option<(u64, u64)> {
        let start = first / self.rows_each;
        let end = first.checked_add(rows)?.div_ceil(self.rows_each).max(start);
        Some((start.checked_mul(self.bytes)?, (end - start).checked_mul(self.bytes)?))
    }
}

/// The most inputs that a recipe has.
pub const MOST_INPUTS: usize = 3;

impl Recipe {
    /// What its inputs are like for rows of `columns` values of type `to`; `None` where it makes no such rows.
    pub fn inputs(&self, to: DType, columns: u64) -> Option<Vec<Input>> {
        let values = |from: Float| columns.checked_mul(from.bytes()).map(Input::by_row);
        to.row_bytes(columns)?;
        let codes = |bits: u64| columns.checked_mul(bits).map(|bits| Input::by_row(bits.div_ceil(8)));
        let is_coded = || self.makes_of_codes(to, columns);
        Some(match *self {
            Recipe::Copy => vec![Input::by_row(to.row_bytes(columns)?)],
            Recipe::Widen { from } if to == DType::F32 => vec![values(from)?],
            Recipe::RopeFactors { rotated } if to == DType::F32 && u64::from(rotated) <= columns => vec![],
            Recipe::Quantise { from } if matches!(to, DType::Q4_0 | DType::Q8_0) => vec![values(from)?],
            Recipe::Interleaved { from, of, step, columns: own }
                if of < step && u64::from(own) <= columns && (to == DType::F32 || to == from.dtype()) =>
            {
                let all = u64::from(own).checked_mul(step.into())?;
                vec![Input::by_row(all.checked_mul(from.bytes())?)]
            }
            Recipe::Zeros => vec![],
            Recipe::Merged { base, rank, second, first, .. }
                if to == merged_type(base)
                    && rank > 0
                    && first.of < first.step
                    && base.layout().bytes == base.layout().file_bytes =>
            {
                let all = columns.checked_mul(rank.into())?.checked_mul(second.bytes())?;
                let row = u64::from(rank).checked_mul(first.step.into())?.checked_mul(first.from.bytes())?;
                let all = Input { rows_each: u64::MAX, bytes: all };
                vec![Input::by_row(base.row_bytes(columns)?), all, Input::by_row(row)]
            }
            Recipe::Integers { bits: bits @ (2 | 4 | 8), has_zeros, scales } if is_coded() => {
                let per = 32 / u64::from(bits);
                let words = Input::by_row(columns.div_ceil(per).checked_mul(4)?);
                let of_scales = scales.input(columns)?;
                let groups = of_scales.bytes / scales.float.bytes();
                let zeros = Input { rows_each: per, bytes: groups.checked_mul(4)? };
                // A zero point is for as many columns as a scale, and for one row.
                match has_zeros {
                    true if scales.rows == 1 => vec![words, of_scales, zeros],
                    true => return None,
                    false => vec![words, of_scales],
                }
            }
            Recipe::Bytes { scales } | Recipe::Fp8 { scales } if is_coded() => vec![codes(8)?, scales.input(columns)?],
            Recipe::Factored { has_factor } if to == DType::NVFP4 => {
                let rows = Input::by_row(to.file_row_bytes(columns)?);
                let factor = Input { rows_each: u64::MAX, bytes: 4 };
                if has_factor { vec![rows, factor] } else { vec![rows] }
            }
            Recipe::Nvfp4 { .. } if is_coded() && columns.is_multiple_of(16) => {
                vec![codes(4)?, Input::by_row(columns / 16), Input { rows_each: u64::MAX, bytes: 4 }]
            }
            _ => return None,
        })
    }

    /// Whether rows of codes and scales can be made blocks of that type, or numbers.
    fn makes_of_codes(&self, to: DType, columns: u64) -> bool {
        let scales = match *self {
            Recipe::Integers { scales, .. } | Recipe::Bytes { scales } | Recipe::Fp8 { scales } => Some(scales),
            _ => None,
        };
        // All values of a block have one scale.
        let is_whole = |scales: Scales| scales.columns.is_multiple_of(32) || u64::from(scales.columns) >= columns;
        match (*self, to) {
            (_, DType::F32) => true,
            (Recipe::Nvfp4 { .. }, DType::NVFP4) => true,
            _ if !scales.is_some_and(is_whole) => false,
            (Recipe::Integers { bits: 2, has_zeros: false, .. }, DType::I2) => true,
            (Recipe::Integers { bits: 4, has_zeros, .. }, DType::I4 | DType::I4Z) => has_zeros == (to == DType::I4Z),
            (Recipe::Integers { bits: 8, has_zeros: false, .. } | Recipe::Bytes { .. }, DType::I8) => true,
            (Recipe::Fp8 { .. }, DType::F8 | DType::F8S) => true,
            _ => false,
        }
    }
}
