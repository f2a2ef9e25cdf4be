//! Text from a session, as `run` and `demo` write it: a prompt is read, tokens are picked and given out one by one.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Error, Result};
use gemma4c_models::tokenizer::Tokenizer;
use gemma4c_plan::{Plan, Sampling};
use gemma4c_runtime::engine::{self, DraftSource, Finish};
use gemma4c_runtime::{
    Asked, Counts, Dry, MOST_DRAFTS, MOST_LOOKED_UP, Penalties, Request, RuntimeError, Sampler, Session, Speculation,
    any_seed,
};

use gemma4c_serve::Speech;

use super::answer::Answer;
use super::speed::Speed;
use crate::reader::{Reader, Shown};
use crate::{output, progress};

/// How the next token is picked; what is not given is as the plan says.
#[derive(clap::Args)]
pub struct SamplingArgs {
    /// 0 always takes the likeliest token, 2 is the most [default: the plan's; Gemma 4 advises 1.0]
    #[arg(long, value_name = "T", visible_alias = "temperature")]
    temp: Option<f32>,

    /// Consider only the K likeliest tokens; 0 or -1 considers all [default: the plan's; Gemma 4 advises 64]
    #[arg(long, value_name = "K", value_parser = top_k, allow_negative_numbers = true)]
    top_k: Option<u32>,

    /// Consider the likeliest tokens that together have this probability, 0 to 1 [default: the plan's; Gemma 4 advises
    /// 0.95]
    #[arg(long, value_name = "P")]
    top_p: Option<f32>,

    /// The same seed gives the same text [default: a random one, which is printed; 0 for `demo` and `run --file`]
    #[arg(long, value_name = "N", value_parser = seed, allow_negative_numbers = true)]
    seed: Option<u64>,
}

/// All tokens are considered by 0, or by -1, which is vLLM's word for it.
fn top_k(text: &str) -> Result<u32, String> {
    let count = if text == "-1" { Some(0) } else { text.parse().ok() };
    count.ok_or_else(|| "expected a number of tokens, or -1 for all".into())
}

/// A seed may be negative: all 64 bits count.
fn seed(text: &str) -> Result<u64, String> {
    let seed = text.parse().ok().or_else(|| text.parse::<i64>().ok().map(|seed| seed as u64));
    seed.ok_or_else(|| "expected a whole number of 64 bits".into())
}

/// Where a seed comes from that was not given.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Unseeded {
    Zero,
    Random,
}

impl SamplingArgs {
    /// The plan's rule where nothing else was given. Tokens in `suppress` are never picked.
    pub fn sampler(&self, plan: Sampling, suppress: Vec<u32>, unseeded: Unseeded) -> Result<Sampler, RuntimeError> {
        let sampling = Sampling {
            temperature: self.temp.unwrap_or(plan.temperature),
            top_k: self.top_k.unwrap_or(plan.top_k),
            top_p: self.top_p.unwrap_or(plan.top_p),
        };
        let seed = self.seed.unwrap_or_else(|| match unseeded {
            Unseeded::Zero => 0,
            // Of 32 bits: short enough to type, and exact in whatever reads JSON.
            Unseeded::Random => any_seed() >> 32,
        });
        Sampler::new(sampling, seed, suppress)
    }

    pub fn has_seed(&self) -> bool {
        self.seed.is_some()
    }
}

/// What makes tokens less likely. Names and ranges are those of the HTTP API.
#[derive(clap::Args)]
pub struct PenaltyArgs {
    /// Leave out tokens less likely than this share of the likeliest one's probability, 0 to 1 [default: 0]
    #[arg(long, value_name = "P", conflicts_with = "file")]
    min_p: Option<f32>,

    /// Make tokens of the prompt and of the text less likely: their logits are divided by this, 0.01 to 100 [default:
    /// 1]
    #[arg(long, value_name = "X", visible_alias = "repeat-penalty", conflicts_with = "file")]
    repetition_penalty: Option<f32>,

    /// Make tokens less likely that were written before, -2 to 2 [default: 0]
    #[arg(long, value_name = "X", allow_negative_numbers = true, conflicts_with = "file")]
    presence_penalty: Option<f32>,

    /// Make tokens less likely each time they were written, -2 to 2 [default: 0]
    #[arg(long, value_name = "X", allow_negative_numbers = true, conflicts_with = "file")]
    frequency_penalty: Option<f32>,

    /// Make tokens less likely that go on with what was said before, 0 to 100: DRY, with a base of 1.75 from matches of
    /// 2 tokens on, across no line's end, colon, quotation mark or asterisk [default: 0]
    #[arg(long, value_name = "X", conflicts_with = "file")]
    dry_multiplier: Option<f32>,
}

impl PenaltyArgs {
    /// What ends a match of DRY is found by what a plan's tokens spell.
    pub fn penalties(&self, plan: &Plan) -> Result<Penalties> {
        let usual = Penalties::default();
        let dry = match self.dry_multiplier {
            None => usual.dry,
            Some(multiplier) => {
                let breakers = match plan.vocab {
                    None => usual.dry.breakers,
                    Some(_) => Speech::new(plan)?.breakers(None),
                };
                Dry { multiplier, breakers, ..usual.dry }
            }
        };
        Ok(Penalties {
            presence: self.presence_penalty.unwrap_or(usual.presence),
            frequency: self.frequency_penalty.unwrap_or(usual.frequency),
            repetition: self.repetition_penalty.unwrap_or(usual.repetition),
            min_p: self.min_p.unwrap_or(usual.min_p),
            dry,
            biases: usual.biases,
            last: usual.last,
        })
    }
}

/// A number of tokens to generate; -1 is as many as the context has room for.
pub fn most_tokens(text: &str) -> Result<u32, String> {
    let count = if text == "-1" { Some(u32::MAX) } else { text.parse().ok() };
    count.ok_or_else(|| "expected a number of tokens, or -1 for as many as fit".into())
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
            DraftArg::Auto | DraftArg::File(_) => has_drafter.then(|| Speculation::new(DraftSource::Drafter, None)),
            DraftArg::Ngram => Some(Speculation::new(DraftSource::Lookup, None)),
            DraftArg::Steps(_) if !has_drafter => return Err(RuntimeError::NoDrafter),
            DraftArg::Steps(steps) => Some(Speculation::new(DraftSource::Drafter, Some(steps))),
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

    /// Whether the drafter that comes with a model is of use.
    pub fn is_by_drafter(&self) -> bool {
        matches!(self, DraftArg::Auto | DraftArg::Steps(_))
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
    /// Whether the answer is to end where it stands. It is asked before each chunk of a prompt and after each token; a
    /// yes is given once.
    pub is_interrupted: Arc<dyn Fn() -> bool>,
}

/// Why an answer ends before the model ends it.
enum Cut {
    /// A stop string came.
    Stopped,
    Interrupted,
    Failed(Error),
}

impl From<RuntimeError> for Cut {
    fn from(error: RuntimeError) -> Cut {
        Cut::Failed(error.into())
    }
}

impl Generation {
    pub fn new(session: Session, sampler: Sampler, stop: Vec<u32>, most: u32) -> Generation {
        Generation { session, sampler, stop, most, speculation: None, is_interrupted: Arc::new(|| false) }
    }

    /// The seed that answers depend on, if they depend on chance.
    pub fn sampled_by(&self) -> Option<u64> {
        (self.sampler.sampling().temperature > 0.0).then(|| self.sampler.seed())
    }

    /// Generates after `prompt` and prints the text as it comes; returns it.
    pub fn stream(&mut self, prompt: &[u32], tokenizer: &Tokenizer) -> Result<Answer> {
        let answer = self.write(prompt, Reader::plain(tokenizer, &[]), &mut |piece| match piece {
            Shown::Text(text) | Shown::Thought(text) => output::print(text),
            // Without tools there are none.
            Shown::Call(_) | Shown::Arguments(_) => Ok(()),
        })?;
        output::print("\n")?;
        Ok(answer)
    }

    /// Generates after `prompt` and shows each piece of the answer as it comes.
    pub fn write(
        &mut self,
        prompt: &[u32],
        mut reader: Reader<'_>,
        show: &mut dyn FnMut(&Shown) -> Result<()>,
    ) -> Result<Answer> {
        let (mut text, mut thoughts, mut tokens) = (String::new(), String::new(), Vec::new());
        let mut take = |pieces: Vec<Shown>| {
            for piece in &pieces {
                match piece {
                    Shown::Text(more) => text.push_str(more),
                    Shown::Thought(more) => thoughts.push_str(more),
                    Shown::Call(_) | Shown::Arguments(_) => {}
                }
                show(piece)?;
            }
            Ok(()) as Result<()>
        };
        let mut has_stopped = false;
        let (speed, finish) = self.answer(prompt, &mut |id| {
            tokens.push(id);
            let (pieces, stops) = reader.push(id)?;
            has_stopped = stops;
            take(pieces)?;
            Ok(if stops { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        })?;
        take(reader.finish(finish, has_stopped))?;
        Ok(Answer { text, thoughts, tokens, finish, prompt_tokens: prompt.len(), speed })
    }

    /// Generates after `prompt`, one call of `each` a token, until a stop token, the limit, the end of the context, or
    /// as long as `each` goes on. However it ends, the session has seen the prompt and what was generated as far as
    /// they were computed, so the next prompt is answered as in a fresh one.
    pub fn answer(
        &mut self,
        prompt: &[u32],
        each: &mut dyn FnMut(u32) -> Result<ControlFlow<()>>,
    ) -> Result<(Speed, Finish)> {
        // What the session has seen already need not be fed again.
        let kept = self.session.keep_prefix(prompt);
        self.sampler.begin(prompt);
        let started = Instant::now();
        let (mut first_token, mut written) = (None, 0);
        let is_interrupted = Arc::clone(&self.is_interrupted);
        let told: &mut dyn FnMut(u32) -> Result<(), Cut> = &mut |token| {
            first_token.get_or_insert_with(Instant::now);
            written += 1;
            match each(token).map_err(Cut::Failed)? {
                ControlFlow::Break(()) => Err(Cut::Stopped),
                ControlFlow::Continue(()) if is_interrupted() => Err(Cut::Interrupted),
                ControlFlow::Continue(()) => Ok(()),
            }
        };
        let prompt = &prompt[kept..];
        let finish = match self.generate(prompt, told) {
            Ok(finish) => finish,
            Err(Cut::Stopped) => Finish::Stop,
            Err(Cut::Interrupted) => Finish::Cancelled,
            Err(Cut::Failed(error)) => return Err(error),
        };
        let ended = Instant::now();
        let first_token = first_token.unwrap_or(ended);
        let full = (finish == Finish::Context).then(|| self.session.plan().program.context as usize);
        let (prefill, decode) = (first_token - started, ended - first_token);
        let drafts = self.speculation.as_ref().map(|speculation| speculation.counts);
        Ok((Speed { prompt: prompt.len(), prefill, written, decode, full, drafts }, finish))
    }

    fn generate(&mut self, prompt: &[u32], each: &mut dyn FnMut(u32) -> Result<(), Cut>) -> Result<Finish, Cut> {
        let last_chunk = self.prefill(prompt)?;
        let request = Request { prompt: last_chunk, most: self.most, stop: &self.stop };
        match &mut self.speculation {
            None => self.session.generate(request, &mut self.sampler, each),
            Some(speculation) => {
                speculation.counts = Counts::default();
                self.session.generate_speculating(request, &mut self.sampler, speculation, each)
            }
        }
    }

    /// Feeds all but the last chunk of a prompt, with a bar, and returns the last.
    fn prefill<'a>(&mut self, prompt: &'a [u32]) -> Result<&'a [u32], Cut> {
        self.check_room(prompt.len())?;
        let mut pieces = self.session.pieces(prompt.len());
        let last = pieces.pop().unwrap_or_default();
        let bar = progress::tokens("reading", prompt.len() as u64);
        let fed = pieces.into_iter().try_for_each(|piece| {
            self.check_interrupt()?;
            self.session.feed(&prompt[piece.clone()], Asked::None, None, |_, _| {})?;
            bar.inc(piece.len() as u64);
            Ok(())
        });
        bar.finish_and_clear();
        fed.and_then(|()| self.check_interrupt()).map(|()| &prompt[last])
    }

    fn check_interrupt(&self) -> Result<(), Cut> {
        if (self.is_interrupted)() { Err(Cut::Interrupted) } else { Ok(()) }
    }

    /// A prompt that does not fit is refused before its first chunk is computed.
    fn check_room(&self, tokens: usize) -> Result<(), RuntimeError> {
        let (context, used) = (self.session.plan().program.context, self.session.position());
        let wanted = used as u64 + tokens as u64;
        match wanted > context as u64 {
            true => Err(RuntimeError::ContextOverflow { context, used, wanted }),
            false => Ok(()),
        }
    }
}
