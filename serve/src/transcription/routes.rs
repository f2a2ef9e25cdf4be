//! The path of transcriptions, and the bytes of their answers.

use std::convert::Infallible;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::State as Shared;
use axum::http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use axum::routing::post;
use axum::{Extension, Router};
use futures_util::{StreamExt, stream};
use serde_json::json;
use tokio::sync::Semaphore;

use super::Asked;
use super::multipart::{Form, boundary};
use super::transcript::Transcript;
use crate::app::App;
use crate::body::Received;
use crate::error::{Answered, json_response};
use crate::models::Models;
use crate::record::Record;
use crate::{body, sse};

pub fn routes() -> Router<Arc<Models>> {
    Router::new().route("/v1/audio/transcriptions", post(transcribe))
}

/// Files that are decoded at once: the longest takes half a gigabyte before its rate is the model's.
static DECODERS: Semaphore = Semaphore::const_new(2);

async fn transcribe(
    Shared(models): Shared<Arc<Models>>,
    Extension(record): Extension<Arc<Record>>,
    headers: HeaderMap,
    body: Body,
) -> Answered {
    let boundary = boundary(&headers)?;
    let model = |body: &Received| {
        let form = Form::parse(&boundary, body.bytes()).ok()?;
        let (_, name) = form.texts("file").ok()?.into_iter().find(|(name, _)| *name == "model")?;
        Some(name.to_owned())
    };
    let (app, body) = models.receive_by(&headers, body, &record, model).await?;
    let read = move |app: &App, bytes: &[u8]| Asked::read(app, &Form::parse(&boundary, bytes)?);
    // The semaphore is never closed.
    let permit = DECODERS.acquire().await;
    let asked = body::read_bytes(&app, body, read).await?;
    drop(permit);
    let (is_streamed, is_plain_text) = (asked.generation.stream, asked.is_plain_text);
    let mut transcript = Transcript::begin(Arc::clone(&app), record, asked).await?;
    if is_streamed {
        return Ok(streamed(transcript, &app));
    }
    while transcript.next().await?.is_some() {}
    if is_plain_text {
        let mut response = Response::new(Body::from(format!("{}\n", transcript.text())));
        let kind = HeaderValue::from_static("text/plain; charset=utf-8");
        response.headers_mut().insert(header::CONTENT_TYPE, kind);
        return Ok(response);
    }
    Ok(json_response(StatusCode::OK, &json!({ "text": transcript.text(), "usage": transcript.usage() })))
}

/// An event for each piece of text, then one with all of it.
fn streamed(transcript: Transcript, app: &App) -> Response<Body> {
    let events = stream::unfold(Some(transcript), async |transcript| {
        let mut transcript = transcript?;
        let mut out = String::new();
        let rest = match transcript.next().await {
            Ok(Some(delta)) => {
                sse::event(&mut out, &json!({ "type": "transcript.text.delta", "delta": delta }));
                Some(transcript)
            }
            Ok(None) => {
                let (text, usage) = (transcript.text(), transcript.usage());
                sse::event(&mut out, &json!({ "type": "transcript.text.done", "text": text, "usage": usage }));
                None
            }
            Err(error) => {
                transcript.fail(&error);
                sse::event(&mut out, &error.json());
                None
            }
        };
        Some((out, rest))
    });
    // An event that is waited for goes on where the wait is interrupted by a ping.
    let body = stream::unfold((Box::pin(events), app.ping), async |(mut events, ping)| {
        let text = match tokio::time::timeout(ping, events.next()).await {
            Err(_) => sse::PING.to_owned(),
            Ok(text) => text?,
        };
        Some((Ok::<Bytes, Infallible>(Bytes::from(text)), (events, ping)))
    });
    sse::with_headers(Body::from_stream(body), "text/event-stream")
}
