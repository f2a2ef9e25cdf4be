//! The drafter's kernels: every case in the simulator under three orders and as host-compiled text.

use gemma4c_codegen::cases::draft;
use gemma4c_codegen::kernels::draft::accept;
use gemma4c_dsl::harness::{Bound, Case, Simulator};
use gemma4c_dsl::sim::Order;

#[test]
fn every_case_equals_its_oracle() {
    for case in draft::cases() {
        case.assert();
    }
}

/// The compiler refuses it as well: what the simulator requires is an assertion of the text.
#[test]
fn a_round_of_more_rows_than_a_warp_has_lanes_is_refused() {
    let instance = accept(32).expect("the compiler refuses it, not the builder");
    assert!(instance.cuda().contains("static_assert(MOST >= 1 && MOST < 32"));
    let case = Case::new("33 rows", instance)
        .grid([1, 1, 1])
        .buffer("drafts", vec![0u32; 32])
        .buffer("rows", vec![0u32; 33 * 16])
        .buffer("record", vec![0u32; 32])
        .buffer("history_tokens", vec![0u32; 33])
        .scalar("history_len", 1u32)
        .scalar("history_rows", 33u32)
        .buffer("given", vec![0u32; 32])
        .expect("given", vec![0u32; 32], Bound::Exact);
    let error = case.check_on(&Simulator(Order::Forward)).expect_err("a lane for every row").to_string();
    assert!(error.contains("require!(MOST >= 1 && MOST < 32)"), "{error}");
}
