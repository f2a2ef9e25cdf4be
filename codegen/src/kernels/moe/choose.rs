//! The experts with the largest logits, of equal ones the lower, and the softmax over them: by a block for few rows, by
//! a warp for each of many.

use gemma4c_dsl::prelude::*;

use super::routing::{BlockRows, RouterShape, RouterShared, RouterTile, Routing};

/// A word that is larger where the float is. What is not a number has a place in that order too.
#[device]
pub fn order_key(x: f32) -> u32 {
    // A zero has one sign.
    let bits = (x + 0.0).to_bits();
    if bits >> 31 == 1 { bits ^ 0xffffffff } else { bits | 0x80000000 }
}

/// The float of an [`order_key`].
#[device]
pub fn float_of_key(key: u32) -> f32 {
    f32::from_bits(if key >> 31 == 1 { key ^ 0x80000000 } else { key ^ 0xffffffff })
}

/// Lanes that count for an expert where a block has some to spare: four at most. A warp has whole experts, and all of
/// its lanes or none.
#[device]
pub fn lanes_of_expert(experts: u32, warps: u32) -> u32 {
    if experts % 32 != 0 {
        1
    } else if warps * 32 >= experts * 4 {
        4
    } else if warps * 32 >= experts * 2 {
        2
    } else {
        1
    }
}

/// [`choose`] for all rows of a block at once, which is faster where they are few: every expert counts those that come
/// before it, and so knows its place. The logits are in shared memory, each stored by the thread that has its place
/// here. A collective of the block.
#[device]
pub fn choose_together<const S: RouterShape, const T: RouterTile>(
    rows: BlockRows,
    memory: RouterShared,
    routing: Routing,
) {
    let count = rows.end - rows.first;
    for place in (thread_idx()..count * S.EXPERTS).by(T.WARPS * 32) {
        memory.keys[place] = order_key(memory.logits[place]);
    }
    barrier();
    // Neighbouring lanes share an expert.
    let lanes = lanes_of_expert(S.EXPERTS, T.WARPS);
    #[unroll(1)]
    for at in (thread_idx()..count * S.EXPERTS * lanes).by(T.WARPS * 32) {
        let place = at / lanes;
        let part = at % lanes;
        let own = memory.keys[place];
        let row = place / S.EXPERTS;
        let expert = place % S.EXPERTS;
        let mut before = 0u32;
        if S.EXPERTS % (4 * lanes) == 0 {
            #[unroll(8)]
            for first in (0u32..S.EXPERTS).by(4 * lanes) {
                let other = first + part * 4;
                let four = load::<U32x4>(memory.keys, row * S.EXPERTS + other);
                before = before + if four.x > own || four.x == own && other < expert { 1 } else { 0 };
                before = before + if four.y > own || four.y == own && other + 1 < expert { 1 } else { 0 };
                before = before + if four.z > own || four.z == own && other + 2 < expert { 1 } else { 0 };
                before = before + if four.w > own || four.w == own && other + 3 < expert { 1 } else { 0 };
            }
        } else {
            #[unroll(8)]
            for other in 0u32..S.EXPERTS {
                let key = memory.keys[row * S.EXPERTS + other];
                before = before + if key > own || key == own && other < expert { 1 } else { 0 };
            }
        }
        let mut mask = lanes / 2;
        #[unroll]
        while mask > 0 {
            before = before + shfl_xor(before, mask);
            mask = mask / 2;
        }
        if before < S.TOP && part == 0 {
            routing.ids[(rows.first + row) * S.TOP + before] = expert;
            memory.best[row * S.TOP + before] = memory.logits[place];
        }
    }
    barrier();
    for row in (warp_id()..count).by(T.WARPS) {
        let mut share = 0.0f32;
        if lane_id() < S.TOP {
            share = (memory.best[row * S.TOP + lane_id()] - memory.best[row * S.TOP]).exp();
        }
        let sum = warp_sum(share);
        if lane_id() < S.TOP {
            routing.shares[(rows.first + row) * S.TOP + lane_id()] = quotient(share, sum);
        }
    }
}

/// The first block of a cluster collects the logits of its peers, an expert for each of their warps, and chooses. The
/// others may end as soon as all blocks have come to `cluster_wait()`, which the caller executes.
#[device]
pub fn choose_in_cluster<const S: RouterShape, const T: RouterTile>(
    rows: BlockRows,
    memory: RouterShared,
    routing: Routing,
) {
    cluster_barrier();
    let chooses = cluster_rank() == 0;
    if chooses {
        #[unroll(1)]
        for place in (thread_idx()..(rows.end - rows.first) * S.EXPERTS).by(T.WARPS * 32) {
            memory.logits[place] = load_peer::<f32>(memory.logits, place, place % S.EXPERTS / T.WARPS);
        }
    }
    cluster_arrive();
    if chooses {
        choose_together(rows, memory, routing);
    }
}

/// The last block of those that share the rows reads all of their logits, and chooses.
#[device]
pub fn choose_in_last_block<const S: RouterShape, const T: RouterTile>(
    rows: BlockRows,
    memory: RouterShared,
    routing: Routing,
) {
    if last_block_of(routing.counter, block_idx(), grid_dim_y()) {
        for place in (thread_idx()..(rows.end - rows.first) * S.EXPERTS).by(T.WARPS * 32) {
            memory.logits[place] = routing.logits[rows.first * S.EXPERTS + place];
        }
        choose_together(rows, memory, routing);
    }
}

/// A block that has all experts chooses by a warp for each row. A collective of the block.
#[device]
pub fn choose_by_warps<const T: RouterTile>(rows: BlockRows, routing: Routing) {
    barrier();
    for row in (rows.first + warp_id()..rows.end).by(T.WARPS) {
        choose(row, routing.logits, routing.ids, routing.shares);
    }
}

/// One warp picks the largest logits one after the other; lane j keeps the j-th. Whatever is chosen is an expert, also
/// of logits that are not numbers.
#[device]
pub fn choose<const EXPERTS: u32, const TOP: u32>(
    row: u32,
    logits: InOut<f32>,
    ids: Output<u32>,
    weights: Output<f32>,
) {
    // Words, because the largest of a warp's is one instruction. What was chosen, and what is not there, has the
    // smallest.
    let mut own = regs(0u32, (EXPERTS + 31) / 32);
    #[unroll]
    for i in 0..(EXPERTS + 31) / 32 {
        if lane_id() + i * 32 < EXPERTS {
            own[i] = order_key(logits[row * EXPERTS + lane_id() + i * 32]);
        }
    }
    let mut largest = 0u32;
    let mut kept = 0u32;
    let mut kept_id = 0u32;
    for j in 0..TOP {
        let mut best = 0u32;
        let mut id = EXPERTS - 1;
        // From the back, so that the lower of two equals stays.
        #[unroll]
        for back in 0..(EXPERTS + 31) / 32 {
            let i = (EXPERTS + 31) / 32 - 1 - back;
            if own[i] >= best {
                best = own[i];
                id = lane_id() + i * 32;
            }
        }
        let winner = warp_largest(best);
        // The lowest expert of those with it is the farthest from the end.
        let from_end = warp_largest(if best == winner { EXPERTS - 1 - id.min(EXPERTS - 1) } else { 0 });
        let chosen = EXPERTS - 1 - from_end;
        #[unroll]
        for i in 0..(EXPERTS + 31) / 32 {
            if lane_id() + i * 32 == chosen {
                own[i] = 0;
            }
        }
        if j == 0 {
            largest = winner;
        }
        if lane_id() == j {
            kept = winner;
            kept_id = chosen;
        }
    }
    let mut share = 0.0f32;
    if lane_id() < TOP {
        share = (float_of_key(kept) - float_of_key(largest)).exp();
    }
    let sum = warp_sum(share);
    if lane_id() < TOP {
        ids[row * TOP + lane_id()] = kept_id;
        weights[row * TOP + lane_id()] = quotient(share, sum);
    }
}
