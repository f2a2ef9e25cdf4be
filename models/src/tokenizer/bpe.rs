//! Rank BPE: the merge rules of a vocabulary, and the loop that applies them to one fragment of text.
//!
//! A fragment is one word to Gemma 4 (nothing splits it at spaces), so it may be a whole book: the loop is a linked
//! list of symbols and a heap of possible merges, O(n log n) whatever the text. The rules are looked up in an index
//! sorted by their left and right token rather than in a hash table, so that no vocabulary can make it slow.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use gemma4c_plan::Merge;

/// The merge rules, by rank and by pair. All ids are below the number of tokens it was built for.
#[derive(Debug)]
pub(super) struct Merges {
    by_rank: Vec<Merge>,
    /// Where the rules of left token `t` begin in `by_pair`; one entry more than there are tokens.
    starts: Vec<u32>,
    by_pair: Vec<RightAndRank>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct RightAndRank {
    right: u32,
    rank: u32,
}

impl Merges {
    /// The ids in `merges` must have been checked to be below `tokens`, and the number of merges to fit in 32 bits.
    pub(super) fn new(merges: &[Merge], tokens: usize) -> Merges {
        let mut starts = vec![0u32; tokens + 1];
        for merge in merges {
            starts[merge.left as usize + 1] += 1;
        }
        for token in 0..tokens {
            starts[token + 1] += starts[token];
        }
        let mut free = starts.clone();
        let mut by_pair = vec![RightAndRank::default(); merges.len()];
        for (rank, merge) in merges.iter().enumerate() {
            let slot = &mut free[merge.left as usize];
            by_pair[*slot as usize] = RightAndRank { right: merge.right, rank: rank as u32 };
            *slot += 1;
        }
        for range in starts.windows(2) {
            by_pair[range[0] as usize..range[1] as usize].sort_unstable();
        }
        Merges { by_rank: merges.to_vec(), starts, by_pair }
    }

    /// The best (lowest) rank at which the two tokens merge.
    fn rank(&self, left: u32, right: u32) -> Option<u32> {
        let left = left as usize;
        let rules = &self.by_pair[self.starts[left] as usize..self.starts[left + 1] as usize];
        let first = rules.partition_point(|rule| rule.right < right);
        rules.get(first).filter(|rule| rule.right == right).map(|rule| rule.rank)
    }

    /// Merges until no rule applies, lowest rank first and leftmost among equals, and appends what is left to `out`.
    pub(super) fn apply(&self, initial: &[u32], out: &mut Vec<u32>) {
        // Positions are 32-bit to halve the working set. No merge rule sees across the seam of two 4 Gi-symbol chunks;
        // a prompt of that size has other problems.
        for word in initial.chunks(NOWHERE as usize) {
            self.apply_to_word(word, out);
        }
    }

    fn apply_to_word(&self, word: &[u32], out: &mut Vec<u32>) {
        let mut symbols: Vec<Symbol> = (0u32..)
            .zip(word)
            .map(|(at, &token)| Symbol { token, before: at.wrapping_sub(1), after: at + 1 })
            .collect();
        let Some(last) = symbols.last_mut() else { return };
        last.after = NOWHERE;

        let ranks = word.windows(2).map(|pair| self.rank(pair[0], pair[1]));
        let mut queue: BinaryHeap<Reverse<Candidate>> =
            (0u32..).zip(ranks).filter_map(|(at, rank)| Some(Reverse(Candidate { rank: rank?, at }))).collect();

        while let Some(Reverse(Candidate { rank, at })) = queue.pop() {
            let rule = self.by_rank[rank as usize];
            let Symbol { token, before, after: absorbed } = symbols[at as usize];
            // A candidate goes stale when an earlier merge took one of its two symbols.
            if token != rule.left || absorbed == NOWHERE || symbols[absorbed as usize].token != rule.right {
                continue;
            }
            let after = symbols[absorbed as usize].after;
            symbols[absorbed as usize].token = GONE;
            symbols[at as usize] = Symbol { token: rule.result, before, after };
            if before != NOWHERE
                && let Some(rank) = self.rank(symbols[before as usize].token, rule.result)
            {
                queue.push(Reverse(Candidate { rank, at: before }));
            }
            if after != NOWHERE {
                symbols[after as usize].before = at;
                if let Some(rank) = self.rank(rule.result, symbols[after as usize].token) {
                    queue.push(Reverse(Candidate { rank, at }));
                }
            }
        }
        // The first symbol is only ever the left one of a merge, so it is still there.
        let mut at = 0;
        while at != NOWHERE {
            out.push(symbols[at as usize].token);
            at = symbols[at as usize].after;
        }
    }
}

/// The end of the list, on either side.
const NOWHERE: u32 = u32::MAX;
/// The token of a symbol that was merged into the one before it: no rule names it.
const GONE: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Symbol {
    token: u32,
    before: u32,
    after: u32,
}

/// A merge that may still apply: of the symbol at `at` with the one after it. The order is the one merges happen in.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    rank: u32,
    at: u32,
}
