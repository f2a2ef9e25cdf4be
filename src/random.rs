//! Random tokens, the same on every machine.

/// So many tokens of a vocabulary.
pub fn tokens(seed: u64, count: usize, vocab_size: u32) -> Vec<u32> {
    let mut state = seed;
    let token = |_| {
        // Splitmix64: any mix will do.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % vocab_size as u64) as u32
    };
    (0..count).map(token).collect()
}
