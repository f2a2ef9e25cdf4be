//! A libnvrtc that was found and loaded, and one compilation with it.

use super::error::{self, NvrtcError};
use super::find::{self, Places};
use super::job::{Cubin, Options, Source};
use super::log::{self, Resources};
use super::sys::{self, Failure, Output, Version};
use crate::arch::Arch;
use std::ffi::CString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A loaded NVRTC. Cheap to clone; may be used from many threads.
#[derive(Clone)]
pub struct Toolchain {
    library: Arc<sys::Library>,
    path: PathBuf,
    through: String,
    /// Tells apart two builds of one version in the cache.
    identity: String,
}

impl Toolchain {
    /// The first NVRTC of this machine's usual places.
    pub fn find() -> Result<Toolchain, NvrtcError> {
        Toolchain::find_in(&Places::from_env())
    }

    pub fn find_in(places: &Places) -> Result<Toolchain, NvrtcError> {
        let find::Found { library, path, through } = places.find()?;
        // NVRTC tells no patch version; two patches of one minor version differ in size.
        let bytes = std::fs::metadata(&path).map_or(0, |metadata| metadata.len());
        let identity = format!("nvrtc {}, {bytes} bytes", library.version);
        Ok(Toolchain { library: Arc::new(library), path, through, identity })
    }

    /// What the same source needs to give the same cubin, beside the options.
    pub(super) fn identity(&self) -> &str {
        &self.identity
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn version(&self) -> Version {
        self.library.version
    }

    pub fn supports(&self, arch: Arch) -> bool {
        let (major, minor) = arch.compute_capability();
        self.library.archs.contains(&(major * 10 + minor))
    }

    /// Compiles one kernel, without a cache.
    pub fn compile(&self, source: &Source, arch: Arch, options: Options) -> Result<Cubin, NvrtcError> {
        let kernel = source.name.clone();
        if !self.supports(arch) {
            let known: Vec<String> = self.library.archs.iter().map(|number| format!("sm_{number}")).collect();
            let (toolchain, known) = (self.to_string(), known.join(", "));
            return Err(NvrtcError::UnsupportedArch { kernel, arch, toolchain, known });
        }
        let mut arguments = arguments(arch, options);
        arguments.extend(self.version().without_its_cache().map(str::to_owned));
        let output = if arch.is_ptx() { Output::Ptx } else { Output::Cubin };
        match self.run(source, &arguments, output)? {
            Ok((bytes, log)) if arch.is_ptx() => ptx(source, bytes, &log),
            Ok((bytes, log)) => cubin(source, bytes, &log),
            Err(Failure::Call { call, status }) => Err(NvrtcError::Call { kernel, arch, call, status }),
            Err(Failure::Refused { log }) => {
                Err(NvrtcError::Refused { kernel, arch, report: self.report(source, &arguments, log)? })
            }
        }
    }

    /// What a person needs to mend the source. The log as it came may lack two things, and each is got by compiling
    /// once more: the assembler's last error (too much shared memory, say), which it can leave out under `-v`, and the
    /// assembly text that its other errors point into.
    fn report(&self, source: &Source, arguments: &[String], mut log: String) -> Result<String, NvrtcError> {
        if !error::names_an_error(&log) {
            let quiet: Vec<String> = arguments.iter().filter(|argument| *argument != VERBOSE).cloned().collect();
            if let Err(Failure::Refused { log: complete }) = self.run(source, &quiet, Output::Cubin)? {
                log = complete;
            }
        }
        let mut assembly = String::new();
        if error::blames_assembly(&log) {
            let real_to_virtual = |argument: &String| argument.replace("=sm_", "=compute_");
            let arguments: Vec<String> = arguments.iter().map(real_to_virtual).collect();
            if let Ok((bytes, _)) = self.run(source, &arguments, Output::Ptx)? {
                assembly = String::from_utf8_lossy(&bytes).into_owned();
            }
        }
        Ok(error::report(source, &log::without_times(&log), &assembly))
    }

    fn run(
        &self,
        source: &Source,
        arguments: &[String],
        output: Output,
    ) -> Result<Result<(Vec<u8>, String), Failure>, NvrtcError> {
        let c_string =
            |what, text: &str| CString::new(text).map_err(|_| NvrtcError::Nul { kernel: source.name.clone(), what });
        let text = c_string("its source", &source.text)?;
        let file_name = c_string("its name", &source.file_name())?;
        let arguments: Result<Vec<CString>, NvrtcError> =
            arguments.iter().map(|argument| c_string("an option", argument)).collect();
        Ok(self.library.compile(&text, &file_name, &arguments?, output))
    }
}

impl fmt::Display for Toolchain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NVRTC {} at {} (through {})", self.library.version, self.path.display(), self.through)
    }
}

impl fmt::Debug for Toolchain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Toolchain({self})")
    }
}

/// Registers, shared memory and spills go to the log.
const VERBOSE: &str = "--ptxas-options=-v";

/// A device function that is passed on to a slot is printed as a lambda, which outside of a template counts as the
/// host's otherwise.
const DEVICE_ALONE: &str = "--device-as-default-execution-space";

pub(super) fn arguments(arch: Arch, options: Options) -> Vec<String> {
    let mut arguments = vec![
        format!("--gpu-architecture={arch}"),
        "--fmad=false".into(),
        "--std=c++17".into(),
        DEVICE_ALONE.into(),
        VERBOSE.into(),
    ];
    arguments.extend(options.max_registers.map(|count| format!("--maxrregcount={count}")));
    arguments
}

/// The result with the resources of the kernel's own entry.
fn cubin(source: &Source, bytes: Vec<u8>, log: &str) -> Result<Cubin, NvrtcError> {
    let entries = log::entries(log);
    let Some(&(_, resources)) = entries.iter().find(|(name, _)| *name == source.name) else {
        let found: Vec<String> = entries.iter().map(|(name, _)| format!("`{name}`")).collect();
        let found = if found.is_empty() { "no kernel".to_owned() } else { found.join(", ") };
        return Err(NvrtcError::NoEntry { kernel: source.name.clone(), found });
    };
    Ok(Cubin { bytes, resources, log: log::without_times(log) })
}

/// The text of a module with the kernel's entry. No assembler has seen it: what it takes of an SM is not known.
fn ptx(source: &Source, bytes: Vec<u8>, log: &str) -> Result<Cubin, NvrtcError> {
    let entry = format!(".entry {}(", source.name);
    if !String::from_utf8_lossy(&bytes).contains(&entry) {
        return Err(NvrtcError::NoEntry { kernel: source.name.clone(), found: "none of that name".to_owned() });
    }
    Ok(Cubin { bytes, resources: Resources::default(), log: log::without_times(log) })
}
