//! One request over one connection, with the time of everything that comes back.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

/// A server without TLS.
pub struct Server {
    address: String,
    path: String,
    key: String,
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

/// A server that says nothing for so long has failed.
const SILENCE: Duration = Duration::from_secs(600);

impl Server {
    pub fn new(url: &str, key: Option<&str>) -> Result<Server> {
        let rest = url.strip_prefix("http://").context("the server's address must begin with http://")?;
        let (host, path) =
            rest.split_once('/').map_or((rest, String::new()), |(host, path)| (host, format!("/{path}")));
        let address = if host.contains(':') { host.to_owned() } else { format!("{host}:80") };
        let key = key.map(|key| format!("authorization: Bearer {key}\r\n")).unwrap_or_default();
        Ok(Server { address, path: path.trim_end_matches('/').trim_end_matches("/v1").to_owned(), key })
    }

    fn send(&self, method: &str, path: &str, body: &str) -> Result<BufReader<TcpStream>> {
        let mut stream =
            TcpStream::connect(&self.address).with_context(|| format!("cannot connect to {}", self.address))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(SILENCE))?;
        let Server { address, path: base, key } = self;
        let length = body.len();
        let head = format!(
            "{method} {base}{path} HTTP/1.1\r\nhost: {address}\r\n{key}content-type: application/json\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n"
        );
        stream.write_all(format!("{head}{body}").as_bytes())?;
        Ok(BufReader::new(stream))
    }

    pub fn get(&self, path: &str) -> Result<Value> {
        let mut body = Body::new(self.send("GET", path, "")?)?;
        let mut text = String::new();
        while let Some(piece) = body.piece()? {
            text.push_str(&String::from_utf8_lossy(&piece));
        }
        ensure!(body.status == 200, "{path}: status {}: {text}", body.status);
        Ok(serde_json::from_str(&text)?)
    }

    /// Posts a request whose answer is a stream of completions.
    pub fn stream(&self, path: &str, body: &str) -> Result<Answered> {
        let started = Instant::now();
        let mut body = Body::new(self.send("POST", path, body)?)?;
        let (mut text, mut latest, mut first) = (Vec::new(), started, None);
        let (mut gaps, mut usage, mut is_done) = (Vec::new(), Value::Null, false);
        let mut said = String::new();
        while let Some(piece) = body.piece()? {
            let now = Instant::now();
            text.extend(piece);
            if body.status != 200 {
                continue;
            }
            while let Some(end) = text.windows(2).position(|window| window == b"\n\n") {
                let event: Vec<u8> = text.drain(..end + 2).collect();
                let Some(data) = event.strip_prefix(b"data: ") else { continue };
                if data.starts_with(b"[DONE]") {
                    is_done = true;
                    continue;
                }
                let data: Value = serde_json::from_slice(data).context("an event is no JSON")?;
                if let Some(error) = data.get("error") {
                    bail!("an error in the stream: {error}");
                }
                if data["usage"].is_object() {
                    usage = data["usage"].clone();
                }
                let text = data["choices"][0]["text"].as_str().unwrap_or_default();
                said.push_str(text);
                if !text.is_empty() {
                    match first {
                        None => first = Some(now - started),
                        Some(_) => gaps.push(now - latest),
                    }
                    latest = now;
                }
            }
        }
        ensure!(body.status == 200, "status {}: {}", body.status, String::from_utf8_lossy(&text));
        ensure!(is_done, "the stream has no end");
        let whole = latest - started;
        Ok(Answered {
            prompt_tokens: usage["prompt_tokens"].as_u64().unwrap_or(0),
            tokens: usage["completion_tokens"].as_u64().unwrap_or(0),
            first: first.unwrap_or(whole),
            gaps,
            whole,
            text: said,
        })
    }
}

/// The body of a response, piece by piece.
struct Body {
    stream: BufReader<TcpStream>,
    status: u16,
    is_chunked: bool,
    has_ended: bool,
}

impl Body {
    fn new(mut stream: BufReader<TcpStream>) -> Result<Body> {
        let mut line = String::new();
        stream.read_line(&mut line).context("the server does not answer")?;
        let status = line.split(' ').nth(1).and_then(|status| status.parse().ok()).context("this is no HTTP")?;
        let mut is_chunked = false;
        loop {
            line.clear();
            ensure!(stream.read_line(&mut line)? > 0, "the answer's head has no end");
            if line.trim().is_empty() {
                return Ok(Body { stream, status, is_chunked, has_ended: false });
            }
            is_chunked |= line.to_ascii_lowercase().starts_with("transfer-encoding: chunked");
        }
    }

    fn piece(&mut self) -> Result<Option<Vec<u8>>> {
        if self.has_ended {
            return Ok(None);
        }
        let mut piece = Vec::new();
        if !self.is_chunked {
            self.has_ended = true;
            self.stream.read_to_end(&mut piece)?;
            return Ok(Some(piece));
        }
        let mut line = String::new();
        self.stream.read_line(&mut line)?;
        let length = usize::from_str_radix(line.trim(), 16).context("the connection was cut")?;
        piece.resize(length + 2, 0);
        self.stream.read_exact(&mut piece)?;
        piece.truncate(length);
        self.has_ended = length == 0;
        Ok((length > 0).then_some(piece))
    }
}
