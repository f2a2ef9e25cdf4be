//! From the messages of a request to the ids of a prompt. What others wrote never becomes a marker.

use gemma4c_models::chat::{ChatError, Message};
use gemma4c_runtime::engine::Attachment;
use serde_json::{Map, Value};

use crate::error::ApiError;
use crate::language::Mark;
use crate::media::{Fetched, Held, Items, Senses};
use crate::speech::Speech;

/// A conversation as the template takes it.
pub struct Conversation {
    pub messages: Messages,
    pub tools: Vec<Value>,
    pub thinking: bool,
    /// Whether the prompt opens the model's turn.
    pub generation_prompt: bool,
    /// Other variables for the template.
    pub options: Map<String, Value>,
}

/// Messages, and the pictures and sounds among their parts.
#[derive(Default)]
pub struct Messages {
    list: Vec<Message>,
    /// What the request calls each of them.
    params: Vec<String>,
    items: Items,
}

/// The ids of a conversation, and where others may part from it.
#[derive(Default)]
pub struct Prompt {
    pub tokens: Vec<u32>,
    pub snapshot_at: Vec<u32>,
    pub media: Vec<Attachment>,
    /// The memory that they take.
    pub held: Held,
}

impl Messages {
    /// Checks the messages of a request and puts them into the shape that templates know.
    pub fn read(value: &Value, senses: &Senses, fetched: &Fetched) -> Result<Messages, ApiError> {
        let Value::Array(list) = value else {
            return Err(ApiError::invalid("messages", "messages must be a list of messages"));
        };
        let named = list.iter().enumerate().map(|(index, message)| (format!("messages[{index}]"), message));
        Messages::read_named(named, senses, fetched)
    }

    /// The same of messages that the request has under other names.
    pub fn read_named<'a>(
        list: impl Iterator<Item = (String, &'a Value)>,
        senses: &Senses,
        fetched: &Fetched,
    ) -> Result<Messages, ApiError> {
        Messages::read_gathered(list.map(|(param, message)| (param, message, &[][..])), senses, fetched)
    }

    /// The same of messages whose parts were gathered from several places. The names of a message's parts come with it,
    /// as far as they are not `content[0]` and so on of the message's own.
    pub fn read_gathered<'a>(
        list: impl Iterator<Item = (String, &'a Value, &'a [String])>,
        senses: &Senses,
        fetched: &Fetched,
    ) -> Result<Messages, ApiError> {
        let mut messages = Messages::default();
        for (param, message, parts) in list {
            let mut media = |param: &str, part: &Value| messages.items.take(param, part, senses, fetched);
            let message = read_message(&param, message, parts, &mut media)?;
            messages.list.push(message);
            messages.params.push(param);
        }
        match messages.list.is_empty() {
            true => Err(ApiError::invalid("messages", "messages is empty: at least one message is needed")),
            false => Ok(messages),
        }
    }

    /// What a user says of a sound, which is called `param`.
    pub fn of_sound(param: &str, samples: &[f32], text: &str, senses: &Senses) -> Result<Messages, ApiError> {
        let mut messages = Messages::default();
        let sound = messages.items.take_sound(param, samples, senses)?;
        let content = Value::Array(vec![sound, text_part(text)]);
        messages.list.push(Message { role: "user".into(), content, more: Map::new() });
        messages.params.push(param.into());
        Ok(messages)
    }
}

/// Takes a picture or a sound of a message, under the part's name, and returns what the template knows it as.
type TakeMedium<'a> = dyn FnMut(&str, &Value) -> Result<Option<Value>, ApiError> + 'a;

impl Conversation {
    pub fn encode(self, speech: &Speech, senses: &Senses) -> Result<Prompt, ApiError> {
        let has_system = self.messages.list.first().is_some_and(|message| is_system(&message.role));
        let has_head = has_system || self.thinking || !self.tools.is_empty();
        let (rendered, mut items) = self.render(speech, &|text| speech.tokenizer.quote(text))?;
        let rendered = items.spell_out(rendered)?;
        let tokens = speech.tokenizer.encode_rendered(&rendered);
        let (tokens, media, held) = items.place(tokens, senses)?;
        let snapshot_at = speech.snapshots(&tokens, has_head);
        Ok(Prompt { tokens, snapshot_at, media, held })
    }

    /// The text of the prompt. Its markers are nothing but text there, whoever wrote them.
    pub fn text(self, speech: &Speech) -> Result<String, ApiError> {
        self.render(speech, &str::to_owned).map(|(rendered, _)| rendered)
    }

    /// What the template makes of it, with everything that others wrote put through `quote`.
    fn render(self, speech: &Speech, quote: &dyn Fn(&str) -> String) -> Result<(String, Items), ApiError> {
        let Conversation { messages, tools, thinking, generation_prompt, options } = self;
        let Messages { list: mut messages, params, items } = messages;
        let template = speech.template.as_ref().ok_or_else(|| {
            ApiError::bad_request("invalid_value", "the model has no chat template: use /v1/completions")
        })?;
        forget_old_thoughts(&mut messages);
        for message in &messages {
            speech.check_length(message.content.as_str().unwrap_or_default())?;
            let parts = message.content.as_array().into_iter().flatten();
            parts.filter_map(|part| part["text"].as_str()).try_for_each(|text| speech.check_length(text))?;
        }
        // Templates find them by their markers, which no text has once it is quoted.
        messages.iter_mut().filter(|message| message.role == "assistant").for_each(strip_thoughts);
        for message in &mut messages {
            message.content = quoted(&message.content, quote);
            message.more = quoted_fields(&message.more, quote);
        }
        let tools: Vec<Value> = tools.iter().map(|tool| quoted(tool, quote)).collect();
        let mut options: Map<String, Value> = quoted_fields(&options, quote);
        options.insert("enable_thinking".into(), thinking.into());
        let rendered = template.render(&messages, &tools, generation_prompt, &options);
        let rendered = rendered.map_err(|error| match error {
            ChatError::ResultWithoutCall { index } => {
                let param = &params[index];
                let message = format!("{param} is a tool's result without its call, which must come before it");
                ApiError::invalid(param, message)
            }
            error => {
                // A schema may be no schema; what it describes is looked at later.
                let of_tools =
                    !tools.is_empty() && template.render(&messages, &[], generation_prompt, &options).is_ok();
                let param = if of_tools { "tools" } else { "messages" };
                ApiError::invalid(param, format!("{param}: {error}"))
            }
        })?;
        speech.check_length(&rendered)?;
        Ok((rendered, items))
    }
}

fn is_system(role: &str) -> bool {
    ["system", "developer"].contains(&role)
}

fn read_message(param: &str, value: &Value, parts: &[String], media: &mut TakeMedium<'_>) -> Result<Message, ApiError> {
    let Value::Object(fields) = value else {
        return Err(ApiError::invalid(param, format!("{param} is not an object")));
    };
    let role = match fields.get("role") {
        Some(Value::String(role)) => role.as_str(),
        _ => return Err(ApiError::invalid(&format!("{param}.role"), format!("{param}.role must be a text"))),
    };
    let role = match role {
        "system" | "developer" | "user" | "assistant" | "tool" => role,
        "function" => "tool",
        "model" => "assistant",
        other => {
            let message = format!("{param}.role is {other:?}; expected system, developer, user, assistant or tool");
            return Err(ApiError::invalid(&format!("{param}.role"), message));
        }
    };
    let content = match fields.get("content") {
        // A result is often an object, and templates write its fields.
        Some(object @ Value::Object(_)) if role == "tool" => object.clone(),
        content => read_content(&format!("{param}.content"), role, content, parts, media)?,
    };
    let mut more = Map::new();
    if let Some(calls) = fields.get("tool_calls").filter(|calls| !calls.is_null()) {
        more.insert("tool_calls".into(), read_calls(&format!("{param}.tool_calls"), calls)?);
    }
    if let Some(responses) = fields.get("tool_responses").filter(|responses| !responses.is_null()) {
        more.insert("tool_responses".into(), read_responses(&format!("{param}.tool_responses"), responses)?);
    }
    let thoughts = ["reasoning_content", "reasoning", "thinking"].iter().find_map(|field| fields.get(*field)?.as_str());
    if let Some(thoughts) = thoughts.filter(|thoughts| !thoughts.is_empty()) {
        more.insert(THOUGHTS.into(), thoughts.into());
    }
    for field in ["tool_call_id", "name"] {
        if let Some(Value::String(text)) = fields.get(field) {
            more.insert(field.into(), text.as_str().into());
        }
    }
    let mut message = Message { role: role.into(), content, more };
    message.parse_arguments();
    Ok(message)
}

/// Text, or parts. A template trims each part of a user and of the assistant by itself; of others it wants one text.
fn read_content(
    param: &str,
    role: &str,
    content: Option<&Value>,
    names: &[String],
    media: &mut TakeMedium<'_>,
) -> Result<Value, ApiError> {
    let given = match content {
        None | Some(Value::Null) => return Ok(Value::String(String::new())),
        Some(Value::String(text)) => return Ok(Value::String(text.clone())),
        Some(Value::Array(parts)) => parts,
        Some(_) => return Err(ApiError::invalid(param, format!("{param} must be a text or a list of parts"))),
    };
    let mut parts = Vec::new();
    for (index, part) in given.iter().enumerate() {
        let kind = part.get("type").and_then(Value::as_str).unwrap_or("text");
        match (kind, part.get("text").or(part.get("refusal")), part) {
            ("text" | "input_text" | "output_text" | "refusal", Some(Value::String(text)), _)
            | (_, _, Value::String(text)) => parts.push(text_part(text)),
            ("text" | "input_text" | "output_text", ..) => {
                let message = format!("{param}[{index}].text must be a text");
                return Err(ApiError::invalid(param, message));
            }
            (kind, ..) => {
                let param = names.get(index).cloned().unwrap_or_else(|| format!("{param}[{index}]"));
                let Some(medium) = media(&param, part)? else {
                    let message = format!("{param} is of type {kind:?}; text, pictures and sounds are read");
                    return Err(ApiError::invalid(&param, message));
                };
                parts.push(medium);
            }
        }
    }
    let is_text = parts.iter().all(|part| part["type"] == "text");
    let is_one = parts.len() < 2 || !["user", "assistant"].contains(&role);
    Ok(match is_text && is_one {
        true => Value::String(parts.iter().filter_map(|part| part["text"].as_str()).collect()),
        false => Value::Array(parts),
    })
}

fn text_part(text: &str) -> Value {
    serde_json::json!({ "type": "text", "text": text })
}

/// Calls with a name and with arguments, as an object or as JSON in a text.
fn read_calls(param: &str, calls: &Value) -> Result<Value, ApiError> {
    let Value::Array(calls) = calls else {
        return Err(ApiError::invalid(param, format!("{param} must be a list of calls")));
    };
    let mut read = Vec::new();
    for (index, call) in calls.iter().enumerate() {
        let function = &call["function"];
        let Some(name) = function["name"].as_str() else {
            let param = format!("{param}[{index}].function.name");
            return Err(ApiError::invalid(&param, format!("{param} must be a text")));
        };
        let arguments = match &function["arguments"] {
            given @ (Value::String(_) | Value::Object(_)) => given.clone(),
            _ => Value::Object(Map::new()),
        };
        let mut fields = Map::new();
        fields.insert("id".into(), call["id"].clone());
        fields.insert("type".into(), "function".into());
        fields.insert("function".into(), serde_json::json!({ "name": name, "arguments": arguments }));
        read.push(Value::Object(fields));
    }
    Ok(Value::Array(read))
}

/// Results that come with the assistant's own message: what was called, and what it gave.
fn read_responses(param: &str, responses: &Value) -> Result<Value, ApiError> {
    let Value::Array(responses) = responses else {
        return Err(ApiError::invalid(param, format!("{param} must be a list of responses")));
    };
    for (index, response) in responses.iter().enumerate() {
        let is_named = response.get("name").is_none_or(Value::is_string);
        if !response.is_object() || !is_named || response.get("response").is_none() {
            let param = format!("{param}[{index}]");
            let message = format!("{param} must be an object with a response, and with a text as its name");
            return Err(ApiError::invalid(&param, message));
        }
    }
    Ok(Value::Array(responses.clone()))
}

/// The field of a message that has its thoughts, whatever the request calls it.
const THOUGHTS: &str = "reasoning_content";

/// Thoughts count only as long as their turn is open, which is until the user speaks again.
fn forget_old_thoughts(messages: &mut [Message]) {
    let last_user = messages.iter().rposition(|message| message.role == "user").unwrap_or(0);
    for message in &mut messages[..last_user] {
        message.more.remove(THOUGHTS);
    }
}

/// Leaves out the channels of a text that the assistant wrote, as templates do.
fn strip_thoughts(message: &mut Message) {
    let strip = |text: &mut Value| {
        if let Value::String(text) = text {
            let parts = text.split(Mark::ChannelClose.spelling());
            let outside = parts.filter_map(|part| part.split(Mark::ChannelOpen.spelling()).next());
            *text = outside.collect();
        }
    };
    match &mut message.content {
        Value::Array(parts) => parts.iter_mut().filter_map(|part| part.get_mut("text")).for_each(strip),
        text => strip(text),
    }
}

fn quoted(value: &Value, quote: &dyn Fn(&str) -> String) -> Value {
    match value {
        Value::String(text) => Value::String(quote(text)),
        Value::Array(list) => list.iter().map(|value| quoted(value, quote)).collect(),
        Value::Object(fields) => Value::Object(quoted_fields(fields, quote)),
        other => other.clone(),
    }
}

fn quoted_fields(fields: &Map<String, Value>, quote: &dyn Fn(&str) -> String) -> Map<String, Value> {
    fields.iter().map(|(key, value)| (quote(key), quoted(value, quote))).collect()
}
