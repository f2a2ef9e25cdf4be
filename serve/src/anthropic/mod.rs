//! Anthropic's Messages: `POST /v1/messages`, whole and streamed, and `/v1/messages/count_tokens`.
//!
//! A request is translated into the conversation, the tools and the limits that one of `/v1/chat/completions` has, so
//! that the same request gets the same text. What nobody here can do (tools that run on Anthropic's servers, stored
//! files, PDF) is refused by the name of its field; what changes no answer (`metadata`, `cache_control`, beta headers)
//! is left alone.

mod events;
mod messages;
pub mod routes;
mod tools;

use serde_json::{Value, json};

use crate::app::App;
use crate::chat::{self, Chat, template_options};
use crate::constrain::Thoughts;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::generation::Generation;
use crate::media::Fetched;
use crate::prompt::{Conversation, Messages};
use crate::structure::Structure;
use crate::tools::{Declared, ToolChoice};

use messages::Turn;

/// Stop strings of a request, at most.
const MOST_STOPS: usize = 64;

/// Reads a request; takes as long as its prompt takes to encode.
fn prepare(app: &App, fields: Fields<'_>, fetched: &Fetched) -> Result<Chat, ApiError> {
    let most = fields.count("max_tokens", 1, u32::MAX as u64)?;
    let most = most.ok_or_else(|| ApiError::invalid("max_tokens", "max_tokens is missing"))? as u32;
    let thoughts = thoughts(fields)?;
    let turns = messages::read(fields)?;
    if let Some(last) = turns.last().filter(|turn| turn.is_assistant()) {
        let message = format!("{}: the last message must be the user's; an answer cannot be begun for it", last.param);
        return Err(ApiError::invalid(&last.param, message));
    }
    let (conversation, declared, choice) = conversation(app, fields, fetched, &turns, thoughts.wanted)?;
    let mut generation = Generation::read(fields, &app.speech)?;
    if generation.choices != 1 {
        return Err(ApiError::invalid("n", "n must be 1: a message is one answer"));
    }
    // Clients ask for the longest answer that the largest model may give.
    (generation.most, generation.is_ceiling) = (Some(most), true);
    generation.most_thoughts = thoughts.most.or(generation.most_thoughts);
    generation.stop = stop_sequences(fields)?;
    chat::prepare_conversation(app, generation, conversation, &declared, &choice, structure(fields)?)
}

/// The length of a request's prompt.
fn count_tokens(app: &App, fields: Fields<'_>, fetched: &Fetched) -> Result<Value, ApiError> {
    let turns = messages::read(fields)?;
    let (conversation, ..) = conversation(app, fields, fetched, &turns, thoughts(fields)?.wanted)?;
    let prompt = conversation.encode(&app.speech, &app.senses)?;
    Ok(json!({ "input_tokens": prompt.tokens.len() }))
}

fn conversation(
    app: &App,
    fields: Fields<'_>,
    fetched: &Fetched,
    turns: &[Turn],
    thinking: bool,
) -> Result<(Conversation, Vec<Declared>, ToolChoice), ApiError> {
    refuse_what_runs_elsewhere(fields)?;
    let (declared, choice) = tools::read(fields)?;
    let named = turns.iter().map(|turn| (turn.param.clone(), &turn.message, turn.parts.as_slice()));
    let conversation = Conversation {
        messages: Messages::read_gathered(named, &app.senses, fetched)?,
        tools: declared.iter().map(|tool| tool.declaration.clone()).collect(),
        thinking,
        generation_prompt: true,
        options: template_options(fields)?,
    };
    Ok((conversation, declared, choice))
}

fn refuse_what_runs_elsewhere(fields: Fields<'_>) -> Result<(), ApiError> {
    fields.object("metadata")?;
    let servers = fields.list("mcp_servers")?.unwrap_or_default();
    for (name, is_wanted) in [("mcp_servers", !servers.is_empty()), ("container", fields.get("container").is_some())] {
        if is_wanted {
            let message = format!("{name}: this server runs no tools; its clients run those of `tools`");
            return Err(ApiError::invalid(name, message));
        }
    }
    Ok(())
}

/// Adaptive is what the model does when it is let: it decides by itself how long to think.
fn thoughts(fields: Fields<'_>) -> Result<Thoughts, ApiError> {
    let Some(thinking) = fields.object("thinking")? else { return Ok(Thoughts::default()) };
    let wrong = |field: &str, expected: &str| {
        let param = format!("thinking.{field}");
        ApiError::invalid(&param, format!("{param} must be {expected}"))
    };
    match thinking.get("type").and_then(Value::as_str) {
        Some("enabled") => {
            let most = thinking.count("budget_tokens", 1, u32::MAX as u64).map_err(|error| error.within("thinking"))?;
            let most = most.ok_or_else(|| wrong("budget_tokens", "a whole number where thinking is enabled"))?;
            Ok(Thoughts { wanted: true, most: Some(most as u32) })
        }
        Some("adaptive") => Ok(Thoughts { wanted: true, most: None }),
        Some("disabled") => Ok(Thoughts::default()),
        _ => Err(wrong("type", "enabled, adaptive or disabled")),
    }
}

fn stop_sequences(fields: Fields<'_>) -> Result<Vec<String>, ApiError> {
    fields.list("stop_sequences")?;
    fields.texts("stop_sequences", MOST_STOPS)
}

/// The form that an answer must have.
fn structure(fields: Fields<'_>) -> Result<Option<Structure>, ApiError> {
    let config = fields.object("output_config")?;
    let format = config.map(|config| config.object("format")).transpose();
    let Some(format) = format.map_err(|error| error.within("output_config"))?.flatten() else { return Ok(None) };
    if format.get("type").and_then(Value::as_str) != Some("json_schema") {
        let param = "output_config.format.type";
        return Err(ApiError::invalid(param, format!("{param} must be json_schema")));
    }
    let param = "output_config.format.schema".to_owned();
    match format.get("schema").filter(|schema| schema.is_object()) {
        Some(schema) => Ok(Some(Structure::JsonSchema { schema: schema.clone(), param })),
        None => Err(ApiError::invalid(&param, format!("{param} must be a JSON schema"))),
    }
}
