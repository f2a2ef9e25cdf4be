//! `gemma4c cache`: what was made on the way and is kept.

use std::io::{BufRead, IsTerminal, stderr, stdin};

use anyhow::{Context, Result, ensure};
use clap::Subcommand;

use super::Outcome;
use super::cached::Contents;
use crate::output;

/// Show or empty the cache of plans and kernels.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    action: Option<Action>,
}

#[derive(Clone, Copy, Subcommand)]
enum Action {
    /// Delete the plans and kernels in it, after asking: all of them can be made again.
    Clear {
        /// Do not ask.
        #[arg(short, long)]
        yes: bool,
    },
}

pub fn run(args: &Args) -> Result<Outcome> {
    let contents = Contents::read()?;
    match args.action {
        None => output::print(&format!("{contents}\n"))?,
        Some(Action::Clear { yes }) => {
            if !yes && !confirmed(&contents)? {
                eprintln!("[nothing was deleted]");
                return Ok(Outcome::Done);
            }
            contents.clear()?;
            output::print(&format!("deleted {contents}\n"))?;
        }
    }
    Ok(Outcome::Done)
}

/// Asks on the terminal; without one there is nobody to ask.
fn confirmed(contents: &Contents) -> Result<bool> {
    let asks = stdin().is_terminal() && stderr().is_terminal();
    ensure!(asks, "this would delete {contents}: say --yes");
    eprint!("Delete {contents}? [y/N] ");
    let mut answer = String::new();
    stdin().lock().read_line(&mut answer).context("cannot read the answer")?;
    Ok(["y", "yes"].contains(&answer.trim().to_ascii_lowercase().as_str()))
}
