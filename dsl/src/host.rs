//! The emitted text on the host: compiled by the system's C++ compiler, loaded, and run by the simulator's scheduler.
//!
//! This checks the printer, with no GPU. A library is kept by the content of its source, so that an unchanged instance
//! is not compiled again. The compiler is `$CXX`, or `c++`.

use crate::definition::HostText;
use crate::instance::Instance;
use crate::sim::{Arg, LaunchError, Memory, Options, launch_host};
use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Flags a kernel's meaning depends on: no fusing of a product and a sum, words may be read as bytes, sums may wrap
/// where the prelude makes them. C++14 is the oldest standard that has what the text needs, GNU's for its hexadecimal
/// fractions: in later ones `<cmath>` brings functions with it that take as long to read as a kernel takes to compile.
const FLAGS: &[&str] =
    &["-std=gnu++14", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-w", "-x", "c++", "-"];

#[derive(Debug, thiserror::Error)]
pub enum HostError {
    #[error("kernel {kernel}: no C++ compiler: `{compiler}` cannot be run ({source}); install one or set CXX")]
    NoCompiler { kernel: &'static str, compiler: String, source: std::io::Error },
    #[error("kernel {kernel}: the emitted text does not compile for the host:\n{log}\n{numbered}")]
    Compile { kernel: &'static str, log: String, numbered: String },
    #[error("kernel {kernel}: {path}: {source}")]
    File { kernel: &'static str, path: PathBuf, source: std::io::Error },
    #[error("kernel {kernel}: {source}")]
    Load { kernel: &'static str, source: libloading::Error },
    #[error(transparent)]
    Launch(#[from] LaunchError),
}

/// A kernel's instance compiled for the host.
pub struct HostKernel {
    instance: Instance,
    library: libloading::Library,
}

impl HostKernel {
    /// Compiles and loads an instance, or finds it in the cache.
    #[allow(unsafe_code)]
    pub fn build(instance: &Instance) -> Result<Self, HostError> {
        let kernel = instance.def.name;
        let path = compiled(instance)?;
        // SAFETY: the library was made from our own text and has no initialisers that do anything.
        let library =
            unsafe { libloading::Library::new(&path) }.map_err(|source| HostError::Load { kernel, source })?;
        for row in instance.hooks() {
            let HostText::Hook(hook) = row.host else { continue };
            let symbol = format!("hook_{}\0", row.name);
            // SAFETY: the symbol is a pointer variable of that library, written before any of its code runs.
            unsafe {
                let variable = library
                    .get::<*mut *const ()>(symbol.as_bytes())
                    .map_err(|source| HostError::Load { kernel, source })?;
                **variable = (hook.0)();
            }
        }
        Ok(Self { instance: instance.clone(), library })
    }

    /// Runs the compiled kernel over a grid. Barriers and collectives are the simulator's; memory is not watched.
    #[allow(unsafe_code)]
    pub fn launch(
        &self,
        grid: [u32; 3],
        memory: &mut Memory,
        args: &[Arg],
        options: &Options,
    ) -> Result<(), HostError> {
        let kernel = self.instance.def.name;
        // SAFETY: the type is that of the entry which `Instance::host` prints.
        let entry =
            unsafe { self.library.get::<unsafe extern "C-unwind" fn(*const *const c_void)>(b"gemma4c_entry\0") }
                .map_err(|source| HostError::Load { kernel, source })?;
        launch_host(&self.instance, grid, memory, args, options, &|arguments| {
            // SAFETY: one pointer for each parameter, of the parameter's type; the simulator bound them.
            unsafe { entry(arguments.as_ptr()) }
        })?;
        Ok(())
    }
}

/// The path of the compiled library.
fn compiled(instance: &Instance) -> Result<PathBuf, HostError> {
    let kernel = instance.def.name;
    let source = instance.host();
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_string());
    let key = xxhash_rust::xxh3::xxh3_128(format!("{compiler} {FLAGS:?}\n{source}").as_bytes());
    let folder = cache_folder();
    let path = folder.join(format!("{kernel}-{key:032x}.so"));
    if path.exists() {
        return Ok(path);
    }
    let file_error = |path: &Path, source| HostError::File { kernel, path: path.to_path_buf(), source };
    std::fs::create_dir_all(&folder).map_err(|e| file_error(&folder, e))?;
    // Tests run side by side: each compiles to a name of its own, and the rename is atomic.
    let partial =
        folder.join(format!("{kernel}-{key:032x}-{}-{:?}.partial", std::process::id(), std::thread::current().id()));
    let mut child = Command::new(&compiler)
        .args(FLAGS)
        .arg("-o")
        .arg(&partial)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|source| HostError::NoCompiler { kernel, compiler: compiler.clone(), source })?;
    if let Some(mut stdin) = child.stdin.take() {
        // A compiler that dies early closes its end; its log says why.
        let _ = std::io::Write::write_all(&mut stdin, source.as_bytes());
    }
    let output = child.wait_with_output().map_err(|source| HostError::NoCompiler { kernel, compiler, source })?;
    if !output.status.success() {
        let log = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(HostError::Compile { kernel, log, numbered: numbered(&source) });
    }
    std::fs::rename(&partial, &path).map_err(|e| file_error(&path, e))?;
    Ok(path)
}

/// Beside the test's own binary, in the build folder.
fn cache_folder() -> PathBuf {
    let beside = std::env::current_exe().ok().and_then(|exe| {
        let folder = exe.parent()?;
        if folder.file_name()? == "deps" { folder.parent().map(Path::to_path_buf) } else { Some(folder.to_path_buf()) }
    });
    beside.unwrap_or_else(std::env::temp_dir).join("host-kernels")
}

fn numbered(source: &str) -> String {
    source.lines().enumerate().map(|(index, line)| format!("{:4} {line}\n", index + 1)).collect()
}
