//! Compiles Gemma 4 models ahead of time and runs them, on NVIDIA GPUs and on CPUs: the same answer every time, memory
//! known beforehand.
//!
//! ```
//! use gemma4c::{Model, Sampling};
//!
//! # fn main() -> Result<(), gemma4c::Error> {
//! # let folder = tempfile::tempdir().unwrap();
//! # let gguf = gemma4c::demo_model(folder.path())?;
//! let mut model = Model::compile(gguf).context(1024).open()?;
//! for piece in model.stream("She was", &Sampling::default().max_tokens(16))? {
//!     print!("{}", piece?);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! A [`Model`] is compiled from a GGUF file ([`Model::compile`], a [`Compiler`]) or opened from a plan that was written
//! before ([`Model::open`], on a [`Device`]). It answers one [`Prompt`] ([`Model::generate`], [`Model::stream`]) or
//! many together ([`Model::generate_many`]) under the same [`Sampling`], and computes tokens ([`Model::tokenize`]) and
//! [logits](Model::logits). Everything that can fail returns an [`Error`].
//!
//! The program `gemma4c` is in this library too, with one file a subcommand in `commands/`. Its modules are public for
//! the project's own tests, hidden from these pages, and kept stable for nobody.

mod adapters;
mod by_name;
mod device;
mod error;
mod fit;
#[doc(hidden)]
pub mod installation;
mod model;
mod progress;
mod random;
mod reader;
mod report;
mod scoring;

#[doc(hidden)]
pub mod commands;
#[doc(hidden)]
pub mod embed;
mod files;
#[doc(hidden)]
pub mod launched;
#[doc(hidden)]
pub mod options;
#[doc(hidden)]
pub mod output;
#[doc(hidden)]
pub mod pipeline;
mod plans;
#[doc(hidden)]
pub mod simulate;

pub use device::Device;
pub use error::Error;
pub use gemma4c_plan::cuda::KvType;
pub use gemma4c_runtime::engine::Finish;
pub use model::{
    Call, Compiler, Completion, Conversation, HiddenStates, Interrupt, Message, Model, Opener, Perplexity, Prompt,
    Sampling, Stream, demo_drafter, demo_model,
};

use std::env;
use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::Result;
use clap::error::ContextKind;
use clap::{CommandFactory, FromArgMatches, Parser};

use commands::{Command, Outcome, inputs};

/// Compiles Gemma 4 models ahead of time and runs them: the same answer every time, memory known beforehand.
///
/// A first look, on whatever this machine has:  gemma4c demo
#[derive(Parser)]
#[command(name = "gemma4c", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// Runs the command that the arguments of this process name.
#[doc(hidden)]
pub fn main() -> ExitCode {
    ExitCode::from(main_of(env::args_os()))
}

/// Runs the command that these arguments name, the program's own name first, and returns the code to exit with. Help,
/// the version and arguments that are refused end the process.
#[doc(hidden)]
pub fn main_of(arguments: impl Iterator<Item = OsString>) -> u8 {
    match run(arguments) {
        Ok(Outcome::Done) => 0,
        Ok(Outcome::CheckFailed) => 1,
        // The reader of our output has closed the pipe.
        Err(error) if output::is_broken_pipe(&error) => 0,
        Err(error) => {
            eprintln!("error: {}", output::message(&error));
            2
        }
    }
}

/// An error and its causes in one line, as the program prints it.
#[doc(hidden)]
pub fn message(error: Error) -> String {
    output::message(&error.into())
}

/// The command line as clap describes it, for tests and for whatever is derived from it.
#[doc(hidden)]
pub fn command_line() -> clap::Command {
    Cli::command()
}

fn run(arguments: impl Iterator<Item = OsString>) -> Result<Outcome> {
    let mut described = command_line();
    let parsed = described.try_get_matches_from_mut(arguments).and_then(|matches| {
        let cli = Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut described))?;
        Ok((cli, matches))
    });
    let (cli, matches) = match parsed {
        Ok(parsed) => parsed,
        Err(error) => without_tips(error).exit(),
    };
    inputs::protect(&described, &matches)?;
    commands::run(cli.command)
}

/// clap guesses what was meant by how words are spelled (`--stop` for `--top-p`), or proposes to pass an option as a
/// value. Wrong advice is worse than none: the usage line and `--help` remain.
fn without_tips(mut error: clap::Error) -> clap::Error {
    use ContextKind::{Suggested, SuggestedArg, SuggestedSubcommand, SuggestedValue, TrailingArg};
    for kind in [Suggested, SuggestedArg, SuggestedSubcommand, SuggestedValue, TrailingArg] {
        error.remove(kind);
    }
    error
}
