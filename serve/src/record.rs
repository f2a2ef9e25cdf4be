//! One line a request: what a server tells whoever runs it, when a request has ended, however that came about.
//!
//! Nothing is printed here. A sink that the server was given gets each notice, on the thread that noticed, so it must
//! not wait. What a request says and its key are no part of any notice.

use std::fmt;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant, SystemTime};

use axum::body::{Body, Bytes, HttpBody};
use axum::http::{Request, Response};
use hyper::body::{Frame, SizeHint};

use crate::error::ApiError;
use crate::hand::{Hand, InHand};

/// What a server says of itself.
#[derive(Clone, Debug)]
pub enum Notice {
    Request(Box<RequestLine>),
    /// It was told to end, and waits for so many requests until `left` has passed.
    Draining {
        requests: usize,
        oldest: Duration,
        left: Duration,
    },
    /// It ends, and so many requests end with it.
    Cut {
        requests: usize,
    },
}

/// A request that has ended.
#[derive(Clone, Debug)]
pub struct RequestLine {
    /// When it ended.
    pub time: SystemTime,
    pub client: SocketAddr,
    pub method: String,
    pub path: String,
    /// 499 where the client went away before there was one.
    pub status: u16,
    /// Known once it was found what the request is for.
    pub model: Option<String>,
    pub request_id: String,
    /// Known once the prompt was read.
    pub prompt_tokens: Option<usize>,
    /// Known once it was begun.
    pub cached_tokens: Option<u32>,
    pub output_tokens: Option<u32>,
    /// From its arrival until it had its memory.
    pub queued: Option<Duration>,
    pub first_token: Option<Duration>,
    pub total: Duration,
    pub finish_reason: Option<String>,
    pub error: Option<&'static str>,
    /// The W3C header that says which trace it belongs to.
    pub traceparent: Option<String>,
}

/// Gets what a server says of itself.
#[derive(Clone)]
pub struct Sink(Arc<dyn Fn(Notice) + Send + Sync>);

impl Sink {
    /// `tell` must not wait: requests would wait with it.
    pub fn new(tell: impl Fn(Notice) + Send + Sync + 'static) -> Sink {
        Sink(Arc::new(tell))
    }

    pub fn tell(&self, notice: Notice) {
        (self.0)(notice);
    }
}

impl fmt::Debug for Sink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Sink")
    }
}

/// Whom a connection is with.
pub struct Client {
    pub address: SocketAddr,
    /// It did not read what it was sent, and the connection was closed.
    pub has_stalled: AtomicBool,
}

/// What is known of a request so far. Its line is told when the last who holds it lets go: the handler, or the body of
/// the answer.
pub struct Record {
    sink: Option<Sink>,
    client: Arc<Client>,
    /// Whose request it is, among those that share the engine.
    pub owner: u64,
    started: Instant,
    method: String,
    path: String,
    /// Asked by machines every few seconds: worth a line only when it fails.
    is_probe: bool,
    request_id: String,
    /// Known once it was found what the request is for.
    model: OnceLock<String>,
    answer: Mutex<Answered>,
    output_tokens: AtomicU32,
    queued: OnceLock<Duration>,
    first_token: OnceLock<Duration>,
    traceparent: Option<String>,
    _in_hand: Option<InHand>,
}

#[derive(Default)]
struct Answered {
    prompt_tokens: Option<usize>,
    cached_tokens: Option<u32>,
    status: Option<u16>,
    error: Option<&'static str>,
    finish_reasons: Vec<&'static str>,
    is_complete: bool,
}

/// Paths that are asked all the time.
const PROBES: [&str; 4] = ["/health", "/v1/health", "/ping", "/metrics"];
/// Characters of a path that are told.
const LONGEST_PATH: usize = 200;

impl Record {
    pub fn new<B>(
        sink: Option<&Sink>,
        hand: &Arc<Hand>,
        client: Arc<Client>,
        owner: u64,
        request: &Request<B>,
        request_id: &str,
    ) -> Arc<Record> {
        let path = request.uri().path();
        let is_probe = PROBES.contains(&path);
        Arc::new(Record {
            sink: sink.cloned(),
            client,
            owner,
            started: Instant::now(),
            method: request.method().to_string(),
            path: path.chars().take(LONGEST_PATH).collect(),
            is_probe,
            request_id: request_id.to_owned(),
            model: OnceLock::new(),
            answer: Mutex::default(),
            output_tokens: AtomicU32::new(0),
            queued: OnceLock::new(),
            first_token: OnceLock::new(),
            traceparent: request.headers().get("traceparent").and_then(|value| Some(value.to_str().ok()?.to_owned())),
            _in_hand: (!is_probe).then(|| hand.take()),
        })
    }

    fn answer(&self) -> std::sync::MutexGuard<'_, Answered> {
        self.answer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// When it came.
    pub fn started(&self) -> Instant {
        self.started
    }

    pub fn set_model(&self, model: &str) {
        _ = self.model.set(model.to_owned());
    }

    /// A prompt was read: of a long sound several are.
    pub fn add_prompt_tokens(&self, tokens: usize) {
        *self.answer().prompt_tokens.get_or_insert(0) += tokens;
    }

    /// It has its memory, and so much of its prompt need not be computed.
    pub fn add_cached_tokens(&self, tokens: u32) {
        *self.answer().cached_tokens.get_or_insert(0) += tokens;
        _ = self.queued.set(self.started.elapsed());
    }

    pub fn count_token(&self) {
        self.output_tokens.fetch_add(1, Ordering::Relaxed);
        self.first_token.get_or_init(|| self.started.elapsed());
    }

    /// A choice has ended.
    pub fn finish(&self, reason: &'static str) {
        let mut answer = self.answer();
        if !answer.finish_reasons.contains(&reason) {
            answer.finish_reasons.push(reason);
        }
    }

    /// A stream ends with an error.
    pub fn fail(&self, code: &'static str) {
        self.answer().error = Some(code);
    }

    /// There is a response; its body keeps the record until it was sent or dropped.
    pub fn respond(self: Arc<Record>, response: Response<Body>) -> Response<Body> {
        let mut answer = self.answer();
        answer.status = Some(response.status().as_u16());
        answer.error = response.extensions().get::<ApiError>().map(|error| error.code);
        answer.is_complete = response.body().is_end_stream();
        drop(answer);
        response.map(|body| Body::new(RecordedBody { body, record: self }))
    }

    fn line(&self) -> RequestLine {
        let answer = self.answer();
        let cut = match self.client.has_stalled.load(Ordering::Relaxed) {
            true => "client_stalled",
            false => "client_gone",
        };
        let was_begun = answer.cached_tokens.is_some();
        RequestLine {
            time: SystemTime::now(),
            client: self.client.address,
            method: self.method.clone(),
            path: self.path.clone(),
            status: answer.status.unwrap_or(499),
            model: self.model.get().cloned(),
            request_id: self.request_id.clone(),
            prompt_tokens: answer.prompt_tokens,
            cached_tokens: answer.cached_tokens,
            output_tokens: was_begun.then(|| self.output_tokens.load(Ordering::Relaxed)),
            queued: self.queued.get().copied(),
            first_token: self.first_token.get().copied(),
            total: self.started.elapsed(),
            finish_reason: (!answer.finish_reasons.is_empty()).then(|| answer.finish_reasons.join(",")),
            error: answer.error.or_else(|| (!answer.is_complete).then_some(cut)),
            traceparent: self.traceparent.clone(),
        }
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let Some(sink) = &self.sink else { return };
        let line = self.line();
        if !self.is_probe || line.status >= 400 {
            sink.tell(Notice::Request(Box::new(line)));
        }
    }
}

/// The body of an answer, and the record that ends with it.
struct RecordedBody {
    body: Body,
    record: Arc<Record>,
}

impl HttpBody for RecordedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        if matches!(polled, Poll::Ready(None)) || self.body.is_end_stream() {
            self.record.answer().is_complete = true;
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
