//! Cases of the activation quantisation: values of all sizes, zeros, ties, rows past the end of a chunk.

use gemma4c_dsl::harness::{Bound, Case, Random};

use crate::kernels::quantise::instance;

/// Rows of activations in int8.
#[derive(Clone, Debug, Default)]
pub struct Int8 {
    /// Four codes to a word.
    pub codes: Vec<u32>,
    /// One a group of 32.
    pub scales: Vec<f32>,
    pub sums: Vec<i32>,
}

impl Int8 {
    /// The definition: `q = round(x * (127 / max|x|))`, `scale = max|x| / 127`.
    pub fn of(x: &[f32]) -> Self {
        let mut int8 = Self::default();
        for group in x.chunks_exact(32) {
            let largest = group.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
            let scale = largest / 127.0;
            let per_unit = if largest > 0.0 { 127.0 / largest } else { 0.0 };
            let code = |x: &f32| (x * per_unit).round_ties_even().clamp(-127.0, 127.0) as i8;
            let codes: Vec<i8> = group.iter().map(code).collect();
            int8.codes.extend(codes.chunks_exact(4).map(|c| u32::from_le_bytes(std::array::from_fn(|i| c[i] as u8))));
            int8.scales.push(scale);
            int8.sums.push(codes.iter().map(|&code| i32::from(code)).sum());
        }
        int8
    }

    pub fn code(&self, i: usize) -> i8 {
        self.codes[i / 4].to_le_bytes()[i % 4] as i8
    }

    /// The values that the codes stand for.
    pub fn values(&self) -> Vec<f64> {
        (0..self.codes.len() * 4).map(|i| f64::from(self.code(i)) * f64::from(self.scales[i / 32])).collect()
    }
}

/// The values that codes and fine codes stand for. A group has fine codes if 12 or more of its codes are 4 at most.
pub fn with_fine_codes(x: &[f32]) -> Vec<f64> {
    let int8 = Int8::of(x);
    let mut values = int8.values();
    for (group, values) in values.chunks_exact_mut(32).enumerate() {
        let codes: Vec<i8> = (0..32).map(|i| int8.code(group * 32 + i)).collect();
        if codes.iter().filter(|code| code.unsigned_abs() <= 4).count() >= 12 {
            let step = f64::from(int8.scales[group]) / 32768.0;
            for (value, x) in values.iter_mut().zip(&x[group * 32..]) {
                let rest = f64::from(*x) - *value;
                *value += if step > 0.0 { (rest / step).round() * step } else { 0.0 };
            }
        }
    }
    values
}

/// Activations as a model has them: groups of very different sizes, one of zeros, one of ties.
pub fn activations(count: usize, seed: u64) -> Vec<f32> {
    let mut random = Random::new(seed);
    let mut x = Vec::with_capacity(count);
    for group in 0..count / 32 {
        let size = 10f32.powf(random.float(-3.0, 2.0));
        match group {
            1 => x.extend([0.0; 32]),
            // The scale is 1, so that halves tie.
            2 => x.extend((0..32).map(|i| if i == 0 { 127.0 } else { i as f32 - 15.5 })),
            _ => x.extend(random.floats(32, -size, size)),
        }
    }
    x
}

pub fn cases() -> Vec<Case> {
    // (width, rows in the buffers, rows in the chunk, blocks)
    let shapes = [(32, 1, 1, 1), (704, 3, 3, 1), (704, 5, 2, 3), (2560, 1, 1, 2)];
    shapes.into_iter().map(|(k, rows, active, blocks)| case(k, rows, active, blocks)).collect()
}

fn case(k: usize, rows: usize, active: usize, blocks: u32) -> Case {
    let x = activations(rows * k, (rows * k) as u64);
    let int8 = Int8::of(&x);
    Case::new(format!("{active} of {rows} rows of {k}"), instance(k as u32).expect("a width of whole groups"))
        .grid([blocks, 1, 1])
        .buffer("x", x)
        .buffer("state", vec![0, active as u32, 0])
        .expect("xq", int8.codes, Bound::Exact)
        .except(active * k / 4..rows * k / 4)
        .expect("xscale", int8.scales, Bound::Exact)
        .except(active * k / 32..rows * k / 32)
        .expect("xsum", int8.sums, Bound::Exact)
        .except(active * k / 32..rows * k / 32)
}
