//! The mixture of experts against plain sums in f64: in the simulator under three orders, and as host-compiled text.

use gemma4c_blocks::DType;
use gemma4c_codegen::cases::{gathered, grouped, moe};
use gemma4c_codegen::kernels::moe::gathered::down::GatheredDown;
use gemma4c_codegen::kernels::moe::gathered::gate_up::GatheredGateUp;
use gemma4c_codegen::kernels::moe::router::Router;
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
fn the_router_of_few_rows_is_a_cluster() {
    let router = Router { max_cluster: 16, ..Router::new(2816, 128, 8) };
    let cluster = |router: Router, rows| router.split_instance(rows, 132).expect("any router fits").cluster();
    assert_eq!([1, 2, 4, 8, 32].map(|rows| cluster(router, rows)), [12, 12, 12, 1, 1]);
    // Eleven warps have whole chunks of such a row; of others, none has.
    assert_eq!(cluster(Router { width: 2880, ..router }, 1), 16);
    assert_eq!(cluster(Router { max_cluster: 8, ..router }, 1), 1, "the GPU has no clusters of 12");
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

#[test]
fn what_cannot_be_gathered_is_refused_by_name() {
    let up = GatheredGateUp {
        dtype: DType::Q8_0,
        hidden: 64,
        k: 96,
        experts: 8,
        top: 2,
        dense: 0,
        rows: 4,
        quantised: true,
        multiprocessors: 132,
        shared_bytes: 99 << 10,
    };
    let down = GatheredDown {
        dtype: DType::Q8_0,
        outputs: 96,
        k: 64,
        experts: 8,
        top: 2,
        dense: 0,
        rows: 4,
        multiprocessors: 132,
        shared_bytes: 99 << 10,
    };
    assert!(up.instance().is_ok() && down.instance().is_ok());
    let hidden = GatheredGateUp { hidden: 40, ..up }.instance().unwrap_err().to_string();
    assert_eq!(hidden, "gathered experts: rows of 40 values are not whole groups of 32");
    let dense = GatheredDown { dense: 48, ..down }.instance().unwrap_err().to_string();
    assert_eq!(dense, "gathered experts: rows of 48 values are not whole groups of 32");
    let many = GatheredDown { experts: 513, ..down }.instance().unwrap_err().to_string();
    assert_eq!(many, "gathered experts: 513 of them are more than a block has threads to list them");
}
