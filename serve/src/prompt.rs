//! From the messages of a request to the ids of a prompt. What others wrote never becomes a marker.

use gemma4c_models::chat::Message;
use serde_json::{Map, Value};

use crate::error::ApiError;
use crate::speech::Speech;

/// A conversation as the template takes it.
pub struct Conversation {
    pub messages: Vec<Message>,
    pub tools: Vec<Value>,
    pub thinking: bool,
    /// Other variables for the template.
    pub options: Map<String, Value>,
}

/// The ids of a conversation, and where others may part from it.
pub struct Prompt {
    pub tokens: Vec<u32>,
    pub snapshot_at: Vec<u32>,
}

impl Conversation {
    /// Checks the messages of a request and puts them into the shape that templates know.
    pub fn messages(value: &Value) -> Result<Vec<Message>, ApiError> {
        let Value::Array(list) = value else {
            return Err(ApiError::invalid("messages", "messages must be a list of messages"));
        };
        if list.is_empty() {
            return Err(ApiError::invalid("messages", "messages is empty: at least one message is needed"));
        }
        list.iter().enumerate().map(|(index, message)| read_message(index, message)).collect()
    }

    pub fn encode(mut self, speech: &Speech) -> Result<Prompt, ApiError> {
        let template = speech.template.as_ref().ok_or_else(|| {
            ApiError::bad_request("invalid_value", "the model has no chat template: use /v1/completions")
        })?;
        let has_system = self.messages.first().is_some_and(|message| is_system(&message.role));
        forget_old_thoughts(&mut self.messages);
        for message in &self.messages {
            speech.check_length(message.content.as_str().unwrap_or_default())?;
        }
        let quote = |text: &str| speech.tokenizer.quote(text);
        for message in &mut self.messages {
            message.content = quoted(&message.content, &quote);
            message.more = quoted_fields(&message.more, &quote);
        }
        let tools: Vec<Value> = self.tools.iter().map(|tool| quoted(tool, &quote)).collect();
        let mut options: Map<String, Value> = quoted_fields(&self.options, &quote);
        options.insert("enable_thinking".into(), self.thinking.into());
        let rendered = template.render(&self.messages, &tools, true, &options);
        let rendered = rendered.map_err(|error| ApiError::invalid("messages", error.to_string()))?;
        speech.check_length(&rendered)?;
        let tokens = speech.tokenizer.encode_rendered(&rendered);
        let snapshot_at = speech.snapshots(&tokens, has_system || self.thinking || !tools.is_empty());
        Ok(Prompt { tokens, snapshot_at })
    }
}

fn is_system(role: &str) -> bool {
    ["system", "developer"].contains(&role)
}

fn read_message(index: usize, value: &Value) -> Result<Message, ApiError> {
    let param = format!("messages[{index}]");
    let Value::Object(fields) = value else {
        return Err(ApiError::invalid(&param, format!("{param} is not an object")));
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
    let content = read_content(&format!("{param}.content"), fields.get("content"))?;
    let mut more = Map::new();
    if let Some(calls) = fields.get("tool_calls").filter(|calls| !calls.is_null()) {
        more.insert("tool_calls".into(), read_calls(&format!("{param}.tool_calls"), calls)?);
    }
    let thoughts = ["reasoning_content", "reasoning"].iter().find_map(|field| fields.get(*field)?.as_str());
    if let Some(thoughts) = thoughts.filter(|thoughts| !thoughts.is_empty()) {
        more.insert("reasoning".into(), thoughts.into());
    }
    for field in ["tool_call_id", "name"] {
        if let Some(Value::String(text)) = fields.get(field) {
            more.insert(field.into(), text.as_str().into());
        }
    }
    Ok(Message { role: role.into(), content, more })
}

/// Text, or parts that are all text.
fn read_content(param: &str, content: Option<&Value>) -> Result<Value, ApiError> {
    match content {
        None | Some(Value::Null) => Ok(Value::String(String::new())),
        Some(Value::String(text)) => Ok(Value::String(text.clone())),
        Some(Value::Array(parts)) => {
            let mut text = String::new();
            for (index, part) in parts.iter().enumerate() {
                let kind = part.get("type").and_then(Value::as_str).unwrap_or("text");
                match (kind, part.get("text").or(part.get("refusal")), part) {
                    ("text" | "input_text" | "output_text" | "refusal", Some(Value::String(piece)), _) => {
                        text.push_str(piece);
                    }
                    (_, _, Value::String(piece)) => text.push_str(piece),
                    ("text" | "input_text" | "output_text", ..) => {
                        let message = format!("{param}[{index}].text must be a text");
                        return Err(ApiError::invalid(param, message));
                    }
                    (kind, ..) => {
                        let message =
                            format!("{param}[{index}] is of type {kind:?}: this model is served for text only");
                        return Err(ApiError::invalid(param, message));
                    }
                }
            }
            Ok(Value::String(text))
        }
        Some(_) => Err(ApiError::invalid(param, format!("{param} must be a text or a list of parts"))),
    }
}

/// Arguments are JSON in a text; templates want the object itself.
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
            Value::String(text) => serde_json::from_str::<Value>(text).ok().filter(Value::is_object),
            other => Some(other.clone()).filter(Value::is_object),
        };
        let arguments = arguments.unwrap_or_else(|| match &function["arguments"] {
            Value::String(text) => Value::String(text.clone()),
            _ => Value::Object(Map::new()),
        });
        let mut fields = Map::new();
        fields.insert("id".into(), call["id"].clone());
        fields.insert("type".into(), "function".into());
        fields.insert("function".into(), serde_json::json!({ "name": name, "arguments": arguments }));
        read.push(Value::Object(fields));
    }
    Ok(Value::Array(read))
}

/// Thoughts count only as long as their turn is open, which is until the user speaks again.
fn forget_old_thoughts(messages: &mut [Message]) {
    let last_user = messages.iter().rposition(|message| message.role == "user").unwrap_or(0);
    for message in &mut messages[..last_user] {
        message.more.remove("reasoning");
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
