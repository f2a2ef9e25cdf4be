//! `gemma4c run --file`: many prompts from a file, answered together, each as if it were alone.
//!
//! Nothing runs before every line was read and found right. Answers are written in the prompts' order, each as soon as those before it are
//! there, so that a run that was cut goes on where it stopped: what the output holds already is not computed again.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use gemma4c_models::chat::{ChatTemplate, Message};
use gemma4c_models::tokenizer::{EncodeOptions, Tokenizer};
use gemma4c_plan::{Plan, Sampling, Vocab};
use gemma4c_runtime::engine::{Device, DraftCounts, Engine, Event, Finish, Id, Request};
use serde_json::{Map, Value, json};

use super::generation::DraftArg;
use super::plan_file::{self, EngineArgs, EngineOptions, PlanArgs};
use crate::{output, progress};

/// What a line has where it says nothing else.
pub struct Defaults {
    pub most: u32,
    pub sampling: Sampling,
    pub seed: u64,
}

/// Where prompts come from, where answers go, and how many are worked on at once.
pub struct Batch<'a> {
    pub plan: &'a PlanArgs,
    pub prompts: &'a Path,
    pub answers: &'a Path,
    pub sequences: Option<u32>,
    pub engine: EngineArgs,
    pub draft: DraftArg,
}

pub fn run(batch: &Batch<'_>, defaults: impl FnOnce(&Plan) -> Result<Defaults>) -> Result<()> {
    let Batch { prompts, answers, .. } = batch;
    output::may_be_written(answers)?;
    let same = fs::canonicalize(answers).is_ok_and(|path| fs::canonicalize(prompts).is_ok_and(|other| other == path));
    ensure!(!same, "{} would be overwritten by its own answers: give another file with -o", prompts.display());
    plan_file::regular(prompts)?;
    let text = fs::read_to_string(prompts).with_context(|| format!("cannot read {}", prompts.display()))?;

    let plan = plan_file::read(&batch.plan.plan)?;
    let defaults = defaults(&plan)?;
    let reader = Reader::new(&plan, defaults)?;
    let mut requests = Vec::new();
    for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
        let place = || format!("{}, line {number}", prompts.display());
        requests.push((number, reader.request(line).with_context(place)?));
    }
    let done = Done::read(answers)?;
    ensure!(
        done.lines <= requests.len(),
        "{} has {} answers, {} has {} prompts: these answers are not of these prompts",
        answers.display(),
        done.lines,
        prompts.display(),
        requests.len()
    );
    let tokenizer = reader.vocab.as_ref().map(Tokenizer::new).transpose()?;
    let suppress = reader.vocab.map(|vocab| vocab.suppress).unwrap_or_default();
    let drafts = batch.draft.for_engine(&plan);
    let (engine, sequences) = (batch.engine, batch.sequences);
    let options = EngineOptions { engine, sequences, suppress, drafts, ..EngineOptions::default() };
    let mut engine = batch.plan.open_engine(plan, options)?;
    for (number, request) in &requests {
        engine.check(request).with_context(|| format!("{}, line {number}", prompts.display()))?;
    }
    let file = done.continued(answers)?;
    let requests = requests.into_iter().map(|(_, request)| request);
    answer(&mut engine, requests, done.lines, tokenizer.as_ref(), file, answers)
}

/// Answers all requests but the first `done`.
fn answer(
    engine: &mut Engine<Box<dyn Device>>,
    requests: impl ExactSizeIterator<Item = Request>,
    done: usize,
    tokenizer: Option<&Tokenizer>,
    mut file: File,
    path: &Path,
) -> Result<()> {
    let bar = progress::answers(requests.len() as u64);
    bar.inc(done as u64);
    let mut requests = requests.enumerate().skip(done);
    let mut running: BTreeMap<Id, (usize, Vec<u32>)> = BTreeMap::new();
    // Finished before others that were asked for earlier.
    let mut early: BTreeMap<usize, String> = BTreeMap::new();
    let mut next = done;
    let ahead = 2 * engine.limits().slots as usize;
    let (mut tokens, mut read) = (0u64, 0u64);
    let started = Instant::now();
    let mut prompts = BTreeMap::new();
    loop {
        for (index, request) in requests.by_ref().take(ahead.saturating_sub(running.len())) {
            let prompt = request.prompt.len() as u64;
            let id = engine.submit(request)?;
            prompts.insert(id, prompt);
            running.insert(id, (index, Vec::new()));
        }
        if running.is_empty() {
            break;
        }
        for event in engine.step()? {
            match event {
                // What was kept is not read again.
                Event::Admitted { id, cached } => read += prompts.remove(&id).unwrap_or(0) - cached as u64,
                Event::Prompt { .. } | Event::Drafted { .. } => {}
                Event::Token { id, token, .. } => {
                    tokens += 1;
                    if let Some((_, tokens)) = running.get_mut(&id) {
                        tokens.push(token);
                    }
                }
                Event::Finished { id, reason } => {
                    let Some((index, tokens)) = running.remove(&id) else { continue };
                    early.insert(index, line(&tokens, reason, tokenizer)?);
                    bar.inc(1);
                }
                Event::Failed { id, error } => {
                    let index = running.get(&id).map_or(0, |(index, _)| *index);
                    return Err(error).with_context(|| format!("prompt {} of the file", index + 1));
                }
            }
        }
        bar.set_message(format!("{tokens} tokens"));
        while let Some(line) = early.remove(&next) {
            file.write_all(line.as_bytes()).with_context(|| format!("cannot write {}", path.display()))?;
            next += 1;
        }
    }
    bar.finish_and_clear();
    let seconds = started.elapsed().as_secs_f64();
    let (reading, writing) = (read as f64 / seconds, tokens as f64 / seconds);
    eprintln!(
        "[{} answers in {seconds:.1} s: {read} prompt tokens, {reading:.0} a second; {tokens} tokens, {writing:.0} a second]",
        next - done
    );
    let DraftCounts { rounds, drafted, accepted, .. } = engine.draft_counts();
    if drafted > 0 {
        let share = 100.0 * accepted as f64 / drafted as f64;
        eprintln!("[drafts: {accepted} of {drafted} accepted ({share:.0} %), made {rounds} times]");
    }
    Ok(())
}

fn line(tokens: &[u32], reason: Finish, tokenizer: Option<&Tokenizer>) -> Result<String> {
    let text = match tokenizer {
        None => Value::Null,
        Some(tokenizer) => {
            let mut detokenizer = tokenizer.detokenizer(false);
            let mut text = String::new();
            for token in tokens {
                text.push_str(detokenizer.push(*token)?);
            }
            text.push_str(&detokenizer.finish());
            Value::String(text)
        }
    };
    Ok(format!("{}\n", json!({ "tokens": tokens, "text": text, "finish_reason": reason.name() })))
}

/// Turns lines into requests.
struct Reader {
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
const FIELDS: [&str; 9] =
    ["prompt", "messages", "tokens", "max_tokens", "temperature", "top_k", "top_p", "seed", "ignore_eos"];

impl Reader {
    fn new(plan: &Plan, defaults: Defaults) -> Result<Reader> {
        let vocab = plan.vocab.clone();
        let template = vocab.as_ref().and_then(|vocab| vocab.chat_template.as_deref());
        Ok(Reader {
            defaults,
            vocab_size: plan.model.vocab_size,
            placeholders: plan.towers.iter().map(|tower| tower.tokens.placeholder).collect(),
            tokenizer: vocab.as_ref().map(Tokenizer::new).transpose()?,
            template: template.map(ChatTemplate::new).transpose()?,
            stop: vocab.as_ref().map(|vocab| vocab.stop.clone()).unwrap_or_default().into(),
            vocab,
        })
    }

    fn request(&self, line: &str) -> Result<Request> {
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
        Ok(Request {
            most: count(&fields, "max_tokens")?.unwrap_or(self.defaults.most),
            sampling,
            seed,
            stop: if ignores_eos { Arc::default() } else { Arc::clone(&self.stop) },
            snapshot_at,
            ..Request::greedy(prompt, 0)
        })
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
        let messages: Vec<Message> = serde_json::from_value(value.clone()).context("messages")?;
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

/// What an earlier run has left.
struct Done {
    /// Whole answers.
    lines: usize,
    /// Their bytes: a line that was cut comes after them.
    bytes: u64,
}

impl Done {
    fn read(path: &Path) -> Result<Done> {
        let text = match fs::read(path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
        };
        let mut done = Done { lines: 0, bytes: 0 };
        for line in text.split_inclusive(|byte| *byte == b'\n') {
            let answer: Option<Value> = serde_json::from_slice(line).ok();
            let is_answer =
                answer.is_some_and(|answer| answer["tokens"].is_array() && answer["finish_reason"].is_string());
            match (is_answer, line.ends_with(b"\n")) {
                (true, true) => {}
                // The last line of a run that was cut is computed again.
                (_, false) => break,
                (false, true) => bail!(
                    "{}, line {}: this is no answer, so the file is not continued: give another with -o",
                    path.display(),
                    done.lines + 1
                ),
            }
            done.lines += 1;
            done.bytes += line.len() as u64;
        }
        Ok(done)
    }

    /// The file, ready for the next answer.
    fn continued(&self, path: &Path) -> Result<File> {
        let cannot_write = || format!("cannot write {}", path.display());
        let file = OpenOptions::new().create(true).append(true).open(path).with_context(cannot_write)?;
        file.set_len(self.bytes).with_context(cannot_write)?;
        Ok(file)
    }
}
