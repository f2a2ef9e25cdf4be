//! Plans that are made on the way: whoever has a GGUF model and needs a plan for this machine gets one, and finds it
//! again the next time.
//!
//! A kept plan is named by everything that it depends on: the models' fingerprints and paths, the options, the GPU and
//! this very program. It is an ordinary plan; to move one to another machine, `compile` is the way. A cache that cannot
//! be written costs time and nothing else.

use std::env;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime};

use gemma4c_blocks::DType;
use gemma4c_models::media::USUAL_BUDGET;
use gemma4c_plan::{Plan, Seats, VERSION, cuda::KvType};
use gemma4c_runtime::{MOST_DRAFTS, machine};
use xxhash_rust::xxh3::xxh3_64;

use crate::adapters;
use crate::device::Device;
use crate::error::Error;
use crate::fit::{self, Choosable};
use crate::options::{self, AdapterAt, Options};
use crate::pipeline::{self, Files};
use crate::{files, installation, output};

/// Plans that are kept, in bytes: the oldest go first.
const MOST_BYTES: u64 = 4 << 30;

/// The part of a GPU's memory that a plan takes at most: the rest is for copies on the way there, the driver and others.
const USUAL_PART: f64 = 0.9;

/// What a plan is to have. What is `None` is chosen: by the model, and by this machine.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    /// What will run it.
    pub device: Device,
    /// Positions of a sequence.
    pub context: Option<u32>,
    /// The type of keys and values.
    pub kv: Option<KvType>,
    /// The part of a GPU's memory that it may take, or its bytes, which count if both are there.
    pub memory: Option<f64>,
    pub vram: Option<u64>,
    pub projector: Option<PathBuf>,
    pub drafter: Option<PathBuf>,
    pub adapters: Vec<AdapterAt>,
    /// Room for adapters that come and go while the plan runs.
    pub seats: Option<Seats>,
    /// Sequences that a GPU plan has room for.
    pub sequences: u32,
    /// Nobody asked for that many: where memory is short, fewer will do.
    pub may_be_fewer: bool,
    /// Rows of one sequence that a GPU plan must be able to verify at once; a drafter brings its own.
    pub verified: u32,
    /// Soft tokens of a picture.
    pub image_tokens: Option<u32>,
    /// Models that share the memory in equal parts.
    pub sharing: Option<u64>,
    /// What the model's matrices of floats become while they are loaded.
    pub quantize: Option<DType>,
    /// The file of a chat template in place of the model's.
    pub chat_template: Option<PathBuf>,
}

/// A plan, and the file that it is in, or would be in if it could be kept.
pub struct Made {
    pub plan: Plan,
    pub path: PathBuf,
}

/// The plan of a model, found or compiled; `tell` hears what was chosen and what was done.
pub fn make(model: &Path, wanted: &Wanted, tell: &mut dyn FnMut(String)) -> Result<Made, Error> {
    let started = Instant::now();
    let options = options(wanted)?;
    let files = Files::open(model, &options)?;
    adapters::applied(&files.adapters, files.merged.as_ref()).into_iter().for_each(&mut *tell);
    let Wanted { context, kv, may_be_fewer, .. } = wanted;
    let may = Choosable { context: context.is_none(), kv: kv.is_none(), sequences: *may_be_fewer };
    // What is chosen follows from that, so it need not be chosen again to find the plan.
    let name = name(model, &files, &options, may)?;
    let folder = folder().and_then(|folder| {
        fs::create_dir_all(&folder).map_err(Error::write(&folder))?;
        Ok(folder)
    });
    if let Ok(folder) = &folder {
        let path = folder.join(&name);
        if let Some(plan) = find(&path, tell) {
            tell_choice(&plan, tell);
            return Ok(Made { plan, path });
        }
    }
    files.notes(&options).into_iter().for_each(&mut *tell);
    // Without a place to keep it, the plan is made for this run alone.
    let path = folder.as_deref().unwrap_or(Path::new(".")).join(name);
    let options = fit::fit(&files, options, may)?;
    let plan = pipeline::compile(&files, files::folder(&path), &options)?;
    tell_choice(&plan, tell);
    let kept = folder.and_then(|folder| {
        let bytes = files::write_plan(&plan, &path)?;
        drop_oldest(&folder, &path);
        Ok(bytes)
    });
    let seconds = started.elapsed().as_secs_f64();
    tell(match kept {
        Ok(bytes) => {
            format!("compiled for this machine in {seconds:.1} s: {}, {}", path.display(), output::bytes(bytes))
        }
        Err(why) => {
            let why = output::message(&why.into());
            format!("compiled for this run alone in {seconds:.1} s: the plan is not kept, because {why}")
        }
    });
    Ok(Made { plan, path })
}

fn options(wanted: &Wanted) -> Result<Options, Error> {
    let gpu = match (wanted.device, options::gpu_here()) {
        (Device::Cpu, _) | (Device::Auto, Ok(None)) => None,
        (Device::Sim, Ok(None)) => Some(options::measured_gpu()),
        (Device::Cuda, Ok(None)) => {
            return Err(Error::Option("--device cuda: this machine has no GPU to compile for".into()));
        }
        (_, gpu) => gpu?,
    };
    for (name, is_given) in [("--vram", wanted.vram.is_some()), ("--memory", wanted.memory.is_some())] {
        if gpu.is_none() && is_given {
            return Err(Error::Option(format!("{name} is about GPUs, but the plan runs on the CPU")));
        }
    }
    let bytes = gpu.as_ref().and_then(|_| device_bytes(wanted.memory, wanted.vram));
    let mut options = Options {
        context: wanted.context,
        kv: wanted.kv.unwrap_or(KvType::F16),
        vram: bytes.map(|bytes| bytes / wanted.sharing.unwrap_or(1).max(1)),
        drafter: wanted.drafter.clone(),
        adapters: wanted.adapters.clone(),
        seats: wanted.seats,
        projector: wanted.projector.clone(),
        image_tokens: wanted.image_tokens.unwrap_or(USUAL_BUDGET),
        quantize: wanted.quantize,
        chat_template: wanted.chat_template.as_deref().map(files::read_template).transpose()?,
        ..Options::default()
    };
    // A plan for the CPU does not depend on these, and is found again whatever they are.
    if let Some(gpu) = gpu {
        let drafted = if options.drafter.is_some() { MOST_DRAFTS } else { 0 };
        options.gpus = vec![gpu];
        options.sequences = wanted.sequences;
        options.drafts = Some(drafted.max(wanted.verified.saturating_sub(1)));
    }
    Ok(options)
}

/// Device memory that plans may take together: so many bytes, or a part of what there is. Of all memory, not of what is
/// free now: the same command finds the same plan.
pub fn device_bytes(part: Option<f64>, bytes: Option<u64>) -> Option<u64> {
    let part_of = |gpu: machine::Gpu| (gpu.memory as f64 * part.unwrap_or(USUAL_PART)) as u64;
    let here = || machine::gpus().ok().and_then(|gpus| gpus.into_iter().next()).map(part_of);
    bytes.or_else(here)
}

/// A plan that was kept. One that is damaged is made again: nobody wrote it by hand.
fn find(path: &Path, tell: &mut dyn FnMut(String)) -> Option<Plan> {
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
            tell(format!("the plan in the cache is made again: {}", output::message(&why.into())));
            None
        }
    }
}

/// Where everything that can be made again is kept.
pub fn root() -> Result<PathBuf, Error> {
    let variable = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let user = || variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")));
    let root = variable("GEMMA4C_CACHE").or_else(|| Some(user()?.join("gemma4c")));
    let nowhere = "there is no place for a cache: none of GEMMA4C_CACHE, XDG_CACHE_HOME and HOME is set";
    root.ok_or_else(|| Error::Option(nowhere.into()))
}

fn folder() -> Result<PathBuf, Error> {
    Ok(root()?.join("plans"))
}

/// Says what a GPU plan was compiled for, some of which nobody asked for.
fn tell_choice(plan: &Plan, tell: &mut dyn FnMut(String)) {
    let Some(cuda) = &plan.cuda else { return };
    let (layout, memory) = (&cuda.program.kv_layout, &cuda.program.memory);
    let sequences = match layout.slots {
        1 => "1 sequence".to_owned(),
        slots => format!("{slots} sequences"),
    };
    let drafts = if plan.drafter.is_some() { ", a drafter" } else { "" };
    let (context, kv) = (plan.program.context, cuda.program.kv.name());
    let bytes = output::bytes(memory.device().unwrap_or(u64::MAX));
    tell(format!("context {context}, {sequences}, keys and values in {kv}{drafts}: {bytes} of the GPU's memory"));
}

/// By all that a plan depends on. The files' paths are among that: the plan says where its weights are.
fn name(model: &Path, files: &Files, options: &Options, may: Choosable) -> Result<String, Error> {
    let files: Vec<(u64, Vec<PathBuf>)> = files
        .with_weights()
        .iter()
        .map(|file| {
            let paths = file.files().iter().map(|part| fs::canonicalize(&part.path).unwrap_or(part.path.clone()));
            (file.fingerprint(file.tensors()) ^ file.metadata_hash(), paths.collect())
        })
        .collect();
    // Another build may compile otherwise.
    let build = installation::build()?;
    // The files count, however they were named.
    let scales = options.adapters.iter().map(|at| AdapterAt { path: PathBuf::new(), scale: at.scale }).collect();
    let options = Options { projector: None, drafter: None, adapters: scales, ..options.clone() };
    let all = format!("{VERSION} {files:?} {options:?} {may:?} {build}");
    let stem = model.file_stem().unwrap_or_default().to_string_lossy();
    Ok(format!("{stem}-{:016x}.bin", xxh3_64(all.as_bytes())))
}

/// Plans in a folder with their size, the one that was not used for the longest time first.
pub fn in_folder(folder: &Path) -> Vec<(PathBuf, u64)> {
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
    let plans = in_folder(folder);
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
