//! `gemma4c diff`: how two plans differ.

use std::path::PathBuf;

use anyhow::Result;

use super::Outcome;
use crate::report::diff;
use crate::{files, output};

/// Show how two plans differ: fusion, launches, bytes, memory, kernels.
///
/// Prints "no difference" if there is none.
#[derive(clap::Args)]
pub struct Args {
    /// The old plan.
    #[arg(value_name = "A.bin")]
    old: PathBuf,

    /// The new plan.
    #[arg(value_name = "B.bin")]
    new: PathBuf,

    /// Exit with code 1 if the plans differ.
    #[arg(long)]
    check: bool,
}

pub fn run(args: &Args) -> Result<Outcome> {
    let (old, new) = (files::read_plan(&args.old)?, files::read_plan(&args.new)?);
    let difference = diff::diff(&old, &new);
    let text = difference.as_deref().map_or("no difference", str::trim_end);
    output::print(&format!("{text}\n"))?;
    Ok(if args.check && difference.is_some() { Outcome::CheckFailed } else { Outcome::Done })
}
