//! The tiles of `decode.rs` on tensor cores, for caches of 8 bits: codes become operands in registers.
//!
//! A lane reads codes from shared memory as they came, widens them to f16 (the numbers that a CPU reads from such a cache) and multiplies. No tile
//! of f16 goes through shared memory, which would take longer than the codes' way from global memory.
//!
//! Operands of a product are pairs of its depth. For scores the depth is a head's values: a lane takes neighbouring codes of a key, so the values
//! of a product are not in the order of memory; queries are loaded in the same one. For mixes it is keys: a lane takes
//! neighbouring values of four keys, and pairs up the bytes of two. The columns of a result are in another order then, which
//! [`leave_columns`] undoes. Everything else is `tensor.rs`.

use gemma4c_dsl::prelude::*;

use super::flash::tensor_product;
use super::narrow::head_len;
use super::tensor::{leave_scores, scale_sums};

/// The first of the four neighbouring values that a lane gives to a product of scores: two products take 32 values, eight of each lane, or
/// one takes all 16 that a warp has.
#[device]
pub fn code_place<const D: u32, const THREADS: u32>(step: u32) -> u32 {
    let width = D * 32 / THREADS;
    let of_lane = lane_id() % 4;
    warp_id() * width + if width >= 32 { step / 2 * 32 + of_lane * 8 + step % 2 * 4 } else { of_lane * 4 }
}

/// [`super::tensor::score_tensor`] over a tile's codes. A lane has a key of eight.
#[device(slots(widen(eight: U32x4, scale: u32) -> U32x4))]
pub fn score_codes<
    const D: u32,
    const G: u32,
    const KEYS: u32,
    const THREADS: u32,
    const SETS: u32,
    const BF: bool,
    const NARROW: bool,
    const SCALED: bool,
    KV: Float,
>(
    fragments: &mut Regs<U32x4>,
    codes: Shared<KV>,
    parts: Shared<f32>,
) {
    let mut sums = regs(F32x4::ZERO, KEYS / 8);
    #[unroll]
    for n in 0..KEYS / 8 {
        let key = codes.offset((n * 8 + lane_id() / 4) * head_len(D));
        #[unroll]
        for pair in 0..(D * 2 / THREADS + 1) / 2 {
            let at = code_place(pair * 2);
            let mut scale = 0u32;
            if SCALED {
                scale = load::<u16>(key, D / 2 + at / 32) as u32 * 0x10001;
            }
            let mut eight = u32x2(load::<u32>(key, at / 2), 0);
            if D * 2 / THREADS > 1 {
                eight = load::<U32x2>(key, at / 2);
            }
            let wide = widen(u32x4(eight.x, eight.y, 0, 0), scale);
            #[unroll]
            for part in 0..SETS {
                sums[n] = tensor_product(fragments[pair * 2 * SETS + part], u32x2(wide.x, wide.y), sums[n]);
                if D * 2 / THREADS > 1 {
                    let second = fragments[(pair * 2 + 1) * SETS + part];
                    sums[n] = tensor_product(second, u32x2(wide.z, wide.w), sums[n]);
                }
            }
        }
    }
    leave_scores(&mut sums, parts);
}

/// Four neighbouring codes of a key; two, where a warp has 16 values of a head.
#[device]
pub fn codes_at<const D: u32, const THREADS: u32, const NARROW: bool, const SCALED: bool, KV: Float>(
    codes: Shared<KV>,
    key: u32,
    at: u32,
) -> u32 {
    let head = codes.offset(key * head_len(D));
    let mut four = load::<u16>(head, at / 2) as u32;
    if D * 2 / THREADS > 1 {
        four = load::<u32>(head, at / 2);
    }
    four
}

/// The scales of a value's group in a key and the next.
#[device]
pub fn scales_at<const D: u32, const NARROW: bool, const SCALED: bool, KV: Float>(
    codes: Shared<KV>,
    key: u32,
    at: u32,
) -> u32 {
    let mut scales = 0u32;
    if SCALED {
        let low = load::<u16>(codes, key * head_len(D) + D / 2 + at / 32) as u32;
        scales = low | (load::<u16>(codes, (key + 1) * head_len(D) + D / 2 + at / 32) as u32) << 16;
    }
    scales
}

/// [`super::tensor::mix_tensor`] over a tile's codes. Column c of product n of a warp is value `c * 4 + n` of its 32 (`c * 2 + n` of 16).
#[device(slots(widen(eight: U32x4, scale: u32) -> U32x4))]
pub fn mix_codes<
    const D: u32,
    const G: u32,
    const KEYS: u32,
    const THREADS: u32,
    const SETS: u32,
    const BF: bool,
    const NARROW: bool,
    const SCALED: bool,
    KV: Float,
>(
    weights: Shared<KV>,
    factors: Shared<f32>,
    codes: Shared<KV>,
    sums: &mut Regs<F32x4>,
) {
    scale_sums(factors, sums);
    let lane = lane_id();
    let width = D * 32 / THREADS;
    #[unroll]
    for step in 0..KEYS / 16 {
        let key = step * 16 + lane % 4 * 2;
        let mut weighed = regs(U32x4::ZERO, SETS);
        #[unroll]
        for part in 0..SETS {
            weighed[part] = ldmatrix_x4(weights, (part * 16 + lane % 16) * (KEYS + 8) + step * 16 + lane / 16 * 8);
        }
        #[unroll]
        for n in 0..(D * 2 / THREADS + 1) / 2 {
            let at = warp_id() * width + n * 32 + lane / 4 * if width >= 32 { 4 } else { 2 };
            let a = codes_at(codes, key, at);
            let b = codes_at(codes, key + 1, at);
            let c = codes_at(codes, key + 8, at);
            let d = codes_at(codes, key + 9, at);
            // Bytes of two keys in turn.
            let near = u32x4(byte_perm(a, b, 0x5140), byte_perm(a, b, 0x7362), 0, 0);
            let far = u32x4(byte_perm(c, d, 0x5140), byte_perm(c, d, 0x7362), 0, 0);
            let upper = widen(near, scales_at(codes, key, at));
            let lower = widen(far, scales_at(codes, key + 8, at));
            #[unroll]
            for part in 0..SETS {
                let weight = weighed[part];
                sums[n * 4] = tensor_product(weight, u32x2(upper.x, lower.x), sums[n * 4]);
                sums[n * 4 + 1] = tensor_product(weight, u32x2(upper.y, lower.y), sums[n * 4 + 1]);
                if D * 2 / THREADS > 1 {
                    sums[n * 4 + 2] = tensor_product(weight, u32x2(upper.z, lower.z), sums[n * 4 + 2]);
                    sums[n * 4 + 3] = tensor_product(weight, u32x2(upper.w, lower.w), sums[n * 4 + 3]);
                }
            }
        }
    }
}

/// [`super::tensor::leave_tensor`], of what [`mix_codes`] has summed.
#[device]
pub fn leave_columns<const D: u32, const G: u32, const THREADS: u32>(sums: &mut Regs<F32x4>, out: Shared<f32>) {
    let head = lane_id() / 4;
    // Values of a lane's column, which are those of neighbouring products.
    let run = if D * 2 / THREADS > 1 { 4u32 } else { 2u32 };
    #[unroll]
    for n in 0..D * 4 / THREADS {
        let to = head * (D + 8) + warp_id() * (D * 32 / THREADS) + n / 4 * 32 + lane_id() % 4 * 2 * run + n % 4;
        let sum = sums[n];
        if G <= 8 {
            if head < G {
                out[to] = sum.x + sum.z;
                out[to + run] = sum.y + sum.w;
            }
        } else {
            out[to] = sum.x;
            out[to + run] = sum.y;
            if head + 8 < G {
                out[to + 8 * (D + 8)] = sum.z;
                out[to + 8 * (D + 8) + run] = sum.w;
            }
        }
    }
    barrier();
}
