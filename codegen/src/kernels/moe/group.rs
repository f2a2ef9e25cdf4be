//! Rows sorted by expert, for the products of many rows: each expert's weights are read once for all rows that chose
//! it.
//!
//! A row and one of its choices are a pair; pairs are stored as `[rows][top]`. Sorted they are an `order`: pair after
//! pair, expert by expert, those of an expert as they come. It is cut into `groups` of at most so many pairs of one
//! expert, a tile's height, and a product makes a tile for each group. Counting is in whole numbers, so the order does
//! not depend on timing; and what a product makes of a row does not depend on its neighbours in a tile.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

/// Sorts the pairs of all rows. Block e lists those of expert e, for which it counts all of them: `order` gets pairs,
/// `groups` first how many groups there are, then each as (its first place in `order`, the place behind its last, its
/// expert, 0).
#[kernel(block = THREADS, dependent)]
pub fn group_pairs<const EXPERTS: u32, const HEIGHT: u32, const THREADS: u32>(
    ids: Input<u32>,
    state: Input<u32>,
    order: Output<u32>,
    groups: Output<U32x4>,
    top: u32,
) {
    let counts = shared::<u32>(EXPERTS);
    let of_warps = shared::<u32>(THREADS / 32);
    grid_launch_dependents();
    grid_dependency_wait();
    let pairs = state[1u32] * top;
    let expert = block_idx();
    for e in (thread_idx()..EXPERTS).by(THREADS) {
        counts[e] = 0;
    }
    barrier();
    // Each warp takes a run of pairs, so that those before it are other warps'.
    let run = pairs.div_ceil(THREADS) * 32;
    let first = warp_id() * run;
    let mut own = 0u32;
    #[unroll(4)]
    for at in (first + lane_id()..first + run).by(32) {
        if at < pairs {
            let id = ids[at];
            atomic_add(counts, id, 1);
            if id == expert {
                own = own + 1;
            }
        }
    }
    own = warp_sum(own);
    if lane_id() == 0 {
        of_warps[warp_id()] = own;
    }
    barrier();

    let mut before = 0u32;
    let mut groups_before = 0u32;
    let mut all_groups = 0u32;
    for e in (thread_idx()..EXPERTS).by(THREADS) {
        let of_expert = counts[e].div_ceil(HEIGHT);
        all_groups = all_groups + of_expert;
        if e < expert {
            before = before + counts[e];
            groups_before = groups_before + of_expert;
        }
    }
    before = block_sum(before);
    groups_before = block_sum(groups_before);
    all_groups = block_sum(all_groups);
    if expert == 0 && thread_idx() == 0 {
        groups[0u32] = u32x4(all_groups, 0, 0, 0);
    }
    let end = before + counts[expert];
    for g in (thread_idx()..counts[expert].div_ceil(HEIGHT)).by(THREADS) {
        let start = before + g * HEIGHT;
        groups[1 + groups_before + g] = u32x4(start, (start + HEIGHT).min(end), expert, 0);
    }

    let mut next = before;
    for warp in 0..warp_id() {
        next = next + of_warps[warp];
    }
    for start in (first..first + run).by(32) {
        let at = start + lane_id();
        let mut is_own = false;
        if at < pairs {
            is_own = ids[at] == expert;
        }
        let all_own = ballot(is_own);
        if is_own {
            order[next + (all_own & (1u32 << lane_id()) - 1).count_ones()] = at;
        }
        next = next + all_own.count_ones();
    }
}

/// A sort: everything that decides its instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grouping {
    pub experts: u32,
    /// Pairs of a group, at most.
    pub height: u32,
    /// Pairs of all rows, at most.
    pub pairs: u32,
}

impl Grouping {
    /// On a grid `[experts]`.
    pub fn instance(&self) -> Result<Instance, InstanceError> {
        let threads = self.pairs.div_ceil(16).next_power_of_two().clamp(64, 1024);
        group_pairs::Chosen { EXPERTS: self.experts, HEIGHT: self.height, THREADS: threads }.build()
    }

    /// Groups, at most: the last one of each expert may not be full.
    pub fn most_groups(&self) -> u32 {
        let experts = self.experts.min(self.pairs);
        experts + (self.pairs - experts) / self.height
    }
}
