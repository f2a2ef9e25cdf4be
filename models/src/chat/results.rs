//! Results of tools, for templates that know no message of the role `tool`.
//!
//! A model of Gemma 4 gets a result within its own turn, right behind the call. Google's first templates write a
//! message of the role `tool` as a turn `<|turn>tool`, which no model was trained on; a result they take from the field
//! `tool_responses` of the assistant's message. So results are moved there, and the model's turn becomes what the later
//! template makes of it:
//!
//! ```text
//! <|turn>model  <|tool_call>…<tool_call|> <|tool_response>…<tool_response|>  It is 21.  <turn|>
//! ```
//!
//! The first templates also open a turn for every message of the assistant. What the model said before a call and what
//! it said after a result are messages of their own, so their turns are joined in the rendered text. A conversation
//! without results is left alone.

use std::borrow::Cow;
use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::{ChatError, ChatTemplate, Message};

/// Unicode reserves it for use inside a program. It ends a text that is continued by the next message, and is taken out
/// of messages.
const CONTINUED: char = '\u{FDD1}';

/// Whether a template gives results a turn of their own, and would take them in the assistant's message.
///
/// It is tried: whatever a template's text is, it is wrong to send it messages of the role `tool` exactly if a turn
/// `<|turn>tool` comes out. A comment that only the later template has would also tell them apart, until somebody edits
/// the comments.
pub(super) fn have_a_turn_of_their_own(template: &ChatTemplate) -> bool {
    const RESULT: &str = "result of the trial";
    let render = |messages: &[Message]| template.render_as_given(messages, &[], false, &Map::new()).unwrap_or_default();
    let mut messages = vec![Message::new("user", "Hi"), Message::new("assistant", ""), Message::new("tool", RESULT)];
    let call = json!([{ "id": "1", "type": "function", "function": { "name": "f", "arguments": {} } }]);
    messages[1].more.insert("tool_calls".into(), call);
    messages[2].more.insert("name".into(), "f".into());
    let as_message = render(&messages);
    let as_field = render(&move_into_turns(&messages));
    as_message.contains("<|turn>tool") && !as_field.contains("<|turn>tool") && as_field.contains(RESULT)
}

pub(super) fn is_result(message: &Message) -> bool {
    message.role == "tool"
}

/// Every result with the name of the function that gave it, which templates cannot always find out. One without its
/// call is refused.
pub(super) fn with_names(mut messages: Cow<'_, [Message]>) -> Result<Cow<'_, [Message]>, ChatError> {
    let (mut names, mut called) = (Vec::new(), Called::default());
    for (index, message) in messages.iter().enumerate() {
        if is_result(message) {
            let name = called.function_of_next(message).ok_or(ChatError::ResultWithoutCall { index })?;
            names.push((index, name.to_owned()));
        } else {
            called = Called::by(message);
        }
    }
    for (index, name) in names {
        messages.to_mut()[index].more.insert("name".into(), name.into());
    }
    Ok(messages)
}

/// Functions that a message calls.
#[derive(Default)]
struct Called<'a> {
    in_order: Vec<&'a str>,
    by_id: HashMap<&'a str, &'a str>,
    /// Results so far.
    results: usize,
}

impl<'a> Called<'a> {
    fn by(message: &'a Message) -> Called<'a> {
        let named = |call: &'a Value| Some((call["id"].as_str(), call["function"]["name"].as_str()?));
        let called: Vec<_> = calls(message).iter().filter_map(named).collect();
        let by_id = called.iter().filter_map(|(id, name)| Some(((*id)?, *name))).collect();
        Called { in_order: called.iter().map(|(_, name)| *name).collect(), by_id, results: 0 }
    }

    /// That of the call with the result's id; else the one that the result names. Results without ids come in the order
    /// of the calls.
    fn function_of_next(&mut self, result: &'a Message) -> Option<&'a str> {
        let text = |field: &str| result.more.get(field).and_then(Value::as_str);
        let own = text("name").filter(|_| !self.in_order.is_empty());
        self.results += 1;
        match text("tool_call_id") {
            Some(id) => self.by_id.get(id).copied().or(own),
            None => own.or_else(|| self.in_order.get(self.results - 1).copied()),
        }
    }
}

fn calls(message: &Message) -> &[Value] {
    let calls = message.more.get("tool_calls").filter(|_| message.role == "assistant");
    calls.and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// The conversation with each result in the message that has its call. The results must have their names.
pub(super) fn move_into_turns(messages: &[Message]) -> Vec<Message> {
    let mut moved: Vec<Message> = Vec::with_capacity(messages.len());
    let mut messages = messages.iter().peekable();
    while let Some(message) = messages.next() {
        let mut message = Message { content: unmarked(&message.content), ..message.clone() };
        let mut responses = Vec::new();
        while let Some(result) = messages.next_if(|next| is_result(next)) {
            responses.push(json!({ "name": result.more.get("name"), "response": body(&result.content) }));
        }
        if responses.is_empty() {
            moved.push(message);
            continue;
        }
        match message.more.entry("tool_responses").or_insert_with(|| json!([])) {
            // An answer that came with responses of its own comes after them.
            Value::Array(own) if !own.is_empty() => own.extend(responses),
            field => {
                *field = responses.into();
                let said = std::mem::replace(&mut message.content, "".into());
                if !is_empty(&said) {
                    moved.push(Message { role: message.role.clone(), content: said, more: Map::new() });
                }
                if let Some(before) = moved.last_mut()
                    && before.role == message.role
                    && calls(before).is_empty()
                {
                    before.content = continued(std::mem::take(&mut before.content));
                }
            }
        }
        moved.push(message);
    }
    moved
}

/// An object is written field by field, and a text as it is, even where it is JSON: so does the later template. Of
/// parts the texts count.
fn body(content: &Value) -> Value {
    match content {
        Value::Array(parts) if parts.iter().all(|part| part["type"].is_string()) => {
            let texts = parts.iter().filter(|part| part["type"] == "text").filter_map(|part| part["text"].as_str());
            Value::String(texts.collect())
        }
        other => other.clone(),
    }
}

fn is_empty(content: &Value) -> bool {
    match content {
        Value::String(text) => text.trim().is_empty(),
        Value::Array(parts) => parts.is_empty(),
        _ => true,
    }
}

/// A text whose turn goes on with the next message.
fn continued(content: Value) -> Value {
    match content {
        Value::String(text) => format!("{}{CONTINUED}", text.trim_end()).into(),
        Value::Array(mut parts) => {
            parts.push(json!({ "type": "text", "text": CONTINUED.to_string() }));
            parts.into()
        }
        other => other,
    }
}

fn unmarked(content: &Value) -> Value {
    match content {
        Value::String(text) => text.replace(CONTINUED, "").into(),
        Value::Array(parts) => parts.iter().map(unmarked).collect(),
        Value::Object(fields) => fields.iter().map(|(key, value)| (key.clone(), unmarked(value))).collect(),
        other => other.clone(),
    }
}

/// Joins the turns that the template has cut. Behind a result the model's turn is open.
pub(super) fn join_turns(rendered: &str) -> String {
    let joined = rendered.replace(&format!("{CONTINUED}<turn|>\n<|turn>model\n"), "");
    joined.replace("<tool_response|><|turn>model\n", "<tool_response|>").replace(CONTINUED, "")
}
