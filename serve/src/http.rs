//! Paths, keys, bodies: everything between a connection and a handler.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Path, Request, State as Shared};
use axum::http::{HeaderMap, HeaderValue, Method, Response, StatusCode, header};
use axum::middleware::{self, Next};
use axum::routing::{get, post};
use serde_json::{Value, json};

use crate::app::App;
use crate::error::{ApiError, json_response};
use crate::fields::Fields;
use crate::keys::Keys;
use crate::media::fetch_all;
use crate::sse::Events;
use crate::{chat, completions, page, responses, sse, tokens};

/// The longest body: a prompt of the longest context is far smaller.
pub const MOST_BODY: usize = 32 << 20;
/// How long a client may take to send its body.
const BODY_TIME: Duration = Duration::from_secs(60);

/// What the layer around all handlers needs.
#[derive(Clone)]
pub struct Gate {
    pub keys: Arc<Keys>,
    /// The one origin whose pages may call.
    pub cors: Option<HeaderValue>,
}

type Answered = Result<Response<Body>, ApiError>;

pub fn router(app: Arc<App>, gate: Gate) -> Router {
    Router::new()
        .route("/", get(page))
        .route("/page/{file}", get(page))
        .route("/v1/chat/completions", post(answer_chat))
        .route("/chat/completions", post(answer_chat))
        .route("/v1/completions", post(answer_completion))
        .route("/v1/responses", post(answer_response))
        .route("/v1/models", get(models))
        .route("/models", get(models))
        .route("/v1/models/{*id}", get(model))
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .route("/health", get(health))
        .route("/v1/health", get(health))
        .route("/ping", get(health))
        .route("/metrics", get(metrics))
        .route("/version", get(version))
        .route("/v1/embeddings", post(embeddings))
        .fallback(unknown)
        .method_not_allowed_fallback(wrong_method)
        .with_state(app)
        .layer(middleware::from_fn_with_state(gate, guard))
}

/// Keys before, and headers after every handler.
async fn guard(Shared(gate): Shared<Gate>, request: Request, next: Next) -> Response<Body> {
    let is_free = request.method() == Method::OPTIONS
        || page::paths().chain(["/health", "/v1/health", "/ping", "/metrics"]).any(|free| free == request.uri().path());
    let id = request.headers().get("x-request-id").filter(|id| id.len() <= 128).cloned();
    let is_preflight = request.method() == Method::OPTIONS;
    let mut response = if !is_free && !gate.keys.admit(request.headers()) {
        ApiError::unauthorized().response()
    } else if is_preflight && gate.cors.is_some() {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::NO_CONTENT;
        response
    } else {
        next.run(request).await
    };
    let headers = response.headers_mut();
    let id = id.or_else(|| HeaderValue::from_str(&format!("req_{:016x}", crate::generation::any_seed())).ok());
    id.into_iter().for_each(|id| _ = headers.insert("x-request-id", id));
    if let Some(origin) = gate.cors {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        if is_preflight {
            let any = HeaderValue::from_static("authorization, content-type, x-api-key, x-request-id");
            headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, any);
            headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, OPTIONS"));
        }
    }
    response
}

/// The JSON of a request's body, whatever its content type says.
async fn read_body(headers: &HeaderMap, body: Body) -> Result<Value, ApiError> {
    let too_large = || {
        let message = format!("the body must have at most {MOST_BODY} bytes");
        ApiError::refused(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message)
    };
    let length = headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    if length.is_some_and(|length| length > MOST_BODY as u64) {
        return Err(too_large());
    }
    let bytes = match tokio::time::timeout(BODY_TIME, to_bytes(body, MOST_BODY)).await {
        Err(_) => {
            let message = "the body did not come in time";
            return Err(ApiError::refused(StatusCode::REQUEST_TIMEOUT, "body_timeout", message));
        }
        Ok(Err(error)) => {
            // Either it is too long, or the connection has broken and nobody reads this.
            let is_too_long = std::error::Error::source(&error).is_some_and(|e| e.to_string().contains("length limit"));
            return Err(match is_too_long {
                true => too_large(),
                false => ApiError::bad_request("json_parse_error", format!("the body cannot be read: {error}")),
            });
        }
        Ok(Ok(bytes)) => bytes,
    };
    serde_json::from_slice(&bytes)
        .map_err(|error| ApiError::bad_request("json_parse_error", format!("the body is no JSON: {error}")))
}

/// Runs what reads a request beside the threads that serve connections: a long prompt takes a while to encode.
async fn prepare<T: Send + 'static>(
    app: &Arc<App>,
    body: Value,
    read: impl FnOnce(&App, crate::fields::Fields<'_>) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    // The semaphore is never closed.
    let _permit = app.readers.acquire().await;
    let app = Arc::clone(app);
    let work = tokio::task::spawn_blocking(move || read(&app, app.fields(&body)?));
    work.await.unwrap_or_else(|_| Err(ApiError::internal("reading the request has failed")))
}

fn answered(answer: Answered) -> Response<Body> {
    answer.unwrap_or_else(|error| error.response())
}

async fn answer_chat(Shared(app): Shared<Arc<App>>, headers: HeaderMap, body: Body) -> Response<Body> {
    answered(chat(app, headers, body).await)
}

async fn chat(app: Arc<App>, headers: HeaderMap, body: Body) -> Answered {
    app.state.check()?;
    let body = read_body(&headers, body).await?;
    let fetched = fetch_all(&app.senses.hosts, &body).await;
    let read = move |app: &App, fields: Fields<'_>| chat::prepare(app, fields, &fetched);
    let chat::Chat { generation, prepared } = prepare(&app, body, read).await?;
    let has_logprobs = generation.top_logprobs.is_some();
    let progress = app.begin(prepared).await?;
    if generation.stream {
        let envelope = app.envelope("chatcmpl-", "chat.completion.chunk");
        let (ping, choices, include_usage) = (app.ping, generation.choices, generation.include_usage);
        let events = chat::ChatEvents { app, envelope, choices, has_logprobs, include_usage };
        return Ok(sse::response(progress, events, ping));
    }
    let envelope = app.envelope("chatcmpl-", "chat.completion");
    let (answers, usage) = progress.whole().await?;
    Ok(json_response(StatusCode::OK, &chat::whole(&app, &envelope, &answers, usage, has_logprobs)))
}

async fn answer_completion(Shared(app): Shared<Arc<App>>, headers: HeaderMap, body: Body) -> Response<Body> {
    answered(completion(app, headers, body).await)
}

async fn completion(app: Arc<App>, headers: HeaderMap, body: Body) -> Answered {
    app.state.check()?;
    let body = read_body(&headers, body).await?;
    let completions::Completion { generation, prepared, echoes } = prepare(&app, body, completions::prepare).await?;
    let has_logprobs = generation.top_logprobs.is_some();
    let progress = app.begin(prepared).await?;
    let envelope = app.envelope("cmpl-", "text_completion");
    if generation.stream {
        let (ping, include_usage) = (app.ping, generation.include_usage);
        let (offsets, prompts) = (vec![0; echoes.len()], vec![Vec::new(); echoes.len()]);
        let echoes = echoes.into_iter().map(Some).collect();
        let events =
            completions::CompletionEvents { app, envelope, echoes, prompts, has_logprobs, include_usage, offsets };
        return Ok(sse::response(progress, events, ping));
    }
    let (answers, usage) = progress.whole().await?;
    let answer = completions::whole(&app, &envelope, &answers, usage, &echoes, has_logprobs);
    Ok(json_response(StatusCode::OK, &answer))
}

async fn answer_response(Shared(app): Shared<Arc<App>>, headers: HeaderMap, body: Body) -> Response<Body> {
    answered(response(app, headers, body).await)
}

async fn response(app: Arc<App>, headers: HeaderMap, body: Body) -> Answered {
    app.state.check()?;
    let body = read_body(&headers, body).await?;
    let fetched = fetch_all(&app.senses.hosts, &body).await;
    let read = move |app: &App, fields: Fields<'_>| responses::prepare(app, fields, &fetched);
    let responses::Response { chat, echo } = prepare(&app, body, read).await?;
    let mut progress = app.begin(chat.prepared).await?;
    let ping = app.ping;
    let mut events = responses::ResponseEvents::new(app, echo);
    if chat.generation.stream {
        return Ok(sse::response(progress, events, ping));
    }
    loop {
        let updates = progress.next().await?;
        if updates.is_empty() {
            return Ok(json_response(StatusCode::OK, &events.whole(progress.usage())));
        }
        updates.into_iter().for_each(|update| events.update(update, &mut String::new()));
    }
}

fn model_json(app: &App) -> Value {
    json!({
        "id": app.model,
        "object": "model",
        "created": app.created,
        "owned_by": "gemma4c",
        "max_model_len": app.speech.context,
        "input_modalities": app.senses.modalities(),
    })
}

async fn models(Shared(app): Shared<Arc<App>>) -> Response<Body> {
    json_response(StatusCode::OK, &json!({ "object": "list", "data": [model_json(&app)] }))
}

async fn model(Shared(app): Shared<Arc<App>>, Path(id): Path<String>) -> Response<Body> {
    match id == app.model {
        true => json_response(StatusCode::OK, &model_json(&app)),
        false => app.unknown_model(&id).response(),
    }
}

async fn tokenize(Shared(app): Shared<Arc<App>>, headers: HeaderMap, body: Body) -> Response<Body> {
    answered(with_body(app, headers, body, tokens::tokenize).await)
}

async fn detokenize(Shared(app): Shared<Arc<App>>, headers: HeaderMap, body: Body) -> Response<Body> {
    answered(with_body(app, headers, body, tokens::detokenize).await)
}

async fn with_body(
    app: Arc<App>,
    headers: HeaderMap,
    body: Body,
    answer: fn(&App, crate::fields::Fields<'_>) -> Result<Value, ApiError>,
) -> Answered {
    let body = read_body(&headers, body).await?;
    Ok(json_response(StatusCode::OK, &prepare(&app, body, answer).await?))
}

async fn health(Shared(app): Shared<Arc<App>>) -> Response<Body> {
    match app.state.check() {
        Ok(()) => json_response(StatusCode::OK, &json!({ "status": "ok" })),
        Err(error) => error.response(),
    }
}

async fn metrics(Shared(app): Shared<Arc<App>>) -> Response<Body> {
    let block_rows = app.ready.get().map_or(0, |ready| ready.block_rows);
    let text = app.state.metrics.text(&app.model, app.state.waiting(), block_rows);
    let mut response = Response::new(Body::from(text));
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

async fn version(Shared(app): Shared<Arc<App>>) -> Response<Body> {
    let ready = app.ready.get();
    let mut facts = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "model": app.model,
        "plan_hash": app.fingerprint,
        "context": app.speech.context,
        "vocab_size": app.speech.vocab_size,
        "input_modalities": app.senses.modalities(),
        "device": ready.map(|ready| ready.device.as_str()),
        "sequences": ready.map(|ready| ready.sequences),
        "blocks": ready.map(|ready| ready.blocks),
        "block_size": ready.map(|ready| ready.block_rows),
        "memory_bytes": ready.and_then(|ready| ready.memory_bytes),
    });
    if let (Value::Object(facts), Value::Object(more)) = (&mut facts, &app.facts) {
        facts.extend(more.clone());
    }
    json_response(StatusCode::OK, &facts)
}

/// A file of the chat page.
async fn page(request: Request) -> Response<Body> {
    match page::file(request.uri().path()) {
        Some(file) => file,
        None => unknown(request).await,
    }
}

async fn embeddings() -> Response<Body> {
    ApiError::not_implemented("embeddings are not served: the hidden states of a generator embed poorly").response()
}

async fn unknown(request: Request) -> Response<Body> {
    let message = format!("there is nothing at {}", request.uri().path());
    ApiError::refused(StatusCode::NOT_FOUND, "unknown_url", message).response()
}

async fn wrong_method(request: Request) -> Response<Body> {
    let message = format!("{} is not for {}", request.uri().path(), request.method());
    ApiError::refused(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message).response()
}
