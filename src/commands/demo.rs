//! `gemma4c demo`: the whole way from a model to text, on whatever this machine has.
//!
//! The model is inside the program: a small Gemma 4 that was trained on Jane Austen's novels (`assets/README.md`), and
//! a drafter for it. Both are written to a folder, together with their plan and the plan's page, so that the other
//! commands can go on from there. Weights are mapped from those files, as those of any model are: nothing about this
//! one is special to the compiler or the runtime.

use std::fs;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use gemma4c_codegen::nvrtc::Toolchain;
use gemma4c_codegen::target::Target as Gpu;
use gemma4c_models::tokenizer::{EncodeOptions, Tokenizer};
use gemma4c_plan::{Plan, Sampling};
use gemma4c_runtime::{Counts, DraftSource, ModelLocation, Speculation, machine};

use super::Outcome;
use super::answer::Answer;
use super::generation::{Generation, SamplingArgs, Unseeded};
use super::plan_file;
use super::speed::Speed;
use crate::device::{Device, Place};
use crate::model::{DRAFTER, MODEL};
use crate::options::{self, Options};
use crate::output::{self, OutputFile, OutputFolder, print};
use crate::report::html;
use crate::{pipeline, progress};

/// Write a little English with the model embedded in this program, and show how it ran.
///
/// The model is small: a Gemma 4 of 11 million parameters that has read Jane Austen and nothing else. It is compiled
/// for this machine's GPU if there is one and NVRTC is found, else for the CPU. Then it runs twice, with drafts of a
/// smaller model and without, and both runs must give the same bits. The models, their plan and a page that draws the
/// plan are left in a folder for the other commands to go on with. The plan samples at temperature 0.7 of the 40
/// likeliest tokens, because so small a model writes better that way.
#[derive(clap::Args)]
pub struct Args {
    /// The text to continue.
    #[arg(short, long, value_name = "TEXT", default_value = PROMPT)]
    prompt: String,

    /// Tokens to generate at most; generation ends earlier at a stop token or a full context.
    #[arg(short, value_name = "N", default_value_t = 66)]
    n: u32,

    #[command(flatten)]
    sampling: SamplingArgs,

    /// What to compile for and run on.
    #[arg(long, value_enum, default_value = "auto")]
    device: Device,

    /// The folder for the model, its plan and the page. An existing folder is used again.
    #[arg(short, long, value_name = "DIR", default_value = "gemma4c-demo")]
    output: OutputFolder,
}

/// Tokens that are guessed in a round. As many as pay would depend on the machine, and so would the share of them that
/// is right.
const DRAFTS: u32 = 3;

const PROMPT: &str = "\"Tell me, Mr. Darcy,\" said Elizabeth,";

/// A model this small is sure of little: at the temperature of 1 that large ones are made for, it soon loses its
/// thread.
const SAMPLING: Sampling = Sampling { temperature: 0.7, top_k: 40, top_p: 0.95 };

pub fn run(args: &Args) -> Result<Outcome> {
    debug_assert_eq!((SAMPLING.temperature, SAMPLING.top_k), (0.7, 40), "the help text says so");
    ensure!(args.n > 0, "-n 0: the demo has nothing to show without a token");
    let files = Files::in_folder(&args.output)?;
    let choice = choose_device(args.device)?;
    write(&files.model, MODEL)?;
    write(&files.drafter, DRAFTER)?;

    let compiling = Instant::now();
    let plan = compile(&files, choice.gpu)?;
    let plan_bytes = plan_file::write(&plan, &files.plan)?;
    let compiling = compiling.elapsed();

    let vocab = plan.vocab.clone().context("the model inside this program has no vocabulary")?;
    let tokenizer = Tokenizer::new(&vocab)?;
    let location = ModelLocation { plan: files.plan.to_path_buf(), given: None };
    let place = Place { location, device: choice.device, ..Place::default() };
    let session = plan_file::open(&place, plan.clone())?;
    let sampler = args.sampling.sampler(plan.sampling, vocab.suppress.clone(), Unseeded::Zero)?;
    let mut generation = Generation::new(session, sampler, vocab.stop.clone(), args.n);
    generation.speculation = Some(Speculation::new(DraftSource::Drafter, Some(DRAFTS)));

    let prompt = tokenizer.encode(&args.prompt, EncodeOptions { add_bos: true, parse_special: false });
    let (tokens, context) = (prompt.len(), plan.program.context);
    ensure!(
        tokens <= context as usize,
        "-p: the text has {tokens} tokens, and the model {context} positions: give less"
    );
    print(&args.prompt)?;
    let Answer { tokens, speed: drafted, .. } = generation.stream(&prompt, &tokenizer)?;
    let first = Run { logits: last_logits(&mut generation, &prompt, &tokens)?, tokens };
    generation.session.reset();
    generation.speculation = None;
    let (second, speed) = run_again(&mut generation, &prompt)?;

    speed.report_full_context();
    write(&files.page, html::page(&plan, None).as_bytes())?;
    let device = generation.session.device_name();
    let report = Report {
        plan: &plan,
        plan_bytes,
        compiling,
        why: &choice.words,
        device: &device,
        speed: &speed,
        drafted: &drafted,
    };
    print(&format!("\n{report}"))?;
    let same = first == second;
    print(&format!("check    {}\n", agreement(&first, &second)))?;
    print(&format!("\n{}", next(&files)))?;
    Ok(if same { Outcome::Done } else { Outcome::CheckFailed })
}

/// What the demo leaves behind.
struct Files {
    folder: OutputFolder,
    model: OutputFile,
    drafter: OutputFile,
    plan: OutputFile,
    page: OutputFile,
}

impl Files {
    /// Makes the folder where it is not there.
    fn in_folder(folder: &OutputFolder) -> Result<Files> {
        let not_possible = || format!("cannot put the demo's files in {}", folder.display());
        folder.create().with_context(not_possible)?;
        let files = Files {
            folder: folder.clone(),
            model: folder.file("austen.gguf"),
            drafter: folder.file("austen_draft.gguf"),
            plan: folder.file("plan.bin"),
            page: folder.file("plan.html"),
        };
        for path in [&files.model, &files.drafter, &files.plan, &files.page] {
            output::may_be_written(path).with_context(not_possible)?;
        }
        Ok(files)
    }
}

/// Writes a file whole or not at all. One that has these bytes already is left alone: a plan may be using it.
fn write(path: &OutputFile, bytes: &[u8]) -> Result<()> {
    let is_there = fs::metadata(path).is_ok_and(|info| info.len() == bytes.len() as u64);
    if is_there && fs::read(path).is_ok_and(|found| found == bytes) {
        return Ok(());
    }
    output::write_whole(path, bytes)
}

fn compile(files: &Files, gpu: Option<Gpu>) -> Result<Plan> {
    let bar = gpu.as_ref().map(|_| progress::waiting("compiling kernels with NVRTC"));
    let drafter = Some(files.drafter.to_path_buf());
    let options = Options { gpus: gpu.into_iter().collect(), drafter, ..Options::default() };
    let models = pipeline::Files::open(&files.model, &options)?;
    let plan = pipeline::compile(&models, &files.folder, &options);
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    Ok(Plan { sampling: SAMPLING, ..plan? })
}

/// What is compiled for, what runs it, and why that.
struct Choice {
    /// `None`: for the CPU alone.
    gpu: Option<Gpu>,
    device: Device,
    words: String,
}

fn choose_device(wanted: Device) -> Result<Choice> {
    let on_cpu = |words: String| Choice { gpu: None, device: Device::Cpu, words };
    match wanted {
        Device::Cpu => Ok(on_cpu("as asked for".into())),
        Device::Sim => {
            Ok(Choice { gpu: Some(options::measured_gpu()), device: Device::Sim, words: "sm_90a, as asked for".into() })
        }
        Device::Cuda => find_gpu().map_err(|why| anyhow!("--device cuda: {why}")),
        Device::Auto => Ok(find_gpu().unwrap_or_else(|why| on_cpu(format!("because {why}")))),
    }
}

/// This machine's GPU, or why nothing can be compiled for one.
fn find_gpu() -> Result<Choice, String> {
    let gpu = machine::gpus().map_err(|why| why.to_string())?.into_iter().next();
    let gpu = gpu.ok_or("the driver sees no GPU")?;
    let target = options::target_of(&gpu).map_err(|why| why.to_string())?;
    let toolchain = Toolchain::find().map_err(|why| {
        let why = why.to_string();
        let first = why.lines().next().unwrap_or_default().trim_end_matches('.');
        format!("nothing can be compiled for {}: {first} (`gemma4c doctor` says more)", gpu.name)
    })?;
    let words = format!("{} by NVRTC {}", target.arch.name(), toolchain.version());
    Ok(Choice { gpu: Some(target), device: Device::Cuda, words })
}

/// What two runs are compared by.
#[derive(PartialEq)]
struct Run {
    tokens: Vec<u32>,
    /// Bits of the logits at the last position.
    logits: Vec<u32>,
}

fn run_again(generation: &mut Generation, prompt: &[u32]) -> Result<(Run, Speed)> {
    let mut tokens = Vec::new();
    let (speed, _) = generation.answer(prompt, &mut |id| {
        tokens.push(id);
        Ok(ControlFlow::Continue(()))
    })?;
    let logits = last_logits(generation, prompt, &tokens)?;
    Ok((Run { tokens, logits }, speed))
}

/// Decodes the token before the sequence's last once more, because generation keeps no logits, and returns the bits of
/// what comes out.
fn last_logits(generation: &mut Generation, prompt: &[u32], generated: &[u32]) -> Result<Vec<u32>> {
    let session = &mut generation.session;
    let last = (prompt.len() + generated.len()).saturating_sub(2);
    let token = prompt.iter().chain(generated).nth(last).context("a prompt has at least one token")?;
    session.truncate(last as u32)?;
    let mut bits = Vec::new();
    session.decode(*token, |row| bits = row.iter().map(|logit| logit.to_bits()).collect())?;
    Ok(bits)
}

fn agreement(first: &Run, second: &Run) -> String {
    let (tokens, logits) = (first.tokens.len(), first.logits.len());
    match (first.tokens == second.tokens, first.logits == second.logits) {
        (true, true) => format!(
            "a run without drafts gave the same {tokens} tokens, and the same bits in all {logits} logits of the last position"
        ),
        (true, false) => {
            format!("a run without drafts gave the same {tokens} tokens, but OTHER logits at the last position")
        }
        (false, _) => "a run without drafts gave OTHER tokens".into(),
    }
}

/// What was run, and how fast.
struct Report<'a> {
    plan: &'a Plan,
    plan_bytes: u64,
    compiling: Duration,
    why: &'a str,
    device: &'a str,
    speed: &'a Speed,
    /// With drafts. How fast is not said: what they save is passes, and on a CPU a row more takes as long as a pass.
    drafted: &'a Speed,
}

impl std::fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let plan = self.plan;
        let size = output::bytes(MODEL.len() as u64);
        let millions = millions_of_parameters(plan, 0);
        writeln!(f, "model    a Gemma 4 of {millions:.1} million parameters, trained on Jane Austen; {size} in Q4_0")?;
        let name = if self.device == "cpu" { "the CPU" } else { self.device };
        writeln!(f, "device   {name}, {}", self.why)?;
        let what = match plan.cuda.as_ref().map(|cuda| &cuda.program) {
            Some(program) => {
                let launches = program.phases.first().map_or(0, |phase| phase.steps.len());
                format!("{launches} launches a token, {} kernels", program.kernels.len())
            }
            None => format!("{} steps", plan.program.steps.len()),
        };
        let (layers, size) = (plan.model.layers, output::bytes(self.plan_bytes));
        writeln!(f, "plan     {layers} layers, {what}, {size}; compiled in {:.3} s", self.compiling.as_secs_f64())?;
        writeln!(
            f,
            "speed    prefill {:.0} tokens/s ({} tokens), decode {:.0} tokens/s ({} tokens)",
            self.speed.prefill_rate(),
            self.speed.prompt,
            self.speed.decode_rate(),
            self.speed.written
        )?;
        let (Some(Counts { rounds, drafted, accepted, .. }), written) = (self.drafted.drafts, self.drafted.written)
        else {
            return Ok(());
        };
        let share = 100.0 * accepted as f64 / (drafted as f64).max(1.0);
        let millions = millions_of_parameters(plan, 1);
        writeln!(
            f,
            "drafts   {accepted} of {drafted} were right ({share:.0} %): {written} tokens in {} passes; a drafter of {millions:.1} million parameters",
            rounds + 1
        )
    }
}

/// Of the weights in one of the plan's files: the model's is the first, the drafter's the second.
fn millions_of_parameters(plan: &Plan, file: u32) -> f64 {
    let weights = plan.weights.iter().filter(|weight| weight.file == file);
    weights.map(|weight| weight.dims.iter().product::<u64>()).sum::<u64>() as f64 / 1e6
}

/// Where to look next.
fn next(files: &Files) -> String {
    let (folder, plan, page) = (files.folder.display(), files.plan.display(), files.page.display());
    let rows = [
        (page.to_string(), "the plan as a page: open it in a browser"),
        (format!("gemma4c inspect {plan}"), "the plan as text"),
        (format!("gemma4c run {plan} -p \"She was\""), "more text from this plan"),
        ("gemma4c demo -p \"Your own words\"".to_owned(), "words of yours, continued"),
        ("gemma4c compile MODEL.gguf -o plan.bin".to_owned(), "a Gemma 4 model of yours"),
    ];
    let width = rows.iter().map(|(command, _)| command.chars().count()).max().unwrap_or(0);
    let mut out = format!("The model, its drafter, their plan and the plan's page are in {folder}. Next:\n");
    for (command, what) in rows {
        out += &format!("  {command:<width$}  {what}\n");
    }
    out
}
