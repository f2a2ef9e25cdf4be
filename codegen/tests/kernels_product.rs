//! The matrix product against a plain sum in f64: in the simulator under three orders, and as host-compiled text.

use gemma4c_codegen::cases::product;
use gemma4c_codegen::kernels::product::{Product, Tile};
use gemma4c_dsl::ElementType;
use gemma4c_dsl::harness::{Case, Executor, Simulator};
use gemma4c_dsl::sim::Order;

fn check(cases: Vec<Case>) {
    assert!(!cases.is_empty());
    for case in cases {
        case.assert();
    }
}

#[test]
fn every_type_fast_and_plain() {
    check(product::types());
}

#[test]
fn tiles_full_and_not() {
    check(product::shapes());
}

#[test]
fn a_row_does_not_depend_on_its_neighbours_nor_on_the_tile() {
    let first_row = |case: &Case| {
        let out = case.instance.params().iter().position(|param| param.name == "out").expect("it has a result");
        let results = Simulator(Order::Forward).run(case).expect("the case runs");
        let out = results[out].as_ref().expect("the result is a buffer");
        out.bytes()[..19 * 4].to_vec()
    };
    let rows: Vec<Vec<u8>> = product::first_rows().iter().map(first_row).collect();
    assert!(rows[0].iter().any(|byte| *byte != 0));
    assert!(rows.iter().all(|row| *row == rows[0]));
}

#[test]
fn activations_to_bf16() {
    check(product::rounding());
}

#[test]
fn the_tile_is_the_largest_that_leaves_nobody_without_work() {
    assert_eq!(Tile::choose(7, 262_144, 132), Tile::SMALL);
    assert_eq!(Tile::choose(512, 2560, 132), Tile::MEDIUM);
    assert_eq!(Tile::choose(512, 20480, 132), Tile::LARGE);
}

#[test]
fn a_width_that_is_not_whole_groups_is_refused() {
    let product = Product { dtype: gemma4c_blocks::DType::F16, k: 40, out: ElementType::F32, epilogue: Vec::new() };
    let text = product.instance(Tile::SMALL).expect("the compiler refuses it, not the builder").cuda();
    assert!(text.contains("static_assert(STEP % 32 == 0"), "{text}");
}
