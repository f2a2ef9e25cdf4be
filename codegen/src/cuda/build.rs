//! Compiles the kernels of a lowered program for its GPU's architecture.

use gemma4c_plan::cuda::{Code, Cuda, Image};

use super::Lowered;
use crate::arch::Arch;
use crate::kernels::source;
use crate::nvrtc::{Compiler, Job, NvrtcError, Options};

/// The program with its kernels' code, and how much of that was in the cache.
pub fn build(lowered: Lowered, arch: Arch, compiler: &Compiler) -> Result<(Cuda, usize), NvrtcError> {
    let sources: Vec<_> = lowered.instances.iter().map(source).collect();
    let jobs: Vec<Job<'_>> = sources.iter().map(|source| Job { source, arch, options: Options::default() }).collect();
    let mut cached = 0;
    let mut code = Vec::new();
    for (source, compiled) in sources.iter().zip(compiler.compile_all(&jobs)) {
        let compiled = compiled?;
        cached += usize::from(compiled.from_cache);
        code.push(Code { source: source.text.clone(), image: Image(compiled.cubin.bytes) });
    }
    let mut program = lowered.program;
    program.toolchain = format!("NVRTC {}", compiler.toolchain.version());
    Ok((Cuda { program, code }, cached))
}
