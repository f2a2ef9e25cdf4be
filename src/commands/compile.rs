//! `gemma4c compile`: a model file to a plan.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Instant;

use anyhow::{Result, anyhow, ensure};
use gemma4c_blocks::DType;
use gemma4c_codegen::arch::Arch;
use gemma4c_codegen::target::Target as Gpu;
use gemma4c_models::gemma4::QUANTISED;
use gemma4c_models::media::USUAL_BUDGET;
use gemma4c_plan::Tower;
use gemma4c_plan::cuda::{Cuda, KvType};
use gemma4c_runtime::MOST_LOOKED_UP;

use super::by_name::ByNameArgs;
use super::lora::SeatArgs;
use super::{Outcome, media, plan_file};
use crate::by_name::Beside;
use crate::device::Device;
use crate::error::Error;
use crate::options::{self, AdapterAt, DEFAULT_CONTEXT, Options};
use crate::output::{self, OutputFile};
use crate::pipeline::{self, Files};
use crate::{adapters, embed, files, progress};

/// Compile a model to a plan.
///
/// The plan holds everything but the weights, which stay in the model's files unless --embed-weights is given. Of a GGUF
/// model in several files give any, of a checkpoint of safetensors the folder. A model that is named is fetched (`gemma4c
/// pull`).
#[derive(clap::Args)]
pub struct Args {
    /// The model: a GGUF file of a Gemma 4 text model, the folder of a checkpoint, or a name such as
    /// ggml-org/gemma-4-E4B-it-GGUF.
    #[arg(value_name = "MODEL.gguf|NAME")]
    model: PathBuf,

    /// Where to write the plan.
    #[arg(short, long, value_name = "PLAN.bin")]
    output: OutputFile,

    /// The model's projector file (mmproj), which lets it read pictures and sound.
    #[arg(long, value_name = "MMPROJ.gguf")]
    mmproj: Option<PathBuf>,

    /// With a projector: soft tokens of a picture that the plan has room for: 70, 140, 280, 560 or 1120 [default: 280]
    #[arg(long, value_name = "N", value_parser = media::budget)]
    image_tokens: Option<u32>,

    /// The model's drafter (a GGUF file of its assistant), which guesses tokens that the model then verifies.
    #[arg(long, value_name = "ASSISTANT.gguf")]
    draft: Option<PathBuf>,

    /// An adapter (LoRA) that is always on: a GGUF file or a folder of PEFT, and if wanted how strong it is to be, such
    /// as 0.5. It is applied whole or refused. May be repeated.
    #[arg(long, value_name = "FILE[:SCALE]")]
    lora: Vec<AdapterAt>,

    #[command(flatten)]
    seats: SeatArgs,

    /// Merge the adapter into the weights while they are loaded, so that it costs no time: matrices in blocks are
    /// quantised again, to q4_0 where they are that, else to q8_0.
    #[arg(long, requires = "lora")]
    lora_merge: bool,

    /// Quantise the matrices of a model in floats while they are loaded: to the bytes that llama.cpp's quantiser makes
    /// of them. Tables and the LM head get 8 bits with either.
    #[arg(long, value_name = "TYPE", value_parser = quantised)]
    quantize: Option<DType>,

    /// A chat template (Jinja) in place of the model's.
    #[arg(long, value_name = "FILE")]
    chat_template: Option<PathBuf>,

    #[command(flatten)]
    by_name: ByNameArgs,

    /// What the plan will run on.
    #[arg(long, value_enum, default_value = "auto")]
    target: Target,

    /// GPUs to compile for, such as h200,rtx-4090: the plan has a program for each [default: this machine's GPU, or
    /// h200]
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = Gpu::find, conflicts_with = "arch")]
    gpu: Vec<&'static Gpu>,

    /// The same by architecture: for the GPU that stands for each. compute_80 is PTX, for GPUs that nobody compiled
    /// for.
    #[arg(long, value_name = "SM", value_delimiter = ',', value_parser = Arch::from_str)]
    arch: Vec<Arch>,

    /// Shape launches for that many SMs, where a GPU has fewer than its name says or is restricted to some of them.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    sms: Option<u32>,

    /// Positions a sequence may have, such as 32k [default: 8192, or what the model was trained for if that is less]
    #[arg(long, value_name = "N", value_parser = plan_file::positions)]
    ctx: Option<u32>,

    /// Prompt tokens computed in one pass: more is faster and needs more memory [default: 256 on a CPU, 2048 on a GPU]
    #[arg(long, value_name = "N")]
    chunk: Option<u32>,

    /// Type of keys and values. q8_0 and fp8 take half the memory of f16; fp8 needs a GPU of sm_89 or later. A CPU
    /// keeps f32, rounded to q8_0 or fp8 where that is asked for.
    #[arg(long, value_enum, default_value = "f16")]
    kv: Kv,

    /// Sequences that a GPU plan may run at once: all share pages for as many whole contexts, or what --vram leaves
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u32).range(1..=1024))]
    sequences: u32,

    /// Drafts of a sequence that a GPU plan can verify at once: what `run --draft ngram` needs there, up to 15
    /// [default: 7 with --draft, else none]. A drafter makes 7 at most. A CPU plan verifies as many as --chunk allows.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=i64::from(MOST_LOOKED_UP)))]
    drafts: Option<u32>,

    /// Prompts' prefixes that a GPU plan has pages for besides [default: half as many, at least 1 and at most 16]
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(0..=4096))]
    snapshots: Option<u32>,

    /// Device memory the plan may take, such as 24GiB [default: as much as it needs]
    #[arg(long, value_name = "SIZE", value_parser = plan_file::size)]
    vram: Option<u64>,

    /// Keep a bf16 copy of the weights beside them, as far as --vram allows: on Hopper long prompts are read 4 to 25 %
    /// faster and those of a hundred tokens up to 80 %, and the copy takes two to four times the weights' memory.
    /// Answers are the same.
    #[arg(long)]
    bf16_copies: bool,

    /// Skip a compiler pass, by name; `gemma4c inspect` lists them. May be repeated.
    #[arg(long = "disable-pass", value_name = "NAME")]
    disable_pass: Vec<String>,

    /// Run a compiler pass that is off unless it is asked for: `bf16-copies` (the same as --bf16-copies), `gemm` (on
    /// for 64 sequences or more on Hopper). May be repeated.
    #[arg(long = "enable-pass", value_name = "NAME")]
    enable_pass: Vec<String>,

    /// Store the weights in the plan, which then runs without the model file. A GPU plan has them in the GPU's memory
    /// layout, a CPU plan as they are in the model file.
    #[arg(long)]
    embed_weights: bool,
}

#[derive(Clone, Copy, clap::ValueEnum)]
pub enum Kv {
    F16,
    Bf16,
    F32,
    #[value(name = "q8_0")]
    Q8_0,
    Fp8,
}

impl Kv {
    pub fn kv_type(self) -> KvType {
        match self {
            Kv::F16 => KvType::F16,
            Kv::Bf16 => KvType::BF16,
            Kv::F32 => KvType::F32,
            Kv::Q8_0 => KvType::Q8_0,
            Kv::Fp8 => KvType::Fp8,
        }
    }
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Target {
    /// This machine's NVIDIA GPU if it has one, else the CPU.
    Auto,
    /// NVIDIA GPUs. None is needed to compile.
    Cuda,
    /// Any machine: f32 arithmetic on all cores.
    Cpu,
}

pub fn run(args: &Args) -> Result<Outcome> {
    debug_assert_eq!(DEFAULT_CONTEXT, 8192, "the help text of --ctx says so");
    let started = Instant::now();
    let device = if matches!(args.target, Target::Cpu) { Device::Cpu } else { Device::Auto };
    let beside = Beside { projector: args.mmproj.is_none(), drafter: args.draft.is_none() };
    let brought = args.by_name.bring(&args.model, device, beside)?;
    let model = brought.as_ref().map_or(&args.model, |brought| &brought.model).clone();
    ensure!(!files::is_plan(&model)?, "{} is a plan already: give the model", model.display());
    let (of_name, of_drafter) = brought.map_or((None, None), |brought| (brought.projector, brought.drafter));
    let (projector, drafter) = (args.mmproj.clone().or(of_name), args.draft.clone().or(of_drafter));
    ensure!(projector.is_some() || args.image_tokens.is_none(), "--image-tokens is about pictures: it needs --mmproj");
    let names_gpus = !args.arch.is_empty() || !args.gpu.is_empty() || args.sms.is_some();
    let here = options::gpu_here();
    let for_gpu = match args.target {
        Target::Auto => names_gpus || !matches!(here, Ok(None)),
        Target::Cuda => true,
        Target::Cpu => false,
    };
    ensure!(for_gpu || args.sequences == 1, "--sequences is about GPUs, but the target is the CPU");
    ensure!(for_gpu || !names_gpus, "--gpu, --arch and --sms are about GPUs, but the target is the CPU");
    let mut enabled = args.enable_pass.clone();
    enabled.extend(args.bf16_copies.then(|| "bf16-copies".to_owned()));
    let options = Options {
        context: args.ctx,
        chunk: args.chunk,
        kv: args.kv.kv_type(),
        gpus: if for_gpu { gpus(args, here)? } else { Vec::new() },
        sequences: args.sequences,
        drafts: args.drafts,
        snapshots: args.snapshots,
        vram: args.vram,
        disabled: args.disable_pass.clone(),
        enabled,
        projector,
        image_tokens: args.image_tokens.unwrap_or(USUAL_BUDGET),
        drafter,
        adapters: args.lora.clone(),
        merges_adapter: args.lora_merge,
        seats: args.seats.seats(),
        quantize: args.quantize,
        chat_template: args.chat_template.as_deref().map(files::read_template).transpose()?,
    };
    if for_gpu {
        options.passes_off([])?;
    }
    let files = Files::open(&model, &options)?;
    files.notes(&options).iter().for_each(|note| eprintln!("[{note}]"));
    let mut plan = pipeline::compile(&files, files::folder(&args.output), &options)?;
    adapters::applied(&files.adapters, files.merged.as_ref()).iter().for_each(|note| eprintln!("{note}"));
    let distance = files.merged.as_ref().and_then(|of| adapters::commands_of_distance(of, &model, &args.output));
    if let Some(commands) = distance {
        eprintln!("how far apart they are, as a KL divergence over a text of yours:");
        commands.iter().for_each(|command| eprintln!("  {command}"));
    }
    let bytes = if args.embed_weights {
        output::refuse_pipe(&args.output)?;
        output::may_be_written(&args.output)?;
        let bar = progress::bytes("packing weights", 0);
        let written = embed::write(&mut plan, &files.with_weights(), &args.output, &mut |done, total| {
            bar.set_length(total);
            bar.set_position(done);
        });
        bar.finish_and_clear();
        written?
    } else {
        plan_file::write(&plan, &args.output)?
    };
    let what = match &plan.cuda {
        Some(_) => {
            let of = |cuda: &Cuda| {
                let launches = cuda.program.phases.first().map_or(0, |phase| phase.steps.len());
                format!("{}: {launches} launches a token", cuda.program.gpu)
            };
            plan.programs().map(of).collect::<Vec<_>>().join("; ")
        }
        None => {
            let tower = |tower: &Tower| format!(", {} of its {} tower", tower.program.steps.len(), tower.name);
            let towers: String = plan.towers.iter().map(tower).collect();
            let drafter = plan.drafter.as_ref();
            let drafter = drafter.map_or(String::new(), |d| format!(", {} of its drafter", d.program.steps.len()));
            format!("cpu: {} steps{towers}{drafter}", plan.program.steps.len())
        }
    };
    eprintln!(
        "{}: {what}, context {}, {} in {:.2} s",
        args.output.display(),
        plan.program.context,
        output::bytes(bytes),
        started.elapsed().as_secs_f64()
    );
    Ok(Outcome::Done)
}

/// A type that floats are quantised to.
pub fn quantised(name: &str) -> Result<DType> {
    let found = QUANTISED.into_iter().find(|dtype| dtype.name() == name);
    found.ok_or_else(|| anyhow!("expected one of {}", QUANTISED.map(DType::name).join(", ")))
}

/// The GPUs to compile for: those that were named, else this machine's, else the one that everything is measured on.
fn gpus(args: &Args, here: Result<Option<Gpu>, Error>) -> Result<Vec<Gpu>> {
    let named = args.gpu.iter().map(|gpu| (*gpu).clone());
    let mut targets: Vec<Gpu> = named.chain(args.arch.iter().map(|arch| Gpu::of_arch(*arch))).collect();
    if targets.is_empty() {
        targets.push(here?.unwrap_or_else(options::measured_gpu));
    }
    if let Some(sms) = args.sms {
        ensure!(targets.len() == 1, "--sms shapes one program, but {} GPUs are named", targets.len());
        targets = targets.into_iter().map(|target| target.with_multiprocessors(sms)).collect();
    }
    for (at, target) in targets.iter().enumerate() {
        ensure!(!targets[..at].contains(target), "{} is named twice", target.key);
    }
    Ok(targets)
}
