//! One request, with the time of everything that comes back.

use std::fmt;
use std::io::{BufRead, BufReader, Read};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use ureq::Agent;
use ureq::http::{Response, StatusCode, header};

/// A server, and the connections to it.
pub struct Server {
    agent: Agent,
    base: String,
    key: Option<String>,
}

/// What a streamed answer took.
#[derive(Clone, Debug)]
pub struct Answered {
    pub prompt_tokens: u64,
    pub tokens: u64,
    /// From the request to its first token.
    pub first: Duration,
    /// Between one token and the next.
    pub gaps: Vec<Duration>,
    pub whole: Duration,
    pub text: String,
}

impl Answered {
    /// Seconds a token after the first.
    pub fn per_token(&self) -> f64 {
        (self.whole - self.first).as_secs_f64() / self.tokens.saturating_sub(1).max(1) as f64
    }
}

/// The server understood a request and does not answer such: the fault is the request's.
#[derive(Debug)]
pub struct Refused(String);

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refused {}

/// A server that does not begin to answer for so long has failed.
const SILENCE: Duration = Duration::from_secs(600);

impl Server {
    pub fn new(url: &str, key: Option<&str>) -> Result<Server> {
        let is_http = url.starts_with("http://") || url.starts_with("https://");
        ensure!(is_http, "{url}: the server's address must begin with http:// or https://");
        // Its statuses are figures, not errors; a proxy would be measured with it.
        let config = Agent::config_builder().http_status_as_error(false).proxy(None).user_agent("gemma4c");
        let agent = config.timeout_recv_response(Some(SILENCE)).max_idle_connections_per_host(1024).build().into();
        let base = url.trim_end_matches('/').trim_end_matches("/v1").to_owned();
        Ok(Server { agent, base, key: key.map(|key| format!("Bearer {key}")) })
    }

    pub fn get(&self, path: &str) -> Result<Value> {
        let mut request = self.agent.get(format!("{}{path}", self.base));
        if let Some(key) = &self.key {
            request = request.header(header::AUTHORIZATION, key);
        }
        let response = request.call().with_context(|| format!("no answer from {}", self.base))?;
        Ok(serde_json::from_reader(ok(response)?.into_body().into_reader())?)
    }

    /// Posts a request whose answer is a stream of completions.
    pub fn stream(&self, path: &str, body: &str) -> Result<Answered> {
        let started = Instant::now();
        let mut request = self.agent.post(format!("{}{path}", self.base)).content_type("application/json");
        if let Some(key) = &self.key {
            request = request.header(header::AUTHORIZATION, key);
        }
        let response = request.send(body).with_context(|| format!("no answer from {}", self.base))?;
        let mut events = BufReader::new(ok(response)?.into_body().into_reader());
        let (mut latest, mut first) = (started, None);
        let (mut gaps, mut usage, mut text) = (Vec::new(), Value::Null, String::new());
        let mut line = String::new();
        loop {
            line.clear();
            ensure!(events.read_line(&mut line)? > 0, "the stream has no end");
            let now = Instant::now();
            let Some(data) = line.strip_prefix("data: ").map(str::trim_end) else { continue };
            if data == "[DONE]" {
                break;
            }
            let data: Value = serde_json::from_str(data).context("an event is no JSON")?;
            if let Some(error) = data.get("error") {
                bail!("an error in the stream: {error}");
            }
            if data["usage"].is_object() {
                usage = data["usage"].clone();
            }
            let piece = data["choices"][0]["text"].as_str().unwrap_or_default();
            text.push_str(piece);
            if !piece.is_empty() {
                match first {
                    None => first = Some(now - started),
                    Some(_) => gaps.push(now - latest),
                }
                latest = now;
            }
        }
        // Read to its end, a connection can be used again.
        std::io::copy(&mut events, &mut std::io::sink())?;
        let whole = latest - started;
        Ok(Answered {
            prompt_tokens: usage["prompt_tokens"].as_u64().unwrap_or(0),
            tokens: usage["completion_tokens"].as_u64().unwrap_or(0),
            first: first.unwrap_or(whole),
            gaps,
            whole,
            text,
        })
    }
}

/// The response, if it is one of success.
fn ok(response: Response<ureq::Body>) -> Result<Response<ureq::Body>> {
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    let mut text = String::new();
    response.into_body().into_reader().take(64 << 10).read_to_string(&mut text)?;
    let said = format!("status {}: {}", status.as_u16(), text.trim_end());
    // Too many requests are what a load test is about.
    let is_refused = status.is_client_error() && status != StatusCode::TOO_MANY_REQUESTS;
    if is_refused { Err(Refused(said).into()) } else { bail!(said) }
}
