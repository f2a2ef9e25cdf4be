//! The GPUs a program can be made for: what its launches are shaped by, and the limits its work is held against.
//!
//! An [`Arch`] decides which instructions there are; a target decides how many SMs there are to give work to, how much shared memory a
//! block may have, and how fast memory and tensor cores are. One table serves `gemma4c compile --gpu` and `gemma4c inspect --gpu`. A GPU that is
//! not in it is a target too, by what its driver says ([`Target::of_device`]). Nothing here asks a driver.

use std::borrow::Cow;
use std::fmt;

use gemma4c_plan::cuda::Gpu;

use crate::arch::Arch;

/// A GPU, as far as kernels are chosen by it.
#[derive(Clone, Debug, PartialEq)]
pub struct Target {
    /// As `--gpu` takes it; of a GPU that is not in the table, what its driver calls it.
    pub key: Cow<'static, str>,
    pub name: Cow<'static, str>,
    /// What its kernels are compiled for.
    pub arch: Arch,
    pub multiprocessors: u32,
    /// The most shared memory one block may ask for, in bytes. Not always the architecture's: machine code for 8.0 also runs on the 8.6, which has
    /// less.
    pub shared_bytes_per_block: u32,
    pub shared_bytes_per_multiprocessor: u32,
    pub l2_bytes: u64,
    /// Bytes a second from its memory.
    pub bandwidth: f64,
    /// bf16 operations a second, dense, accumulated in f32.
    pub compute: f64,
    /// Where the last two numbers are from.
    pub source: &'static str,
    /// Whether the constants of the rules were measured on this GPU ([`crate::measured`]); else its choices are made "by rule".
    pub measured: bool,
}

/// A name that no GPU of the table has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no GPU is called `{0}`: there are {known}", known = keys())]
pub struct UnknownGpu(pub String);

const KIB: u32 = 1 << 10;
const MIB: u64 = 1 << 20;
const DATA_SHEET: &str = "data sheet";
/// Shared memory of each block that the driver keeps for itself.
const RESERVED: u32 = KIB;

/// `(key, name, SMs, L2 in MiB, bandwidth in TB/s, compute in TFLOP/s)`
type Row = (&'static str, &'static str, u32, u64, f64, f64);

const fn row(arch: Arch, (key, name, multiprocessors, l2, bandwidth, compute): Row) -> Target {
    Target {
        key: Cow::Borrowed(key),
        name: Cow::Borrowed(name),
        arch,
        multiprocessors,
        shared_bytes_per_block: arch.max_shared_bytes_per_block(),
        shared_bytes_per_multiprocessor: arch.max_shared_bytes_per_block() + RESERVED,
        l2_bytes: l2 * MIB,
        bandwidth: bandwidth * 1e12,
        compute: compute * 1e12,
        source: DATA_SHEET,
        measured: false,
    }
}

const fn sharing(bytes: u32, mut gpu: Target) -> Target {
    (gpu.shared_bytes_per_block, gpu.shared_bytes_per_multiprocessor) = (bytes, bytes + RESERVED);
    gpu
}

const fn measured(mut gpu: Target) -> Target {
    (gpu.source, gpu.measured) = ("measured", true);
    gpu
}

/// The first one of an architecture stands for it where nobody chose.
pub static GPUS: [Target; 12] = [
    measured(row(Arch::Sm90a, ("h200", "H200", 132, 50, 4.4, 790.0))),
    row(Arch::Sm90a, ("h100", "H100 SXM", 132, 50, 3.35, 989.0)),
    row(Arch::Sm90a, ("h100-pcie", "H100 PCIe", 114, 50, 2.0, 756.0)),
    row(Arch::Sm80, ("a100", "A100 80GB", 108, 40, 2.04, 312.0)),
    sharing(99 * KIB, row(Arch::Sm80, ("rtx-3090", "RTX 3090", 82, 6, 0.936, 71.0))),
    row(Arch::Sm89, ("rtx-4090", "RTX 4090", 128, 72, 1.01, 165.0)),
    row(Arch::Sm89, ("rtx-4070-ti", "RTX 4070 Ti", 60, 48, 0.504, 80.0)),
    row(Arch::Sm89, ("l40s", "L40S", 142, 96, 0.864, 362.0)),
    row(Arch::Sm120a, ("rtx-5090", "RTX 5090", 170, 96, 1.79, 210.0)),
    row(Arch::Sm120a, ("rtx-pro-6000", "RTX PRO 6000 Blackwell", 188, 128, 1.79, 504.0)),
    row(Arch::Sm100a, ("b200", "B200", 148, 126, 8.0, 2250.0)),
    row(Arch::Sm103a, ("b300", "B300", 148, 126, 8.0, 2250.0)),
];

/// What PTX is shaped for, as nobody knows which GPU will run it: the SMs of an A100, as a second wave on a smaller GPU costs more than SMs
/// that a larger one has over, and the shared memory that all have.
static ANY: Target = row(Arch::Compute80, ("compute_80", "any GPU from 8.0 on", 108, 40, 2.04, 312.0));

/// What a driver says of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFacts {
    pub name: String,
    pub compute_capability: (u32, u32),
    pub multiprocessors: u32,
    pub shared_bytes_per_block: u32,
    pub shared_bytes_per_multiprocessor: u32,
    pub l2_bytes: u64,
}

fn keys() -> String {
    GPUS.iter().map(|gpu| gpu.key.as_ref()).collect::<Vec<_>>().join(", ")
}

/// The GPU of an architecture whose number of SMs is nearest. Bandwidth and compute are taken from it.
fn nearest(arch: Arch, multiprocessors: u32) -> Target {
    let same = GPUS.iter().filter(|gpu| gpu.arch == arch);
    let nearest = same.min_by_key(|gpu| gpu.multiprocessors.abs_diff(multiprocessors));
    Target { source: "nearest GPU of the table", ..nearest.cloned().unwrap_or_else(|| Target::of_arch(arch)) }
}

impl Target {
    /// The GPU of that key.
    pub fn find(key: &str) -> Result<&'static Target, UnknownGpu> {
        GPUS.iter().find(|gpu| gpu.key == key).ok_or_else(|| UnknownGpu(key.to_owned()))
    }

    /// The GPU that stands for an architecture: the table's first.
    pub fn of_arch(arch: Arch) -> Target {
        // Every architecture has a row; a test says so.
        GPUS.iter().chain([&ANY]).find(|gpu| gpu.arch == arch).unwrap_or(&GPUS[0]).clone()
    }

    /// The GPU that a driver describes, as a target of its own; `None` where no architecture runs on it. The table's row is taken
    /// where the two agree in all that launches are shaped by.
    pub fn of_device(facts: &DeviceFacts) -> Option<Target> {
        let arch = Arch::for_capability(facts.compute_capability)?;
        let same = |gpu: &&Target| {
            gpu.arch == arch
                && gpu.multiprocessors == facts.multiprocessors
                && gpu.shared_bytes_per_block == facts.shared_bytes_per_block
        };
        // `NVIDIA H200` ends in the name of a row, `NVIDIA H100 80GB HBM3` does not: it has that of another row's numbers.
        let named = |gpu: &&Target| facts.name.to_lowercase().contains(&gpu.name.to_lowercase());
        let like = GPUS.iter().filter(same);
        if let Some(row) = like.clone().find(named) {
            return Some(row.clone());
        }
        Some(Target {
            key: Cow::Owned(facts.name.clone()),
            name: Cow::Owned(facts.name.clone()),
            multiprocessors: facts.multiprocessors,
            shared_bytes_per_block: facts.shared_bytes_per_block,
            shared_bytes_per_multiprocessor: facts.shared_bytes_per_multiprocessor,
            l2_bytes: facts.l2_bytes,
            measured: false,
            ..nearest(arch, facts.multiprocessors)
        })
    }

    /// What a plan says of it.
    pub fn described(&self) -> Gpu {
        Gpu {
            key: self.key.to_string(),
            name: self.name.to_string(),
            architecture: self.arch.name().to_owned(),
            multiprocessors: self.multiprocessors,
            shared_bytes_per_block: self.shared_bytes_per_block,
            l2_bytes: self.l2_bytes,
            measured: self.measured,
        }
    }

    /// The GPU that a plan's program is for: the table's where it has it, else with the bandwidth and compute of the nearest of its architecture.
    /// `None` for an architecture that is none of ours.
    pub fn of_program(gpu: &Gpu) -> Option<Target> {
        let arch = Arch::from_name(&gpu.architecture)?;
        let row = GPUS.iter().chain([&ANY]).find(|row| row.described() == *gpu);
        Some(row.cloned().unwrap_or_else(|| Target {
            key: Cow::Owned(gpu.key.clone()),
            name: Cow::Owned(gpu.name.clone()),
            multiprocessors: gpu.multiprocessors,
            shared_bytes_per_block: gpu.shared_bytes_per_block,
            shared_bytes_per_multiprocessor: gpu.shared_bytes_per_block + RESERVED,
            l2_bytes: gpu.l2_bytes,
            measured: gpu.measured,
            ..nearest(arch, gpu.multiprocessors)
        }))
    }

    /// The same GPU with that many of its SMs, as a program restricted to them sees it.
    pub fn with_multiprocessors(self, multiprocessors: u32) -> Target {
        if multiprocessors == self.multiprocessors {
            return self;
        }
        Target {
            key: Cow::Owned(format!("{}-{multiprocessors}", self.key)),
            name: Cow::Owned(format!("{} with {multiprocessors} SMs", self.name)),
            multiprocessors,
            measured: false,
            ..self
        }
    }

    /// Seconds that a launch takes at least: all its bytes at full bandwidth, or all its arithmetic on full tensor cores, whichever is
    /// longer. No launch reaches it; how near one comes is what a profile tells.
    pub fn floor(&self, bytes: u64, flops: u64) -> f64 {
        (bytes as f64 / self.bandwidth).max(flops as f64 / self.compute)
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}, {} SMs)", self.name, self.arch, self.multiprocessors)
    }
}
