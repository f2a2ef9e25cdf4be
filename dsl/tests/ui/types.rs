//! Types that a kernel does not have.
use gemma4c_dsl::prelude::*;

#[kernel(block = 32)]
fn types(x: &[f32], n: usize, out: Output<f64>, tile: Shared<f32>, pair: (u32, u32)) -> u32 {
    let sum: f64 = 0.0;
    let row = [0.0f32; 4];
    let both = (n, n);
    0
}

#[device]
fn borrows(x: &f32, names: Vec<u32>) -> f32 {
    *x
}

fn main() {}
