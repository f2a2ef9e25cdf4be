//! `gemma4c run --file`: many prompts from a file, answered together, each as if it were alone.
//!
//! Nothing runs before every line was read and found right. Answers are written in the prompts' order, each as soon as
//! those before it are there, so that a run that was cut goes on where it stopped: what the output holds already is not
//! computed again. Every answer carries hashes of what it is an answer to, so that answers of other prompts, plans or
//! settings are never taken for those of this run.

use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use gemma4c_models::chat::{ChatTemplate, Message};
use gemma4c_models::tokenizer::{EncodeOptions, Tokenizer};
use gemma4c_plan::{Plan, Sampling, Vocab};
use gemma4c_runtime::engine::{DraftCounts, Request};
use serde_json::{Map, Value, json};
use xxhash_rust::xxh3::xxh3_64;

use super::generation::DraftArg;
use super::lora::LoraArgs;
use super::plan_file::{EngineArgs, PlanArgs};
use super::tokenize::read_text;
use crate::device::EngineOptions;
use crate::model::Completion;
use crate::model::completion::{AnyEngine, Job, News, answer_all};
use crate::output::{self, OutputFile};
use crate::reader::Reader;
use crate::{files, progress};

/// What a line has where it says nothing else.
pub struct Defaults {
    pub most: u32,
    pub sampling: Sampling,
    pub seed: u64,
}

/// Where prompts come from, where answers go, and how many are worked on at once.
pub struct Batch<'a> {
    pub plan: &'a PlanArgs,
    pub lora: &'a LoraArgs,
    pub prompts: &'a Path,
    pub answers: &'a OutputFile,
    /// Begin anew, whatever the answers' file has.
    pub restart: bool,
    pub sequences: Option<u32>,
    pub engine: EngineArgs,
    pub draft: &'a DraftArg,
}

pub fn run(batch: &Batch<'_>, defaults: impl FnOnce(&Plan) -> Result<Defaults>) -> Result<()> {
    let Batch { prompts, answers, .. } = batch;
    if *prompts != Path::new("-") {
        files::regular(prompts)?;
    }
    let text = read_text(prompts)?;

    let plan = batch.plan.read()?;
    let checksum = plan.checksum()?;
    let defaults = defaults(&plan)?;
    let reader = Lines::new(&plan, defaults)?;
    let mut requests = Vec::new();
    for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
        let place = || format!("{}, line {number}", prompts.display());
        requests.push((number, reader.asked(line).with_context(place)?));
    }
    let kept = if batch.restart { Kept::default() } else { Kept::read(answers)? };
    let tokenizer = reader.vocab.as_ref().map(Tokenizer::new).transpose()?;
    let suppress = reader.vocab.map(|vocab| vocab.suppress).unwrap_or_default();
    let drafts = batch.draft.for_engine(&plan);
    let options = EngineOptions { sequences: batch.sequences, suppress, drafts, ..batch.engine.options() };
    let adapters = batch.lora.for_seat(batch.plan, &plan)?;
    let mut engine = batch.plan.open_engine(plan, options)?;
    if let Some(adapter) = adapters.fill_one(&mut engine)? {
        requests.iter_mut().for_each(|(_, asked)| asked.request.adapter = Some(adapter));
    }
    for (number, asked) in &requests {
        engine.check(&asked.request).with_context(|| format!("{}, line {number}", prompts.display()))?;
    }
    // Devices round differently: an answer of another one is not an answer of this run.
    let device = engine.device().name();
    let work: Vec<Work> = requests
        .into_iter()
        .map(|(_, asked)| Work { origin: Origin::of(checksum, &device, &asked, adapters.checksum()), asked })
        .collect();
    kept.check(answers, &work)?;
    let file = kept.continued(answers)?;
    answer(&mut engine, work, kept.origins.len(), tokenizer.as_ref(), file, answers)
}

/// What a line asks for.
struct Asked {
    request: Request,
    /// Texts that end the answer.
    stop: Vec<String>,
}

/// What a line asks for, and what its answer will be marked with.
struct Work {
    origin: Origin,
    asked: Asked,
}

/// What an answer is an answer to, by hashes: equal ones give equal answers.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Origin {
    plan: u64,
    prompt: u64,
    settings: u64,
}

impl Origin {
    fn of(plan: u64, device: &str, asked: &Asked, adapter: Option<u64>) -> Origin {
        let Request { prompt, most, sampling, seed, stop: tokens, .. } = &asked.request;
        let stop = &asked.stop;
        let prompt: Vec<u8> = prompt.iter().flat_map(|id| id.to_le_bytes()).collect();
        Origin {
            plan: xxh3_64(format!("{plan} {device}").as_bytes()),
            prompt: xxh3_64(&prompt),
            settings: xxh3_64(format!("{most} {sampling:?} {seed} {tokens:?} {stop:?} {adapter:?}").as_bytes()),
        }
    }

    fn parse(text: &str) -> Option<Origin> {
        let mut parts = text.split('-').map(|part| u64::from_str_radix(part, 16).ok());
        let origin = Origin { plan: parts.next()??, prompt: parts.next()??, settings: parts.next()?? };
        parts.next().is_none().then_some(origin)
    }

    /// What of this run another answer was not made with.
    fn differs(&self, other: &Origin) -> &'static str {
        match (self.prompt == other.prompt, self.plan == other.plan) {
            (false, _) => "another prompt",
            (true, false) => "another plan or device",
            (true, true) => "other settings",
        }
    }
}

impl Display for Origin {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}-{:016x}-{:016x}", self.plan, self.prompt, self.settings)
    }
}

/// Answers all requests but the first `kept`.
fn answer(
    engine: &mut AnyEngine,
    work: Vec<Work>,
    kept: usize,
    tokenizer: Option<&Tokenizer>,
    mut file: Box<dyn Write>,
    path: &OutputFile,
) -> Result<()> {
    let bar = progress::answers(work.len() as u64);
    bar.inc(kept as u64);
    let origins: Vec<Origin> = work.iter().map(|work| work.origin).collect();
    let jobs = work.into_iter().skip(kept).map(|Work { asked: Asked { request, stop }, .. }| {
        let reader = tokenizer.map(|tokenizer| Reader::plain(tokenizer, &stop));
        Job { request, reader }
    });
    // Finished before others that were asked for earlier.
    let mut early: BTreeMap<usize, String> = BTreeMap::new();
    let mut next = kept;
    let (mut tokens, mut read) = (0u64, 0u64);
    let started = Instant::now();
    answer_all(engine, jobs, &mut |news| {
        match news {
            News::Reads(more) => read += more,
            News::Token => tokens += 1,
            News::Answer(index, Completion { text, tokens, finish, .. }) => {
                let (text, hash) = (tokenizer.map(|_| text), origins[kept + index].to_string());
                let line = json!({ "tokens": tokens, "text": text, "finish_reason": finish.name(), "hash": hash });
                early.insert(kept + index, format!("{line}\n"));
                bar.inc(1);
            }
            News::Failed(index, error) => {
                return Err(error).with_context(|| format!("prompt {} of the file", kept + index + 1));
            }
            News::Step => bar.set_message(format!("{tokens} tokens")),
        }
        while let Some(line) = early.remove(&next) {
            let written = file.write_all(line.as_bytes()).and_then(|()| file.flush());
            // A closed pipe is no failure, so it is no failure of writing either.
            match path.is_stdout() {
                true => written?,
                false => written.with_context(|| format!("cannot write {}", path.display()))?,
            }
            next += 1;
        }
        Ok(())
    })?;
    bar.finish_and_clear();
    let seconds = started.elapsed().as_secs_f64();
    let (reading, writing) = (read as f64 / seconds, tokens as f64 / seconds);
    let already = if kept > 0 { format!("{kept} kept, ") } else { String::new() };
    eprintln!(
        "[{already}{} answers in {seconds:.1} s: {read} prompt tokens, {reading:.0} a second; {tokens} tokens, {writing:.0} a second]",
        next - kept
    );
    let DraftCounts { rounds, drafted, accepted, .. } = engine.draft_counts();
    if drafted > 0 {
        let share = 100.0 * accepted as f64 / drafted as f64;
        eprintln!("[drafts: {accepted} of {drafted} accepted ({share:.0} %), made {rounds} times]");
    }
    Ok(())
}

/// Turns lines into requests.
struct Lines {
    defaults: Defaults,
    vocab: Option<Vocab>,
    vocab_size: u32,
    /// Tokens that hold the places of pictures.
    placeholders: Vec<u32>,
    tokenizer: Option<Tokenizer>,
    template: Option<ChatTemplate>,
    stop: Arc<[u32]>,
}

/// Everything that a line may have.
const FIELDS: [&str; 10] =
    ["prompt", "messages", "tokens", "max_tokens", "temperature", "top_k", "top_p", "seed", "stop", "ignore_eos"];

impl Lines {
    fn new(plan: &Plan, defaults: Defaults) -> Result<Lines> {
        let vocab = plan.vocab.clone();
        let template = vocab.as_ref().and_then(|vocab| vocab.chat_template.as_deref());
        Ok(Lines {
            defaults,
            vocab_size: plan.model.vocab_size,
            placeholders: plan.towers.iter().map(|tower| tower.tokens.placeholder).collect(),
            tokenizer: vocab.as_ref().map(Tokenizer::new).transpose()?,
            template: template.map(ChatTemplate::new).transpose()?,
            stop: vocab.as_ref().map(|vocab| vocab.stop.clone()).unwrap_or_default().into(),
            vocab,
        })
    }

    fn asked(&self, line: &str) -> Result<Asked> {
        let value: Value = serde_json::from_str(line).context("it is no JSON")?;
        let Value::Object(fields) = value else { bail!("it is no JSON object: {{\"prompt\": \"...\"}}") };
        if let Some(unknown) = fields.keys().find(|key| !FIELDS.contains(&key.as_str())) {
            bail!("unknown field {unknown:?}; there are {}", FIELDS.join(", "));
        }
        let (prompt, snapshot_at) = self.prompt(&fields)?;
        if let Some(token) = prompt.iter().find(|token| self.placeholders.contains(token)) {
            bail!(
                "token {token} holds the place of a picture or a sound, and prompts of a file have none: use run --image or --audio"
            );
        }
        let sampling = Sampling {
            temperature: number(&fields, "temperature")?.map_or(self.defaults.sampling.temperature, |n| n as f32),
            top_p: number(&fields, "top_p")?.map_or(self.defaults.sampling.top_p, |n| n as f32),
            top_k: count(&fields, "top_k")?.unwrap_or(self.defaults.sampling.top_k),
        };
        let seed = match fields.get("seed") {
            None | Some(Value::Null) => self.defaults.seed,
            Some(seed) => seed.as_u64().with_context(|| format!("seed {seed} is no whole number"))?,
        };
        let ignores_eos = match fields.get("ignore_eos") {
            None | Some(Value::Null) => false,
            Some(flag) => flag.as_bool().with_context(|| format!("ignore_eos {flag} is neither true nor false"))?,
        };
        let stop = stop_strings(&fields)?;
        if !stop.is_empty() {
            self.tokenizer().context("stop")?;
        }
        let request = Request {
            most: count(&fields, "max_tokens")?.unwrap_or(self.defaults.most),
            sampling,
            seed,
            stop: if ignores_eos { Arc::default() } else { Arc::clone(&self.stop) },
            snapshot_at,
            ..Request::greedy(prompt, 0)
        };
        Ok(Asked { request, stop })
    }

    /// The ids of a line's prompt, and where others may part from it.
    fn prompt(&self, fields: &Map<String, Value>) -> Result<(Vec<u32>, Vec<u32>)> {
        let given: Vec<&str> = FIELDS[..3].iter().copied().filter(|key| fields.contains_key(*key)).collect();
        let [kind] = given[..] else {
            bail!("it has {} of prompt, messages and tokens; exactly one is needed", given.len());
        };
        let value = &fields[kind];
        let ids = match (kind, value) {
            ("prompt", Value::String(text)) => {
                self.tokenizer()?.encode(text, EncodeOptions { add_bos: true, parse_special: false })
            }
            ("prompt", _) => bail!("prompt is no text"),
            ("tokens", Value::Array(ids)) => {
                let id = |id: &Value| {
                    let whole = id.as_u64().and_then(|id| u32::try_from(id).ok());
                    whole.with_context(|| format!("tokens: {id} is no token id"))
                };
                ids.iter().map(id).collect::<Result<_>>()?
            }
            ("tokens", _) => bail!("tokens is no list of token ids"),
            _ => return self.conversation(value),
        };
        Ok((ids, Vec::new()))
    }

    fn conversation(&self, value: &Value) -> Result<(Vec<u32>, Vec<u32>)> {
        let mut messages: Vec<Message> = serde_json::from_value(value.clone()).context("messages")?;
        messages.iter_mut().for_each(Message::parse_arguments);
        ensure!(!messages.is_empty(), "messages is empty");
        let tokenizer = self.tokenizer()?;
        let template = self.template.as_ref().context("the model has no chat template: give a prompt, not messages")?;
        let text = template.render(&messages, &[], true, &Map::new())?;
        // The template spells the beginning-of-sequence token itself.
        let ids = tokenizer.encode(&text, EncodeOptions { add_bos: false, parse_special: true });
        // Conversations under one system prompt have it in common.
        let end = tokenizer.encode("<turn|>", EncodeOptions { add_bos: false, parse_special: true });
        let has_system = ["system", "developer"].contains(&messages[0].role.as_str());
        let after_system = match end[..] {
            [end] if has_system => ids.iter().position(|id| *id == end).map(|at| at as u32 + 1),
            _ => None,
        };
        Ok((ids, after_system.into_iter().collect()))
    }

    fn tokenizer(&self) -> Result<&Tokenizer> {
        self.tokenizer.as_ref().with_context(|| {
            format!("the model has no vocabulary: give ids from 0 to {} as tokens", self.vocab_size - 1)
        })
    }
}

/// A text or a list of texts.
fn stop_strings(fields: &Map<String, Value>) -> Result<Vec<String>> {
    let given = match fields.get("stop") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(list)) => list.clone(),
        Some(text) => vec![text.clone()],
    };
    let text = |value: Value| match value {
        Value::String(text) if !text.is_empty() => Ok(text),
        other => bail!("stop {other} is no text that an answer could have"),
    };
    given.into_iter().map(text).collect()
}

fn number(fields: &Map<String, Value>, key: &str) -> Result<Option<f64>> {
    match fields.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => value.as_f64().map(Some).with_context(|| format!("{key} {value} is no number")),
    }
}

fn count(fields: &Map<String, Value>, key: &str) -> Result<Option<u32>> {
    match fields.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => {
            let count = value.as_u64().and_then(|count| u32::try_from(count).ok());
            count.map(Some).with_context(|| format!("{key} {value} is no count"))
        }
    }
}

/// Answers that an earlier run has left.
#[derive(Default)]
struct Kept {
    origins: Vec<Origin>,
    /// Their bytes: a line that was cut comes after them.
    bytes: u64,
}

impl Kept {
    fn read(path: &OutputFile) -> Result<Kept> {
        if path.is_stdout() {
            return Ok(Kept::default());
        }
        let text = match fs::read(path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
        };
        let mut kept = Kept::default();
        for line in text.split_inclusive(|byte| *byte == b'\n') {
            // The last line of a run that was cut is computed again.
            if !line.ends_with(b"\n") {
                break;
            }
            let place = || format!("{}, line {}", path.display(), kept.origins.len() + 1);
            let answer: Value = serde_json::from_slice(line).unwrap_or_default();
            let is_answer = answer["tokens"].is_array() && answer["finish_reason"].is_string();
            ensure!(is_answer, "{}: this is no answer, so the file is not continued: give another with -o", place());
            let origin = answer["hash"].as_str().and_then(Origin::parse);
            let origin = origin.with_context(|| {
                format!("{}: the answer does not say what it is an answer to: --restart replaces all answers", place())
            })?;
            kept.origins.push(origin);
            kept.bytes += line.len() as u64;
        }
        Ok(kept)
    }

    /// Refuses answers that are not of this run.
    fn check(&self, path: &OutputFile, work: &[Work]) -> Result<()> {
        let remedy = "--restart replaces all answers, or give another file with -o";
        for (at, found) in self.origins.iter().enumerate() {
            let place = || format!("{}, line {}", path.display(), at + 1);
            match work.get(at) {
                None => bail!("{}: there are {} prompts and more answers: {remedy}", place(), work.len()),
                Some(work) if work.origin != *found => {
                    bail!("{}: the answer is of {}: {remedy}", place(), work.origin.differs(found));
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// Where the next answer goes.
    fn continued(&self, path: &OutputFile) -> Result<Box<dyn Write>> {
        if path.is_stdout() {
            return Ok(Box::new(io::stdout()));
        }
        let cannot_write = || format!("cannot write {}", path.display());
        let mut file: File = output::open_kept(path)?;
        file.set_len(self.bytes).with_context(cannot_write)?;
        file.seek(SeekFrom::End(0)).with_context(cannot_write)?;
        Ok(Box::new(file))
    }
}
