//! exp and tanh in f32, accurate to a few units in the last place.
//!
//! Written out rather than called: the same bits on every platform, and loops over them vectorise.

/// `exp(x) = (1 + q) * 2^n`: q within ±0.42, n the nearest integer to x / ln 2.
///
/// Valid for |x| < 2^20. A NaN passes through q.
#[inline(always)]
fn exp_parts(x: f32) -> (f32, i32) {
    // Adding 1.5 * 2^23 leaves the rounded integer in the low bits of the sum.
    const ROUNDER: f32 = 12_582_912.0;
    // ln 2 in two pieces: n * LN2_HIGH is exact for every n that occurs.
    const LN2_HIGH: f32 = 355.0 / 512.0;
    const LN2_LOW: f32 = (std::f64::consts::LN_2 - 355.0 / 512.0) as f32;
    let rounded = x.mul_add(std::f32::consts::LOG2_E, ROUNDER);
    let n = rounded - ROUNDER;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, x));
    // Taylor: |r| is at most ln 2 / 2, where the first term left out is 5e-9.
    let mut q: f32 = 1.0 / 5040.0;
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5] {
        q = q.mul_add(r, coefficient);
    }
    ((q * r).mul_add(r, r), rounded.to_bits().wrapping_sub(ROUNDER.to_bits()) as i32)
}

/// `2^n`, for n from -126 to 127.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Outside these the result is 0 or infinite anyhow.
    let (q, n) = exp_parts(x.clamp(-104.0, 89.0));
    // Two factors, since 2^n alone leaves the range of f32 before the result does.
    let half = n >> 1;
    (1.0 + q) * power_of_two(half) * power_of_two(n.wrapping_sub(half))
}

#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    // (e^2x - 1) / (e^2x + 1), with e^2x - 1 put together so that small arguments keep their digits; 1 beyond 10.
    let (q, n) = exp_parts(2.0 * x.abs().clamp(0.0, 10.0));
    let power = power_of_two(n);
    let expm1 = q.mul_add(power, power - 1.0);
    (expm1 / (expm1 + 2.0)).copysign(x)
}

/// GELU in its tanh form, `x/2 (1 + tanh u)`, as the equal `x / (1 + e^-2u)`, which does not cancel for negative x.
#[inline(always)]
pub fn gelu_tanh(x: f32) -> f32 {
    // 2 sqrt(2 / pi)
    const SLOPE: f32 = (std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::SQRT_2) as f32;
    let u = SLOPE * x * (0.044_715 * x).mul_add(x, 1.0);
    x / (1.0 + exp(-u))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Largest error of `f` against `exact`, relative to the exact value, over a fine grid.
    fn worst(range: std::ops::Range<f32>, f: fn(f32) -> f32, exact: fn(f64) -> f64) -> f64 {
        let steps = 200_000;
        (0..=steps)
            .map(|i| range.start + (range.end - range.start) * (i as f32 / steps as f32))
            .map(|x| {
                let exact = exact(x as f64);
                ((f(x) as f64 - exact) / exact.abs().max(f32::MIN_POSITIVE as f64)).abs()
            })
            .fold(0.0, f64::max)
    }

    #[test]
    fn close_to_f64() {
        assert!(worst(-87.0..88.7, exp, f64::exp) < 1.5e-7);
        assert!(worst(-12.0..12.0, tanh, f64::tanh) < 3e-7);
        assert!(worst(-1e-3..1e-3, tanh, f64::tanh) < 3e-7);
        let gelu = |x: f64| 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh());
        assert!(worst(-2.0..50.0, gelu_tanh, gelu) < 1e-6);
        for i in -10_000..0 {
            let x = i as f32 * 1e-3;
            assert!((gelu_tanh(x) as f64 - gelu(x as f64)).abs() < 1e-6, "{x}");
        }
    }

    #[test]
    fn edges() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert!(exp(-103.0) > 0.0, "subnormal results are kept");
        assert_eq!(
            (tanh(f32::INFINITY), tanh(f32::NEG_INFINITY), tanh(-0.0).to_bits()),
            (1.0, -1.0, (-0.0f32).to_bits())
        );
        assert!(exp(f32::NAN).is_nan() && tanh(f32::NAN).is_nan() && gelu_tanh(f32::NAN).is_nan());
        assert_eq!((gelu_tanh(0.0), gelu_tanh(100.0), gelu_tanh(-100.0)), (0.0, 100.0, 0.0));
    }
}
