//! The models of this server as ollama lists, shows and pulls models. They are those that it was started with.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::request::wants_stream;
use crate::adapters::Listed;
use crate::app::App;
use crate::clock;
use crate::error::ApiError;
use crate::fields::{Fields, decimal};
use crate::language::Mark;
use crate::models::Models;

/// The version of ollama whose API this is: clients ask for features by it.
const API_VERSION: &str = "0.12.0";

/// The last second that RFC 3339 can tell: what is never put out of memory.
const NEVER: u64 = 253_402_300_799;

/// A name has a tag in lists, and clients compare it with the one that they were given.
fn tagged(name: &str) -> String {
    let last = name.rsplit('/').next().unwrap_or(name);
    if last.contains(':') { name.to_owned() } else { format!("{name}:latest") }
}

fn details(app: &App) -> Value {
    let about = &app.about;
    json!({
        "parent_model": app.parent.as_deref().unwrap_or_default(),
        "format": "gguf",
        "family": about.architecture,
        "families": [about.architecture],
        "parameter_size": about.size(),
        "quantization_level": about.quantization,
    })
}

/// The adapter that a name stands for.
fn adapter(app: &App) -> Option<Listed> {
    app.parent.as_ref().and_then(|_| app.adapters.listed(&app.model))
}

/// Of the weights' files.
fn bytes(app: &App) -> u64 {
    adapter(app).map_or(app.about.bytes, |adapter| adapter.bytes)
}

/// That of the plan, which changes with the model and with how it was compiled; of an adapter that of its weights.
fn digest(app: &App) -> String {
    adapter(app).map_or_else(|| app.fingerprint.clone(), |adapter| format!("{:032x}", adapter.digest))
}

/// What lists have of a model.
fn listed(app: &App, size: u64) -> Map<String, Value> {
    let name = tagged(&app.model);
    let listed = json!({
        "name": name, "model": name, "size": size, "digest": digest(app), "details": details(app),
    });
    listed.as_object().cloned().unwrap_or_default()
}

/// `GET /api/tags`. A model is as old as the server that offers it.
pub fn tags(served: &Models) -> Value {
    let of = |app: &Arc<App>| {
        let mut model = listed(app, bytes(app));
        model.insert("modified_at".into(), clock::at(app.created).into());
        Value::Object(model)
    };
    json!({ "models": served.with_adapters().iter().map(of).collect::<Vec<_>>() })
}

/// `GET /api/ps`: those in memory.
pub fn running(served: &Models) -> Value {
    let of = |app: &Arc<App>| {
        let on_gpu = app.slot.ready()?.memory_bytes;
        let mut model = listed(app, on_gpu.filter(|_| app.parent.is_none()).unwrap_or_else(|| bytes(app)));
        model.insert("expires_at".into(), clock::at(NEVER).into());
        model.insert("size_vram".into(), on_gpu.unwrap_or(0).into());
        model.insert("context_length".into(), app.speech.context.into());
        Some(Value::Object(model))
    };
    json!({ "models": served.with_adapters().iter().filter_map(of).collect::<Vec<_>>() })
}

pub fn version() -> Value {
    json!({ "version": API_VERSION, "gemma4c": env!("CARGO_PKG_VERSION") })
}

/// What the model can do, by its template, its markers and its towers.
fn capabilities(app: &App) -> Vec<&'static str> {
    let (about, senses) = (&app.about, app.senses.modalities());
    let has = |mark| app.speech.id(mark).is_some();
    let all = [
        ("completion", true),
        ("tools", about.template_reads("tools") && has(Mark::CallOpen)),
        ("vision", senses.contains(&"image")),
        ("audio", senses.contains(&"audio")),
        ("thinking", about.template_reads("enable_thinking") && has(Mark::ChannelOpen)),
    ];
    all.into_iter().filter(|(_, can)| *can).map(|(name, _)| name).collect()
}

/// The name of a request about a model, which older clients call `name`.
fn named(fields: Fields<'_>) -> Result<&str, ApiError> {
    let name = fields.text("model")?.map_or_else(|| fields.text("name"), |name| Ok(Some(name)))?;
    name.filter(|name| !name.is_empty()).ok_or_else(|| ApiError::invalid("model", "model is missing"))
}

fn object(body: &Value) -> Result<Fields<'_>, ApiError> {
    let fields = body.as_object().map(Fields);
    fields.ok_or_else(|| ApiError::bad_request("json_parse_error", "the body must be a JSON object"))
}

/// `POST /api/show`.
pub fn show(served: &Models, body: &Value) -> Result<Value, ApiError> {
    let app = served.named(named(object(body)?)?)?;
    let about = &app.about;
    let sampling = app.speech.sampling;
    let parameters = [
        ("temperature", decimal(sampling.temperature)),
        ("top_k", sampling.top_k.into()),
        ("top_p", decimal(sampling.top_p)),
    ];
    let parameters = parameters.map(|(name, value)| format!("{name:<31}{value}"));
    let mut modelfile: Vec<String> = about.path.iter().map(|path| format!("FROM {path}")).collect();
    modelfile.extend(adapter(&app).map(|adapter| format!("ADAPTER {}", adapter.path)));
    modelfile.extend(parameters.iter().map(|line| format!("PARAMETER {line}")));
    let of_model = |name: &str| format!("{}.{name}", about.architecture);
    let mut info = Map::new();
    info.insert("general.architecture".into(), about.architecture.as_str().into());
    info.extend(about.name.as_deref().map(|name| ("general.name".to_owned(), Value::from(name))));
    info.insert("general.parameter_count".into(), about.parameters.into());
    info.insert(of_model("block_count"), about.layers.into());
    info.insert(of_model("context_length"), about.trained_context.into());
    info.insert(of_model("embedding_length"), about.hidden.into());
    info.insert(of_model("vocab_size"), app.speech.vocab_size.into());
    Ok(json!({
        "modelfile": modelfile.join("\n"),
        "parameters": parameters.join("\n"),
        "template": about.template,
        "details": details(&app),
        "model_info": info,
        "capabilities": capabilities(&app),
        "modified_at": clock::at(app.created),
    }))
}

/// `POST /api/pull`: whether the answer is a stream. A model that is served needs no pulling.
pub fn pull(served: &Models, body: &Value) -> Result<bool, ApiError> {
    let fields = object(body)?;
    let (name, stream) = (named(fields)?, wants_stream(fields)?);
    served.named(name).map(|_| stream).map_err(|error| {
        let message = format!(
            "{}; this server pulls none while it runs. To serve the other, start one with its name: gemma4c serve {}",
            error.message,
            quoted(name)
        );
        ApiError { message, ..error }
    })
}

/// As a shell takes it.
fn quoted(name: &str) -> String {
    match name.chars().all(|c| c.is_ascii_alphanumeric() || "_-./:".contains(c)) {
        true => name.to_owned(),
        false => format!("'{}'", name.replace('\'', "'\\''")),
    }
}

/// What is refused whatever it says.
pub fn refused(path: &str) -> ApiError {
    let message = match path {
        "/api/embed" | "/api/embeddings" => {
            "embeddings are not served: the hidden states of a generator embed poorly; use a model made for it".into()
        }
        path => format!(
            "{path} is not served: which model runs is said when the server is started, with gemma4c serve NAME; \
             gemma4c pull NAME fetches one before that"
        ),
    };
    ApiError::bad_request("unsupported", message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_a_tag_and_commands_are_quoted() {
        assert_eq!(tagged("tiny"), "tiny:latest");
        assert_eq!(tagged("unsloth/gemma:UD-Q4_K_XL"), "unsloth/gemma:UD-Q4_K_XL");
        assert_eq!(tagged("localhost:80/gemma"), "localhost:80/gemma:latest");
        assert_eq!(quoted("ggml-org/gemma-4-E4B-it-GGUF:Q8_0"), "ggml-org/gemma-4-E4B-it-GGUF:Q8_0");
        assert_eq!(quoted("a'b; c"), "'a'\\''b; c'");
    }
}
