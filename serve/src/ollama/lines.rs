//! Answers as ollama writes them: lines of JSON, or one object that has all of it.

use serde_json::{Map, Value, json};

use crate::answer::{Part, Whole};
use crate::clock::{nanos, now};
use crate::error::ApiError;
use crate::progress::{Update, Usage};
use crate::sse::Events;

/// The two endpoints, whose answers differ in where the text is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Chat,
    Generate,
}

/// What one line says.
#[derive(Default)]
struct Said<'a> {
    text: &'a str,
    thinking: &'a str,
    calls: Vec<Value>,
}

/// Writes the answer of one request.
pub struct Lines {
    form: Form,
    /// As the request calls it.
    model: String,
    /// A call that is not complete, which only the end of its arguments is.
    call: Option<(String, String)>,
    finished: &'static str,
}

impl Lines {
    pub fn new(form: Form, model: String) -> Lines {
        Lines { form, model, call: None, finished: "stop" }
    }

    fn line(&self, said: Said<'_>, done: bool) -> Map<String, Value> {
        let mut line = Map::new();
        line.insert("model".into(), self.model.as_str().into());
        line.insert("created_at".into(), now().into());
        let thinking = (!said.thinking.is_empty()).then(|| ("thinking".to_owned(), Value::from(said.thinking)));
        match self.form {
            Form::Chat => {
                let mut message = Map::new();
                message.insert("role".into(), "assistant".into());
                message.insert("content".into(), said.text.into());
                message.extend(thinking);
                if !said.calls.is_empty() {
                    message.insert("tool_calls".into(), said.calls.into());
                }
                line.insert("message".into(), message.into());
            }
            Form::Generate => {
                line.insert("response".into(), said.text.into());
                line.extend(thinking);
            }
        }
        line.insert("done".into(), done.into());
        line
    }

    fn last(&self, said: Said<'_>, usage: Usage) -> Value {
        let mut line = self.line(said, true);
        let timing = usage.timing;
        for (name, value) in [
            ("done_reason", done_reason(self.finished).into()),
            ("total_duration", nanos(timing.total).into()),
            ("load_duration", nanos(timing.queued).into()),
            ("prompt_eval_count", usage.prompt.into()),
            ("prompt_eval_duration", nanos(timing.prompt).into()),
            ("eval_count", usage.completion.into()),
            ("eval_duration", nanos(timing.generation).into()),
        ] {
            line.insert(name.into(), value);
        }
        Value::Object(line)
    }

    /// The answer of a request that wanted no stream.
    pub fn whole(mut self, answer: &Whole, finished: &'static str, usage: Usage) -> Value {
        self.finished = finished;
        let calls = answer.calls.iter().filter_map(|(name, arguments)| call(name, arguments)).collect();
        self.last(Said { text: &answer.content, thinking: &answer.reasoning, calls }, usage)
    }

    /// The answer of a request without a text: the model is there, and stays.
    pub fn loaded(&self, unload: bool) -> Value {
        let mut line = self.line(Said::default(), true);
        line.insert("done_reason".into(), if unload { "unload" } else { "load" }.into());
        Value::Object(line)
    }

    fn push(&self, said: Said<'_>, out: &mut String) {
        write(out, &Value::Object(self.line(said, false)));
    }

    /// Gives out a call whose arguments have ended.
    fn end_call(&mut self, out: &mut String) {
        let ended = self.call.take().and_then(|(name, arguments)| call(&name, &arguments));
        if let Some(call) = ended {
            self.push(Said { calls: vec![call], ..Said::default() }, out);
        }
    }
}

/// One line.
pub fn write(out: &mut String, line: &Value) {
    out.push_str(&line.to_string());
    out.push('\n');
}

/// A call as clients get it, with an object of arguments. One that a limit has cut has none, and is left out: the
/// reason of the end says so.
fn call(name: &str, arguments: &str) -> Option<Value> {
    let arguments: Map<String, Value> = serde_json::from_str(arguments).ok()?;
    Some(json!({ "function": { "name": name, "arguments": arguments } }))
}

fn done_reason(finished: &str) -> &str {
    match finished {
        "tool_calls" => "stop",
        other => other,
    }
}

impl Events for Lines {
    const MEDIA_TYPE: &'static str = "application/x-ndjson";

    fn begin(&mut self, _: &mut String) {}

    fn update(&mut self, update: Update, out: &mut String) {
        for part in update.parts {
            match part {
                // Nobody can ask for it here.
                Part::Prompt(_) => {}
                Part::Reasoning(text) => {
                    self.end_call(out);
                    self.push(Said { thinking: &text, ..Said::default() }, out);
                }
                Part::Content { text, .. } => {
                    self.end_call(out);
                    self.push(Said { text: &text, ..Said::default() }, out);
                }
                Part::Call { name, .. } => {
                    self.end_call(out);
                    self.call = Some((name, String::new()));
                }
                Part::Arguments { text, .. } => {
                    if let Some((_, arguments)) = &mut self.call {
                        arguments.push_str(&text);
                    }
                }
            }
        }
        if let Some(finished) = update.finished {
            self.end_call(out);
            self.finished = finished;
        }
    }

    fn end(&mut self, usage: Usage, out: &mut String) {
        write(out, &self.last(Said::default(), usage));
    }

    /// Clients read every line, so that it must be one that adds nothing.
    fn ping(&mut self, out: &mut String) {
        self.push(Said::default(), out);
    }

    fn error(&mut self, error: &ApiError, out: &mut String) {
        write(out, &json!({ "error": error.message }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn update(parts: Vec<Part>, finished: Option<&'static str>) -> Update {
        Update { choice: 0, parts, tokens: Vec::new(), finished, stop_string: None }
    }

    fn lines(updates: Vec<Update>) -> Vec<Value> {
        let (mut lines, mut out) = (Lines::new(Form::Chat, "m".into()), String::new());
        lines.begin(&mut out);
        updates.into_iter().for_each(|update| lines.update(update, &mut out));
        lines.end(Usage::default(), &mut out);
        out.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["message"].clone()).collect()
    }

    #[test]
    fn a_call_is_one_line_when_its_arguments_are_complete() {
        let name = |index, name: &str| Part::Call { index, name: name.into() };
        let arguments = |index, text: &str| Part::Arguments { index, text: text.into() };
        let content = |text: &str| Part::Content { text: text.into(), logprobs: Vec::new() };
        let call = |name: &str, arguments: Value| {
            let call = json!({ "function": { "name": name, "arguments": arguments } });
            json!({ "role": "assistant", "content": "", "tool_calls": [call] })
        };
        let said = |text: &str| json!({ "role": "assistant", "content": text });
        let thought = json!({ "role": "assistant", "content": "", "thinking": "Hm" });
        let first = vec![Part::Reasoning("Hm".into()), content("Look: "), name(0, "a"), arguments(0, "{\"x\":")];
        let then = vec![arguments(0, "[1]}"), name(1, "b"), arguments(1, "{}"), content(".")];
        let found = lines(vec![update(first.clone(), None), update(then, None), update(vec![], Some("tool_calls"))]);
        let expected = [
            thought.clone(),
            said("Look: "),
            call("a", json!({ "x": [1] })),
            call("b", json!({})),
            said("."),
            said(""),
        ];
        assert_eq!(found, expected);
        // One that a limit has cut is no call.
        assert_eq!(lines(vec![update(first, Some("length"))]), [thought, said("Look: "), said("")]);
        let whole =
            Whole { calls: vec![("a".into(), "{\"x\":".into()), ("b".into(), "{}".into())], ..Whole::default() };
        let whole = Lines::new(Form::Chat, "m".into()).whole(&whole, "length", Usage::default());
        assert_eq!((&whole["message"], &whole["done_reason"]), (&call("b", json!({})), &json!("length")));
    }
}
