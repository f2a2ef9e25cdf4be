//! Random numbers and tokens, the same on every machine.

/// Splitmix64: any mix will do.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// From 0 up to 1.
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// So many tokens of a vocabulary.
pub fn tokens(seed: u64, count: usize, vocab_size: u32) -> Vec<u32> {
    let mut random = Random::new(seed);
    (0..count).map(|_| (random.next() % vocab_size as u64) as u32).collect()
}
