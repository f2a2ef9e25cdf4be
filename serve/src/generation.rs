//! How an answer is to be generated: the fields that all endpoints share, checked, and the engine's requests made from
//! them.

use std::sync::Arc;

use gemma4c_plan::Sampling;
use gemma4c_runtime::engine::{BoxedRule, LONGEST_SALT, Request};
use gemma4c_runtime::{Penalised, Penalties, ranges};
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

use crate::adapters::Asked;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::penalties;
use crate::prompt::Prompt;
use crate::rules::{Guide, Rules};
use crate::speech::Speech;

pub use gemma4c_runtime::any_seed;

/// Choices of one request, at most.
pub const MOST_CHOICES: u64 = 16;
/// Tokens beside each one whose log probabilities may be asked for.
pub const MOST_TOP_LOGPROBS: u64 = 20;
const MOST_STOPS: usize = 4;

/// What a request says about its answer.
#[derive(Clone, Debug)]
pub struct Generation {
    pub most: Option<u32>,
    /// Whether more than there is space for may be asked for, and as much as fits is meant.
    pub is_ceiling: bool,
    pub sampling: Sampling,
    pub seed: u64,
    pub choices: usize,
    pub stop: Vec<String>,
    pub top_logprobs: Option<usize>,
    /// The prompt is part of the answer.
    pub echoes: bool,
    /// Tokens of thoughts, at most.
    pub most_thoughts: Option<u32>,
    pub penalties: Penalties,
    /// An answer that goes round in circles ends.
    pub ends_loops: bool,
    /// Adapters by their numbers, where `model` does not choose.
    pub lora: Option<Asked>,
    ignore_eos: bool,
    min_tokens: u32,
    salt: Arc<[u8]>,
    pub stream: bool,
    pub include_usage: bool,
    /// Every chunk of a stream says what it took so far, as llama-server's do.
    pub has_timings: bool,
}

impl Generation {
    pub fn read(fields: Fields<'_>, speech: &Speech) -> Result<Generation, ApiError> {
        let limit = ["max_completion_tokens", "max_output_tokens", "max_tokens"];
        let limit = limit.into_iter().find(|name| fields.get(name).is_some()).unwrap_or("max_tokens");
        let most = match fields.is_unlimited(limit) {
            true => None,
            false => fields.count(limit, 0, u32::MAX as u64)?.map(|most| most as u32),
        };
        let usual = speech.sampling;
        let sampling = Sampling {
            temperature: fields.number("temperature", ranges::TEMPERATURE)?.map_or(usual.temperature, |n| n as f32),
            top_p: fields.number("top_p", ranges::TOP_P)?.map_or(usual.top_p, |n| n as f32),
            top_k: match fields.get("top_k").and_then(Value::as_i64) {
                // vLLM's word for all of them.
                Some(-1) => 0,
                _ => fields.count("top_k", 0, u32::MAX as u64)?.map_or(usual.top_k, |k| k as u32),
            },
        };
        let salt = fields.text("cache_salt")?.unwrap_or_default();
        if salt.len() > LONGEST_SALT {
            let message = format!("cache_salt must have at most {LONGEST_SALT} bytes; found {}", salt.len());
            return Err(ApiError::invalid("cache_salt", message));
        }
        let ignore_eos = fields.flag("ignore_eos")?;
        // Whoever wants tokens for their number wants all of them.
        let ends_loops = match fields.get("detect_repetition") {
            None => !ignore_eos,
            Some(_) => fields.flag("detect_repetition")?,
        };
        let stream_options = fields.object("stream_options")?;
        Ok(Generation {
            most,
            is_ceiling: false,
            sampling,
            seed: fields.seed()?.unwrap_or_else(any_seed),
            choices: fields.count("n", 1, MOST_CHOICES)?.unwrap_or(1) as usize,
            stop: fields.texts("stop", MOST_STOPS)?,
            top_logprobs: None,
            echoes: false,
            most_thoughts: most_thoughts(fields)?,
            penalties: penalties::read(fields, speech)?,
            ends_loops,
            lora: Asked::read(fields)?,
            ignore_eos,
            min_tokens: fields.count("min_tokens", 0, u32::MAX as u64)?.unwrap_or(0) as u32,
            salt: salt.as_bytes().into(),
            stream: fields.flag("stream")?,
            include_usage: stream_options.map_or(Ok(false), |options| options.flag("include_usage"))?,
            has_timings: fields.flag("timings_per_token")?,
        })
    }

    /// The engine's requests, one a choice. What was not limited may become `most_unasked` tokens long, as far as that
    /// fits.
    pub fn requests(
        &self,
        prompt: &Prompt,
        speech: &Speech,
        most_unasked: u32,
        guide: Option<&dyn Guide>,
    ) -> Result<Vec<Request>, ApiError> {
        let tokens = prompt.tokens.len();
        let context = speech.context as usize;
        let room = context.saturating_sub(tokens);
        if tokens == 0 {
            return Err(ApiError::bad_request("invalid_value", "the prompt is empty"));
        }
        if room == 0 {
            let more = format!("{tokens} in the prompt, and at least 1 for the completion");
            return Err(ApiError::context_exceeded(speech.context, tokens + 1, &more));
        }
        let most = match self.most {
            None => (most_unasked as usize).min(room) as u32,
            Some(most) if self.is_ceiling => (most as usize).min(room) as u32,
            Some(most) if most as usize > room => {
                let more = format!("{tokens} in the prompt, {most} for the completion");
                return Err(ApiError::context_exceeded(speech.context, tokens + most as usize, &more));
            }
            Some(most) => most,
        };
        let mut snapshot_at = prompt.snapshot_at.clone();
        if self.choices > 1 && tokens > 1 {
            // The other choices begin with all of the prompt but its last token, which gives the first logits.
            snapshot_at.push(tokens as u32 - 1);
            snapshot_at.sort_unstable();
            snapshot_at.dedup();
        }
        // What must have a form ends when it has it.
        let has_form = guide.is_some_and(|guide| guide.has_form());
        let stop = if self.ignore_eos && !has_form { Arc::default() } else { Arc::clone(&speech.stop) };
        let (prompt_ids, suppress) = (prompt.tokens.as_slice().into(), speech.suppress.as_slice().into());
        let rules = Rules {
            penalised: Penalised::new(self.penalties.clone(), self.sampling.temperature, prompt_ids, suppress),
            least: self.min_tokens,
            stop: Arc::clone(&stop),
            picked: 0,
            guide: guide.map(Guide::copy),
        };
        let request = |choice: usize| Request {
            most,
            sampling: self.sampling,
            seed: choice_seed(self.seed, choice),
            stop: Arc::clone(&stop),
            snapshot_at: snapshot_at.clone(),
            salt: Arc::clone(&self.salt),
            logits: self.top_logprobs.is_some(),
            prompt_logits: self.echoes && self.top_logprobs.is_some(),
            rule: rules.is_needed().then(|| BoxedRule(Box::new(rules.clone()))),
            media: prompt.media.as_slice().into(),
            ..Request::greedy(prompt.tokens.as_slice(), most)
        };
        Ok((0..self.choices).map(request).collect())
    }
}

/// The first choice has the request's own seed, so that asking for more choices does not change it.
fn choice_seed(seed: u64, choice: usize) -> u64 {
    match choice {
        0 => seed,
        _ => xxh3_64(&[seed.to_le_bytes(), (choice as u64).to_le_bytes()].concat()),
    }
}

/// The limit on thoughts, in the words of vLLM, llama-server, those who pass it to the template, or OpenRouter.
fn most_thoughts(fields: Fields<'_>) -> Result<Option<u32>, ApiError> {
    let count = |fields: Fields<'_>, name: &str| {
        Ok(fields.count(name, 0, u32::MAX as u64)?.map(|most| most as u32)) as Result<Option<u32>, ApiError>
    };
    for name in ["thinking_token_budget", "thinking_budget_tokens", "thinking_budget"] {
        if let Some(most) = if fields.is_unlimited(name) { None } else { count(fields, name)? } {
            return Ok(Some(most));
        }
    }
    if let Some(options) = fields.object("chat_template_kwargs")?
        && let Some(most) = count(options, "thinking_budget").map_err(|error| error.within("chat_template_kwargs"))?
    {
        return Ok(Some(most));
    }
    fields
        .object("reasoning")
        .ok()
        .flatten()
        .map_or(Ok(None), |reasoning| count(reasoning, "max_tokens").map_err(|error| error.within("reasoning")))
}
