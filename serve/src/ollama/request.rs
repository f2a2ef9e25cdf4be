//! Requests of `/api/chat` and `/api/generate` as ours.

use serde_json::{Map, Value, json};

use super::options::{ends_at_once, read, read_images};
use crate::app::{App, Prepared};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::media::Fetched;
use crate::raw::encode;
use crate::translated::Translated;

/// What a request is for.
pub enum Asked {
    /// Without a text: the model is to be in memory, or out of it.
    Load {
        unload: bool,
    },
    Answer {
        stream: bool,
        prepared: Box<Prepared>,
    },
}

/// A request, and what it calls the model: answers repeat that.
pub struct Request {
    pub model: String,
    pub asked: Asked,
}

fn request(app: &App, fields: Fields<'_>, asked: Asked) -> Result<Request, ApiError> {
    Ok(Request { model: fields.text("model")?.unwrap_or(&app.model).to_owned(), asked })
}

/// Streams unless it is told not to.
pub fn wants_stream(fields: Fields<'_>) -> Result<bool, ApiError> {
    Ok(fields.get("stream").is_none() || fields.flag("stream")?)
}

pub fn chat(app: &App, fields: Fields<'_>, fetched: &Fetched) -> Result<Request, ApiError> {
    let unload = ends_at_once(fields)?;
    let stream = wants_stream(fields)?;
    let given = fields.list("messages")?.unwrap_or_default();
    if given.is_empty() {
        return request(app, fields, Asked::Load { unload });
    }
    let mut body = Translated::default();
    read(fields, &mut body)?;
    let messages = given.iter().enumerate().map(|(index, message)| read_message(index, message, &mut body));
    let messages = messages.collect::<Result<Vec<Value>, ApiError>>()?;
    body.put("messages", "messages", messages);
    body.take(fields, "", &[("tools", "tools")]);
    let prepared = Box::new(body.chat(app, fetched)?.prepared);
    request(app, fields, Asked::Answer { stream, prepared })
}

/// A message in our words. Its role is read by whoever reads ours.
fn read_message(index: usize, message: &Value, body: &mut Translated) -> Result<Value, ApiError> {
    let param = format!("messages[{index}]");
    let Value::Object(given) = message else {
        return Err(ApiError::invalid(&param, format!("{param} must be an object")));
    };
    let text = |name: &str| match given.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.as_str())),
        Some(_) => {
            let param = format!("{param}.{name}");
            Err(ApiError::invalid(&param, format!("{param} must be a text")))
        }
    };
    let said = text("content")?.unwrap_or_default();
    let images = read_images(&format!("{param}.images"), given.get("images"))?;
    let mut read = Map::new();
    for name in ["role", "tool_calls", "tool_call_id"] {
        if let Some(value) = given.get(name) {
            read.insert(name.into(), value.clone());
        }
    }
    if let Some(thinking) = text("thinking")? {
        read.insert("thinking".into(), thinking.into());
    }
    // Older clients name the tool as OpenAI's do.
    if let Some(tool) = text("tool_name")?.map_or_else(|| text("name"), |tool| Ok(Some(tool)))? {
        read.insert("name".into(), tool.into());
    }
    if !images.is_empty() {
        body.call(&format!("{param}.content"), &format!("{param}.images"));
    }
    read.insert("content".into(), content(said, images));
    Ok(Value::Object(read))
}

pub fn generate(app: &App, fields: Fields<'_>, fetched: &Fetched) -> Result<Request, ApiError> {
    for (name, instead) in [
        ("suffix", "the model was not trained to fill gaps in a text"),
        ("template", "the model's own chat template is used; send \"raw\": true with a prompt that you made yourself"),
    ] {
        if fields.text(name)?.is_some_and(|text| !text.is_empty()) {
            return Err(ApiError::invalid(name, format!("{name} is not supported: {instead}")));
        }
    }
    if fields.list("context")?.is_some_and(|context| !context.is_empty()) {
        let message =
            "context is not supported: send the conversation to /api/chat, which keeps what it has read of it";
        return Err(ApiError::invalid("context", message));
    }
    let unload = ends_at_once(fields)?;
    let stream = wants_stream(fields)?;
    let prompt = fields.text("prompt")?.unwrap_or_default();
    let images = read_images("images", fields.get("images"))?;
    let system = fields.text("system")?.unwrap_or_default();
    let raw = fields.flag("raw")?;
    if prompt.is_empty() && images.is_empty() {
        return request(app, fields, Asked::Load { unload });
    }
    let mut body = Translated::default();
    read(fields, &mut body)?;
    let prepared = match raw {
        true => {
            for (name, is_there) in [("images", !images.is_empty()), ("system", !system.is_empty())] {
                if is_there {
                    let message = format!("{name} has no place in a prompt that is taken as it is (\"raw\": true)");
                    return Err(ApiError::invalid(name, message));
                }
            }
            if fields.get("options").and_then(|options| options.get("num_predict")).is_none_or(Value::is_null) {
                body.put("max_tokens", "options.num_predict", -1);
            }
            body.put("prompt", "prompt", encode(app, "prompt", &[prompt.into()])?);
            body.completion(app)?.prepared
        }
        false => {
            body.put("messages", "prompt", messages(system, prompt, images));
            let user = usize::from(!system.is_empty());
            body.call(&format!("messages[{user}].content"), "images");
            body.chat(app, fetched)?.prepared
        }
    };
    request(app, fields, Asked::Answer { stream, prepared: Box::new(prepared) })
}

/// What a prompt is in a chat: the user's message, behind that of the system.
fn messages(system: &str, prompt: &str, images: Vec<Value>) -> Vec<Value> {
    let system = (!system.is_empty()).then(|| json!({ "role": "system", "content": system }));
    system.into_iter().chain([json!({ "role": "user", "content": content(prompt, images) })]).collect()
}

/// A text, behind pictures and sounds where there are any.
fn content(text: &str, mut images: Vec<Value>) -> Value {
    if images.is_empty() {
        return text.into();
    }
    images.extend((!text.is_empty()).then(|| json!({ "type": "text", "text": text })));
    images.into()
}
