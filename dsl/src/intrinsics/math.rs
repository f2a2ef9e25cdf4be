//! Numeric functions that are not methods of Rust's floats. The exact ones give the same bits in every executor; the
//! fast ones are approximations of the GPU's special function unit, good to about 2 units in the last place near 1.

use super::rows::intrinsic;

intrinsic! {
    /// `1 / sqrt(x)`, both steps correctly rounded, of numbers between 2^-100 and 2^100. Others have no branch of their
    /// own: of 0 and infinity it makes NaN on a GPU.
    Thread fn rsqrt(x: f32) -> f32 { 1.0 / x.sqrt() }
    cuda "
    f32 guess, inverse;
    asm(\"rsqrt.approx.ftz.f32 %0, %1;\" : \"=f\"(guess) : \"f\"(x));
    f32 near = __fmul_rn(x, guess);
    f32 root = __fmaf_rn(__fmaf_rn(-near, near, x), __fmul_rn(guess, 0.5f), near);
    asm(\"rcp.approx.ftz.f32 %0, %1;\" : \"=f\"(inverse) : \"f\"(root));
    return __fmaf_rn(inverse, -__fmaf_rn(inverse, root, -1.0f), inverse);
"
}

intrinsic! {
    /// `a / b`, correctly rounded where both and the quotient lie between 2^-100 and 2^100, or `a` is 0. There is no
    /// branch for others.
    Thread fn quotient(a: f32, b: f32) -> f32 { a / b }
    cuda "
    f32 guess;
    asm(\"rcp.approx.ftz.f32 %0, %1;\" : \"=f\"(guess) : \"f\"(b));
    f32 inverse = __fmaf_rn(guess, __fmaf_rn(-b, guess, 1.0f), guess);
    f32 near = __fmul_rn(a, inverse);
    return __fmaf_rn(inverse, __fmaf_rn(-b, near, a), near);
"
}

intrinsic! {
    /// `1 / x`, correctly rounded.
    Thread fn recip(x: f32) -> f32 { 1.0 / x }
    cuda "return 1.0f / x;"
}

intrinsic! {
    /// Towards zero; out of range saturates, NaN gives 0.
    Thread fn f32_to_i32(x: f32) -> i32 { x as i32 }
    cuda "return __float2int_rz(x);"
}

intrinsic! {
    /// Towards zero; out of range saturates, NaN gives 0.
    Thread fn f32_to_u32(x: f32) -> u32 { x as u32 }
    cuda "return __float2uint_rz(x);"
}

intrinsic! {
    /// To the nearest, ties to even; out of range saturates, NaN gives 0.
    Thread fn round_to_i32(x: f32) -> i32 { x.round_ties_even() as i32 }
    cuda "return __float2int_rn(x);"
}

intrinsic! {
    /// `e^x`, approximately.
    Thread fn exp_fast(x: f32) -> f32 { x.exp() }
    cuda "return __expf(x);"
}

intrinsic! {
    /// `2^x`, approximately.
    Thread fn exp2_fast(x: f32) -> f32 { x.exp2() }
    cuda "f32 y; asm(\"ex2.approx.f32 %0, %1;\" : \"=f\"(y) : \"f\"(x)); return y;"
}

intrinsic! {
    /// The same, and 0 where the result would be subnormal: one instruction instead of four.
    Thread fn exp2_flushed(x: f32) -> f32 { if x < -126.0 { 0.0 } else { x.exp2() } }
    cuda "f32 y; asm(\"ex2.approx.ftz.f32 %0, %1;\" : \"=f\"(y) : \"f\"(x)); return y;"
}
