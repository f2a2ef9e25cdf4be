//! What a request says of tokens that are to be less likely, or more: penalties, biases, min-p, DRY.

use std::sync::Arc;

use gemma4c_runtime::{Dry, Penalties, ranges};
use serde_json::Value;

use crate::error::ApiError;
use crate::fields::Fields;
use crate::speech::Speech;

const MOST_BIASES: usize = 1024;
/// Texts that end a match of DRY, at most.
const MOST_BREAKERS: usize = 64;

pub fn read(fields: Fields<'_>, speech: &Speech) -> Result<Penalties, ApiError> {
    // In vLLM's words or in llama-server's.
    let repetition = ["repetition_penalty", "repeat_penalty"].into_iter().find(|name| fields.get(name).is_some());
    let repetition = repetition.unwrap_or("repetition_penalty");
    Ok(Penalties {
        presence: fields.number("presence_penalty", ranges::PRESENCE_PENALTY)?.unwrap_or(0.0) as f32,
        frequency: fields.number("frequency_penalty", ranges::FREQUENCY_PENALTY)?.unwrap_or(0.0) as f32,
        repetition: fields.number(repetition, ranges::REPETITION_PENALTY)?.unwrap_or(1.0) as f32,
        min_p: fields.number("min_p", ranges::MIN_P)?.unwrap_or(0.0) as f32,
        dry: dry(fields, speech)?,
        biases: biases(fields, speech.vocab_size)?,
        last: match fields.is_unlimited("repeat_last_n") {
            true => None,
            false => fields.count("repeat_last_n", 0, u32::MAX as u64)?.map(|last| last as u32),
        },
    })
}

/// Under the names of llama-server.
fn dry(fields: Fields<'_>, speech: &Speech) -> Result<Dry, ApiError> {
    let usual = Dry::default();
    let multiplier = fields.number("dry_multiplier", ranges::DRY_MULTIPLIER)?.map_or(usual.multiplier, |n| n as f32);
    let base = fields.number("dry_base", ranges::DRY_BASE)?.map_or(usual.base, |n| n as f32);
    let allowed = fields.count("dry_allowed_length", 0, u32::MAX as u64)?.map_or(usual.allowed, |n| n as u32);
    let latest = match fields.is_unlimited("dry_penalty_last_n") {
        true => Some(0),
        false => fields.count("dry_penalty_last_n", 0, u32::MAX as u64)?.map(|n| n as u32).filter(|n| *n > 0),
    };
    // A number of 0 looks back at nothing.
    let is_off = multiplier == 0.0 || (latest.is_none() && fields.get("dry_penalty_last_n").is_some());
    let texts = match fields.get("dry_sequence_breakers") {
        None => None,
        Some(_) => Some(fields.texts("dry_sequence_breakers", MOST_BREAKERS)?),
    };
    if is_off {
        return Ok(usual);
    }
    Ok(Dry {
        multiplier,
        base,
        allowed,
        latest: latest.unwrap_or(usual.latest),
        breakers: speech.breakers(texts.as_deref()),
    })
}

fn biases(fields: Fields<'_>, vocab: u32) -> Result<Arc<[(u32, f32)]>, ApiError> {
    let Some(Fields(biases)) = fields.object("logit_bias")? else { return Ok(Arc::default()) };
    if biases.len() > MOST_BIASES {
        let message = format!("logit_bias must name at most {MOST_BIASES} tokens; found {}", biases.len());
        return Err(ApiError::invalid("logit_bias", message));
    }
    let bias = |(token, value): (&String, &Value)| {
        let token: Option<u32> = token.parse().ok().filter(|token| *token < vocab);
        let value = value.as_f64().filter(|value| (-100.0..=100.0).contains(value));
        token.zip(value.map(|value| value as f32)).ok_or_else(|| {
            let message = format!("logit_bias must map token ids below {vocab} to numbers from -100 to 100");
            ApiError::invalid("logit_bias", message)
        })
    };
    biases.iter().map(bias).collect()
}
