//! A plain Rust function has no CUDA text: the error is rustc's, at the call.
use gemma4c_dsl::prelude::*;

fn helper(x: f32) -> f32 {
    x + 1.0
}

#[kernel(block = 32)]
fn calls(out: Output<f32>) {
    out[thread_idx()] = helper(2.0);
}

fn main() {}
