//! Numbers of 8 bits against their definitions: every code widened, and every number and every middle between two
//! packed.

use gemma4c_dsl::harness::{Bound, Case};
use gemma4c_dsl::prelude::*;

/// Four codes a thread: of e4m3, of int8 with one scale, and with another for every second code.
#[kernel(block = 64)]
fn widened(codes: Input<u32>, scales: Input<u32>, floats: Output<u32>, first: Output<u32>, second: Output<u32>) {
    let i = thread_idx();
    let wide = widen_e4m3(codes[i]);
    floats[i * 2] = wide.x;
    // What every GPU has.
    floats[i * 2 + 1] = e4m3_as_f16(codes[i]).y;
    let by_first = widen_int8(codes[i], scales[0u32]);
    first[i * 2] = by_first.x;
    first[i * 2 + 1] = by_first.y;
    let by_second = widen_int8(codes[i], scales[1u32]);
    second[i * 2] = by_second.x;
    second[i * 2 + 1] = by_second.y;
}

/// Pairs of f16 times other pairs.
#[kernel(block = 32)]
fn multiplied(a: Input<u32>, b: Input<u32>, out: Output<u32>) {
    out[thread_idx()] = multiply_f16(a[thread_idx()], b[thread_idx()]);
}

/// Pairs of f16 times other pairs and more.
#[kernel(block = 32)]
fn added(a: Input<u32>, b: Input<u32>, c: Input<u32>, out: Output<u32>) {
    let at = block_idx() * 32 + thread_idx();
    out[at] = fma_f16(a[at], b[at], c[at]);
}

#[kernel(block = 32)]
fn packed_e4m3(x: Input<f32>, out: Output<u32>, count: u32) {
    for i in (thread_idx()..count).by(32) {
        out[i] = pack_e4m3(x[i], -x[i]);
    }
}

/// A number of e4m3 by its definition.
fn e4m3(code: u8) -> f64 {
    let (exponent, fraction) = (i32::from(code >> 3 & 15), f64::from(code & 7));
    let magnitude =
        if exponent == 0 { fraction / 8.0 * 2f64.powi(-6) } else { (1.0 + fraction / 8.0) * 2f64.powi(exponent - 7) };
    if code < 128 { magnitude } else { -magnitude }
}

fn words(halves: impl Iterator<Item = f64>) -> Vec<u32> {
    let bits: Vec<u32> = halves.map(|value| u32::from(F16::from_f32(value as f32).to_bits())).collect();
    bits.chunks(2).map(|pair| pair[0] | pair[1] << 16).collect()
}

#[test]
fn every_code_is_widened() {
    // Without the two codes that are not numbers: which NaN they give is not specified.
    let codes: Vec<u8> = (0..=255u8).map(|code| if code & 0x7f == 0x7f { 0 } else { code }).collect();
    let scales = [F16::from_f32(0.0123), F16::from_f32(3e-6)];
    let by = |[even, odd]: [F16; 2]| {
        let scaled = |(at, code): (usize, &u8)| (f64::from(*code) - 128.0) * f64::from([even, odd][at % 2].to_f32());
        words(codes.iter().enumerate().map(scaled))
    };
    let pair = |[low, high]: [F16; 2]| u32::from(low.to_bits()) | u32::from(high.to_bits()) << 16;
    let [first, second] = [[scales[0]; 2], [scales[1], scales[0]]];
    Case::new("all codes", widened::Chosen {}.build().expect("an instance"))
        .buffer("codes", codes.chunks(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect::<Vec<_>>())
        .buffer("scales", vec![pair(first), pair(second)])
        .expect("floats", words(codes.iter().map(|code| e4m3(*code))), Bound::Exact)
        .expect("first", by(first), Bound::Exact)
        .expect("second", by(second), Bound::Exact)
        .assert();
}

#[test]
fn pairs_are_multiplied_and_rounded_once() {
    // Normal numbers, and products that are subnormal, zero and beyond the largest.
    let numbers = |seed: usize| -> Vec<F16> {
        let magnitudes = [1.0f32, 0.333, 64.0, 3e-4, 2.1e-6, 500.0, 0.0, 65504.0];
        (0..64).map(|i| F16::from_f32(magnitudes[(i * seed + i / 8) % 8] * (1.0 - 0.0137 * i as f32))).collect()
    };
    let (a, b) = (numbers(3), numbers(5));
    let pairs = |all: &[F16]| -> Vec<u32> {
        all.chunks(2).map(|pair| u32::from(pair[0].to_bits()) | u32::from(pair[1].to_bits()) << 16).collect()
    };
    let products = a.iter().zip(&b).map(|(a, b)| f64::from(a.to_f32()) * f64::from(b.to_f32()));
    Case::new("pairs", multiplied::Chosen {}.build().expect("an instance"))
        .buffer("a", pairs(&a))
        .buffer("b", pairs(&b))
        .expect("out", words(products), Bound::Exact)
        .assert();
}

#[test]
fn floats_are_packed_to_the_nearest() {
    let numbers: Vec<f64> = (0..0x7f).map(e4m3).collect();
    let mut x: Vec<f32> = numbers.iter().map(|number| *number as f32).collect();
    x.extend(numbers.windows(2).map(|pair| ((pair[0] + pair[1]) / 2.0) as f32));
    x.extend(numbers.windows(2).map(|pair| ((pair[0] + pair[1]) / 2.0) as f32 * 1.0001));
    x.extend([449.0, 1e30, f32::INFINITY]);
    let nearest = |value: f32| {
        let distance = |code: &u32| (numbers[*code as usize] - f64::from(value).min(448.0)).abs();
        let least = (0..0x7f).map(|code| distance(&code)).fold(f64::INFINITY, f64::min);
        let all: Vec<u32> = (0..0x7f).filter(|code| distance(code) == least).collect();
        all.iter().copied().find(|code| all.len() == 1 || code % 2 == 0).expect("one of two neighbours is even")
    };
    let expected: Vec<u32> = x.iter().map(|value| nearest(*value) | (nearest(*value) | 0x80) << 8).collect();
    let count = x.len() as u32;
    let instance = packed_e4m3::Chosen {}.build().expect("an instance");
    assert_eq!(instance.minimum_capability(), 89);
    Case::new("numbers, middles and beyond", instance)
        .buffer("x", x)
        .scalar("count", count)
        .expect("out", expected, Bound::Exact)
        .assert();
}

#[test]
fn every_half_has_the_value_that_ieee_gives_it() {
    for bits in 0..=u16::MAX {
        let pairs = [
            (F16::from_bits(bits).to_f32(), half::f16::from_bits(bits).to_f32()),
            (BF16::from_bits(bits).to_f32(), half::bf16::from_bits(bits).to_f32()),
        ];
        for (ours, expected) in pairs {
            assert!(ours.to_bits() == expected.to_bits() || ours.is_nan() && expected.is_nan(), "{bits:#x}: {ours}");
        }
    }
}

/// The f16 next to a whole number of 2^-60, the even one of two that are as near.
fn nearest_f16(exact: i128) -> F16 {
    let scaled = |bits: u16| {
        let value = F16::from_bits(bits).to_f32();
        // An f16 is a whole number of them.
        (f64::from(value) * 2f64.powi(60)) as i128
    };
    let about = F16::from_f32((exact as f64 * 2f64.powi(-60)) as f32).to_bits();
    let near = [about.saturating_sub(1), about, about.saturating_add(1)];
    let best = near.into_iter().min_by_key(|bits| ((scaled(*bits) - exact).abs(), bits & 1));
    F16::from_bits(best.expect("three of them"))
}

#[test]
fn pairs_are_multiplied_added_and_rounded_once() {
    // Sums that are ties, nearly ties from either side, cancelled, and of one that is far below the other.
    let mut all = Vec::new();
    for fraction in 0..128 {
        let a = 1.0 + fraction as f32 / 128.0;
        for (b, c) in [(1.0078125f32, 1.0f32), (-1.5, 1.5), (1.0, 2f32.powi(-11)), (1.0078125, 2f32.powi(-24))] {
            all.push([a, b, c]);
            all.push([a, b, -c]);
        }
    }
    let column = |index: usize| -> Vec<F16> { all.iter().map(|three| F16::from_f32(three[index])).collect() };
    let [a, b, c] = [0, 1, 2].map(column);
    let pairs = |all: &[F16]| -> Vec<u32> {
        all.chunks(2).map(|pair| u32::from(pair[0].to_bits()) | u32::from(pair[1].to_bits()) << 16).collect()
    };
    let whole = |value: F16, power: i32| (f64::from(value.to_f32()) * 2f64.powi(power)) as i128;
    let exact = (0..all.len()).map(|at| whole(a[at], 30) * whole(b[at], 30) + whole(c[at], 60));
    let expected: Vec<F16> = exact.map(nearest_f16).collect();
    let rows = pairs(&a).len();
    assert_eq!(rows % 32, 0);
    Case::new("pairs", added::Chosen {}.build().expect("an instance"))
        .grid([rows as u32 / 32, 1, 1])
        .buffer("a", pairs(&a))
        .buffer("b", pairs(&b))
        .buffer("c", pairs(&c))
        .expect("out", pairs(&expected), Bound::Exact)
        .assert();
}
