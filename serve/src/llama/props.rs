//! What llama-server says of itself: `/props`, `/slots` and `/apply-template`. Its web UI reads the first to know what
//! it may send.

use serde_json::{Value, json};

use super::completion::settings;
use crate::app::App;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::generation::Generation;
use crate::tokens::conversation;

/// How an answer is generated whose request says nothing of it.
fn usual(app: &App) -> Result<Value, ApiError> {
    let nothing = serde_json::Map::new();
    let generation = Generation::read(Fields(&nothing), &app.speech)?;
    let mut settings = settings(app, &generation);
    // The seed is another one for each request; this number says that.
    settings.insert("seed".into(), u32::MAX.into());
    Ok(Value::Object(settings))
}

/// `GET /props`.
pub fn props(app: &App) -> Result<Value, ApiError> {
    let (about, senses) = (&app.about, app.senses.modalities());
    Ok(json!({
        "default_generation_settings": { "n_ctx": app.speech.context, "params": usual(app)? },
        "total_slots": app.slot.ready().map(|ready| ready.sequences),
        "model_alias": app.model,
        "model_path": about.path,
        "modalities": {
            "vision": senses.contains(&"image"), "audio": senses.contains(&"audio"), "video": senses.contains(&"image"),
        },
        "chat_template": about.template.as_deref().unwrap_or_default(),
        "bos_token": about.bos,
        "eos_token": about.eos,
        "build_info": concat!("gemma4c-", env!("CARGO_PKG_VERSION")),
        "is_sleeping": !app.slot.is_here(),
    }))
}

/// `GET /slots`. Sequences are counted here and have no numbers that stay: the first so many are those in use.
pub fn slots(app: &App, fails_if_none_is_free: bool) -> Result<Value, ApiError> {
    let total = app.slot.ready().map_or(0, |ready| ready.sequences as usize);
    let (running, _) = app.state.metrics.occupation();
    if fails_if_none_is_free && running >= total {
        return Err(ApiError::unavailable("no_slot", "all slots are in use"));
    }
    let slot = |id: usize| json!({ "id": id, "n_ctx": app.speech.context, "is_processing": id < running });
    Ok((0..total).map(slot).collect())
}

/// `POST /apply-template`. The prompt is without the token that every prompt begins with, as `/completion` adds it.
pub fn apply_template(app: &App, fields: Fields<'_>) -> Result<Value, ApiError> {
    let text = conversation(app, fields)?.text(&app.speech)?;
    Ok(json!({ "prompt": text.strip_prefix(app.about.bos.as_str()).unwrap_or(&text) }))
}
