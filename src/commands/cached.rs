//! The arguments of commands that take a GGUF model, or the name of one, where they take a plan; and what is in the
//! cache of the plans that are made of models.

use std::fmt::{self, Display, Formatter};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use gemma4c_blocks::DType;
use gemma4c_plan::Seats;

use super::by_name::ByNameArgs;
use super::compile::{Kv, quantised};
use super::plan_file::{self, PlanArgs};
use crate::by_name::Beside;
use crate::options::AdapterAt;
use crate::plans::{self, Made, Wanted};
use crate::{files, output};

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

    /// The part of the GPU's memory that the plan may take: what its weights and activations leave is pages of keys and
    /// values [default: 0.9; of a plan, the pages that it was compiled with]
    #[arg(long, value_name = "PART", value_parser = plan_file::part, conflicts_with = "vram")]
    memory: Option<f64>,

    /// Device memory that the plan may take, such as 24GiB, in place of --memory
    #[arg(long, value_name = "SIZE", value_parser = plan_file::size)]
    vram: Option<u64>,

    /// With a GGUF model: its projector file (mmproj), which lets it read pictures and sound
    #[arg(long, value_name = "MMPROJ.gguf")]
    mmproj: Option<PathBuf>,

    /// With a model in floats: quantise its matrices while they are loaded, to q4_0 or q8_0
    #[arg(long, value_name = "TYPE", value_parser = quantised)]
    quantize: Option<DType>,

    /// With a model: a chat template (Jinja) in place of its own
    #[arg(long, value_name = "FILE")]
    chat_template: Option<PathBuf>,

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
    /// Adapters that are always on.
    pub adapters: &'a [AdapterAt],
    /// Room for adapters that come and go.
    pub seats: Option<Seats>,
    /// Soft tokens of a picture.
    pub image_tokens: Option<u32>,
    /// Models that share the GPU's memory in equal parts.
    pub sharing: u64,
}

impl ModelArgs {
    /// Puts the plan of a model in the model's place; a plan stays.
    pub fn resolve(&self, plan: &mut PlanArgs, needs: &Needs<'_>) -> Result<()> {
        let beside = Beside { projector: self.mmproj.is_none(), drafter: needs.drafter.is_none() && needs.is_drafted };
        let brought = self.by_name.bring(&plan.plan, plan.device, beside)?;
        if let Some(brought) = &brought {
            plan.plan = brought.model.clone();
        }
        if !files::is_model(&plan.plan)? {
            if self.memory.is_some() || self.vram.is_some() {
                let bytes = self.device_bytes().context("--memory is about GPUs, but this machine has none")?;
                plan.memory = Some(bytes / needs.sharing.max(1));
            }
            return self.refuse_for_plan(&plan.plan, needs);
        }
        let brought = brought.unwrap_or_default();
        let wanted = Wanted {
            device: plan.device,
            context: self.ctx,
            kv: self.kv.map(Kv::kv_type),
            memory: self.memory,
            vram: self.vram,
            projector: self.mmproj.clone().or(brought.projector),
            drafter: needs.drafter.map(Path::to_path_buf).or(brought.drafter),
            adapters: needs.adapters.to_vec(),
            seats: needs.seats,
            sequences: needs.sequences,
            may_be_fewer: needs.may_be_fewer,
            verified: needs.verified,
            image_tokens: needs.image_tokens,
            sharing: Some(needs.sharing),
            quantize: self.quantize,
            chat_template: self.chat_template.clone(),
        };
        let Made { plan: made, path } = plans::make(&plan.plan, &wanted, &mut |note| eprintln!("[{note}]"))?;
        (plan.plan, plan.made) = (path, Some(Box::new(made)));
        Ok(())
    }

    /// Device memory for all models together.
    pub fn device_bytes(&self) -> Option<u64> {
        plans::device_bytes(self.memory, self.vram)
    }

    /// Whether a projector was given, which is one model's.
    pub fn has_projector(&self) -> bool {
        self.mmproj.is_some()
    }

    /// What a model is compiled with is not for a plan, which was compiled with its own.
    fn refuse_for_plan(&self, plan: &Path, needs: &Needs<'_>) -> Result<()> {
        let ModelArgs { ctx, kv, mmproj, quantize, chat_template, .. } = self;
        let given = [
            ("--ctx", ctx.is_some()),
            ("--kv", kv.is_some()),
            ("--mmproj", mmproj.is_some()),
            ("--quantize", quantize.is_some()),
            ("--chat-template", chat_template.is_some()),
            ("--draft FILE", needs.drafter.is_some()),
        ];
        match given.iter().find(|(_, is_given)| *is_given) {
            Some((name, _)) => bail!("{name} is for a GGUF model; {} is a plan, compiled with its own", plan.display()),
            None => Ok(()),
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
        let root = plans::root()?;
        let of = |folder: &str, is_ours: fn(&str) -> bool| -> Vec<(PathBuf, u64)> {
            let named = |path: &Path| path.file_name().and_then(|name| name.to_str()).is_some_and(is_ours);
            plans::in_folder(&root.join(folder)).into_iter().filter(|(path, _)| named(path)).collect()
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
