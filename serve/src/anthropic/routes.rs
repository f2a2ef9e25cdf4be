//! The paths of Anthropic's API, and what answers there.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State as Shared;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use axum::{Extension, Router};

use super::events::MessageEvents;
use super::{count_tokens, prepare};
use crate::error::{Answered, json_response};
use crate::models::Models;
use crate::record::Record;
use crate::sse::Events;
use crate::{body, sse};

pub fn routes() -> Router<Arc<Models>> {
    Router::new().route("/v1/messages", post(message)).route("/v1/messages/count_tokens", post(count))
}

async fn message(
    Shared(models): Shared<Arc<Models>>,
    Extension(record): Extension<Arc<Record>>,
    headers: HeaderMap,
    body: Body,
) -> Answered {
    let (app, body) = models.receive(&headers, body, &record).await?;
    let chat = body::read(&app, body, prepare).await?;
    let mut progress = app.begin(chat.prepared, record).await?;
    let mut events = MessageEvents::new(&app.model, progress.usage());
    if chat.generation.stream {
        return Ok(sse::response(progress, events, app.ping));
    }
    loop {
        let updates = progress.next().await?;
        if updates.is_empty() {
            return Ok(json_response(StatusCode::OK, &events.whole(progress.usage())));
        }
        updates.into_iter().for_each(|update| events.update(update, &mut String::new()));
    }
}

async fn count(
    Shared(models): Shared<Arc<Models>>,
    Extension(record): Extension<Arc<Record>>,
    headers: HeaderMap,
    body: Body,
) -> Answered {
    let (app, body) = models.receive(&headers, body, &record).await?;
    Ok(json_response(StatusCode::OK, &body::read(&app, body, count_tokens).await?))
}
