//! NVRTC: CUDA C text in, machine code for one architecture out, with no GPU and no CUDA toolkit needed.
//!
//! [`Toolchain`] is a libnvrtc that was found and loaded; [`Compiler`] adds a cache on disk and compiles many kernels at
//! once. One source text holds one kernel. Texts are assembled elsewhere, launch limits are checked elsewhere, and nothing
//! here talks to the driver.
//!
//! Every compilation passes `--fmad=false`: a product and a sum are contracted where the kernel says so and nowhere else,
//! so that the text means the same here, in the simulator and under the host's compiler.

#[doc(hidden)]
pub mod cache;
#[doc(hidden)]
pub mod error;
mod find;
#[doc(hidden)]
pub mod log;
mod sys;
mod toolchain;

pub use cache::Cache;
pub use error::{Looked, NvrtcError};
pub use find::Places;
pub use log::Resources;
pub use toolchain::{Toolchain, Version};

use crate::arch::Arch;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

/// One kernel's text, complete: NVRTC knows no header of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// The name of its `extern "C" __global__` function.
    pub name: String,
    pub text: String,
}

impl Source {
    /// What NVRTC's log calls the text.
    fn file_name(&self) -> String {
        format!("{}.cu", self.name)
    }
}

/// What may differ from kernel to kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// A ceiling on registers a thread; beyond it the compiler spills.
    pub max_registers: Option<u32>,
}

/// A compiled kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cubin {
    /// Machine code; of [`Arch::Compute80`] the text of a PTX module, with a zero byte at its end.
    pub bytes: Vec<u8>,
    /// All zero for PTX.
    pub resources: Resources,
    /// What NVRTC and its assembler said, without timings: equal inputs give equal logs.
    pub log: String,
}

impl Cubin {
    /// Warnings and the assembler's notes of lost performance (a serialised wgmma, say).
    pub fn warnings(&self) -> impl Iterator<Item = &str> {
        self.log.lines().filter(|line| log::is_warning(line))
    }
}

/// One kernel to compile.
#[derive(Clone, Copy, Debug)]
pub struct Job<'a> {
    pub source: &'a Source,
    pub arch: Arch,
    pub options: Options,
}

/// A compiled kernel, and whether the cache had it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiled {
    pub cubin: Cubin,
    pub from_cache: bool,
}

/// A toolchain with a cache.
#[derive(Debug)]
pub struct Compiler {
    pub toolchain: Toolchain,
    pub cache: Cache,
}

impl Compiler {
    pub fn compile(&self, job: Job<'_>) -> Result<Compiled, NvrtcError> {
        let Job { source, arch, options } = job;
        let key = self.cache_key(job);
        if let Some(cubin) = self.cache.load(key) {
            return Ok(Compiled { cubin, from_cache: true });
        }
        let cubin = self.toolchain.compile(source, arch, options)?;
        self.cache.store(key, &cubin);
        Ok(Compiled { cubin, from_cache: false })
    }

    /// The identity of a compilation, short: by this compiler, with these arguments, of this text.
    pub fn key(&self, job: Job<'_>) -> u64 {
        self.cache_key(job).short()
    }

    fn cache_key(&self, Job { source, arch, options }: Job<'_>) -> cache::Key {
        let arguments = toolchain::arguments(arch, options).join("\n");
        cache::Key::of(&[self.toolchain.identity(), &arguments, &source.name, &source.text])
    }

    /// Compiles all of them on all cores. Results come in the jobs' order, and every failure is reported, not the first.
    pub fn compile_all(&self, jobs: &[Job<'_>]) -> Vec<Result<Compiled, NvrtcError>> {
        jobs.par_iter().map(|job| self.compile(*job)).collect()
    }
}
