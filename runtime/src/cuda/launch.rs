//! Machine code on a device, and how to run it.

use std::ffi::{CString, c_void};
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::device::{Buffer, Context, CudaError, Device};

/// The portable cluster size: larger clusters need a function attribute.
const PORTABLE_CLUSTER: i32 = 8;

/// A loaded cubin.
pub struct Module {
    context: Arc<Context>,
    module: sys::CUmodule,
    /// The GPU has clusters.
    clusters: bool,
}

// SAFETY: a module's handle may be used from any thread that has made the context current.
#[allow(unsafe_code)]
unsafe impl Send for Module {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Sync for Module {}

impl Device {
    /// Loads the machine code of one source text; `name` is for errors.
    pub fn load(&self, name: &str, cubin: &[u8]) -> Result<Arc<Module>, CudaError> {
        self.context.enter()?;
        // The driver finds the end of the image by its own headers; eight zero bytes keep a cut one from being
        // overread.
        let image = [cubin, &[0; 8]].concat();
        // SAFETY: the image is readable for the whole call and not kept.
        #[allow(unsafe_code)]
        let module = unsafe { result::module::load_data(image.as_ptr().cast()) }
            .map_err(CudaError::driver(format!("loading kernel {name} on {}", self.gpu.name)))?;
        let clusters = self.gpu.compute_capability.0 >= 9;
        Ok(Arc::new(Module { context: Arc::clone(&self.context), module, clusters }))
    }
}

impl Module {
    /// A kernel of the module, allowed to use `shared` bytes of dynamic shared memory.
    pub fn function(self: &Arc<Module>, name: &str, shared: u32) -> Result<Function, CudaError> {
        self.context.enter()?;
        let finding = || CudaError::driver(format!("finding kernel {name}"));
        let symbol = CString::new(name).map_err(|_| CudaError::Driver {
            doing: format!("finding kernel {name:?}"),
            code: "a name with a zero byte".into(),
        })?;
        // SAFETY: the module is loaded for as long as `self` lives, and the function keeps it.
        #[allow(unsafe_code)]
        let function = unsafe { result::module::get_function(self.module, symbol) }.map_err(finding())?;
        // With lazy loading the driver would load it at its first launch; then the plan would not be ready when it says
        // so. SAFETY: found just now.
        #[allow(unsafe_code)]
        unsafe { sys::cuFuncLoad(function) }.result().map_err(CudaError::driver(format!("loading kernel {name}")))?;
        // Unasked, a kernel may have 48 KiB, of which its own arrays take a part.
        if shared > 0 {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let doing = format!("giving kernel {name} {shared} bytes of shared memory");
            // SAFETY: a live function of a live module.
            #[allow(unsafe_code)]
            unsafe { result::function::set_function_attribute(function, attribute, shared as i32) }
                .map_err(CudaError::driver(doing))?;
        }
        if self.clusters {
            self.allow_large_clusters(function, name)?;
        }
        Ok(Function { module: Arc::clone(self), function, name: name.into(), shared })
    }

    /// Allows a cluster above the portable size.
    fn allow_large_clusters(&self, function: sys::CUfunction, name: &str) -> Result<(), CudaError> {
        let mut blocks = 0;
        let height = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT;
        // SAFETY: a live function; writes one number.
        #[allow(unsafe_code)]
        unsafe { sys::cuFuncGetAttribute(&mut blocks, height, function) }
            .result()
            .map_err(CudaError::driver(format!("asking for the clusters of kernel {name}")))?;
        if blocks > PORTABLE_CLUSTER {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED;
            // SAFETY: as above.
            #[allow(unsafe_code)]
            unsafe { result::function::set_function_attribute(function, attribute, 1) }
                .map_err(CudaError::driver(format!("giving kernel {name} clusters of {blocks} blocks")))?;
        }
        Ok(())
    }
}

/// Bytes of each of the first `count` parameters, as many as there are. The driver reads as many arguments as a kernel
/// has parameters, however many are passed; so they are compared before every launch. Parameters beyond `count` are not
/// queried: the driver would return an error, which tools such as compute-sanitizer report.
fn parameters(function: sys::CUfunction, count: usize) -> Vec<usize> {
    let size = |index: usize| {
        let (mut offset, mut size) = (0, 0);
        // SAFETY: a live function; writes two numbers. There is no such parameter where it fails.
        #[allow(unsafe_code)]
        let answer = unsafe { sys::cuFuncGetParamInfo(function, index, &mut offset, &mut size) };
        (answer == sys::CUresult::CUDA_SUCCESS).then_some(size)
    };
    (0..count).map_while(size).collect()
}

impl Function {
    /// The words of a variable that the kernel's module has under this name, at most `count`; `None` where it has none.
    pub(super) fn variable(&self, name: &str, count: usize) -> Result<Option<Vec<u64>>, CudaError> {
        let doing = || CudaError::driver(format!("reading {name} of kernel {}", self.name));
        self.module.context.enter()?;
        let symbol = CString::new(name).unwrap_or_default();
        let (mut at, mut bytes) = (0, 0);
        // SAFETY: a live module and a string that ends; writes two numbers.
        #[allow(unsafe_code)]
        let found = unsafe { sys::cuModuleGetGlobal_v2(&mut at, &mut bytes, self.module.module, symbol.as_ptr()) };
        if found == sys::CUresult::CUDA_ERROR_NOT_FOUND {
            return Ok(None);
        }
        found.result().map_err(doing())?;
        let mut words = vec![0u64; count.min(bytes / 8)];
        // SAFETY: no more bytes than the variable has, into memory that is as large.
        #[allow(unsafe_code)]
        unsafe { sys::cuMemcpyDtoH_v2(words.as_mut_ptr().cast(), at, words.len() * 8) }.result().map_err(doing())?;
        Ok(Some(words))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: loaded by us, unloaded once; every function of it holds an `Arc`.
            #[allow(unsafe_code)]
            let _ = unsafe { result::module::unload(self.module) };
        }
    }
}

/// A kernel ready to be launched.
pub struct Function {
    module: Arc<Module>,
    pub(super) function: sys::CUfunction,
    pub(super) name: String,
    pub(super) shared: u32,
}

// SAFETY: a function's handle may be used from any thread that has made the context current.
#[allow(unsafe_code)]
unsafe impl Send for Function {}

/// The shape of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    pub grid: [u32; 3],
    pub block: u32,
    /// Programmatic dependent launch: the kernel may start before its predecessor ends, and waits for it itself.
    pub dependent: bool,
}

/// An argument, in the order of the kernel's parameters.
#[derive(Clone, Copy)]
pub enum Argument<'a> {
    /// From this byte of the buffer on.
    Memory(&'a Buffer, usize),
    U32(u32),
    I32(i32),
    U64(u64),
    F32(f32),
    /// An address of the device, and the bytes there.
    Address(u64, u64),
}

impl Argument<'_> {
    fn size(&self) -> usize {
        match self {
            Argument::Memory(..) | Argument::U64(_) | Argument::Address(..) => 8,
            Argument::U32(_) | Argument::I32(_) | Argument::F32(_) => 4,
        }
    }

    /// Address and bytes of memory.
    fn memory(&self) -> Option<(u64, u64)> {
        match *self {
            Argument::Memory(buffer, offset) => Some((buffer.address + offset as u64, (buffer.len() - offset) as u64)),
            Argument::Address(address, bytes) => Some((address, bytes)),
            _ => None,
        }
    }

    fn word(&self) -> u64 {
        match *self {
            Argument::Memory(buffer, offset) => buffer.address + offset as u64,
            Argument::U32(value) => value as u64,
            Argument::I32(value) => value as u32 as u64,
            Argument::U64(value) | Argument::Address(value, _) => value,
            Argument::F32(value) => value.to_bits() as u64,
        }
    }
}

/// An argument as the driver reads it: a number or an address in the lower bytes, or a tensor map.
#[derive(Clone, Copy, Default)]
#[repr(C, align(128))]
pub(super) struct Stored([u64; 16]);

/// Bytes of a tensor map.
const MAP_BYTES: usize = size_of::<Stored>();
/// A tile of a kernel's `Tiles`: values of a row, which are 128 bytes, and rows.
const TILE: [u32; 2] = [64, 32];

/// The tensor map of rows of so many 16-bit floats, for tiles that wgmma reads.
fn tensor_map(address: u64, bytes: u64, width: u64) -> Result<Stored, CudaError> {
    let rows = bytes / (2 * width.max(1));
    let (dims, strides) = ([width, rows], [2 * width]);
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    // SAFETY: two numbers for each of two dimensions, one stride; the driver writes the map and keeps nothing.
    #[allow(unsafe_code)]
    unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut map,
            sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            2,
            address as *mut c_void,
            dims.as_ptr(),
            strides.as_ptr(),
            TILE.as_ptr(),
            [1, 1].as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    }
    .result()
    .map_err(CudaError::driver(format!("describing {rows} rows of {width} values at {address:#x} for bulk copies")))?;
    Ok(Stored(map.opaque))
}

impl Function {
    /// The arguments as the driver reads them. An error if the kernel has others. Where it has a tensor map, memory
    /// becomes one: of rows of as many values as the first number behind it says.
    pub(super) fn stored(&self, arguments: &[Argument<'_>]) -> Result<Vec<Stored>, CudaError> {
        let expected = parameters(self.function, arguments.len());
        let fits = |argument: &Argument<'_>, size: usize| {
            argument.size() == size || size == MAP_BYTES && argument.memory().is_some()
        };
        let all_fit = arguments.iter().zip(&expected).all(|(argument, size)| fits(argument, *size));
        if !all_fit || arguments.len() != expected.len() {
            let found = arguments.iter().map(Argument::size).collect();
            return Err(CudaError::Arguments { kernel: self.name.clone(), expected, found });
        }
        let stored = |(at, argument): (usize, &Argument<'_>)| match argument.memory() {
            Some((address, bytes)) if expected[at] == MAP_BYTES => {
                let width = arguments[at..].iter().find(|behind| behind.memory().is_none());
                tensor_map(address, bytes, width.map_or(0, Argument::word))
            }
            _ => {
                let mut stored = Stored::default();
                stored.0[0] = argument.word();
                Ok(stored)
            }
        };
        arguments.iter().enumerate().map(stored).collect()
    }

    /// Queues a launch; it runs after what was queued before.
    ///
    /// # Safety
    /// Every access the kernel makes through its arguments must lie in their buffers: a GPU does not check. That they
    /// are as many and as large as the kernel's parameters is checked here.
    #[allow(unsafe_code)]
    pub unsafe fn launch(&self, launch: Launch, arguments: &[Argument<'_>]) -> Result<(), CudaError> {
        let context = &self.module.context;
        context.enter()?;
        let mut stored = self.stored(arguments)?;
        // Little-endian on every machine CUDA runs on: the low bytes of a word are the narrower argument.
        let mut pointers: Vec<*mut c_void> = stored.iter_mut().map(|stored| (stored as *mut Stored).cast()).collect();
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: launch.grid[0],
            gridDimY: launch.grid[1],
            gridDimZ: launch.grid[2],
            blockDimX: launch.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shared,
            hStream: context.stream,
            attrs: &mut attribute,
            numAttrs: launch.dependent as u32,
        };
        // SAFETY: the caller's promise covers the arguments; everything else lives until the call returns.
        unsafe { sys::cuLaunchKernelEx(&config, self.function, pointers.as_mut_ptr(), std::ptr::null_mut()) }
            .result()
            .map_err(CudaError::driver(format!("launching kernel {}", self.name)))
    }
}
