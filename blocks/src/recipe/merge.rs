//! Rows of a matrix with those of an adapter's product added, in f32, and stored as floats or blocks again.

use half::{bf16, f16};

use super::kinds::First;
use super::numbers::floats;
use super::quantise::quantise_block;
use crate::DType;
use crate::decode::decode_row;

/// What is added to a matrix: the product of two small ones.
pub(super) struct Added {
    pub times: f32,
    pub rank: usize,
    pub first: First,
    /// Row by row.
    pub second: Vec<f32>,
}

impl Added {
    /// Adds rows of the product to rows of a matrix, in f32, and stores the sums.
    pub fn merge(&self, base: DType, rows: &[u8], first: &[u8], (to, columns): (DType, usize), out: &mut [u8]) {
        let bytes = |dtype: DType| dtype.row_bytes(columns as u64).map_or(1, |bytes| bytes.max(1) as usize);
        let size = self.first.from.bytes() as usize;
        let all_first = first.chunks_exact((self.rank * self.first.step as usize * size).max(1));
        let (mut values, mut product) = (vec![0.0; columns], vec![0.0; columns]);
        for ((row, first), out) in rows.chunks_exact(bytes(base)).zip(all_first).zip(out.chunks_exact_mut(bytes(to))) {
            decode_row(base, row, &mut values);
            product.fill(0.0);
            let own = first.chunks_exact(size).skip(self.first.of as usize).step_by(self.first.step as usize);
            let factors = own.flat_map(|value| floats(self.first.from, value));
            for (factor, second) in factors.zip(self.second.chunks_exact(columns)) {
                product.iter_mut().zip(second).for_each(|(sum, value)| *sum += factor * value);
            }
            values.iter_mut().zip(&product).for_each(|(value, product)| *value += self.times * product);
            store(&values, to, out);
        }
    }
}

/// Stores values as floats or as blocks of 32.
fn store(values: &[f32], to: DType, out: &mut [u8]) {
    let halves = |out: &mut [u8], bits: fn(f32) -> u16| {
        let (out, _) = out.as_chunks_mut::<2>();
        out.iter_mut().zip(values).for_each(|(out, value)| *out = bits(*value).to_le_bytes());
    };
    match to {
        DType::F32 => {
            let (out, _) = out.as_chunks_mut::<4>();
            out.iter_mut().zip(values).for_each(|(out, value)| *out = value.to_le_bytes());
        }
        DType::F16 => halves(out, |value| f16::from_f32(value).to_bits()),
        DType::BF16 => halves(out, |value| bf16::from_f32(value).to_bits()),
        _ => {
            let (blocks, _) = values.as_chunks::<32>();
            blocks.iter().zip(out.chunks_exact_mut(to.layout().bytes)).for_each(|(v, out)| quantise_block(v, to, out));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::kinds::{Float, Recipe, merged_type};
    use super::*;

    /// Of every type against the reference decoder, rows in pieces, and the pair in turns with another.
    #[test]
    fn the_product_of_two_small_matrices_is_added() {
        const COLUMNS: usize = 256;
        let floats_of = |seed: usize, len: usize| -> Vec<f32> {
            (0..len).map(|i| ((i * 37 + seed) % 19) as f32 / 16.0 - 0.5).collect()
        };
        let bytes_of = |values: &[f32]| -> Vec<u8> { values.iter().flat_map(|value| value.to_le_bytes()).collect() };
        let (rows, rank, times) = (3, 2, 0.5f32);
        let (second, both) = (floats_of(5, rank * COLUMNS), floats_of(11, rows * rank * 2));
        for base in [DType::F32, DType::BF16, DType::F16, DType::Q8_0, DType::Q4_0, DType::Q4K] {
            let to = merged_type(base);
            let own = base.row_bytes(COLUMNS as u64).expect("whole blocks") as usize;
            let matrix = match base {
                DType::Q4K => vec![0x21; rows * own],
                _ => {
                    let mut bytes = vec![0; rows * own];
                    let values = floats_of(3, rows * COLUMNS);
                    values.chunks(COLUMNS).zip(bytes.chunks_mut(own)).for_each(|(v, out)| store(v, base, out));
                    bytes
                }
            };
            let first = First { from: Float::F32, of: 1, step: 2 };
            let recipe = Recipe::Merged { base, times, rank: rank as u32, second: Float::F32, first };
            let new = to.row_bytes(COLUMNS as u64).expect("whole blocks") as usize;
            let mut made = vec![0; rows * new];
            let (second_bytes, first_bytes) = (bytes_of(&second), bytes_of(&both));
            let inputs = [&matrix[..], &second_bytes, &first_bytes];
            recipe.make(to, COLUMNS, 0, &inputs, &mut made).expect("the inputs fit");
            for row in 0..rows {
                let (mut values, mut expected, mut got) = (vec![0.0; COLUMNS], vec![0; new], vec![0; new]);
                decode_row(base, &matrix[row * own..][..own], &mut values);
                for (column, value) in values.iter_mut().enumerate() {
                    let of = |r: usize| both[row * rank * 2 + r * 2 + 1] * second[r * COLUMNS + column];
                    *value += times * (of(0) + of(1));
                }
                store(&values, to, &mut expected);
                assert_eq!(made[row * new..][..new], expected, "{base}, row {row}");
                let pair = rank * 2 * 4;
                let inputs = [&matrix[row * own..][..own], &second_bytes, &first_bytes[row * pair..][..pair]];
                recipe.make(to, COLUMNS, row as u64, &inputs, &mut got).expect("a row alone fits");
                assert_eq!(got, expected, "{base}, row {row} alone");
            }
            let other = if to == DType::Q8_0 { DType::F32 } else { DType::Q8_0 };
            assert_eq!(recipe.inputs(other, COLUMNS as u64), None, "{base} does not become {other}");
        }
    }
}
