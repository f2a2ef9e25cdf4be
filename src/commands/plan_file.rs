//! Plans on disk: reading one with errors that name it, writing one whole or not at all.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use gemma4c_plan::Plan;
use gemma4c_runtime::{ModelLocation, Session};

/// A plan is small; a file beyond this is something else, and is not read into memory to find out.
const LARGEST: u64 = 1 << 30;

/// Which device runs the plan.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Device {
    /// What the plan was compiled for.
    Auto,
    /// This machine's processor.
    Cpu,
}

/// A plan, and where its model may lie.
#[derive(clap::Args)]
pub struct PlanArgs {
    /// A plan, as written by `gemma4c compile`.
    #[arg(value_name = "PLAN.bin")]
    pub plan: PathBuf,

    /// Where the model file lies, if it has moved: the file or its folder.
    #[arg(long, value_name = "PATH")]
    pub model: Option<PathBuf>,

    /// Where to run it.
    #[arg(long, value_enum, default_value = "auto")]
    pub device: Device,
}

impl PlanArgs {
    /// Loads the plan and maps its model.
    pub fn open(&self) -> Result<Session> {
        let plan = read(&self.plan)?;
        let location = ModelLocation { plan_dir: folder(&self.plan), given: self.model.clone() };
        Ok(Session::open(plan, &location)?)
    }
}

/// Reads and checks a plan.
pub fn read(path: &Path) -> Result<Plan> {
    let cannot_read = || format!("cannot read {}", path.display());
    let info = fs::metadata(path).with_context(cannot_read)?;
    if !info.is_file() {
        bail!("{} is not a regular file", path.display());
    }
    if info.len() > LARGEST {
        bail!("{} is not a plan: it has {} bytes", path.display(), info.len());
    }
    let bytes = fs::read(path).with_context(cannot_read)?;
    if bytes.starts_with(b"GGUF") {
        bail!("{0} is a model, not a plan: run `gemma4c compile {0} -o PLAN.bin` first", path.display());
    }
    Plan::from_bytes(&bytes).with_context(|| path.display().to_string())
}

/// Writes a plan under its name only once it is complete.
pub fn write(plan: &Plan, path: &Path) -> Result<u64> {
    let bytes = plan.to_bytes()?;
    let cannot_write = || format!("cannot write {}", path.display());
    let mut file = tempfile::NamedTempFile::new_in(folder(path)).with_context(cannot_write)?;
    file.write_all(&bytes).with_context(cannot_write)?;
    file.persist(path).with_context(cannot_write)?;
    Ok(bytes.len() as u64)
}

/// The folder a file lies in; the current one for a bare name.
pub fn folder(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.into(),
        _ => PathBuf::from("."),
    }
}
