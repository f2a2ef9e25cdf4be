//! The subcommands. Each file has its arguments (their comments are the help texts) and a `run`.

mod answer;
mod batch;
mod bench;
mod by_name;
mod cache;
mod cached;
mod compile;
mod completions;
mod demo;
mod diff;
mod doctor;
mod generation;
pub mod inputs;
mod inspect;
mod kernels;
mod load;
mod logits;
mod lora;
mod man;
mod media;
mod perplexity;
mod plan_file;
mod profile;
mod pull;
mod run;
mod serve;
mod speed;
mod synth;
mod synthetic_media;
mod tokenize;
mod verify;

use anyhow::Result;
use clap::Subcommand;

/// How a command ended that did not fail.
pub enum Outcome {
    Done,
    /// It ran, and what it checked was not as it should be.
    CheckFailed,
}

#[derive(Subcommand)]
pub enum Command {
    Pull(pull::Args),
    Compile(compile::Args),
    Run(run::Args),
    Serve(serve::Args),
    Load(load::Args),
    Logits(logits::Args),
    Tokenize(tokenize::Args),
    Inspect(inspect::Args),
    Diff(diff::Args),
    Verify(verify::Args),
    Perplexity(perplexity::Args),
    Bench(bench::Args),
    Profile(profile::Args),
    Kernels(kernels::Args),
    Synth(synth::Args),
    Demo(demo::Args),
    Doctor(doctor::Args),
    Cache(cache::Args),
    Completions(completions::Args),
    Man(man::Args),
}

pub fn run(command: Command) -> Result<Outcome> {
    match command {
        Command::Pull(args) => pull::run(&args),
        Command::Compile(args) => compile::run(&args),
        Command::Run(args) => run::run(args),
        Command::Serve(args) => serve::run(args),
        Command::Load(args) => load::run(&args),
        Command::Logits(args) => logits::run(&args),
        Command::Tokenize(args) => tokenize::run(&args),
        Command::Inspect(args) => inspect::run(args),
        Command::Diff(args) => diff::run(&args),
        Command::Verify(args) => verify::run(&args),
        Command::Perplexity(args) => perplexity::run(&args),
        Command::Bench(args) => bench::run(args),
        Command::Profile(args) => profile::run(&args),
        Command::Kernels(args) => kernels::run(&args),
        Command::Synth(args) => synth::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Cache(args) => cache::run(&args),
        Command::Completions(args) => completions::run(&args),
        Command::Man(args) => man::run(&args),
    }
}
