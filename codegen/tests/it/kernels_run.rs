//! Products in one launch: a layer's against plain sums in f64, by one block in the simulator and as host-compiled text, by several in the simulator.

use gemma4c_codegen::cases::run;
use gemma4c_dsl::harness::Simulator;
use gemma4c_dsl::sim::Order;

#[test]
fn every_case_equals_its_oracle() {
    for case in run::cases() {
        case.assert();
    }
}

#[test]
fn blocks_exchange_vectors_in_any_order() {
    for case in run::of_several_blocks() {
        for order in Order::ALL {
            case.check_on(&Simulator(order)).unwrap();
        }
    }
}

/// All blocks wait for each other: a grid that is not there as a whole would wait forever.
#[test]
fn a_grid_that_is_not_resident_is_found() {
    let case = run::layer(gemma4c_blocks::DType::Q8_0, 16);
    let error = case.check_on(&Simulator(Order::Forward)).unwrap_err().to_string();
    assert!(error.contains("blocks have yet to start"), "{error}");
}
