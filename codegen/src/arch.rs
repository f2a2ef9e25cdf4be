//! The GPU architectures a plan can be compiled for, and the facts kernels are chosen by.
//!
//! The `a` of `sm_90a` or `sm_120a` unlocks instructions that exist on that one generation only (wgmma, setmaxnreg), at
//! the price of machine code that runs nowhere else. The facts are the vendor's published limits; what a kernel reaches on
//! a given GPU is measured, not stated here. How many SMs a GPU has is its [`crate::target::Target`]'s to say.

use gemma4c_dsl::Instance;
use std::fmt;
use std::str::FromStr;

/// One compile target. Ordered from the oldest to the newest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Arch {
    /// PTX of 8.0, which a driver compiles for the GPU it finds: any from 8.0 on. Has what all of these have and no more.
    Compute80,
    /// Ampere: A100. Its machine code also runs on the later 8.x GPUs.
    Sm80,
    /// Ada: L4, L40, RTX 40.
    Sm89,
    /// Hopper: H100, H200.
    Sm90a,
    /// Blackwell of the data centre: B200. Its own tensor cores (tcgen05) are not used; `mma.sync` is.
    Sm100a,
    /// The same, later: B300.
    Sm103a,
    /// Blackwell without the data-centre tensor core: RTX 50, RTX PRO 6000.
    Sm120a,
}

/// A name that is none of ours.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown architecture `{0}`; known are {known}", known = Arch::names())]
pub struct UnknownArch(pub String);

impl Arch {
    /// Those with machine code: all but [`Arch::Compute80`].
    pub const ALL: [Arch; 6] = [Arch::Sm80, Arch::Sm89, Arch::Sm90a, Arch::Sm100a, Arch::Sm103a, Arch::Sm120a];

    /// The name as NVRTC's `--gpu-architecture` and our command line spell it.
    pub const fn name(self) -> &'static str {
        match self {
            Arch::Compute80 => "compute_80",
            Arch::Sm80 => "sm_80",
            Arch::Sm89 => "sm_89",
            Arch::Sm90a => "sm_90a",
            Arch::Sm100a => "sm_100a",
            Arch::Sm103a => "sm_103a",
            Arch::Sm120a => "sm_120a",
        }
    }

    pub fn from_name(name: &str) -> Option<Arch> {
        Arch::ALL.into_iter().chain([Arch::Compute80]).find(|arch| arch.name() == name)
    }

    /// All names, for a person to choose from.
    pub fn names() -> String {
        let names: Vec<&str> = Arch::ALL.into_iter().chain([Arch::Compute80]).map(Arch::name).collect();
        names.join(", ")
    }

    /// Whether its code is PTX, which a driver compiles, and not machine code.
    pub const fn is_ptx(self) -> bool {
        matches!(self, Arch::Compute80)
    }

    /// Compute capability, major and minor.
    pub const fn compute_capability(self) -> (u32, u32) {
        match self {
            Arch::Compute80 | Arch::Sm80 => (8, 0),
            Arch::Sm89 => (8, 9),
            Arch::Sm90a => (9, 0),
            Arch::Sm100a => (10, 0),
            Arch::Sm103a => (10, 3),
            Arch::Sm120a => (12, 0),
        }
    }

    /// Whether code for this architecture runs on a GPU of that compute capability. Plain targets run on the
    /// same generation from their own minor version on; the `a` targets on their own capability alone; PTX on all from its own on.
    pub const fn runs_on(self, (major, minor): (u32, u32)) -> bool {
        let (own_major, own_minor) = self.compute_capability();
        match self {
            Arch::Compute80 => major >= own_major,
            Arch::Sm80 | Arch::Sm89 => major == own_major && minor >= own_minor,
            _ => major == own_major && minor == own_minor,
        }
    }

    /// The best target for a GPU of that compute capability: the newest that runs on it; of a GPU that there is no machine code for, PTX.
    pub fn for_capability(capability: (u32, u32)) -> Option<Arch> {
        Arch::ALL.into_iter().rev().chain([Arch::Compute80]).find(|arch| arch.runs_on(capability))
    }

    /// Asynchronous tensor-core products of whole warpgroups.
    pub const fn has_wgmma(self) -> bool {
        matches!(self, Arch::Sm90a)
    }

    /// Whether the instance compiles for this architecture: it uses nothing that others alone have.
    pub fn has_all_of(self, instance: &Instance) -> bool {
        let (major, minor) = self.compute_capability();
        (self.has_wgmma() || !instance.needs_warpgroups())
            && major * 10 + minor >= instance.minimum_capability()
            && instance.cluster() <= self.most_peers()
    }

    /// Blocks of the largest cluster; 1 where there are none.
    pub const fn most_peers(self) -> u32 {
        match self {
            Arch::Compute80 | Arch::Sm80 | Arch::Sm89 => 1,
            Arch::Sm90a | Arch::Sm100a | Arch::Sm103a => 16,
            Arch::Sm120a => 8,
        }
    }

    /// Bulk tensor copies with mbarrier completion.
    pub const fn has_tma(self) -> bool {
        !matches!(self, Arch::Compute80 | Arch::Sm80 | Arch::Sm89)
    }

    /// Programmatic dependent launch: `griddepcontrol` is refused by the assembler below 9.0.
    pub const fn has_pdl(self) -> bool {
        !matches!(self, Arch::Compute80 | Arch::Sm80 | Arch::Sm89)
    }

    /// The most shared memory one block may ask for, in bytes (the opt-in limit, static and dynamic together).
    pub const fn max_shared_bytes_per_block(self) -> u32 {
        match self {
            Arch::Sm80 => 163 << 10,
            Arch::Sm90a | Arch::Sm100a | Arch::Sm103a => 227 << 10,
            Arch::Compute80 | Arch::Sm89 | Arch::Sm120a => 99 << 10,
        }
    }

    /// Resident threads of one SM.
    pub const fn max_threads_per_multiprocessor(self) -> u32 {
        match self {
            Arch::Sm80 | Arch::Sm90a | Arch::Sm100a | Arch::Sm103a => 2048,
            Arch::Compute80 | Arch::Sm89 | Arch::Sm120a => 1536,
        }
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Arch {
    type Err = UnknownArch;

    fn from_str(name: &str) -> Result<Arch, UnknownArch> {
        Arch::from_name(name).ok_or_else(|| UnknownArch(name.to_owned()))
    }
}
