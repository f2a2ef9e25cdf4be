//! A body in the words of another API as one of ours, and errors about it back in the words of the client.
//!
//! The fields of chat and of completions are the one language that requests are read in, so that a request has the same
//! answer through every API. Nothing is checked here that is checked there.

use serde_json::{Map, Value};

use crate::app::App;
use crate::chat::{self, Chat};
use crate::completions::{self, Completion};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::generation::Generation;
use crate::media::Fetched;

/// The fields of sampling that ollama and llama-server have alike, and our names for them.
pub const SAMPLING: [(&str, &str); 8] = [
    ("temperature", "temperature"),
    ("top_k", "top_k"),
    ("top_p", "top_p"),
    ("min_p", "min_p"),
    ("repeat_penalty", "repetition_penalty"),
    ("repeat_last_n", "repeat_last_n"),
    ("presence_penalty", "presence_penalty"),
    ("frequency_penalty", "frequency_penalty"),
];

/// Stop strings of a request: these APIs name no limit.
const MOST_STOPS: usize = 64;

/// A request of ours in the making.
#[derive(Default)]
pub struct Translated {
    body: Map<String, Value>,
    /// A field of ours, and what the client calls it.
    names: Vec<(String, String)>,
    stop: Vec<String>,
}

impl Translated {
    /// A field, under our name and the client's.
    pub fn put(&mut self, ours: &str, theirs: &str, value: impl Into<Value>) {
        self.body.insert(ours.into(), value.into());
        self.call(ours, theirs);
    }

    /// What the client calls a field of ours, or a part of one.
    pub fn call(&mut self, ours: &str, theirs: &str) {
        if ours != theirs {
            self.names.push((ours.into(), theirs.into()));
        }
    }

    /// Takes fields over, each as it is, under another name. `prefix` is what comes before a name where these are the
    /// fields of an object in the body.
    pub fn take(&mut self, fields: Fields<'_>, prefix: &str, names: &[(&str, &str)]) {
        for (theirs, ours) in names {
            if let Some(value) = fields.get(theirs) {
                self.put(ours, &format!("{prefix}{theirs}"), value.clone());
            }
        }
    }

    /// The stop strings, of which there may be more than in OpenAI's API.
    pub fn take_stops(&mut self, fields: Fields<'_>, prefix: &str) -> Result<(), ApiError> {
        self.call("stop", &format!("{prefix}stop"));
        self.stop = fields.texts("stop", MOST_STOPS).map_err(|error| self.rename(error))?;
        Ok(())
    }

    /// The same for a number whose -1 says what is said by leaving it out.
    pub fn take_unless_minus_one(&mut self, fields: Fields<'_>, prefix: &str, theirs: &str, ours: &str) {
        if fields.get(theirs).is_some_and(|value| value.as_i64() != Some(-1)) {
            self.take(fields, prefix, &[(theirs, ours)]);
        }
    }

    pub fn chat(self, app: &App, fetched: &Fetched) -> Result<Chat, ApiError> {
        let fields = Fields(&self.body);
        let generation = self.generation(app);
        let chat = generation.and_then(|generation| chat::prepare_generation(app, fields, fetched, generation));
        chat.map_err(|error| self.rename(error))
    }

    pub fn completion(self, app: &App) -> Result<Completion, ApiError> {
        let generation = self.generation(app);
        let fields = Fields(&self.body);
        let completion = generation.and_then(|generation| completions::prepare_generation(app, fields, generation));
        completion.map_err(|error| self.rename(error))
    }

    /// A limit is one on what there may be, and no promise that there is room for it.
    fn generation(&self, app: &App) -> Result<Generation, ApiError> {
        let mut generation = Generation::read(Fields(&self.body), &app.speech)?;
        (generation.stop, generation.is_ceiling) = (self.stop.clone(), true);
        Ok(generation)
    }

    /// An error about a field of ours as one about the client's.
    fn rename(&self, error: ApiError) -> ApiError {
        let Some(param) = &error.param else { return error };
        let renamed = |(ours, theirs): &(String, String)| {
            let rest = param.strip_prefix(ours.as_str())?;
            (rest.is_empty() || rest.starts_with(['.', '['])).then(|| (ours.len(), format!("{theirs}{rest}")))
        };
        let longest = self.names.iter().filter_map(renamed).max_by_key(|(length, _)| *length);
        let name = longest.map_or_else(|| param.clone(), |(_, name)| name);
        let message = match error.message.strip_prefix(param.as_str()) {
            Some(rest) => format!("{name}{rest}"),
            None if error.message.contains(&name) => error.message,
            None => format!("{name}: {}", error.message),
        };
        ApiError { param: Some(name), message, ..error }
    }
}

/// Refuses settings that we do not have, unless their value changes nothing.
pub fn refuse_unless_neutral(fields: Fields<'_>, prefix: &str, neutral: &[(&str, f64)]) -> Result<(), ApiError> {
    for (name, unused) in neutral {
        let is_unused = |value: &Value| match value {
            Value::Bool(flag) => f64::from(u8::from(*flag)) == *unused,
            Value::Array(list) => list.is_empty(),
            Value::String(text) => text.is_empty(),
            value => value.as_f64() == Some(*unused),
        };
        if fields.get(name).is_some_and(|value| !is_unused(value)) {
            let param = format!("{prefix}{name}");
            let message = format!("{param} is not supported; {unused}, which changes nothing, is taken");
            return Err(ApiError::invalid(&param, message));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn errors_name_the_clients_field() {
        let mut body = Translated::default();
        body.put("max_tokens", "options.num_predict", 1);
        body.call("messages[0]", "system");
        body.call("messages[1].content[0]", "images[0]");
        body.call("messages", "prompt");
        for (param, message, renamed) in [
            ("max_tokens", "max_tokens must be small", "options.num_predict must be small"),
            ("messages[0]", "messages[0] is odd", "system is odd"),
            ("messages[1].content[0]", "messages[1].content[0]: no picture", "images[0]: no picture"),
            ("messages[1].content[0].x", "no picture", "images[0].x: no picture"),
            ("messages", "the template says no", "prompt: the template says no"),
            ("tools[0]", "tools[0] is odd", "tools[0] is odd"),
            ("max_tokens_of_another", "odd", "max_tokens_of_another: odd"),
        ] {
            assert_eq!(body.rename(ApiError::invalid(param, message)).message, renamed);
        }
        let unnamed = ApiError::bad_request("x", "max_tokens");
        assert_eq!(body.rename(unnamed.clone()), unnamed);
    }

    #[test]
    fn what_changes_nothing_is_taken() {
        let check = |value: Value| {
            let fields = json!({ "mirostat": value });
            refuse_unless_neutral(Fields(fields.as_object().unwrap()), "options.", &[("mirostat", 0.0)])
        };
        for value in [json!(0), json!(0.0), json!(false), json!(null), json!([]), json!("")] {
            assert_eq!(check(value), Ok(()));
        }
        let error = check(json!(1)).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("options.mirostat"));
        assert!(error.message.starts_with("options.mirostat is not supported"), "{}", error.message);
    }
}
