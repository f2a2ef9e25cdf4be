//! Every instance that a plan may use, compiled for every architecture that has what it uses, with no GPU; and what each
//! takes of one.
//!
//! The tables hold for the NVRTC that the test script fetches; another version compiles everything all the same, and its
//! registers are its own.

mod support;

use gemma4c_codegen::arch::Arch;
use gemma4c_codegen::kernels::resources::{Usage, measure, table};
use gemma4c_codegen::kernels::{FAMILIES, Family, NamedInstance};
use gemma4c_codegen::nvrtc::{Cache, Compiler, Version};
use std::io::Write;

const TABLES_ARE_OF: Version = Version { major: 13, minor: 0 };

fn instances(arch: Arch) -> Vec<(&'static Family, NamedInstance)> {
    let of = |family: &'static Family| family.instances().into_iter().map(move |named| (family, named));
    FAMILIES.iter().flat_map(of).filter(|(_, named)| arch.has_all_of(&named.instance)).collect()
}

/// Whether decode kernels may spill registers. One that does pays for it in every token.
#[derive(PartialEq)]
enum Spills {
    Allowed,
    Refused,
}

/// Compiles everything for one architecture, and shows the table of what it takes.
fn check(arch: Arch, spills: Spills) {
    let Some(toolchain) = support::toolchain() else { return };
    let version = toolchain.version();
    let compiler = Compiler { toolchain, cache: Cache::from_env() };
    let usages = measure(&compiler, arch, &instances(arch)).unwrap_or_else(|errors| {
        let texts: Vec<String> = errors.iter().map(ToString::to_string).collect();
        panic!("{} of the instances do not compile for {arch}:\n\n{}", texts.len(), texts.join("\n\n"))
    });
    let spilling = |usage: &&Usage| usage.is_decode && usage.resources.spills();
    let found: Vec<String> = usages.iter().filter(spilling).map(|u| format!("{}: {}", u.kernel, u.label)).collect();
    let is_fine = spills == Spills::Allowed || found.is_empty();
    assert!(is_fine, "decode kernels that spill registers on {arch}:\n  {}", found.join("\n  "));
    if version != TABLES_ARE_OF {
        let note = format!("SKIPPED: the table of {arch} is of NVRTC {TABLES_ARE_OF}, this one is {version}");
        writeln!(std::io::stderr(), "{note}").expect("stderr takes a message");
        return;
    }
    let resources = table(&usages);
    insta::with_settings!({
        snapshot_path => "../../snapshots/kernels",
        prepend_module_to_snapshot => false,
        description => format!("What every instance takes on {arch}: per thread registers, bytes of stack and of spills; per block threads and bytes of shared memory."),
    }, { insta::assert_snapshot!(format!("resources-{arch}"), resources) });
}

#[test]
fn every_instance_compiles_for_sm_80() {
    check(Arch::Sm80, Spills::Allowed);
}

#[test]
fn every_instance_compiles_for_sm_89_and_decode_kernels_spill_nothing() {
    check(Arch::Sm89, Spills::Refused);
}

#[test]
fn every_instance_compiles_for_sm_90a_and_decode_kernels_spill_nothing() {
    check(Arch::Sm90a, Spills::Refused);
}

#[test]
fn every_instance_compiles_for_sm_120a() {
    check(Arch::Sm120a, Spills::Allowed);
}
