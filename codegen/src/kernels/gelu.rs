//! GELU by its tanh formula, for every kernel that gates with it.

use gemma4c_dsl::prelude::*;

/// `x / 2 * (1 + tanh(sqrt(2 / pi) * x * (1 + 0.044715 x^2)))`
#[device]
pub fn gelu(x: f32) -> f32 {
    let inner = 0.7978846 * x * (1.0 + 0.044715 * x * x);
    0.5 * x * (1.0 + inner.tanh())
}

/// The same by one exponential: `x / (1 + e^(-2 inner))`. For results that are rounded to 16 bits.
#[device]
pub fn gelu_by_exp(x: f32) -> f32 {
    let inner = 0.7978846 * x * (1.0 + 0.044715 * x * x);
    x * recip(1.0 + exp_fast(-2.0 * inner))
}
