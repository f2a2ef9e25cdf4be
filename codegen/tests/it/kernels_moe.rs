//! The mixture of experts against plain sums in f64: in the simulator under three orders, and as host-compiled text.

use gemma4c_codegen::cases::{gathered, grouped, moe};
use gemma4c_dsl::harness::Case;

fn check(cases: Vec<Case>) {
    assert!(!cases.is_empty());
    for case in cases {
        case.assert();
    }
}

#[test]
fn the_router_chooses_and_weighs() {
    check(moe::routers());
}

#[test]
fn the_router_enters_the_mixture() {
    check(moe::entries());
}

#[test]
fn a_norm_holds_when_an_update_cancels_a_massive_channel() {
    check(moe::cancelling_entries());
}

#[test]
fn experts_of_every_type() {
    check(moe::types());
}

#[test]
fn rows_widths_and_choices() {
    check(moe::shapes());
}

#[test]
fn rows_are_sorted_by_expert() {
    check(grouped::sorts());
}

#[test]
fn gathered_experts_have_the_bits_of_one_row() {
    check(gathered::cases());
}
