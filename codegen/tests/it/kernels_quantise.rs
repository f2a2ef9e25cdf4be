//! The activation quantisation against its definition: in the simulator under three orders, and as host-compiled text.

use gemma4c_codegen::cases::quantise::cases;

#[test]
fn codes_scales_and_sums_are_the_definitions() {
    for case in cases() {
        case.assert();
    }
}
