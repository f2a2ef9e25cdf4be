//! `gemma4c bench`: how fast a plan reads prompts and writes tokens on this machine, and what it takes to get there.
//!
//! Times are the caller's: from the call to the token in hand, so that everything in between counts. The rows are named
//! as `llama-bench` names them: pp512 reads a prompt of 512 tokens, tg128 writes 128, `@ d8192` after 8192 others.

mod batched;
mod chat;
mod drafts;
mod lookups;
mod report;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use gemma4c_models::media::MOST_SECONDS;
use gemma4c_plan::Sampling;
use gemma4c_runtime::{Asked, MOST_LOOKED_UP, Request, Sampler, Session};

use super::Outcome;
use super::cached::{ModelArgs, Needs};
use super::lora::LoraArgs;
use super::plan_file::{EngineArgs, PlanArgs};
use super::synthetic_media::Media;
use crate::output::print;
use crate::{progress, random};
use batched::Batched;
use chat::Chat;
use report::{Report, Row, Start};

/// Measure how fast a plan runs: prompts, generation, start, memory.
///
/// Tokens are random, so it runs without a vocabulary; which token it is does not change the time. Every measurement
/// starts with a warm-up run that does not count. A GGUF model, or the name of one such as
/// ggml-org/gemma-4-E4B-it-GGUF, will do instead of a plan: it is compiled for this machine, once.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    plan: PlanArgs,

    /// Prompt lengths to measure (prefill); 0 for none.
    #[arg(short = 'p', long = "prompt", value_name = "N,N...", default_value = "512,2048")]
    prompts: String,

    /// Numbers of tokens to generate (decode); 0 for none.
    #[arg(short = 'n', long = "generate", value_name = "N,N...", default_value = "128")]
    generate: String,

    /// Tokens already in the sequence when a measurement starts.
    #[arg(short = 'd', long = "depth", value_name = "N,N...", default_value = "0")]
    depths: String,

    /// Numbers of sequences at once: their prompts are read, then all are decoded together. Gives the columns of
    /// `llama-batched-bench`.
    #[arg(long, value_name = "N,N...", conflicts_with = "depths")]
    sequences: Option<String>,

    /// Turns of a chat over a long system prompt: when each has its first token, and whether that is within the time
    /// its new tokens take at the rate of pp512, and 15 ms.
    #[arg(long, value_name = "TURNS", conflicts_with_all = ["prompts", "depths", "sequences"])]
    chat: Option<u32>,

    /// What drafts cost and bring: a step of the plan's drafter, verification of several rows, and tokens a second
    /// where drafts are right with these probabilities. That is forced, since random weights accept nothing: each draft
    /// is replaced by the right token or by another.
    #[arg(long, value_name = "P,P...", num_args = 0..=1, default_missing_value = "0,0.5,0.8,1", conflicts_with_all = ["depths", "sequences", "chat"])]
    draft: Option<String>,

    /// What looking drafts up in the text brings: -p tokens of this text are the prompt, and the next -n tokens are
    /// taken as the answer whatever the model picks, since random weights never repeat themselves.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["depths", "sequences", "chat", "draft", "image", "audio"])]
    ngram: Option<PathBuf>,

    /// With --chat: tokens of the system prompt.
    #[arg(long, value_name = "N", default_value_t = 8192, requires = "chat")]
    system: u32,

    /// With --chat: tokens that the user says in a turn; -n is the answer's.
    #[arg(long, value_name = "N", default_value_t = 64, requires = "chat")]
    turn: u32,

    /// Pictures to measure, by their soft tokens: how long the tower takes for one, from its patches to its soft
    /// tokens. The plan must have been compiled with --mmproj and as many --image-tokens.
    #[arg(long, value_name = "N,N...", conflicts_with_all = ["sequences", "chat"])]
    image: Option<String>,

    /// Sounds to measure, by their seconds: how long the tower takes for one, from 16 kHz samples to its soft tokens.
    #[arg(long, value_name = "SECONDS,...", conflicts_with_all = ["sequences", "chat", "draft"])]
    audio: Option<String>,

    #[command(flatten)]
    engine: EngineArgs,

    #[command(flatten)]
    lora: LoraArgs,

    #[command(flatten)]
    model: ModelArgs,

    /// How often each measurement is repeated.
    #[arg(short = 'r', long = "repeat", value_name = "N", default_value_t = 5)]
    repeat: usize,

    /// The format of the output.
    #[arg(short = 'o', long = "output", value_enum, default_value = "md")]
    output: Format,

    /// The same seed gives the same tokens.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// A table in Markdown.
    Md,
    /// All measurements as JSON.
    Json,
}

/// What is measured at a depth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Test {
    /// A prompt of so many tokens, to the first token after it.
    Prompt(u32),
    /// So many tokens, one after the other.
    Generate(u32),
    /// The soft tokens of one picture.
    Image(u32),
    /// The soft tokens of a sound of so many seconds.
    Audio(u32),
}

impl Test {
    fn tokens(self) -> u32 {
        match self {
            Test::Prompt(n) | Test::Generate(n) | Test::Image(n) => n,
            Test::Audio(seconds) => seconds * SOFT_A_SECOND,
        }
    }

    /// As `llama-bench` has it.
    fn name(self, depth: u32) -> String {
        let name = match self {
            Test::Prompt(n) => format!("pp{n}"),
            Test::Generate(n) => format!("tg{n}"),
            Test::Image(n) => return format!("image{n}"),
            Test::Audio(seconds) => return format!("audio{seconds}s"),
        };
        if depth == 0 { name } else { format!("{name} @ d{depth}") }
    }
}

/// Soft tokens of a second of sound: 40 ms each.
const SOFT_A_SECOND: u32 = 25;

/// Tokens of the prompt whose first answer ends the cold start.
const FIRST_PROMPT: u32 = 32;

pub fn run(mut args: Args) -> Result<Outcome> {
    let sequences = args.sequences.as_deref().map(|text| numbers("--sequences", text)).transpose()?;
    let most = sequences.and_then(|all| all.into_iter().max()).unwrap_or(1).max(1);
    let verified = if args.ngram.is_some() { MOST_LOOKED_UP + 1 } else { 1 };
    let is_drafted = args.draft.is_some();
    let needs = Needs {
        sequences: most,
        may_be_fewer: false,
        verified,
        drafter: None,
        is_drafted,
        adapters: &args.lora.lora,
        seats: None,
        image_tokens: None,
        sharing: 1,
    };
    args.model.resolve(&mut args.plan, &needs)?;
    let args = &args;
    let started = Instant::now();
    let (prompts, generate) = (numbers("-p", &args.prompts)?, numbers("-n", &args.generate)?);
    let depths = numbers("-d", &args.depths)?;
    ensure!(args.repeat >= 1, "-r 0: at least one measurement is needed");
    let Args { ref plan, ref lora, engine, system, turn, repeat, seed, .. } = *args;
    let sits = plan.made.is_none() && !lora.lora.is_empty();
    let in_turns = args.chat.is_some() || args.draft.is_some() || args.ngram.is_some();
    ensure!(!(sits && in_turns), "--lora: --chat, --draft and --ngram measure a plan without one");
    if let Some(turns) = args.chat {
        let [answer] = generate[..] else { bail!("-n {}: an answer has one length", args.generate) };
        let report = chat::run(&Chat { plan, engine, turns, system, turn, answer, repeat, seed })?;
        print(&match args.output {
            Format::Md => report.markdown(),
            Format::Json => report.json()?,
        })?;
        return Ok(Outcome::Done);
    }
    if let Some(acceptances) = &args.draft {
        let (&[prompt, ..], &[generate, ..]) = (&prompts[..], &generate[..]) else { bail!("--draft needs -p and -n") };
        let acceptances = probabilities("--draft", acceptances)?;
        ensure!(prompt > 0 && generate > 1, "--draft: a prompt of {prompt} tokens and {generate} after it");
        let report = drafts::run(&drafts::Drafts { plan, acceptances, prompt, generate, repeat, seed })?;
        print(&match args.output {
            Format::Md => report.markdown(),
            Format::Json => report.json()?,
        })?;
        return Ok(Outcome::Done);
    }
    if let Some(text) = &args.ngram {
        let (&[prompt, ..], &[generate, ..]) = (&prompts[..], &generate[..]) else { bail!("--ngram needs -p and -n") };
        ensure!(prompt > 0 && generate > 1, "--ngram: a prompt of {prompt} tokens and {generate} after it");
        let report = lookups::run(&lookups::Lookups { plan, text, prompt, generate, repeat })?;
        print(&match args.output {
            Format::Md => report.markdown(),
            Format::Json => report.json()?,
        })?;
        return Ok(Outcome::Done);
    }
    if let Some(sequences) = &args.sequences {
        let sequences = numbers("--sequences", sequences)?;
        let report = batched::run(&Batched { plan, lora, engine, sequences, prompts, generate, repeat, seed })?;
        print(&match args.output {
            Format::Md => report.markdown(),
            Format::Json => report.json()?,
        })?;
        return Ok(Outcome::Done);
    }
    engine.refuse_without("--sequences or --chat")?;
    let images = args.image.as_deref().map_or(Ok(Vec::new()), |text| numbers("--image", text))?;
    let sounds = args.audio.as_deref().map_or(Ok(Vec::new()), |text| numbers("--audio", text))?;
    let media = images.into_iter().map(Test::Image).chain(sounds.into_iter().map(Test::Audio));
    let prompts = prompts.into_iter().filter(|n| *n > 0).map(Test::Prompt);
    let generate = generate.into_iter().filter(|n| *n > 0).map(Test::Generate);
    let tests: Vec<Test> = media.chain(prompts).chain(generate).collect();

    let plan = args.plan.read()?;
    let read = started.elapsed();
    let context = plan.program.context;
    for (test, depth) in tests.iter().flat_map(|test| depths.iter().map(move |depth| (*test, *depth))) {
        if let Test::Image(soft) = test {
            Media::picture(&plan, soft)?;
            continue;
        }
        if let Test::Audio(seconds) = test {
            ensure!(
                (1..=MOST_SECONDS).contains(&seconds),
                "--audio {seconds}: a sound has 1 to {MOST_SECONDS} seconds"
            );
            Media::sound(&plan, &Media::tone(seconds))?;
            continue;
        }
        let room = context.saturating_sub(depth).saturating_sub(1);
        ensure!(
            test.tokens() <= room,
            "{} does not fit the plan's context of {context}: compile with a larger --ctx",
            test.name(depth)
        );
    }
    let adapters = args.lora.for_seat(&args.plan, &plan)?;
    let mut session = args.plan.open_read(plan)?;
    adapters.sit(&mut session)?;
    let opened = started.elapsed();
    let mut runner = Runner::new(session, args.seed);
    runner.first_token()?;
    let start = Start::new(&mut runner.session, read, opened, started.elapsed());

    let mut rows = Vec::new();
    let bar = progress::tokens("measuring", (tests.len() * depths.len() * args.repeat) as u64);
    for &depth in &depths {
        for &test in &tests {
            runner.measure(test, depth)?;
            let taken_before = runner.device_memory()?;
            let mut times = Vec::new();
            for _ in 0..args.repeat {
                times.push(runner.measure(test, depth)?);
                bar.inc(1);
            }
            let grown = runner.device_memory()?.saturating_sub(taken_before);
            rows.push(Row { name: test.name(depth), tokens: test.tokens(), depth, times, grown });
        }
    }
    bar.finish_and_clear();
    let report = Report::new(&mut runner.session, start, rows)?;
    print(&match args.output {
        Format::Md => report.markdown(),
        Format::Json => report.json()?,
    })?;
    Ok(Outcome::Done)
}

/// Numbers separated by commas.
fn numbers(option: &str, text: &str) -> Result<Vec<u32>> {
    let number = |part: &str| part.trim().parse().with_context(|| format!("{option} {text}: {part:?} is no count"));
    text.split(',').map(number).collect()
}

/// Probabilities separated by commas.
fn probabilities(option: &str, text: &str) -> Result<Vec<f64>> {
    let number = |part: &str| {
        let number: Option<f64> = part.trim().parse().ok().filter(|number| (0.0..=1.0).contains(number));
        number.with_context(|| format!("{option} {text}: {part:?} is no number from 0 to 1"))
    };
    text.split(',').map(number).collect()
}

/// A session that is measured over and over.
struct Runner {
    session: Session,
    sampler: Sampler,
    /// The tokens of the sequence: always the same token at the same position.
    tokens: Vec<u32>,
}

impl Runner {
    fn new(session: Session, seed: u64) -> Runner {
        let (context, vocab_size) = (session.plan().program.context, session.plan().model.vocab_size);
        let sampling = Sampling { temperature: 0.0, top_k: 1, top_p: 1.0 };
        let sampler = Sampler::new(sampling, 0, Vec::new()).expect("the largest logit can always be asked for");
        let tokens = random::tokens(seed, context as usize, vocab_size);
        Runner { session, sampler, tokens }
    }

    /// Reads a short prompt and writes one token.
    fn first_token(&mut self) -> Result<()> {
        let most = FIRST_PROMPT.min(self.tokens.len() as u32 - 1).max(1);
        self.measure(Test::Prompt(most), 0)?;
        Ok(())
    }

    /// Brings the sequence to a depth: back where it remembers, else from its start.
    fn go_to(&mut self, depth: u32) -> Result<()> {
        if self.session.truncate(depth.min(self.session.position())).is_err() {
            self.session.reset();
        }
        let missing = &self.tokens[self.session.position() as usize..depth as usize];
        if !missing.is_empty() {
            self.session.feed(missing, Asked::None, None, |_, _| {})?;
        }
        Ok(self.session.wait()?)
    }

    /// How long one test takes. The sequence is then longer, by tokens that `go_to` takes back.
    fn measure(&mut self, test: Test, depth: u32) -> Result<Duration> {
        if let Test::Image(soft) = test {
            let picture = Media::picture(self.session.plan(), soft)?;
            let called = Instant::now();
            picture.read(&mut self.session)?;
            return Ok(called.elapsed());
        }
        if let Test::Audio(seconds) = test {
            let samples = Media::tone(seconds);
            let called = Instant::now();
            Media::sound(self.session.plan(), &samples)?.read(&mut self.session)?;
            return Ok(called.elapsed());
        }
        self.go_to(depth)?;
        let (read, write) = match test {
            Test::Prompt(n) => (n, 1),
            // The first token comes out of a prompt, and only starts the clock.
            Test::Generate(n) => (1, n + 1),
            Test::Image(_) | Test::Audio(_) => bail!("{} is no text", test.name(depth)),
        };
        let prompt = &self.tokens[depth as usize..][..read as usize];
        let called = Instant::now();
        let (mut first, mut last) = (None, called);
        let request = Request { prompt, most: write, stop: &[] };
        self.session.generate(request, &mut self.sampler, &mut |_| {
            last = Instant::now();
            first.get_or_insert(last);
            anyhow::Ok(())
        })?;
        // Generated tokens are not those of `tokens`, so they must not be kept as if they were.
        let position = depth + if matches!(test, Test::Prompt(_)) { read } else { 0 };
        self.session.truncate(position.min(self.session.position())).or_else(|_| {
            self.session.reset();
            anyhow::Ok(())
        })?;
        Ok(match test {
            Test::Prompt(_) | Test::Image(_) | Test::Audio(_) => last - called,
            Test::Generate(_) => last - first.unwrap_or(called),
        })
    }

    /// Bytes taken on the device, by whatever; 0 where there is none.
    fn device_memory(&mut self) -> Result<u64> {
        Ok(self.session.cuda().map_or(Ok(0), |cuda| cuda.memory_taken())?)
    }
}
