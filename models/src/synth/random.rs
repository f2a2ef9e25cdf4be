//! Random numbers as fast as memory takes them: lanes of xorshift that the compiler vectorises, no multiplication, no
//! table. Good enough that a matrix product of them looks like noise, and good for nothing else.

/// Independent generators that step side by side, so that one step is a few vector instructions on any machine.
pub(super) struct Lanes([u64; LANES]);

const LANES: usize = 8;
const STEP: usize = LANES * 8;

impl Lanes {
    /// The generators of one part of one tensor; the same three numbers give the same bytes on every machine.
    pub fn new(seed: u64, tensor: u64, part: u64) -> Lanes {
        let mut state = mix(mix(mix(seed) ^ tensor) ^ part);
        Lanes(std::array::from_fn(|_| {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            // Xorshift never leaves zero.
            mix(state) | 1
        }))
    }

    pub fn fill(&mut self, out: &mut [u8]) {
        let (steps, rest) = out.as_chunks_mut();
        self.fill_steps(steps);
        let mut last = [[0; STEP]];
        self.fill_steps(&mut last);
        rest.copy_from_slice(&last[0][..rest.len()]);
    }

    /// On its own, with its lanes in a local and one loop an operation: so it becomes vector instructions and nothing
    /// else. The obvious form of it is three times slower; measure before you touch it.
    #[inline(never)]
    fn fill_steps(&mut self, out: &mut [[u8; STEP]]) {
        let mut lanes = self.0;
        for bytes in out {
            lanes.iter_mut().for_each(|x| *x ^= *x << 13);
            lanes.iter_mut().for_each(|x| *x ^= *x >> 7);
            lanes.iter_mut().for_each(|x| *x ^= *x << 17);
            for (bytes, lane) in bytes.as_chunks_mut().0.iter_mut().zip(&lanes) {
                *bytes = lane.to_le_bytes();
            }
        }
        self.0 = lanes;
    }
}

/// The finaliser of splitmix64: every bit of the input reaches every bit of the result.
pub(super) fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_even_and_neighbours_independent() {
        let mut bytes = vec![0; 1 << 20];
        Lanes::new(1, 2, 3).fill(&mut bytes);
        let mut counts = [0u32; 256];
        bytes.iter().for_each(|&b| counts[b as usize] += 1);
        let expected = bytes.len() as f64 / 256.0;
        let chi2: f64 = counts.iter().map(|&n| (f64::from(n) - expected).powi(2) / expected).sum();
        assert!((170.0..360.0).contains(&chi2), "255 degrees of freedom: {chi2}");
        // Correlation with the next byte, the next word, the next step of the same lane, and the next row of a block.
        for distance in [1, 8, 34, 64, 128, 4096] {
            let sum: f64 = bytes
                .iter()
                .zip(&bytes[distance..])
                .map(|(&a, &b)| (f64::from(a) - 127.5) * (f64::from(b) - 127.5))
                .sum();
            let correlation = sum / (bytes.len() - distance) as f64 / 5461.25;
            assert!(correlation.abs() < 0.005, "at distance {distance}: {correlation}");
        }
    }

    #[test]
    fn parts_differ_and_a_tail_is_filled() {
        let bytes = |tensor, part| {
            let mut bytes = [0u8; 100];
            Lanes::new(7, tensor, part).fill(&mut bytes);
            bytes
        };
        assert_ne!(bytes(0, 0), bytes(0, 1));
        assert_ne!(bytes(0, 0), bytes(1, 0));
        assert_eq!(bytes(1, 1), bytes(1, 1));
        assert!(bytes(0, 0)[64..].iter().filter(|&&b| b == 0).count() < 6);
    }
}
