//! OpenAI's `POST /v1/audio/transcriptions`: what is said in a sound, as a chat with the model about it.
//!
//! The sound comes first and then an instruction, as the model was trained. One of more than 30 seconds is cut where it
//! is quiet, and its pieces are answered one after the other, each as a request of its own. The model tells no times,
//! so formats that need them are refused.

mod instruction;
mod multipart;
pub mod routes;
mod transcript;

use std::ops::Range;

use gemma4c_models::media::{MOST_SECONDS_IN_PIECES, decode_sound_up_to, split};
use serde_json::{Map, Value};
use tokio::sync::OwnedSemaphorePermit;

use crate::app::App;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::generation::Generation;

use instruction::instruction;
use multipart::Form;

/// Tokens of a piece's text, at most: three times what the fastest speech has in 30 seconds. A model that repeats
/// itself has to end.
const MOST_TOKENS: u32 = 1024;
/// Fields that are no texts, as forms write everything.
const NUMBERS: [&str; 9] =
    ["temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "stream", "repetition_penalty", "n"];

/// A request that was found right.
struct Asked {
    samples: Vec<f32>,
    pieces: Vec<Range<usize>>,
    instruction: String,
    generation: Generation,
    is_plain_text: bool,
    /// The memory of its samples.
    _held: OwnedSemaphorePermit,
}

impl Asked {
    fn read(app: &App, form: &Form<'_>) -> Result<Asked, ApiError> {
        let of_form = Value::Object(fields(form)?);
        let fields = app.fields(&of_form)?;
        let is_plain_text = is_plain_text(fields)?;
        for (name, what) in [("timestamp_granularities[]", "times"), ("include[]", "log probabilities")] {
            if fields.get(name).is_some() {
                return Err(ApiError::invalid(name, format!("{name}: a transcript comes without {what}")));
            }
        }
        let instruction = instruction(fields.text("language")?, fields.text("prompt")?)?;
        let mut generation = Generation::read(fields, &app.speech)?;
        if generation.choices != 1 {
            return Err(ApiError::invalid("n", "n must be 1: there is one transcript"));
        }
        if fields.get("temperature").is_none() {
            generation.sampling.temperature = 0.0;
        }
        generation.most = Some(generation.most.unwrap_or(MOST_TOKENS).clamp(1, MOST_TOKENS));
        generation.is_ceiling = true;
        if !app.senses.hears() {
            let reads = app.senses.modalities().join(", ");
            return Err(ApiError::invalid("file", format!("file: the plan has no tower for sounds; it reads {reads}")));
        }
        let file = form.file("file")?.ok_or_else(|| ApiError::invalid("file", "file is missing"))?;
        let samples = decode_sound_up_to(file, MOST_SECONDS_IN_PIECES);
        let samples = samples.map_err(|error| ApiError::invalid("file", format!("file: {error}")))?;
        let held = app.senses.hold(4 * samples.len())?;
        Ok(Asked { pieces: split(&samples), samples, instruction, generation, is_plain_text, _held: held })
    }
}

/// The fields of a form besides its file, as those of a request in JSON.
fn fields(form: &Form<'_>) -> Result<Map<String, Value>, ApiError> {
    let mut fields = Map::new();
    for (name, text) in form.texts("file")? {
        let number = serde_json::from_str::<Value>(text).ok().filter(|_| NUMBERS.contains(&name));
        fields.insert(name.into(), number.unwrap_or_else(|| text.into()));
    }
    Ok(fields)
}

fn is_plain_text(fields: Fields<'_>) -> Result<bool, ApiError> {
    let wrong = |message: String| Err(ApiError::invalid("response_format", message));
    match fields.text("response_format")? {
        None | Some("json") => Ok(false),
        Some("text") => Ok(true),
        Some(format @ ("srt" | "vtt" | "verbose_json" | "diarized_json")) => {
            wrong(format!("response_format {format:?} needs times, and the model tells none: ask for json or text"))
        }
        Some(other) => wrong(format!("response_format is {other:?}; expected json or text")),
    }
}
