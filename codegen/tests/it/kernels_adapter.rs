//! The halves of adapters: every case in the simulator under three orders and as host-compiled text.

use gemma4c_codegen::cases::adapter;

#[test]
fn every_case_equals_its_oracle() {
    for case in adapter::cases() {
        case.assert();
    }
}
