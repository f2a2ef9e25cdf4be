//! Text from a session, as `run` and `demo` write it: a prompt is read, tokens are picked and given out one by one.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Result;
use gemma4c_models::tokenizer::Tokenizer;
use gemma4c_plan::{Plan, Sampling};
use gemma4c_runtime::engine::{self, DraftSource};
use gemma4c_runtime::{
    Asked, Counts, End, MOST_DRAFTS, MOST_LOOKED_UP, Request, RuntimeError, Sampler, Session, Source, Speculation,
};

use crate::{output, progress};

/// How the next token is picked; what is not given is as the plan says.
#[derive(clap::Args)]
pub struct SamplingArgs {
    /// 0 always takes the likeliest token [default: the plan's; Gemma 4 advises 1.0]
    #[arg(long, value_name = "T")]
    temp: Option<f32>,

    /// Consider only the K likeliest tokens; 0 considers all [default: the plan's; Gemma 4 advises 64]
    #[arg(long, value_name = "K")]
    top_k: Option<u32>,

    /// Consider the likeliest tokens that together have this probability [default: the plan's; Gemma 4 advises 0.95]
    #[arg(long, value_name = "P")]
    top_p: Option<f32>,

    /// The same seed gives the same text.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

impl SamplingArgs {
    /// The plan's rule where nothing else was given. Tokens in `suppress` are never picked.
    pub fn sampler(&self, plan: Sampling, suppress: Vec<u32>) -> Result<Sampler, RuntimeError> {
        let sampling = Sampling {
            temperature: self.temp.unwrap_or(plan.temperature),
            top_k: self.top_k.unwrap_or(plan.top_k),
            top_p: self.top_p.unwrap_or(plan.top_p),
        };
        Sampler::new(sampling, self.seed, suppress)
    }
}

/// How far tokens are guessed before the model computes them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DraftArg {
    /// By the plan's drafter, if it has one, as far as that pays.
    #[default]
    Auto,
    Off,
    /// By looking the last tokens up in the text so far.
    Ngram,
    /// By the plan's drafter, so many in a row.
    Steps(u32),
    /// By the drafter in this file, with which a model is compiled on the way.
    File(PathBuf),
}

impl std::str::FromStr for DraftArg {
    type Err = String;

    fn from_str(text: &str) -> Result<DraftArg, String> {
        match (text, text.parse()) {
            ("auto", _) => Ok(DraftArg::Auto),
            ("off", _) => Ok(DraftArg::Off),
            ("ngram", _) => Ok(DraftArg::Ngram),
            (_, Ok(steps @ 1..=MOST_DRAFTS)) => Ok(DraftArg::Steps(steps)),
            (_, Err(_)) if Path::new(text).is_file() => Ok(DraftArg::File(text.into())),
            _ => Err(format!("expected auto, off, ngram, 1 to {MOST_DRAFTS}, or a drafter's file")),
        }
    }
}

impl DraftArg {
    /// What that means for a plan; `None`: tokens are decoded one by one.
    pub fn speculation(&self, plan: &Plan) -> Result<Option<Speculation>, RuntimeError> {
        let has_drafter = plan.drafter.is_some();
        Ok(match *self {
            DraftArg::Off => None,
            DraftArg::Auto | DraftArg::File(_) => has_drafter.then(|| Speculation::new(Source::Drafter, None)),
            DraftArg::Ngram => Some(Speculation::new(Source::Lookup, None)),
            DraftArg::Steps(_) if !has_drafter => return Err(RuntimeError::NoDrafter),
            DraftArg::Steps(steps) => Some(Speculation::new(Source::Drafter, Some(steps))),
        })
    }

    /// The same for many sequences. An engine refuses what its device cannot do.
    pub fn for_engine(&self, plan: &Plan) -> engine::Drafts {
        let (source, steps) = match *self {
            DraftArg::Auto | DraftArg::File(_) if plan.drafter.is_some() => (DraftSource::Drafter, None),
            DraftArg::Auto | DraftArg::File(_) | DraftArg::Off => (DraftSource::Nowhere, None),
            DraftArg::Ngram => (DraftSource::Lookup, None),
            DraftArg::Steps(steps) => (DraftSource::Drafter, Some(steps)),
        };
        engine::Drafts { source, steps }
    }

    /// Rows of a sequence that a model is compiled to verify, where it is compiled on the way.
    pub fn verified_rows(&self) -> u32 {
        if *self == DraftArg::Ngram { MOST_LOOKED_UP + 1 } else { 1 }
    }

    /// The drafter that a model is compiled with.
    pub fn file(&self) -> Option<&Path> {
        match self {
            DraftArg::File(path) => Some(path),
            _ => None,
        }
    }
}

/// A session that answers prompts one after another.
pub struct Generation {
    pub session: Session,
    pub sampler: Sampler,
    pub stop: Vec<u32>,
    pub most: u32,
    pub speculation: Option<Speculation>,
}

impl Generation {
    /// Generates after `prompt` and prints the text as it comes; returns it.
    pub fn stream(&mut self, prompt: &[u32], tokenizer: &Tokenizer) -> Result<Answer> {
        let (mut text, mut tokens) = (String::new(), Vec::new());
        let mut detokenizer = tokenizer.detokenizer(false);
        let speed = self.answer(prompt, &mut |id| {
            tokens.push(id);
            let ready = detokenizer.push(id)?;
            text.push_str(ready);
            output::print(ready)
        })?;
        let rest = detokenizer.finish();
        output::print(&format!("{rest}\n"))?;
        Ok(Answer { text: text + &rest, tokens, speed })
    }

    /// Generates after `prompt`, one call of `each` a token, until a stop token, the limit or the end of the context.
    pub fn answer(&mut self, prompt: &[u32], each: &mut dyn FnMut(u32) -> Result<()>) -> Result<Speed> {
        // What the session has seen already need not be fed again.
        let kept = self.session.keep_prefix(prompt);
        let started = Instant::now();
        let prompt = self.prefill(&prompt[kept..])?;
        let (mut first_token, mut written) = (None, 0);
        let request = Request { prompt: prompt.last_chunk, most: self.most, stop: &self.stop };
        let each: &mut dyn FnMut(u32) -> Result<()> = &mut |token| {
            first_token.get_or_insert_with(Instant::now);
            written += 1;
            each(token)
        };
        let end = match &mut self.speculation {
            None => self.session.generate(request, &mut self.sampler, each)?,
            Some(speculation) => {
                speculation.counts = Counts::default();
                self.session.generate_speculating(request, &mut self.sampler, speculation, each)?
            }
        };
        let ended = Instant::now();
        let first_token = first_token.unwrap_or(ended);
        let full = (end == End::Context).then(|| self.session.plan().program.context as usize);
        let (prefill, decode) = (first_token - started, ended - first_token);
        let drafts = self.speculation.as_ref().map(|speculation| speculation.counts);
        Ok(Speed { prompt: prompt.tokens, prefill, written, decode, full, drafts })
    }

    /// Feeds all but the last chunk of a prompt, with a bar.
    fn prefill<'a>(&mut self, prompt: &'a [u32]) -> Result<Prompt<'a>> {
        self.check_room(prompt.len())?;
        let mut pieces = self.session.pieces(prompt.len());
        let last = pieces.pop().unwrap_or_default();
        let bar = progress::tokens("reading", prompt.len() as u64);
        for piece in pieces {
            self.session.feed(&prompt[piece.clone()], Asked::None, None, |_, _| {})?;
            bar.inc(piece.len() as u64);
        }
        bar.finish_and_clear();
        Ok(Prompt { tokens: prompt.len(), last_chunk: &prompt[last] })
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

/// What was generated, and how that went.
pub struct Answer {
    pub text: String,
    pub tokens: Vec<u32>,
    pub speed: Speed,
}

/// A prompt of which only the last chunk is still to be fed.
struct Prompt<'a> {
    tokens: usize,
    last_chunk: &'a [u32],
}

/// How an answer went.
pub struct Speed {
    /// Tokens of the prompt that were computed.
    pub prompt: usize,
    prefill: Duration,
    pub written: u32,
    decode: Duration,
    /// The context, where it ended the answer.
    full: Option<usize>,
    /// Where tokens were guessed.
    pub drafts: Option<Counts>,
}

impl Speed {
    /// Tokens a second.
    pub fn prefill_rate(&self) -> f64 {
        per_second(self.prompt as f64, self.prefill)
    }

    /// Tokens a second. The first one comes out of the prompt's pass.
    pub fn decode_rate(&self) -> f64 {
        per_second(self.written.saturating_sub(1) as f64, self.decode)
    }

    /// For a person, on stderr.
    pub fn report(&self) {
        self.report_full_context();
        eprintln!(
            "[prefill: {} tokens, {:.1} tokens/s; decode: {} tokens, {:.1} tokens/s]",
            self.prompt,
            self.prefill_rate(),
            self.written,
            self.decode_rate()
        );
        if let Some(Counts { rounds, drafted, accepted, .. }) = self.drafts {
            let share = 100.0 * accepted as f64 / (drafted as f64).max(1.0);
            eprintln!("[drafts: {accepted} of {drafted} accepted ({share:.0} %), {rounds} passes]");
        }
    }

    /// Says so where the context ended the answer.
    pub fn report_full_context(&self) {
        if let Some(context) = self.full {
            eprintln!("[the context of {context} positions is full]");
        }
    }
}

fn per_second(n: f64, time: Duration) -> f64 {
    if n > 0.0 { n / time.as_secs_f64().max(1e-9) } else { 0.0 }
}
