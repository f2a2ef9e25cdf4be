//! The norms: every case in the simulator under three orders and as host-compiled text.

use gemma4c_codegen::cases::norm;
use gemma4c_codegen::kernels::norm::norm as instance;
use gemma4c_codegen::kernels::outputs::Outputs;

#[test]
fn every_case_equals_its_oracle() {
    for case in norm::cases() {
        case.assert();
    }
}

#[test]
fn a_row_wider_than_a_block_is_refused() {
    let error = instance(8448, true, Outputs::FLOATS).expect_err("1056 threads are no block");
    assert_eq!(error.to_string(), "kernel rms_norm: block of 1056 threads: it must be a multiple of 32, at most 1024");
}
