//! What a client is told when something is wrong: always one JSON object of the same shape, never plain text.

use axum::body::Body;
use axum::http::{HeaderValue, Response, StatusCode, header};
use axum::response::IntoResponse;
use gemma4c_runtime::engine::RequestError;
use serde_json::{Value, json};

/// An error as OpenAI's clients expect it.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiError {
    pub status: StatusCode,
    pub kind: &'static str,
    pub code: &'static str,
    /// The field of the request that is at fault.
    pub param: Option<String>,
    pub message: String,
    /// Seconds after which it is worth trying again.
    pub retry_after: Option<u32>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, code: &'static str, message: impl Into<String>) -> ApiError {
        ApiError { status, kind, code, param: None, message: message.into(), retry_after: None }
    }

    /// A field has a value that is not taken.
    pub fn invalid(param: &str, message: impl Into<String>) -> ApiError {
        ApiError { param: Some(param.into()), ..ApiError::bad_request("invalid_value", message) }
    }

    pub fn bad_request(code: &'static str, message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, "invalid_request_error", code, message)
    }

    /// A JSON schema that cannot be enforced, and the field that has it.
    pub fn schema(param: &str, message: impl Into<String>) -> ApiError {
        ApiError { param: Some(param.into()), ..ApiError::bad_request("invalid_schema", message) }
    }

    pub fn refused(status: StatusCode, code: &'static str, message: impl Into<String>) -> ApiError {
        ApiError::new(status, "invalid_request_error", code, message)
    }

    /// A prompt and an answer that do not fit. Clients know the case by the first words, which are OpenAI's own: they
    /// shorten the conversation and try again.
    pub fn context_exceeded(context: u32, asked: usize, more: &str) -> ApiError {
        let message = format!(
            "This model's maximum context length is {context} tokens. However, you requested {asked} tokens ({more}). Please reduce the length of the messages or completion."
        );
        ApiError::bad_request("context_length_exceeded", message)
    }

    pub fn unauthorized() -> ApiError {
        let message = "the API key is missing or wrong: send `Authorization: Bearer KEY`";
        ApiError::new(StatusCode::UNAUTHORIZED, "authentication_error", "invalid_api_key", message)
    }

    /// Something else has to end first.
    pub fn conflict(code: &'static str, message: impl Into<String>) -> ApiError {
        ApiError::refused(StatusCode::CONFLICT, code, message)
    }

    pub fn queue_full(message: impl Into<String>) -> ApiError {
        let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", "queue_full", message);
        ApiError { retry_after: Some(1), ..error }
    }

    pub fn unavailable(code: &'static str, message: impl Into<String>) -> ApiError {
        let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable_error", code, message);
        ApiError { retry_after: Some(2), ..error }
    }

    pub fn timeout(code: &'static str, message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::GATEWAY_TIMEOUT, "timeout_error", code, message)
    }

    pub fn internal(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", "internal_error", message)
    }

    pub fn not_implemented(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::NOT_IMPLEMENTED, "invalid_request_error", "unsupported", message)
    }

    /// The same of a field within an object: its name begins the message.
    pub fn within(self, object: &str) -> ApiError {
        let param = self.param.map(|field| format!("{object}.{field}"));
        ApiError { param, message: format!("{object}.{}", self.message), ..self }
    }

    pub fn json(&self) -> Value {
        let ApiError { kind, code, param, message, .. } = self;
        json!({ "error": { "message": message, "type": kind, "param": param, "code": code } })
    }

    /// The error goes along beside the bytes: others give it another shape, and note it.
    pub fn response(&self) -> Response<Body> {
        let mut response = json_response(self.status, &self.json());
        response.extensions_mut().insert(self.clone());
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> ApiError {
        let message = error.to_string();
        match error {
            RequestError::PromptTooLong { tokens, context } => {
                ApiError::context_exceeded(context, tokens, "all of them in the prompt")
            }
            RequestError::NeverFits { positions, needed, pages } => {
                let context = pages.saturating_mul(positions.div_ceil(needed.max(1)));
                ApiError::context_exceeded(context, positions as usize, &message)
            }
            // Seats are given and kept here.
            RequestError::Seat(_)
            | RequestError::Runtime(_)
            | RequestError::NotRunning(_)
            | RequestError::NoRoom(_) => ApiError::internal(message),
            _ => ApiError::bad_request("invalid_value", message),
        }
    }
}

/// What a handler gives back; an error becomes its response by itself.
pub type Answered = Result<Response<Body>, ApiError>;

impl IntoResponse for ApiError {
    fn into_response(self) -> Response<Body> {
        self.response()
    }
}

pub fn json_response(status: StatusCode, body: &Value) -> Response<Body> {
    let mut response = Response::new(Body::from(body.to_string()));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
