//! gemma4c: the command line. One file a subcommand, in `commands/`.

mod commands;
mod compile;
mod embed;
mod launched;
mod output;
mod progress;
mod random;
mod report;
mod simulate;

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

fn main() -> ExitCode {
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
