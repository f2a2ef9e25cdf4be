//! Consecutive products of a decoded row in one launch, which never stops reading weights.
//!
//! A launch of its own costs a product 2.8 us on an H200 beyond its bytes: the grid drains, the next one loads the vector, and meanwhile little is on its way from
//! memory. Here the grid stays: a block an SM goes from product to product. Between two products all blocks [exchange](exchange) the
//! vector that the one leaves and the other takes.
//!
//! ```text
//! producer (a warp)    ──► bulk copies ──► ring of stages ──► consumers (WARPS warps): wait for the vector, norm, quantise, multiply, publish
//! all products' weights,                                       product after product
//! in the order of use
//! ```
//!
//! The producer runs through the list of products and never stops at the end of one: while the consumers wait for a vector, the ring fills with the next
//! product's weights. It keeps AHEAD stages under way and no more: an SM streams best with about 40 KB on their way, and more of them lengthen everybody's latency.
//! A stage holds whole rows of weights, codes and then what lies beside them, and belongs to a team of TEAM warps, which share out its outputs.
//!
//! Every product has the bits of [`matvec`](super::matvec): 32 lanes to a row, the same order of sums, the same prologues. The residual stays in registers, in every block.
//!
//! What it does not do: products of float weights, of types with more than one plane beside the codes, and whatever is not a product of one row.

pub mod exchange;
pub mod list;

use gemma4c_dsl::prelude::*;

use crate::kernels::gelu::gelu;
use crate::kernels::matvec::lanes_sum;
use crate::kernels::matvec::parts::{
    Unit, UnitActivations, activations_at, chunk_slots, dot_fine, inverse_rms_of_chunks, keep_codes, keep_fine,
    leave_chunks, part_at, second_part_at,
};
use crate::kernels::matvec::slots::{weighted, with_update};
use crate::kernels::quantise::{fine_codes, quantise4, quantise4_unbounded};
use exchange::{await_published, publish_float, publish_group, receive_codes, receive_four, say_published};

/// A unit of a row of weights that lies in shared memory, and what lies beside it: `number` counts units from the first of `sides`.
#[device]
pub fn unit_at<const PER_WORD: u32>(codes: Shared<u32>, unit: u32, sides: Shared<u32>, number: u32) -> Unit {
    Unit { codes: load::<U32x4>(codes, unit * 4), side: u32x4(sides[number / PER_WORD], 0, 0, 0) }
}

/// How many units before unit `number` of a matrix its side is copied from: 16 bytes is the least that is copied.
#[device]
pub fn side_lead<const PER_WORD: u32>(number: u32) -> u32 {
    number % (4 * PER_WORD)
}

/// Words of sides, whole pieces of 16 bytes, that `units` units take which are `lead` units behind such a piece's start.
#[device]
pub fn side_span<const PER_WORD: u32>(lead: u32, units: u32) -> u32 {
    (lead + units).div_ceil(4 * PER_WORD) * 4
}

/// A row of `units` units times the activations, in the order of stretches, for lane 0. `number` is that of its first unit, as [`unit_at`] counts. A collective of the warp.
#[device(slots(dot(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32))]
pub fn row_product<const UNIT: u32, const INTEGER: bool, const PER_WORD: u32, const JOINED: bool>(
    codes: Shared<u32>,
    sides: Shared<u32>,
    number: u32,
    units: u32,
    words: Shared<u32>,
    scales: Shared<U32x2>,
) -> f32 {
    let stretch = units.div_ceil(32) * 8;
    let first = lane_id() / 8 * stretch;
    let stop = (first + stretch).min(units);
    let mut sum = 0.0f32;
    #[unroll(5)]
    for step in (0..stretch).by(8) {
        let at = first + lane_id() % 8 + step;
        let unit = at.min(units - 1);
        let x = activations_at(unit, unit * UNIT / 32, units, words, scales);
        let total = dot(unit_at(codes, unit, sides, number + unit), number + unit, x, sum);
        if at < stop {
            sum = total;
        }
    }
    lanes_sum(sum, 32, JOINED, true)
}

/// A row times activations with fine codes: all lanes take units in turn. For every lane. A collective of the warp.
#[device(slots(dot(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32))]
pub fn fine_product<const K: u32, const UNIT: u32, const INTEGER: bool, const PER_WORD: u32>(
    codes: Shared<u32>,
    sides: Shared<u32>,
    number: u32,
    words: Shared<u32>,
    scales: Shared<U32x2>,
    fine_sums: Shared<i32>,
) -> f32 {
    let units = K / UNIT;
    let mut sum = 0.0f32;
    for step in (0..units).by(32) {
        let at = lane_id() + step;
        let unit = at.min(units - 1);
        let mut x = activations_at(unit, unit * UNIT / 32, units, words, scales);
        let is_fine = x.scale < 0.0;
        x.scale = x.scale.abs();
        let held = unit_at(codes, unit, sides, number + unit);
        let mut total = dot(held, number + unit, x, sum);
        if is_fine {
            let second = second_part_at(unit, units);
            let of_group = fine_sums[unit * UNIT / 32];
            total = dot_fine(dot, held, number + unit, unit * 4, second, x.scale, of_group, total, words);
        }
        if at < units {
            sum = total;
        }
    }
    warp_sum(sum)
}

/// Products behind each other. `list` has [`OP_WORDS`](list::OP_WORDS) words for each of `ops` products, then which outputs each block has: [`list`] makes it. `weights`, `wide`
/// and `floats` are all weights, from the first. The first product takes the int8 of `xq`; `x` is the residual before it.
/// `exchange` and `counters` are zero before the first launch of all, and nobody else's. Launches of the `runs` runs of a token share `exchange`; `run` is which this one is.
#[kernel(block = (WARPS + 1) * 32, min_blocks = 1, dependent, dynamic_shared, slots(
    dot(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32,
    lone_dot(unit: Unit, number: u32, x: UnitActivations, total: f32) -> f32
))]
pub fn product_run<
    const K: u32,
    const MOST_K: u32,
    const UNIT: u32,
    const INTEGER: bool,
    const PER_WORD: u32,
    const JOINED: bool,
    const FINE: bool,
    const WARPS: u32,
    const TEAM: u32,
    const PIECES: u32,
    const STAGES: u32,
    const STAGE_WORDS: u32,
    const AHEAD: u32,
    const SHARE: u32,
    const EPSILON: f32,
>(
    list: Weights<u32>,
    weights: Weights<u32>,
    floats: Weights<f32>,
    xq: Input<u32>,
    xscale: Input<f32>,
    xsum: Input<i32>,
    x: Input<f32>,
    by: Input<f32>,
    residual: Output<f32>,
    out: Output<f32>,
    exchange: InOut<u32>,
    counters: InOut<u32>,
    ops: u32,
    run: u32,
    runs: u32,
) {
    require!(INTEGER && K % 32 == 0 && K <= PIECES * WARPS * 128 && K <= MOST_K);
    // A team meets the same slots again and again, so that it never waits for a phase whose predecessor it has not seen: phases have a parity and no number.
    require!(WARPS % TEAM == 0 && STAGES % (WARPS / TEAM) == 0 && AHEAD <= STAGES && STAGE_WORDS % 4 == 0);
    let ring = shared::<u32>(STAGES * STAGE_WORDS);
    let x_words = shared::<u32>(if FINE && 3 * K > MOST_K { 3 * K / 4 } else { MOST_K / 4 });
    let x_scales = shared::<U32x2>(MOST_K / 32);
    let fine_sums = shared::<i32>(if FINE { K / 32 } else { 1 });
    let posts = shared::<f32>(K);
    let nexts = shared::<f32>(K);
    let of_updates = shared::<f32>(chunk_slots(K));
    let of_residual = shared::<f32>(chunk_slots(K));
    let results = shared::<f32>(SHARE);
    let full = shared::<u64>(STAGES);
    let empty = shared::<u64>(STAGES);

    // The list, and where the block's share of each product starts and ends.
    let listed = shared::<u32>(144);
    for i in (thread_idx()..ops * 16).by((WARPS + 1) * 32) {
        listed[i] = list[i];
    }
    if thread_idx() < ops * 2 {
        listed[128 + thread_idx()] =
            list[ops * 16 + thread_idx() / 2 * (grid_dim() + 1) + block_idx() + thread_idx() % 2];
    }
    if thread_idx() < STAGES {
        mbarrier_init(full, thread_idx(), 1);
        mbarrier_init(empty, thread_idx(), TEAM);
        fence_proxy_async();
    }
    barrier();

    if warp_id() == WARPS {
        // The producer. Stages are counted through all products; a stage's slot and phase follow from its number.
        if lane_id() == 0 {
            let mut stage = 0u32;
            for op in 0..ops {
                let shape = load::<U32x4>(listed, op * 16);
                let places = load::<U32x4>(listed, op * 16 + 4);
                let units = shape.z / UNIT;
                let joins = shape.y == 2;
                let halves = if joins { 2u32 } else { 1u32 };
                let each = listed[op * 16 + 9];
                let end = listed[128 + op * 2 + 1];
                let mut at = listed[128 + op * 2];
                while at < end {
                    let here = each.min(end - at);
                    let slot = stage % STAGES;
                    if stage >= STAGES {
                        mbarrier_wait(empty, slot, (stage / STAGES - 1) % 2);
                    }
                    if stage >= AHEAD {
                        mbarrier_wait(full, (stage - AHEAD) % STAGES, (stage - AHEAD) / STAGES % 2);
                    }
                    let row_words = units * 4;
                    // The outputs' first rows, and those that are joined to them.
                    let lead = side_lead(at * units);
                    let joined_lead = side_lead((at + shape.w) * units);
                    let sides = side_span(lead, here * units);
                    let joined_sides = if halves == 2 { side_span(joined_lead, here * units) } else { 0 };
                    let bytes = (halves * here * row_words + sides + joined_sides) * 4;
                    mbarrier_arrive_expect(full, slot, bytes);
                    for half in 0u32..halves {
                        let row = at + half * shape.w;
                        let of_codes = places.x as u64 * 4 + row as u64 * row_words as u64;
                        let to = slot * STAGE_WORDS + half * each * row_words;
                        bulk_load(ring, to, weights.offset(of_codes), 0u32, here * row_words, full, slot);
                        let span = if half == 0 { sides } else { joined_sides };
                        let first_unit = row * units - if half == 0 { lead } else { joined_lead };
                        let of_sides = places.y as u64 * 4 + (first_unit / PER_WORD) as u64;
                        let beside = slot * STAGE_WORDS
                            + halves * each * row_words
                            + half * side_span(0, each * units + 4 * PER_WORD);
                        bulk_load(ring, beside, weights.offset(of_sides), 0u32, span, full, slot);
                    }
                    at += here;
                    stage += 1;
                }
            }
        }
        grid_dependency_wait();
        return;
    }

    grid_dependency_wait();
    // Whoever adds to the last counter has seen packets of this launch from all blocks, so that they have all read it here before.
    let before = atomic_load_relaxed::<u32>(counters, (ops - 1) * 8);
    let launches = before / grid_dim() + 1;
    let epoch = launches.wrapping_mul(runs).wrapping_add(run);
    let threads = WARPS * 32;
    let mut held = regs(F32x4::ZERO, PIECES);
    #[unroll]
    for p in 0..PIECES {
        held[p] = load::<F32x4>(x, (thread_idx() + p * threads).min(K / 4 - 1) * 4);
    }

    let team = warp_id() / TEAM;
    let member = warp_id() % TEAM;
    let mut stage = 0u32;
    for op in 0..ops {
        let shape = load::<U32x4>(listed, op * 16);
        let places = load::<U32x4>(listed, op * 16 + 4);
        let more = load::<U32x4>(listed, op * 16 + 8);
        let units = shape.z / UNIT;
        let scale = if more.x == 0xffff_ffff { 1.0f32 } else { floats[more.x as u64 * 4] };

        // How the activations arrive.
        let as_int8 = shape.x == 0;
        let as_codes = shape.x == 1;
        let as_norm = shape.x == 2;
        let as_residual = shape.x == 3;
        let as_floats = shape.x == 4;
        let adds = as_norm || as_residual;
        if adds {
            #[unroll]
            for p in 0..PIECES {
                let place = thread_idx() + p * threads;
                if place < K / 4 {
                    cp_async16(posts, place * 4, floats.offset(places.z as u64 * 4), place * 4);
                    if as_norm {
                        cp_async16(nexts, place * 4, floats.offset(places.w as u64 * 4), place * 4);
                    }
                }
            }
        }
        cp_async_commit();
        if op > 0 {
            if thread_idx() == 0 {
                await_published(counters, op - 1, launches.wrapping_mul(grid_dim()));
            }
            barrier_of(WARPS);
        }
        if as_int8 {
            for part in (thread_idx()..shape.z / 16).by(threads) {
                store(x_words, part_at(part, units), load::<U32x4>(xq, part * 4));
            }
            for group in (thread_idx()..shape.z / 32).by(threads) {
                x_scales[group] = u32x2(xscale[group].to_bits(), xsum[group] as u32);
            }
        }
        if as_codes {
            receive_codes(exchange, more.z, shape.z / 32, epoch, x_words, x_scales);
        }
        if as_floats {
            // Whole warps, because to quantise is a collective.
            for start in (warp_id() * 32..shape.z / 4).by(threads) {
                let place = start + lane_id();
                let at = place.min(shape.z / 4 - 1) * 4;
                let four = quantise4(receive_four(exchange, more.z, at, shape.z, epoch));
                if place < shape.z / 4 {
                    keep_codes(four, part_at(place / 4, units) + place % 4, place, x_words, x_scales);
                }
            }
        }
        if adds {
            let mut updates = regs(F32x4::ZERO, PIECES);
            #[unroll]
            for p in 0..PIECES {
                let place = (thread_idx() + p * threads).min(K / 4 - 1);
                updates[p] = receive_four(exchange, more.z, place * 4, K, epoch);
            }
            leave_chunks(&updates, K / 4, of_updates);
            cp_async_wait(0);
            barrier_of(WARPS);
            let factor = inverse_rms_of_chunks(of_updates, K);
            #[unroll]
            for p in 0..PIECES {
                let place = thread_idx() + p * threads;
                if place < K / 4 {
                    let part = weighted(updates[p], load::<F32x4>(posts, place * 4), 1.0);
                    held[p] = with_update(held[p], part, factor, scale);
                    if block_idx() == 0 && listed[op * 16 + 14] == 1 {
                        store(residual, place * 4, held[p]);
                    }
                }
            }
            if as_norm {
                leave_chunks(&held, K / 4, of_residual);
            }
            #[unroll]
            for p in 0..PIECES {
                let place = thread_idx() + p * threads;
                let mut taken = held[p];
                if as_norm && place < K / 4 {
                    taken = weighted(taken, load::<F32x4>(nexts, place * 4), 1.0);
                }
                let to = part_at(place / 4, units) + place % 4;
                if FINE && as_residual {
                    let four = quantise4_unbounded(taken);
                    if warp_any(f32::from_bits(four.y) < 0.0) {
                        let fine = fine_codes(taken, four.x, f32::from_bits(four.w));
                        if place < K / 4 {
                            keep_fine(fine, to, place, x_words, fine_sums);
                        }
                    }
                    if place < K / 4 {
                        keep_codes(four, to, place, x_words, x_scales);
                    }
                } else {
                    let four = quantise4(taken);
                    if place < K / 4 {
                        keep_codes(four, to, place, x_words, x_scales);
                    }
                }
            }
        }
        barrier_of(WARPS);
        let after = if as_norm { inverse_rms_of_chunks(of_residual, K) } else { 1.0 };
        if op + 1 == ops {
            grid_launch_dependents();
        }

        // The team's stages. What only they need of the list is read here, so that it takes no registers before.
        let first = listed[128 + op * 2];
        let end = listed[128 + op * 2 + 1];
        let each = listed[op * 16 + 9];
        let published = listed[op * 16 + 11];
        let stages = (end - first).div_ceil(each);
        let row_words = units * 4;
        // How the results leave.
        let to_next = shape.y == 1;
        let joins = shape.y == 2;
        let halves = if joins { 2u32 } else { 1u32 };
        let teams = WARPS / TEAM;
        for number in ((team + teams - stage % teams) % teams..stages).by(teams) {
            let slot = (stage + number) % STAGES;
            let here = each.min(end - first - number * each);
            mbarrier_wait(full, slot, (stage + number) / STAGES % 2);
            let of_codes = ring.offset(slot * STAGE_WORDS);
            let of_sides = of_codes.offset(halves * each * row_words);
            let base = first + number * each;
            let lead = side_lead(base * units);
            let joined_lead = side_lead((base + shape.w) * units);
            for i in (member..here).by(TEAM) {
                let codes = of_codes.offset(i * row_words);
                let output = base + i;
                if FINE && as_residual {
                    let times = by[output];
                    let sum = fine_product(lone_dot, codes, of_sides, lead + i * units, x_words, x_scales, fine_sums);
                    if lane_id() == 0 {
                        publish_float(exchange, published, output, shape.w, gelu(sum) * times, epoch);
                    }
                } else {
                    let value = row_product(dot, codes, of_sides, lead + i * units, units, x_words, x_scales);
                    if joins {
                        let joined = codes.offset(each * row_words);
                        let beside = of_sides.offset(side_span(0, each * units + 4 * PER_WORD));
                        let up = row_product(dot, joined, beside, joined_lead + i * units, units, x_words, x_scales);
                        if lane_id() == 0 {
                            results[output - first] = gelu(value * after) * (up * after);
                        }
                    } else if lane_id() == 0 {
                        if to_next {
                            publish_float(exchange, published, output, shape.w, value * after, epoch);
                        } else {
                            out[output] = value * after;
                        }
                    }
                }
            }
            warp_barrier();
            if lane_id() == 0 {
                mbarrier_arrive(empty, slot);
            }
        }
        stage += stages;

        barrier_of(WARPS);
        if joins {
            for group in (warp_id()..(end - first) / 32).by(WARPS) {
                let four = load::<F32x4>(results, group * 32 + lane_id() % 8 * 4);
                publish_group(exchange, published, first / 32 + group, quantise4(four), epoch);
            }
            barrier_of(WARPS);
        }
        say_published(counters, op);
    }
}
