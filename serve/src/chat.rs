//! `POST /v1/chat/completions`, whole and streamed.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use crate::answer::{Answer, Part, Whole};
use crate::app::{App, Envelope, Prepared};
use crate::constrain::{self, Thoughts};
use crate::error::ApiError;
use crate::fields::{Fields, decimal};
use crate::generation::{Generation, MOST_TOP_LOGPROBS};
use crate::language::Tool;
use crate::logprobs::Logprobs;
use crate::media::Fetched;
use crate::progress::{Update, Usage};
use crate::prompt::{Conversation, Messages};
use crate::speech::Speech;
use crate::sse::{Events, event};
use crate::structure;
use crate::tools::{self, ToolChoice};

/// A chat request that was found right.
pub struct Chat {
    pub generation: Generation,
    pub prepared: Prepared,
}

/// Reads a request; takes as long as its prompt takes to encode.
pub fn prepare(app: &App, fields: Fields<'_>, fetched: &Fetched) -> Result<Chat, ApiError> {
    prepare_generation(app, fields, fetched, Generation::read(fields, &app.speech)?)
}

/// The same where others say more of the answer.
pub fn prepare_generation(
    app: &App,
    fields: Fields<'_>,
    fetched: &Fetched,
    mut generation: Generation,
) -> Result<Chat, ApiError> {
    if fields.flag("logprobs")? {
        generation.top_logprobs = Some(fields.count("top_logprobs", 0, MOST_TOP_LOGPROBS)?.unwrap_or(0) as usize);
    } else if fields.get("top_logprobs").is_some() {
        return Err(ApiError::invalid("top_logprobs", "top_logprobs needs logprobs to be true"));
    }
    let messages = fields.get("messages").ok_or_else(|| ApiError::invalid("messages", "messages is missing"))?;
    let (tools, choice) = tools::read(fields)?;
    let conversation = Conversation {
        messages: Messages::read(messages, &app.senses, fetched)?,
        tools: tools.iter().map(|tool| tool.declaration.clone()).collect(),
        thinking: wants_thinking(fields)?,
        generation_prompt: wants_generation_prompt(fields)?,
        options: template_options(fields)?,
    };
    let structure = structure::read(fields)?;
    prepare_conversation(app, generation, conversation, &tools, &choice, structure)
}

/// The same for a conversation that was read already.
pub fn prepare_conversation(
    app: &App,
    generation: Generation,
    conversation: Conversation,
    declared: &[tools::Declared],
    choice: &ToolChoice,
    structure: Option<structure::Structure>,
) -> Result<Chat, ApiError> {
    let thinking = conversation.thinking;
    let mut prompt = conversation.encode(&app.speech, &app.senses)?;
    let start = app.speech.start(&prompt.tokens);
    let thoughts = Thoughts { wanted: thinking, most: generation.most_thoughts };
    let guide = constrain::guide(app, structure, declared, choice, start, thoughts)?;
    let requests = generation.requests(&prompt, &app.speech, app.max_output, guide.as_deref())?;
    let tools: Arc<[Tool]> = match choice {
        ToolChoice::None => Arc::default(),
        _ => declared.iter().map(|tool| tool.tool.clone()).collect(),
    };
    let answer = || Answer::chat(start, Arc::clone(&tools), generation.stop.clone());
    let answers = requests.iter().map(|_| answer()).collect();
    let prepared = Prepared {
        requests,
        is_shared: true,
        answers,
        top_logprobs: generation.top_logprobs,
        ends_loops: generation.ends_loops,
        lora: generation.lora.clone(),
        prompt_tokens: prompt.tokens.len(),
        held: std::mem::take(&mut prompt.held),
    };
    Ok(Chat { generation, prepared })
}

/// Gemma 4 has a switch, no levels; not asked for is off.
pub fn wants_thinking(fields: Fields<'_>) -> Result<bool, ApiError> {
    if let Some(options) = fields.object("chat_template_kwargs")?
        && options.get("enable_thinking").is_some()
    {
        return options.flag("enable_thinking").map_err(|error| error.within("chat_template_kwargs"));
    }
    let effort = match fields.object("reasoning").ok().flatten() {
        Some(reasoning) => reasoning.text("effort").map_err(|error| error.within("reasoning"))?,
        None => fields.text("reasoning_effort")?,
    };
    Ok(effort.is_some_and(|effort| !["none", "minimal"].contains(&effort)))
}

/// Opens the model's turn unless it is told not to.
pub fn wants_generation_prompt(fields: Fields<'_>) -> Result<bool, ApiError> {
    let name = "add_generation_prompt";
    let options = fields.object("chat_template_kwargs")?.filter(|options| options.get(name).is_some());
    let is_inside = options.is_some();
    let fields = options.unwrap_or(fields);
    let flag = fields.flag(name).map_err(|error| if is_inside { error.within("chat_template_kwargs") } else { error });
    Ok(fields.get(name).is_none() || flag?)
}

/// Variables for the template that have no other place in a request.
pub fn template_options(fields: Fields<'_>) -> Result<Map<String, Value>, ApiError> {
    let Some(Fields(options)) = fields.object("chat_template_kwargs")? else { return Ok(Map::new()) };
    let reserved = ["messages", "tools", "bos_token", "eos_token", "add_generation_prompt"];
    let options = options.iter().filter(|(name, _)| !reserved.contains(&name.as_str()));
    Ok(options.map(|(name, value)| (name.clone(), value.clone())).collect())
}

/// One token of a list of log probabilities.
fn logprob_entry(speech: &Speech, token: u32, logprob: f32) -> Map<String, Value> {
    let bytes = speech.bytes(token);
    let mut entry = Map::new();
    entry.insert("token".into(), String::from_utf8_lossy(&bytes).into());
    entry.insert("logprob".into(), number(logprob));
    entry.insert("bytes".into(), bytes.into());
    entry
}

/// JSON has no infinity; clients read this as one.
pub fn number(logprob: f32) -> Value {
    decimal(logprob.max(-9999.0))
}

fn logprobs_json(speech: &Speech, logprobs: &[Logprobs]) -> Value {
    let entry = |found: &Logprobs| {
        let mut entry = logprob_entry(speech, found.token, found.logprob);
        let top = found.top.iter().map(|(token, logprob)| Value::Object(logprob_entry(speech, *token, *logprob)));
        entry.insert("top_logprobs".into(), top.collect());
        Value::Object(entry)
    };
    json!({ "content": logprobs.iter().map(entry).collect::<Value>(), "refusal": null })
}

/// The answer to a request that did not want a stream.
pub fn whole(
    app: &App,
    envelope: &Envelope,
    answers: &[(Whole, &'static str)],
    usage: Usage,
    has_logprobs: bool,
) -> Value {
    let choice = |(index, (answer, finish_reason)): (usize, &(Whole, &'static str))| {
        let mut message = Map::new();
        message.insert("role".into(), "assistant".into());
        let has_content = !answer.content.is_empty() || answer.calls.is_empty();
        let content = if has_content { Value::String(answer.content.clone()) } else { Value::Null };
        message.insert("content".into(), content);
        message.insert("refusal".into(), Value::Null);
        if !answer.reasoning.is_empty() {
            message.insert("reasoning_content".into(), answer.reasoning.as_str().into());
            message.insert("reasoning".into(), answer.reasoning.as_str().into());
        }
        if !answer.calls.is_empty() {
            let call = |(at, (name, arguments)): (usize, &(String, String))| {
                let id = envelope.call_id(index, at);
                json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } })
            };
            message.insert("tool_calls".into(), answer.calls.iter().enumerate().map(call).collect());
        }
        let logprobs = if has_logprobs { logprobs_json(&app.speech, &answer.logprobs) } else { Value::Null };
        json!({ "index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason })
    };
    let mut answer = envelope.with(answers.iter().enumerate().map(choice).collect());
    answer.insert("usage".into(), usage.json());
    Value::Object(answer)
}

/// Chunks of a streamed answer.
pub struct ChatEvents {
    pub app: Arc<App>,
    pub envelope: Envelope,
    pub choices: usize,
    pub has_logprobs: bool,
    pub include_usage: bool,
    /// What the request has taken so far, where every chunk says it.
    pub measured: Option<Usage>,
}

impl ChatEvents {
    fn chunk(&self, choice: usize, delta: Value, logprobs: Value, finish: Option<&str>, out: &mut String) {
        let choice = json!({ "index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish });
        let mut chunk = self.envelope.with(vec![choice]);
        if self.include_usage {
            chunk.insert("usage".into(), Value::Null);
        }
        if let Some(usage) = self.measured {
            chunk.insert("timings".into(), usage.timings());
        }
        event(out, &Value::Object(chunk));
    }

    /// A part as the delta that carries it. Id and name of a call come once, then never again: clients add up what they
    /// get.
    fn delta(&self, choice: usize, part: &Part) -> (Value, Value) {
        let delta = match part {
            // Nobody can ask for it here.
            Part::Prompt(_) => json!({}),
            Part::Reasoning(text) => json!({ "reasoning_content": text, "reasoning": text }),
            Part::Content { text, logprobs } => {
                let logprobs = match self.has_logprobs {
                    true => logprobs_json(&self.app.speech, logprobs),
                    false => Value::Null,
                };
                return (json!({ "content": text }), logprobs);
            }
            Part::Call { index, name } => {
                let function = json!({ "name": name, "arguments": "" });
                let id = self.envelope.call_id(choice, *index);
                json!({ "tool_calls": [{ "index": index, "id": id, "type": "function", "function": function }] })
            }
            Part::Arguments { index, text } => {
                json!({ "tool_calls": [{ "index": index, "function": { "arguments": text } }] })
            }
        };
        (delta, Value::Null)
    }
}

impl Events for ChatEvents {
    fn begin(&mut self, out: &mut String) {
        for choice in 0..self.choices {
            self.chunk(choice, json!({ "role": "assistant", "content": "" }), Value::Null, None, out);
        }
    }

    fn measure(&mut self, usage: Usage) {
        self.measured = self.measured.map(|_| usage);
    }

    fn update(&mut self, update: Update, out: &mut String) {
        for part in &update.parts {
            let (delta, logprobs) = self.delta(update.choice, part);
            self.chunk(update.choice, delta, logprobs, None, out);
        }
        if update.finished.is_some() {
            self.chunk(update.choice, json!({}), Value::Null, update.finished, out);
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
