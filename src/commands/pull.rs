//! `gemma4c pull`: a model's files by its name.

use std::path::PathBuf;

use anyhow::{Result, bail};

use super::Outcome;
use super::by_name::ByNameArgs;
use crate::by_name::Beside;
use crate::device::Device;
use crate::output;

/// Fetch a model by its name, such as ggml-org/gemma-4-E4B-it-GGUF, and print where its files are.
///
/// The files come from Hugging Face's hub into its cache, where they are found again and other programs find them. What
/// was cut is resumed, and every file is compared with its checksum. HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT,
/// HF_HUB_OFFLINE and SSL_CERT_FILE mean what they mean to other programs. `run`, `serve`, `bench`, `compile` and
/// `inspect` take a name too.
#[derive(clap::Args)]
pub struct Args {
    /// USER/REPOSITORY, or with a quantisation USER/REPOSITORY:Q8_0. Without one, the largest of at most 8 bits that
    /// fits this machine's GPU, or its memory if it has none.
    #[arg(value_name = "NAME")]
    name: PathBuf,

    #[command(flatten)]
    by_name: ByNameArgs,
}

pub fn run(args: &Args) -> Result<Outcome> {
    let beside = Beside { projector: true, drafter: true };
    let Some(brought) = args.by_name.bring(&args.name, Device::Auto, beside)? else {
        bail!("{} is not the name of a model: USER/REPOSITORY is, or USER/REPOSITORY:TAG", args.name.display());
    };
    let paths = [Some(brought.model), brought.projector, brought.drafter];
    let lines: String = paths.iter().flatten().map(|path| format!("{}\n", path.display())).collect();
    output::print(&lines)?;
    Ok(Outcome::Done)
}
