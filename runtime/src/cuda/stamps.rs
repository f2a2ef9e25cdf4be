//! The times that stamped kernels have left: when the blocks of each launch started, were released by the launch
//! before, and ended.

use std::collections::HashSet;

use gemma4c_plan::stamps::{ASKED, BLOCKS, END, LAUNCHES, PLACE, RELEASED, START, SYMBOL, WORDS};

use super::{CudaError, Function};

/// The first and the last of all blocks, in nanoseconds of the GPU's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub first: u64,
    pub last: u64,
}

/// A launch as its blocks saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chained {
    pub started: Span,
    /// When blocks began to wait for the launch before.
    pub asked: Span,
    pub released: Span,
    pub ended: Span,
    /// Nanoseconds from a block's end to the end of the last one, on average: how unevenly the work is shared out, or
    /// the memory.
    pub uneven: u64,
    pub blocks: u32,
    /// SMs that had blocks of it.
    pub multiprocessors: u32,
}

/// What a kernel has left; `None` where it is not stamped.
pub(super) fn read(kernel: &Function) -> Result<Option<Vec<u64>>, CudaError> {
    kernel.variable(SYMBOL, BLOCKS * LAUNCHES * WORDS)
}

/// The last launches that a kernel's stamps tell of, the earliest first. One whose blocks are not all there is left
/// out: it is older than what is kept.
pub(super) fn launches(words: &[u64]) -> Vec<Chained> {
    let mut blocks: Vec<(usize, &[u64])> = words
        .chunks_exact(LAUNCHES * WORDS)
        .enumerate()
        .flat_map(|(block, of_block)| of_block.chunks_exact(WORDS).map(move |of_launch| (block, of_launch)))
        .filter(|(_, of_launch)| of_launch[END] > 0)
        .collect();
    blocks.sort_by_key(|(_, of_launch)| of_launch[END]);
    // A launch ends before the next one of the same kernel does, so where a block comes again, or one of another grid,
    // the next begins.
    let grid = |of_launch: &[u64]| (of_launch[PLACE] >> 32) as usize;
    let mut launches: Vec<Vec<&[u64]>> = Vec::new();
    let mut seen = HashSet::new();
    for (block, of_launch) in blocks {
        match launches.last_mut().filter(|launch| grid(launch[0]) == grid(of_launch) && !seen.contains(&block)) {
            Some(launch) => launch.push(of_launch),
            None => {
                launches.push(vec![of_launch]);
                seen.clear();
            }
        }
        seen.insert(block);
    }
    launches.retain(|launch| launch.iter().all(|block| grid(block).min(BLOCKS) == launch.len()));
    let summed = |launch: Vec<&[u64]>| {
        let span = |word: usize| {
            let times = || launch.iter().map(|block| block[word]);
            Span { first: times().min().unwrap_or(0), last: times().max().unwrap_or(0) }
        };
        let ended = span(END);
        let waits: u64 = launch.iter().map(|block| ended.last - block[END]).sum();
        let places: HashSet<u32> = launch.iter().map(|block| block[PLACE] as u32).collect();
        Chained {
            started: span(START),
            asked: span(ASKED),
            released: span(RELEASED),
            ended,
            uneven: waits / launch.len() as u64,
            blocks: grid(launch[0]) as u32,
            multiprocessors: places.len() as u32,
        }
    };
    launches.into_iter().map(summed).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Leaves a block's times, as the launch of that number does.
    fn leave(words: &mut [u64], block: usize, launch: usize, grid: u64, times: [u64; 4]) {
        let at = (block * LAUNCHES + launch % LAUNCHES) * WORDS;
        words[at..at + 4].copy_from_slice(&times);
        words[at + PLACE] = grid << 32 | (block as u64 % 3);
    }

    #[test]
    fn launches_are_told_apart_and_the_cut_one_is_left_out() {
        let mut words = vec![0; BLOCKS * LAUNCHES * WORDS];
        for launch in 0..LAUNCHES + 2 {
            let from = 1000 * launch as u64;
            leave(&mut words, 0, launch, 2, [from + 10, from + 20, from + 30, from + 100]);
            leave(&mut words, 1, launch, 2, [from + 5, from + 25, from + 31, from + 90]);
        }
        let found = launches(&words);
        assert_eq!(found.len(), LAUNCHES);
        assert_eq!(
            found[LAUNCHES - 1],
            Chained {
                started: Span { first: 9005, last: 9010 },
                asked: Span { first: 9020, last: 9025 },
                released: Span { first: 9030, last: 9031 },
                ended: Span { first: 9090, last: 9100 },
                uneven: 5,
                blocks: 2,
                multiprocessors: 2,
            }
        );
        // Of the ninth launch only one block has ended so far.
        leave(&mut words, 0, LAUNCHES + 2, 2, [20010, 20020, 20030, 20100]);
        let found = launches(&words);
        assert_eq!((found.len(), found[0].started.first), (LAUNCHES - 1, 3005));
    }

    #[test]
    fn launches_of_one_kernel_may_have_other_grids() {
        let mut words = vec![0; BLOCKS * LAUNCHES * WORDS];
        leave(&mut words, 0, 0, 1, [10, 20, 30, 100]);
        // The block that was not in the grid before ends first.
        leave(&mut words, 1, 0, 2, [110, 120, 130, 190]);
        leave(&mut words, 0, 1, 2, [110, 120, 130, 200]);
        let ends: Vec<(u32, u64)> = launches(&words).iter().map(|found| (found.blocks, found.ended.last)).collect();
        assert_eq!(ends, [(1, 100), (2, 200)]);
    }

    #[test]
    fn nothing_left_is_no_launch() {
        assert_eq!(launches(&vec![0; BLOCKS * LAUNCHES * WORDS]), []);
        assert_eq!(launches(&[]), []);
    }
}
