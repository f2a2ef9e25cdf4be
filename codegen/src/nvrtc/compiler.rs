//! A toolchain with a cache, for many kernels at once.

use rayon::prelude::*;

use super::cache::{Cache, Key};
use super::error::NvrtcError;
use super::job::{Compiled, Job};
use super::toolchain::{self, Toolchain};

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

    fn cache_key(&self, Job { source, arch, options }: Job<'_>) -> Key {
        let arguments = toolchain::arguments(arch, options).join("\n");
        Key::of(&[self.toolchain.identity(), &arguments, &source.name, &source.text])
    }

    /// Compiles all of them on all cores. Results come in the jobs' order, and every failure is reported, not the
    /// first.
    pub fn compile_all(&self, jobs: &[Job<'_>]) -> Vec<Result<Compiled, NvrtcError>> {
        jobs.par_iter().map(|job| self.compile(*job)).collect()
    }
}
