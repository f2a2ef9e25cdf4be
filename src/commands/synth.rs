//! `gemma4c synth`: a random model of a real size.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Result, anyhow, ensure};
use gemma4c_blocks::DType;
use gemma4c_models::synth::{self, Form, Preset};

use super::Outcome;
use crate::output::{self, OutputFile};
use crate::progress;

/// Write a random model of a real size, or a tiny one, to try things on.
///
/// It has the tensors, types and metadata of a released file of that size; its weights are seeded random numbers, so
/// what it says is nonsense.
#[derive(clap::Args)]
pub struct Args {
    /// e2b, e4b, 12b, 26b-a4b, 31b, or tiny-e, tiny-dense, tiny-moe.
    #[arg(value_parser = preset)]
    preset: Preset,

    /// The type of its matrices in a GGUF file: f32 f16 bf16 q4_0 q4_1 q5_0 q5_1 q8_0 q4_k q5_k q6_k iq4_nl iq4_xs.
    #[arg(short, long, value_name = "TYPE", default_value = "q8_0", value_parser = quant)]
    quant: Quant,

    /// Where to write it.
    #[arg(short, long, value_name = "MODEL.gguf")]
    output: OutputFile,

    /// The same seed gives the same bytes.
    #[arg(long, default_value_t = 0)]
    seed: u64,

    /// Fewer layers than the real one.
    #[arg(long, value_name = "N")]
    layers: Option<u32>,

    /// Make a few channels of the residual this many times as large as the others, as in trained models.
    #[arg(long, value_name = "TIMES", num_args = 0..=1, require_equals = true, default_missing_value = "5000")]
    massive: Option<f32>,

    /// Write the projector file (mmproj) that goes with such a model instead: its towers, of real files in bf16.
    #[arg(long, conflicts_with_all = ["layers", "massive", "vocab"])]
    mmproj: bool,

    /// Write the model's drafter instead, which `compile --draft` takes beside the model.
    #[arg(long, conflicts_with_all = ["massive", "layers", "mmproj"])]
    draft: bool,

    /// Take the vocabulary from this GGUF file instead of a small generated one.
    #[arg(long, value_name = "FILE.gguf")]
    vocab: Option<PathBuf>,
}

fn preset(name: &str) -> Result<Preset> {
    Preset::from_name(name).ok_or_else(|| anyhow!("expected one of {}", Preset::ALL.map(Preset::name).join(", ")))
}

/// What a model is written as: a GGUF file of that type, or a checkpoint in that form.
#[derive(Clone, Copy)]
enum Quant {
    File(DType),
    Checkpoint(Form),
}

fn quant(name: &str) -> Result<Quant> {
    let in_files = DType::of_files().map(DType::name).collect::<Vec<_>>();
    let found = DType::from_name(name).filter(|_| in_files.contains(&name)).map(Quant::File);
    let found = found.or_else(|| Form::from_name(name).map(Quant::Checkpoint));
    let known = || [in_files, Form::ALL.map(Form::name).to_vec()].concat().join(", ");
    found.ok_or_else(|| anyhow!("expected one of {}", known()))
}

/// Writes a checkpoint's folder.
fn checkpoint(args: &Args, form: Form) -> Result<Outcome> {
    let is_plain = !args.mmproj && !args.draft && args.massive.is_none() && args.vocab.is_none();
    ensure!(is_plain, "-q {}: a checkpoint is written without --mmproj, --draft, --massive and --vocab", form.name());
    let started = Instant::now();
    let bar = progress::bytes("writing", 0);
    let progress = |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    };
    let (tensors, bytes) = synth::write_checkpoint(args.preset, form, args.layers, args.seed, &args.output, &progress)?;
    bar.finish_and_clear();
    tell(args, tensors, bytes, started);
    Ok(Outcome::Done)
}

fn tell(args: &Args, tensors: usize, bytes: u64, started: Instant) {
    let seconds = started.elapsed().as_secs_f64();
    eprintln!(
        "{}: {tensors} tensors, {} in {seconds:.2} s ({}/s)",
        args.output.display(),
        output::bytes(bytes),
        output::bytes((bytes as f64 / seconds) as u64)
    );
}

pub fn run(args: &Args) -> Result<Outcome> {
    ensure!(
        !args.output.is_stdout(),
        "-: a model is written in several places, so it cannot go to a pipe: give a file"
    );
    let dtype = match args.quant {
        Quant::File(dtype) => dtype,
        Quant::Checkpoint(form) => return checkpoint(args, form),
    };
    let started = Instant::now();
    let options = synth::Options {
        preset: args.preset,
        dtype,
        seed: args.seed,
        layers: args.layers,
        vocab: args.vocab.clone(),
        massive: args.massive,
        drafter: args.draft,
    };
    let bar = progress::bytes("writing", 0);
    let progress = |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    };
    let summary = match args.mmproj {
        true => synth::write_projector(&options, &args.output, &progress)?,
        false => synth::write(&options, &args.output, &progress)?,
    };
    bar.finish_and_clear();
    tell(args, summary.tensors, summary.file_bytes, started);
    Ok(Outcome::Done)
}
