//! Operators whose meaning depends on types: refused by rustc, through the bounds that the macro adds.
use gemma4c_dsl::prelude::*;

#[kernel(block = 32)]
fn arithmetic(bytes: Input<u8>, halves: Input<F16>, x: Input<f32>, out: Output<u32>) {
    let i = thread_idx();
    let small = bytes[i] + bytes[i + 1];
    let negative = bytes[i] as i8 * 2;
    let float = x[i] as u32;
    let flipped = !i;
    let either = (i > 3) | (i < 2);
    let remainder = x[i] % 2.0;
    let widened = halves[i] as f32;
    out[i] = float + flipped;
}

fn main() {}
