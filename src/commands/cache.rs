//! `gemma4c cache`: what was made on the way and is kept.

use anyhow::Result;
use clap::Subcommand;

use super::{Outcome, cached};
use crate::output;

/// Show or empty the cache of plans and kernels.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    action: Option<Action>,
}

#[derive(Clone, Copy, Subcommand)]
enum Action {
    /// Delete everything in it: all of it can be made again.
    Clear,
}

pub fn run(args: &Args) -> Result<Outcome> {
    match args.action {
        None => output::print(&format!("{}\n", cached::described()))?,
        Some(Action::Clear) => {
            let (count, bytes) = cached::clear()?;
            output::print(&format!("{count} files deleted, {}\n", output::bytes(bytes)))?;
        }
    }
    Ok(Outcome::Done)
}
