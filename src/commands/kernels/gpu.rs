//! Kernels of the library on this machine's GPU: compiled, loaded, given buffers and launched.
//!
//! A buffer lies between two bands of known bytes, which a kernel that writes past its buffer disturbs; what it may
//! only read must be as it was. Neither sees a stray read: the simulator does.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::path::Path;
use std::rc::Rc;

use anyhow::{Result, bail, ensure};
use gemma4c_codegen::arch::Arch;
use gemma4c_codegen::kernels::source;
use gemma4c_codegen::nvrtc::{Cache, Compiler, Job, Options, Source, Toolchain};
use gemma4c_dsl::harness::{Argument, Case, CaseError, Data, Executor, Scalar};
use gemma4c_dsl::{Instance, ParamKind};
use gemma4c_runtime::cuda::{self, Buffer, CudaError, Device, Function, Graph, Launch};

/// Bytes of a band: a multiple of every alignment a kernel may ask for.
const BAND: usize = 1024;
const BAND_BYTE: u8 = 0xa5;

/// The first GPU, with the compiler for it.
pub struct Gpu {
    pub device: Device,
    pub arch: Arch,
    compiler: Compiler,
    /// By source text.
    loaded: RefCell<HashMap<String, Rc<Function>>>,
}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, kernels for {} by {}", self.device.gpu.name, self.arch, self.compiler.toolchain)
    }
}

impl Gpu {
    pub fn open() -> Result<Gpu> {
        let device = Device::open(0)?;
        let (major, minor) = device.gpu.compute_capability;
        let Some(arch) = Arch::for_capability((major, minor)) else {
            bail!("{} has compute capability {major}.{minor}, for which no kernels are compiled", device.gpu.name);
        };
        let compiler = Compiler { toolchain: Toolchain::find()?, cache: Cache::from_env() };
        Ok(Gpu { device, arch, compiler, loaded: RefCell::default() })
    }

    /// Where NVRTC lies, and perhaps other libraries of its toolkit.
    pub fn toolchain_folder(&self) -> Option<&Path> {
        self.compiler.toolchain.path().parent()
    }

    /// Whether this GPU has what the instance uses.
    pub fn can_run(&self, instance: &Instance) -> bool {
        self.arch.has_all_of(instance)
    }

    /// Compiles on all cores what will be launched one by one.
    pub fn compile_ahead<'a>(&self, instances: impl Iterator<Item = &'a Instance>) -> Result<()> {
        let mut wanted: Vec<_> = instances.map(|instance| (source(instance), instance)).collect();
        wanted.sort_by(|(a, _), (b, _)| a.text.cmp(&b.text));
        wanted.dedup_by(|(a, _), (b, _)| a.text == b.text);
        let jobs: Vec<Job<'_>> = wanted.iter().map(|(source, _)| self.job(source)).collect();
        for ((source, instance), compiled) in wanted.iter().zip(self.compiler.compile_all(&jobs)) {
            let function = self.load(instance, &compiled?.cubin.bytes)?;
            self.loaded.borrow_mut().insert(source.text.clone(), function);
        }
        Ok(())
    }

    fn job<'a>(&self, source: &'a Source) -> Job<'a> {
        Job { source, arch: self.arch, options: Options::default() }
    }

    fn load(&self, instance: &Instance, cubin: &[u8]) -> Result<Rc<Function>, CudaError> {
        let dynamic = if instance.def.launch.dynamic_shared { instance.shared_bytes() as u32 } else { 0 };
        Ok(Rc::new(self.device.load(instance.def.name, cubin)?.function(instance.def.name, dynamic)?))
    }

    fn function(&self, instance: &Instance) -> Result<Rc<Function>> {
        let source = source(instance);
        if let Some(function) = self.loaded.borrow().get(&source.text) {
            return Ok(Rc::clone(function));
        }
        let function = self.load(instance, &self.compiler.compile(self.job(&source))?.cubin.bytes)?;
        self.loaded.borrow_mut().insert(source.text, Rc::clone(&function));
        Ok(function)
    }

    /// An instance bound to its arguments, in launch order.
    pub fn bind(&self, instance: &Instance, grid: [u32; 3], arguments: Vec<Held>) -> Result<Bound> {
        let wanted = instance.params().len();
        ensure!(arguments.len() == wanted, "kernel {}: {wanted} arguments are needed", instance.def.name);
        let launch = Launch { grid, block: instance.block(), dependent: false };
        let may_depend = instance.def.launch.dependent && self.arch.has_pdl();
        Ok(Bound { function: self.function(instance)?, launch, may_depend, arguments })
    }

    /// A case's launch with buffers of its own, as they are before it.
    pub fn bind_case(&self, case: &Case) -> Result<Bound> {
        let held = case.arguments()?.into_iter().map(|argument| match argument {
            Argument::Scalar(scalar) => Ok(Held::Scalar(scalar)),
            Argument::Buffer(data) => self.upload(data.bytes()),
        });
        let held = held.collect::<Result<Vec<Held>, CudaError>>()?;
        self.bind(&case.instance, case.grid, held)
    }

    /// A buffer between two bands.
    pub fn upload(&self, bytes: &[u8]) -> Result<Held, CudaError> {
        let band = [BAND_BYTE; BAND];
        let buffer = self.device.upload(&[&band, bytes, &band].concat())?;
        Ok(Held::Buffer(Rc::new(buffer)))
    }

    /// Whether the GPU accepts no more work.
    pub fn is_lost(&self) -> bool {
        self.device.synchronize().is_err()
    }

    fn run(&self, case: &Case) -> Result<Vec<Option<Data>>> {
        let before = case.arguments()?;
        let bound = self.bind_case(case)?;
        bound.launch(bound.may_depend)?;
        let params = case.instance.params();
        let mut results = Vec::new();
        for ((held, before), param) in bound.arguments.iter().zip(before).zip(params) {
            let (Held::Buffer(buffer), Argument::Buffer(before)) = (held, before) else {
                results.push(None);
                continue;
            };
            let bytes = buffer.read()?;
            let (lower, rest) = bytes.split_at(BAND);
            let (content, upper) = rest.split_at(before.bytes().len());
            let name = &param.name;
            if let Some(at) = lower.iter().rposition(|byte| *byte != BAND_BYTE) {
                bail!("it wrote {} bytes before the start of `{name}`", BAND - at);
            }
            if let Some(at) = upper.iter().position(|byte| *byte != BAND_BYTE) {
                bail!("it wrote {at} bytes past the end of `{name}`");
            }
            let is_written = matches!(param.def.kind, ParamKind::Memory { access, .. } if access.writes());
            ensure!(is_written || content == before.bytes(), "it wrote to `{name}`, which it may only read");
            results.push(Some(Data::new(before.ty(), content.to_vec())));
        }
        Ok(results)
    }
}

impl Executor for Gpu {
    fn name(&self) -> String {
        self.device.gpu.name.clone()
    }

    fn run(&self, case: &Case) -> Result<Vec<Option<Data>>, CaseError> {
        Gpu::run(self, case).map_err(|error| CaseError::Other {
            case: case.name.clone(),
            executor: self.name(),
            message: format!("kernel {}: {error:#}", case.instance.def.name),
        })
    }

    fn has_functions_of_its_own(&self) -> bool {
        true
    }
}

/// An argument that lives as long as the launches that use it.
#[derive(Clone)]
pub enum Held {
    /// Between two bands.
    Buffer(Rc<Buffer>),
    Scalar(Scalar),
}

/// A kernel with everything a launch needs.
pub struct Bound {
    function: Rc<Function>,
    launch: Launch,
    /// The kernel waits for its predecessor itself, and the GPU can start it early.
    pub may_depend: bool,
    arguments: Vec<Held>,
}

impl Bound {
    /// Queues the launch; a dependent one may start before its predecessor ends.
    #[allow(unsafe_code)]
    pub fn launch(&self, dependent: bool) -> Result<(), CudaError> {
        // SAFETY: the arguments are the instance's own, in order, by `bind`'s callers; that accesses stay in the
        // buffers is what the simulator shows for the same case.
        unsafe { self.function.launch(self.shape(dependent), &self.arguments()) }
    }

    fn shape(&self, dependent: bool) -> Launch {
        Launch { dependent: dependent && self.may_depend, ..self.launch }
    }

    fn arguments(&self) -> Vec<cuda::Argument<'_>> {
        let held = self.arguments.iter();
        held.map(|held| match held {
            Held::Buffer(buffer) => cuda::Argument::Memory(buffer, BAND),
            Held::Scalar(Scalar::U32(value)) => cuda::Argument::U32(*value),
            Held::Scalar(Scalar::I32(value)) => cuda::Argument::I32(*value),
            Held::Scalar(Scalar::U64(value)) => cuda::Argument::U64(*value),
            Held::Scalar(Scalar::F32(value)) => cuda::Argument::F32(*value),
        })
        .collect()
    }
}

/// Launches as a graph, each after the one before it, and what they use.
pub struct Chain<'a> {
    graph: Graph,
    launches: &'a [Bound],
    count: usize,
}

impl<'a> Chain<'a> {
    /// `count` launches, one after the other from `launches`, starting over at their end.
    pub fn new(gpu: &Gpu, launches: &'a [Bound], count: usize, dependent: bool) -> Result<Chain<'a>, CudaError> {
        let mut graph = gpu.device.graph()?;
        let mut before = None;
        for bound in launches.iter().cycle().take(count) {
            let shape = bound.shape(dependent && before.is_some());
            before = Some(graph.launch(&bound.function, shape, &bound.arguments(), before.as_slice())?);
        }
        Ok(Chain { graph: graph.finish()?, launches, count })
    }

    #[allow(unsafe_code)]
    fn replay(&self) -> Result<(), CudaError> {
        // SAFETY: `launches` keeps every buffer and function, and each launch is as sound here as it is alone. A
        // buffer's release waits for what runs.
        unsafe { self.graph.replay() }
    }

    /// Microseconds of one launch in the chain: the median of several replays, after some to warm up.
    pub fn microseconds(&self, gpu: &Gpu) -> Result<f64, CudaError> {
        assert!(!self.launches.is_empty() && self.count > 0, "a chain of nothing");
        for _ in 0..3 {
            self.replay()?;
        }
        gpu.device.synchronize()?;
        let replay = |_| Ok(f64::from(gpu.device.time(|| self.replay())?) * 1000.0 / self.count as f64);
        let mut times = (0..11).map(replay).collect::<Result<Vec<f64>, CudaError>>()?;
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }
}
