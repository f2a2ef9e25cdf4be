//! The tiles of `split.rs` on tensor cores, for caches of 8 bits: codes become operands in registers.
//!
//! A lane reads codes from shared memory as they came, makes f16 of them and multiplies. A tile of f16 would take
//! longer through shared memory than the codes take from global memory. The rest is bound by instructions, so each code
//! costs half of one:
//!
//! - A byte with zeros above it is an f16 already: a subnormal one, as many times 2^-24 as it says. Tensor cores
//!   multiply those exactly. Codes of q8_0 are stored as 128 more, which a product with a constant takes away from the
//!   sums of a tile.
//! - Scales are not applied to codes. Of keys, the sums of 32 values are multiplied by theirs. Of values, the weights
//!   of the keys are, once for a warp's 32 columns.
//! - Codes are the first operand, and its rows are keys (of scores) or values of a head (of mixes); the columns are
//!   query heads. So both parts of a query or weight are added into the same sums, and a lane's results belong to the
//!   keys whose codes and scales it has read.
//!
//! Operands of a product are pairs of its depth. For scores the depth is a head's values: a lane takes neighbouring
//! codes of a key, so the values of a product are not in the order of memory; queries are loaded in the same one. For
//! mixes it is keys: a lane takes neighbouring values of four keys, and pairs up the bytes of two;
//! [`weight_place`](super::tensor::weight_place) says which place a key's weight has then.

use gemma4c_dsl::prelude::*;

use super::narrow::code_row;
use super::tensor::{query_parts, tensor_product};

/// The first of the four neighbouring values that a lane gives to a product of scores: two products take 32 values,
/// eight of each lane, or one takes all 16 that a warp has.
#[device]
pub fn code_place<const D: u32, const THREADS: u32>(step: u32) -> u32 {
    let width = D * 32 / THREADS;
    let of_lane = lane_id() % 4;
    warp_id() * width + if width >= 32 { step / 2 * 32 + of_lane * 8 + step % 2 * 4 } else { of_lane * 4 }
}

/// The queries as operands of the warp's part of the depth, a head's two parts in a fragment; what 128 times their
/// values sum to, for each 32; and weights of zero for heads that do not exist.
#[device]
pub fn load_code_queries<
    const D: u32,
    const GROUP: u32,
    const KEYS: u32,
    const THREADS: u32,
    const SETS: u32,
    const BF: bool,
    const SCALED: bool,
    KV: Float,
>(
    queries: Shared<f32>,
    weights: Shared<KV>,
    fragments: &mut Regs<U32x4>,
    offsets: &mut Regs<F32x4>,
) {
    #[unroll]
    for step in 0..D * 2 / THREADS {
        #[unroll]
        for set in 0..SETS {
            let head = set * 8 + lane_id() / 4;
            let near = query_parts(queries, head, code_place(step));
            let far = query_parts(queries, head, code_place(step) + 2);
            fragments[step * SETS + set] = u32x4(near.x, far.x, near.y, far.y);
            if SCALED {
                let group = step / 2 * SETS + set;
                offsets[group] = both_parts(less_128(), fragments[step * SETS + set], offsets[group]);
            }
        }
    }
    for i in (thread_idx()..SETS * 16 * (KEYS + 8)).by(THREADS) {
        weights[i] = KV::from_f32(0.0);
    }
}

/// An operand of -128, in units of 2^-24.
#[device]
pub fn less_128() -> U32x4 {
    u32x4(0x8080_8080, 0x8080_8080, 0x8080_8080, 0x8080_8080)
}

/// Adds the products with both parts of queries or weights.
#[device]
pub fn both_parts<const BF: bool>(codes: U32x4, parts: U32x4, sum: F32x4) -> F32x4 {
    let rounded = tensor_product(codes, u32x2(parts.x, parts.y), sum);
    tensor_product(codes, u32x2(parts.z, parts.w), rounded)
}

/// The scale of a value's group in a row of a tile, as the sums of codes are multiplied by it.
#[device]
pub fn sum_scale<const D: u32, KV: Float>(row: Shared<KV>, at: u32) -> f32 {
    f16_lo(load::<u16>(row, D / 2 + at / 32) as u32) * 16777216.0
}

/// [`super::tensor::score_tensor`] over a tile's codes. A lane has two keys of 16.
#[device(slots(operands(eight: U32x4) -> U32x4))]
pub fn score_codes<
    const D: u32,
    const GROUP: u32,
    const KEYS: u32,
    const THREADS: u32,
    const SETS: u32,
    const BF: bool,
    const SCALED: bool,
    KV: Float,
>(
    fragments: &mut Regs<U32x4>,
    offsets: &mut Regs<F32x4>,
    codes: Shared<KV>,
    parts: Shared<f32>,
) {
    // All sums first: a store would hold back the loads after it.
    // Tiles of fewer keys are of floats, which do not come here: but their text has this function.
    let mut sums = regs(F32x4::ZERO, if KEYS < 16 { 1 } else { KEYS / 16 * SETS });
    let lanes_row = codes.offset(lane_id() / 4 * code_row());
    #[unroll]
    for n in 0..KEYS / 16 {
        let upper = lanes_row.offset(n * 16 * code_row());
        let lower = lanes_row.offset((n * 16 + 8) * code_row());
        #[unroll]
        for pair in 0..(D * 2 / THREADS + 1) / 2 {
            let at = code_place(pair * 2);
            let mut first = u32x2(load::<u32>(upper, at / 2), 0);
            let mut second = u32x2(load::<u32>(lower, at / 2), 0);
            if D * 2 / THREADS > 1 {
                first = load::<U32x2>(upper, at / 2);
                second = load::<U32x2>(lower, at / 2);
            }
            let a = operands(u32x4(first.x, first.y, 0, 0));
            let b = operands(u32x4(second.x, second.y, 0, 0));
            let mut scales = F32x2::ZERO;
            if SCALED {
                scales = f32x2(sum_scale(upper, at), sum_scale(lower, at));
            }
            #[unroll]
            for set in 0..SETS {
                let so_far = sums[n * SETS + set];
                let mut sum = if SCALED { offsets[pair * SETS + set] } else { so_far };
                sum = both_parts(u32x4(a.x, b.x, a.y, b.y), fragments[pair * 2 * SETS + set], sum);
                if D * 2 / THREADS > 1 {
                    sum = both_parts(u32x4(a.z, b.z, a.w, b.w), fragments[(pair * 2 + 1) * SETS + set], sum);
                }
                if SCALED {
                    sum = f32x4(
                        sum.x.mul_add(scales.x, so_far.x),
                        sum.y.mul_add(scales.x, so_far.y),
                        sum.z.mul_add(scales.y, so_far.z),
                        sum.w.mul_add(scales.y, so_far.w),
                    );
                }
                sums[n * SETS + set] = sum;
            }
        }
    }
    let head = lane_id() % 4 * 2;
    let to = parts.offset((warp_id() * GROUP + head) * (KEYS + 4) + lane_id() / 4);
    #[unroll]
    for set in 0..SETS {
        #[unroll]
        for n in 0..KEYS / 16 {
            let sum = sums[n * SETS + set];
            let at = to.offset(set * 8 * (KEYS + 4) + n * 16);
            if set * 8 + head < GROUP {
                store(at, 0, sum.x);
                store(at, 8, sum.z);
            }
            if set * 8 + head + 1 < GROUP {
                store(at, KEYS + 4, sum.y);
                store(at, KEYS + 12, sum.w);
            }
        }
    }
}

/// Four neighbouring codes of the key that a lane's is `apart` keys before; two, where a warp has 16 values of a head.
#[device]
pub fn codes_at<const D: u32, const THREADS: u32, KV: Float>(of_lane: Shared<KV>, apart: u32) -> u32 {
    let mut four = load::<u16>(of_lane, apart * code_row()) as u32;
    if D * 2 / THREADS > 1 {
        four = load::<u32>(of_lane, apart * code_row());
    }
    four
}

/// The scales of that key, and of the one four behind it.
#[device]
pub fn scales_at<const D: u32, KV: Float>(of_lane: Shared<KV>, apart: u32) -> u32 {
    let low = load::<u16>(of_lane, apart * code_row()) as u32;
    low | (load::<u16>(of_lane, (apart + 4) * code_row()) as u32) << 16
}

/// Each head's sums so far times its factor.
#[device]
pub fn scale_columns<const D: u32, const GROUP: u32, const THREADS: u32, const SETS: u32>(
    factors: Shared<f32>,
    sums: &mut Regs<F32x4>,
) {
    #[unroll]
    for set in 0..SETS {
        // Columns without a head take any factor.
        let even = factors[(set * 8 + lane_id() % 4 * 2).min(GROUP - 1)];
        let odd = factors[(set * 8 + lane_id() % 4 * 2 + 1).min(GROUP - 1)];
        #[unroll]
        for n in 0..D * 2 / THREADS {
            let sum = sums[n * SETS + set];
            sums[n * SETS + set] = f32x4(sum.x * even, sum.y * odd, sum.z * even, sum.w * odd);
        }
    }
}

/// [`super::tensor::mix_tensor`] over a tile's codes. Rows r and r + 8 of product n of a warp are values `r * 4 + n *
/// 2` of its 32 (`r * 2` of 16) and the next.
///
/// Times a scale, a weight is rounded to f16 again, so that its second part would add nothing: with SCALED there is
/// none.
#[device(slots(operands(eight: U32x4) -> U32x4))]
pub fn mix_codes<
    const D: u32,
    const GROUP: u32,
    const KEYS: u32,
    const THREADS: u32,
    const SETS: u32,
    const BF: bool,
    const SCALED: bool,
    KV: Float,
>(
    weights: Shared<KV>,
    factors: Shared<f32>,
    codes: Shared<KV>,
    sums: &mut Regs<F32x4>,
) {
    scale_columns(factors, sums);
    let lane = lane_id();
    let width = D * 32 / THREADS;
    let groups = (D * 2 / THREADS + 1) / 2;
    // A lane's first key and its values, and that key's scale.
    let at = warp_id() * width + lane / 4 * if width >= 32 { 4 } else { 2 };
    let lanes_codes = codes.offset(lane % 4 * code_row() + at / 2);
    let lanes_scales = codes.offset(lane % 4 * code_row() + D / 2 + warp_id() * width / 32);
    let mut offsets = regs(F32x4::ZERO, (D * 2 / THREADS + 1) / 2 * SETS);
    #[unroll]
    for step in 0..KEYS / 16 {
        let mut weighed = regs(U32x4::ZERO, SETS);
        #[unroll]
        for set in 0..SETS {
            let row = set * 8 + lane % 8;
            if SCALED {
                let parts = ldmatrix_x2(weights, row * (KEYS + 8) + step * 16 + lane / 8 % 2 * 8);
                weighed[set] = u32x4(parts.x, parts.y, 0, 0);
            } else {
                let part = row + lane / 16 * (SETS * 8);
                weighed[set] = ldmatrix_x4(weights, part * (KEYS + 8) + step * 16 + lane / 8 % 2 * 8);
            }
        }
        #[unroll]
        for n in 0..groups {
            let of_lane = lanes_codes.offset(n * 16);
            let a = codes_at(of_lane, step * 16);
            let b = codes_at(of_lane, step * 16 + 4);
            let c = codes_at(of_lane, step * 16 + 8);
            let d = codes_at(of_lane, step * 16 + 12);
            // Bytes of two keys in turn.
            let near = operands(u32x4(byte_perm(a, b, 0x5140), byte_perm(a, b, 0x7362), 0, 0));
            let far = operands(u32x4(byte_perm(c, d, 0x5140), byte_perm(c, d, 0x7362), 0, 0));
            let mut scales = U32x2::ZERO;
            if SCALED {
                let of_group = lanes_scales.offset(n);
                scales = u32x2(scales_at(of_group, step * 16), scales_at(of_group, step * 16 + 8));
            }
            #[unroll]
            for set in 0..SETS {
                let first = n * 2 * SETS + set;
                let weight = weighed[set];
                if SCALED {
                    let scaled = u32x2(multiply_f16(weight.x, scales.x), multiply_f16(weight.y, scales.y));
                    let group = n * SETS + set;
                    offsets[group] = tensor_product(less_128(), scaled, offsets[group]);
                    sums[first] = tensor_product(u32x4(near.x, near.y, far.x, far.y), scaled, sums[first]);
                    if width >= 32 {
                        let more = first + SETS;
                        sums[more] = tensor_product(u32x4(near.z, near.w, far.z, far.w), scaled, sums[more]);
                    }
                } else {
                    sums[first] = both_parts(u32x4(near.x, near.y, far.x, far.y), weight, sums[first]);
                    if width >= 32 {
                        let more = first + SETS;
                        sums[more] = both_parts(u32x4(near.z, near.w, far.z, far.w), weight, sums[more]);
                    }
                }
            }
        }
    }
    if SCALED {
        // With every tile: what is taken away should not be large beside what stays.
        #[unroll]
        for i in 0..D * 2 / THREADS * SETS {
            let sum = sums[i];
            let offset = offsets[i / (2 * SETS) * SETS + i % SETS];
            sums[i] = f32x4(sum.x + offset.x, sum.y + offset.y, sum.z + offset.z, sum.w + offset.w);
        }
    }
}

/// [`super::tensor::write_tensor`], of what [`mix_codes`] has summed.
#[device]
pub fn write_columns<const D: u32, const GROUP: u32, const THREADS: u32, const SETS: u32, const SCALED: bool>(
    sums: &mut Regs<F32x4>,
    out: Shared<f32>,
) {
    // Codes are units of 2^-24, and weights are 64 times as large (see `weigh_tensor`).
    let unit = if SCALED { 262144.0f32 } else { 1.0f32 };
    let width = D * 32 / THREADS;
    #[unroll]
    for n in 0..D * 2 / THREADS {
        let at = warp_id() * width + n / 2 * 32 + lane_id() / 4 * if width >= 32 { 4 } else { 2 } + n % 2 * 2;
        #[unroll]
        for set in 0..SETS {
            let head = set * 8 + lane_id() % 4 * 2;
            let sum = sums[n * SETS + set];
            if head < GROUP {
                store(out, head * (D + 8) + at, f32x2(sum.x * unit, sum.z * unit));
            }
            if head + 1 < GROUP {
                store(out, (head + 1) * (D + 8) + at, f32x2(sum.y * unit, sum.w * unit));
            }
        }
    }
    barrier();
}
