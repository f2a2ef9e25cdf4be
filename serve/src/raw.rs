//! Prompts that clients make themselves, markers included, as `/completion` and ollama's raw mode take them.
//!
//! Everywhere else a marker that a client spells is text. Here it is a control token, which is what these prompts are
//! for: a client that puts other people's words into one answers for them.

use gemma4c_models::tokenizer::EncodeOptions;
use serde_json::Value;

use crate::app::App;
use crate::completions::read_ids;
use crate::error::ApiError;

/// The ids of a prompt of texts and ids one after another. It begins as every prompt of the model does, whether or not
/// the client says so.
pub fn encode(app: &App, param: &str, parts: &[Value]) -> Result<Vec<u32>, ApiError> {
    let mut tokens = Vec::new();
    for (index, part) in parts.iter().enumerate() {
        match part {
            Value::String(text) => {
                app.speech.check_length(text)?;
                let has_bos = !app.about.bos.is_empty() && text.starts_with(&app.about.bos);
                let add_bos = index == 0 && !has_bos;
                let options = EncodeOptions { add_bos, parse_special: true };
                tokens.extend(app.speech.tokenizer.encode(text, options));
            }
            id => tokens.extend(read_ids(param, std::slice::from_ref(id), app.speech.vocab_size)?),
        }
    }
    app.speech.refuse_placeholders(param, &tokens)?;
    Ok(tokens)
}
