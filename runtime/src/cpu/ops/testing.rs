//! What the unit tests of the ops share: seeded values, comparison with f64, a pool of a given size.

use gemma4c_blocks::{Codes, DType, Factor, Layout, Minimum, Scale};

/// A small generator of seeded noise.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Uniform in -1..1.
    pub fn value(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    pub fn values(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.value()).collect()
    }

    /// Encoded rows of any format: random codes, every factor small and finite.
    pub fn encoded(&mut self, dtype: DType, values: usize) -> Vec<u8> {
        let bytes = dtype.row_bytes(values as u64).unwrap() as usize;
        match dtype {
            DType::F32 => self.values(values).into_iter().flat_map(f32::to_le_bytes).collect(),
            // 1.xxx times ±2^-3 in half precision, and in its wider cousin.
            DType::F16 => (0..values).flat_map(|_| ((self.bits() as u16 & 0x83ff) | 0x3000).to_le_bytes()).collect(),
            DType::BF16 => (0..values).flat_map(|_| ((self.bits() as u16 & 0x807f) | 0x3e00).to_le_bytes()).collect(),
            _ => {
                let mut row: Vec<u8> = (0..bytes).map(|_| self.bits() as u8).collect();
                row.chunks_exact_mut(dtype.layout().bytes).for_each(|block| self.make_small(dtype.layout(), block));
                row
            }
        }
    }

    /// Overwrites the factor and the addend of a block of random bits, and the codes that are no numbers.
    fn make_small(&mut self, layout: &Layout, block: &mut [u8]) {
        let bits = self.bits();
        let put = |block: &mut [u8], at: usize, value: u64| {
            block[at..at + 2].copy_from_slice(&(value as u16).to_le_bytes());
        };
        // 1.xxx times ±2^-8, as a half, and as a bfloat16, which is the upper part of a single.
        let (small_half, small_brain) = (bits & 0x83ff | 0x1c00, bits & 0x807f | 0x3b80);
        match layout.scale.factor() {
            None => {}
            Some((at, Factor::Half)) => put(block, at, small_half),
            Some((at, Factor::Brain)) => put(block, at, small_brain),
            Some((at, Factor::Single)) => put(block, at + 2, small_brain),
            Some((at, Factor::Exponent)) => block[at] = 119,
        }
        if let Some(at) = layout.minimum.half() {
            put(block, at, bits >> 16 & 0x83ff | 0x1c00);
        }
        if let Minimum::ZeroPoint { offset } = layout.minimum {
            put(block, offset, bits >> 16 & 15);
        }
        let floats8 = match (layout.codes, layout.scale) {
            (Codes::E4M3 { plane }, _) => plane.offset..block.len(),
            (_, Scale::Floats16 { bytes, .. }) => bytes..bytes + layout.len / 16,
            _ => 0..0,
        };
        block[floats8].iter_mut().filter(|code| **code & 0x7f == 0x7f).for_each(|code| *code ^= 1);
    }
}

/// Asserts `|got - exact| <= tolerance * max(1, largest exact)`.
#[track_caller]
pub fn assert_close(got: &[f32], exact: &[f64], tolerance: f64) {
    assert_eq!(got.len(), exact.len());
    let largest = exact.iter().fold(1.0, |m: f64, e| m.max(e.abs()));
    for (i, (got, exact)) in got.iter().zip(exact).enumerate() {
        let error = (*got as f64 - exact).abs();
        assert!(error <= tolerance * largest, "value {i}: {got}, not {exact} (largest {largest})");
    }
}

/// Runs `f` in a pool of `threads` threads.
pub fn with_threads<T: Send>(threads: usize, f: impl FnOnce() -> T + Send) -> T {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(f)
}
