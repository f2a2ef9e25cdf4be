//! What instances take of an SM: registers, shared memory, stack and spills, as the assembler reports them.

use std::fmt::Write as _;

use crate::arch::Arch;
use crate::families::{NamedInstance, kernel};
use crate::nvrtc::{Compiler, Cubin, Job, NvrtcError, Options, Resources};

/// One instance of a family, compiled for one architecture.
#[derive(Clone, Debug)]
pub struct Usage {
    pub family: &'static str,
    pub kernel: &'static str,
    pub label: String,
    pub is_decode: bool,
    pub threads: u32,
    /// Bytes of shared memory: what the assembler counts, and what a launch adds.
    pub shared_bytes: u64,
    pub resources: Resources,
    /// What the compiler and its assembler warn of: a serialised wgmma, say.
    pub warnings: Vec<String>,
}

/// Compiles instances for one architecture, in order. Every failure is reported, not the first.
pub fn measure(compiler: &Compiler, arch: Arch, instances: &[NamedInstance]) -> Result<Vec<Usage>, Vec<NvrtcError>> {
    let sources: Vec<_> = instances.iter().map(NamedInstance::source).collect();
    let jobs: Vec<_> = sources.iter().map(|source| Job { source, arch, options: Options::default() }).collect();
    let (mut usages, mut errors) = (Vec::new(), Vec::new());
    for (named, compiled) in instances.iter().zip(compiler.compile_all(&jobs)) {
        match compiled {
            Ok(compiled) => usages.push(usage(named, compiled.cubin)),
            Err(error) => errors.push(error),
        }
    }
    if errors.is_empty() { Ok(usages) } else { Err(errors) }
}

fn usage(named: &NamedInstance, cubin: Cubin) -> Usage {
    let (instance, resources) = (&named.instance, cubin.resources);
    let dynamic = if instance.def.launch.dynamic_shared { instance.shared_bytes() as u64 } else { 0 };
    Usage {
        family: kernel(instance.def.name).map_or("", |(family, _)| family.name),
        kernel: instance.def.name,
        label: named.label.clone(),
        is_decode: named.is_decode(),
        threads: instance.block(),
        shared_bytes: u64::from(resources.shared_bytes) + dynamic,
        resources,
        warnings: cubin.warnings().map(str::to_owned).collect(),
    }
}

/// The table, grouped by kernel. The label comes last, so that a longer one moves no column of its neighbours.
pub fn table(usages: &[Usage]) -> String {
    let mut text = String::from("threads  registers  shared  stack  spilled  instance\n");
    let mut last = "";
    for usage in usages {
        if usage.kernel != last {
            last = usage.kernel;
            let _ = writeln!(text, "\n{} / {last}", usage.family);
        }
        let Usage { threads, shared_bytes, label, resources, .. } = usage;
        let Resources { registers, stack_bytes, spill_stores, spill_loads, .. } = resources;
        let spilled = spill_stores + spill_loads;
        let _ = writeln!(text, "{threads:7}  {registers:9}  {shared_bytes:6}  {stack_bytes:5}  {spilled:7}  {label}");
    }
    text
}
