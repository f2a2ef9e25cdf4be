//! The C interface of libnvrtc, loaded at run time from a path of our choosing.
//!
//! This is the only file of the crate with `unsafe` in it, and it knows nothing of kernels: strings and options in,
//! machine code and a log out. We bind the few functions ourselves because a binding crate picks the library's name and
//! place itself, and panics when it is missing.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt;
use std::path::Path;
use std::ptr;
use std::thread;

type Status = c_int;
type Program = *mut c_void;

const SUCCESS: Status = 0;

/// CUDA's version, as NVRTC tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    pub major: u32,
    pub minor: u32,
}

impl Version {
    /// The option that switches NVRTC's own cache off, in the versions that have one. What comes from that cache has no
    /// log, and so no registers and spills.
    #[doc(hidden)]
    pub fn without_its_cache(self) -> Option<&'static str> {
        (self >= Version { major: 12, minor: 9 }).then_some("--no-cache")
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Address space only, until it is used.
const STACK_BYTES: usize = 64 << 20;

/// Declares the table of C functions and how it is filled, so that a signature is written once.
macro_rules! c_functions {
    ($($field:ident = $symbol:literal: fn($($argument:ty),*) -> $result:ty;)*) => {
        struct Functions { $($field: unsafe extern "C" fn($($argument),*) -> $result,)* }

        impl Functions {
            #[allow(unsafe_code)]
            fn load(library: &'static libloading::Library) -> Result<Functions, libloading::Error> {
                // SAFETY: the signatures are those of nvrtc.h, unchanged since CUDA 11.1, and the library is never
                // unloaded, so that the copied pointers stay valid.
                unsafe { Ok(Functions { $($field: *library.get($symbol)?,)* }) }
            }
        }
    };
}

c_functions! {
    version = "nvrtcVersion": fn(*mut c_int, *mut c_int) -> Status;
    arch_count = "nvrtcGetNumSupportedArchs": fn(*mut c_int) -> Status;
    archs = "nvrtcGetSupportedArchs": fn(*mut c_int) -> Status;
    error_name = "nvrtcGetErrorString": fn(Status) -> *const c_char;
    create = "nvrtcCreateProgram":
        fn(*mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char) -> Status;
    destroy = "nvrtcDestroyProgram": fn(*mut Program) -> Status;
    compile = "nvrtcCompileProgram": fn(Program, c_int, *const *const c_char) -> Status;
    log_size = "nvrtcGetProgramLogSize": fn(Program, *mut usize) -> Status;
    log = "nvrtcGetProgramLog": fn(Program, *mut c_char) -> Status;
    cubin_size = "nvrtcGetCUBINSize": fn(Program, *mut usize) -> Status;
    cubin = "nvrtcGetCUBIN": fn(Program, *mut c_char) -> Status;
    ptx_size = "nvrtcGetPTXSize": fn(Program, *mut usize) -> Status;
    ptx = "nvrtcGetPTX": fn(Program, *mut c_char) -> Status;
}

/// A loaded libnvrtc.
pub(super) struct Library {
    functions: Functions,
    pub version: Version,
    /// The architectures it compiles for, as numbers without a suffix: 90 for `sm_90` and `sm_90a`.
    pub archs: Vec<u32>,
}

impl Library {
    /// Loads libnvrtc, and the `libnvrtc-builtins` it will ask for. NVRTC opens its builtins by bare name, which the
    /// loader resolves only on the library path, or if a library of that name is in the process already; in a Python
    /// wheel it is neither. So we load it from beside libnvrtc, and a missing one is known here and not at the first
    /// compilation.
    pub fn open(file: &Path) -> Result<Library, String> {
        let functions = Functions::load(load_forever(file)?).map_err(describe)?;
        let version = functions.read_version().map_err(|failure| failure.to_string())?;
        let archs = functions.read_archs().map_err(|failure| failure.to_string())?;
        let builtins = format!("libnvrtc-builtins.so.{version}");
        let beside = file.with_file_name(&builtins);
        load_forever(if beside.is_file() { &beside } else { Path::new(&builtins) })?;
        Ok(Library { functions, version, archs })
    }

    /// Compiles one text; `file_name` is what the log calls it. May be called from many threads at once.
    ///
    /// Each compilation has a thread of its own: NVRTC recurses with the depth of the source, and a thread of Rust's
    /// default size ends the whole process at a few hundred nested expressions.
    pub fn compile(
        &self,
        text: &CStr,
        file_name: &CStr,
        options: &[CString],
        output: Output,
    ) -> Result<(Vec<u8>, String), Failure> {
        thread::scope(|scope| {
            let compile = || self.compile_here(text, file_name, options, output);
            let builder = thread::Builder::new().name("nvrtc".to_owned()).stack_size(STACK_BYTES);
            let spawned = builder.spawn_scoped(scope, compile);
            let thread = spawned.map_err(|error| Failure::Call { call: "own thread", status: error.to_string() })?;
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    fn compile_here(
        &self,
        text: &CStr,
        file_name: &CStr,
        options: &[CString],
        output: Output,
    ) -> Result<(Vec<u8>, String), Failure> {
        let functions = &self.functions;
        let program = OwnedProgram::new(functions, text, file_name)?;
        let status = program.compile(options);
        let log = program.read("nvrtcGetProgramLog", functions.log_size, functions.log)?;
        let log = String::from_utf8_lossy(&log).trim_end_matches(['\0', '\n']).to_owned();
        match functions.check("nvrtcCompileProgram", status) {
            Err(_) if !log.is_empty() => return Err(Failure::Refused { log }),
            other => other?,
        }
        let bytes = match output {
            Output::Cubin => program.read("nvrtcGetCUBIN", functions.cubin_size, functions.cubin)?,
            Output::Ptx => program.read("nvrtcGetPTX", functions.ptx_size, functions.ptx)?,
        };
        Ok((bytes, log))
    }
}

/// What to take from a finished program.
#[derive(Clone, Copy)]
pub(super) enum Output {
    /// Machine code: the architecture must be a real one (`sm_…`).
    Cubin,
    /// Assembly text: the architecture must be a virtual one (`compute_…`).
    Ptx,
}

/// Why there is no output.
pub(super) enum Failure {
    /// The source or an option was refused; the log says why.
    Refused { log: String },
    /// A call failed for a reason that is not the source's.
    Call { call: &'static str, status: String },
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Refused { log } => f.write_str(log),
            Failure::Call { call, status } => write!(f, "{call}: {status}"),
        }
    }
}

impl Functions {
    #[allow(unsafe_code)]
    fn read_version(&self) -> Result<Version, Failure> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both pointers are to live integers.
        self.check("nvrtcVersion", unsafe { (self.version)(&mut major, &mut minor) })?;
        Ok(Version { major: major.unsigned_abs(), minor: minor.unsigned_abs() })
    }

    #[allow(unsafe_code)]
    fn read_archs(&self) -> Result<Vec<u32>, Failure> {
        let mut count = 0;
        // SAFETY: the pointer is to a live integer.
        self.check("nvrtcGetNumSupportedArchs", unsafe { (self.arch_count)(&mut count) })?;
        let mut archs: Vec<c_int> = vec![0; count.unsigned_abs() as usize];
        // SAFETY: the call writes `count` integers, which is the vector's length.
        self.check("nvrtcGetSupportedArchs", unsafe { (self.archs)(archs.as_mut_ptr()) })?;
        Ok(archs.into_iter().map(c_int::unsigned_abs).collect())
    }

    #[allow(unsafe_code)]
    fn check(&self, call: &'static str, status: Status) -> Result<(), Failure> {
        if status == SUCCESS {
            return Ok(());
        }
        // SAFETY: the call returns a static string for every value, known or not.
        let name = unsafe { CStr::from_ptr((self.error_name)(status)) };
        Err(Failure::Call { call, status: name.to_string_lossy().into_owned() })
    }
}

/// A program between its creation and its destruction.
struct OwnedProgram<'a> {
    functions: &'a Functions,
    handle: Program,
}

impl<'a> OwnedProgram<'a> {
    #[allow(unsafe_code)]
    fn new(functions: &'a Functions, text: &CStr, file_name: &CStr) -> Result<OwnedProgram<'a>, Failure> {
        let mut handle = ptr::null_mut();
        let (text, file_name) = (text.as_ptr(), file_name.as_ptr());
        // SAFETY: the strings live through the call, which copies them; there are no headers.
        let status = unsafe { (functions.create)(&mut handle, text, file_name, 0, ptr::null(), ptr::null()) };
        functions.check("nvrtcCreateProgram", status)?;
        Ok(OwnedProgram { functions, handle })
    }

    #[allow(unsafe_code)]
    fn compile(&self, options: &[CString]) -> Status {
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let count = c_int::try_from(options.len()).expect("a handful of options");
        // SAFETY: the handle is alive; `options` holds `count` strings that live through the call.
        unsafe { (self.functions.compile)(self.handle, count, options.as_ptr()) }
    }

    /// One of the program's outputs, through its pair of C functions.
    #[allow(unsafe_code)]
    fn read(
        &self,
        call: &'static str,
        size: unsafe extern "C" fn(Program, *mut usize) -> Status,
        copy: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    ) -> Result<Vec<u8>, Failure> {
        let mut bytes = 0;
        // SAFETY: the handle is alive, the pointer is to a live integer.
        self.functions.check(call, unsafe { size(self.handle, &mut bytes) })?;
        let mut buffer = vec![0u8; bytes];
        // SAFETY: the call writes exactly the size it told before, which is the buffer's length.
        self.functions.check(call, unsafe { copy(self.handle, buffer.as_mut_ptr().cast()) })?;
        Ok(buffer)
    }
}

impl Drop for OwnedProgram<'_> {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: the handle came from nvrtcCreateProgram and is destroyed once. A failure here has no remedy.
        unsafe { (self.functions.destroy)(&mut self.handle) };
    }
}

/// Loads a library for the life of the process: the compiler inside registers handlers that run at exit.
#[allow(unsafe_code)]
fn load_forever(file: &Path) -> Result<&'static libloading::Library, String> {
    // SAFETY: the initialisers of NVRTC's libraries ask nothing of the caller, and their ends never run.
    let library = unsafe { libloading::Library::new(file) }.map_err(describe)?;
    Ok(Box::leak(Box::new(library)))
}

/// The loader's own words, without the layers around them.
fn describe(error: libloading::Error) -> String {
    let mut innermost: &dyn std::error::Error = &error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost.to_string()
}
