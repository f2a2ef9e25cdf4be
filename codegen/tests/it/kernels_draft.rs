//! The drafter's kernels: every case in the simulator under three orders and as host-compiled text.

use gemma4c_codegen::cases::draft;

#[test]
fn every_case_equals_its_oracle() {
    for case in draft::cases() {
        case.assert();
    }
}
