//! Values from all blocks of a running grid to all of them, without a fence.
//!
//! Validity travels with the datum: a packet is one relaxed access that carries values and the epoch of the launch that made them. A
//! reader that finds the epoch has the values, whatever order stores become visible in; all it needs is that an access of 8 or 16 bytes is whole. Nothing is ever
//! reset, and nothing else has to be ordered. A packet of 8 bytes has one float; of 16 bytes three words.
//!
//! Packets that are not there yet would be asked for again and again by all threads of all SMs, so that a counter is looked at first, by one thread a
//! block: every block adds to it when it has published. The counter is a hint. It orders nothing, and a reader that it sends too early asks again. It has
//! copies, so that not all SMs ask for one place.
//!
//! Blocks wait for each other: all of a grid must be resident, or none. Every wait is bounded. Whoever has waited in vain goes on with NaN, which reaches the
//! logits, of which then no token is picked: an error, and no hang.

use gemma4c_dsl::prelude::*;

use crate::kernels::matvec::parts::part_at;

/// Copies of a counter.
pub const COPIES: u32 = 8;

/// Publishes value `at` of a vector of `count` that starts at word `to`. All first values of fours lie behind each other, then all second ones: a warp reads whole lines.
#[device]
pub fn publish_float(exchange: InOut<u32>, to: u32, at: u32, count: u32, value: f32, epoch: u32) {
    atomic_store_relaxed(exchange, to + (at % 4 * (count / 4) + at / 4) * 2, u32x2(value.to_bits(), epoch));
}

/// Four neighbouring values, from value `at` on, of a vector of `count` that starts at word `from`; NaN if they do not come. All are asked for at once.
#[device]
pub fn receive_four(exchange: InOut<u32>, from: u32, at: u32, count: u32, epoch: u32) -> F32x4 {
    let first = from + at / 2;
    let next = count / 2;
    let mut a = atomic_load_relaxed::<U32x2>(exchange, first);
    let mut b = atomic_load_relaxed::<U32x2>(exchange, first + next);
    let mut c = atomic_load_relaxed::<U32x2>(exchange, first + 2 * next);
    let mut d = atomic_load_relaxed::<U32x2>(exchange, first + 3 * next);
    let mut polls = 0u32;
    while (a.y != epoch || b.y != epoch || c.y != epoch || d.y != epoch) && polls < 0x4000 {
        polls += 1;
        a = atomic_load_relaxed::<U32x2>(exchange, first);
        b = atomic_load_relaxed::<U32x2>(exchange, first + next);
        c = atomic_load_relaxed::<U32x2>(exchange, first + 2 * next);
        d = atomic_load_relaxed::<U32x2>(exchange, first + 3 * next);
    }
    let lost = if polls < 0x4000 { 0u32 } else { 0x7fff_ffff };
    f32x4(f32::from_bits(a.x | lost), f32::from_bits(b.x), f32::from_bits(c.x), f32::from_bits(d.x))
}

/// Publishes a group of 32 codes of which lanes 0 to 7 have four each, with its scale and sum: four packets of three words, the last of which is
/// scale and sum. A collective of the warp.
#[device]
pub fn publish_group(exchange: InOut<u32>, to: u32, group: u32, quantised: U32x4, epoch: u32) {
    let first = lane_id() % 4 * 3;
    let a = shfl_idx(quantised.x, first);
    let b = shfl_idx(quantised.x, first + 1);
    // The third packet has two words of codes.
    let c = shfl_idx(quantised.x, (first + 2) % 8);
    if lane_id() < 3 {
        atomic_store_relaxed(exchange, to + (group * 4 + lane_id()) * 4, u32x4(a, b, c, epoch));
    }
    if lane_id() == 3 {
        let last = u32x4(quantised.y, quantised.z, 0, epoch);
        atomic_store_relaxed(exchange, to + (group * 4 + 3) * 4, last);
    }
}

/// Receives all codes of a vector of `groups` groups into shared memory, as the products read them. All threads of the first WARPS warps take part.
#[device]
pub fn receive_codes<const UNIT: u32, const INTEGER: bool, const WARPS: u32>(
    exchange: InOut<u32>,
    from: u32,
    groups: u32,
    epoch: u32,
    words: Shared<u32>,
    scales: Shared<U32x2>,
) {
    let units = groups * 32 / UNIT;
    #[unroll(4)]
    for at in (thread_idx()..groups * 4).by(WARPS * 32) {
        let mut packet = atomic_load_relaxed::<U32x4>(exchange, from + at * 4);
        let mut polls = 0u32;
        while packet.w != epoch && polls < 0x4000 {
            polls += 1;
            packet = atomic_load_relaxed::<U32x4>(exchange, from + at * 4);
        }
        let first = at / 4 * 8 + at % 4 * 3;
        if at % 4 == 3 {
            scales[at / 4] = u32x2(if polls < 0x4000 { packet.x } else { 0x7fff_ffff }, packet.y);
        } else {
            words[part_at(first / 4, units) + first % 4] = packet.x;
            words[part_at((first + 1) / 4, units) + (first + 1) % 4] = packet.y;
            if at % 4 < 2 {
                words[part_at((first + 2) / 4, units) + (first + 2) % 4] = packet.z;
            }
        }
    }
}

/// Says that this block has published: its first threads add to the counter's copies.
#[device]
pub fn say_published(counters: InOut<u32>, counter: u32) {
    if thread_idx() < 8 {
        atomic_add(counters, counter * 8 + thread_idx(), 1u32);
    }
}

/// Waits until as many blocks have published, in all launches, or gives up. One thread a block.
#[device]
pub fn await_published(counters: InOut<u32>, counter: u32, count: u32) {
    let copy = counter * 8 + block_idx() % 8;
    let mut seen = atomic_load_relaxed::<u32>(counters, copy);
    let mut polls = 0u32;
    // The count wraps around.
    while count.wrapping_sub(seen).wrapping_sub(1) < 0x8000_0000 && polls < 0x10_0000 {
        polls += 1;
        seen = atomic_load_relaxed::<u32>(counters, copy);
    }
}
