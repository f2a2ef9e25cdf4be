//! The tiles of `split.rs` on tensor cores, for caches of 16-bit floats.
//!
//! The query heads of a key-value head are the rows of the products. In f32 they would cost more multiplications and
//! more reads of shared memory than there is time while a tile comes from memory. Queries and weights keep nearly all
//! of their bits: each is the sum of two 16-bit floats. Up to eight heads have both parts as rows of one product, h and
//! h + 8; with more, each part has a product of its own (SETS is 2). Warps share out the head's values: as depth of the
//! scores, whose parts are then added in a fixed order, and as columns of the result. The depth has SLICES; with more
//! warps than that, those of a slice share out the keys of a tile.

use gemma4c_dsl::prelude::*;

/// Two floats as a pair of the cache's type.
#[device]
pub fn pack_pair<const BF: bool>(low: f32, high: f32) -> u32 {
    if BF { pack_bf16(low, high) } else { pack_f16(low, high) }
}

#[device]
pub fn tensor_product<const BF: bool>(a: U32x4, b: U32x2, c: F32x4) -> F32x4 {
    if BF { mma_m16n8k16_bf16(a, b, c) } else { mma_m16n8k16_f16(a, b, c) }
}

/// Two floats as two pairs of 16-bit floats: rounded (x), and the rest (y).
#[device]
pub fn split_pair<const BF: bool>(a: f32, b: f32) -> U32x2 {
    let high = pack_pair(a, b);
    let a_rest = a - if BF { bf16_lo(high) } else { f16_lo(high) };
    let b_rest = b - if BF { bf16_hi(high) } else { f16_hi(high) };
    u32x2(high, pack_pair(a_rest, b_rest))
}

/// Two neighbouring values of a query in parts; zero where there is no such head.
#[device]
pub fn query_parts<const D: u32, const GROUP: u32, const BF: bool>(queries: Shared<f32>, head: u32, at: u32) -> U32x2 {
    // Without a branch, so that all of a lane's loads are in flight at once.
    let pair = load::<F32x2>(queries, head.min(GROUP - 1) * (D + 8) + at);
    let parts = split_pair(pair.x, pair.y);
    if head < GROUP { parts } else { U32x2::ZERO }
}

/// Which place the weight of a tile's key has among its 16. With 8-bit codes a lane pairs up keys four apart:
/// neighbours would meet in the same banks.
#[device]
pub fn weight_place(key: u32) -> u32 {
    key / 16 * 16 + key % 4 * 2 + key / 4 % 2 + key / 8 % 2 * 8
}

/// Weights of zero for heads that do not exist: nobody writes them later.
#[device]
pub fn clear_weights<const KEYS: u32, const THREADS: u32, const SETS: u32, KV: Float>(weights: Shared<KV>) {
    for i in (thread_idx() * 8..SETS * 16 * (KEYS + 8)).by(THREADS * 8) {
        store(weights, i, U32x4::ZERO);
    }
}

/// The warp's slice of the depth.
#[device]
pub fn depth_slice<const THREADS: u32, const SLICES: u32>() -> u32 {
    if THREADS / 32 == SLICES { warp_id() } else { warp_id() % SLICES }
}

/// The first of the warp's keys of a tile.
#[device]
pub fn first_key<const KEYS: u32, const THREADS: u32, const SLICES: u32>() -> u32 {
    if THREADS / 32 == SLICES { 0 } else { warp_id() / SLICES * (KEYS * SLICES * 32 / THREADS) }
}

/// The queries as operands of the warp's slice of the depth.
#[device]
pub fn load_queries<const D: u32, const GROUP: u32, const THREADS: u32, const SLICES: u32, const BF: bool>(
    queries: Shared<f32>,
    fragments: &mut Regs<U32x4>,
) {
    let head = lane_id() / 4;
    #[unroll]
    for step in 0..D / (16 * SLICES) {
        let at = depth_slice() * (D / SLICES) + step * 16 + lane_id() % 4 * 2;
        let near = query_parts(queries, head, at);
        let far = query_parts(queries, head, at + 8);
        if GROUP <= 8 {
            fragments[step] = u32x4(near.x, near.y, far.x, far.y);
        } else {
            let lower_near = query_parts(queries, head + 8, at);
            let lower_far = query_parts(queries, head + 8, at + 8);
            fragments[step * 2] = u32x4(near.x, lower_near.x, far.x, lower_far.x);
            fragments[step * 2 + 1] = u32x4(near.y, lower_near.y, far.y, lower_far.y);
        }
    }
}

/// Writes the warp's part of the scores, `parts[slice][head][key]`, keys eight apart more than they are many: no two
/// heads of a store in the same bank. Product n has keys `n * 8 …` of the warp's.
#[device]
pub fn write_scores<const GROUP: u32, const KEYS: u32, const THREADS: u32, const SLICES: u32>(
    sums: &mut Regs<F32x4>,
    parts: Shared<f32>,
) {
    let head = lane_id() / 4;
    #[unroll]
    for n in 0..KEYS * SLICES * 4 / THREADS {
        let to = (depth_slice() * GROUP + head) * (KEYS + 8) + first_key() + n * 8 + lane_id() % 4 * 2;
        let sum = sums[n];
        if GROUP <= 8 {
            if head < GROUP {
                store(parts, to, f32x2(sum.x + sum.z, sum.y + sum.w));
            }
        } else {
            store(parts, to, f32x2(sum.x, sum.y));
            if head + 8 < GROUP {
                store(parts, to + 8 * (KEYS + 8), f32x2(sum.z, sum.w));
            }
        }
    }
}

/// The warp's part of the scores of a tile's keys.
#[device]
pub fn score_tensor<
    const D: u32,
    const GROUP: u32,
    const KEYS: u32,
    const THREADS: u32,
    const SLICES: u32,
    const BF: bool,
    KV: Float,
>(
    fragments: &mut Regs<U32x4>,
    keys: Shared<KV>,
    parts: Shared<f32>,
) {
    let lane = lane_id();
    let mut sums = regs(F32x4::ZERO, KEYS * SLICES * 4 / THREADS);
    #[unroll]
    for step in 0..D / (16 * SLICES) {
        let depth = depth_slice() * (D / SLICES) + step * 16;
        #[unroll]
        for n in 0..KEYS * SLICES * 2 / THREADS {
            let key = first_key() + n * 16 + lane / 16 * 8 + lane % 8;
            let b = ldmatrix_x4(keys, key * (D + 8) + depth + lane / 8 % 2 * 8);
            if GROUP <= 8 {
                sums[2 * n] = tensor_product(fragments[step], u32x2(b.x, b.y), sums[2 * n]);
                sums[2 * n + 1] = tensor_product(fragments[step], u32x2(b.z, b.w), sums[2 * n + 1]);
            } else {
                #[unroll]
                for part in 0u32..2 {
                    let a = fragments[step * 2 + part];
                    sums[2 * n] = tensor_product(a, u32x2(b.x, b.y), sums[2 * n]);
                    sums[2 * n + 1] = tensor_product(a, u32x2(b.z, b.w), sums[2 * n + 1]);
                }
            }
        }
    }
    write_scores(&mut sums, parts);
}

/// A word for each float, in the same order: what is not a number is above all others, or below.
#[device]
pub fn order_of(value: f32) -> u32 {
    let bits = value.to_bits();
    if bits >> 31 == 1 { bits ^ 0xffff_ffff } else { bits ^ 0x8000_0000 }
}

/// The float of a word of [`order_of`].
#[device]
pub fn float_of(word: u32) -> f32 {
    f32::from_bits(if word >> 31 == 1 { word ^ 0x8000_0000 } else { word ^ 0xffff_ffff })
}

/// One step of the online softmax: scores become weights relative to the largest score so far, in parts, and each
/// head's sums so far get the factor that makes them relative to it too. A warp takes a head, and its lanes sum what
/// they have seen of its weights: they meet when all tiles are done. With NARROW, parts and weights lie as `codes.rs`
/// has them; with SCALED weights are 64 times as large, so that times a small scale they are still normal numbers.
#[device]
pub fn weigh_tensor<
    const GROUP: u32,
    const KEYS: u32,
    const THREADS: u32,
    const SLICES: u32,
    const NARROW: bool,
    const SCALED: bool,
    KV: Float,
>(
    parts: Shared<f32>,
    weights: Shared<KV>,
    largest: Shared<f32>,
    lane_totals: &mut Regs<f32>,
    factors: Shared<f32>,
    visible: u32,
) {
    #[unroll]
    for round in 0..(GROUP * 32 + THREADS - 1) / THREADS {
        let head = warp_id() + round * (THREADS / 32);
        if head < GROUP {
            let mut scores = regs(f32::NEG_INFINITY, (KEYS + 31) / 32);
            let before = largest[head];
            let mut now = before;
            let stride = if NARROW { KEYS + 4 } else { KEYS + 8 };
            #[unroll]
            for i in 0..(KEYS + 31) / 32 {
                // Keys that are not visible have scores too, of zeros, so that nobody waits for a branch.
                let key = lane_id() + i * 32;
                let there = if KEYS % 32 == 0 { key } else { key.min(KEYS - 1) };
                let mut sum = 0.0f32;
                #[unroll]
                for slice in 0..SLICES {
                    sum = sum + parts[(slice * GROUP + head) * stride + there];
                }
                scores[i] = if key < visible { sum } else { f32::NEG_INFINITY };
                now = now.max(scores[i]);
            }
            now = float_of(warp_largest(order_of(now)));
            let factor = (before - now).exp();
            let mut sum = 0.0f32;
            #[unroll]
            for i in 0..(KEYS + 31) / 32 {
                let key = lane_id() + i * 32;
                let weight = (scores[i] - now).exp();
                sum = sum + weight;
                if KEYS % 32 == 0 || key < KEYS {
                    let kept = if SCALED { weight * 64.0 } else { weight };
                    let place = if NARROW { weight_place(key) } else { key };
                    let rounded = KV::from_f32(kept);
                    weights[head * (KEYS + 8) + place] = rounded;
                    if !SCALED {
                        let low_row = if GROUP <= 8 { head + 8 } else { head + 16 };
                        weights[low_row * (KEYS + 8) + place] = KV::from_f32(kept - rounded.to_f32());
                    }
                }
            }
            lane_totals[round] = lane_totals[round].mul_add(factor, sum);
            // All lanes have read what one of them replaces.
            warp_barrier();
            if lane_id() == 0 {
                largest[head] = now;
                factors[head] = factor;
            }
        }
    }
}

/// Writes each head's total, which its warp has summed lane by lane.
#[device]
pub fn write_totals<const GROUP: u32, const THREADS: u32>(lane_totals: &mut Regs<f32>, totals: Shared<f32>) {
    #[unroll]
    for round in 0..(GROUP * 32 + THREADS - 1) / THREADS {
        let head = warp_id() + round * (THREADS / 32);
        if head < GROUP {
            let total = warp_sum(lane_totals[round]);
            if lane_id() == 0 {
                totals[head] = total;
            }
        }
    }
}

/// Each head's sums so far times its factor.
#[device]
pub fn scale_sums<const D: u32, const GROUP: u32, const THREADS: u32>(factors: Shared<f32>, sums: &mut Regs<F32x4>) {
    // Rows without a head take any factor.
    let upper = factors[(lane_id() / 4).min(GROUP - 1)];
    let lower = if GROUP <= 8 { upper } else { factors[(lane_id() / 4 + 8).min(GROUP - 1)] };
    #[unroll]
    for n in 0..D * 4 / THREADS {
        let sum = sums[n];
        sums[n] = f32x4(sum.x * upper, sum.y * upper, sum.z * lower, sum.w * lower);
    }
}

/// Adds a tile's values times their weights to the warp's columns of the sums.
#[device]
pub fn mix_tensor<
    const D: u32,
    const GROUP: u32,
    const KEYS: u32,
    const THREADS: u32,
    const SETS: u32,
    const BF: bool,
    KV: Float,
>(
    weights: Shared<KV>,
    factors: Shared<f32>,
    values: Shared<KV>,
    sums: &mut Regs<F32x4>,
) {
    scale_sums(factors, sums);
    let lane = lane_id();
    #[unroll]
    for step in 0..KEYS / 16 {
        let key = step * 16 + lane % 16;
        #[unroll]
        for part in 0..SETS {
            let a = ldmatrix_x4(weights, (part * 16 + lane % 16) * (KEYS + 8) + step * 16 + lane / 16 * 8);
            #[unroll]
            for n in 0..D * 2 / THREADS {
                let column = warp_id() * (D * 32 / THREADS) + n * 16 + lane / 16 * 8;
                let b = ldmatrix_x4_trans(values, key * (D + 8) + column);
                sums[2 * n] = tensor_product(a, u32x2(b.x, b.y), sums[2 * n]);
                sums[2 * n + 1] = tensor_product(a, u32x2(b.z, b.w), sums[2 * n + 1]);
            }
        }
    }
}

/// Writes the sums, rows of D + 8.
#[device]
pub fn write_tensor<const D: u32, const GROUP: u32, const THREADS: u32>(sums: &mut Regs<F32x4>, out: Shared<f32>) {
    let head = lane_id() / 4;
    #[unroll]
    for n in 0..D * 4 / THREADS {
        let to = head * (D + 8) + warp_id() * (D * 32 / THREADS) + n * 8 + lane_id() % 4 * 2;
        let sum = sums[n];
        if GROUP <= 8 {
            if head < GROUP {
                store(out, to, f32x2(sum.x + sum.z, sum.y + sum.w));
            }
        } else {
            store(out, to, f32x2(sum.x, sum.y));
            if head + 8 < GROUP {
                store(out, to + 8 * (D + 8), f32x2(sum.z, sum.w));
            }
        }
    }
    barrier();
}
