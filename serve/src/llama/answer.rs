//! Answers of `/completion`: one object at the end, and pieces before it where they are streamed.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::completion::{Asked, settings};
use crate::answer::Part;
use crate::app::App;
use crate::chat::number;
use crate::logprobs::Logprobs;
use crate::progress::{Update, Usage};
use crate::sse::{Events, event};

/// Writes one answer.
pub struct CompletionAnswer {
    app: Arc<App>,
    settings: Map<String, Value>,
    prompt: String,
    has_probabilities: bool,
    return_tokens: bool,
    /// Of the stream so far, where every piece says it.
    measured: Option<Usage>,
    content: String,
    tokens: Vec<u32>,
    probabilities: Vec<Value>,
    finished: &'static str,
    stop_string: Option<String>,
}

impl CompletionAnswer {
    pub fn new(app: Arc<App>, asked: &Asked) -> CompletionAnswer {
        let generation = &asked.completion.generation;
        CompletionAnswer {
            settings: settings(&app, generation),
            prompt: app.speech.tokenizer.decode(&asked.prompt, true).unwrap_or_default(),
            has_probabilities: generation.top_logprobs.is_some(),
            return_tokens: asked.return_tokens,
            measured: generation.has_timings.then(Usage::default),
            content: String::new(),
            tokens: Vec::new(),
            probabilities: Vec::new(),
            finished: "stop",
            stop_string: None,
            app,
        }
    }

    /// Adds what has come.
    pub fn add(&mut self, update: Update) {
        self.tokens.extend(update.tokens);
        for part in update.parts {
            if let Part::Content { text, logprobs } = part {
                self.content.push_str(&text);
                self.probabilities.extend(logprobs.iter().map(|found| probability(&self.app, found)));
            }
        }
        if let Some(finished) = update.finished {
            (self.finished, self.stop_string) = (finished, update.stop_string);
        }
    }

    /// What has been added and not given out, as the fields that every piece has.
    fn take(&mut self, has_tokens: bool, stop: bool) -> Map<String, Value> {
        let tokens = std::mem::take(&mut self.tokens);
        let mut piece = Map::new();
        piece.insert("index".into(), 0.into());
        piece.insert("content".into(), std::mem::take(&mut self.content).into());
        piece.insert("tokens".into(), if has_tokens { tokens } else { Vec::new() }.into());
        piece.insert("stop".into(), stop.into());
        let probabilities = std::mem::take(&mut self.probabilities);
        if self.has_probabilities && (stop || !probabilities.is_empty()) {
            piece.insert("completion_probabilities".into(), probabilities.into());
        }
        piece
    }

    /// The last object: all of what is left, and how it went.
    pub fn last(&mut self, usage: Usage) -> Value {
        let mut last = self.take(self.return_tokens, true);
        let stop_type = match (&self.stop_string, self.finished) {
            (Some(_), _) => "word",
            (None, "length") => "limit",
            _ => "eos",
        };
        for (name, value) in [
            ("model", self.app.model.as_str().into()),
            ("tokens_predicted", usage.completion.into()),
            ("tokens_evaluated", usage.prompt.into()),
            ("tokens_cached", usage.cached.into()),
            ("truncated", false.into()),
            ("stop_type", stop_type.into()),
            ("stopping_word", self.stop_string.clone().unwrap_or_default().into()),
            ("generation_settings", std::mem::take(&mut self.settings).into()),
            ("prompt", std::mem::take(&mut self.prompt).into()),
            ("timings", usage.timings()),
        ] {
            last.insert(name.into(), value);
        }
        Value::Object(last)
    }
}

/// How likely a token was, and the likeliest at its place.
fn probability(app: &App, found: &Logprobs) -> Value {
    let entry = |token: u32, logprob: f32| {
        let bytes = app.speech.bytes(token);
        json!({ "id": token, "token": String::from_utf8_lossy(&bytes), "bytes": bytes, "logprob": number(logprob) })
    };
    let mut of_token = entry(found.token, found.logprob);
    of_token["top_logprobs"] = found.top.iter().map(|(token, logprob)| entry(*token, *logprob)).collect();
    of_token
}

impl Events for CompletionAnswer {
    fn begin(&mut self, _: &mut String) {}

    fn update(&mut self, update: Update, out: &mut String) {
        self.add(update);
        if !self.content.is_empty() {
            let mut piece = self.take(true, false);
            if let Some(usage) = self.measured {
                piece.insert("timings".into(), usage.timings());
            }
            event(out, &Value::Object(piece));
        }
    }

    fn measure(&mut self, usage: Usage) {
        self.measured = self.measured.map(|_| usage);
    }

    fn end(&mut self, usage: Usage, out: &mut String) {
        event(out, &self.last(usage));
    }
}
