//! The first slice.
use gemma4c_dsl::Instance;
use gemma4c_dsl::harness::{Bound, Case, Random};
use gemma4c_dsl::prelude::*;

/// Scales a vector.
///
/// One thread an element.
#[kernel(block = THREADS)]
pub fn scale<const THREADS: u32>(x: Input<f32>, out: Output<f32>, factor: f32, n: u32) {
    // Which element.
    let i = block_idx() * THREADS + thread_idx();

    if i < n {
        // edge
        out[i] = x[i] * factor; // the product
    }
}

#[device]
fn square(value: f32) -> f32 {
    value * value
}

/// Adds a row of the residual.
#[device]
fn add_residual(value: f32, row: u32, residual: Input<f32>) -> f32 {
    value + residual[row]
}

/// Sum of squares of each row.
#[kernel(block = 64, dependent, slots(epilogue(value: f32, row: u32) -> f32))]
pub fn row_norm<const K: u32, KV: Float>(x: Input<KV>, out: Output<f32>) {
    require!(K % 32 == 0);
    let partial = shared::<f32>(2);
    grid_dependency_wait();
    let row = block_idx();
    let mut sum = 0.0f32;
    #[unroll(4)]
    for i in (thread_idx()..K).by(64) {
        let x = x[row * K + i].to_f32();
        sum += square(x);
    }
    let sum = warp_sum(sum);
    if lane_id() == 0 {
        partial[warp_id()] = sum;
    }
    barrier();
    if thread_idx() == 0 {
        out[row] = epilogue(partial[0] + partial[1], row);
    }
    grid_launch_dependents();
}

#[test]
fn scale_runs_everywhere() {
    let x = Random::new(1).floats(100, -1.0, 1.0);
    let instance = Instance::of(scale::DEF).constant("THREADS", 32u32).build().unwrap();
    println!("{}", instance.cuda());
    let expected: Vec<f32> = x.iter().map(|x| x * 3.0).collect();
    Case::new("100", instance)
        .grid([4, 1, 1])
        .buffer("x", x)
        .scalar("factor", 3.0f32)
        .scalar("n", 100u32)
        .expect("out", expected, Bound::Exact)
        .assert();
}

#[test]
fn row_norm_runs_everywhere() {
    let x = Random::new(1).floats(64 * 5, -1.0, 1.0);
    let residual = Random::new(2).floats(5, -1.0, 1.0);
    let x: Vec<F16> = x.into_iter().map(F16::from_f32).collect();
    let instance = Instance::of(row_norm::DEF)
        .constant("K", 64u32)
        .element("KV", gemma4c_dsl::ElementType::F16)
        .slot("epilogue", &[add_residual::DEF])
        .build()
        .unwrap();
    println!("{}", row_norm::DEF.rust);
    println!("{}", instance.cuda());
    let expected: Vec<f32> = x
        .chunks(64)
        .zip(&residual)
        .map(|(row, r)| row.iter().map(|x| x.to_f32() * x.to_f32()).sum::<f32>() + r)
        .collect();
    Case::new("100", instance)
        .grid([5, 1, 1])
        .buffer("x", x)
        .buffer("epilogue_residual", residual)
        .expect("out", expected, Bound::Within { absolute: 1e-5, relative: 1e-5 })
        .assert();
}
