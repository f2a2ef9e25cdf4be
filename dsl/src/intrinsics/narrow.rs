//! Numbers of 8 bits, widened to pairs of f16 and made from f32: int8 codes with a scale, and e4m3 floats. And the
//! product of such pairs.
//!
//! A word has four of them. The hardware converts e4m3 from Ada (8.9) on.

use super::rows::intrinsic;
use crate::elements::{F16, Float, U32x2};

/// e4m3 to the nearest, ties to even; beyond 448 it is 448.
fn e4m3_bits(value: f32) -> u32 {
    if value.is_nan() {
        return 0x7f;
    }
    let sign = value.to_bits() >> 24 & 0x80;
    let magnitude = value.abs().min(448.0);
    // Below 2^-6 numbers are 2^-9 apart; eight of them are the first normal number, whose code is 8.
    if magnitude < 0.015625 {
        return sign | (magnitude * 512.0).round_ties_even() as u32;
    }
    let bits = magnitude.to_bits();
    let rounded = (bits + 0x7_ffff + (bits >> 20 & 1)) >> 20;
    sign | (rounded - (120 << 3))
}

/// The f16 of an e4m3 number: all of them are there.
fn f16_of_e4m3(code: u32) -> u32 {
    let (exponent, fraction) = (code >> 3 & 15, code & 7);
    let magnitude = match (exponent, fraction) {
        (15, 7) => f32::NAN,
        (0, fraction) => fraction as f32 / 512.0,
        (exponent, fraction) => f32::from_bits((exponent + 120) << 23 | fraction << 20),
    };
    u32::from(F16::from_f32(if code & 0x80 == 0 { magnitude } else { -magnitude }).to_bits())
}

/// The f16 of an int8 code, stored as 128 more, times a scale.
fn f16_of_int8(byte: u32, scale: u32) -> u32 {
    let value = (byte as f32 - 128.0) * F16::from_bits(scale as u16).to_f32();
    u32::from(F16::from_f32(value).to_bits())
}

intrinsic! {
    /// Four bytes less 128, each times an f16 and rounded to f16, as two pairs. `scale` has an f16 for the first of
    /// each pair, and one for the second in its upper half.
    Thread fn widen_int8(codes: u32, scale: u32) -> U32x2 {
        let wide = |index: u32| f16_of_int8(codes >> (8 * index) & 0xff, scale >> (16 * (index % 2)));
        U32x2 { x: wide(0) | wide(1) << 16, y: wide(2) | wide(3) << 16 }
    }
    // A byte of 0 to 255 behind the upper byte of 1024 is 1024 more than itself.
    cuda "U32x2 wide = {__byte_perm(codes, 0x64646464u, 0x4140u), __byte_perm(codes, 0x64646464u, 0x4342u)}; asm(\"sub.rn.f16x2 %0, %0, %2; sub.rn.f16x2 %1, %1, %2; mul.rn.f16x2 %0, %0, %3; mul.rn.f16x2 %1, %1, %3;\" : \"+r\"(wide.x), \"+r\"(wide.y) : \"r\"(0x64806480u), \"r\"(scale)); return wide;"
}

intrinsic! {
    /// Two pairs of f16, multiplied and rounded to f16.
    Thread fn multiply_f16(a: u32, b: u32) -> u32 {
        let product = |half: u32| {
            let value = |word: u32| F16::from_bits((word >> (16 * half)) as u16).to_f32();
            u32::from(F16::from_f32(value(a) * value(b)).to_bits()) << (16 * half)
        };
        product(0) | product(1)
    }
    cuda "u32 product; asm(\"mul.rn.f16x2 %0, %1, %2;\" : \"=r\"(product) : \"r\"(a), \"r\"(b)); return product;"
}

/// The sum of two numbers as an odd f32 where it is none, which no later rounding to 16 bits takes for a tie.
fn odd_sum(a: f64, b: f64) -> f32 {
    let sum = a + b;
    let part = sum - a;
    let error = (a - (sum - part)) + (b - part);
    let near = sum as f32;
    let rest = (sum - f64::from(near)) + error;
    let bits = near.to_bits();
    match bits & 1 == 1 || rest == 0.0 || !near.is_finite() {
        true => near,
        false if near == 0.0 => f32::from_bits(1).copysign(rest as f32),
        false => f32::from_bits(if (rest > 0.0) == (near > 0.0) { bits + 1 } else { bits - 1 }),
    }
}

intrinsic! {
    /// Those bits of a word that `mask` has, and `bits`, in one instruction.
    Thread fn and_or(word: u32, mask: u32, bits: u32) -> u32 { word & mask | bits }
    cuda "u32 merged; asm(\"lop3.b32 %0, %1, %2, %3, 0xea;\" : \"=r\"(merged) : \"r\"(word), \"r\"(mask), \"r\"(bits)); return merged;"
}

intrinsic! {
    /// Two pairs of f16, multiplied and added to a third, rounded once.
    Thread fn fma_f16(a: u32, b: u32, c: u32) -> u32 {
        let sum = |half: u32| {
            let value = |word: u32| f64::from(F16::from_bits((word >> (16 * half)) as u16).to_f32());
            u32::from(F16::from_f32(odd_sum(value(a) * value(b), value(c))).to_bits()) << (16 * half)
        };
        sum(0) | sum(1)
    }
    cuda "u32 sum; asm(\"fma.rn.f16x2 %0, %1, %2, %3;\" : \"=r\"(sum) : \"r\"(a), \"r\"(b), \"r\"(c)); return sum;"
}

intrinsic! {
    /// Four e4m3 floats as two pairs of f16.
    Thread since 89 fn widen_e4m3(codes: u32) -> U32x2 {
        let wide = |index: u32| f16_of_e4m3(codes >> (8 * index) & 0xff);
        U32x2 { x: wide(0) | wide(1) << 16, y: wide(2) | wide(3) << 16 }
    }
    cuda "U32x2 wide; asm(\"{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high; }\" : \"=r\"(wide.x), \"=r\"(wide.y) : \"r\"(codes)); return wide;"
}

intrinsic! {
    /// Four e4m3 floats as two pairs of f16, on every GPU: with shifts where the hardware does not convert. What is no
    /// number may become one.
    Thread fn e4m3_as_f16(codes: u32) -> U32x2 {
        let wide = |index: u32| f16_of_e4m3(codes >> (8 * index) & 0xff);
        U32x2 { x: wide(0) | wide(1) << 16, y: wide(2) | wide(3) << 16 }
    }
    // A byte in the upper half of an f16, moved by one bit, is 2^-8 of its float, below the normal numbers too.
    cuda "
#if __CUDA_ARCH__ >= 890
    U32x2 wide;
    asm(\"{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high; }\" : \"=r\"(wide.x), \"=r\"(wide.y) : \"r\"(codes));
#else
    u32 low = __byte_perm(codes, 0u, 0x1404u), high = __byte_perm(codes, 0u, 0x3424u);
    U32x2 wide = {(low & 0x80008000u) | (low >> 1 & 0x3f803f80u), (high & 0x80008000u) | (high >> 1 & 0x3f803f80u)};
    asm(\"mul.rn.f16x2 %0, %0, %2; mul.rn.f16x2 %1, %1, %2;\" : \"+r\"(wide.x), \"+r\"(wide.y) : \"r\"(0x5c005c00u));
#endif
    return wide;
"
}

intrinsic! {
    /// Two floats rounded to e4m3, `low` in the lower byte. What is beyond 448 becomes 448; NaN stays one.
    Thread since 89 fn pack_e4m3(low: f32, high: f32) -> u32 { e4m3_bits(low) | e4m3_bits(high) << 8 }
    cuda "u16 pair; asm(\"cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;\" : \"=h\"(pair) : \"f\"(high), \"f\"(low)); return pair;"
}
