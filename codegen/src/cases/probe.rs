//! Cases of the memory probe.

use gemma4c_dsl::harness::{Bound, Case, Random};

use crate::kernels::probe;

const THREADS: u32 = 64;

/// The exclusive or of the groups that each thread of the grid reads: every `threads`-th one.
fn oracle(words: &[u32], threads: usize) -> Vec<u32> {
    let mut folded = vec![0; threads];
    for (group, four) in words.chunks(4).enumerate() {
        folded[group % threads] ^= four.iter().fold(0, |fold, word| fold ^ word);
    }
    folded
}

pub fn cases() -> Vec<Case> {
    let shapes = [(1, 1, 4), (1, 64, 4), (3, 191, 2), (2, 1025, 4), (3, 1600, 8)];
    shapes.map(|(blocks, count, ahead)| case(blocks, count, ahead)).into()
}

fn case(blocks: u32, count: u32, ahead: u32) -> Case {
    let mut random = Random::new(u64::from(count));
    let words: Vec<u32> = (0..count * 4).map(|_| random.bits() as u32).collect();
    let folded = oracle(&words, (blocks * THREADS) as usize);
    let instance = probe::instance(THREADS, ahead).expect("64 threads are a block");
    Case::new(format!("{count} groups, {blocks} blocks, {ahead} ahead"), instance)
        .grid([blocks, 1, 1])
        .buffer("words", words)
        .scalar("count", count)
        .expect("folded", folded, Bound::Exact)
}
