//! Rows whose codes and scales are in tensors of their own, as compressed-tensors and ModelOpt write them.
//!
//! Each has values that are exactly what its format says: a block that holds fewer bits of a scale than the file has is
//! not among a recipe's results ([`super::Recipe::inputs`]).

use half::bf16;

use super::fault::{BadScale, Fault};
use super::kinds::Scales;
use super::numbers::{e2m1, e4m3, floats};
use crate::DType;

/// Values that are made together: those of most blocks.
const GROUP: usize = 32;
/// Values of a block of 4-bit floats, and of one of its scales.
const NVFP4_BLOCK: usize = 64;
const NVFP4_GROUP: usize = 16;

/// Which rows are made.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub to: DType,
    pub columns: usize,
    /// Among the piece's.
    pub first: u64,
}

/// The scales of some rows.
struct ScaleRows {
    scales: Scales,
    values: Vec<f32>,
    /// In a row of them.
    count: usize,
    first: u64,
}

impl ScaleRows {
    fn new(scales: Scales, rows: Rows, bytes: &[u8]) -> ScaleRows {
        let count = rows.columns.div_ceil(scales.columns as usize);
        ScaleRows { scales, values: floats(scales.float, bytes).collect(), count, first: rows.first }
    }

    /// The scale of a column of a row, which counts from the first that is made.
    fn at(&self, row: usize, column: usize) -> f32 {
        let each = u64::from(self.scales.rows);
        let row = ((self.first + row as u64) / each - self.first / each) as usize;
        self.values[row * self.count + column / self.scales.columns as usize]
    }
}

/// Integers of 2, 4 or 8 bits in words of 32, the first in the lowest bits; they count from the middle of their range,
/// or from zero points, which are packed along the rows.
pub(super) fn integers(
    bits: u32,
    has_zeros: bool,
    scales: Scales,
    rows: Rows,
    inputs: &[&[u8]],
    out: &mut [u8],
) -> Result<(), Fault> {
    let scale_rows = ScaleRows::new(scales, rows, inputs[1]);
    let (per, mask) = ((32 / bits) as usize, (1u32 << bits) - 1);
    let word = |bytes: &[u8], at: usize| u32::from_le_bytes([bytes[4 * at], bytes[4 * at + 1], bytes[4 * at + 2], bytes[4 * at + 3]]);
    let row_words = rows.columns.div_ceil(per);
    let zero = |row: usize, column: usize| -> i32 {
        if !has_zeros {
            return 1 << (bits - 1);
        }
        let (at, first) = (rows.first + row as u64, rows.first / per as u64);
        let packed = word(inputs[2], (at / per as u64 - first) as usize * scale_rows.count + column / scales.columns as usize);
        ((packed >> ((at % per as u64) as u32 * bits)) & mask) as i32
    };
    groups(rows, out, |row, column, codes| {
        let words = &inputs[0][4 * row * row_words..4 * (row + 1) * row_words];
        for (i, code) in codes.iter_mut().enumerate() {
            let at = column + i;
            *code = ((word(words, at / per) >> ((at % per) as u32 * bits)) & mask) as i32;
        }
        (scale_rows.at(row, column), zero(row, column))
    })
}

/// Signed bytes.
pub(super) fn bytes(scales: Scales, rows: Rows, inputs: &[&[u8]], out: &mut [u8]) -> Result<(), Fault> {
    let scale_rows = ScaleRows::new(scales, rows, inputs[1]);
    groups(rows, out, |row, column, codes| {
        let own = &inputs[0][row * rows.columns + column..];
        codes.iter_mut().zip(own).for_each(|(code, byte)| *code = i32::from(*byte as i8) + 128);
        (scale_rows.at(row, column), 128)
    })
}

/// Makes rows of integers group by group: `read` fills in the codes of some columns of a row, all of which have the one
/// scale and zero point that it returns.
fn groups(
    rows: Rows,
    out: &mut [u8],
    read: impl Fn(usize, usize, &mut [i32]) -> (f32, i32),
) -> Result<(), Fault> {
    let layout = rows.to.layout();
    let group = if rows.to == DType::F32 { GROUP } else { layout.len };
    let row_bytes = out.len() / (out.len() / rows.to.row_bytes(rows.columns as u64).unwrap_or(1) as usize).max(1);
    let group_bytes = group / layout.len * layout.bytes;
    let mut codes = [0; GROUP];
    for (row, out) in out.chunks_exact_mut(row_bytes).enumerate() {
        for (at, block) in out.chunks_mut(group_bytes).enumerate() {
            let column = at * group;
            let codes = &mut codes[..group.min(rows.columns - column)];
            let (scale, zero) = read(row, column, codes);
            let is_used = codes.iter().any(|code| *code != zero);
            check_scale(scale, is_used).map_err(|scale| Fault::BadScale(BadScale { row, column, scale }))?;
            write_group(rows.to, scale, zero, codes, block);
        }
    }
    Ok(())
}

/// A scale is a positive number; 0 where it multiplies nothing else.
fn check_scale(scale: f32, is_used: bool) -> Result<(), f32> {
    match scale.is_finite() && (scale > 0.0 || scale == 0.0 && !is_used) {
        true => Ok(()),
        false => Err(scale),
    }
}

fn write_group(to: DType, scale: f32, zero: i32, codes: &[i32], block: &mut [u8]) {
    match to {
        _ => {
            let (values, _) = block.as_chunks_mut::<4>();
            values.iter_mut().zip(codes).for_each(|(to, code)| *to = (scale * (code - zero) as f32).to_le_bytes());
        }
    }
    let _ = bf16::from_f32(scale);
}

/// Floats of 8 bits.
pub(super) fn fp8(scales: Scales, rows: Rows, inputs: &[&[u8]], out: &mut [u8]) -> Result<(), Fault> {
    let scale_rows = ScaleRows::new(scales, rows, inputs[1]);
    let row_bytes = rows.to.row_bytes(rows.columns as u64).unwrap_or(1) as usize;
    let layout = rows.to.layout();
    let group = if rows.to == DType::F32 { GROUP } else { layout.len };
    let group_bytes = group / layout.len * layout.bytes;
    for (row, out) in out.chunks_exact_mut(row_bytes).enumerate() {
        let own = &inputs[0][row * rows.columns..(row + 1) * rows.columns];
        for (at, (block, codes)) in out.chunks_mut(group_bytes).zip(own.chunks(group)).enumerate() {
            let scale = scale_rows.at(row, at * group);
            let is_used = codes.iter().any(|code| code & 0x7f != 0);
            check_scale(scale, is_used).map_err(|scale| Fault::BadScale(BadScale { row, column: at * group, scale }))?;
            write_fp8(rows.to, scale, codes, block);
        }
    }
    Ok(())
}

fn write_fp8(to: DType, scale: f32, codes: &[u8], block: &mut [u8]) {
    match to {
        _ => {
            let (values, _) = block.as_chunks_mut::<4>();
            values.iter_mut().zip(codes).for_each(|(to, code)| *to = (scale * e4m3(*code)).to_le_bytes());
        }
    }
}

/// Floats of 4 bits, two in a byte, a scale of 8 bits for each 16, and one for all of the tensor: a factor, or what the
/// scales are to be divided by.
pub(super) fn nvfp4(is_divisor: bool, rows: Rows, inputs: &[&[u8]], out: &mut [u8]) -> Result<(), Fault> {
    let all = f32::from_le_bytes([inputs[2][0], inputs[2][1], inputs[2][2], inputs[2][3]]);
    let factor = if is_divisor { 1.0 / all } else { all };
    let bad = |row, column, scale| Fault::BadScale(BadScale { row, column, scale });
    if !(factor.is_finite() && factor > 0.0) {
        return Err(bad(0, 0, all));
    }
    let row_bytes = rows.to.row_bytes(rows.columns as u64).unwrap_or(1) as usize;
    let (row_codes, row_scales) = (rows.columns / 2, rows.columns / NVFP4_GROUP);
    for (row, out) in out.chunks_exact_mut(row_bytes).enumerate() {
        let codes = &inputs[0][row * row_codes..][..row_codes];
        let scales = &inputs[1][row * row_scales..][..row_scales];
        // A sign or all bits set: no scale.
        if let Some(at) = scales.iter().position(|scale| *scale >= 0x7f) {
            return Err(bad(row, at * NVFP4_GROUP, e4m3(scales[at])));
        }
        write_nvfp4(rows.to, factor, scales, codes, out);
    }
    Ok(())
}

fn write_nvfp4(to: DType, factor: f32, scales: &[u8], codes: &[u8], out: &mut [u8]) {
    match to {
        _ => {
            let (values, _) = out.as_chunks_mut::<4>();
            for (i, value) in values.iter_mut().enumerate() {
                let code = codes[i / 2] >> (4 * (i % 2)) & 15;
                *value = (factor * e4m3(scales[i / NVFP4_GROUP]) * e2m1(code)).to_le_bytes();
            }
        }
    }
    let _ = NVFP4_BLOCK;
}
