//! Server-sent events, written out by ourselves: the bytes are the interface.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, Response, header};
use futures_util::stream;
use serde_json::Value;

use crate::error::ApiError;
use crate::progress::{Progress, Update, Usage};

/// Makes the events of one endpoint.
pub trait Events: Send + 'static {
    const MEDIA_TYPE: &'static str = "text/event-stream";

    /// What a stream begins with.
    fn begin(&mut self, out: &mut String);

    /// Comes before updates: what the request has taken so far.
    fn measure(&mut self, _usage: Usage) {}

    fn update(&mut self, update: Update, out: &mut String);

    /// What it ends with.
    fn end(&mut self, usage: Usage, out: &mut String);

    fn error(&mut self, error: &ApiError, out: &mut String) {
        event(out, &error.json());
    }

    /// Nothing has come for a while: tells proxies that the connection lives.
    fn ping(&mut self, out: &mut String) {
        out.push_str(PING);
    }
}

/// A comment, which clients leave out.
pub const PING: &str = ": ping\n\n";

/// One event: a line of JSON.
pub fn event(out: &mut String, data: &Value) {
    out.push_str("data: ");
    out.push_str(&data.to_string());
    out.push_str("\n\n");
}

struct Streaming<E> {
    progress: Progress,
    events: E,
    ping: Duration,
    ready: VecDeque<Bytes>,
    has_ended: bool,
}

impl<E: Events> Streaming<E> {
    async fn next(&mut self) -> Option<Bytes> {
        if let Some(bytes) = self.ready.pop_front() {
            return Some(bytes);
        }
        if self.has_ended {
            return None;
        }
        let mut out = String::new();
        match tokio::time::timeout(self.ping, self.progress.next()).await {
            Err(_) => self.events.ping(&mut out),
            Ok(Ok(updates)) if updates.is_empty() => {
                self.events.end(self.progress.usage(), &mut out);
                self.has_ended = true;
            }
            Ok(Ok(updates)) => {
                self.events.measure(self.progress.usage());
                updates.into_iter().for_each(|update| self.events.update(update, &mut out));
            }
            Ok(Err(error)) => {
                self.progress.record().fail(error.code);
                self.events.error(&error, &mut out);
                self.has_ended = true;
            }
        }
        Some(Bytes::from(out))
    }
}

/// The response of a stream. When its body is dropped, for whatever reason, the request ends.
pub fn response<E: Events>(progress: Progress, mut events: E, ping: Duration) -> Response<Body> {
    let mut first = String::new();
    events.begin(&mut first);
    let streaming = Streaming { progress, events, ping, ready: [Bytes::from(first)].into(), has_ended: false };
    let body = stream::unfold(Box::new(streaming), async |mut streaming| {
        let bytes = streaming.next().await?;
        Some((Ok::<Bytes, Infallible>(bytes), streaming))
    });
    with_headers(Body::from_stream(body), E::MEDIA_TYPE)
}

/// The response whose body is a stream of events.
pub fn with_headers(body: Body, media_type: &'static str) -> Response<Body> {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(media_type));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}
