//! Rows whose codes and scales are in tensors of their own, as compressed-tensors and ModelOpt write them.
//!
//! Each has values that are exactly what its format says: a block that holds fewer bits of a scale than the file has is
//! not among a recipe's results ([`super::Recipe::inputs`]).

use super::fault::{BadScale, Fault};
use super::kinds::Scales;
use super::numbers::{e2m1, floats};
use crate::DType;
use crate::narrow::fp8_to_f32;

/// Values that are made together: those of most blocks.
const GROUP: usize = 32;
/// Values of a block of 4-bit floats, of one of its scales, and where its scales and codes are.
const NVFP4_BLOCK: usize = 64;
const NVFP4_GROUP: usize = 16;
const NVFP4_SCALES: usize = 4;
const NVFP4_CODES: usize = 8;

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
    let word = |bytes: &[u8], at: usize| {
        u32::from_le_bytes([bytes[4 * at], bytes[4 * at + 1], bytes[4 * at + 2], bytes[4 * at + 3]])
    };
    let row_words = rows.columns.div_ceil(per);
    let zero = |row: usize, column: usize| -> i32 {
        if !has_zeros {
            return 1 << (bits - 1);
        }
        let (at, first) = (rows.first + row as u64, rows.first / per as u64);
        let packed =
            word(inputs[2], (at / per as u64 - first) as usize * scale_rows.count + column / scales.columns as usize);
        ((packed >> ((at % per as u64) as u32 * bits)) & mask) as i32
    };
    groups(rows, scales, out, |row, column, codes| {
        let words = &inputs[0][4 * row * row_words..4 * (row + 1) * row_words];
        if column.is_multiple_of(per) {
            // Whole words, but for the last ones of a row.
            for (at, codes) in codes.chunks_mut(per).enumerate() {
                let mut word = word(words, column / per + at);
                for code in codes {
                    *code = (word & mask) as i32;
                    word >>= bits;
                }
            }
        } else {
            for (at, code) in (column..).zip(codes) {
                *code = ((word(words, at / per) >> ((at % per) as u32 * bits)) & mask) as i32;
            }
        }
        (scale_rows.at(row, column), zero(row, column))
    })
}

/// Signed bytes.
pub(super) fn bytes(scales: Scales, rows: Rows, inputs: &[&[u8]], out: &mut [u8]) -> Result<(), Fault> {
    let scale_rows = ScaleRows::new(scales, rows, inputs[1]);
    groups(rows, scales, out, |row, column, codes| {
        let own = &inputs[0][row * rows.columns + column..];
        codes.iter_mut().zip(own).for_each(|(code, byte)| *code = i32::from(*byte as i8) + 128);
        (scale_rows.at(row, column), 128)
    })
}

/// Makes rows of integers group by group: `read` fills in the codes of some columns of a row, all of which have the one
/// scale and zero point that it returns.
fn groups(
    rows: Rows,
    scales: Scales,
    out: &mut [u8],
    read: impl Fn(usize, usize, &mut [i32]) -> (f32, i32),
) -> Result<(), Fault> {
    let (group, group_bytes, row_bytes) = cut(rows, scales);
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
    if to == DType::F32 {
        let (values, _) = block.as_chunks_mut::<4>();
        values.iter_mut().zip(codes).for_each(|(to, code)| *to = (scale * (code - zero) as f32).to_le_bytes());
        return;
    }
    block[..2].copy_from_slice(&brain(scale));
    let nibbles = |block: &mut [u8]| {
        block.iter_mut().enumerate().for_each(|(j, byte)| *byte = (codes[j] | codes[j + 16] << 4) as u8);
    };
    match to {
        DType::I2 => block[2..].iter_mut().enumerate().for_each(|(j, byte)| {
            *byte = (codes[j] | codes[j + 8] << 2 | codes[j + 16] << 4 | codes[j + 24] << 6) as u8;
        }),
        DType::I4 => nibbles(&mut block[2..]),
        DType::I4Z => {
            block[2..4].copy_from_slice(&(zero as u16).to_le_bytes());
            nibbles(&mut block[4..]);
        }
        _ => block[2..].iter_mut().zip(codes).for_each(|(byte, code)| *byte = (code - zero) as u8),
    }
}

/// The bytes of a bfloat16 that is this number.
fn brain(value: f32) -> [u8; 2] {
    let [_, _, low, high] = value.to_le_bytes();
    [low, high]
}

/// Values that are made together, the bytes that they become, and those of a row. All of a group have one scale.
fn cut(rows: Rows, scales: Scales) -> (usize, usize, usize) {
    let layout = rows.to.layout();
    let row_bytes = rows.to.row_bytes(rows.columns as u64).unwrap_or(1) as usize;
    let whole = scales.columns as usize >= rows.columns;
    let group = match rows.to {
        DType::F32 if whole => GROUP,
        DType::F32 => 1 << scales.columns.trailing_zeros().min(GROUP.trailing_zeros()),
        _ => layout.len,
    };
    (group, group / layout.len * layout.bytes, row_bytes)
}

/// Floats of 8 bits.
pub(super) fn fp8(scales: Scales, rows: Rows, inputs: &[&[u8]], out: &mut [u8]) -> Result<(), Fault> {
    let scale_rows = ScaleRows::new(scales, rows, inputs[1]);
    let (group, group_bytes, row_bytes) = cut(rows, scales);
    for (row, out) in out.chunks_exact_mut(row_bytes).enumerate() {
        let own = &inputs[0][row * rows.columns..(row + 1) * rows.columns];
        for (at, (block, codes)) in out.chunks_mut(group_bytes).zip(own.chunks(group)).enumerate() {
            let scale = scale_rows.at(row, at * group);
            let is_used = codes.iter().any(|code| code & 0x7f != 0);
            check_scale(scale, is_used)
                .map_err(|scale| Fault::BadScale(BadScale { row, column: at * group, scale }))?;
            write_fp8(rows.to, scale, codes, block);
        }
    }
    Ok(())
}

fn write_fp8(to: DType, scale: f32, codes: &[u8], block: &mut [u8]) {
    match to {
        DType::F8 => {
            block[..2].copy_from_slice(&brain(scale));
            block[2..].copy_from_slice(codes);
        }
        DType::F8S => {
            block[..4].copy_from_slice(&scale.to_le_bytes());
            block[4..].copy_from_slice(codes);
        }
        _ => {
            let (values, _) = block.as_chunks_mut::<4>();
            values.iter_mut().zip(codes).for_each(|(to, code)| *to = (scale * fp8_to_f32(*code)).to_le_bytes());
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
            return Err(bad(row, at * NVFP4_GROUP, fp8_to_f32(scales[at])));
        }
        write_nvfp4(rows.to, factor, scales, codes, out);
    }
    Ok(())
}

fn write_nvfp4(to: DType, factor: f32, scales: &[u8], codes: &[u8], out: &mut [u8]) {
    if to == DType::F32 {
        let (values, _) = out.as_chunks_mut::<4>();
        for (i, value) in values.iter_mut().enumerate() {
            let code = codes[i / 2] >> (4 * (i % 2)) & 15;
            *value = (factor * fp8_to_f32(scales[i / NVFP4_GROUP]) * e2m1(code)).to_le_bytes();
        }
        return;
    }
    let of_block = scales.chunks_exact(NVFP4_BLOCK / NVFP4_GROUP).zip(codes.chunks_exact(NVFP4_BLOCK / 2));
    for (block, (scales, codes)) in out.chunks_exact_mut(to.layout().bytes).zip(of_block) {
        block[..NVFP4_SCALES].copy_from_slice(&factor.to_le_bytes());
        block[NVFP4_SCALES..NVFP4_CODES].copy_from_slice(scales);
        let parts = block[NVFP4_CODES..].chunks_exact_mut(8).zip(codes.chunks_exact(8));
        for (part, codes) in parts {
            let code = |i: usize| codes[i / 2] >> (4 * (i % 2)) & 15;
            part.iter_mut().enumerate().for_each(|(j, byte)| *byte = code(j) | code(j + 8) << 4);
        }
    }
}

/// Blocks of a file that keeps their factor in a tensor of its own: the factor goes in front.
pub(super) fn factored(rows: Rows, inputs: &[&[u8]], out: &mut [u8]) -> Result<(), Fault> {
    let factor = inputs.get(1).map_or(1.0, |all| f32::from_le_bytes([all[0], all[1], all[2], all[3]]));
    if !(factor.is_finite() && factor > 0.0) {
        return Err(Fault::BadScale(BadScale { row: 0, column: 0, scale: factor }));
    }
    let layout = rows.to.layout();
    for (block, stored) in out.chunks_exact_mut(layout.bytes).zip(inputs[0].chunks_exact(layout.file_bytes)) {
        let (front, own) = block.split_at_mut(layout.bytes - layout.file_bytes);
        front.copy_from_slice(&factor.to_le_bytes());
        own.copy_from_slice(stored);
    }
    Ok(())
}
