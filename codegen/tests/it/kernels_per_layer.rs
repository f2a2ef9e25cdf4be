//! Per-layer embeddings: every case in the simulator under three orders and as host-compiled text.

use gemma4c_codegen::cases::per_layer;

#[test]
fn every_case_equals_its_oracle() {
    for case in per_layer::cases() {
        case.assert();
    }
}
