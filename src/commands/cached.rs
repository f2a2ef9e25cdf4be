//! Plans that are made on the way: a command that is given a GGUF model, or the name of one, compiles it for this
//! machine, and finds the plan again the next time.
//!
//! A cached plan is named by everything that it depends on: the models' fingerprints and paths, the options, the GPU
//! and this very program. It is an ordinary plan; to move one to another machine, `compile` is the way. A cache that
//! cannot be written costs time and nothing else.

use std::env;
use std::fmt::{self, Display, Formatter};
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime};

use anyhow::{Context, Result, bail, ensure};
use gemma4c_models::media::USUAL_BUDGET;
use gemma4c_plan::{Plan, VERSION, cuda::KvType};
use gemma4c_runtime::{MOST_DRAFTS, machine};
use xxhash_rust::xxh3::xxh3_64;

use super::by_name::ByNameArgs;
use super::compile::Kv;
use super::plan_file::{self, PlanArgs};
use crate::by_name::{Beside, Brought};
use crate::device::Device;
use crate::files;
use crate::fit::{self, Choosable};
use crate::options::{self, Options};
use crate::output::{self, OutputFile};
use crate::pipeline::{self, Files};

/// Plans that are kept, in bytes: the oldest go first.
const MOST_BYTES: u64 = 4 << 30;

/// The part of a GPU's memory that a plan takes at most: the rest is for copies on the way there, the driver and others.
const USUAL_PART: f64 = 0.9;

/// How a model is compiled on the way.
#[derive(Clone, Default, clap::Args)]
pub struct ModelArgs {
    /// With a GGUF model: positions a sequence may have, such as 32k [default: on a GPU as many as there is memory for,
    /// up to what the model was trained for; on a CPU 8192]
    #[arg(long, value_name = "N", value_parser = plan_file::positions)]
    ctx: Option<u32>,

    /// With a GGUF model: type of keys and values [default: f16; q8_0 where a context of 8192 does not fit otherwise]
    #[arg(long, value_enum)]
    kv: Option<Kv>,

    /// With a GGUF model: the part of the GPU's memory that the plan may take [default: 0.9]
    #[arg(long, value_name = "PART", value_parser = plan_file::part, conflicts_with = "vram")]
    memory: Option<f64>,

    /// With a GGUF model: device memory that the plan may take, such as 24GiB, in place of --memory
    #[arg(long, value_name = "SIZE", value_parser = plan_file::size)]
    vram: Option<u64>,

    /// With a GGUF model: its projector file (mmproj), which lets it read pictures and sound
    #[arg(long, value_name = "MMPROJ.gguf")]
    mmproj: Option<PathBuf>,

    #[command(flatten)]
    by_name: ByNameArgs,
}

/// What a command needs of the plan that is made of its model.
pub struct Needs<'a> {
    /// Sequences that a GPU plan has room for.
    pub sequences: u32,
    /// Nobody asked for that many: where memory is short, fewer will do.
    pub may_be_fewer: bool,
    /// Rows of one sequence that a GPU plan must be able to verify at once; a drafter brings its own.
    pub verified: u32,
    /// The drafter's file.
    pub drafter: Option<&'a Path>,
    /// Whether the drafter that comes with a named model is of use.
    pub is_drafted: bool,
    /// Soft tokens of a picture.
    pub image_tokens: Option<u32>,
}

impl ModelArgs {
    /// Puts the plan of a model in the model's place; a plan stays.
    pub fn resolve(&self, plan: &mut PlanArgs, needs: &Needs<'_>) -> Result<()> {
        let beside = Beside { projector: self.mmproj.is_none(), drafter: needs.drafter.is_none() && needs.is_drafted };
        let brought = self.by_name.bring(&plan.plan, plan.device, beside)?;
        if let Some(brought) = &brought {
            plan.plan = brought.model.clone();
        }
        if !files::is_gguf(&plan.plan)? {
            return self.refuse_for_plan(&plan.plan, needs);
        }
        let started = Instant::now();
        let model = plan.plan.clone();
        let options = self.options(plan, needs, brought.unwrap_or_default())?;
        let files = Files::open(&model, &options)?;
        let may = Choosable { context: self.ctx.is_none(), kv: self.kv.is_none(), sequences: needs.may_be_fewer };
        // What is chosen follows from that, so it need not be chosen again to find the plan.
        let name = name(&model, &files, &options, may)?;
        let folder = folder().and_then(|folder| {
            fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
            Ok(folder)
        });
        if let Some(found) = folder.as_ref().ok().and_then(|folder| find(&folder.join(&name))) {
            tell_choice(&found);
            (plan.plan, plan.made) = (folder?.join(name), Some(Box::new(found)));
            return Ok(());
        }
        // Without a place to keep it, the plan is made for this run alone.
        let path = folder.as_deref().unwrap_or(Path::new(".")).join(name);
        let options = fit::fit(&files, options, may)?;
        let made = pipeline::compile(&files, files::folder(&path), &options)?;
        tell_choice(&made);
        let kept = folder.and_then(|folder| {
            let bytes = plan_file::write(&made, &OutputFile::from(path.clone()))?;
            drop_oldest(&folder, &path);
            Ok(bytes)
        });
        let seconds = started.elapsed().as_secs_f64();
        match kept {
            Ok(bytes) => {
                let bytes = output::bytes(bytes);
                eprintln!("[compiled for this machine in {seconds:.1} s: {}, {bytes}]", path.display());
            }
            Err(why) => {
                let why = output::message(&why);
                eprintln!("[compiled for this run alone in {seconds:.1} s: the plan is not kept, because {why}]");
            }
        }
        (plan.plan, plan.made) = (path, Some(Box::new(made)));
        Ok(())
    }

    /// What a model is compiled with is not for a plan, which was compiled with its own.
    fn refuse_for_plan(&self, plan: &Path, needs: &Needs<'_>) -> Result<()> {
        let ModelArgs { ctx, kv, memory, vram, mmproj, .. } = self;
        let given = [
            ("--ctx", ctx.is_some()),
            ("--kv", kv.is_some()),
            ("--memory", memory.is_some()),
            ("--vram", vram.is_some()),
            ("--mmproj", mmproj.is_some()),
            ("--draft FILE", needs.drafter.is_some()),
        ];
        match given.iter().find(|(_, is_given)| *is_given) {
            Some((name, _)) => bail!("{name} is for a GGUF model; {} is a plan, compiled with its own", plan.display()),
            None => Ok(()),
        }
    }

    /// `beside` has what came with a named model.
    fn options(&self, plan: &PlanArgs, needs: &Needs<'_>, beside: Brought) -> Result<Options> {
        let gpu = match (plan.device, options::gpu_here()) {
            (Device::Cpu, _) | (Device::Auto, Ok(None)) => None,
            (Device::Sim, Ok(None)) => Some(options::measured_gpu()),
            (Device::Cuda, Ok(None)) => bail!("--device cuda: this machine has no GPU to compile for"),
            (_, gpu) => gpu?,
        };
        for (name, is_given) in [("--vram", self.vram.is_some()), ("--memory", self.memory.is_some())] {
            ensure!(gpu.is_some() || !is_given, "{name} is about GPUs, but the plan runs on the CPU");
        }
        // Of all memory, not of what is free now: the same command finds the same plan.
        let part_of = |gpu: machine::Gpu| (gpu.memory as f64 * self.memory.unwrap_or(USUAL_PART)) as u64;
        let here = || machine::gpus().ok().and_then(|gpus| gpus.into_iter().next()).map(part_of);
        let mut options = Options {
            context: self.ctx,
            kv: self.kv.map_or(KvType::F16, Kv::kv_type),
            vram: self.vram.or_else(here).filter(|_| gpu.is_some()),
            drafter: needs.drafter.map(Path::to_path_buf).or(beside.drafter),
            projector: self.mmproj.clone().or(beside.projector),
            image_tokens: needs.image_tokens.unwrap_or(USUAL_BUDGET),
            ..Options::default()
        };
        // A plan for the CPU does not depend on these, and is found again whatever they are.
        if let Some(gpu) = gpu {
            let drafted = if options.drafter.is_some() { MOST_DRAFTS } else { 0 };
            options.gpus = vec![gpu];
            options.sequences = needs.sequences;
            options.drafts = Some(drafted.max(needs.verified - 1));
        }
        Ok(options)
    }
}

/// A plan that was kept. One that is damaged is made again: nobody wrote it by hand.
fn find(path: &Path) -> Option<Plan> {
    if !path.is_file() {
        return None;
    }
    match files::read_plan(path) {
        Ok(plan) => {
            // The latest used goes last.
            _ = File::options().append(true).open(path).and_then(|file| file.set_modified(SystemTime::now()));
            Some(plan)
        }
        Err(why) => {
            eprintln!("[the plan in the cache is made again: {}]", output::message(&why.into()));
            None
        }
    }
}

/// Where everything that can be made again is kept.
fn root() -> Result<PathBuf> {
    let variable = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let user = || variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")));
    let root = variable("GEMMA4C_CACHE").or_else(|| Some(user()?.join("gemma4c")));
    root.context("there is no place for a cache: none of GEMMA4C_CACHE, XDG_CACHE_HOME and HOME is set")
}

fn folder() -> Result<PathBuf> {
    Ok(root()?.join("plans"))
}

/// Says what a GPU plan was compiled for, some of which nobody asked for.
fn tell_choice(plan: &Plan) {
    let Some(cuda) = &plan.cuda else { return };
    let (layout, memory) = (&cuda.program.kv_layout, &cuda.program.memory);
    let sequences = match layout.slots {
        1 => "1 sequence".to_owned(),
        slots => format!("{slots} sequences"),
    };
    let drafts = if plan.drafter.is_some() { ", a drafter" } else { "" };
    let (context, kv) = (plan.program.context, cuda.program.kv.name());
    let bytes = output::bytes(memory.device().unwrap_or(u64::MAX));
    eprintln!("[context {context}, {sequences}, keys and values in {kv}{drafts}: {bytes} of the GPU's memory]");
}

/// By all that a plan depends on. The files' paths are among that: the plan says where its weights are.
fn name(model: &Path, files: &Files, options: &Options, may: Choosable) -> Result<String> {
    let files: Vec<(u64, Vec<PathBuf>)> = files
        .with_weights()
        .iter()
        .map(|file| {
            let paths = file.files().iter().map(|part| fs::canonicalize(&part.path).unwrap_or(part.path.clone()));
            (file.fingerprint(file.tensors()), paths.collect())
        })
        .collect();
    // Another build may compile otherwise.
    let program = env::current_exe().and_then(fs::metadata).context("cannot find this program's own file")?;
    let built = program.modified().ok().and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
    // The files count, however they were named.
    let options = Options { projector: None, drafter: None, ..options.clone() };
    let all = format!("{VERSION} {files:?} {options:?} {may:?} {} {built:?}", program.len());
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

/// Everything of ours in the cache: plans and compiled kernels, by the names that they are given. Other files there are
/// somebody else's.
pub struct Contents {
    root: PathBuf,
    plans: Vec<(PathBuf, u64)>,
    kernels: Vec<(PathBuf, u64)>,
}

impl Contents {
    pub fn read() -> Result<Contents> {
        let root = root()?;
        let of = |folder: &str, is_ours: fn(&str) -> bool| -> Vec<(PathBuf, u64)> {
            let named = |path: &Path| path.file_name().and_then(|name| name.to_str()).is_some_and(is_ours);
            plans(&root.join(folder)).into_iter().filter(|(path, _)| named(path)).collect()
        };
        let (plans, kernels) = (of("plans", is_plan_name), of("cubins", |name| is_hex(name, 32)));
        Ok(Contents { root, plans, kernels })
    }

    fn bytes(&self) -> u64 {
        self.plans.iter().chain(&self.kernels).map(|(_, bytes)| bytes).sum()
    }

    /// Deletes all of it.
    pub fn clear(&self) -> Result<()> {
        for (path, _) in self.plans.iter().chain(&self.kernels) {
            match fs::remove_file(path) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(error).with_context(|| format!("cannot delete {}", path.display()));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// `FOLDER: 2 plans and 30 kernels, 12.50 MB`.
impl Display for Contents {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let counted = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
        let (plans, kernels) = (counted(self.plans.len(), "plan"), counted(self.kernels.len(), "kernel"));
        write!(f, "{}: {plans} and {kernels}, {}", self.root.display(), output::bytes(self.bytes()))
    }
}

/// `STEM-0123456789abcdef.bin`, as `name` makes them.
fn is_plan_name(name: &str) -> bool {
    let parts = name.strip_suffix(".bin").and_then(|name| name.rsplit_once('-'));
    parts.is_some_and(|(_, hash)| is_hex(hash, 16))
}

fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}
