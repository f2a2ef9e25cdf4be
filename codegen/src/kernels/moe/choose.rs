//! The experts with the largest logits, of equal ones the lower, and the softmax over them: by a block for few rows, by a warp for each of many.

use gemma4c_dsl::prelude::*;

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

/// Lanes that count for an expert where a block has some to spare: four at most. A warp has whole experts, and all of its lanes or none.
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

/// [`choose`] for `rows` rows by a whole block, which is faster where they are few: every expert counts those that come before it, and so knows its place. `found` are the
/// logits, each left by the thread that has its place here.
#[device]
pub fn choose_together<const EXPERTS: u32, const TOP: u32, const WARPS: u32>(
    first_row: u32,
    rows: u32,
    ids: Output<u32>,
    weights: Output<f32>,
    found: Shared<f32>,
    keys: Shared<u32>,
    best: Shared<f32>,
) {
    for place in (thread_idx()..rows * EXPERTS).by(WARPS * 32) {
        keys[place] = order_key(found[place]);
    }
    barrier();
    // Neighbouring lanes share an expert.
    let lanes = lanes_of_expert(EXPERTS, WARPS);
    #[unroll(1)]
    for at in (thread_idx()..rows * EXPERTS * lanes).by(WARPS * 32) {
        let place = at / lanes;
        let part = at % lanes;
        let own = keys[place];
        let row = place / EXPERTS;
        let expert = place % EXPERTS;
        let mut before = 0u32;
        if EXPERTS % (4 * lanes) == 0 {
            #[unroll(8)]
            for first in (0..EXPERTS).by(4 * lanes) {
                let other = first + part * 4;
                let four = load::<U32x4>(keys, row * EXPERTS + other);
                before = before + if four.x > own || four.x == own && other < expert { 1 } else { 0 };
                before = before + if four.y > own || four.y == own && other + 1 < expert { 1 } else { 0 };
                before = before + if four.z > own || four.z == own && other + 2 < expert { 1 } else { 0 };
                before = before + if four.w > own || four.w == own && other + 3 < expert { 1 } else { 0 };
            }
        } else {
            #[unroll(8)]
            for other in 0..EXPERTS {
                let key = keys[row * EXPERTS + other];
                before = before + if key > own || key == own && other < expert { 1 } else { 0 };
            }
        }
        let mut mask = lanes / 2;
        #[unroll]
        while mask > 0 {
            before = before + shfl_xor(before, mask);
            mask = mask / 2;
        }
        if before < TOP && part == 0 {
            ids[(first_row + row) * TOP + before] = expert;
            best[row * TOP + before] = found[place];
        }
    }
    barrier();
    for row in (warp_id()..rows).by(WARPS) {
        let mut share = 0.0f32;
        if lane_id() < TOP {
            share = (best[row * TOP + lane_id()] - best[row * TOP]).exp();
        }
        let sum = warp_sum(share);
        if lane_id() < TOP {
            weights[(first_row + row) * TOP + lane_id()] = quotient(share, sum);
        }
    }
}

/// One warp picks the largest logits one after the other; lane j keeps the j-th. Whatever is chosen is an expert, also of logits that are not numbers.
#[device]
pub fn choose<const EXPERTS: u32, const TOP: u32>(
    row: u32,
    logits: InOut<f32>,
    ids: Output<u32>,
    weights: Output<f32>,
) {
    // Words, because the largest of a warp's is one instruction. What was chosen, and what is not there, has the smallest.
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
