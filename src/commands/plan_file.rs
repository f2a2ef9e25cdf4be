//! Plans on disk: reading one with errors that name it, writing one whole or not at all.

use std::fs::{self, File, Metadata};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use gemma4c_plan::{Plan, START, own_bytes};
use gemma4c_runtime::engine::{self, BackendDevice, BackendOptions, CpuDevice, CpuOptions, Engine, Gap};
use gemma4c_runtime::{ModelLocation, OnGpu, RuntimeError, Session, machine};

use crate::output::{self, OutputFile};
use crate::{progress, simulate};

/// A plan is small; a file beyond this is something else, and is not read into memory to find out.
const LARGEST: u64 = 1 << 30;

/// Which device runs the plan.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Device {
    /// What the plan was compiled for; the CPU if there is no GPU.
    Auto,
    /// The first NVIDIA GPU.
    Cuda,
    /// This machine's CPU.
    Cpu,
    /// A simulated GPU, for plans of tiny models: slow, and it checks every access.
    Sim,
}

/// A plan, and where its model may lie.
#[derive(clap::Args)]
pub struct PlanArgs {
    /// A plan, as written by `gemma4c compile`.
    #[arg(value_name = "PLAN.bin")]
    pub plan: PathBuf,

    /// The model file, or its folder, if it has moved.
    #[arg(long, value_name = "PATH")]
    pub model: Option<PathBuf>,

    /// The device to run on.
    #[arg(long, value_enum, default_value = "auto")]
    pub device: Device,

    /// Of a plan for several GPUs: the program to run, by the GPU's name [default: the one that fits the GPU best]
    #[arg(long, value_name = "GPU")]
    pub program: Option<String>,

    /// Use that many SMs of the GPU and no others, to time a plan for a smaller one.
    #[arg(long, value_name = "N")]
    pub sms: Option<u32>,

    /// The plan itself, where a model was given and it was made on the way.
    #[arg(skip)]
    pub made: Option<Box<Plan>>,
}

impl PlanArgs {
    /// Reads and checks the plan, but not its weights.
    pub fn read(&self) -> Result<Plan> {
        match &self.made {
            Some(plan) => Ok((**plan).clone()),
            None => read(&self.plan),
        }
    }

    /// Loads the plan and its model.
    pub fn open(&self) -> Result<Session> {
        self.open_read(self.read()?)
    }

    /// The same of the plan, once read.
    pub fn open_read(&self, plan: Plan) -> Result<Session> {
        open(plan, &self.location(), self.device, &self.on_gpu())
    }

    /// Makes a plan ready to run many sequences, for whoever waits for the last of them.
    pub fn open_engine(&self, plan: Plan, options: EngineOptions) -> Result<Engine<Box<dyn engine::Device>>> {
        ensure!(options.sequences != Some(0), "--sequences 0: at least one is needed");
        let on = self.on_gpu();
        let device: Box<dyn engine::Device> = match whereabouts(&plan, self.device, &on)? {
            Whereabouts::Cpu => {
                // What nobody asked for is as many as there is memory for.
                let mut sequences = options.sequences.unwrap_or(CPU_SEQUENCES);
                loop {
                    // More than a GPU plan has for one sequence: a chat's system prompt is kept for the next chat.
                    let snapshots = options.snapshots.unwrap_or((sequences / 2).clamp(2, 16));
                    let (host_bytes, suppress) = (options.engine.host_bytes(), options.suppress.clone());
                    let cpu = CpuOptions { sequences, snapshots, host_bytes, suppress };
                    match CpuDevice::open(plan.clone(), &self.location(), cpu) {
                        Err(RuntimeError::OutOfMemory { .. }) if options.sequences.is_none() && sequences > 1 => {
                            sequences /= 2;
                        }
                        opened => break Box::new(opened?),
                    }
                }
            }
            Whereabouts::Simulated => {
                let (plan, backend) = simulate::open_backend(plan, &self.location(), on.program.as_deref())?;
                Box::new(BackendDevice::new(&plan, backend, options.backend())?)
            }
            Whereabouts::Gpu => {
                let bar = progress::bytes("loading", 0);
                let mut told = |done, total| {
                    bar.set_length(total);
                    bar.set_position(done);
                };
                let device = BackendDevice::on_cuda(plan, &self.location(), &on, &mut told, options.backend());
                bar.finish_and_clear();
                Box::new(device?)
            }
        };
        let EngineOptions { engine: EngineArgs { itl, .. }, serves, suppress, drafts, .. } = options;
        let gap = match itl {
            Some(itl) => Gap::Within(itl),
            None if serves => Gap::Measured,
            None => Gap::Any,
        };
        // Whoever limits the gap between tokens waits for single answers.
        let prompts_first = gap == Gap::Any;
        let options = engine::Options { gap, prompts_first, suppress, drafts, ..engine::Options::default() };
        Ok(Engine::new(device, options)?)
    }

    pub fn on_gpu(&self) -> OnGpu {
        OnGpu { program: self.program.clone(), multiprocessors: self.sms }
    }

    pub fn location(&self) -> ModelLocation {
        ModelLocation { plan: self.plan.clone(), given: self.model.clone() }
    }
}

/// How an engine shares the device, from the command line.
#[derive(Clone, Copy, Default, clap::Args)]
pub struct EngineArgs {
    /// Of many sequences: the longest gap between tokens that the prompts of others may cause [default: prompts come first; of serve,
    /// a chunk of 512 tokens, within 20 and 80 ms]
    #[arg(long, value_name = "MS", value_parser = milliseconds)]
    pub itl: Option<Duration>,

    /// Of many sequences: host memory, such as 8GiB, for prefixes of prompts that the device has no room to keep [default: none]
    #[arg(long, value_name = "BYTES", value_parser = size)]
    pub host_cache: Option<u64>,
}

impl EngineArgs {
    /// Refuses what a command that opens no engine would not heed.
    pub fn refuse_without(&self, what: &str) -> Result<()> {
        ensure!(self.itl.is_none(), "--itl is for many sequences: it needs {what}");
        ensure!(self.host_cache.is_none(), "--host-cache is for many sequences: it needs {what}");
        Ok(())
    }

    fn host_bytes(&self) -> u64 {
        self.host_cache.unwrap_or(0)
    }
}

/// A time, with its unit or without.
fn milliseconds(text: &str) -> Result<Duration, String> {
    let number = text.strip_suffix("ms").unwrap_or(text).trim();
    let number: f64 = number.parse().map_err(|_| "a time is a number of milliseconds, such as 50ms".to_owned())?;
    match number > 0.0 {
        true => Duration::try_from_secs_f64(number / 1000.0).map_err(|_| "out of range".into()),
        false => Err("more than 0 is needed".into()),
    }
}

/// A number of positions, in thousands of 1,024 with a k: 32k is 32768.
pub fn positions(text: &str) -> Result<u32, String> {
    let (number, factor) = match text.strip_suffix(['k', 'K']) {
        Some(number) => (number, 1024),
        None => (text, 1),
    };
    let number: u32 =
        number.parse().map_err(|_| "a context is a number of positions, such as 8192 or 8k".to_owned())?;
    number.checked_mul(factor).ok_or_else(|| "out of range".into())
}

/// Bytes, with a unit or without.
pub fn size(text: &str) -> Result<u64, String> {
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "mib" => 1 << 20,
        "gib" | "g" => 1 << 30,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        _ => return Err("a size is a number with B, MB, GB, MiB or GiB".into()),
    };
    let number: f64 = number.parse().map_err(|_| "a size starts with a number".to_owned())?;
    let bytes = number * factor as f64;
    if bytes.is_finite() && bytes >= 1.0 && bytes < u64::MAX as f64 {
        Ok(bytes as u64)
    } else {
        Err("out of range".into())
    }
}

/// What an engine is opened with.
#[derive(Default)]
pub struct EngineOptions {
    pub engine: EngineArgs,
    /// Sequences at once; `None` for what the plan was compiled for.
    pub sequences: Option<u32>,
    /// Prefixes kept beside them, at most.
    pub snapshots: Option<u32>,
    /// Somebody waits for each answer: prompts do not come first.
    pub serves: bool,
    /// Tokens that are never picked.
    pub suppress: Vec<u32>,
    pub drafts: engine::Drafts,
}

impl EngineOptions {
    fn backend(&self) -> BackendOptions {
        BackendOptions {
            sequences: self.sequences,
            host_bytes: self.engine.host_bytes(),
            suppress: self.suppress.clone(),
        }
    }
}

/// Sequences at once on a CPU, which reserves memory only as it is used.
const CPU_SEQUENCES: u32 = 8;

/// What runs a plan.
enum Whereabouts {
    Cpu,
    Gpu,
    Simulated,
}

/// Where a plan runs if it is wanted on a device; refuses options that make no sense there.
fn whereabouts(plan: &Plan, device: Device, on: &OnGpu) -> Result<Whereabouts> {
    let on_gpu = match device {
        Device::Sim => {
            ensure!(on.multiprocessors.is_none(), "--sms takes SMs from a GPU: a simulated one has none");
            return Ok(Whereabouts::Simulated);
        }
        Device::Cpu => false,
        Device::Cuda => true,
        Device::Auto if plan.cuda.is_none() => false,
        Device::Auto => match machine::gpus() {
            Ok(gpus) if !gpus.is_empty() => true,
            Ok(_) => {
                eprintln!("[no GPU: the plan runs on the CPU]");
                false
            }
            Err(why) => {
                eprintln!("[no GPU: the plan runs on the CPU ({why})]");
                false
            }
        },
    };
    if on_gpu {
        return Ok(Whereabouts::Gpu);
    }
    ensure!(on.multiprocessors.is_none(), "--sms takes SMs from a GPU, but the plan runs on the CPU");
    ensure!(on.program.is_none(), "--program chooses among programs for GPUs, but the plan runs on the CPU");
    Ok(Whereabouts::Cpu)
}

/// Makes a plan ready to run where it is wanted.
pub fn open(plan: Plan, location: &ModelLocation, device: Device, on: &OnGpu) -> Result<Session> {
    match whereabouts(&plan, device, on)? {
        Whereabouts::Simulated => return simulate::open(plan, location, on.program.as_deref()),
        Whereabouts::Cpu => return Ok(Session::on_cpu(plan, location)?),
        Whereabouts::Gpu => {}
    }
    let bar = progress::bytes("loading", 0);
    let count = plan.programs().count();
    let session = Session::on_cuda(plan, location, on, &mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    let mut session = session?;
    let there = session.cuda().map(|cuda| cuda.device().gpu.clone());
    if let (Some(gpu), Some(cuda)) = (there, &session.plan().cuda) {
        let program = &cuda.program.gpu;
        // Of a plan for one GPU that runs on such a GPU there is nothing to say.
        if count > 1 || gpu.multiprocessors != program.multiprocessors {
            eprintln!("[{} with {} SMs runs the program for {program}]", gpu.name, gpu.multiprocessors);
        }
    }
    Ok(session)
}

/// Whether a file is a GGUF model, where a plan would do as well.
pub fn is_gguf(path: &Path) -> Result<bool> {
    Ok(start(path)?.starts_with(b"GGUF"))
}

/// Whether a file is a plan, where a model is wanted.
pub fn is_plan(path: &Path) -> Result<bool> {
    Ok(start(path)?.starts_with(b"gemma4c\0"))
}

/// The first eight bytes of a file, or all it has.
fn start(path: &Path) -> Result<Vec<u8>> {
    regular(path)?;
    let cannot_read = || format!("cannot read {}", path.display());
    let mut bytes = Vec::new();
    File::open(path).with_context(cannot_read)?.take(8).read_to_end(&mut bytes).with_context(cannot_read)?;
    Ok(bytes)
}

/// Opening a pipe would wait for whoever writes to it.
pub fn regular(path: &Path) -> Result<Metadata> {
    let info = fs::metadata(path).with_context(|| format!("cannot read {}", path.display()))?;
    ensure!(info.is_file(), "{} is not a regular file", path.display());
    Ok(info)
}

/// Reads and checks a plan, but not the weights behind it.
pub fn read(path: &Path) -> Result<Plan> {
    let file_bytes = regular(path)?.len();
    let cannot_read = || format!("cannot read {}", path.display());
    let file = File::open(path).with_context(cannot_read)?;
    let mut bytes = Vec::new();
    (&file).take(START as u64).read_to_end(&mut bytes).with_context(cannot_read)?;
    if bytes.starts_with(b"GGUF") {
        bail!("{0} is a model, not a plan: run `gemma4c compile {0} -o PLAN.bin` first", path.display());
    }
    let own = own_bytes(&bytes).with_context(|| path.display().to_string())?;
    if own > LARGEST {
        bail!("{} is not a plan: it says it has {own} bytes", path.display());
    }
    file.take(own.saturating_sub(START as u64)).read_to_end(&mut bytes).with_context(cannot_read)?;
    Plan::from_start(&bytes, file_bytes).with_context(|| path.display().to_string())
}

/// Writes a plan under its name only once it is complete.
pub fn write(plan: &Plan, path: &OutputFile) -> Result<u64> {
    let bytes = plan.to_bytes()?;
    output::write_whole(path, &bytes)?;
    Ok(bytes.len() as u64)
}
