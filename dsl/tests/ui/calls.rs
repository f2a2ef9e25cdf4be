//! What a body may call and see.
use gemma4c_dsl::prelude::*;

const LIMIT: u32 = 4;

#[device]
fn factorial(n: u32) -> u32 {
    if n < 2 { 1 } else { n * factorial(n - 1) }
}

#[kernel(block = 32)]
fn calls(x: Input<f32>, out: Output<f32>, n: u32) {
    let limited = n.min(LIMIT);
    let total = x[0u32].powi(2);
    let wide = n.swap_bytes();
    let zero = f32::default();
    let kind = load::<f64>(x, 0);
    let function = factorial;
    out[limited] = total;
}

fn main() {}
