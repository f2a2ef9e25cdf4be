//! gemma4c as a library: what the program is made of, so that its tests are made of the same. One file a subcommand, in `commands/`.
//!
//! It is no interface for other programs: nothing here is kept stable.

pub mod commands;
pub mod compile;
pub mod embed;
pub mod launched;
pub mod output;
mod progress;
mod random;
mod report;
pub mod simulate;

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
pub fn main() -> ExitCode {
    match run(env::args_os()) {
        Ok(Outcome::Done) => ExitCode::SUCCESS,
        Ok(Outcome::CheckFailed) => ExitCode::from(1),
        // The reader of our output has closed the pipe.
        Err(error) if output::is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", output::message(&error));
            ExitCode::from(2)
        }
    }
}

/// The command line as clap describes it, for tests and for whatever is derived from it.
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

/// clap guesses what was meant by how words are spelled (`--stop` for `--top-p`), or proposes to pass an option as a value. Wrong advice is worse
/// than none: the usage line and `--help` remain.
fn without_tips(mut error: clap::Error) -> clap::Error {
    use ContextKind::{Suggested, SuggestedArg, SuggestedSubcommand, SuggestedValue, TrailingArg};
    for kind in [Suggested, SuggestedArg, SuggestedSubcommand, SuggestedValue, TrailingArg] {
        error.remove(kind);
    }
    error
}
