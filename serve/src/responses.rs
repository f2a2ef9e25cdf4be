//! `POST /v1/responses`, the stateless part: history comes whole with every request, and nothing is stored.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use crate::answer::Part;
use crate::app::{App, now};
use crate::chat::{self, Chat, template_options, wants_thinking};
use crate::error::ApiError;
use crate::fields::{Fields, decimal};
use crate::generation::{Generation, any_seed};
use crate::media::Fetched;
use crate::progress::{Update, Usage};
use crate::prompt::{Conversation, Messages};
use crate::sse::Events;
use crate::structure::Structure;
use crate::tools;

/// A request that was found right, and the answer's fields that repeat it.
pub struct Response {
    pub chat: Chat,
    pub echo: Map<String, Value>,
}

pub fn prepare(app: &App, fields: Fields<'_>, fetched: &Fetched) -> Result<Response, ApiError> {
    for (name, is_wanted) in [
        ("previous_response_id", fields.get("previous_response_id").is_some()),
        ("conversation", fields.get("conversation").is_some()),
        ("background", fields.flag("background")?),
    ] {
        if is_wanted {
            return Err(ApiError::invalid(
                name,
                format!("{name} needs stored responses; here every request brings its whole history"),
            ));
        }
    }
    let generation = Generation::read(fields, &app.speech)?;
    if generation.choices != 1 {
        return Err(ApiError::invalid("n", "a response has one answer"));
    }
    let mut messages = Vec::new();
    if let Some(instructions) = fields.text("instructions")? {
        messages.push(named("instructions", json!({ "role": "system", "content": instructions })));
    }
    let input = fields.get("input").ok_or_else(|| ApiError::invalid("input", "input is missing"))?;
    read_input(input, &mut messages)?;
    let (declared, choice) = tools::read(fields)?;
    let conversation = Conversation {
        messages: Messages::read_named(
            messages.iter().map(|(param, message)| (param.clone(), message)),
            &app.senses,
            fetched,
        )?,
        tools: declared.iter().map(|tool| tool.declaration.clone()).collect(),
        thinking: wants_thinking(fields)?,
        generation_prompt: true,
        options: template_options(fields)?,
    };
    let echo = echo(fields, &generation);
    let structure = read_format(fields)?;
    let chat = chat::prepare_conversation(app, generation, conversation, &declared, &choice, structure)?;
    Ok(Response { chat, echo })
}

/// Fields of the request that an answer repeats.
fn echo(fields: Fields<'_>, generation: &Generation) -> Map<String, Value> {
    let given = |name: &str, unset: Value| fields.get(name).cloned().unwrap_or(unset);
    let effort = fields.get("reasoning").and_then(|reasoning| reasoning.get("effort")).cloned();
    let echo = json!({
        "instructions": given("instructions", Value::Null),
        "max_output_tokens": generation.most,
        "parallel_tool_calls": given("parallel_tool_calls", true.into()),
        "previous_response_id": null,
        "reasoning": { "effort": effort, "summary": null },
        "store": false,
        "temperature": decimal(generation.sampling.temperature),
        "text": given("text", json!({ "format": { "type": "text" } })),
        "tool_choice": given("tool_choice", "auto".into()),
        "tools": given("tools", json!([])),
        "top_p": decimal(generation.sampling.top_p),
        "truncation": "disabled",
        "metadata": given("metadata", json!({})),
    });
    echo.as_object().cloned().unwrap_or_default()
}

fn read_format(fields: Fields<'_>) -> Result<Option<Structure>, ApiError> {
    let Some(format) = fields.object("text")?.map(|text| text.object("format")).transpose()?.flatten() else {
        return Ok(None);
    };
    match format.text("type")?.unwrap_or("text") {
        "text" => Ok(None),
        "json_object" => Ok(Some(Structure::JsonObject)),
        "json_schema" => {
            let schema = format.get("schema");
            let schema = schema.ok_or_else(|| ApiError::invalid("text", "text.format.schema is missing"))?;
            Ok(Some(Structure::JsonSchema { schema: schema.clone(), param: "text.format.schema".into() }))
        }
        other => {
            let message = format!("text.format.type is {other:?}; expected text, json_object or json_schema");
            Err(ApiError::invalid("text", message))
        }
    }
}

/// A message, and what the request calls the item that it comes from.
type Named = (String, Value);

fn named(param: &str, message: Value) -> Named {
    (param.to_owned(), message)
}

/// Items of the input as messages of a chat: thoughts and calls that follow each other are of one turn.
fn read_input(input: &Value, messages: &mut Vec<Named>) -> Result<(), ApiError> {
    let items = match input {
        Value::String(text) => {
            messages.push(named("input", json!({ "role": "user", "content": text })));
            return Ok(());
        }
        Value::Array(items) => items,
        _ => return Err(ApiError::invalid("input", "input must be a text or a list of items")),
    };
    for (index, item) in items.iter().enumerate() {
        let param = format!("input[{index}]");
        let kind = item.get("type").and_then(Value::as_str).unwrap_or("message");
        let text = |field: &str| {
            let text = item.get(field).and_then(Value::as_str);
            text.ok_or_else(|| ApiError::invalid(&param, format!("{param}.{field} must be a text")))
        };
        match kind {
            "message" => {
                let role = text("role")?;
                match messages.last_mut().filter(|last| role == "assistant" && is_thought(last)) {
                    Some((_, thought)) => thought["content"] = item["content"].clone(),
                    None => messages.push(named(&param, json!({ "role": role, "content": item["content"] }))),
                }
            }
            "function_call" => {
                let function = json!({ "name": text("name")?, "arguments": text("arguments")? });
                let call = json!({ "id": text("call_id")?, "type": "function", "function": function });
                add_call(&param, messages, call);
            }
            "function_call_output" => {
                let content = item.get("output").cloned().unwrap_or_default();
                let message = json!({ "role": "tool", "tool_call_id": text("call_id")?, "content": content });
                messages.push(named(&param, message));
            }
            "reasoning" => {
                let parts = item.get("content").and_then(Value::as_array).into_iter().flatten();
                let thoughts: String = parts.filter_map(|part| part.get("text")?.as_str()).collect();
                match messages.last_mut().filter(|last| is_thought(last)) {
                    _ if thoughts.is_empty() => {}
                    Some((_, thought)) => {
                        let before = thought["reasoning"].as_str().unwrap_or_default();
                        thought["reasoning"] = format!("{before}{thoughts}").into();
                    }
                    None => {
                        let thought = json!({ "role": "assistant", "content": "", "reasoning": thoughts });
                        messages.push(named(&param, thought));
                    }
                }
            }
            // What other vendors' tools leave in a history.
            "item_reference" => {
                return Err(ApiError::invalid(
                    &param,
                    format!("{param} refers to a stored item; nothing is stored here"),
                ));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Whether a message has thoughts, and nothing else yet.
fn is_thought(named: &Named) -> bool {
    is_silent(named) && named.1.get("tool_calls").is_none()
}

/// Whether a message is the assistant's and has no text.
fn is_silent((_, message): &Named) -> bool {
    let has_text = !message["content"].is_null() && message["content"] != "" && message["content"] != json!([]);
    message["role"] == "assistant" && !has_text
}

/// Adds a call to the assistant's turn. Behind a text it is a message of its own, which takes the text's thoughts:
/// templates show thoughts with calls alone.
fn add_call(param: &str, messages: &mut Vec<Named>, call: Value) {
    if !messages.last().is_some_and(is_silent) {
        let last = messages.last_mut().filter(|(_, last)| last["role"] == "assistant");
        let thoughts = last.and_then(|(_, last)| last.as_object_mut()?.remove("reasoning"));
        messages.push(named(param, json!({ "role": "assistant", "content": "", "reasoning": thoughts })));
    }
    if let Some((_, Value::Object(last))) = messages.last_mut()
        && let Value::Array(calls) = last.entry("tool_calls").or_insert_with(|| json!([]))
    {
        calls.push(call);
    }
}

/// An item of the output that is not complete.
enum Open {
    Reasoning(String),
    Message(String),
    Call { name: String, arguments: String },
}

/// Makes the events of a stream; a whole answer is what the last of them says.
pub struct ResponseEvents {
    app: Arc<App>,
    id: String,
    created: u64,
    echo: Map<String, Value>,
    sequence: u64,
    output: Vec<Value>,
    open: Option<Open>,
    is_cut: bool,
}

impl ResponseEvents {
    pub fn new(app: Arc<App>, echo: Map<String, Value>) -> ResponseEvents {
        let id = format!("{:016x}{:016x}", any_seed(), any_seed());
        let (sequence, output) = (0, Vec::new());
        ResponseEvents { app, id, created: now(), echo, sequence, output, open: None, is_cut: false }
    }

    /// The response as it stands.
    fn response(&self, status: &str, usage: Option<Usage>, error: Option<&ApiError>) -> Value {
        let usage = usage.map(|usage| {
            json!({
                "input_tokens": usage.prompt,
                "input_tokens_details": { "cached_tokens": usage.cached, "cache_write_tokens": usage.cache_written },
                "output_tokens": usage.completion,
                "output_tokens_details": { "reasoning_tokens": usage.reasoning },
                "total_tokens": usage.prompt + usage.completion as usize,
            })
        });
        let incomplete = (status == "incomplete").then(|| json!({ "reason": "max_output_tokens" }));
        // Codes are from a list of OpenAI's, which has one word for all that is not the request's fault.
        let error = error.map(|error| json!({ "code": "server_error", "type": error.code, "message": error.message }));
        let mut response = json!({
            "id": format!("resp_{}", self.id),
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": false,
            "error": error,
            "incomplete_details": incomplete,
            "model": self.app.model,
            "output": self.output,
            "usage": usage,
        });
        if let Value::Object(fields) = &mut response {
            fields.extend(self.echo.clone());
        }
        response
    }

    fn event(&mut self, kind: &str, fields: Value, out: &mut String) {
        let mut data = Map::new();
        data.insert("type".into(), kind.into());
        data.insert("sequence_number".into(), self.sequence.into());
        self.sequence += 1;
        data.extend(fields.as_object().cloned().unwrap_or_default());
        out.push_str(&format!("event: {kind}\ndata: {}\n\n", Value::Object(data)));
    }

    /// The open item as it stands.
    fn item(&self, open: &Open, status: &str) -> Value {
        let index = self.output.len();
        let id = self.item_id(open);
        match open {
            Open::Reasoning(text) => {
                let content =
                    if text.is_empty() { json!([]) } else { json!([{ "type": "reasoning_text", "text": text }]) };
                json!({ "id": id, "type": "reasoning", "summary": [], "content": content, "status": status })
            }
            Open::Message(text) => {
                let is_empty = text.is_empty() && status == "in_progress";
                let content = if is_empty { json!([]) } else { json!([text_part(text)]) };
                json!({ "id": id, "type": "message", "status": status, "role": "assistant", "content": content })
            }
            Open::Call { name, arguments } => json!({
                "id": id, "type": "function_call", "status": status, "call_id": format!("call_{}_{index}", self.id),
                "name": name, "arguments": arguments,
            }),
        }
    }

    fn item_id(&self, open: &Open) -> String {
        let prefix = match open {
            Open::Reasoning(_) => "rs",
            Open::Message(_) => "msg",
            Open::Call { .. } => "fc",
        };
        format!("{prefix}_{}_{}", self.id, self.output.len())
    }

    fn open(&mut self, open: Open, out: &mut String) {
        self.close("completed", out);
        let index = self.output.len();
        let item = self.item(&open, "in_progress");
        let part = match &open {
            Open::Reasoning(_) => Some(json!({ "type": "reasoning_text", "text": "" })),
            Open::Message(_) => Some(text_part("")),
            Open::Call { .. } => None,
        };
        let id = self.item_id(&open);
        self.event("response.output_item.added", json!({ "output_index": index, "item": item }), out);
        if let Some(part) = part {
            let fields = json!({ "item_id": id, "output_index": index, "content_index": 0, "part": part });
            self.event("response.content_part.added", fields, out);
        }
        self.open = Some(open);
    }

    fn close(&mut self, status: &str, out: &mut String) {
        let Some(open) = self.open.take() else { return };
        let (index, id, item) = (self.output.len(), self.item_id(&open), self.item(&open, status));
        let place = |more: Value| {
            let mut fields = json!({ "item_id": id, "output_index": index });
            if let (Value::Object(fields), Value::Object(more)) = (&mut fields, more) {
                fields.extend(more);
            }
            fields
        };
        match &open {
            Open::Reasoning(text) => {
                let part = json!({ "type": "reasoning_text", "text": text });
                let done = place(json!({ "content_index": 0, "text": text }));
                self.event("response.reasoning_text.done", done, out);
                self.event("response.content_part.done", place(json!({ "content_index": 0, "part": part })), out);
            }
            Open::Message(text) => {
                let done = place(json!({ "content_index": 0, "text": text, "logprobs": [] }));
                self.event("response.output_text.done", done, out);
                let part = place(json!({ "content_index": 0, "part": text_part(text) }));
                self.event("response.content_part.done", part, out);
            }
            Open::Call { name, arguments } => {
                let done = place(json!({ "name": name, "arguments": arguments }));
                self.event("response.function_call_arguments.done", done, out);
            }
        }
        self.event("response.output_item.done", json!({ "output_index": index, "item": item }), out);
        self.output.push(item);
    }

    fn delta(&mut self, kind: &str, mut more: Value, out: &mut String) {
        let Some(open) = &self.open else { return };
        more["item_id"] = self.item_id(open).into();
        more["output_index"] = self.output.len().into();
        self.event(kind, more, out);
    }

    fn part(&mut self, part: Part, out: &mut String) {
        match part {
            // Nobody can ask for it here.
            Part::Prompt(_) => {}
            Part::Reasoning(text) => {
                if !matches!(self.open, Some(Open::Reasoning(_))) {
                    self.open(Open::Reasoning(String::new()), out);
                }
                if let Some(Open::Reasoning(all)) = &mut self.open {
                    all.push_str(&text);
                }
                self.delta("response.reasoning_text.delta", json!({ "content_index": 0, "delta": text }), out);
            }
            Part::Content { text, .. } => {
                if !matches!(self.open, Some(Open::Message(_))) {
                    self.open(Open::Message(String::new()), out);
                }
                if let Some(Open::Message(all)) = &mut self.open {
                    all.push_str(&text);
                }
                let delta = json!({ "content_index": 0, "delta": text, "logprobs": [] });
                self.delta("response.output_text.delta", delta, out);
            }
            Part::Call { name, .. } => self.open(Open::Call { name, arguments: String::new() }, out),
            Part::Arguments { text, .. } => {
                if let Some(Open::Call { arguments, .. }) = &mut self.open {
                    arguments.push_str(&text);
                }
                self.delta("response.function_call_arguments.delta", json!({ "delta": text }), out);
            }
        }
    }

    /// The whole response, once all of it has come.
    pub fn whole(&mut self, usage: Usage) -> Value {
        self.close(self.status(), &mut String::new());
        self.response(self.status(), Some(usage), None)
    }

    fn status(&self) -> &'static str {
        if self.is_cut { "incomplete" } else { "completed" }
    }
}

fn text_part(text: &str) -> Value {
    json!({ "type": "output_text", "annotations": [], "logprobs": [], "text": text })
}

impl Events for ResponseEvents {
    fn begin(&mut self, out: &mut String) {
        for kind in ["response.created", "response.in_progress"] {
            let response = self.response("in_progress", None, None);
            self.event(kind, json!({ "response": response }), out);
        }
    }

    fn update(&mut self, update: Update, out: &mut String) {
        update.parts.into_iter().for_each(|part| self.part(part, out));
        self.is_cut |= update.finished == Some("length");
    }

    fn end(&mut self, usage: Usage, out: &mut String) {
        let status = self.status();
        self.close(status, out);
        let response = self.response(status, Some(usage), None);
        self.event(&format!("response.{status}"), json!({ "response": response }), out);
    }

    fn error(&mut self, error: &ApiError, out: &mut String) {
        self.close("incomplete", out);
        let response = self.response("failed", None, Some(error));
        self.event("response.failed", json!({ "response": response }), out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Thoughts, text and calls of one turn, with and without each other.
    #[test]
    fn items_become_the_messages_of_their_turns() {
        let thought =
            |text: &str| json!({ "type": "reasoning", "content": [{ "type": "reasoning_text", "text": text }] });
        let said = |text: &str| json!({ "role": "assistant", "content": [{ "type": "output_text", "text": text }] });
        let call = |id: &str| json!({ "type": "function_call", "call_id": id, "name": "f", "arguments": "{}" });
        let output = |id: &str| json!({ "type": "function_call_output", "call_id": id, "output": "x" });
        for (items, expected) in [
            (json!([thought("a"), said("b")]), vec![("b", "a", 0)]),
            (json!([thought("a"), thought("b"), call("1"), call("2")]), vec![("", "ab", 2)]),
            (json!([thought("a"), said("b"), call("1")]), vec![("b", "", 0), ("", "a", 1)]),
            (json!([call("1"), output("1"), thought("a"), call("2")]), vec![("", "", 1), ("x", "", 0), ("", "a", 1)]),
            (json!([said("a"), said("b")]), vec![("a", "", 0), ("b", "", 0)]),
        ] {
            let mut messages = Vec::new();
            read_input(&items, &mut messages).expect("they are right");
            let found = messages.iter().map(|(_, message)| {
                let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
                let content = message["content"][0]["text"].as_str().map_or(text(&message["content"]), String::from);
                (content, text(&message["reasoning"]), message["tool_calls"].as_array().map_or(0, Vec::len))
            });
            let expected =
                expected.into_iter().map(|(content, thoughts, calls)| (content.into(), thoughts.into(), calls));
            assert_eq!(found.collect::<Vec<_>>(), expected.collect::<Vec<(String, String, usize)>>(), "{items}");
        }
    }
}
