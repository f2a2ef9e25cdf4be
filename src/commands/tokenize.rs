//! `gemma4c tokenize`: text to ids and back.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use gemma4c_models::gguf::Gguf;
use gemma4c_models::tokenizer::{EncodeOptions, Tokenizer, vocab_from_metadata};
use gemma4c_plan::Vocab;

use super::{Outcome, plan_file};
use crate::output;

/// Turn text into token ids, or ids into text.
#[derive(clap::Args)]
pub struct Args {
    /// A GGUF model or a plan.
    #[arg(value_name = "FILE")]
    file: PathBuf,

    #[command(flatten)]
    input: Input,

    /// Do not put the beginning-of-sequence token first.
    #[arg(long)]
    no_bos: bool,

    /// Read control tokens such as <|turn> in the text as tokens; with --decode, show them.
    #[arg(long)]
    special: bool,
}

#[derive(clap::Args)]
#[group(required = true, multiple = false)]
struct Input {
    /// The text.
    #[arg(short, long, value_name = "TEXT")]
    prompt: Option<String>,

    /// A file with the text; - is standard input.
    #[arg(short, long, value_name = "PATH")]
    file_path: Option<PathBuf>,

    /// Ids to turn back into text, separated by spaces or commas.
    #[arg(long, value_name = "IDS")]
    decode: Option<String>,
}

pub fn run(args: &Args) -> Result<Outcome> {
    let Some(vocab) = vocab_of(&args.file)? else {
        bail!("{} has no vocabulary: its model runs on token ids alone", args.file.display());
    };
    let tokenizer = Tokenizer::new(&vocab)?;
    let text = match (&args.input.decode, &args.input.prompt, &args.input.file_path) {
        (Some(ids), _, _) => {
            let text = tokenizer.decode(&parse_ids(ids)?, args.special)?;
            output::print(&format!("{text}\n"))?;
            return Ok(Outcome::Done);
        }
        (_, Some(text), _) => text.clone(),
        (_, _, Some(path)) => read_text(path)?,
        _ => bail!("nothing to tokenise: give -p, -f or --decode"),
    };
    let ids = tokenizer.encode(&text, EncodeOptions { add_bos: !args.no_bos, parse_special: args.special });
    let ids: Vec<String> = ids.iter().map(u32::to_string).collect();
    output::print(&format!("{}\n", ids.join(" ")))?;
    Ok(Outcome::Done)
}

/// The vocabulary of a model or of a plan.
fn vocab_of(path: &Path) -> Result<Option<Vocab>> {
    match plan_file::is_gguf(path)? {
        true => Ok(vocab_from_metadata(Gguf::open(path)?.metadata())?),
        false => Ok(plan_file::read(path)?.vocab),
    }
}

/// The text of a file, or of standard input for `-`.
pub fn read_text(path: &Path) -> Result<String> {
    if path == Path::new("-") {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).context("cannot read standard input")?;
        return Ok(text);
    }
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Ids separated by spaces, commas or both.
pub fn parse_ids(text: &str) -> Result<Vec<u32>> {
    let words = text.split([',', ' ', '\n', '\t']).filter(|w| !w.is_empty());
    words.map(|w| w.parse().with_context(|| format!("`{w}` is not a token id"))).collect()
}
