//! Plans on disk: reading one with errors that name it, writing one whole or not at all.

use std::fs::{self, File, Metadata};
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use gemma4c_plan::{Plan, START, own_bytes};
use gemma4c_runtime::{ModelLocation, OnGpu, Session, machine};

use crate::{output, progress, simulate};

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
}

impl PlanArgs {
    /// Loads the plan and its model.
    pub fn open(&self) -> Result<Session> {
        self.open_read(read(&self.plan)?)
    }

    /// The same of the plan, once read.
    pub fn open_read(&self, plan: Plan) -> Result<Session> {
        open(plan, &self.location(), self.device, &self.on_gpu())
    }

    pub fn on_gpu(&self) -> OnGpu {
        OnGpu { program: self.program.clone(), multiprocessors: self.sms }
    }

    pub fn location(&self) -> ModelLocation {
        ModelLocation { plan: self.plan.clone(), given: self.model.clone() }
    }
}

/// Makes a plan ready to run where it is wanted.
pub fn open(plan: Plan, location: &ModelLocation, device: Device, on: &OnGpu) -> Result<Session> {
    let on_gpu = match device {
        Device::Sim => {
            ensure!(on.multiprocessors.is_none(), "--sms takes SMs from a GPU: a simulated one has none");
            return simulate::open(plan, location, on.program.as_deref());
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
    if !on_gpu {
        ensure!(on.multiprocessors.is_none(), "--sms takes SMs from a GPU, but the plan runs on the CPU");
        ensure!(on.program.is_none(), "--program chooses among programs for GPUs, but the plan runs on the CPU");
        return Ok(Session::on_cpu(plan, location)?);
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
pub fn write(plan: &Plan, path: &Path) -> Result<u64> {
    let bytes = plan.to_bytes()?;
    output::write_whole(path, &bytes)?;
    Ok(bytes.len() as u64)
}
