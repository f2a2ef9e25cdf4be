//! Products of several rows against the product of one: equal bits, in the simulator under three orders, and as host-compiled text.

use gemma4c_codegen::cases::rows;
use gemma4c_dsl::harness::Case;

fn check(cases: Vec<Case>) {
    assert!(!cases.is_empty());
    for case in cases {
        case.assert();
    }
}

#[test]
fn every_type_has_the_bits_of_one_row() {
    check(rows::types());
}

#[test]
fn widths_and_numbers_of_rows_that_leave_lanes_over() {
    check(rows::shapes());
}

#[test]
fn prologues_and_epilogues_have_the_bits_of_one_row() {
    check(rows::fusions());
}
