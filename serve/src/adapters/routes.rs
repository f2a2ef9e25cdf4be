//! The paths by which vLLM's clients load and unload adapters, with its answers.

use std::path::PathBuf;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::State as Shared;
use axum::http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use axum::routing::post;
use axum::{Extension, Router};
use serde_json::Value;

use super::folders::Folders;
use super::loading::{Load, load, vacate};
use super::name::check_name;
use super::registry::{Reservation, not_found};
use crate::app::App;
use crate::body;
use crate::error::{Answered, ApiError};
use crate::fields::Fields;
use crate::models::Models;
use crate::record::Record;

/// Bytes of a path, at most.
const LONGEST_PATH: usize = 4096;

pub fn routes() -> Router<Arc<Models>> {
    Router::new()
        .route("/v1/load_lora_adapter", post(load_adapter))
        .route("/v1/unload_lora_adapter", post(unload_adapter))
}

/// Where adapters may be loaded from. Where loading is off, vLLM's paths are not there either.
fn folders(models: &Models) -> Result<&Folders, ApiError> {
    models.folders.as_ref().ok_or_else(|| {
        let message = "adapters are not loaded over HTTP here: start the server with --lora-loading, and with \
                       --lora-dir for the folders that they may come from";
        ApiError::refused(StatusCode::NOT_FOUND, "loading_is_off", message)
    })
}

async fn load_adapter(
    Shared(models): Shared<Arc<Models>>,
    Extension(record): Extension<Arc<Record>>,
    headers: HeaderMap,
    body: Body,
) -> Answered {
    folders(&models)?;
    models.check()?;
    let body = body::receive(&headers, body).await?;
    let read = Arc::clone(&models);
    let wanted = body::read_value(models.first(), body, move |_, body| Wanted::read(&read, body)).await?;
    let Wanted { app, name, shown, path, in_place } = wanted;
    record.set_model(&app.model);
    app.state.check()?;
    let reservation = reserve(&models, &app, &name, in_place)?;
    done(tokio::spawn(load(app, Load { reservation, path, shown })).await)?;
    Ok(success(&name, "added"))
}

/// What a client wants to have loaded.
struct Wanted {
    app: Arc<App>,
    name: String,
    shown: String,
    path: PathBuf,
    in_place: bool,
}

impl Wanted {
    fn read(models: &Models, body: &Value) -> Result<Wanted, ApiError> {
        let fields = object(body)?;
        let name = name(fields)?;
        check_name(name).map_err(|why| ApiError::invalid("lora_name", format!("lora_name: {why}")))?;
        let shown = fields.text("lora_path")?.filter(|path| !path.is_empty());
        let shown = shown.ok_or_else(|| ApiError::invalid("lora_path", "lora_path is missing"))?;
        let in_place = fields.flag("load_inplace")?;
        let app = match fields.text("model")? {
            Some(model) => models.model(model).ok_or_else(|| models.first().unknown_model(model))?,
            None => models.holder(name).unwrap_or(models.first()),
        };
        if app.adapters.seats().is_none() {
            let message = format!("model: the plan of {:?} has no seats for adapters", app.model);
            return Err(ApiError::invalid("model", message));
        }
        let too_long = shown.len() > LONGEST_PATH;
        let path = if too_long { None } else { folders(models)?.find(shown) };
        let path = path.ok_or_else(|| {
            let shown: String = shown.chars().take(200).collect();
            let message = format!("lora_path: there is no adapter {shown:?} below the folders that --lora-dir names");
            ApiError::invalid("lora_path", message)
        })?;
        Ok(Wanted { app: Arc::clone(app), name: name.to_owned(), shown: shown.to_owned(), path, in_place })
    }
}

/// A name is one adapter's, and no model's.
fn reserve(models: &Models, app: &Arc<App>, name: &str, in_place: bool) -> Result<Reservation, ApiError> {
    let _naming = models.naming();
    let is_another = |other: &&Arc<App>| !Arc::ptr_eq(other, app) && other.adapters.knows(name);
    let others = models.all();
    if let Some(other) = others.iter().find(|other| other.is_called(name)).or(others.iter().find(is_another)) {
        let message = format!("lora_name: {name:?} is taken, by the model {:?} or an adapter of it", other.model);
        return Err(ApiError::invalid("lora_name", message));
    }
    app.adapters.reserve(name, in_place)
}

async fn unload_adapter(
    Shared(models): Shared<Arc<Models>>,
    Extension(record): Extension<Arc<Record>>,
    headers: HeaderMap,
    body: Body,
) -> Answered {
    folders(&models)?;
    models.check()?;
    let body = body::receive(&headers, body).await?;
    let name = body::read_value(models.first(), body, |_, body| Ok(name(object(body)?)?.to_owned())).await?;
    let app = Arc::clone(models.holder(&name).ok_or_else(|| not_found(&name))?);
    record.set_model(&app.model);
    let seat = app.adapters.withdraw(&name)?;
    done(tokio::spawn(async move { vacate(&app, seat).await }).await)?;
    Ok(success(&name, "removed"))
}

fn object(body: &Value) -> Result<Fields<'_>, ApiError> {
    let fields = body.as_object().map(Fields);
    fields.ok_or_else(|| ApiError::bad_request("json_parse_error", "the body must be a JSON object"))
}

fn name(fields: Fields<'_>) -> Result<&str, ApiError> {
    let name = fields.text("lora_name")?.filter(|name| !name.is_empty());
    name.ok_or_else(|| ApiError::invalid("lora_name", "lora_name is missing"))
}

fn done(ended: Result<Result<(), ApiError>, tokio::task::JoinError>) -> Result<(), ApiError> {
    ended.unwrap_or_else(|_| Err(ApiError::internal("changing the adapters has failed")))
}

fn success(name: &str, what: &str) -> Response<Body> {
    let mut response = Response::new(Body::from(format!("Success: LoRA adapter '{name}' {what} successfully.")));
    let kind = HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}
