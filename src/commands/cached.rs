//! Plans that are made on the way: a command that is given a GGUF model compiles it for this machine, and finds the plan again the next time.
//!
//! A cached plan is named by everything that it depends on: the model's fingerprint, the options, the GPU and this very program. It is an
//! ordinary plan; to move one to another machine, `compile` is the way.

use std::env;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime};

use anyhow::{Context, Result, ensure};
use gemma4c_codegen::arch::Arch;
use gemma4c_codegen::passes;
use gemma4c_codegen::target::Target as Gpu;
use gemma4c_models::gguf::Gguf;
use gemma4c_plan::{VERSION, cuda::KvType};
use gemma4c_runtime::machine;
use xxhash_rust::xxh3::xxh3_64;

use super::compile::Kv;
use super::plan_file::{self, Device, PlanArgs};
use crate::compile::{self, CudaOptions, Options};
use crate::output;

/// Plans that are kept, in bytes: the oldest go first.
const MOST_BYTES: u64 = 4 << 30;

/// How a model is compiled on the way.
#[derive(Clone, Default, clap::Args)]
pub struct ModelArgs {
    /// With a GGUF model: positions a sequence may have [default: 8192, or what the model was trained for if that is less]
    #[arg(long, value_name = "N")]
    ctx: Option<u32>,

    /// With a GGUF model: type of keys and values [default: f16]
    #[arg(long, value_enum)]
    kv: Option<Kv>,

    /// With a GGUF model: device memory the plan may take, such as 24GiB [default: as much as it needs]
    #[arg(long, value_name = "SIZE", value_parser = plan_file::size)]
    vram: Option<u64>,
}

impl ModelArgs {
    /// Puts the plan of a model in the model's place; a plan stays. `sequences` are as many as the plan must have room for on a GPU, and
    /// `verified` rows of one of them are computed together there.
    pub fn resolve(&self, plan: &mut PlanArgs, sequences: u32, verified: u32) -> Result<()> {
        if !plan_file::is_gguf(&plan.plan)? {
            let ModelArgs { ctx, kv, vram } = self;
            let given = [("--ctx", ctx.is_some()), ("--kv", kv.is_some()), ("--vram", vram.is_some())];
            if let Some((name, _)) = given.iter().find(|(_, is_given)| *is_given) {
                anyhow::bail!("{name} is for a GGUF model; {} is a plan, compiled with its own", plan.plan.display());
            }
            return Ok(());
        }
        let started = Instant::now();
        let model = plan.plan.clone();
        let file = Gguf::open(&model)?;
        let options = self.options(plan, sequences, verified)?;
        let folder = folder()?;
        let path = folder.join(name(&model, &file, &options)?);
        if path.is_file() {
            // The latest used goes last.
            _ = File::options().append(true).open(&path).and_then(|file| file.set_modified(SystemTime::now()));
        } else {
            fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
            let compiled = compile::compile(&file, &folder, &options)?;
            let bytes = plan_file::write(&compiled, &path)?;
            let seconds = started.elapsed().as_secs_f64();
            eprintln!("[compiled for this machine in {seconds:.1} s: {}, {}]", path.display(), output::bytes(bytes));
            drop_oldest(&folder, &path);
        }
        plan.plan = path;
        // The model may have moved since the plan was made.
        plan.model.get_or_insert(model);
        Ok(())
    }

    fn options(&self, plan: &PlanArgs, sequences: u32, verified: u32) -> Result<Options> {
        let gpu = machine::gpus().ok().and_then(|gpus| gpus.into_iter().next());
        let target = match (plan.device, &gpu) {
            (Device::Cpu, _) | (Device::Auto, None) => None,
            (Device::Sim, None) => Some(Gpu::of_arch(Arch::Sm90a)),
            (Device::Cuda, None) => anyhow::bail!("--device cuda: this machine has no GPU to compile for"),
            (_, Some(gpu)) => {
                let target = compile::target_of(gpu);
                Some(
                    target
                        .with_context(|| format!("{} is older than any architecture kernels are made for", gpu.name))?,
                )
            }
        };
        ensure!(target.is_some() || self.vram.is_none(), "--vram is about GPUs, but the plan runs on the CPU");
        let kv = self.kv.map_or(KvType::F16, Kv::kv_type);
        let cuda = target.map(|target| CudaOptions {
            verified,
            targets: vec![target],
            kv,
            sequences,
            snapshots: None,
            vram: self.vram,
            disabled: passes::switched_off(&[], &[]),
        });
        Ok(Options { context: self.ctx, kv: Some(kv), cuda, ..Options::default() })
    }
}

/// Where everything that can be made again is kept.
fn root() -> Result<PathBuf> {
    let variable = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let user = || variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")));
    let root = variable("GEMMA4C_CACHE").or_else(|| Some(user()?.join("gemma4c")));
    root.context(
        "there is no place for a cache: none of GEMMA4C_CACHE, XDG_CACHE_HOME and HOME is set; use `gemma4c compile`",
    )
}

fn folder() -> Result<PathBuf> {
    Ok(root()?.join("plans"))
}

fn name(model: &Path, file: &Gguf, options: &Options) -> Result<String> {
    let fingerprint = file.fingerprint(file.tensors());
    // Another build may compile otherwise.
    let program = env::current_exe().and_then(fs::metadata).context("cannot find this program's own file")?;
    let built = program.modified().ok().and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
    let all = format!("{VERSION} {fingerprint} {options:?} {} {built:?}", program.len());
    let stem = model.file_stem().unwrap_or_default().to_string_lossy();
    Ok(format!("{stem}-{:016x}.bin", xxh3_64(all.as_bytes())))
}

/// Plans in a folder with their size, the one that was not used for the longest time first.
fn plans(folder: &Path) -> Vec<(PathBuf, u64)> {
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    let mut found: Vec<(SystemTime, PathBuf, u64)> = entries
        .filter_map(|entry| {
            let info = entry.metadata().ok().filter(|info| info.is_file())?;
            Some((info.modified().ok()?, entry.path(), info.len()))
        })
        .collect();
    found.sort();
    found.into_iter().map(|(_, path, bytes)| (path, bytes)).collect()
}

/// Makes room: what cannot be deleted is somebody else's worry.
fn drop_oldest(folder: &Path, keep: &Path) {
    let plans = plans(folder);
    let mut bytes: u64 = plans.iter().map(|(_, bytes)| bytes).sum();
    for (path, size) in plans.iter().filter(|(path, _)| path != keep) {
        if bytes <= MOST_BYTES {
            return;
        }
        if fs::remove_file(path).is_ok() {
            bytes -= size;
        }
    }
}

/// Where the cache is and how much is in it, in a line.
pub fn described() -> String {
    match root() {
        Err(error) => error.to_string(),
        Ok(root) => {
            let count = |name: &str| {
                let files = plans(&root.join(name));
                (files.len(), files.iter().map(|(_, bytes)| bytes).sum::<u64>())
            };
            let ((plans, plan_bytes), (kernels, kernel_bytes)) = (count("plans"), count("cubins"));
            let bytes = output::bytes(plan_bytes + kernel_bytes);
            format!("{}: {plans} plans and {kernels} kernels, {bytes}", root.display())
        }
    }
}

/// Deletes everything in the cache; returns how many files and bytes that were.
pub fn clear() -> Result<(usize, u64)> {
    let root = root()?;
    let (mut count, mut freed) = (0, 0);
    for name in ["plans", "cubins"] {
        for (path, bytes) in plans(&root.join(name)) {
            fs::remove_file(&path).with_context(|| format!("cannot delete {}", path.display()))?;
            count += 1;
            freed += bytes;
        }
    }
    Ok((count, freed))
}
