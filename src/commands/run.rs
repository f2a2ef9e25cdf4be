//! `gemma4c run`: text from a plan.

use std::io::{BufRead, IsTerminal};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use gemma4c_models::chat::{ChatTemplate, Message};
use gemma4c_models::tokenizer::{EncodeOptions, Tokenizer};
use gemma4c_plan::Vocab;
use gemma4c_runtime::{Asked, End, Request, RuntimeError, Sampler, Session};

use super::tokenize::parse_ids;
use super::{Outcome, plan_file::PlanArgs};
use crate::{output, progress};

/// Generate text.
///
/// With -p the text is continued as it stands. With --chat it is a question: the model's own chat template is put around it,
/// which is what instruction-tuned models need; without -p the questions are read line by line.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    plan: PlanArgs,

    /// The text to continue, or with --chat the question.
    #[arg(short, long, value_name = "TEXT", conflicts_with = "tokens")]
    prompt: Option<String>,

    /// Token ids to continue instead of a text; ids are printed, and none is held back. For models without a vocabulary.
    #[arg(long, value_name = "IDS", conflicts_with = "chat")]
    tokens: Option<String>,

    /// Tokens to generate at most; generation ends earlier at a stop token or a full context.
    #[arg(short, value_name = "N", default_value_t = 256)]
    n: u32,

    #[command(flatten)]
    sampling: SamplingArgs,

    /// Talk to an instruction-tuned model through its chat template.
    #[arg(long)]
    chat: bool,

    /// With --chat: what the model is told before the conversation.
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system: Option<String>,

    /// With --chat: let the model think before it answers, and show it.
    #[arg(long, requires = "chat")]
    thinking: bool,
}

/// How the next token is picked; what is not given is as the model's authors advise.
#[derive(clap::Args)]
struct SamplingArgs {
    /// 0 always takes the likeliest token [default: the model's, 1.0]
    #[arg(long, value_name = "T")]
    temp: Option<f32>,

    /// Consider only the K likeliest tokens; 0 considers all [default: the model's, 64]
    #[arg(long, value_name = "K")]
    top_k: Option<u32>,

    /// Consider the likeliest tokens that together have this probability [default: the model's, 0.95]
    #[arg(long, value_name = "P")]
    top_p: Option<f32>,

    /// The same seed gives the same text.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

pub fn run(args: &Args) -> Result<Outcome> {
    let session = args.plan.open()?;
    let mut sampling = session.plan().sampling;
    sampling.temperature = args.sampling.temp.unwrap_or(sampling.temperature);
    sampling.top_k = args.sampling.top_k.unwrap_or(sampling.top_k);
    sampling.top_p = args.sampling.top_p.unwrap_or(sampling.top_p);
    let vocab = session.plan().vocab.clone();
    // Tokens of other media make no sense in a text; whoever speaks ids gets what the model says.
    let suppress = vocab.as_ref().filter(|_| args.tokens.is_none()).map(|v| v.suppress.clone()).unwrap_or_default();
    let stop = vocab.as_ref().map(|v| v.stop.clone()).unwrap_or_default();
    let sampler = Sampler::new(sampling, args.sampling.seed, suppress)?;
    if let Some(why) = session.picks_on_host(&sampler) {
        eprintln!("[tokens are picked on the host, which is slower: {why}]");
    }
    let mut generation = Generation { session, sampler, stop, most: args.n };
    if let Some(ids) = &args.tokens {
        let mut first = true;
        let speed = generation.answer(&parse_ids(ids)?, &mut |id| {
            let separator = if std::mem::take(&mut first) { "" } else { " " };
            output::print(&format!("{separator}{id}"))
        })?;
        output::print("\n")?;
        speed.report();
        return Ok(Outcome::Done);
    }
    let Some(vocab) = vocab else {
        bail!("the model has no vocabulary, so it cannot read or write text: give token ids with --tokens");
    };
    let tokenizer = Tokenizer::new(&vocab)?;
    match (&args.prompt, args.chat) {
        (_, true) => chat(args, &mut generation, &vocab, &tokenizer),
        (Some(prompt), false) => {
            let ids = tokenizer.encode(prompt, EncodeOptions { add_bos: true, parse_special: false });
            generation.stream(&ids, &tokenizer)?;
            Ok(Outcome::Done)
        }
        (None, false) => bail!("nothing to do: give a text with -p, or talk with --chat"),
    }
}

fn chat(args: &Args, generation: &mut Generation, vocab: &Vocab, tokenizer: &Tokenizer) -> Result<Outcome> {
    let source = vocab.chat_template.as_deref().context("the model has no chat template: use -p without --chat")?;
    let template = ChatTemplate::new(source)?;
    let mut options = serde_json::Map::new();
    options.insert("enable_thinking".into(), args.thinking.into());
    let mut messages: Vec<Message> = args.system.iter().map(|text| Message::new("system", text)).collect();
    let mut ask = |question: &str| -> Result<()> {
        messages.push(Message::new("user", question));
        let text = template.render(&messages, &[], true, &options)?;
        // The template spells the beginning-of-sequence token itself.
        let ids = tokenizer.encode(&text, EncodeOptions { add_bos: false, parse_special: true });
        let answer = generation.stream(&ids, tokenizer)?;
        messages.push(Message::new("assistant", answer));
        Ok(())
    };
    if let Some(question) = &args.prompt {
        ask(question)?;
        return Ok(Outcome::Done);
    }
    let stdin = std::io::stdin();
    let prompt = || {
        if stdin.is_terminal() {
            eprint!("> ");
        }
    };
    prompt();
    for line in stdin.lock().lines() {
        let line = line.context("cannot read standard input")?;
        if !line.trim().is_empty() {
            ask(line.trim())?;
        }
        prompt();
    }
    Ok(Outcome::Done)
}

/// A session that answers prompts one after another.
struct Generation {
    session: Session,
    sampler: Sampler,
    stop: Vec<u32>,
    most: u32,
}

impl Generation {
    /// Generates after `prompt` and prints the text as it comes; returns it.
    fn stream(&mut self, prompt: &[u32], tokenizer: &Tokenizer) -> Result<String> {
        let mut text = String::new();
        let mut detokenizer = tokenizer.detokenizer(false);
        let speed = self.answer(prompt, &mut |id| {
            let ready = detokenizer.push(id)?;
            text.push_str(ready);
            output::print(ready)
        })?;
        let rest = detokenizer.finish();
        output::print(&format!("{rest}\n"))?;
        speed.report();
        Ok(text + &rest)
    }

    /// Generates after `prompt`, one call of `each` a token, until a stop token, the limit or the end of the context.
    fn answer(&mut self, prompt: &[u32], each: &mut dyn FnMut(u32) -> Result<()>) -> Result<Speed> {
        // What the session has seen already need not be fed again.
        let kept = self.session.keep_prefix(prompt);
        let started = Instant::now();
        let prompt = self.prefill(&prompt[kept..])?;
        let (mut read_by, mut written) = (None, 0);
        let request = Request { prompt: prompt.last_chunk, most: self.most, stop: &self.stop };
        let end = self.session.generate(request, &mut self.sampler, &mut |token| {
            read_by.get_or_insert_with(Instant::now);
            written += 1;
            each(token)
        })?;
        let ended = Instant::now();
        let read_by = read_by.unwrap_or(ended);
        let full = (end == End::Context).then(|| self.session.plan().program.context as usize);
        Ok(Speed { read: prompt.tokens, reading: read_by - started, written, writing: ended - read_by, full })
    }

    /// Feeds all but the last chunk of a prompt, with a bar.
    fn prefill<'a>(&mut self, prompt: &'a [u32]) -> Result<Prompt<'a>> {
        self.check_room(prompt.len())?;
        let chunk = self.session.chunk() as usize;
        let (first, last_chunk) = prompt.split_at(prompt.len().div_ceil(chunk).saturating_sub(1) * chunk);
        let bar = progress::tokens("reading", prompt.len() as u64);
        for piece in first.chunks(chunk) {
            self.session.feed(piece, Asked::None, None, |_, _| {})?;
            bar.inc(piece.len() as u64);
        }
        bar.finish_and_clear();
        Ok(Prompt { tokens: prompt.len(), last_chunk })
    }

    /// A prompt that does not fit is refused before its first chunk is computed.
    fn check_room(&self, tokens: usize) -> Result<()> {
        let (context, used) = (self.session.plan().program.context, self.session.position());
        let wanted = used as u64 + tokens as u64;
        match wanted > context as u64 {
            true => Err(RuntimeError::ContextOverflow { context, used, wanted }.into()),
            false => Ok(()),
        }
    }
}

/// A prompt of which only the last chunk is still to be fed.
struct Prompt<'a> {
    tokens: usize,
    last_chunk: &'a [u32],
}

/// How an answer went.
struct Speed {
    read: usize,
    reading: Duration,
    written: u32,
    writing: Duration,
    /// The context, where it ended the answer.
    full: Option<usize>,
}

impl Speed {
    /// For a person, on stderr.
    fn report(&self) {
        let per_second = |n: f64, time: Duration| if n > 0.0 { n / time.as_secs_f64().max(1e-9) } else { 0.0 };
        if let Some(context) = self.full {
            eprintln!("[the context of {context} positions is full]");
        }
        eprintln!(
            "[prompt: {} tokens, {:.1} tokens/s; generated: {} tokens, {:.1} tokens/s]",
            self.read,
            per_second(self.read as f64, self.reading),
            self.written,
            // The first one comes out of the prompt's pass.
            per_second(self.written.saturating_sub(1) as f64, self.writing)
        );
    }
}
