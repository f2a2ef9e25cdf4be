//! Paths, keys, handlers: everything between a connection and an answer.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Path, Request, State as Shared};
use axum::http::{HeaderMap, HeaderValue, Method, Response, StatusCode, Version, header};
use axum::middleware::{self, Next};
use axum::routing::{get, post};
use axum::{Extension, Router};
use serde_json::{Map, Value, json};

use crate::app::App;
use crate::dialect::Dialect;
use crate::error::{Answered, ApiError, json_response};
use crate::fields::Fields;
use crate::keys::Keys;
use crate::media::Fetched;
use crate::models::Models;
use crate::record::{Client, Record, Sink};
use crate::scrape::{self, Told};
use crate::sse::Events;
use crate::{adapters, anthropic, body, chat, completions, llama, ollama, page, responses, sse, tokens, transcription};

/// What the layer around all handlers needs.
#[derive(Clone)]
pub struct Gate {
    pub models: Arc<Models>,
    pub keys: Arc<Keys>,
    /// The one origin whose pages may call.
    pub cors: Option<HeaderValue>,
    /// Is told of each request.
    pub sink: Option<Sink>,
}

pub fn router(gate: Gate) -> Router {
    Router::new()
        .route("/", get(page))
        .route("/page/{file}", get(page))
        .route("/v1/chat/completions", post(chat))
        .route("/chat/completions", post(chat))
        .route("/v1/completions", post(completion))
        .route("/v1/responses", post(response))
        .merge(anthropic::routes::routes())
        .merge(transcription::routes::routes())
        .merge(adapters::routes::routes())
        .route("/v1/models", get(list))
        .route("/models", get(list))
        .route("/v1/models/{*id}", get(model))
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .route("/health", get(health))
        .route("/v1/health", get(health))
        .route("/ping", get(health))
        .route("/metrics", get(metrics))
        .route("/version", get(version))
        .route("/v1/embeddings", post(embeddings))
        .merge(ollama::routes())
        .merge(llama::routes())
        .fallback(unknown)
        .method_not_allowed_fallback(wrong_method)
        .with_state(Arc::clone(&gate.models))
        .layer(middleware::from_fn_with_state(gate, guard))
}

/// Keys before, and headers after every handler; the line about a request around all of it.
async fn guard(
    Shared(gate): Shared<Gate>,
    Extension(client): Extension<Arc<Client>>,
    mut request: Request,
    next: Next,
) -> Response<Body> {
    let is_free = request.method() == Method::OPTIONS
        || page::paths().chain(["/health", "/v1/health", "/ping", "/metrics"]).any(|free| free == request.uri().path());
    let id = request.headers().get("x-request-id").filter(|id| id.len() <= 128).cloned();
    let id = id.unwrap_or_else(new_id);
    let shown_id = String::from_utf8_lossy(id.as_bytes());
    let owner = gate.keys.client(client.address.ip(), request.headers());
    let record = Record::new(gate.sink.as_ref(), &gate.models.hand, client, owner, &request, &shown_id);
    if gate.models.is_alone() {
        record.set_model(&gate.models.first().model);
    }
    request.extensions_mut().insert(Arc::clone(&record));
    let dialect = Dialect::of(request.uri().path());
    let is_preflight = request.method() == Method::OPTIONS;
    let response = if !has_host(&request) {
        let message = "HTTP/1.1 demands one Host header";
        ApiError::bad_request("missing_host", message).response()
    } else if !is_free && !gate.keys.admit(request.headers()) {
        ApiError::unauthorized().response()
    } else if is_preflight && gate.cors.is_some() {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::NO_CONTENT;
        response
    } else {
        next.run(request).await
    };
    let mut response = dialect.shape(response);
    let headers = response.headers_mut();
    if dialect == Dialect::Anthropic {
        headers.insert("request-id", id.clone());
    }
    headers.insert("x-request-id", id);
    if let Some(origin) = gate.cors {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        if is_preflight {
            let any = HeaderValue::from_static(
                "authorization, content-type, x-api-key, x-request-id, anthropic-version, anthropic-beta",
            );
            headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, any);
            headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, OPTIONS"));
        }
    }
    record.respond(response)
}

fn new_id() -> HeaderValue {
    let id = format!("req_{:016x}", crate::generation::any_seed());
    HeaderValue::from_str(&id).unwrap_or(HeaderValue::from_static("req_"))
}

/// HTTP/1.1 demands that a request names its host, once.
fn has_host(request: &Request) -> bool {
    request.version() != Version::HTTP_11 || request.headers().get_all(header::HOST).iter().count() == 1
}

async fn chat(
    Shared(models): Shared<Arc<Models>>,
    Extension(record): Extension<Arc<Record>>,
    headers: HeaderMap,
    body: Body,
) -> Answered {
    let (app, body) = models.receive(&headers, body, &record).await?;
    let chat::Chat { generation, prepared } = body::read(&app, body, chat::prepare).await?;
    let has_logprobs = generation.top_logprobs.is_some();
    let progress = app.begin(prepared, record).await?;
    if generation.stream {
        let envelope = app.envelope("chatcmpl-", "chat.completion.chunk");
        let (ping, choices, include_usage) = (app.ping, generation.choices, generation.include_usage);
        let measured = generation.has_timings.then(Default::default);
        let events = chat::ChatEvents { app, envelope, choices, has_logprobs, include_usage, measured };
        return Ok(sse::response(progress, events, ping));
    }
    let envelope = app.envelope("chatcmpl-", "chat.completion");
    let (answers, usage) = progress.whole().await?;
    Ok(json_response(StatusCode::OK, &chat::whole(&app, &envelope, &answers, usage, has_logprobs)))
}

async fn completion(
    Shared(models): Shared<Arc<Models>>,
    Extension(record): Extension<Arc<Record>>,
    headers: HeaderMap,
    body: Body,
) -> Answered {
    let (app, body) = models.receive(&headers, body, &record).await?;
    let read = |app: &App, fields: Fields<'_>, _: &Fetched| completions::prepare(app, fields);
    let completions::Completion { generation, prepared, echoes } = body::read(&app, body, read).await?;
    let has_logprobs = generation.top_logprobs.is_some();
    let progress = app.begin(prepared, record).await?;
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

async fn response(
    Shared(models): Shared<Arc<Models>>,
    Extension(record): Extension<Arc<Record>>,
    headers: HeaderMap,
    body: Body,
) -> Answered {
    let (app, body) = models.receive(&headers, body, &record).await?;
    let responses::Response { chat, echo } = body::read(&app, body, responses::prepare).await?;
    let mut progress = app.begin(chat.prepared, record).await?;
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

/// A model, or an adapter with the name of its model and its path.
fn model_json(app: &App) -> Value {
    let mut model = json!({
        "id": app.model,
        "object": "model",
        "created": app.created,
        "owned_by": "gemma4c",
        "max_model_len": app.speech.context,
        "input_modalities": app.senses.modalities(),
        "status": { "value": if app.slot.is_here() { "loaded" } else { "unloaded" } },
    });
    if let Some(parent) = &app.parent {
        model["root"] = app.adapters.listed(&app.model).map(|listed| listed.path).into();
        model["parent"] = parent.as_str().into();
    }
    model
}

async fn list(Shared(models): Shared<Arc<Models>>) -> Response<Body> {
    let data: Vec<Value> = models.with_adapters().iter().map(|app| model_json(app)).collect();
    json_response(StatusCode::OK, &json!({ "object": "list", "data": data }))
}

async fn model(Shared(models): Shared<Arc<Models>>, Path(id): Path<String>) -> Answered {
    let app = models.listed(&id).ok_or_else(|| models.first().unknown_model(&id))?;
    Ok(json_response(StatusCode::OK, &model_json(&app)))
}

async fn tokenize(
    Shared(models): Shared<Arc<Models>>,
    Extension(record): Extension<Arc<Record>>,
    headers: HeaderMap,
    body: Body,
) -> Answered {
    with_body(models, record, headers, body, tokens::tokenize).await
}

async fn detokenize(
    Shared(models): Shared<Arc<Models>>,
    Extension(record): Extension<Arc<Record>>,
    headers: HeaderMap,
    body: Body,
) -> Answered {
    with_body(models, record, headers, body, tokens::detokenize).await
}

async fn with_body(
    models: Arc<Models>,
    record: Arc<Record>,
    headers: HeaderMap,
    body: Body,
    answer: fn(&App, Fields<'_>) -> Result<Value, ApiError>,
) -> Answered {
    let (app, body) = models.receive(&headers, body, &record).await?;
    let answer = body::read(&app, body, move |app, fields, _| answer(app, fields)).await?;
    Ok(json_response(StatusCode::OK, &answer))
}

async fn health(Shared(models): Shared<Arc<Models>>) -> Response<Body> {
    match models.all().iter().find_map(|app| app.state.check().err()) {
        None => json_response(StatusCode::OK, &json!({ "status": "ok" })),
        Some(error) => error.response(),
    }
}

async fn metrics(Shared(models): Shared<Arc<Models>>) -> Response<Body> {
    let told: Vec<Told<'_>> = models.all().iter().map(|app| Told::new(app)).collect();
    let mut response = Response::new(Body::from(scrape::text(&told)));
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

/// Of the first model; of several, each has its facts in a list too.
async fn version(Shared(models): Shared<Arc<Models>>) -> Response<Body> {
    let mut facts = version_json(models.first());
    facts.insert("version".into(), env!("CARGO_PKG_VERSION").into());
    if models.all().len() > 1 {
        facts.insert("models".into(), models.all().iter().map(|app| Value::Object(version_json(app))).collect());
    }
    json_response(StatusCode::OK, &Value::Object(facts))
}

/// What the engine says of itself is known while the model is in memory.
fn version_json(app: &App) -> Map<String, Value> {
    let ready = app.slot.ready();
    let ready = ready.as_ref();
    let mut facts = Map::new();
    for (name, value) in [
        ("model", app.model.as_str().into()),
        ("plan_hash", app.fingerprint.as_str().into()),
        ("context", app.speech.context.into()),
        ("vocab_size", app.speech.vocab_size.into()),
        ("input_modalities", app.senses.modalities().into()),
        ("device", ready.map(|ready| ready.device.as_str()).into()),
        ("sequences", ready.map(|ready| ready.sequences).into()),
        ("blocks", ready.map(|ready| ready.pages).into()),
        ("block_size", ready.map(|ready| ready.page_rows).into()),
        ("memory_bytes", ready.and_then(|ready| ready.memory_bytes).into()),
    ] {
        facts.insert(name.into(), value);
    }
    facts.extend((*app.facts).clone());
    facts
}

/// A file of the chat page. Browsers ask for it as HTML; programs that look for ollama do not.
async fn page(request: Request) -> Response<Body> {
    let accepted = request.headers().get_all(header::ACCEPT).iter();
    let is_browser = accepted.filter_map(|types| types.to_str().ok()).any(|types| types.contains("text/html"));
    if request.uri().path() == "/" && !is_browser {
        let mut response = Response::new(Body::from("Ollama is running"));
        let kind = HeaderValue::from_static("text/plain; charset=utf-8");
        response.headers_mut().insert(header::CONTENT_TYPE, kind);
        return response;
    }
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
