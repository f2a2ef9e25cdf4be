//! Literals that nothing gives a type: Rust would infer one from later uses, the printed `auto` cannot.
use gemma4c_dsl::prelude::*;

#[kernel(block = 32)]
fn literals(out: Output<u32>) {
    let mut count = 0;
    let factor = 1.5;
    let size = 4 * 32;
    let mask = 1 << thread_idx();
    for i in 0..4 {
        count += i;
    }
    let registers = regs(0, 4);
    let mode = 0o17u32;
    let half = if mode > 3 { 1 } else { 2 };
    let late;
    late = 3u32;
    let big = -3000000000 + 1i64;
    out[0u32] = count + size + mask + registers[0] + half + late;
}

fn main() {}
