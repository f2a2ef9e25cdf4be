//! Activations to int8, 32 values to a scale: what the integer products multiply weights by.
//!
//! A group's scale is its largest magnitude / 127; a code is the value times 127 / largest, rounded to nearest, ties to even:
//! one division a group, because one a value took longer than the rest of a product's prologue. The sum of a group's codes comes with it, because weights with a minimum or a zero point need it. Kernels that quantise on the
//! way (the matrix-vector product's prologues) call [`quantise8`], so that they give the same bits.

use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, InstanceError};

/// Threads of a block; any grid covers all rows.
pub const BLOCK_THREADS: u32 = 256;

/// What makes codes of a group's values.
#[device]
pub fn codes_per_unit(largest: f32) -> f32 {
    if largest > 0.0 { 127.0 / largest } else { 0.0 }
}

/// The code of a value. A group of the smallest numbers has no finite factor: its codes end at the largest.
#[device]
pub fn int8_code(x: f32, per_unit: f32) -> i32 {
    round_to_i32(x * per_unit).clamp(-127, 127)
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
    let scale = largest / 127.0;
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
    let mut largest = largest_of(x);
    largest = largest.max(shfl_xor(largest, 1));
    largest = largest.max(shfl_xor(largest, 2));
    largest = largest.max(shfl_xor(largest, 4));
    let scale = largest / 127.0;
    let codes = int8_codes(x, codes_per_unit(largest));
    let mut sum = dp4a(codes, 0x01010101, 0);
    sum = sum + shfl_xor(sum, 1);
    sum = sum + shfl_xor(sum, 2);
    sum = sum + shfl_xor(sum, 4);
    u32x4(codes, scale.to_bits(), sum as u32, 0)
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

/// The same, plainly: a thread takes a group.
#[kernel(block = THREADS)]
pub fn quantise_plain<const THREADS: u32, const K: u32>(
    x: Input<f32>,
    state: Input<u32>,
    xq: Output<u32>,
    xscale: Output<f32>,
    xsum: Output<i32>,
) {
    let group = block_idx() * THREADS + thread_idx();
    if group < state[1u32] * (K / 32) {
        let mut largest = 0.0f32;
        for i in 0u32..32 {
            largest = largest.max(x[group * 32 + i].abs());
        }
        let scale = largest / 127.0;
        let per_unit = codes_per_unit(largest);
        let mut sum = 0i32;
        for word in 0u32..8 {
            let at = group * 32 + word * 4;
            let codes = int8_codes(f32x4(x[at], x[at + 1], x[at + 2], x[at + 3]), per_unit);
            xq[group * 8 + word] = codes;
            sum = dp4a(codes, 0x01010101, sum);
        }
        xscale[group] = scale;
        xsum[group] = sum;
    }
}

pub fn instance(k: u32) -> Result<Instance, InstanceError> {
    Instance::of(quantise::DEF).constant("THREADS", BLOCK_THREADS).constant("K", k).build()
}

pub fn plain_instance(k: u32) -> Result<Instance, InstanceError> {
    Instance::of(quantise_plain::DEF).constant("THREADS", BLOCK_THREADS).constant("K", k).build()
}
