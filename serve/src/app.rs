//! What every handler has at hand.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use gemma4c_runtime::engine::Request;
use serde_json::{Map, Value, json};
use tokio::sync::Semaphore;

use crate::about::About;
use crate::adapters::{Adapters, Asked, Sitting};
use crate::answer::Answer;
use crate::error::ApiError;
use crate::exchange::{Deadlines, Exchange};
use crate::fields::Fields;
use crate::generation::any_seed;
use crate::grammar::Grammars;
use crate::house::House;
use crate::loops::Loops;
use crate::media::{Held, Senses};
use crate::progress::{Progress, Usage};
use crate::record::Record;
use crate::slot::Slot;
use crate::speech::Speech;
use crate::state::State;

/// One model of a server, or an adapter of one, which has all but its name from it.
#[derive(Clone)]
pub struct App {
    pub speech: Arc<Speech>,
    /// What it reads besides text.
    pub senses: Arc<Senses>,
    pub state: Arc<State>,
    pub slot: Arc<Slot>,
    pub house: Arc<House>,
    pub grammars: Arc<Grammars>,
    pub adapters: Arc<Adapters>,
    pub model: String,
    /// The model's own name, where this is an adapter of it.
    pub parent: Option<String>,
    /// What else requests may call it.
    pub aliases: Vec<String>,
    /// All models of the server, and their adapters.
    pub offered: Arc<[(String, Arc<Adapters>)]>,
    /// Requests may name any model, and get this one.
    pub takes_any_model: bool,
    pub fingerprint: String,
    pub about: Arc<About>,
    pub max_output: u32,
    pub deadlines: Deadlines,
    pub created: u64,
    pub ping: Duration,
    /// Requests that are read at once: what they ask of the template or of a grammar takes a core each.
    pub readers: Arc<Semaphore>,
    /// What `/version` says of the plan.
    pub facts: Arc<Map<String, Value>>,
}

/// A request that was found right: what the engine is asked for, and who reads the answers.
pub struct Prepared {
    pub requests: Vec<Request>,
    pub is_shared: bool,
    pub answers: Vec<Answer>,
    pub top_logprobs: Option<usize>,
    pub ends_loops: bool,
    /// Adapters by their numbers.
    pub lora: Option<Asked>,
    pub prompt_tokens: usize,
    /// The memory that its pictures and sounds take.
    pub held: Held,
}

impl App {
    /// The fields of a request; names another model's request as such.
    pub fn fields<'a>(&self, body: &'a Value) -> Result<Fields<'a>, ApiError> {
        let Value::Object(fields) = body else {
            return Err(ApiError::bad_request("json_parse_error", "the body must be a JSON object"));
        };
        let fields = Fields(fields);
        match fields.text("model")? {
            Some(model) if !self.is_called(model) && !self.takes_any_model => Err(self.unknown_model(model)),
            _ => Ok(fields),
        }
    }

    /// A name may have the tag that stands for none.
    pub fn is_called(&self, name: &str) -> bool {
        let is_name = |name: &str| name == self.model || self.aliases.iter().any(|alias| alias == name);
        is_name(name) || name.strip_suffix(":latest").is_some_and(is_name)
    }

    /// The adapter of a name, as a model.
    pub fn adapted(&self, name: &str) -> Option<App> {
        let is_there = |name: &&str| self.adapters.has(name);
        let name = Some(name).filter(is_there).or(name.strip_suffix(":latest").filter(is_there))?;
        let (model, parent) = (name.to_owned(), Some(self.model.clone()));
        Some(App { model, parent, aliases: Vec::new(), takes_any_model: false, ..self.clone() })
    }

    pub fn unknown_model(&self, model: &str) -> ApiError {
        let adapters = |adapters: &Adapters| adapters.list().into_iter().map(|listed| format!("{:?}", listed.name));
        let offered: Vec<String> =
            self.offered.iter().flat_map(|(name, of)| [format!("{name:?}")].into_iter().chain(adapters(of))).collect();
        let message = format!("there is no model {model:?} here; there is {}", offered.join(", "));
        let error = ApiError::refused(axum::http::StatusCode::NOT_FOUND, "model_not_found", message);
        ApiError { param: Some("model".into()), ..error }
    }

    /// Queues a request and waits for its memory.
    pub async fn begin(&self, prepared: Prepared, record: Arc<Record>) -> Result<Progress, ApiError> {
        let sitting = self.sit(prepared.lora.as_ref()).await?;
        self.begin_seated(prepared, record, sitting).await
    }

    /// The same of a request that has its seat.
    pub async fn begin_seated(
        &self,
        prepared: Prepared,
        record: Arc<Record>,
        sitting: Option<Sitting>,
    ) -> Result<Progress, ApiError> {
        let Prepared { mut requests, is_shared, answers, top_logprobs, ends_loops, lora: _, prompt_tokens, held } =
            prepared;
        for request in &mut requests {
            request.client = record.owner;
            request.adapter = sitting.as_ref().map(Sitting::seated);
        }
        record.add_prompt_tokens(prompt_tokens);
        // What is kept of a prompt is kept up to the last place that was named.
        let kept_to = requests.iter().filter_map(|request| request.snapshot_at.last().copied()).max().unwrap_or(0);
        let mut begun =
            Exchange::begin(&self.house, &self.slot, requests, is_shared, top_logprobs, self.deadlines).await?;
        (begun.held, begun.sitting) = (held, sitting);
        record.add_cached_tokens(begun.cached);
        let usage = Usage {
            prompt: prompt_tokens,
            cached: begun.cached,
            cache_written: kept_to.saturating_sub(begun.cached),
            ..Usage::default()
        };
        let loops = if ends_loops { vec![Loops::default(); answers.len()] } else { Vec::new() };
        Ok(Progress::new(begun, Arc::clone(&self.speech), answers, loops, usage, record))
    }

    /// The seat of a request: its adapter's, if it has chosen one.
    pub async fn sit(&self, lora: Option<&Asked>) -> Result<Option<Sitting>, ApiError> {
        let name = self.parent.is_some().then_some(self.model.as_str());
        let sat = tokio::time::timeout(self.deadlines.queue, self.adapters.sit(name, lora)).await;
        sat.unwrap_or_else(|_| {
            let message = format!("the adapter was not there within {} seconds", self.deadlines.queue.as_secs());
            Err(ApiError::timeout("queue_timeout", message))
        })
    }

    /// What all pieces of an answer have in common.
    pub fn envelope(&self, prefix: &str, object: &'static str) -> Envelope {
        Envelope {
            id: format!("{prefix}{:016x}{:016x}", any_seed(), any_seed()),
            object,
            created: now(),
            model: self.model.clone(),
            fingerprint: self.fingerprint.clone(),
        }
    }
}

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// The fields that a whole answer and every chunk of a stream begin with.
#[derive(Clone, Debug)]
pub struct Envelope {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub model: String,
    pub fingerprint: String,
}

impl Envelope {
    pub fn with(&self, choices: Vec<Value>) -> Map<String, Value> {
        let Envelope { id, object, created, model, fingerprint } = self;
        let mut fields = Map::new();
        fields.insert("id".into(), id.as_str().into());
        fields.insert("object".into(), (*object).into());
        fields.insert("created".into(), (*created).into());
        fields.insert("model".into(), model.as_str().into());
        fields.insert("system_fingerprint".into(), fingerprint.as_str().into());
        fields.insert("choices".into(), choices.into());
        fields
    }

    /// The id of a call, unique and the same whenever it is asked for.
    pub fn call_id(&self, choice: usize, index: usize) -> String {
        let hash = xxhash_rust::xxh3::xxh3_64(format!("{}/{choice}/{index}", self.id).as_bytes());
        format!("call_{hash:016x}")
    }
}

impl Usage {
    /// Counts and times as llama-server tells them; what was kept of a prompt took no time.
    pub fn timings(&self) -> Value {
        let computed = self.prompt.saturating_sub(self.cached as usize);
        let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
        let each = |time: Duration, count: usize| if count == 0 { 0.0 } else { milliseconds(time) / count as f64 };
        let rate = |time: Duration, count: usize| if time.is_zero() { 0.0 } else { count as f64 / time.as_secs_f64() };
        let (prompt, generation) = (self.timing.prompt, self.timing.generation);
        let predicted = self.completion as usize;
        json!({
            "cache_n": self.cached,
            "prompt_n": computed,
            "prompt_ms": milliseconds(prompt),
            "prompt_per_token_ms": each(prompt, computed),
            "prompt_per_second": rate(prompt, computed),
            "predicted_n": predicted,
            "predicted_ms": milliseconds(generation),
            "predicted_per_token_ms": each(generation, predicted),
            "predicted_per_second": rate(generation, predicted),
        })
    }

    pub fn json(&self) -> Value {
        let mut details = json!({ "reasoning_tokens": self.reasoning });
        // Only of an answer for which tokens were guessed.
        if self.drafted > 0 {
            details["accepted_prediction_tokens"] = self.accepted.into();
            details["rejected_prediction_tokens"] = (self.drafted - self.accepted).into();
        }
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion as usize,
            "prompt_tokens_details": { "cached_tokens": self.cached },
            "completion_tokens_details": details,
        })
    }
}
