//! `POST /tokenize` and `/detokenize`, in the words of vLLM and of llama-server.

use gemma4c_models::tokenizer::EncodeOptions;
use serde_json::{Value, json};

use crate::app::App;
use crate::chat::{template_options, wants_generation_prompt, wants_thinking};
use crate::completions::read_ids;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::media::Fetched;
use crate::prompt::{Conversation, Messages};
use crate::tools;

pub fn tokenize(app: &App, fields: Fields<'_>) -> Result<Value, ApiError> {
    let plain = |add_bos| EncodeOptions { add_bos, parse_special: false };
    let tokens = if fields.get("messages").is_some() {
        conversation(app, fields)?.encode(&app.speech, &app.senses)?.tokens
    } else if let Some(prompt) = fields.text("prompt")? {
        let add_bos = fields.get("add_special_tokens").is_none() || fields.flag("add_special_tokens")?;
        app.speech.tokenizer.encode(prompt, plain(add_bos))
    } else if let Some(content) = fields.text("content")? {
        let tokens = app.speech.tokenizer.encode(content, plain(fields.flag("add_special")?));
        return Ok(json!({ "tokens": tokens }));
    } else {
        return Err(ApiError::invalid("prompt", "prompt, messages or content is needed"));
    };
    Ok(json!({ "count": tokens.len(), "max_model_len": app.speech.context, "tokens": tokens }))
}

/// The conversation of a request that wants no answer.
pub fn conversation(app: &App, fields: Fields<'_>) -> Result<Conversation, ApiError> {
    let messages = fields.get("messages").ok_or_else(|| ApiError::invalid("messages", "messages is missing"))?;
    let (tools, _) = tools::read(fields)?;
    Ok(Conversation {
        messages: Messages::read(messages, &app.senses, &Fetched::default())?,
        tools: tools.into_iter().map(|tool| tool.declaration).collect(),
        thinking: wants_thinking(fields)?,
        generation_prompt: wants_generation_prompt(fields)?,
        options: template_options(fields)?,
    })
}

pub fn detokenize(app: &App, fields: Fields<'_>) -> Result<Value, ApiError> {
    let ids = fields.list("tokens")?.ok_or_else(|| ApiError::invalid("tokens", "tokens is missing"))?;
    let ids = read_ids("tokens", ids, app.speech.vocab_size)?;
    let text =
        app.speech.tokenizer.decode(&ids, true).map_err(|error| ApiError::invalid("tokens", error.to_string()))?;
    // One name for each of the two who are asked for it.
    Ok(json!({ "prompt": text, "content": text }))
}
