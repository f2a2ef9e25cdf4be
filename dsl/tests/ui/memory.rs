//! Memory: where it is declared and how it is touched.
use gemma4c_dsl::prelude::*;

#[kernel(block = 32)]
fn memory(x: Input<f32>, out: Output<f32>, n: u32) {
    if n > 4 {
        let tile = shared::<f32>(4);
        tile[0u32] = 1.0;
    }
    let untyped = shared(4);
    let element = &x[0u32];
    let length = x.len();
    let first = x.get(0);
    out[0u32] = *element;
    let scratch = regs(0.0f32);
    n + 1;
}

#[device]
fn declares_shared(n: u32) -> f32 {
    let tile = shared::<f32>(32);
    tile[n]
}

fn main() {}
