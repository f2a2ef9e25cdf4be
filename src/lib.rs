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

use std::process::ExitCode;

use clap::Parser;

use commands::{Command, Outcome};

/// Compiles Gemma 4 models ahead of time and runs them: the same answer every time, memory known beforehand.
///
/// A first look, on whatever this machine has:  gemma4c demo
#[derive(Parser)]
#[command(name = "gemma4c", version, max_term_width = 100, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// Runs the command that the arguments of this process name.
pub fn main() -> ExitCode {
    match commands::run(Cli::parse().command) {
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
