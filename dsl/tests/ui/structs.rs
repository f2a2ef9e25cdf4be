//! Views and configs.
use gemma4c_dsl::prelude::*;

#[view]
struct Rows<E: Float> {
    rows: Input<E>,
    out: Output<f32>,
    stride: u32,
}

#[view]
struct Scratch {
    total: Shared<f32>,
}

#[view(packed)]
struct NoNames(Input<f32>, u32);

#[view]
struct OfCopy<T: Copy> {
    rows: Input<f32>,
}

#[view]
struct Fields {
    tiles: Tiles<BF16>,
    sums: Regs<f32>,
    text: String,
    other: Input<Rows<f32>>,
}

#[config]
struct Shape {
    WIDTH: u32,
}

#[config]
struct Wide {
    WIDTH: u32,
    SCALE: f32,
}

#[config]
struct Constants<T> {
    width: u32,
    LONG: u64,
}

#[config(fast)]
struct NoFields;

#[kernel(block = 32)]
fn whole_config<const S: Shape>(out: Output<u32>) {
    out[0u32] = width_of(S);
}

#[kernel(block = 32)]
fn one_name_twice<const WIDTH: u32, const S: Shape>(out: Output<u32>) {
    out[0u32] = S.WIDTH;
}

#[kernel(block = 32)]
fn changes_a_field(rows: Rows<f32>) {
    rows.stride = 3;
}

#[kernel(block = 32, dependent, early(true, rows, n.rows))]
fn names_no_field(rows: Rows<f32>, n: u32) {
    grid_dependency_wait();
}

#[device(slots(side(rows: Scratch) -> Rows<f32>))]
fn gives_a_view(scratch: Scratch) -> u32 {
    0u32
}

fn main() {}
