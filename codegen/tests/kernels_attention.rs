//! Attention against its definition: in the simulator under three orders, and as host-compiled text.

use gemma4c_codegen::cases::attention::cases;

#[test]
fn every_case_equals_its_oracle() {
    for case in cases() {
        case.assert();
    }
}
