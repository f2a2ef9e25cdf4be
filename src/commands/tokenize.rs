//! `gemma4c tokenize`: text to ids and back.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use gemma4c_models::tokenizer::{EncodeOptions, Tokenizer, vocab_from_metadata};
use gemma4c_plan::Vocab;

use super::Outcome;
use crate::{files, output};

/// Turn text into token ids, or ids into text.
#[derive(clap::Args)]
pub struct Args {
    /// A plan or a GGUF model.
    #[arg(value_name = "PLAN.bin")]
    plan: PathBuf,

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
    /// The text; - is standard input, read as `run` reads it: without the newline at its end.
    #[arg(short, long, value_name = "TEXT")]
    prompt: Option<String>,

    /// A file with the text; - is standard input.
    #[arg(short, long, value_name = "TEXT")]
    file: Option<PathBuf>,

    /// Ids to turn back into text, separated by spaces or commas.
    #[arg(long, value_name = "IDS")]
    decode: Option<String>,
}

pub fn run(args: &Args) -> Result<Outcome> {
    let Some(vocab) = vocab_of(&args.plan)? else {
        bail!("{} has no vocabulary: its model runs on token ids alone", args.plan.display());
    };
    let tokenizer = Tokenizer::new(&vocab)?;
    let text = match (&args.input.decode, &args.input.prompt, &args.input.file) {
        (Some(ids), _, _) => {
            let text = tokenizer.decode(&parse_ids(ids)?, args.special)?;
            output::print(&format!("{text}\n"))?;
            return Ok(Outcome::Done);
        }
        (_, Some(text), _) if text == "-" => read_prompt(std::io::stdin().lock())?,
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
    match files::is_model(path)? {
        true => Ok(vocab_from_metadata(files::open_model(path)?.metadata())?),
        false => Ok(files::read_plan(path)?.vocab),
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

/// The longest text that is read as a prompt, in bytes: more than any context has room for.
pub const LONGEST_PROMPT: u64 = 16 << 20;

/// All of standard input, as a prompt. The newline at its end is the shell's, not the prompt's.
pub fn read_prompt(input: impl Read) -> Result<String> {
    let mut bytes = Vec::new();
    input.take(LONGEST_PROMPT + 1).read_to_end(&mut bytes).context("cannot read standard input")?;
    ensure!(
        bytes.len() as u64 <= LONGEST_PROMPT,
        "standard input has more than {LONGEST_PROMPT} bytes: no prompt is that long"
    );
    let text = match String::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => bail!("standard input is not UTF-8 text: byte {} is wrong", error.utf8_error().valid_up_to()),
    };
    let line = text.strip_suffix('\n').unwrap_or(&text);
    Ok(line.strip_suffix('\r').unwrap_or(line).to_owned())
}

/// Ids separated by spaces, commas or both.
pub fn parse_ids(text: &str) -> Result<Vec<u32>> {
    let words = text.split([',', ' ', '\n', '\t']).filter(|w| !w.is_empty());
    words.map(|w| w.parse().with_context(|| format!("`{w}` is not a token id"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_is_text_of_a_bounded_length_without_the_shells_newline() {
        assert_eq!(read_prompt(&b"x \n\n"[..]).unwrap(), "x \n");
        let message = |result: Result<String>| result.unwrap_err().to_string();
        assert_eq!(message(read_prompt(&b"ab\xff"[..])), "standard input is not UTF-8 text: byte 2 is wrong");
        assert!(message(read_prompt(std::io::repeat(b'a'))).contains("more than 16777216 bytes"));
    }
}
