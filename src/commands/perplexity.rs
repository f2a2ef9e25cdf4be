//! `gemma4c perplexity`: how well a plan predicts a text, and how far it is from another plan.
//!
//! One number for every change of rounding, weight type or kernel. Windows are independent sequences, read one after
//! another by this plan and by the one it is compared with, so that memory is bounded by a few rows of logits and a run
//! can go on after any window.

mod checkpoint;
mod read;
mod report;
mod score;
mod windows;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use gemma4c_models::tokenizer::Tokenizer;
use gemma4c_plan::Plan;
use gemma4c_runtime::ModelLocation;

use super::plan_file::{self, PlanArgs};
use super::{Outcome, tokenize};
use crate::device::{Device, Place};
use crate::output::{self, OutputFile};
use crate::scoring::Cut;
use crate::{files, progress};
use checkpoint::{Checkpoint, Header};
use read::{Reader, Readers};
use report::Report;
use score::{Mean, Scores};
use windows::{Window, Windows};

/// Measure how well a plan predicts a text, and how far it is from another plan.
///
/// Prints the mean negative log-likelihood of a token given those before it in its window (nll, natural logarithm) with
/// its standard error, and the perplexity, exp(nll). With --against, also the Kullback-Leibler divergence of this
/// plan's distribution from the other's, which is the reference, and how often both find the same token likeliest.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    plan: PlanArgs,

    #[command(flatten)]
    input: Input,

    /// With --file: tokens of a window. Each starts with the beginning-of-sequence token in the place of its first.
    #[arg(long, value_name = "N", default_value_t = 512, conflicts_with = "tokens")]
    window: usize,

    /// With --file: score whole windows, not only their second halves.
    #[arg(long, conflicts_with = "tokens")]
    all: bool,

    /// Feed the tokens one by one (decode) instead of as a prompt (prefill). On a GPU the two round differently.
    #[arg(long)]
    decode: bool,

    /// Another plan with the same vocabulary, the reference to compare with. On the CPU it always uses prefill, even
    /// with --decode: the bits are the same.
    #[arg(long, value_name = "OTHER.bin")]
    against: Option<PathBuf>,

    /// The device to run the other plan on.
    #[arg(long, value_enum, value_name = "DEVICE", default_value = "auto", requires = "against")]
    against_device: Device,

    /// The other plan's model file, or its folder, if it has moved.
    #[arg(long, value_name = "PATH", requires = "against")]
    against_model: Option<PathBuf>,

    /// Keep every finished window in this file. The same command with the same file continues after the last one, and
    /// ends with the same figures.
    #[arg(long, value_name = "FILE")]
    checkpoint: Option<OutputFile>,

    /// The format of the output.
    #[arg(short = 'o', long = "output", value_enum, default_value = "text")]
    output: Format,
}

#[derive(clap::Args)]
#[group(required = true, multiple = false)]
struct Input {
    /// A file with a window of token ids a line, separated by spaces or commas; - is standard input. Every token but a
    /// line's first is scored.
    #[arg(long, value_name = "FILE")]
    tokens: Option<PathBuf>,

    /// A file with text; - is standard input. It is cut into windows, and the second half of each is scored, as
    /// llama.cpp does.
    #[arg(long, value_name = "TEXT")]
    file: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    /// A table.
    Text,
    /// The figures as JSON.
    Json,
}

pub fn run(args: &Args) -> Result<Outcome> {
    let plan = args.plan.read()?;
    let other = args.against.as_deref().map(files::read_plan).transpose()?;
    let windows = windows(args, &plan)?;
    windows.check_context(&args.plan.plan, plan.program.context)?;
    if let (Some(other), Some(path)) = (&other, &args.against) {
        let (here, there) = (plan.model.vocab_size, other.model.vocab_size);
        ensure!(
            here == there,
            "{} has a vocabulary of {here} tokens and {} one of {there}: their distributions do not compare",
            args.plan.plan.display(),
            path.display()
        );
        windows.check_context(path, other.program.context)?;
    }

    let (mut readers, header) = open(args, plan, other, &windows)?;
    if windows.left_over > 0 {
        eprintln!(
            "[the last {} tokens of {} do not fill a window of {} and are not scored]",
            windows.left_over, windows.name, args.window
        );
    }
    let scores = score(args, &windows, &mut readers, &header)?;
    let report =
        Report { windows: &windows, phase: args.phase(), readers: &readers, against: args.against.as_deref(), scores };
    output::print(&match args.output {
        Format::Text => report.text(),
        Format::Json => report.json()?,
    })?;
    Ok(Outcome::Done)
}

impl Args {
    fn phase(&self) -> &'static str {
        if self.decode { "decode" } else { "prefill" }
    }
}

/// Loads the plan and the one it is compared with, and notes what the figures depend on. Both stay loaded: where both
/// run on one GPU, it must have room for them.
fn open(args: &Args, plan: Plan, other: Option<Plan>, windows: &Windows) -> Result<(Readers, Header)> {
    let load = |plan: Plan, location: ModelLocation, device: Device| {
        let name = location.plan.display().to_string();
        let place = Place { location, device, on: args.plan.on_gpu() };
        let session = plan_file::open(&place, plan).with_context(|| name.clone())?;
        anyhow::Ok(Reader::new(session, name, args.decode))
    };
    let mut header = Header::new();
    header.add("plan", format_args!("{:016x}", plan.checksum()?));
    let this = load(plan, args.plan.location(), args.plan.device)?;
    header.add("device", this.device());
    header.add("phase", args.phase());
    header.add("windows", windows.list.len());
    header.add("scored tokens", windows.scored());
    header.add("input", format_args!("{:016x}", windows.hash()));
    let (Some(other), Some(path)) = (other, &args.against) else {
        header.add("against", "none");
        return Ok((Readers::new(this, None), header));
    };
    header.add("against", format_args!("{:016x}", other.checksum()?));
    let location = ModelLocation { plan: path.clone(), given: args.against_model.clone() };
    let reference = load(other, location, args.against_device)?.into_reference();
    header.add("against device", reference.device());
    Ok((Readers::new(this, Some(reference)), header))
}

/// Scores all windows but those that the checkpoint has already.
fn score(args: &Args, windows: &Windows, readers: &mut Readers, header: &Header) -> Result<Scores> {
    let has_against = args.against.is_some();
    let mut scores = Scores::new(has_against);
    let (mut checkpoint, mut done) = (None, 0);
    if let Some(path) = &args.checkpoint {
        let opened = Checkpoint::open(path, header, &windows.list, has_against)?;
        opened.finished.iter().for_each(|window| scores.append(window));
        done = opened.finished.len();
        if done > 0 {
            eprintln!("[{done} of {} windows are in {} already]", windows.list.len(), path.display());
        }
        checkpoint = Some(opened.checkpoint);
    }
    let fed = |windows: &[Window]| windows.iter().map(|window| window.fed().len() as u64).sum();
    let (finished, left) = windows.list.split_at(done);
    let bar = progress::tokens("scoring", fed(&windows.list)).with_position(fed(finished));
    bar.reset_eta();
    for window in left {
        let found = readers.score(window, &mut |tokens| bar.inc(tokens as u64))?;
        if let Some(checkpoint) = &mut checkpoint {
            checkpoint.append(&found)?;
        }
        scores.append(&found);
        if !bar.is_hidden() {
            bar.set_message(format!("nll {}", Mean::of(&scores.nll)));
        }
    }
    bar.finish_and_clear();
    Ok(scores)
}

/// The windows that the arguments ask for, each with something to score.
fn windows(args: &Args, plan: &Plan) -> Result<Windows> {
    let vocab_size = plan.model.vocab_size;
    let name = |path: &Path| if path == Path::new("-") { "standard input".into() } else { path.display().to_string() };
    if let Some(path) = &args.input.tokens {
        return Windows::from_lines(name(path), &tokenize::read_text(path)?, vocab_size);
    }
    let Some(path) = &args.input.file else { bail!("nothing to score: give --tokens or --file") };
    let cut = Cut { tokens: args.window, all: args.all };
    let (tokens, least) = (cut.tokens, cut.least());
    ensure!(tokens >= least, "--window {tokens}: at least {least} tokens are needed to have one to score");
    let Some(vocab) = &plan.vocab else {
        bail!("the model has no vocabulary, so it cannot read text: give windows of token ids with --tokens");
    };
    let text = tokenize::read_text(path)?;
    Windows::from_text(name(path), &text, &Tokenizer::new(vocab)?, vocab, cut, vocab_size)
}
