//! NVRTC accepts the text of intrinsics that no kernel of the library uses yet, on every architecture that has them.

#[path = "../../../dsl/tests/kernels/bulk.rs"]
mod bulk;
#[path = "../../../dsl/tests/kernels/tiles.rs"]
mod tiles;

use gemma4c_codegen::arch::Arch;
use gemma4c_codegen::nvrtc::{Options, Source};
use gemma4c_dsl::{Instance, KernelDef};

/// Compiles a kernel without parameters for these architectures, which must be those that have all it uses.
fn compiles(def: &'static KernelDef, architectures: &[Arch]) {
    let instance = Instance::of(def).build().expect("an instance without parameters");
    let able: Vec<Arch> = Arch::ALL.into_iter().filter(|arch| arch.has_all_of(&instance)).collect();
    assert_eq!(able, architectures, "{}", def.name);
    let Some(toolchain) = crate::support::toolchain() else { return };
    let source = Source { name: def.name.to_string(), text: instance.cuda() };
    for arch in able {
        match toolchain.compile(&source, arch, Options::default()) {
            Ok(cubin) => assert_eq!(cubin.warnings().next(), None, "{} for {arch}", def.name),
            Err(error) => panic!("{} for {arch}: {error}", def.name),
        }
    }
}

#[test]
fn mbarriers_and_bulk_copies() {
    let with_bulk_copies: Vec<Arch> = Arch::ALL.into_iter().filter(|arch| arch.has_tma()).collect();
    assert!(with_bulk_copies.contains(&Arch::Sm90a) && !with_bulk_copies.contains(&Arch::Sm89));
    compiles(bulk::ring::DEF, &with_bulk_copies);
    compiles(tiles::last_tile::DEF, &with_bulk_copies);
    compiles(tiles::sums_of_tiles::DEF, &with_bulk_copies);
}
