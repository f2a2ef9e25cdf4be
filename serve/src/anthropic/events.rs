//! The events of a streamed message; a whole one is what they add up to, so that the two cannot differ.

use serde_json::{Value, json};

use crate::answer::Part;
use crate::dialect::Dialect;
use crate::error::ApiError;
use crate::generation::any_seed;
use crate::progress::{Update, Usage};
use crate::sse::Events;
use xxhash_rust::xxh3::xxh3_128;

/// A block that is not complete.
enum Open {
    Thinking(String),
    Text(String),
    Call { id: String, name: String, input: String },
}

pub struct MessageEvents {
    id: String,
    model: String,
    /// What was known before the first token.
    usage: Usage,
    content: Vec<Value>,
    open: Option<Open>,
    stop_reason: &'static str,
    stop_sequence: Option<String>,
}

impl MessageEvents {
    pub fn new(model: &str, usage: Usage) -> MessageEvents {
        let id = format!("{:016x}{:016x}", any_seed(), any_seed());
        let (content, stop_reason) = (Vec::new(), "end_turn");
        MessageEvents { id, model: model.into(), usage, content, open: None, stop_reason, stop_sequence: None }
    }

    /// The whole message, once all of it has come.
    pub fn whole(&mut self, usage: Usage) -> Value {
        self.close(&mut String::new());
        let content = std::mem::take(&mut self.content);
        self.message(content, Some(self.stop_reason), usage)
    }

    fn message(&self, content: Vec<Value>, stop_reason: Option<&str>, usage: Usage) -> Value {
        json!({
            "id": format!("msg_{}", self.id),
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": self.stop_sequence,
            "usage": {
                "input_tokens": usage.prompt.saturating_sub(usage.cached as usize),
                "output_tokens": usage.completion,
                "cache_read_input_tokens": usage.cached,
                "cache_creation_input_tokens": 0,
            },
        })
    }

    fn open(&mut self, open: Open, out: &mut String) {
        self.close(out);
        let block = match &open {
            Open::Thinking(_) => json!({ "type": "thinking", "thinking": "", "signature": "" }),
            Open::Text(_) => json!({ "type": "text", "text": "" }),
            Open::Call { id, name, .. } => json!({ "type": "tool_use", "id": id, "name": name, "input": {} }),
        };
        let index = self.content.len();
        event(out, json!({ "type": "content_block_start", "index": index, "content_block": block }));
        self.open = Some(open);
    }

    fn delta(&self, delta: Value, out: &mut String) {
        let index = self.content.len();
        event(out, json!({ "type": "content_block_delta", "index": index, "delta": delta }));
    }

    fn close(&mut self, out: &mut String) {
        let Some(open) = self.open.take() else { return };
        let block = match open {
            Open::Thinking(thinking) => {
                // Clients give it back with the thoughts and may insist on one. Nobody here asks for it: a history's
                // thoughts are the client's to choose, as all of its messages.
                let signature = format!("{:032x}", xxh3_128(thinking.as_bytes()));
                self.delta(json!({ "type": "signature_delta", "signature": signature }), out);
                json!({ "type": "thinking", "thinking": thinking, "signature": signature })
            }
            Open::Text(text) => json!({ "type": "text", "text": text }),
            // Half a JSON is no object: of a call that a limit has cut, as the stop reason says, the name is left.
            Open::Call { id, name, input } => {
                let input = serde_json::from_str(&input).unwrap_or_else(|_| json!({}));
                json!({ "type": "tool_use", "id": id, "name": name, "input": input })
            }
        };
        event(out, json!({ "type": "content_block_stop", "index": self.content.len() }));
        self.content.push(block);
    }

    fn part(&mut self, part: Part, out: &mut String) {
        match part {
            // Nobody can ask for it here.
            Part::Prompt(_) => {}
            Part::Reasoning(text) => {
                if !matches!(self.open, Some(Open::Thinking(_))) {
                    self.open(Open::Thinking(String::new()), out);
                }
                self.delta(json!({ "type": "thinking_delta", "thinking": text }), out);
                if let Some(Open::Thinking(all)) = &mut self.open {
                    all.push_str(&text);
                }
            }
            Part::Content { text, .. } => {
                if !matches!(self.open, Some(Open::Text(_))) {
                    self.open(Open::Text(String::new()), out);
                }
                self.delta(json!({ "type": "text_delta", "text": text }), out);
                if let Some(Open::Text(all)) = &mut self.open {
                    all.push_str(&text);
                }
            }
            Part::Call { index, name } => {
                let id = format!("toolu_{:032x}", xxh3_128(format!("{}/{index}", self.id).as_bytes()));
                self.open(Open::Call { id, name, input: String::new() }, out);
            }
            Part::Arguments { text, .. } => {
                self.delta(json!({ "type": "input_json_delta", "partial_json": text }), out);
                if let Some(Open::Call { input, .. }) = &mut self.open {
                    input.push_str(&text);
                }
            }
        }
    }
}

/// An event, whose name its data have too.
fn event(out: &mut String, data: Value) {
    out.push_str(&format!("event: {}\ndata: {data}\n\n", data["type"].as_str().unwrap_or_default()));
}

impl Events for MessageEvents {
    fn begin(&mut self, out: &mut String) {
        let message = self.message(Vec::new(), None, self.usage);
        event(out, json!({ "type": "message_start", "message": message }));
    }

    fn update(&mut self, update: Update, out: &mut String) {
        update.parts.into_iter().for_each(|part| self.part(part, out));
        let Some(reason) = update.finished else { return };
        self.stop_sequence = update.stop_string;
        self.stop_reason = match reason {
            "length" => "max_tokens",
            "tool_calls" => "tool_use",
            _ if self.stop_sequence.is_some() => "stop_sequence",
            _ => "end_turn",
        };
    }

    fn end(&mut self, usage: Usage, out: &mut String) {
        self.close(out);
        let delta = json!({ "stop_reason": self.stop_reason, "stop_sequence": self.stop_sequence });
        let usage = json!({ "output_tokens": usage.completion });
        event(out, json!({ "type": "message_delta", "delta": delta, "usage": usage }));
        event(out, json!({ "type": "message_stop" }));
    }

    fn error(&mut self, error: &ApiError, out: &mut String) {
        event(out, Dialect::Anthropic.error(error));
    }

    fn ping(&mut self, out: &mut String) {
        event(out, json!({ "type": "ping" }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn update(parts: Vec<Part>, finished: Option<&'static str>, stop_string: Option<&str>) -> Update {
        Update { choice: 0, parts, tokens: Vec::new(), finished, stop_string: stop_string.map(String::from) }
    }

    fn content(text: &str) -> Part {
        Part::Content { text: text.into(), logprobs: Vec::new() }
    }

    /// Thoughts, text and calls, to the byte.
    #[test]
    fn a_stream_is_what_clients_parse() {
        let usage = Usage { prompt: 30, cached: 20, ..Usage::default() };
        let mut events = MessageEvents { id: "7".into(), ..MessageEvents::new("tiny", usage) };
        let mut out = String::new();
        events.begin(&mut out);
        events.update(update(vec![Part::Reasoning("Hm".into()), Part::Reasoning(".".into())], None, None), &mut out);
        events.ping(&mut out);
        events.update(update(vec![content("Let me\n")], None, None), &mut out);
        let call = |index, name: &str| Part::Call { index, name: name.into() };
        let arguments = |index, text: &str| Part::Arguments { index, text: text.into() };
        let parts = vec![call(0, "f"), arguments(0, "{\"a\":"), arguments(0, "1}"), call(1, "g"), arguments(1, "{}")];
        events.update(update(parts, Some("tool_calls"), None), &mut out);
        events.end(Usage { completion: 9, ..usage }, &mut out);
        let [first, second] = [0, 1].map(|index| format!("toolu_{:032x}", xxh3_128(format!("7/{index}").as_bytes())));
        let signature = format!("{:032x}", xxh3_128(b"Hm."));
        let expected = [
            r#"message_start {"type":"message_start","message":{"id":"msg_7","type":"message","role":"assistant","model":"tiny","content":[],"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":10,"output_tokens":0,"cache_read_input_tokens":20,"cache_creation_input_tokens":0}}}"#,
            r#"content_block_start {"type":"content_block_start","index":0,"content_block":{"type":"thinking","thinking":"","signature":""}}"#,
            r#"content_block_delta {"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"Hm"}}"#,
            r#"content_block_delta {"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"."}}"#,
            r#"ping {"type":"ping"}"#,
            r#"content_block_delta {"type":"content_block_delta","index":0,"delta":{"type":"signature_delta","signature":"SIGNATURE"}}"#,
            r#"content_block_stop {"type":"content_block_stop","index":0}"#,
            r#"content_block_start {"type":"content_block_start","index":1,"content_block":{"type":"text","text":""}}"#,
            r#"content_block_delta {"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"Let me\n"}}"#,
            r#"content_block_stop {"type":"content_block_stop","index":1}"#,
            r#"content_block_start {"type":"content_block_start","index":2,"content_block":{"type":"tool_use","id":"FIRST","name":"f","input":{}}}"#,
            r#"content_block_delta {"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":"{\"a\":"}}"#,
            r#"content_block_delta {"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":"1}"}}"#,
            r#"content_block_stop {"type":"content_block_stop","index":2}"#,
            r#"content_block_start {"type":"content_block_start","index":3,"content_block":{"type":"tool_use","id":"SECOND","name":"g","input":{}}}"#,
            r#"content_block_delta {"type":"content_block_delta","index":3,"delta":{"type":"input_json_delta","partial_json":"{}"}}"#,
            r#"content_block_stop {"type":"content_block_stop","index":3}"#,
            r#"message_delta {"type":"message_delta","delta":{"stop_reason":"tool_use","stop_sequence":null},"usage":{"output_tokens":9}}"#,
            r#"message_stop {"type":"message_stop"}"#,
        ];
        let line = |line: &str| line.split_once(' ').map(|(name, data)| format!("event: {name}\ndata: {data}\n\n"));
        let expected: String = expected.into_iter().filter_map(line).collect();
        let expected = expected.replace("SIGNATURE", &signature).replace("FIRST", &first).replace("SECOND", &second);
        assert_eq!(out, expected);
        let whole = events.whole(Usage { completion: 9, ..usage });
        let blocks = json!([
            { "type": "thinking", "thinking": "Hm.", "signature": signature },
            { "type": "text", "text": "Let me\n" },
            { "type": "tool_use", "id": first, "name": "f", "input": { "a": 1 } },
            { "type": "tool_use", "id": second, "name": "g", "input": {} },
        ]);
        assert_eq!((&whole["content"], &whole["stop_reason"]), (&blocks, &json!("tool_use")));
        assert_eq!((&whole["usage"]["input_tokens"], &whole["usage"]["output_tokens"]), (&json!(10), &json!(9)));
    }

    #[test]
    fn a_message_says_why_it_has_ended() {
        for (reason, stop, expected) in [
            ("stop", None, "end_turn"),
            ("stop", Some("###"), "stop_sequence"),
            ("length", None, "max_tokens"),
            ("tool_calls", None, "tool_use"),
        ] {
            let mut events = MessageEvents::new("tiny", Usage::default());
            events.update(update(vec![content("x")], Some(reason), stop), &mut String::new());
            let whole = events.whole(Usage::default());
            assert_eq!((&whole["stop_reason"], &whole["stop_sequence"]), (&json!(expected), &json!(stop)));
        }
    }

    #[test]
    fn a_failure_after_the_start_is_an_event() {
        let mut events = MessageEvents::new("tiny", Usage::default());
        let mut out = String::new();
        events.error(&ApiError::unavailable("x", "it ends"), &mut out);
        let data = r#"{"type":"error","error":{"type":"overloaded_error","message":"it ends"}}"#;
        assert_eq!(out, format!("event: error\ndata: {data}\n\n"));
    }
}
