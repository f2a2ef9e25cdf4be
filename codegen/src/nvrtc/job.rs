//! What is compiled, and what comes of it.

use serde::{Deserialize, Serialize};

use super::log::{self, Resources};
use crate::arch::Arch;

/// One kernel's text, complete: NVRTC knows no header of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// The name of its `extern "C" __global__` function.
    pub name: String,
    pub text: String,
}

impl Source {
    /// What NVRTC's log calls the text.
    pub(super) fn file_name(&self) -> String {
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
