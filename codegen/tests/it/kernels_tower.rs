//! A tower's kernels: every case in the simulator under three orders and as host-compiled text, and what has no instance.

use gemma4c_codegen::families::family;
use gemma4c_codegen::kernels::tower::flash;

#[test]
fn every_case_equals_its_oracle() {
    for case in (family("tower").expect("a family").cases)() {
        case.assert();
    }
}

#[test]
fn heads_that_tensor_cores_do_not_take_have_no_instance() {
    for dim in [4, 64, 72, 128] {
        assert!(flash::instance(dim).unwrap().is_some(), "{dim}");
    }
    for dim in [2, 66, 132] {
        assert!(flash::instance(dim).unwrap().is_none(), "{dim}");
    }
}
