//! Recipes: how rows of a tensor are made of bytes in files that store it otherwise.
//!
//! A checkpoint has codes and scales in tensors of their own, vectors in 16 bits, experts one by one. Nothing of that
//! is expanded on disk: a plan says which bytes of which files a tensor's rows are made of, and by which of these
//! functions. Each makes any rows alone, so that a model of any size streams through a small buffer.
//!
//! A recipe also knows which bytes each of its inputs has ([`Recipe::inputs`]), so that whoever holds a recipe and the
//! places of its inputs can check that they fit before anything is read. The numbers in a recipe may come from a
//! hostile plan: what they imply is computed with checks.
//!
//! What it does not do: choose. Which recipe makes a tensor exactly is decided where files are read.

mod make;
mod quantise;

use serde::{Deserialize, Serialize};

use crate::DType;

pub use make::{BadScale, Fault};

/// How rows are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Recipe {
    /// The bytes as they are. Input: the rows.
    Copy,
    /// Floats as 32 bits. Input: the rows.
    Widen { from: Float },
    /// Divisors of the frequencies by which pairs are rotated: 1 for so many pairs, and for those that stand still a
    /// number that no angle survives. No input.
    RopeFactors { rotated: u32 },
    /// Blocks with the bytes that ggml's reference quantiser makes of floats. Input: the rows.
    Quantise { from: Float },
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
    const fn by_row(bytes: u64) -> Input {
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
        Some(match *self {
            Recipe::Copy => vec![Input::by_row(to.row_bytes(columns)?)],
            Recipe::Widen { from } if to == DType::F32 => vec![values(from)?],
            Recipe::RopeFactors { rotated } if to == DType::F32 && u64::from(rotated) <= columns => vec![],
            Recipe::Quantise { from } if matches!(to, DType::Q4_0 | DType::Q8_0) => vec![values(from)?],
            _ => return None,
        })
    }
}
