//! Carries a recipe out, for some rows.

use super::coded;
use super::fault::Fault;
use super::kinds::{Float, Input, Recipe};
use super::merge::Added;
use super::numbers::floats;
use super::quantise::quantise_block;
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
            Recipe::Interleaved { from, of, step, columns } => {
                let (size, row) = (from.bytes() as usize, columns as usize * step as usize * from.bytes() as usize);
                for (at, out) in out.chunks_exact_mut(row_bytes).enumerate() {
                    let own = one_of(&inputs[0][at * row..][..row], size, of as usize, step as usize);
                    out.fill(0);
                    match to == from.dtype() {
                        true => out.iter_mut().zip(own.flatten()).for_each(|(to, byte)| *to = *byte),
                        false => own.zip(out.chunks_exact_mut(4)).for_each(|(value, out)| widen(from, value, out)),
                    }
                }
            }
            Recipe::Zeros => out.fill(0),
            Recipe::Merged { base, times, rank, second, first } => {
                let added = Added { times, rank: rank as usize, first, second: floats(second, inputs[1]).collect() };
                added.merge(base, inputs[0], inputs[2], (to, columns), out);
            }
        }
        Ok(())
    }
}

/// Of values of `size` bytes, every `step`-th from number `first` on.
fn one_of(bytes: &[u8], size: usize, first: usize, step: usize) -> impl Iterator<Item = &[u8]> {
    bytes.chunks_exact(size).skip(first).step_by(step)
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
        quantise_block(&values, to, block);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::decode_row;

    #[test]
    fn matrices_whose_columns_take_turns_are_told_apart() {
        // Two rows of three columns of two matrices: 1 2 3 / 4 5 6, and the same times 10.
        let stored: Vec<u8> = [1.0, 10.0, 2.0, 20.0, 3.0, 30.0, 4.0, 40.0, 5.0, 50.0, 6.0, 60.0]
            .iter()
            .flat_map(|value: &f32| value.to_le_bytes())
            .collect();
        for (of, expected) in [(0, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), (1, [10.0, 20.0, 30.0, 40.0, 50.0, 60.0])] {
            let recipe = Recipe::Interleaved { from: Float::F32, of, step: 2, columns: 3 };
            let mut made = [0; 24];
            recipe.make(DType::F32, 3, 0, &[&stored], &mut made).expect("the input fits");
            assert_eq!(floats(Float::F32, &made).collect::<Vec<_>>(), expected);
            // The second row alone.
            recipe.make(DType::F32, 3, 1, &[&stored[24..]], &mut made[..12]).expect("half of the input fits");
            assert_eq!(floats(Float::F32, &made[..12]).collect::<Vec<_>>(), expected[3..]);
        }
        let brain: Vec<u8> = stored.chunks_exact(4).flat_map(|value| [value[2], value[3]]).collect();
        for (to, bytes) in [(DType::BF16, 12), (DType::F32, 24)] {
            let recipe = Recipe::Interleaved { from: Float::BF16, of: 1, step: 2, columns: 3 };
            let mut made = vec![0; bytes];
            recipe.make(to, 3, 0, &[&brain], &mut made).expect("the input fits");
            let from = Float::of(to).expect("a type of floats");
            assert_eq!(floats(from, &made).collect::<Vec<_>>(), [10.0, 20.0, 30.0, 40.0, 50.0, 60.0]);
        }
        let no_such = Recipe::Interleaved { from: Float::F32, of: 2, step: 2, columns: 3 };
        let mut padded = [1; 32];
        let recipe = Recipe::Interleaved { from: Float::F32, of: 0, step: 2, columns: 3 };
        recipe.make(DType::F32, 4, 0, &[&stored], &mut padded).expect("the input fits");
        let expected = [1.0, 2.0, 3.0, 0.0, 4.0, 5.0, 6.0, 0.0];
        assert_eq!(floats(Float::F32, &padded).collect::<Vec<_>>(), expected);
        assert_eq!(no_such.make(DType::F32, 3, 0, &[&stored], &mut [0; 24]), Err(Fault::Misfit));
    }

    #[test]
    fn bytes_that_are_zero_are_values_that_are_zero() {
        const COLUMNS: usize = 512;
        for dtype in DType::ALL {
            let bytes = dtype.row_bytes(COLUMNS as u64).expect("whole blocks") as usize;
            let (mut row, mut values) = (vec![0x5a; bytes], [1.0; COLUMNS]);
            Recipe::Zeros.make(dtype, COLUMNS, 0, &[], &mut row).expect("there are no inputs");
            decode_row(dtype, &row, &mut values);
            assert_eq!(values, [0.0; COLUMNS], "{dtype}");
        }
    }
}
