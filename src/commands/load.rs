//! `gemma4c load`: how a server answers many clients at once, in the figures of `vllm bench serve`.
//!
//! Prompts are random token ids, so no tokenizer is needed; answers have the length that was asked for. A client is a
//! thread: what it measures includes everything between a request's first byte and a token's arrival.

mod client;
mod report;

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::Outcome;
use crate::output::{self, OutputFile};
use crate::random::Random;
use client::{Answered, Refused, Server};
use report::Report;

/// Put load on a server, and measure its answers.
///
/// Either so many requests are in flight at any time, or they arrive at random times at a rate, as if from people who
/// know nothing of each other.
#[derive(clap::Args)]
pub struct Args {
    /// The server, such as http://127.0.0.1:8080.
    url: String,

    /// Requests in all.
    #[arg(long, value_name = "N", default_value_t = 100)]
    requests: usize,

    /// Requests at any time.
    #[arg(long, value_name = "N", default_value_t = 8, conflicts_with = "rate")]
    concurrency: usize,

    /// Requests a second, at random times.
    #[arg(long, value_name = "R")]
    rate: Option<f64>,

    /// Tokens of each prompt.
    #[arg(short = 'p', long = "prompt", value_name = "N", default_value_t = 512)]
    prompt: usize,

    /// Tokens of each answer.
    #[arg(short = 'n', long = "generate", value_name = "N", default_value_t = 128)]
    generate: usize,

    /// Tokens at the beginning that all prompts share.
    #[arg(long, value_name = "N", default_value_t = 0)]
    prefix: usize,

    /// A request counts as good if its first token comes within so many milliseconds.
    #[arg(long, value_name = "MS")]
    good_ttft: Option<f64>,

    /// A request counts as good if its tokens take so many milliseconds each on average.
    #[arg(long, value_name = "MS")]
    good_tpot: Option<f64>,

    /// The server's API key.
    #[arg(long, value_name = "KEY")]
    api_key: Option<String>,

    /// Write the figures as JSON, under the names of `vllm bench serve`.
    #[arg(long, value_name = "FILE")]
    json: Option<OutputFile>,

    /// Of a hundred requests, so many must be answered in JSON, by a schema.
    #[arg(long, value_name = "N", default_value_t = 0)]
    guided: usize,

    /// Write the answers, one a line, in the order of the requests: what the same requests got in other company must be
    /// the same.
    #[arg(long, value_name = "FILE")]
    answers: Option<OutputFile>,

    /// The same seed gives the same requests.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

/// Clients that wait for their turn at most: each is a thread.
const MOST_CLIENTS: usize = 2048;

pub fn run(args: &Args) -> Result<Outcome> {
    ensure!(
        args.requests > 0 && args.generate > 0 && args.prompt > 0,
        "at least one request, token and answer is needed"
    );
    ensure!(args.concurrency > 0, "--concurrency 0: at least one is needed");
    ensure!(args.rate.is_none_or(|rate| rate > 0.0 && rate.is_finite()), "--rate must be more than 0");
    ensure!(args.guided <= 100, "--guided {}: no more than 100 of a hundred", args.guided);
    let server = Server::new(&args.url, args.api_key.as_deref())?;
    let version = server.get("/version").context("the server does not say what it is")?;
    let vocab = version["vocab_size"].as_u64().context("the server does not say how many tokens it knows")?;
    let model = version["model"].as_str().unwrap_or_default().to_owned();
    let bodies = bodies(args, vocab, &model);
    let arrivals = arrivals(args);

    let (next, answers) = (AtomicUsize::new(0), Mutex::new(Vec::with_capacity(args.requests)));
    let started = Instant::now();
    let clients = if args.rate.is_some() { args.requests.min(MOST_CLIENTS) } else { args.concurrency };
    std::thread::scope(|scope| {
        for _ in 0..clients.min(args.requests) {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(body) = bodies.get(index) else { return };
                    let due = arrivals.get(index).copied().unwrap_or_default();
                    std::thread::sleep(due.saturating_sub(started.elapsed()));
                    let answered = server.stream("/v1/completions", body);
                    answers.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push((index, answered));
                }
            });
        }
    });
    let duration = started.elapsed();
    let mut answers = answers.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    answers.sort_by_key(|(index, _)| *index);
    if let Some(path) = &args.answers {
        let line = |(_, answered): &(usize, Result<Answered>)| match answered {
            Ok(answered) => format!("{}\n", json!(answered.text)),
            Err(_) => "null\n".to_owned(),
        };
        output::write_whole(path, answers.iter().map(line).collect::<String>().as_bytes())?;
    }
    let answers: Vec<Result<Answered>> = answers.into_iter().map(|(_, answered)| answered).collect();
    let errors = || answers.iter().filter_map(|answer| answer.as_ref().err());
    let (refused, failed): (Vec<_>, Vec<_>) = errors().partition(|error| error.is::<Refused>());
    let [refused, failed] = [refused, failed].map(|errors| errors.iter().map(|e| format!("{e:#}")).collect::<Vec<_>>());
    let completed: Vec<Answered> = answers.into_iter().filter_map(Result::ok).collect();
    let good = |answered: &Answered| {
        args.good_ttft.is_none_or(|limit| answered.first.as_secs_f64() * 1e3 <= limit)
            && args.good_tpot.is_none_or(|limit| answered.per_token() * 1e3 <= limit)
    };
    let has_limit = args.good_ttft.is_some() || args.good_tpot.is_some();
    let report = Report::new(&completed, duration, has_limit.then(|| completed.iter().filter(|a| good(a)).count()));
    output::print(&report.text(failed.len()))?;
    for (errors, what) in [(&failed, "failed"), (&refused, "were refused: the server does not take such requests")] {
        if let Some(error) = errors.first() {
            eprintln!("[{} requests {what}; the first: {error}]", errors.len());
        }
    }
    if let Some(path) = &args.json {
        let mut json = report.json();
        json["model_id"] = model.into();
        json["num_prompts"] = args.requests.into();
        json["max_concurrency"] = args.rate.map_or_else(|| json!(args.concurrency), |_| Value::Null);
        json["request_rate"] = args.rate.map_or_else(|| json!("inf"), |rate| json!(rate));
        output::write_whole(path, format!("{json:#}\n").as_bytes())?;
    }
    Ok(if failed.is_empty() && refused.is_empty() { Outcome::Done } else { Outcome::CheckFailed })
}

/// The requests, ready to be sent.
fn bodies(args: &Args, vocab: u64, model: &str) -> Vec<String> {
    let mut random = Random::new(args.seed);
    let ids = ordinary_ids(vocab);
    let count_of_ids = ids.end - ids.start;
    let mut tokens =
        |count: usize| -> Vec<u64> { (0..count).map(|_| ids.start + random.next() % count_of_ids).collect() };
    let shared = tokens(args.prefix.min(args.prompt));
    let body = |index: usize| {
        let own = tokens(args.prompt - shared.len());
        let prompt: Vec<u64> = shared.iter().chain(&own).copied().collect();
        let mut body = json!({
            "model": model, "prompt": prompt, "max_tokens": args.generate, "ignore_eos": true, "stream": true, "seed": index,
            "stream_options": { "include_usage": true },
        });
        // Spread evenly; a list that is longer than any answer.
        if (index + 1) * args.guided / 100 > index * args.guided / 100 {
            let item = json!({ "type": "object", "properties": { "n": { "type": "integer" }, "s": { "type": "string" } },
                "required": ["n", "s"], "additionalProperties": false });
            body["json_schema"] = json!({ "type": "array", "items": item, "minItems": args.generate });
        }
        body.to_string()
    };
    (0..args.requests).map(body).collect()
}

/// Token ids that any text may hold: a vocabulary begins with control tokens, and Gemma's has the places of pictures
/// and sound, which a server refuses in a text, from 255,999 on.
fn ordinary_ids(vocab: u64) -> Range<u64> {
    512.min(vocab / 2)..vocab.min(255_999)
}

/// When each request is due: nowhere near each other by more than chance, a Poisson process.
fn arrivals(args: &Args) -> Vec<Duration> {
    let Some(rate) = args.rate else { return Vec::new() };
    let mut random = Random::new(args.seed ^ 0x5eed);
    let mut at = 0.0;
    let mut next = |_| {
        at -= (1.0 - random.unit()).ln() / rate;
        Duration::from_secs_f64(at)
    };
    (0..args.requests).map(&mut next).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_that_servers_refuse_are_not_sent() {
        assert_eq!(ordinary_ids(262_144), 512..255_999);
        assert_eq!(ordinary_ids(96), 48..96);
    }
}
