//! Adapters as llama-server lists them, by numbers, and how strong each is for requests that do not say it.
//!
//! There an adapter with a scale is on for all requests. Here a request chooses one, by `model` or by its own `lora`, and
//! the scale is how strong it is then.

use serde_json::{Value, json};

use crate::adapters::{Asked, Listed};
use crate::app::App;
use crate::error::ApiError;
use crate::fields::decimal;

/// `GET /lora-adapters`. A number is never given twice.
pub fn list(app: &App) -> Value {
    let of = |listed: &Listed| json!({ "id": listed.id, "name": *listed.name, "path": listed.path, "scale": decimal(listed.strength) });
    app.adapters.list().iter().map(of).collect()
}

/// `POST /lora-adapters`. Those that are not named stay as they are.
pub fn set(app: &App, body: &Value) -> Result<(), ApiError> {
    let Value::Array(list) = body else {
        return Err(ApiError::bad_request("json_parse_error", "the body must be a list of objects with id and scale"));
    };
    app.adapters.set_strengths("lora", &Asked::read_list("lora", list)?)
}
