//! Stamped kernels: what is put into a text, and that it compiles wherever clusters, early returns and grids of three dimensions are.

use crate::support;
use gemma4c_codegen::arch::Arch;
use gemma4c_codegen::families::FAMILIES;
use gemma4c_codegen::kernels::source;
use gemma4c_codegen::nvrtc::{Options, Source};
use gemma4c_codegen::stamps::stamped;

#[test]
fn a_kernel_that_waits_notes_its_start_its_wait_and_its_end() {
    let text = "// Doubles.\nextern \"C\" __global__ void twice(\n    float* x) {\n    grid_dependency_wait();\n    x[0] *= 2;\n}\n";
    let found = stamped(&Source { name: "twice".into(), text: text.into() }).expect("it waits");
    insta::with_settings!({
        snapshot_path => "../../../snapshots/cli",
        prepend_module_to_snapshot => false,
        omit_expression => true,
    }, { insta::assert_snapshot!("profile_stamped", found.text) });
}

#[test]
fn a_kernel_that_waits_for_nobody_has_no_stamps() {
    for text in ["extern \"C\" __global__ void f(float* x) {\n    x[0] = 1;\n}\n", "grid_dependency_wait();", ""] {
        assert_eq!(stamped(&Source { name: "f".into(), text: text.into() }), None, "{text}");
    }
}

#[test]
fn stamped_kernels_of_a_decode_compile() {
    let Some(toolchain) = support::toolchain() else { return };
    for name in ["matvec", "attention_step", "per_layer_step", "route", "pick"] {
        let family = FAMILIES.iter().find(|family| family.kernels.iter().any(|kernel| kernel.name == name));
        let family = family.expect("every kernel has a family");
        let instance = family.of_cases().iter().find(|instance| instance.def.name == name).expect("it has a case");
        let source = stamped(&source(instance)).expect("it waits for its predecessor");
        let compiled = toolchain.compile(&source, Arch::Sm90a, Options::default());
        assert!(compiled.is_ok(), "{name}: {}", compiled.expect_err("checked"));
    }
}
