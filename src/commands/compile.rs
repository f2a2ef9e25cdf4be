//! `gemma4c compile`: a model file to a plan.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Result, ensure};
use gemma4c_models::gguf::Gguf;

use super::{Outcome, plan_file};
use crate::compile::{self, DEFAULT_CHUNK, DEFAULT_CONTEXT};
use crate::output;

/// Compile a GGUF model to a plan.
///
/// The plan holds everything but the weights, which stay in the model file. Split models are given by any of their parts.
#[derive(clap::Args)]
pub struct Args {
    /// The model: a GGUF file of a Gemma 4 text model.
    #[arg(value_name = "MODEL.gguf")]
    model: PathBuf,

    /// Where to write the plan.
    #[arg(short, long, value_name = "PLAN.bin")]
    output: PathBuf,

    /// What the plan will run on.
    #[arg(long, value_enum, default_value = "cpu")]
    target: Target,

    /// Positions a sequence may have [default: 8192, or what the model was trained for if that is less]
    #[arg(long, value_name = "N")]
    ctx: Option<u32>,

    /// Prompt tokens taken in one pass: more is faster and needs more memory.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_CHUNK)]
    chunk: u32,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Target {
    /// Any machine: f32 arithmetic on all cores.
    Cpu,
}

pub fn run(args: &Args) -> Result<Outcome> {
    debug_assert_eq!(DEFAULT_CONTEXT, 8192, "the help text of --ctx says so");
    let started = Instant::now();
    let Target::Cpu = args.target;
    output::may_be_written(&args.output)?;
    ensure!(!plan_file::is_plan(&args.model)?, "{} is a plan already: give the GGUF model", args.model.display());
    let file = Gguf::open(&args.model)?;
    let options = compile::Options { context: args.ctx, chunk: args.chunk };
    let plan = compile::compile(&file, output::folder(&args.output), options)?;
    let bytes = plan_file::write(&plan, &args.output)?;
    eprintln!(
        "{}: {} steps, context {}, {} in {:.2} s",
        args.output.display(),
        plan.program.steps.len(),
        plan.program.context,
        output::bytes(bytes),
        started.elapsed().as_secs_f64()
    );
    Ok(Outcome::Done)
}
