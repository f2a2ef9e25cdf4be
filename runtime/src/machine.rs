//! What this machine has to run a plan on.

use std::fmt;

use cudarc::driver::{result, sys};

/// The processor.
#[derive(Clone, Debug)]
pub struct Cpu {
    pub threads: usize,
    /// The widest vector unit the arithmetic was compiled for and finds here.
    pub vectors: &'static str,
    /// Bytes; `None` where the system does not say.
    pub memory: Option<u64>,
}

/// One NVIDIA GPU.
#[derive(Clone, Debug)]
pub struct Gpu {
    pub name: String,
    pub compute_capability: (u32, u32),
    /// Bytes.
    pub memory: u64,
    /// SMs.
    pub multiprocessors: u32,
    /// Shared memory that a block may ask for, in bytes.
    pub shared_bytes_per_block: u32,
    pub shared_bytes_per_multiprocessor: u32,
    pub l2_bytes: u64,
}

impl Gpu {
    /// A GPU of which a test says the rest.
    #[cfg(test)]
    pub(crate) fn unknown(name: &str) -> Gpu {
        Gpu {
            name: name.into(),
            compute_capability: (0, 0),
            memory: 0,
            multiprocessors: 0,
            shared_bytes_per_block: 227 << 10,
            shared_bytes_per_multiprocessor: 228 << 10,
            l2_bytes: 0,
        }
    }
}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ((major, minor), shared) = (self.compute_capability, self.shared_bytes_per_block >> 10);
        let Gpu { name, multiprocessors, .. } = self;
        write!(f, "{name} (sm_{major}{minor}, {multiprocessors} SMs, {shared} KiB of shared memory a block)")
    }
}

/// Why no GPU can be used.
#[derive(Clone, Debug, thiserror::Error)]
pub enum GpuError {
    #[error("the NVIDIA driver's library (libcuda) was not found; install the driver to use a GPU")]
    NoDriver,
    #[error("the NVIDIA driver answers {0}")]
    Driver(String),
}

pub fn cpu() -> Cpu {
    Cpu { threads: rayon::current_num_threads(), vectors: vectors(), memory: physical_memory() }
}

#[cfg(target_arch = "x86_64")]
fn vectors() -> &'static str {
    match (is_x86_feature_detected!("avx512bw"), is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")) {
        (true, _) => "AVX-512",
        (_, true) => "AVX2 and FMA",
        _ => "SSE2 only: expect it to be slow",
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn vectors() -> &'static str {
    "the architecture's baseline"
}

/// The machine's memory in bytes, where the system says.
pub fn physical_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The GPUs the driver sees.
pub fn gpus() -> Result<Vec<Gpu>, GpuError> {
    // SAFETY: it only tries to load the library; asked first because every other call panics when there is none.
    #[allow(unsafe_code)]
    if !unsafe { sys::is_culib_present() } {
        return Err(GpuError::NoDriver);
    }
    let failed = |error: result::DriverError| GpuError::Driver(format!("{:?}", error.0));
    match result::init() {
        Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NO_DEVICE => return Ok(Vec::new()),
        other => other.map_err(failed)?,
    }
    (0..result::device::get_count().map_err(failed)?).map(|i| describe(i).map_err(failed)).collect()
}

fn describe(ordinal: i32) -> Result<Gpu, result::DriverError> {
    use sys::CUdevice_attribute_enum as Attribute;
    let device = result::device::get(ordinal)?;
    // SAFETY: the handle was given by the driver just now, and devices live as long as the process.
    #[allow(unsafe_code)]
    let attribute = |which| unsafe { result::device::get_attribute(device, which) }.map(|value| value.max(0) as u32);
    // SAFETY: as above.
    #[allow(unsafe_code)]
    let memory = unsafe { result::device::total_mem(device) }? as u64;
    let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    Ok(Gpu {
        name: result::device::get_name(device)?,
        compute_capability: (major, minor),
        memory,
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_bytes_per_block: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        shared_bytes_per_multiprocessor: attribute(
            Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
        )?,
        l2_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?.into(),
    })
}
