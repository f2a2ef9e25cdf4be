//! The gather: every type's values are those of the block table, to the bit.

use gemma4c_codegen::cases::gather;

#[test]
fn every_case_equals_its_oracle() {
    for case in gather::cases() {
        case.assert();
    }
}
