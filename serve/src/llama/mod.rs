//! llama-server's own paths, for clients that were written for it. What it shares with OpenAI's API is there already.

mod answer;
mod completion;
mod props;

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State as Shared;
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::routing::{get, post};
use axum::{Extension, Router};

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
    Ok(json_response(StatusCode::OK, &props::props(app)?))
}

async fn slots(Shared(models): Shared<Arc<Models>>, uri: Uri) -> Answered {
    let app = asked_for(&models, &uri)?;
    app.state.check()?;
    let fails = uri.query().is_some_and(|query| query.split('&').any(|field| field == "fail_on_no_slot=1"));
    Ok(json_response(StatusCode::OK, &props::slots(app, fails)?))
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

fn asked_for<'a>(models: &'a Models, uri: &Uri) -> Result<&'a Arc<App>, ApiError> {
    let fields = uri.query().into_iter().flat_map(|query| query.split('&'));
    let name = fields.filter_map(|field| field.strip_prefix("model=")).find(|name| !name.is_empty());
    name.map_or(Ok(models.first()), |name| models.named(&name.replace("%2F", "/").replace("%3A", ":")))
}
