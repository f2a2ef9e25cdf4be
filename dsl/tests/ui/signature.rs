//! Heads of functions.
use gemma4c_dsl::prelude::*;

#[kernel(block = 32, warps = 2)]
fn unknown_key(out: Output<u32>) {
    out[thread_idx()] = 1;
}

#[kernel]
fn no_block(out: Output<u32>) {
    out[thread_idx()] = 1;
}

#[kernel(block = N * 32)]
fn generics<'a, const N: usize, T: Copy>(x: Input<T>, flag: bool)
where
    T: Copy,
{
}

#[kernel(block = 32)]
async fn asynchronous((a, b): (u32, u32)) {}

#[kernel(block = 32, cluster = 2)]
fn cluster_without_dynamic_shared(out: Output<f32>) {
    out[0u32] = 0.0;
}

#[device(inline)]
fn device_arguments(x: f32) -> f32 {
    x
}

#[device]
fn device_tiles(x: Tiles<BF16>) -> u32 {
    0u32
}

fn main() {}
