//! Activations to int8, 32 values to a scale: what the integer products multiply weights by.
//!
//! A group's scale is its largest magnitude / 127; a code is the value times 127 / largest, rounded to nearest, ties to even:
//! one division a group, because one a value took longer than the rest of a product's prologue. The sum of a group's codes comes with it, because weights with a minimum or a zero point need it. Kernels that quantise on the
//! way (the matrix-vector product's prologues) call [`quantise8`], so that they give the same bits.
//!
//! Trained models have massive channels: a few values of the residual are thousands of times the rest. One of them takes the
//! whole scale of its group, and its 31 neighbours round to zero. A norm's weights damp such channels, so int8 is enough for what
//! was normed; a product that reads the residual itself calls [`quantise4_unbounded`]. It marks groups whose codes are mostly near
//! zero, and [`fine_codes`] keeps 15 more bits of every value of a marked group: two more int8 digits, which the product
//! multiplies as it does the first. A marked group so has 23 bits, and a value that is a 50,000th of its group's largest is
//! still right to 1 %. Other groups keep their 8 bits.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

/// Threads of a block; any grid covers all rows.
pub const BLOCK_THREADS: u32 = 256;

/// What makes codes of a group's values. A group without a value of 1e-30 has codes near zero, where the quotient would have no bound.
#[device]
pub fn codes_per_unit(largest: f32) -> f32 {
    quotient(127.0, largest.max(1e-30))
}

/// A group's scale: `largest / 127`, correctly rounded. By a constant that takes three steps.
#[device]
pub fn scale_of(largest: f32) -> f32 {
    let near = largest * (1.0f32 / 127.0);
    near.mul_add(-127.0, largest).mul_add(1.0f32 / 127.0, near)
}

/// The code of a value, in the lowest byte: in a number of this size the last bit counts ones, so that a sum rounds to the nearest, ties to even. No value is larger than its group's largest.
#[device]
pub fn int8_code(x: f32, per_unit: f32) -> i32 {
    (x * per_unit + 12582912.0).to_bits() as i32
}

#[device]
pub fn int8_codes(x: F32x4, per_unit: f32) -> u32 {
    pack_bytes(int8_code(x.x, per_unit), int8_code(x.y, per_unit), int8_code(x.z, per_unit), int8_code(x.w, per_unit))
}

#[device]
pub fn largest_of(x: F32x4) -> f32 {
    x.x.abs().max(x.y.abs()).max(x.z.abs().max(x.w.abs()))
}

/// Eight neighbouring values, four lanes to a group of 32: their codes (x, y), the group's scale (z, bits of an f32) and the
/// sum of the group's codes (w). A collective of the warp.
#[device]
pub fn quantise8(a: F32x4, b: F32x4) -> U32x4 {
    let mut largest = largest_of(a).max(largest_of(b));
    largest = largest.max(shfl_xor(largest, 1));
    largest = largest.max(shfl_xor(largest, 2));
    let scale = scale_of(largest);
    let per_unit = codes_per_unit(largest);
    let low = int8_codes(a, per_unit);
    let high = int8_codes(b, per_unit);
    let mut sum = dp4a(high, 0x01010101, dp4a(low, 0x01010101, 0));
    sum = sum + shfl_xor(sum, 1);
    sum = sum + shfl_xor(sum, 2);
    u32x4(low, high, scale.to_bits(), sum as u32)
}

/// Four neighbouring values, eight lanes to a group of 32, with the bits of [`quantise8`]: their codes (x), the group's scale (y,
/// bits of an f32) and the sum of the group's codes (z). A collective of the warp.
#[device]
pub fn quantise4(x: F32x4) -> U32x4 {
    let coded = quantise4_alone(x);
    let mut sum = dp4a(coded.x, 0x01010101, 0);
    sum = sum + shfl_xor(sum, 1);
    sum = sum + shfl_xor(sum, 2);
    sum = sum + shfl_xor(sum, 4);
    u32x4(coded.x, coded.y, sum as u32, 0)
}

/// The same for weights without a zero point, which do not need the sum.
#[device]
pub fn quantise4_alone(x: F32x4) -> U32x4 {
    let mut largest = largest_of(x);
    largest = largest.max(shfl_xor(largest, 1));
    largest = largest.max(shfl_xor(largest, 2));
    largest = largest.max(shfl_xor(largest, 4));
    u32x4(int8_codes(x, codes_per_unit(largest)), scale_of(largest).to_bits(), 0, 0)
}

/// Whether the code of a value is near zero, 4 at most: the value has less than three bits.
#[device]
pub fn near_zero(x: f32, per_unit: f32) -> i32 {
    if (x * per_unit).abs() < 4.5 { 1 } else { 0 }
}

/// [`quantise4`] of values that no norm bounds: codes (x), scale (y), sum (z), and what makes codes of values (w, bits of an f32).
/// A negative scale marks a group that needs [`fine_codes`]: 12 or more of its codes are near zero. Of 32 values of a normal
/// distribution one or two are; 12 are when a value is 14 times the rest. A collective of the warp.
#[device]
pub fn quantise4_unbounded(x: F32x4) -> U32x4 {
    let mut largest = largest_of(x);
    largest = largest.max(shfl_xor(largest, 1));
    largest = largest.max(shfl_xor(largest, 2));
    largest = largest.max(shfl_xor(largest, 4));
    let scale = scale_of(largest);
    let per_unit = codes_per_unit(largest);
    let codes = int8_codes(x, per_unit);
    // One reduction for two sums: that of the codes is 4064 at most, either way.
    let small =
        near_zero(x.x, per_unit) + near_zero(x.y, per_unit) + near_zero(x.z, per_unit) + near_zero(x.w, per_unit);
    let mut sums = dp4a(codes, 0x01010101, small * 0x10000);
    sums = sums + shfl_xor(sums, 1);
    sums = sums + shfl_xor(sums, 2);
    sums = sums + shfl_xor(sums, 4);
    let of_group = (sums + 0x8000) >> 16;
    let marked = if of_group >= 12 { -scale } else { scale };
    u32x4(codes, marked.to_bits(), (sums - of_group * 0x10000) as u32, per_unit.to_bits())
}

/// What the code of a value leaves of it, in steps of a 32768th of a code. Half a code is then 64 in the second digit.
#[device]
pub fn fine_code(x: f32, per_unit: f32, code: i32) -> i32 {
    round_to_i32(x.mul_add(per_unit, -(code as f32)) * 32768.0).clamp(-16384, 16384)
}

/// The second and third digits of four values (x, y), which count 128ths and 32768ths of a code, and the sum of the group's fine
/// codes, in 32768ths (z). A collective of the warp.
#[device]
pub fn fine_codes(x: F32x4, codes: u32, per_unit: f32) -> U32x4 {
    let a = fine_code(x.x, per_unit, signed_byte_of(codes, 0));
    let b = fine_code(x.y, per_unit, signed_byte_of(codes, 1));
    let c = fine_code(x.z, per_unit, signed_byte_of(codes, 2));
    let d = fine_code(x.w, per_unit, signed_byte_of(codes, 3));
    // A digit is -128 to 127, so that what the second leaves fits the third.
    let second = pack_bytes((a + 128) >> 8, (b + 128) >> 8, (c + 128) >> 8, (d + 128) >> 8);
    let third = pack_bytes(a, b, c, d);
    let mut sum = a + b + c + d;
    sum = sum + shfl_xor(sum, 1);
    sum = sum + shfl_xor(sum, 2);
    sum = sum + shfl_xor(sum, 4);
    u32x4(second, third, sum as u32, 0)
}

/// Rows of K values to int8. A lane takes eight values.
#[kernel(block = THREADS, dependent)]
pub fn quantise<const THREADS: u32, const K: u32>(
    x: Input<f32>,
    state: Input<u32>,
    xq: Output<u32>,
    xscale: Output<f32>,
    xsum: Output<i32>,
) {
    require!(K % 32 == 0);
    grid_dependency_wait();
    grid_launch_dependents();
    let pieces = state[1u32] * (K / 8);
    // Whole warps: the lanes past the end work on the last group, and keep the result to themselves.
    for at in (block_idx() * THREADS + thread_idx()..pieces.div_ceil(32) * 32).by(grid_dim() * THREADS) {
        let piece = at.min(pieces - 1);
        let codes = quantise8(load::<F32x4>(x, piece * 8), load::<F32x4>(x, piece * 8 + 4));
        if at < pieces {
            store(xq, at * 2, u32x2(codes.x, codes.y));
            if at % 4 == 0 {
                xscale[at / 4] = f32::from_bits(codes.z);
                xsum[at / 4] = codes.w as i32;
            }
        }
    }
}

pub fn instance(k: u32) -> Result<Instance, InstanceError> {
    quantise::Chosen { THREADS: BLOCK_THREADS, K: k }.build()
}
