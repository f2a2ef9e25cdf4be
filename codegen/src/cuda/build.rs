//! Compiles the kernels of a lowered program for every architecture of the plan.

use gemma4c_plan::cuda::{Code, Cuda, Image};

use super::Lowered;
use crate::arch::Arch;
use crate::kernels::source;
use crate::nvrtc::{Compiler, Job, NvrtcError, Options};

/// The GPU's side of a plan, and how many of its cubins were in the cache.
pub fn build(lowered: Lowered, architectures: &[Arch], compiler: &Compiler) -> Result<(Cuda, usize), NvrtcError> {
    let sources: Vec<_> = lowered.instances.iter().map(source).collect();
    let jobs: Vec<Job<'_>> = sources
        .iter()
        .flat_map(|source| {
            architectures.iter().map(move |arch| Job { source, arch: *arch, options: Options::default() })
        })
        .collect();
    let mut cached = 0;
    let mut images = Vec::new();
    for compiled in compiler.compile_all(&jobs) {
        let compiled = compiled?;
        cached += usize::from(compiled.from_cache);
        images.push(Image(compiled.cubin.bytes));
    }
    let mut images = images.into_iter();
    let code = sources
        .into_iter()
        .map(|source| Code { source: source.text, cubins: images.by_ref().take(architectures.len()).collect() })
        .collect();
    let mut program = lowered.program;
    program.architectures = architectures.iter().map(|arch| arch.name().to_owned()).collect();
    program.toolchain = format!("NVRTC {}", compiler.toolchain.version());
    Ok((Cuda { program, code }, cached))
}
