//! C++ takes the fields of a struct literal by position.
use gemma4c_dsl::prelude::*;

#[registers]
struct Unit {
    codes: U32x4,
    number: u32,
}

#[device]
fn wrong_order(number: u32) -> Unit {
    Unit { number, codes: U32x4::ZERO }
}

fn main() {}
