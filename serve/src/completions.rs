//! `POST /v1/completions`: text or token ids, continued as they stand.

use std::sync::Arc;

use gemma4c_models::tokenizer::EncodeOptions;
use serde_json::{Map, Value, json};

use crate::answer::{Answer, Part, Whole};
use crate::app::{App, Envelope, Prepared};
use crate::chat::number;
use crate::constrain::{self, Thoughts};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::generation::{Generation, MOST_TOP_LOGPROBS};
use crate::language::Start;
use crate::logprobs::Logprobs;
use crate::progress::{Update, Usage};
use crate::prompt::Prompt;
use crate::speech::Speech;
use crate::sse::{Events, event};
use crate::structure;
use crate::tools::ToolChoice;

/// Prompts of one request, at most.
const MOST_PROMPTS: usize = 64;
/// Tokens where nothing is said, as elsewhere.
const USUAL: u32 = 16;

/// A request that was found right.
pub struct Completion {
    pub generation: Generation,
    pub prepared: Prepared,
    /// What each choice begins with.
    pub echoes: Vec<Echo>,
}

/// A prompt that is given back before what follows it.
#[derive(Clone, Debug, Default)]
pub struct Echo {
    pub text: String,
    /// Its first token, which nothing comes before: it has no probability.
    first: Option<u32>,
}

pub fn prepare(app: &App, fields: Fields<'_>) -> Result<Completion, ApiError> {
    prepare_generation(app, fields, Generation::read(fields, &app.speech)?)
}

/// The same where others say more of the answer.
pub fn prepare_generation(app: &App, fields: Fields<'_>, mut generation: Generation) -> Result<Completion, ApiError> {
    generation.top_logprobs = fields.count("logprobs", 0, MOST_TOP_LOGPROBS)?.map(|top| top as usize);
    if !fields.is_unlimited("max_tokens") {
        generation.most = generation.most.or(Some(USUAL));
    }
    generation.echoes = fields.flag("echo")?;
    if fields.count("best_of", 1, u64::MAX)?.is_some_and(|best_of| best_of > generation.choices as u64) {
        return Err(ApiError::invalid("best_of", "best_of must not be more than n"));
    }
    let value = fields.get("prompt").ok_or_else(|| ApiError::invalid("prompt", "prompt is missing"))?;
    let prompts = read_prompts(&app.speech, value)?;
    let guide =
        constrain::guide(app, structure::read(fields)?, &[], &ToolChoice::None, Start::Content, Thoughts::default())?;
    let (mut requests, mut echoes) = (Vec::new(), Vec::new());
    let prompt_tokens = prompts.iter().map(Vec::len).sum();
    // Prompts whose every token is looked at are read for each choice.
    let is_shared = prompts.len() == 1 && !(generation.echoes && generation.top_logprobs.is_some());
    for tokens in prompts {
        let echoed = match generation.echoes {
            true => {
                let text = app.speech.tokenizer.decode(&tokens, false).unwrap_or_default();
                Echo { text, first: tokens.first().copied() }
            }
            false => Echo::default(),
        };
        echoes.extend(vec![echoed; generation.choices]);
        let prompt = Prompt { tokens, ..Prompt::default() };
        requests.extend(generation.requests(&prompt, &app.speech, app.max_output, guide.as_deref())?);
    }
    let answers = requests.iter().map(|_| Answer::plain(generation.stop.clone())).collect();
    let (top_logprobs, ends_loops, lora) = (generation.top_logprobs, generation.ends_loops, generation.lora.clone());
    let held = Vec::new();
    let prepared = Prepared { requests, is_shared, answers, top_logprobs, ends_loops, lora, prompt_tokens, held };
    Ok(Completion { generation, prepared, echoes })
}

/// A text, ids, or a list of either.
fn read_prompts(speech: &Speech, value: &Value) -> Result<Vec<Vec<u32>>, ApiError> {
    let is_list_of_prompts = |list: &[Value]| list.iter().any(|item| item.is_string() || item.is_array());
    match value {
        Value::Array(list) if list.len() > MOST_PROMPTS && is_list_of_prompts(list) => {
            let message = format!("prompt must have at most {MOST_PROMPTS} prompts; found {}", list.len());
            Err(ApiError::invalid("prompt", message))
        }
        Value::Array(list) if is_list_of_prompts(list) => list.iter().map(|item| read_prompt(speech, item)).collect(),
        value => Ok(vec![read_prompt(speech, value)?]),
    }
}

fn read_prompt(speech: &Speech, value: &Value) -> Result<Vec<u32>, ApiError> {
    match value {
        Value::String(text) => Ok(speech.tokenizer.encode(text, EncodeOptions { add_bos: true, parse_special: false })),
        Value::Array(ids) => {
            let ids = read_ids("prompt", ids, speech.vocab_size)?;
            speech.refuse_placeholders("prompt", &ids)?;
            Ok(ids)
        }
        _ => Err(ApiError::invalid("prompt", "prompt must be a text or a list of token ids")),
    }
}

/// Token ids of a vocabulary.
pub fn read_ids(param: &str, ids: &[Value], vocab: u32) -> Result<Vec<u32>, ApiError> {
    let id = |id: &Value| {
        let token = id.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|id| *id < vocab);
        token.ok_or_else(|| ApiError::invalid(param, format!("{param}: {id} is no token id from 0 to {}", vocab - 1)))
    };
    ids.iter().map(id).collect()
}

/// Lists of what each token is and how likely it was; `offset` is the length of the text before. `first` is a token
/// that comes before them.
fn logprobs_json(speech: &Speech, first: Option<u32>, logprobs: &[Logprobs], offset: &mut usize) -> Value {
    let text = |token: u32| String::from_utf8_lossy(&speech.bytes(token)).into_owned();
    // A control token such as `<bos>` is a token, and not in the text; characters may be several tokens.
    let mut detokenizer = speech.tokenizer.detokenizer(false);
    let mut in_text = |token: u32| detokenizer.push(token).map_or(0, |text| text.chars().count());
    let (mut tokens, mut values, mut tops, mut offsets) = (vec![], vec![], vec![], vec![]);
    if let Some(token) = first {
        offsets.push(*offset);
        *offset += in_text(token);
        tokens.push(text(token));
        values.push(Value::Null);
        tops.push(Value::Null);
    }
    for found in logprobs {
        let top: Map<String, Value> =
            found.top.iter().map(|(token, logprob)| (text(*token), number(*logprob))).collect();
        offsets.push(*offset);
        *offset += in_text(found.token);
        tokens.push(text(found.token));
        values.push(number(found.logprob));
        tops.push(Value::Object(top));
    }
    *offset += detokenizer.finish().chars().count();
    json!({ "tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets })
}

pub fn whole(
    app: &App,
    envelope: &Envelope,
    answers: &[(Whole, &'static str)],
    usage: Usage,
    echoes: &[Echo],
    has_logprobs: bool,
) -> Value {
    let choice = |(index, ((answer, finish_reason), echo)): (usize, (&(Whole, &'static str), &Echo))| {
        let all = || [&answer.prompt[..], &answer.logprobs].concat();
        let logprobs = match has_logprobs {
            true => logprobs_json(&app.speech, echo.first, &all(), &mut 0),
            false => Value::Null,
        };
        let text = format!("{}{}", echo.text, answer.content);
        json!({ "index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason })
    };
    let choices = answers.iter().zip(echoes).enumerate().map(choice).collect();
    let mut answer = envelope.with(choices);
    answer.insert("usage".into(), usage.json());
    Value::Object(answer)
}

/// Chunks of a streamed completion.
pub struct CompletionEvents {
    pub app: Arc<App>,
    pub envelope: Envelope,
    /// Those that were not sent yet.
    pub echoes: Vec<Option<Echo>>,
    /// Log probabilities of their tokens.
    pub prompts: Vec<Vec<Logprobs>>,
    pub has_logprobs: bool,
    pub include_usage: bool,
    /// Length of the text so far, of each choice.
    pub offsets: Vec<usize>,
}

impl CompletionEvents {
    /// Sends what a choice begins with, once.
    fn echo(&mut self, choice: usize, out: &mut String) {
        let Some(echo) = self.echoes[choice].take().filter(|echo| !echo.text.is_empty()) else { return };
        let prompt = std::mem::take(&mut self.prompts[choice]);
        let logprobs = match self.has_logprobs {
            true => logprobs_json(&self.app.speech, echo.first, &prompt, &mut self.offsets[choice]),
            false => Value::Null,
        };
        self.chunk(choice, &echo.text, logprobs, None, out);
    }

    fn chunk(&self, choice: usize, text: &str, logprobs: Value, finish: Option<&str>, out: &mut String) {
        let choice = json!({ "index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish });
        let mut chunk = self.envelope.with(vec![choice]);
        if self.include_usage {
            chunk.insert("usage".into(), Value::Null);
        }
        event(out, &Value::Object(chunk));
    }
}

impl Events for CompletionEvents {
    fn begin(&mut self, out: &mut String) {
        // With probabilities it is sent when they are there.
        if !self.has_logprobs {
            (0..self.echoes.len()).for_each(|choice| self.echo(choice, out));
        }
    }

    fn update(&mut self, update: Update, out: &mut String) {
        let choice = update.choice;
        for part in update.parts {
            let (text, logprobs) = match part {
                Part::Content { text, logprobs } => (text, logprobs),
                Part::Prompt(logprobs) => {
                    self.prompts[choice].push(logprobs);
                    continue;
                }
                _ => continue,
            };
            self.echo(choice, out);
            let logprobs = match self.has_logprobs {
                true => logprobs_json(&self.app.speech, None, &logprobs, &mut self.offsets[choice]),
                false => Value::Null,
            };
            self.chunk(choice, &text, logprobs, None, out);
        }
        if update.finished.is_some() {
            self.echo(choice, out);
            self.chunk(choice, "", Value::Null, update.finished, out);
        }
    }

    fn end(&mut self, usage: Usage, out: &mut String) {
        if self.include_usage {
            let mut chunk = self.envelope.with(Vec::new());
            chunk.insert("usage".into(), usage.json());
            event(out, &Value::Object(chunk));
        }
        out.push_str("data: [DONE]\n\n");
    }
}
