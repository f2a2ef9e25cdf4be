//! What a warpgroup does that multiplies and does nothing else: other warps fill a ring of stages, and mbarriers say which of them are full.
//!
//! Who fills the ring differs: bulk copies ([`tiles`](super::tiles)), warpgroups that decode for one ([`team`](super::team)) or for several ([`fed`](super::fed)). What follows does not, so it is
//! here. Not here: filling, storing the sums, and products whose warpgroups copy or decode for themselves.

use gemma4c_dsl::prelude::*;

/// The products of a tile: of each of `steps` stages of 64 values of K, from stage `stage` on. A stage has `of_left` values of the left operand and `of_right` of the right one. A stage is empty again once the
/// products behind it are on their way, so that one stays in use. `sums`, which has `count` values, starts at zero. A collective of the warpgroup.
#[device]
pub fn multiply_ring<const STAGES: u32>(
    sums: &mut Regs<f32>,
    count: u32,
    stage: &mut u32,
    parity: &mut u32,
    steps: u32,
    left: Shared<BF16>,
    of_left: u32,
    right: Shared<BF16>,
    of_right: u32,
    full: Shared<u64>,
    empty: Shared<u64>,
) {
    #[unroll]
    for i in 0..count {
        sums[i] = 0.0;
    }
    let mut last = STAGES;
    for step in 0..steps {
        mbarrier_wait(full, *stage, *parity);
        let left_tile = left.offset(*stage * of_left);
        let right_tile = right.offset(*stage * of_right);
        wgmma_fence(sums);
        #[unroll]
        for i in 0u32..4 {
            wgmma_bf16(sums, left_tile.offset(i * 16), right_tile.offset(i * 16));
        }
        wgmma_commit();
        wgmma_wait(1, sums);
        // The products of the step before have read their operands.
        warp_barrier();
        if lane_id() == 0 && last < STAGES {
            mbarrier_arrive(empty, last);
        }
        last = *stage;
        *stage += 1;
        if *stage == STAGES {
            *stage = 0;
            *parity = 1 - *parity;
        }
    }
    wgmma_wait(0, sums);
    warp_barrier();
    if lane_id() == 0 {
        mbarrier_arrive(empty, last);
    }
}
