//! Control flow that has no counterpart: all refusals at once.
use gemma4c_dsl::prelude::*;

#[kernel(block = 32)]
fn control_flow(x: Input<u32>, out: Output<u32>, n: u32) {
    let double = |v: u32| v * 2;
    let kind = match n {
        0 => 1u32,
        _ => 2u32,
    };
    'outer: for i in 0..n {
        break 'outer;
    }
    for i in 0..=n {
        out[i] = kind;
    }
    for i in (0..n).rev() {
        out[i] = kind;
    }
    for i in (0..n).step_by(2) {
        out[i] = kind;
    }
    let value = {
        let inner = x[0u32];
        inner + 1
    };
    let chosen = if n > 1 {
        let a = value + 1;
        a
    } else {
        value
    };
    if let Some(v) = Some(n) {
        out[0u32] = v;
    }
    println!("{}", n);
    unsafe { out[0u32] = chosen };
}

fn main() {}
