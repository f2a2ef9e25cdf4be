//! `POST /completion` of llama-server as ours: one prompt, continued as it stands, markers included.

use serde_json::{Map, Value, json};

use crate::app::App;
use crate::completions::Completion;
use crate::error::ApiError;
use crate::fields::{Fields, decimal};
use crate::generation::{Generation, any_seed};
use crate::raw::encode;
use crate::translated::{SAMPLING, Translated, refuse_unless_neutral};

/// Fields under their names here, beside those of sampling.
const FIELDS: [(&str, &str); 9] = [
    ("dry_multiplier", "dry_multiplier"),
    ("dry_base", "dry_base"),
    ("dry_allowed_length", "dry_allowed_length"),
    ("dry_penalty_last_n", "dry_penalty_last_n"),
    ("dry_sequence_breakers", "dry_sequence_breakers"),
    ("ignore_eos", "ignore_eos"),
    ("json_schema", "json_schema"),
    ("timings_per_token", "timings_per_token"),
    ("lora", "lora"),
];

/// Settings that would change the answer and are not there, with the value that changes nothing.
const NEUTRAL: [(&str, f64); 12] = [
    ("typical_p", 1.0),
    ("typ_p", 1.0),
    ("top_n_sigma", -1.0),
    ("dynatemp_range", 0.0),
    ("xtc_probability", 0.0),
    ("mirostat", 0.0),
    ("min_keep", 0.0),
    ("n_indent", 0.0),
    ("n_cmpl", 1.0),
    ("t_max_predict_ms", 0.0),
    ("post_sampling_probs", 0.0),
    ("response_fields", 0.0),
];

/// A request that was found right.
pub struct Asked {
    pub completion: Completion,
    pub prompt: Vec<u32>,
    pub return_tokens: bool,
}

pub fn prepare(app: &App, fields: Fields<'_>) -> Result<Asked, ApiError> {
    if fields.text("grammar")?.is_some_and(|grammar| !grammar.is_empty()) {
        let message = "grammar is not supported: GBNF is not read here; json_schema is, and /v1/completions takes \
                       regular expressions and Lark grammars";
        return Err(ApiError::invalid("grammar", message));
    }
    refuse_unless_neutral(fields, "", &NEUTRAL)?;
    let mut body = Translated::default();
    body.take(fields, "", &SAMPLING);
    body.take(fields, "", &FIELDS);
    body.take_stops(fields, "")?;
    body.take_unless_minus_one(fields, "", "seed", "seed");
    body.put("max_tokens", "n_predict", fields.get("n_predict").cloned().unwrap_or(json!(-1)));
    // 0 asks for no list at all.
    if fields.get("n_probs").is_some_and(|count| count != &json!(0)) {
        body.take(fields, "", &[("n_probs", "logprobs")]);
    }
    // What nobody else can name is found in no cache.
    if fields.get("cache_prompt").is_some() && !fields.flag("cache_prompt")? {
        body.put("cache_salt", "cache_prompt", format!("{:016x}{:016x}", any_seed(), any_seed()));
    }
    if let Some(bias) = fields.get("logit_bias") {
        body.put("logit_bias", "logit_bias", read_bias(bias)?);
    }
    body.put("stream", "stream", fields.flag("stream")?);
    let prompt = encode(app, "prompt", &read_prompt(fields)?)?;
    body.put("prompt", "prompt", prompt.as_slice());
    Ok(Asked { return_tokens: fields.flag("return_tokens")?, completion: body.completion(app)?, prompt })
}

/// A text, or texts and ids one after another.
fn read_prompt(fields: Fields<'_>) -> Result<Vec<Value>, ApiError> {
    let wrong = |what: &str| Err(ApiError::invalid("prompt", format!("prompt must be one prompt: {what}")));
    match fields.get("prompt") {
        None => Err(ApiError::invalid("prompt", "prompt is missing")),
        Some(text @ Value::String(_)) => Ok(vec![text.clone()]),
        Some(Value::Array(parts)) => {
            let is_list_of_prompts = parts.len() > 1 && parts.iter().all(Value::is_string);
            match parts.iter().all(|part| part.is_string() || part.is_number()) && !is_list_of_prompts {
                true => Ok(parts.clone()),
                false => wrong("a list of several is for /v1/completions, pictures for /v1/chat/completions"),
            }
        }
        Some(_) => wrong("a text, or a list of texts and token ids"),
    }
}

/// Pairs of a token and its bias as OpenAI's object; `false` stands for never.
fn read_bias(bias: &Value) -> Result<Value, ApiError> {
    const NEVER: i32 = -100;
    let value = |value: &Value| if value == &Value::Bool(false) { json!(NEVER) } else { value.clone() };
    let wrong = || ApiError::invalid("logit_bias", "logit_bias must be pairs of a token's id and a number, or false");
    match bias {
        Value::Object(biases) => Ok(biases.iter().map(|(id, bias)| (id.clone(), value(bias))).collect()),
        Value::Array(pairs) => {
            let pair = |pair: &Value| match pair.as_array().map(Vec::as_slice) {
                Some([id @ Value::Number(_), bias]) => Ok((id.to_string(), value(bias))),
                _ => Err(wrong()),
            };
            Ok(Value::Object(pairs.iter().map(pair).collect::<Result<Map<String, Value>, ApiError>>()?))
        }
        _ => Err(wrong()),
    }
}

/// How an answer is generated, in llama-server's words.
pub fn settings(app: &App, generation: &Generation) -> Map<String, Value> {
    let (sampling, penalties) = (generation.sampling, &generation.penalties);
    let no_limit = |count: Option<u32>| count.map_or(json!(-1), Value::from);
    let settings = json!({
        "n_predict": no_limit(generation.most),
        "max_tokens": no_limit(generation.most),
        "seed": generation.seed,
        "temperature": decimal(sampling.temperature),
        "top_k": sampling.top_k,
        "top_p": decimal(sampling.top_p),
        "min_p": decimal(penalties.min_p),
        "repeat_last_n": no_limit(penalties.last),
        "repeat_penalty": decimal(penalties.repetition),
        "presence_penalty": decimal(penalties.presence),
        "frequency_penalty": decimal(penalties.frequency),
        "stop": generation.stop,
        "n_probs": generation.top_logprobs.unwrap_or(0),
        "stream": generation.stream,
        "n_ctx": app.speech.context,
    });
    settings.as_object().cloned().unwrap_or_default()
}
