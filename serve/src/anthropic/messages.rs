//! The messages of a request as those of a chat: what stands in blocks there has fields and roles of its own here.
//!
//! Results of tools come in a user's message and become messages before it; messages of one side that follow each other
//! are one turn. Every part keeps the name that the request has for it, for whatever is found wrong with it later.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::error::ApiError;
use crate::fields::Fields;

/// A message of the chat.
pub struct Turn {
    /// What the request calls the message, or the block, that it comes from.
    pub param: String,
    pub message: Value,
    /// The same of each part of its content.
    pub parts: Vec<String>,
}

impl Turn {
    fn new(param: &str, role: &str, content: Value) -> Turn {
        Turn { param: param.into(), message: json!({ "role": role, "content": content }), parts: Vec::new() }
    }

    fn is_of(&self, role: &str) -> bool {
        self.message["role"] == role
    }

    pub fn is_assistant(&self) -> bool {
        self.is_of("assistant")
    }

    fn push(&mut self, param: String, part: Value) {
        if let Some(content) = self.message["content"].as_array_mut() {
            content.push(part);
            self.parts.push(param);
        }
    }
}

/// How the first block of a system prompt begins that is for Anthropic's accounts, and not for a model. It is another
/// one in every request of Claude Code, so that nothing of a prompt that begins with it could be kept for the next.
const ATTRIBUTION: &str = "x-anthropic-billing-header:";

/// System prompt and messages of a request.
pub fn read(fields: Fields<'_>) -> Result<Vec<Turn>, ApiError> {
    let list = fields.list("messages")?.ok_or_else(|| ApiError::invalid("messages", "messages is missing"))?;
    if list.is_empty() {
        return Err(ApiError::invalid("messages", "messages is empty: at least one message is needed"));
    }
    let mut turns = Turns::default();
    let system = system(fields)?;
    if !system.is_empty() {
        turns.list.push(Turn::new("system", "system", system.into()));
    }
    for (index, message) in list.iter().enumerate() {
        turns.add_message(&format!("messages[{index}]"), message)?;
    }
    Ok(turns.list)
}

fn system(fields: Fields<'_>) -> Result<String, ApiError> {
    let wrong = |param: &str, expected: &str| ApiError::invalid(param, format!("{param} must be {expected}"));
    match fields.get("system") {
        None => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(blocks)) => {
            let mut all = String::new();
            for (index, block) in blocks.iter().enumerate() {
                let param = format!("system[{index}]");
                if block["type"] != "text" {
                    return Err(wrong(&format!("{param}.type"), "text"));
                }
                let text = text_of(&param, block, "text")?;
                if !text.starts_with(ATTRIBUTION) {
                    all.push_str(text);
                }
            }
            Ok(all)
        }
        Some(_) => Err(wrong("system", "a text or a list of text blocks")),
    }
}

#[derive(Default)]
struct Turns {
    list: Vec<Turn>,
    /// Calls of the assistant's turn that results may still come for.
    called: BTreeSet<String>,
}

impl Turns {
    fn add_message(&mut self, param: &str, message: &Value) -> Result<(), ApiError> {
        let Value::Object(fields) = message else {
            return Err(ApiError::invalid(param, format!("{param} must be an object")));
        };
        let role = match fields.get("role").and_then(Value::as_str) {
            Some(role @ ("user" | "assistant")) => role,
            _ => {
                let param = format!("{param}.role");
                let message = format!("{param} must be user or assistant; `system` is a field of the request");
                return Err(ApiError::invalid(&param, message));
            }
        };
        let name = format!("{param}.content");
        let mut parts = Vec::new();
        match fields.get("content") {
            Some(Value::String(text)) => parts.push((name, text_part(text))),
            Some(Value::Array(blocks)) if !blocks.is_empty() => {
                for (index, block) in blocks.iter().enumerate() {
                    let name = format!("{name}[{index}]");
                    match role {
                        "user" => self.add_users_block(name, block, &mut parts)?,
                        _ => self.add_own_block(param, name, block)?,
                    }
                }
            }
            _ => {
                let message = format!("{name} must be a text or a list of blocks, and not empty");
                return Err(ApiError::invalid(&name, message));
            }
        }
        // Behind all results of the message: those belong to the calls before it.
        for (name, part) in parts {
            self.turn(role, param).push(name, part);
        }
        Ok(())
    }

    /// The turn that is being spoken, or a new one.
    fn turn(&mut self, role: &str, param: &str) -> &mut Turn {
        if !self.list.last().is_some_and(|last| last.is_of(role)) {
            self.called.clear();
            self.list.push(Turn::new(param, role, json!([])));
        }
        let last = self.list.len() - 1;
        &mut self.list[last]
    }

    fn add_users_block(
        &mut self,
        param: String,
        block: &Value,
        parts: &mut Vec<(String, Value)>,
    ) -> Result<(), ApiError> {
        match kind_of(&param, block)? {
            "tool_result" => return self.add_result(&param, block, parts),
            "image" => parts.push((param, block.clone())),
            "text" => parts.push((param.clone(), text_part(text_of(&param, block, "text")?))),
            "document" => parts.push((param.clone(), text_part(&document(&param, block)?))),
            kind => return Err(unknown_block(&param, kind, "text, image, document and tool_result are read")),
        }
        Ok(())
    }

    /// A result is a message; pictures in it come behind all results, since templates show a result as text.
    fn add_result(&mut self, param: &str, block: &Value, pictures: &mut Vec<(String, Value)>) -> Result<(), ApiError> {
        let id = text_of(param, block, "tool_use_id")?;
        if !self.called.contains(id) {
            let param = format!("{param}.tool_use_id");
            let message = format!("{param}: no tool_use of the assistant's message before it has the id {id:?}");
            return Err(ApiError::invalid(&param, message));
        }
        let is_error = match &block["is_error"] {
            Value::Null => false,
            Value::Bool(is_error) => *is_error,
            _ => return Err(ApiError::invalid(param, format!("{param}.is_error must be true or false"))),
        };
        let name = format!("{param}.content");
        let mut text = String::new();
        match &block["content"] {
            Value::Null => {}
            Value::String(content) => text.push_str(content),
            Value::Array(blocks) => {
                for (index, block) in blocks.iter().enumerate() {
                    let name = format!("{name}[{index}]");
                    match kind_of(&name, block)? {
                        "text" => text.push_str(text_of(&name, block, "text")?),
                        "image" => pictures.push((name, block.clone())),
                        "document" => text.push_str(&document(&name, block)?),
                        kind => return Err(unknown_block(&name, kind, "text, image and document are read")),
                    }
                }
            }
            _ => return Err(ApiError::invalid(&name, format!("{name} must be a text or a list of blocks"))),
        }
        // The model is shown the fields of an object.
        let content = if is_error { json!({ "error": text }) } else { text.into() };
        let mut turn = Turn::new(param, "tool", content);
        turn.message["tool_call_id"] = id.into();
        self.list.push(turn);
        Ok(())
    }

    /// A block of the assistant's message `message`.
    fn add_own_block(&mut self, message: &str, param: String, block: &Value) -> Result<(), ApiError> {
        match kind_of(&param, block)? {
            "text" => {
                let part = text_part(text_of(&param, block, "text")?);
                self.turn("assistant", message).push(param, part);
            }
            "thinking" => {
                let thought = text_of(&param, block, "thinking")?;
                let turn = self.turn("assistant", message);
                let before = turn.message["reasoning"].as_str().unwrap_or_default();
                turn.message["reasoning"] = format!("{before}{thought}").into();
            }
            // Thoughts that nobody can read.
            "redacted_thinking" => _ = self.turn("assistant", message),
            "tool_use" => {
                let (id, name) = (text_of(&param, block, "id")?, text_of(&param, block, "name")?);
                let Some(Value::Object(input)) = block.get("input") else {
                    let param = format!("{param}.input");
                    return Err(ApiError::invalid(&param, format!("{param} must be an object")));
                };
                let call = json!({ "id": id, "type": "function", "function": { "name": name, "arguments": input } });
                let turn = self.turn("assistant", message);
                match turn.message["tool_calls"].as_array_mut() {
                    Some(calls) => calls.push(call),
                    None => turn.message["tool_calls"] = json!([call]),
                }
                self.called.insert(id.into());
            }
            kind => return Err(unknown_block(&param, kind, "text, thinking, redacted_thinking and tool_use are read")),
        }
        Ok(())
    }
}

/// A document's text, under its title and what is said of it.
fn document(param: &str, block: &Value) -> Result<String, ApiError> {
    let source = &block["source"];
    if source["type"] != "text" {
        let param = format!("{param}.source.type");
        let message = format!("{param} must be text: the model reads no files of documents, send their text");
        return Err(ApiError::invalid(&param, message));
    }
    let mut all = Vec::new();
    for field in ["title", "context"] {
        if !block[field].is_null() {
            all.push(text_of(param, block, field)?);
        }
    }
    all.push(text_of(&format!("{param}.source"), source, "data")?);
    Ok(all.join("\n\n"))
}

fn kind_of<'a>(param: &str, block: &'a Value) -> Result<&'a str, ApiError> {
    text_of(param, block, "type")
}

fn text_of<'a>(param: &str, block: &'a Value, field: &str) -> Result<&'a str, ApiError> {
    block[field].as_str().ok_or_else(|| {
        let param = format!("{param}.{field}");
        ApiError::invalid(&param, format!("{param} must be a text"))
    })
}

fn unknown_block(param: &str, kind: &str, read: &str) -> ApiError {
    ApiError::invalid(&format!("{param}.type"), format!("{param}.type is {kind:?}; {read} here"))
}

fn text_part(text: &str) -> Value {
    json!({ "type": "text", "text": text })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turns(request: Value) -> Result<Vec<Turn>, ApiError> {
        read(Fields(request.as_object().expect("an object")))
    }

    #[test]
    fn blocks_become_the_messages_of_a_chat() {
        let picture = json!({ "type": "image", "source": { "type": "url", "url": "data:x" } });
        let call = |id: &str| json!({ "type": "tool_use", "id": id, "name": "f", "input": { "a": 1 } });
        let result = |id: &str, content: Value| json!({ "type": "tool_result", "tool_use_id": id, "content": content });
        let text = |text: &str| json!({ "type": "text", "text": text });
        let document = json!({ "type": "text", "media_type": "text/plain", "data": "D" });
        let request = json!({
            "system": [text("x-anthropic-billing-header: cch=1;"), text("Be"), text(" brief")],
            "messages": [
                { "role": "user", "content": "one" },
                { "role": "user", "content": [picture, { "type": "document", "title": "T", "source": document }] },
                { "role": "assistant", "content": [
                    { "type": "thinking", "thinking": "Hm", "signature": "x" }, text("Let me see"), call("1"), call("2"),
                ] },
                { "role": "user", "content": [
                    text("here"), result("2", json!([text("a"), picture, text("b")])),
                    { "type": "tool_result", "tool_use_id": "1", "content": "no", "is_error": true },
                ] },
                { "role": "assistant", "content": [{ "type": "redacted_thinking", "data": "x" }, text("Done")] },
                { "role": "assistant", "content": "." },
            ],
        });
        let found = turns(request).expect("it is right");
        let called =
            |id: &str| json!({ "id": id, "type": "function", "function": { "name": "f", "arguments": { "a": 1 } } });
        let expected = [
            ("system", json!({ "role": "system", "content": "Be brief" }), vec![]),
            (
                "messages[0]",
                json!({ "role": "user", "content": [text("one"), picture, text("T\n\nD")] }),
                vec!["messages[0].content", "messages[1].content[0]", "messages[1].content[1]"],
            ),
            (
                "messages[2]",
                json!({
                    "role": "assistant", "content": [text("Let me see")], "reasoning": "Hm",
                    "tool_calls": [called("1"), called("2")],
                }),
                vec!["messages[2].content[1]"],
            ),
            ("messages[3].content[1]", json!({ "role": "tool", "content": "ab", "tool_call_id": "2" }), vec![]),
            (
                "messages[3].content[2]",
                json!({ "role": "tool", "content": { "error": "no" }, "tool_call_id": "1" }),
                vec![],
            ),
            (
                "messages[3]",
                json!({ "role": "user", "content": [text("here"), picture] }),
                vec!["messages[3].content[0]", "messages[3].content[1].content[1]"],
            ),
            (
                "messages[4]",
                json!({ "role": "assistant", "content": [text("Done"), text(".")] }),
                vec!["messages[4].content[1]", "messages[5].content"],
            ),
        ];
        assert_eq!(found.len(), expected.len());
        for (turn, (param, message, parts)) in found.iter().zip(expected) {
            assert_eq!((turn.param.as_str(), &turn.message), (param, &message));
            assert_eq!(turn.parts, parts, "{param}");
        }
    }

    #[test]
    fn what_is_wrong_is_called_what_the_request_calls_it() {
        let user = |block: Value| json!({ "messages": [{ "role": "user", "content": [block] }] });
        let own = |block: Value| json!({ "messages": [{ "role": "assistant", "content": [block] }] });
        let after_call = |more: Value| {
            let call = json!({ "type": "tool_use", "id": "1", "name": "f", "input": {} });
            let mut result = json!({ "type": "tool_result", "tool_use_id": "1" });
            result.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            json!({ "messages": [{ "role": "assistant", "content": [call] }, { "role": "user", "content": [result] }] })
        };
        for (request, param) in [
            (json!({}), "messages"),
            (json!({ "messages": [] }), "messages"),
            (json!({ "messages": [7] }), "messages[0]"),
            (json!({ "messages": [{ "role": "system", "content": "x" }] }), "messages[0].role"),
            (json!({ "messages": [{ "role": "user" }] }), "messages[0].content"),
            (json!({ "messages": [{ "role": "user", "content": [] }] }), "messages[0].content"),
            (json!({ "system": 7, "messages": [{ "role": "user", "content": "x" }] }), "system"),
            (json!({ "system": [{ "type": "image" }], "messages": [1] }), "system[0].type"),
            (json!({ "system": [{ "type": "text" }], "messages": [1] }), "system[0].text"),
            (user(json!("x")), "messages[0].content[0].type"),
            (user(json!({ "type": "text", "text": 7 })), "messages[0].content[0].text"),
            (user(json!({ "type": "tool_use" })), "messages[0].content[0].type"),
            (user(json!({ "type": "document" })), "messages[0].content[0].source.type"),
            (user(json!({ "type": "document", "source": { "type": "base64" } })), "messages[0].content[0].source.type"),
            (user(json!({ "type": "document", "source": { "type": "text" } })), "messages[0].content[0].source.data"),
            (user(json!({ "type": "tool_result", "tool_use_id": "1" })), "messages[0].content[0].tool_use_id"),
            (own(json!({ "type": "server_tool_use" })), "messages[0].content[0].type"),
            (own(json!({ "type": "thinking" })), "messages[0].content[0].thinking"),
            (own(json!({ "type": "tool_use", "id": "1" })), "messages[0].content[0].name"),
            (own(json!({ "type": "tool_use", "id": "1", "name": "f" })), "messages[0].content[0].input"),
            (after_call(json!({ "tool_use_id": "2" })), "messages[1].content[0].tool_use_id"),
            (after_call(json!({ "is_error": 1 })), "messages[1].content[0]"),
            (after_call(json!({ "content": 7 })), "messages[1].content[0].content"),
            (after_call(json!({ "content": [{ "type": "x" }] })), "messages[1].content[0].content[0].type"),
        ] {
            let error = turns(request.clone()).err().unwrap_or_else(|| panic!("{request} was taken"));
            assert_eq!(error.param.as_deref(), Some(param), "{request}");
            assert!(error.message.starts_with(param), "{}", error.message);
        }
    }
}
