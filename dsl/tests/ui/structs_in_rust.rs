//! What rustc refuses of views and configs, since it alone knows their fields.
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

#[config]
struct Shape {
    WIDTH: u32,
}

#[config]
struct Wide {
    WIDTH: u32,
    SCALE: f32,
}

struct Plain {
    WIDTH: u32,
}

#[kernel(block = 32)]
fn not_a_config<const S: Plain>(out: Output<u32>) {
    out[0u32] = S.WIDTH;
}

#[kernel(block = 32)]
fn shared_from_a_launch(scratch: Scratch) {
    scratch.total[0u32] = 0.0;
}

#[kernel(block = 32)]
fn two_of_one_name<const S: Shape, const W: Wide>(out: Output<u32>) {
    out[0u32] = S.WIDTH;
}

#[kernel(block = 32, dependent, early(true, rows.columns))]
fn no_such_field(rows: Rows<f32>) {
    grid_dependency_wait();
}

#[kernel(block = 32)]
fn writes_an_input(rows: Rows<f32>) {
    rows.rows[0u32] = 1.0;
}

#[kernel(block = 32, slots(side(scratch: Scratch) -> f32))]
fn a_view_through_a_slot(out: Output<f32>) {
    let total = shared::<f32>(1);
    let scratch = Scratch { total };
    out[0u32] = side(scratch);
}

#[device]
fn without_its_types<E: Float>(rows: Input<E>, out: Output<f32>) {
    let view = Rows { rows, out, stride: 1 };
    store_all(view);
}

#[device]
fn out_of_order<E: Float>(rows: Input<E>, out: Output<f32>) {
    let view = Rows::<E> { out, rows, stride: 1 };
    store_all(view);
}

#[device]
fn store_all<E: Float>(rows: Rows<E>) {
    rows.out[rows.stride] = 0.0;
}

fn main() {}
