//! Structs of registers, and device functions with slots.
use gemma4c_dsl::prelude::*;

#[registers]
struct Unit {
    codes: U32x4,
    number: u32,
}

#[registers]
struct Names<T> {
    name: String,
    count: usize,
    of: T,
}

#[registers(packed)]
struct Pair(u32, u32);

struct Plain {
    x: u32,
}

#[device]
fn takes_plain(plain: Plain) -> u32 {
    plain.x
}

#[device]
fn rest(unit: Unit) -> Unit {
    Unit { number: 1, ..unit }
}

#[device(slots(make(at: u32) -> Unit))]
fn gives_a_struct(at: u32) -> u32 {
    make(at).number
}

#[device(fills(at), slots(side(at: u32) -> u32))]
fn both(at: u32) -> u32 {
    side(at)
}

#[device(slots(side(at: u32) -> u32))]
fn calls_side(at: u32) -> u32 {
    side(at)
}

#[kernel(block = 32, slots(side(at: u32) -> u32))]
fn slot_as_a_value(units: Shared<Unit>, out: Output<u32>) {
    let tile = shared::<Unit>(4);
    let copy = side;
    out[0u32] = calls_side(LIMIT, 1);
}

#[kernel(block = 32, slots(decode(at: u32) -> f32))]
fn wrong_slot(out: Output<u32>) {
    out[0u32] = calls_side(decode, 1);
}

fn main() {}
