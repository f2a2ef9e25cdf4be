//! What runs a plan: this machine's CPU, its GPU, or a simulated one; for one sequence (a session) or for many (an
//! engine).

use gemma4c_plan::Plan;
use gemma4c_runtime::engine::{self, BackendDevice, BackendOptions, CpuDevice, CpuOptions, Drafts, Engine, Gap};
use gemma4c_runtime::{ModelLocation, OnGpu, RuntimeError, Session, machine};

use crate::error::Error;
use crate::simulate;

/// Which device runs a plan.
///
/// ```
/// use gemma4c::{Device, Model};
///
/// # fn main() -> Result<(), gemma4c::Error> {
/// let folder = tempfile::tempdir().unwrap();
/// let plan = folder.path().join("plan.bin");
/// Model::compile(gemma4c::demo_model(folder.path())?).cpu().write(&plan)?;
/// let model = Model::open_on(&plan, Device::Cpu)?;
/// assert_eq!(model.device(), "cpu");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Device {
    /// What the plan was compiled for; the CPU if there is no GPU.
    #[default]
    Auto,
    /// The first NVIDIA GPU.
    Cuda,
    /// This machine's CPU.
    Cpu,
    /// A simulated GPU, for plans of tiny models: slow, and it checks every access.
    Sim,
}

/// Where a plan and its weights are, and what is to run it.
#[derive(Clone, Debug, Default)]
pub struct Place {
    pub location: ModelLocation,
    pub device: Device,
    pub on: OnGpu,
}

/// What is told while a plan is opened.
pub enum Told {
    /// A decision that was not asked for.
    Note(String),
    /// Bytes of weights that are loaded, and all there are.
    Loaded(u64, u64),
}

/// What an engine is opened with.
#[derive(Default)]
pub struct EngineOptions {
    /// Sequences at once; `None` for what the plan was compiled for.
    pub sequences: Option<u32>,
    /// Prefixes kept beside them, at most.
    pub snapshots: Option<u32>,
    /// The longest gap between tokens that the prompts of others may cause.
    pub gap: Gap,
    /// Host memory for prefixes that the device has no room for.
    pub host_bytes: u64,
    /// Tokens that are never picked.
    pub suppress: Vec<u32>,
    pub drafts: Drafts,
}

impl EngineOptions {
    fn backend(&self) -> BackendOptions {
        BackendOptions { sequences: self.sequences, host_bytes: self.host_bytes, suppress: self.suppress.clone() }
    }
}

/// Sequences at once on a CPU, which reserves memory only as it is used.
const CPU_SEQUENCES: u32 = 8;

/// What runs a plan.
enum Chosen {
    Cpu,
    Gpu,
    Simulated,
}

impl Place {
    /// What runs the plan; refuses options that make no sense there.
    fn choose(&self, plan: &Plan, tell: &mut dyn FnMut(Told)) -> Result<Chosen, Error> {
        let refuse = |is_given: bool, why: &str| if is_given { Err(Error::Option(why.into())) } else { Ok(()) };
        let Place { device, on, .. } = self;
        let on_gpu = match device {
            Device::Sim => {
                refuse(on.multiprocessors.is_some(), "--sms takes SMs from a GPU: a simulated one has none")?;
                refuse(on.memory.is_some(), "a simulated GPU has the memory that the plan was compiled for")?;
                return Ok(Chosen::Simulated);
            }
            Device::Cpu => false,
            Device::Cuda => true,
            Device::Auto if plan.cuda.is_none() => false,
            Device::Auto => match machine::gpus() {
                Ok(gpus) if !gpus.is_empty() => true,
                Ok(_) => {
                    tell(Told::Note("[no GPU: the plan runs on the CPU]".into()));
                    false
                }
                Err(why) => {
                    tell(Told::Note(format!("[no GPU: the plan runs on the CPU ({why})]")));
                    false
                }
            },
        };
        if on_gpu {
            return Ok(Chosen::Gpu);
        }
        refuse(on.multiprocessors.is_some(), "--sms takes SMs from a GPU, but the plan runs on the CPU")?;
        refuse(on.memory.is_some(), "--memory and --vram are about GPUs, but the plan runs on the CPU")?;
        refuse(on.program.is_some(), "--program chooses among programs for GPUs, but the plan runs on the CPU")?;
        Ok(Chosen::Cpu)
    }

    /// Makes a plan ready to run one sequence.
    pub fn open_session(&self, plan: Plan, tell: &mut dyn FnMut(Told)) -> Result<Session, Error> {
        let Place { location, on, .. } = self;
        match self.choose(&plan, tell)? {
            Chosen::Simulated => return simulate::open(plan, location, on.program.as_deref()),
            Chosen::Cpu => return Ok(Session::on_cpu(plan, location)?),
            Chosen::Gpu => {}
        }
        let count = plan.programs().count();
        let mut loaded = |done, total| tell(Told::Loaded(done, total));
        let mut session = Session::on_cuda(plan, location, on, &mut loaded)?;
        let there = session.cuda().map(|cuda| cuda.device().gpu.clone());
        if let (Some(gpu), Some(cuda)) = (there, &session.plan().cuda) {
            let program = &cuda.program.gpu;
            // Of a plan for one GPU that runs on such a GPU there is nothing to say.
            if count > 1 || gpu.multiprocessors != program.multiprocessors {
                let (name, count) = (&gpu.name, gpu.multiprocessors);
                tell(Told::Note(format!("[{name} with {count} SMs runs the program for {program}]")));
            }
        }
        Ok(session)
    }

    /// Makes a plan ready to run many sequences, for whoever waits for the last of them.
    pub fn open_engine(
        &self,
        plan: Plan,
        options: EngineOptions,
        tell: &mut dyn FnMut(Told),
    ) -> Result<Engine<Box<dyn engine::Device>>, Error> {
        if options.sequences == Some(0) {
            return Err(Error::Option("--sequences 0: at least one is needed".into()));
        }
        let Place { location, on, .. } = self;
        let device: Box<dyn engine::Device> = match self.choose(&plan, tell)? {
            Chosen::Cpu => Box::new(open_cpu(plan, location, &options)?),
            Chosen::Simulated => {
                let (plan, backend) = simulate::open_backend(plan, location, on.program.as_deref())?;
                Box::new(BackendDevice::new(&plan, backend, options.backend())?)
            }
            Chosen::Gpu => {
                let mut loaded = |done, total| tell(Told::Loaded(done, total));
                Box::new(BackendDevice::on_cuda(plan, location, on, &mut loaded, options.backend())?)
            }
        };
        let EngineOptions { gap, suppress, drafts, .. } = options;
        // Whoever limits the gap between tokens waits for single answers.
        let prompts_first = gap == Gap::Any;
        let options = engine::Options { gap, prompts_first, suppress, drafts, ..engine::Options::default() };
        Ok(Engine::new(device, options)?)
    }
}

/// For as many sequences as were asked for; else for as many as there is memory for.
fn open_cpu(plan: Plan, location: &ModelLocation, options: &EngineOptions) -> Result<CpuDevice, RuntimeError> {
    let mut sequences = options.sequences.unwrap_or(CPU_SEQUENCES);
    loop {
        // More than a GPU plan has for one sequence: a chat's system prompt is kept for the next chat.
        let snapshots = options.snapshots.unwrap_or((sequences / 2).clamp(2, 16));
        let (host_bytes, suppress) = (options.host_bytes, options.suppress.clone());
        match CpuDevice::open(plan.clone(), location, CpuOptions { sequences, snapshots, host_bytes, suppress }) {
            Err(RuntimeError::OutOfMemory { .. }) if options.sequences.is_none() && sequences > 1 => sequences /= 2,
            opened => return opened,
        }
    }
}
