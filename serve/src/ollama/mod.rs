//! ollama's API, for clients that were written for it: a translation into our chat and completions, with answers as
//! lines of JSON.
//!
//! What ollama does by managing models is here as far as a server does it: models that it was started with come and go,
//! none is made, copied or deleted.

mod lines;
mod models;
mod options;
mod request;

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State as Shared;
use axum::http::{HeaderMap, HeaderValue, Response, StatusCode, Uri, header};
use axum::routing::{any, get, post};
use axum::{Extension, Router};
use serde_json::json;

use crate::app::App;
use crate::error::{Answered, ApiError, json_response};
use crate::models::Models;
use crate::record::Record;
use crate::sse::Events;
use crate::{body, sse};
use lines::{Form, Lines};
use request::{Asked, Request};

pub fn routes() -> Router<Arc<Models>> {
    let all = Router::new()
        .route("/api/chat", post(chat))
        .route("/api/generate", post(generate))
        .route("/api/tags", get(tags))
        .route("/api/ps", get(running))
        .route("/api/version", get(version))
        .route("/api/show", post(show))
        .route("/api/pull", post(pull));
    let known = ["embed", "embeddings", "create", "delete", "copy", "push", "blobs/{digest}"];
    known.iter().fold(all, |all, path| all.route(&format!("/api/{path}"), any(refused)))
}

async fn chat(
    Shared(served): Shared<Arc<Models>>,
    Extension(record): Extension<Arc<Record>>,
    headers: HeaderMap,
    body: Body,
) -> Answered {
    let (app, body) = served.receive(&headers, body, &record).await?;
    let request = body::read(&app, body, request::chat).await?;
    answer(app, record, request, Form::Chat).await
}

async fn generate(
    Shared(served): Shared<Arc<Models>>,
    Extension(record): Extension<Arc<Record>>,
    headers: HeaderMap,
    body: Body,
) -> Answered {
    let (app, body) = served.receive(&headers, body, &record).await?;
    let request = body::read(&app, body, request::generate).await?;
    answer(app, record, request, Form::Generate).await
}

async fn answer(app: Arc<App>, record: Arc<Record>, request: Request, form: Form) -> Answered {
    let lines = Lines::new(form, request.model);
    let (stream, prepared) = match request.asked {
        Asked::Load { unload } => {
            match unload {
                true => app.house.let_go(&app.slot).await,
                false => _ = app.house.lease(&app.slot).await?,
            }
            return Ok(json_response(StatusCode::OK, &lines.loaded(unload)));
        }
        Asked::Answer { stream, prepared } => (stream, prepared),
    };
    let progress = app.begin(*prepared, record).await?;
    if stream {
        return Ok(sse::response(progress, lines, app.ping));
    }
    let (answers, usage) = progress.whole().await?;
    let Some((whole, finished)) = answers.first() else { return Err(ApiError::internal("there is no answer")) };
    Ok(json_response(StatusCode::OK, &lines.whole(whole, finished, usage)))
}

async fn tags(Shared(served): Shared<Arc<Models>>) -> Response<Body> {
    json_response(StatusCode::OK, &models::tags(&served))
}

async fn running(Shared(served): Shared<Arc<Models>>) -> Response<Body> {
    json_response(StatusCode::OK, &models::running(&served))
}

async fn version() -> Response<Body> {
    json_response(StatusCode::OK, &models::version())
}

async fn show(Shared(served): Shared<Arc<Models>>, headers: HeaderMap, body: Body) -> Answered {
    let body = body::receive(&headers, body).await?;
    let first = Arc::clone(served.first());
    let answer = body::read_value(&first, body, move |_, body| models::show(&served, body)).await?;
    Ok(json_response(StatusCode::OK, &answer))
}

async fn pull(Shared(served): Shared<Arc<Models>>, headers: HeaderMap, body: Body) -> Answered {
    let body = body::receive(&headers, body).await?;
    let first = Arc::clone(served.first());
    let stream = body::read_value(&first, body, move |_, body| models::pull(&served, body)).await?;
    let mut line = String::new();
    lines::write(&mut line, &json!({ "status": "success" }));
    let mut response = Response::new(Body::from(line));
    let kind = if stream { Lines::MEDIA_TYPE } else { "application/json" };
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    Ok(response)
}

async fn refused(uri: Uri) -> ApiError {
    models::refused(uri.path())
}
