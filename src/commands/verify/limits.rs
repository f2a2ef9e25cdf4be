//! How far a right result may be from the CPU's, which computes in f32 throughout.
//!
//! A step alone, from the CPU's values, is judged by what it rounds. All steps together are judged by depth: each layer
//! adds its rounding to the noise of those before, so that noise grows like a random walk; and by how much this model
//! amplifies noise, which is measured on the CPU (`drift`).

use gemma4c_plan::cuda::KvType;

use super::meaning::{Content, Rounding};
use super::numbers::Numbers;

/// The most that a step alone may be off, by the worst row's relative rms.
pub fn alone(content: Content, rounding: Rounding) -> f64 {
    let computed: f64 = match rounding {
        Rounding::None => 1e-4,
        Rounding::Product | Rounding::Attention => 0.015,
        Rounding::Gated => 0.025,
    };
    let stored: f64 = match content {
        Content::Numbers(Numbers::F32) => 0.0,
        Content::Numbers(Numbers::F16) => 1e-3,
        Content::Numbers(Numbers::BF16) => 5e-3,
        Content::Numbers(Numbers::Int8 | Numbers::Mixed { .. }) => 0.015,
        // Of values that are spread evenly: half a code of 127, and half a bit of three.
        Content::Numbers(Numbers::Narrow { kv: KvType::Fp8, .. }) => 0.04,
        Content::Numbers(Numbers::Narrow { .. }) => 0.015,
        // Routers compute in f32; scores that are closer than this are as good as equal.
        Content::Experts => return 1e-3,
    };
    computed.hypot(stored)
}

/// The relative noise that rounding adds to the result of a product or an attention. A plan whose activations are not
/// rounded rounds only keys and values.
pub const fn noise(is_exact: bool) -> f64 {
    if is_exact { 0.0005 } else { 0.005 }
}

/// The limit of a layer's error, as rms over all rows, when everything before it has run on the device: twice the drift
/// that noise causes on the CPU, or what noise would grow to if no layer amplified it. One row scatters more than many
/// together.
pub fn together(layer: u32, rows: usize, is_exact: bool, drift: f64) -> f64 {
    let scatter = if rows == 1 { 1.5 } else { 1.0 };
    2.0 * scatter * drift.max(2.0 * noise(is_exact) * (1.0 + 0.6 * layer as f64).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_may_grow_as_measured_models_do() {
        let calm = |layer, rows, is_exact| together(layer, rows, is_exact, 0.0);
        assert_eq!((calm(0, 24, false), calm(5, 24, false)), (0.02, 0.04));
        assert!(calm(47, 24, false) < 0.11 && calm(5, 1, false) > calm(5, 24, false));
        assert!(calm(47, 1, true) < calm(0, 24, false));
        assert_eq!((together(5, 24, false, 0.3), together(5, 24, false, 0.01)), (0.6, 0.04));
    }

    #[test]
    fn what_is_not_rounded_has_no_excuse() {
        let of = |numbers, rounding| alone(Content::Numbers(numbers), rounding);
        assert_eq!(of(Numbers::F32, Rounding::None), 1e-4);
        assert!(of(Numbers::F16, Rounding::None) < of(Numbers::BF16, Rounding::None));
        assert!(of(Numbers::Int8, Rounding::Product) > of(Numbers::F32, Rounding::Product));
    }
}
