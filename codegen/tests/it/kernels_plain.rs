//! The plain kernels: every case in the simulator under three orders and as host-compiled text.

use gemma4c_codegen::cases::plain;
use gemma4c_dsl::harness::Case;

fn check(cases: Vec<Case>) {
    assert!(!cases.is_empty());
    for case in cases {
        case.assert();
    }
}

#[test]
fn element_wise_operations() {
    check(plain::maps());
}

#[test]
fn rows_that_move() {
    check(plain::moves());
}

#[test]
fn rotations() {
    check(plain::rotations());
}

#[test]
fn products_of_every_type() {
    check(plain::products());
}

#[test]
fn experts_chosen_multiplied_and_summed() {
    check(plain::mixtures());
}
