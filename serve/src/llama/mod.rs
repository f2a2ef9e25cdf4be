//! llama-server's own paths, for clients that were written for it. What it shares with OpenAI's API is there already.

mod answer;
mod completion;
mod lora;
mod props;

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State as Shared;
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::routing::{get, post};
use axum::{Extension, Router};
use serde_json::json;

use crate::app::App;
use crate::error::{Answered, ApiError, json_response};
use crate::models::Models;
use crate::record::Record;
use crate::{body, sse};
use answer::CompletionAnswer;

pub fn routes() -> Router<Arc<Models>> {
    Router::new()
        .route("/completion", post(complete))
        .route("/completions", post(complete))
        .route("/props", get(props))
        .route("/slots", get(slots))
        .route("/apply-template", post(apply_template))
        .route("/lora-adapters", get(list_adapters).post(set_adapters))
}

async fn complete(
    Shared(models): Shared<Arc<Models>>,
    Extension(record): Extension<Arc<Record>>,
    headers: HeaderMap,
    body: Body,
) -> Answered {
    let (app, body) = models.receive(&headers, body, &record).await?;
    let asked = body::read(&app, body, |app, fields, _| completion::prepare(app, fields)).await?;
    let mut answer = CompletionAnswer::new(Arc::clone(&app), &asked);
    let stream = asked.completion.generation.stream;
    let mut progress = app.begin(asked.completion.prepared, record).await?;
    if stream {
        return Ok(sse::response(progress, answer, app.ping));
    }
    loop {
        let updates = progress.next().await?;
        if updates.is_empty() {
            return Ok(json_response(StatusCode::OK, &answer.last(progress.usage())));
        }
        updates.into_iter().for_each(|update| answer.add(update));
    }
}

/// Of the model that the query names, or of the first.
async fn props(Shared(models): Shared<Arc<Models>>, uri: Uri) -> Answered {
    let app = asked_for(&models, &uri)?;
    app.state.check()?;
    Ok(json_response(StatusCode::OK, &props::props(&app)?))
}

async fn slots(Shared(models): Shared<Arc<Models>>, uri: Uri) -> Answered {
    let app = asked_for(&models, &uri)?;
    app.state.check()?;
    let fails = uri.query().is_some_and(|query| query.split('&').any(|field| field == "fail_on_no_slot=1"));
    Ok(json_response(StatusCode::OK, &props::slots(&app, fails)?))
}

async fn apply_template(
    Shared(models): Shared<Arc<Models>>,
    Extension(record): Extension<Arc<Record>>,
    headers: HeaderMap,
    body: Body,
) -> Answered {
    let (app, body) = models.receive(&headers, body, &record).await?;
    let answer = body::read(&app, body, |app, fields, _| props::apply_template(app, fields)).await?;
    Ok(json_response(StatusCode::OK, &answer))
}

/// Of the model that the query names, or of the first.
async fn list_adapters(Shared(models): Shared<Arc<Models>>, uri: Uri) -> Answered {
    let app = asked_for(&models, &uri)?;
    Ok(json_response(StatusCode::OK, &lora::list(&app)))
}

/// Sets how strong adapters are. What other clients get changes with it, so it is off where adapters do not change.
async fn set_adapters(Shared(models): Shared<Arc<Models>>, uri: Uri, headers: HeaderMap, body: Body) -> Answered {
    if models.folders.is_none() {
        let message = "the scales of adapters stay as they are here: start the server with --lora-loading to set them";
        return Err(ApiError::not_implemented(message));
    }
    let app = asked_for(&models, &uri)?;
    let body = body::receive(&headers, body).await?;
    body::read_value(&app, body, lora::set).await?;
    Ok(json_response(StatusCode::OK, &json!({ "success": true })))
}

fn asked_for(models: &Models, uri: &Uri) -> Result<Arc<App>, ApiError> {
    let fields = uri.query().into_iter().flat_map(|query| query.split('&'));
    let name = fields.filter_map(|field| field.strip_prefix("model=")).find(|name| !name.is_empty());
    name.map_or_else(
        || Ok(Arc::clone(models.first())),
        |name| models.named(&name.replace("%2F", "/").replace("%3A", ":")),
    )
}
