//! `gemma4c demo`: the whole way on a tiny random model, on whatever this machine has.

use std::time::Instant;

use anyhow::{Context, Result};
use gemma4c_blocks::DType;
use gemma4c_codegen::arch::Arch;
use gemma4c_codegen::nvrtc::Toolchain;
use gemma4c_models::gguf::Gguf;
use gemma4c_models::synth::{self, Preset};
use gemma4c_models::tokenizer::{EncodeOptions, Tokenizer};
use gemma4c_plan::cuda::KvType;
use gemma4c_runtime::{ModelLocation, Request, RuntimeError, Sampler, Session, machine};

use super::{Outcome, plan_file};
use crate::compile::{self, CudaOptions};
use crate::output::{self, print};

/// Make a tiny random model, compile it, run it and report.
///
/// On this machine's GPU, where there is one and NVRTC to compile for it; else on the CPU, and it says why.
#[derive(clap::Args)]
pub struct Args {}

const PROMPT: &str = "The sky above the port was";
const TOKENS: usize = 32;

pub fn run(_: &Args) -> Result<Outcome> {
    let folder = tempfile::tempdir().context("cannot make a temporary folder")?;
    let (model, plan_path) = (folder.path().join("tiny-e.gguf"), folder.path().join("plan.bin"));

    let started = Instant::now();
    let options = synth::Options { seed: 4, ..synth::Options::new(Preset::TinyE, DType::Q8_0) };
    let summary = synth::write(&options, &model, &|_, _| {})?;
    let size = output::bytes(summary.file_bytes);
    print(&format!("synth    tiny-e q8_0: {} tensors, {size} in {} ms\n", summary.tensors, ms(started)))?;

    let (cuda, device) = choose_device();
    print(&format!("device   {device}\n"))?;

    let started = Instant::now();
    let device = if cuda.is_some() { plan_file::Device::Cuda } else { plan_file::Device::Cpu };
    let options = compile::Options { context: Some(512), cuda, ..compile::Options::default() };
    let plan = compile::compile(&Gguf::open(&model)?, folder.path(), &options)?;
    let bytes = plan_file::write(&plan, &plan_path)?;
    let (layers, size) = (plan.model.layers, output::bytes(bytes));
    let what = match plan.cuda.as_ref().map(|cuda| &cuda.program) {
        Some(program) => {
            let launches = program.phases.first().map_or(0, |phase| phase.steps.len());
            format!("{launches} launches a token for {}", program.architectures.join(", "))
        }
        None => format!("{} steps for the cpu", plan.program.steps.len()),
    };
    print(&format!("compile  {layers} layers, {what}, {size} in {} ms\n", ms(started)))?;

    let started = Instant::now();
    let plan = plan_file::read(&plan_path)?;
    let location = ModelLocation { plan: plan_path, given: None };
    let vocab = plan.vocab.clone().context("the synthetic model has a vocabulary")?;
    let tokenizer = Tokenizer::new(&vocab)?;
    let mut session = plan_file::open(plan, &location, device)?;
    let name = session.device_name();
    print(&format!("load     plan, vocabulary and weights in {} ms, on {name}\n", ms(started)))?;

    let mut first = generate(&mut session, &tokenizer)?;
    let (text, seconds) = (std::mem::take(&mut first.text), first.seconds);
    session.reset();
    let again = generate(&mut session, &tokenizer)?;
    let same = again.text == text && again.ids == first.ids;
    print(&format!("run      {:?} + {TOKENS} tokens, {:.0} tokens/s\n", PROMPT, TOKENS as f64 / seconds))?;
    print(&format!("         {text:?}\n"))?;
    print(&format!("check    a second run gave {}\n", if same { "the same tokens" } else { "OTHER tokens" }))?;
    print("\nThe weights are random, so the text is noise. Next: gemma4c compile MODEL.gguf -o plan.bin\n")?;
    Ok(if same { Outcome::Done } else { Outcome::CheckFailed })
}

/// What to compile for besides the CPU, and in words where it will run, or why not on a GPU.
fn choose_device() -> (Option<CudaOptions>, String) {
    let on_cpu = |why: String| (None, format!("the CPU, because {why}"));
    let gpu = match machine::gpus() {
        Ok(gpus) => gpus.into_iter().next(),
        Err(why) => return on_cpu(why.to_string()),
    };
    let Some(gpu) = gpu else { return on_cpu("the driver sees no GPU".into()) };
    let Some(arch) = Arch::for_capability(gpu.compute_capability) else {
        return on_cpu(format!("{} is older than any architecture kernels are made for", gpu.name));
    };
    match Toolchain::find() {
        Ok(toolchain) => {
            let said = format!("{}, {} by NVRTC {}", gpu.name, arch.name(), toolchain.version());
            let options = CudaOptions { architectures: vec![arch], kv: KvType::F16, vram: None, disabled: Vec::new() };
            (Some(options), said)
        }
        Err(why) => {
            let why = why.to_string();
            let first = why.lines().next().unwrap_or_default().trim_end_matches('.');
            on_cpu(format!("nothing can be compiled for {}: {first} (`gemma4c doctor` says more)", gpu.name))
        }
    }
}

struct Generated {
    ids: Vec<u32>,
    text: String,
    seconds: f64,
}

fn generate(session: &mut Session, tokenizer: &Tokenizer) -> Result<Generated> {
    let mut sampler = Sampler::new(session.plan().sampling, 4, Vec::new())?;
    let prompt = tokenizer.encode(PROMPT, EncodeOptions { add_bos: true, parse_special: false });
    let request = Request { prompt: &prompt, most: TOKENS as u32, stop: &[] };
    let mut ids = Vec::new();
    let started = Instant::now();
    session.generate(request, &mut sampler, &mut |token| {
        ids.push(token);
        Ok::<(), RuntimeError>(())
    })?;
    let seconds = started.elapsed().as_secs_f64();
    Ok(Generated { text: tokenizer.decode(&ids, true)?, ids, seconds })
}

fn ms(since: Instant) -> u128 {
    since.elapsed().as_millis()
}
