//! The tiles of `split.rs` in f32, for a cache of f32: what tensor cores do not multiply.

use gemma4c_dsl::prelude::*;

#[device]
pub fn dot4(a: F32x4, b: F32x4, sum: f32) -> f32 {
    a.w.mul_add(b.w, a.z.mul_add(b.z, a.y.mul_add(b.y, a.x.mul_add(b.x, sum))))
}

/// `a + factor * b`
#[device]
pub fn add_scaled(a: F32x4, factor: f32, b: F32x4) -> F32x4 {
    f32x4(factor.mul_add(b.x, a.x), factor.mul_add(b.y, a.y), factor.mul_add(b.z, a.z), factor.mul_add(b.w, a.w))
}

/// Sums over pairs of lanes, and shares the results out between them: each keeps one half of the values.
#[device]
pub fn fold_half(values: &mut Regs<f32>, half: u32, mask: u32) {
    let upper = lane_id() & mask != 0;
    #[unroll]
    for i in 0..half {
        let kept = if upper { values[i + half] } else { values[i] };
        let given = if upper { values[i] } else { values[i + half] };
        values[i] = kept + shfl_xor(given, mask);
    }
}

/// Sums over pairs of lanes; both keep all values.
#[device]
pub fn fold_all(values: &mut Regs<f32>, count: u32, mask: u32) {
    #[unroll]
    for i in 0..count {
        values[i] = values[i] + shfl_xor(values[i], mask);
    }
}

/// The bits of a lane's number that tell nothing: [`fold`] halves as often as the number of values is even.
#[device]
pub fn idle_bits<const GROUP: u32>() -> u32 {
    let eighths = if GROUP % 8 == 0 { 0u32 } else { 1u32 };
    let quarters = if GROUP % 4 == 0 { eighths } else { 3u32 };
    if GROUP % 2 == 0 { quarters } else { 7u32 }
}

/// Sums 4 GROUP values over the warp. Lane `l` ends with the sums of values `l * GROUP / 8 …`, as many as `GROUP *
/// (idle + 1) / 8`; lanes that differ in idle bits alone have the same. One at a time would take three to five times as
/// many shuffles.
#[device]
pub fn fold<const GROUP: u32>(values: &mut Regs<f32>) {
    fold_half(values, GROUP * 2, 16);
    fold_half(values, GROUP, 8);
    if GROUP % 2 == 0 {
        fold_half(values, GROUP / 2, 4);
    } else {
        fold_all(values, GROUP, 4);
    }
    if GROUP % 4 == 0 {
        fold_half(values, GROUP / 4, 2);
    } else {
        fold_all(values, GROUP * (idle_bits() + 1) / 8, 2);
    }
    if GROUP % 8 == 0 {
        fold_half(values, GROUP / 8, 1);
    } else {
        fold_all(values, GROUP * (idle_bits() + 1) / 8, 1);
    }
}

/// Scores of a tile's keys with GROUP queries: a warp takes four keys at a time, its lanes share out the head's values.
#[device]
pub fn score_floats<const D: u32, const GROUP: u32, const KEYS: u32, const THREADS: u32, KV: Float>(
    queries: Shared<f32>,
    keys: Shared<KV>,
    scores: Shared<f32>,
) {
    #[unroll(1)]
    for first in (warp_id() * 4..KEYS).by(THREADS / 8) {
        let mut sums = regs(0.0f32, GROUP * 4);
        // More at once would need more registers than there are with 16 queries.
        #[unroll(1)]
        for start in (0..D).by(128) {
            let at = start + lane_id() * 4;
            let mut four = regs(F32x4::ZERO, 4);
            #[unroll]
            for i in 0u32..4 {
                four[i] = load_floats4(keys, (first + i) * (D + 8) + at);
            }
            #[unroll]
            for head in 0..GROUP {
                let query = load::<F32x4>(queries, head * (D + 8) + at);
                #[unroll]
                for i in 0u32..4 {
                    sums[head * 4 + i] = dot4(query, four[i], sums[head * 4 + i]);
                }
            }
        }
        fold(&mut sums);
        if lane_id() & idle_bits() == 0 {
            #[unroll]
            for i in 0..GROUP * (idle_bits() + 1) / 8 {
                let value = lane_id() * GROUP / 8 + i;
                scores[value / 4 * KEYS + first + value % 4] = sums[i];
            }
        }
    }
}

/// One step of the online softmax: scores become weights relative to the largest score so far, and each head's sums so
/// far get the factor that makes them relative to it too.
#[device]
pub fn weigh_floats<const GROUP: u32, const KEYS: u32, const THREADS: u32>(
    scores: Shared<f32>,
    largest: Shared<f32>,
    totals: Shared<f32>,
    factors: Shared<f32>,
    visible: u32,
) {
    // KEYS lanes take a head. Whole warps: lanes past the end work on the last head, and keep the result to themselves.
    for pair in (thread_idx()..(GROUP * KEYS).div_ceil(32) * 32).by(THREADS) {
        let head = (pair / KEYS).min(GROUP - 1);
        let key = pair % KEYS;
        let score = if key < visible { scores[head * KEYS + key] } else { f32::NEG_INFINITY };
        let before = largest[head];
        let total = totals[head];
        let mut now = score;
        #[unroll]
        for step in 0u32..5 {
            if 1u32 << step < KEYS {
                now = now.max(shfl_xor(now, 1u32 << step));
            }
        }
        now = now.max(before);
        let weight = (score - now).exp();
        let mut sum = weight;
        #[unroll]
        for step in 0u32..5 {
            if 1u32 << step < KEYS {
                sum = sum + shfl_xor(sum, 1u32 << step);
            }
        }
        // The lanes of a head have read what one of them now replaces.
        warp_barrier();
        if pair < GROUP * KEYS {
            scores[pair] = weight;
            if key == 0 {
                let factor = (before - now).exp();
                largest[head] = now;
                totals[head] = total.mul_add(factor, sum);
                factors[head] = factor;
            }
        }
    }
}

/// Adds a tile's values times their weights to the sums of GROUP heads. A thread takes four of the head's values;
/// threads left over take other keys.
#[device]
pub fn mix_floats<const D: u32, const GROUP: u32, const KEYS: u32, const THREADS: u32, KV: Float>(
    scores: Shared<f32>,
    factors: Shared<f32>,
    values: Shared<KV>,
    sums: &mut Regs<F32x4>,
) {
    let column = thread_idx() % (D / 4) * 4;
    #[unroll]
    for h in 0..GROUP {
        sums[h] = add_scaled(F32x4::ZERO, factors[h], sums[h]);
    }
    #[unroll(1)]
    for key in (thread_idx() / (D / 4) * 4..KEYS).by(THREADS * 16 / D) {
        let a = load_floats4(values, key * (D + 8) + column);
        let b = load_floats4(values, (key + 1) * (D + 8) + column);
        let c = load_floats4(values, (key + 2) * (D + 8) + column);
        let d = load_floats4(values, (key + 3) * (D + 8) + column);
        #[unroll]
        for h in 0..GROUP {
            let weights = load::<F32x4>(scores, h * KEYS + key);
            let two = add_scaled(add_scaled(sums[h], weights.x, a), weights.y, b);
            sums[h] = add_scaled(add_scaled(two, weights.z, c), weights.w, d);
        }
    }
}

/// Adds up what the threads have summed over different keys, one after the other.
#[device]
pub fn write_floats<const D: u32, const GROUP: u32, const THREADS: u32>(sums: &mut Regs<F32x4>, out: Shared<f32>) {
    let team = thread_idx() / (D / 4);
    let column = thread_idx() % (D / 4) * 4;
    for turn in 0..THREADS * 4 / D {
        if team == turn {
            #[unroll]
            for h in 0..GROUP {
                let mut sum = sums[h];
                if turn > 0 {
                    sum = add_scaled(load::<F32x4>(out, h * (D + 8) + column), 1.0, sum);
                }
                store(out, h * (D + 8) + column, sum);
            }
        }
        barrier();
    }
}
