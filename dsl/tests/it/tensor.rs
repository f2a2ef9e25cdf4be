//! Tensor cores, matrix loads and asynchronous copies, against plain loops.

use gemma4c_dsl::harness::{Bound, Case, Random};
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::{Instance, KernelDef};

fn plain(def: &'static KernelDef) -> Instance {
    Instance::of(def).build().expect("an instance without parameters")
}

/// 16 x 16 times (8 x 16)ᵀ in bf16: both operands are row-major with k innermost, copied asynchronously.
#[kernel(block = 32)]
fn product_bf16(a: Weights<BF16>, b: Input<BF16>, out: Output<f32>) {
    let a_tile = shared::<BF16>(256);
    let b_tile = shared::<BF16>(128);
    let lane = lane_id();
    cp_async16(a_tile, lane * 8, a, lane * 8);
    cp_async_commit();
    if lane < 16 {
        cp_async16(b_tile, lane * 8, b, lane * 8);
    }
    cp_async_commit();
    cp_async_wait(0);
    warp_barrier();

    // Matrices in order: rows 0-7 and 8-15 of the first half of k, then of the second.
    let a_row = lane % 16;
    let a_fragment = ldmatrix_x4(a_tile, a_row * 16 + lane / 16 * 8);
    let b_fragment = ldmatrix_x2(b_tile, lane % 8 * 16 + lane / 8 % 2 * 8);
    let sums = mma_m16n8k16_bf16(a_fragment, b_fragment, F32x4::ZERO);
    let row = lane / 4;
    let column = lane % 4 * 2;
    out[row * 8 + column] = sums.x;
    out[row * 8 + column + 1] = sums.y;
    out[(row + 8) * 8 + column] = sums.z;
    out[(row + 8) * 8 + column + 1] = sums.w;
}

#[test]
fn bf16_product() {
    let mut random = Random::new(4);
    let a: Vec<BF16> = random.floats(256, -1.0, 1.0).into_iter().map(BF16::from_f32).collect();
    let b: Vec<BF16> = random.floats(128, -1.0, 1.0).into_iter().map(BF16::from_f32).collect();
    let mut expected = vec![0.0f32; 128];
    for (i, sum) in expected.iter_mut().enumerate() {
        let (row, column) = (i / 8, i % 8);
        *sum = (0..16).map(|k| a[row * 16 + k].to_f32() * b[column * 16 + k].to_f32()).sum();
    }
    Case::new("16 x 8 x 16", plain(product_bf16::DEF))
        .buffer("a", a)
        .buffer("b", b)
        .expect("out", expected, Bound::Within { absolute: 1e-5, relative: 1e-5 })
        .assert();
}

/// The same with B as k x n in memory, so that its fragments are loaded transposed; f16.
#[kernel(block = 32, dynamic_shared)]
fn product_f16<const K: u32>(a: Input<F16>, b: Input<F16>, out: Output<F32x2>) {
    let a_tile = shared::<F16>(16 * K);
    let b_tile = shared::<F16>(K * 8);
    let lane = lane_id();
    for at in (lane * 8..16 * K).by(256) {
        store(a_tile, at, load::<U32x4>(a, at));
    }
    for at in (lane * 8..8 * K).by(256) {
        store(b_tile, at, load::<U32x4>(b, at));
    }
    barrier();
    let mut sums = F32x4::ZERO;
    #[unroll]
    for k in (0..K).by(16) {
        let a_fragment = ldmatrix_x4(a_tile, lane % 16 * K + k + lane / 16 * 8);
        let b_fragment = ldmatrix_x2_trans(b_tile, (k + lane % 16) * 8);
        sums = mma_m16n8k16_f16(a_fragment, b_fragment, sums);
    }
    out[lane / 4 * 4 + lane % 4] = f32x2(sums.x, sums.y);
    out[(lane / 4 + 8) * 4 + lane % 4] = f32x2(sums.z, sums.w);
}

#[test]
fn f16_product_with_a_transposed_operand() {
    let mut random = Random::new(6);
    let k = 48;
    let a: Vec<F16> = random.floats(16 * k, -1.0, 1.0).into_iter().map(F16::from_f32).collect();
    let b: Vec<F16> = random.floats(8 * k, -1.0, 1.0).into_iter().map(F16::from_f32).collect();
    let sum = |row: usize, column: usize| (0..k).map(|i| a[row * k + i].to_f32() * b[i * 8 + column].to_f32()).sum();
    let expected: Vec<F32x2> =
        (0..64).map(|i| F32x2 { x: sum(i / 4, i % 4 * 2), y: sum(i / 4, i % 4 * 2 + 1) }).collect();
    let instance = Instance::of(product_f16::DEF).constant("K", k as u32).build().unwrap();
    assert_eq!(instance.shared_bytes(), 16 * k * 2 + 8 * k * 2);
    Case::new("16 x 8 x 48", instance)
        .buffer("a", a)
        .buffer("b", b)
        .expect("out", expected, Bound::Within { absolute: 1e-5, relative: 1e-5 })
        .assert();
}

/// 16 x 32 times (8 x 32)ᵀ in signed bytes. Fragments are read straight from memory.
#[kernel(block = 32)]
fn product_s8(a: Input<i8>, b: Input<i8>, out: Output<I32x4>) {
    let g = lane_id() / 4;
    let t = lane_id() % 4;
    let a_fragment = u32x4(
        load::<u32>(a, g * 32 + t * 4),
        load::<u32>(a, (g + 8) * 32 + t * 4),
        load::<u32>(a, g * 32 + 16 + t * 4),
        load::<u32>(a, (g + 8) * 32 + 16 + t * 4),
    );
    let b_fragment = u32x2(load::<u32>(b, g * 32 + t * 4), load::<u32>(b, g * 32 + 16 + t * 4));
    let start = i32x4(1, 2, 3, 4);
    out[lane_id()] = mma_m16n8k32_s8(a_fragment, b_fragment, start);
}

#[test]
fn s8_product() {
    let mut random = Random::new(8);
    let a: Vec<i8> = random.bytes(512).into_iter().map(|b| b as i8).collect();
    let b: Vec<i8> = random.bytes(256).into_iter().map(|b| b as i8).collect();
    let sum = |row: usize, column: usize| -> i32 {
        (0..32).map(|k| i32::from(a[row * 32 + k]) * i32::from(b[column * 32 + k])).sum()
    };
    let expected: Vec<I32x4> = (0..32)
        .map(|lane| {
            let (g, c) = (lane / 4, lane % 4 * 2);
            I32x4 { x: sum(g, c) + 1, y: sum(g, c + 1) + 2, z: sum(g + 8, c) + 3, w: sum(g + 8, c + 1) + 4 }
        })
        .collect();
    Case::new("16 x 8 x 32", plain(product_s8::DEF))
        .buffer("a", a)
        .buffer("b", b)
        .expect("out", expected, Bound::Exact)
        .assert();
}

/// 16 x 16 times (8 x 16)ᵀ in signed bytes, brought by copies of four bytes.
#[kernel(block = 32)]
fn half_product_s8(a: Input<u32>, b: Input<u32>, out: Output<I32x4>) {
    let a_tile = shared::<u32>(64);
    let b_tile = shared::<u32>(32);
    cp_async4(a_tile, lane_id(), a, lane_id());
    cp_async4(a_tile, lane_id() + 32, a, lane_id() + 32);
    cp_async4(b_tile, lane_id(), b, lane_id());
    cp_async_commit();
    cp_async_wait(0);
    barrier();
    let a_fragment = u32x2(a_tile[lane_id()], a_tile[lane_id() + 32]);
    out[lane_id()] = mma_m16n8k16_s8(a_fragment, b_tile[lane_id()], i32x4(1, 2, 3, 4));
}

#[test]
fn half_s8_product() {
    let mut random = Random::new(9);
    let (a, b) = (random.bytes(256), random.bytes(128));
    let sum = |row: usize, column: usize| -> i32 {
        (0..16).map(|k| i32::from(a[row * 16 + k] as i8) * i32::from(b[column * 16 + k] as i8)).sum()
    };
    let expected: Vec<I32x4> = (0..32)
        .map(|lane| {
            let (g, c) = (lane / 4, lane % 4 * 2);
            I32x4 { x: sum(g, c) + 1, y: sum(g, c + 1) + 2, z: sum(g + 8, c) + 3, w: sum(g + 8, c + 1) + 4 }
        })
        .collect();
    let words = |bytes: &[u8]| -> Vec<u32> {
        bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    };
    Case::new("16 x 8 x 16", plain(half_product_s8::DEF))
        .buffer("a", words(&a))
        .buffer("b", words(&b))
        .expect("out", expected, Bound::Exact)
        .assert();
}

/// The other shapes of `ldmatrix`, word by word.
#[kernel(block = 32)]
fn matrices(x: Input<u16>, out: Output<u32>) {
    let tile = shared::<u16>(256);
    store(tile, lane_id() * 8, load::<U32x4>(x, lane_id() * 8));
    barrier();
    let row = lane_id() * 8;
    let at = lane_id() * 5;
    out[at] = ldmatrix_x1(tile, row);
    let four = ldmatrix_x4_trans(tile, row);
    out[at + 1] = four.x;
    out[at + 2] = four.y;
    out[at + 3] = four.z;
    out[at + 4] = four.w;
}

#[test]
fn matrix_fragments() {
    let x: Vec<u16> = (0..256).map(|i| i * 7 + 3).collect();
    let pair = |low: u16, high: u16| u32::from(low) | u32::from(high) << 16;
    let expected: Vec<u32> = (0..32)
        .flat_map(|lane| {
            let (g, t) = (lane / 4, lane % 4);
            let transposed = |m: usize| pair(x[m * 64 + 2 * t * 8 + g], x[m * 64 + (2 * t + 1) * 8 + g]);
            [pair(x[g * 8 + 2 * t], x[g * 8 + 2 * t + 1]), transposed(0), transposed(1), transposed(2), transposed(3)]
        })
        .collect();
    Case::new("four matrices", plain(matrices::DEF)).buffer("x", x).expect("out", expected, Bound::Exact).assert();
}
