//! `gemma4c completions`: shell completions.

use anyhow::Result;
use clap::CommandFactory;
use clap_complete::Shell;

use super::Outcome;
use crate::output;

/// Print a completion script for your shell.
///
/// For bash: gemma4c completions bash > ~/.local/share/bash-completion/completions/gemma4c
#[derive(clap::Args)]
pub struct Args {
    #[arg(value_enum)]
    shell: Shell,
}

pub fn run(args: &Args) -> Result<Outcome> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut crate::Cli::command(), "gemma4c", &mut script);
    output::print(&String::from_utf8_lossy(&script))?;
    Ok(Outcome::Done)
}
