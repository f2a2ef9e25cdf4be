//! Carries a recipe out, for some rows.

use super::coded;
use super::fault::Fault;
use super::kinds::{Float, Input, Recipe};
use super::numbers::floats;
use super::quantise::{quantise_q4_0, quantise_q8_0};
use crate::DType;

/// Divides the frequency of a pair that is not rotated.
const STANDS_STILL: f32 = 1e30;

impl Recipe {
    /// Makes whole rows of `columns` values of type `to`, the piece's row `first` and those behind it. Each of `inputs`
    /// is what [`Input::of_rows`] says that these rows need of it.
    pub fn make(&self, to: DType, columns: usize, first: u64, inputs: &[&[u8]], out: &mut [u8]) -> Result<(), Fault> {
        let row_bytes = to.row_bytes(columns as u64).filter(|bytes| *bytes > 0).ok_or(Fault::Misfit)? as usize;
        let rows = out.len() / row_bytes;
        let shapes = self.inputs(to, columns as u64).ok_or(Fault::Misfit)?;
        let fits = |(shape, input): (&Input, &&[u8])| {
            shape.of_rows(first, rows as u64).is_some_and(|(_, bytes)| bytes == input.len() as u64)
        };
        if shapes.len() != inputs.len() || !out.len().is_multiple_of(row_bytes) || !shapes.iter().zip(inputs).all(fits)
        {
            return Err(Fault::Misfit);
        }
        let rows_of = |first| coded::Rows { to, columns, first };
        match *self {
            Recipe::Copy => out.copy_from_slice(inputs[0]),
            Recipe::Widen { from } => widen(from, inputs[0], out),
            Recipe::RopeFactors { rotated } => {
                let factors = (0..columns).map(|pair| if pair < rotated as usize { 1.0 } else { STANDS_STILL });
                let (floats, _) = out.as_chunks_mut::<4>();
                floats.iter_mut().zip(factors.cycle()).for_each(|(to, factor)| *to = f32::to_le_bytes(factor));
            }
            Recipe::Integers { bits, has_zeros, scales } => {
                return coded::integers(bits.into(), has_zeros, scales, rows_of(first), inputs, out);
            }
            Recipe::Bytes { scales } => return coded::bytes(scales, rows_of(first), inputs, out),
            Recipe::Fp8 { scales } => return coded::fp8(scales, rows_of(first), inputs, out),
            Recipe::Nvfp4 { is_divisor } => return coded::nvfp4(is_divisor, rows_of(first), inputs, out),
            Recipe::Factored { .. } => return coded::factored(rows_of(first), inputs, out),
            Recipe::Quantise { from } => quantise(from, inputs[0], to, out),
        }
        Ok(())
    }
}

fn widen(from: Float, bytes: &[u8], out: &mut [u8]) {
    let (to, _) = out.as_chunks_mut::<4>();
    to.iter_mut().zip(floats(from, bytes)).for_each(|(to, value)| *to = value.to_le_bytes());
}

fn quantise(from: Float, bytes: &[u8], to: DType, out: &mut [u8]) {
    let layout = to.layout();
    let mut values = [0.0; 32];
    for (block, bytes) in out.chunks_exact_mut(layout.bytes).zip(bytes.chunks_exact(32 * from.bytes() as usize)) {
        values.iter_mut().zip(floats(from, bytes)).for_each(|(to, value)| *to = value);
        match to {
            DType::Q4_0 => quantise_q4_0(&values, block),
            _ => quantise_q8_0(&values, block),
        }
    }
}
