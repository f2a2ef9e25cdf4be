//! The repack kernels against the table: in the simulator under three orders, and as host-compiled text.

use gemma4c_codegen::cases::repack::cases;

#[test]
fn every_plane_of_every_type_is_the_tables() {
    for case in cases() {
        case.assert();
    }
}
