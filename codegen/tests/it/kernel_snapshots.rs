//! Every kernel as it is reviewed: its CUDA text, which is what NVRTC gets. The headers of its instances follow from plans: they
//! are reviewed where models are known, in `tests/it/kernel_instances.rs` of the whole project.
//!
//! A change that should leave the kernels alone proves it by changing nothing here. `cargo insta review` accepts what is meant.

use gemma4c_codegen::families::{self, FAMILIES, Family};
use gemma4c_dsl::{DeviceDef, KernelDef, StructDef};
use serde::Serialize;
use std::collections::BTreeSet;
use std::path::Path;

/// What fusion fills and a launch must know, for the header of a kernel's snapshot. Nothing that the texts below it do not
/// say: a header is not compared.
#[derive(Serialize)]
struct Facts {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    slots: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    launch: Vec<&'static str>,
}

impl Facts {
    fn of(kernel: &KernelDef) -> Facts {
        let typed = |(name, ty): &(&str, &str)| format!("{name}: {ty}");
        let slot = |slot: &gemma4c_dsl::SlotDef| {
            let params: Vec<_> = slot.params.iter().map(typed).collect();
            format!("{}({}) -> {}", slot.name, params.join(", "), slot.output)
        };
        let launch = [
            (kernel.launch.dependent, "starts before its predecessor ends"),
            (kernel.launch.dynamic_shared, "dynamic shared memory"),
        ];
        Facts {
            slots: kernel.slots.iter().map(slot).collect(),
            launch: launch.into_iter().filter_map(|(is, what)| is.then_some(what)).collect(),
        }
    }
}

/// The settings that all snapshots of kernels share.
fn settings(folder: &str, description: &str) -> insta::Settings {
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path(Path::new("../../../snapshots/kernels").join(folder));
    settings.set_prepend_module_to_snapshot(false);
    settings.set_description(description);
    settings
}

#[test]
fn every_kernel_has_its_cuda_text_reviewed() {
    for family in FAMILIES {
        for kernel in family.kernels {
            let mut settings = settings(family.name, family.about);
            let facts = Facts::of(kernel);
            if !(facts.slots.is_empty() && facts.launch.is_empty()) {
                settings.set_info(&facts);
            }
            settings.bind(|| insta::assert_snapshot!(kernel.name, kernel.cuda));
        }
    }
}

#[test]
fn every_device_function_has_its_cuda_text_reviewed() {
    for DeviceDef { name, cuda, .. } in families::device_functions() {
        settings("device", "a device function, for kernels to call and slots to be filled with")
            .bind(|| insta::assert_snapshot!(*name, *cuda));
    }
}

#[test]
fn every_struct_has_its_cuda_text_reviewed() {
    for StructDef { name, cuda, .. } in families::structs() {
        settings("structs", "a struct, for kernels and device functions to use")
            .bind(|| insta::assert_snapshot!(*name, *cuda));
    }
}

#[test]
fn names_are_unique_and_every_kernel_has_a_case() {
    let mut seen = BTreeSet::new();
    for family in FAMILIES {
        let cases = family.of_cases();
        for kernel in family.kernels {
            assert!(seen.insert(kernel.name), "two kernels are called {}", kernel.name);
            assert!(!kernel.doc.is_empty(), "kernel {} does not say what it does", kernel.name);
            assert!(cases.iter().any(|instance| instance.def == *kernel), "kernel {} has no case", kernel.name);
        }
    }
}

#[test]
fn two_device_functions_never_share_a_name() {
    let texts = FAMILIES.iter().flat_map(Family::of_cases).flat_map(|instance| instance.devices());
    let known = families::device_functions();
    for device in texts {
        let listed = known.iter().find(|other| other.name == device.name);
        assert!(listed.is_some_and(|other| other.cuda == device.cuda), "two device functions {}", device.name);
    }
}

/// A kernel that is renamed or deleted leaves no snapshot behind.
#[test]
fn every_snapshot_is_of_a_kernel_that_exists() {
    let mut expected: BTreeSet<String> = families::device_functions()
        .iter()
        .map(|device| format!("device/{}.snap", device.name))
        .chain(families::structs().iter().map(|def| format!("structs/{}.snap", def.name)))
        .collect();
    for family in FAMILIES {
        expected.insert(format!("{}/instances.snap", family.name));
        expected.extend(family.kernels.iter().map(|kernel| format!("{}/{}.snap", family.name, kernel.name)));
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../snapshots/kernels");
    let files = |folder: &Path| -> Vec<_> {
        let entries = std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        entries.map(|entry| entry.expect("the folder is readable").path()).collect()
    };
    let (folders, mut found): (Vec<_>, Vec<_>) = files(&root).into_iter().partition(|path| path.is_dir());
    found.extend(folders.iter().flat_map(|folder| files(folder)));
    for path in found.iter().filter(|path| path.extension().is_some_and(|extension| extension == "snap")) {
        let name = path.strip_prefix(&root).expect("it was found there").to_string_lossy().into_owned();
        assert!(expected.contains(&name), "snapshots/kernels/{name} shows nothing that exists: delete it");
    }
}
