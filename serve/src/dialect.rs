//! Whose API a path belongs to, and how clients of that API are told what is wrong.
//!
//! Handlers know one error, `ApiError`. Here it gets the shape that its reader parses.

use axum::body::Body;
use axum::http::{Response, StatusCode};
use serde_json::{Value, json};

use crate::error::{ApiError, json_response};

/// An API, by its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// Also llama-server's own paths: its errors have the same fields.
    OpenAi,
    Anthropic,
    Ollama,
}

impl Dialect {
    pub fn of(path: &str) -> Dialect {
        let is_below =
            |root: &str| path.strip_prefix(root).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        if is_below("/v1/messages") {
            Dialect::Anthropic
        } else if is_below("/api") {
            Dialect::Ollama
        } else {
            Dialect::OpenAi
        }
    }

    /// What the body of a failed request says.
    pub fn error(self, error: &ApiError) -> Value {
        match self {
            Dialect::OpenAi => error.json(),
            Dialect::Anthropic => {
                let kind = anthropic_kind(self.status(error.status));
                // By these words its clients know that a conversation must become shorter.
                let is_too_long = error.code == "context_length_exceeded";
                let message = format!("{}{}", if is_too_long { "prompt is too long: " } else { "" }, error.message);
                json!({ "type": "error", "error": { "type": kind, "message": message } })
            }
            Dialect::Ollama => json!({ "error": error.message }),
        }
    }

    fn status(self, status: StatusCode) -> StatusCode {
        match (self, status) {
            // Anthropic's clients wait and try again at this one.
            (Dialect::Anthropic, StatusCode::SERVICE_UNAVAILABLE) => {
                StatusCode::from_u16(OVERLOADED).unwrap_or(StatusCode::SERVICE_UNAVAILABLE)
            }
            (_, status) => status,
        }
    }

    /// Gives an error's response the shape of this API; other responses stay.
    pub fn shape(self, mut response: Response<Body>) -> Response<Body> {
        let Some(error) = response.extensions().get::<ApiError>().filter(|_| self != Dialect::OpenAi) else {
            return response;
        };
        let shaped = json_response(self.status(error.status), &self.error(error));
        *response.status_mut() = shaped.status();
        *response.body_mut() = shaped.into_body();
        response
    }
}

const OVERLOADED: u16 = 529;

fn anthropic_kind(status: StatusCode) -> &'static str {
    match status.as_u16() {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        OVERLOADED => "overloaded_error",
        400..500 => "invalid_request_error",
        _ => "api_error",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_says_whose_error_is_told() {
        let of = |path: &str| Dialect::of(path);
        assert_eq!(of("/v1/messages"), Dialect::Anthropic);
        assert_eq!(of("/v1/messages/count_tokens"), Dialect::Anthropic);
        assert_eq!(of("/v1/messagesx"), Dialect::OpenAi);
        assert_eq!(of("/api/chat"), Dialect::Ollama);
        assert_eq!(of("/v1/chat/completions"), Dialect::OpenAi);

        let error = ApiError::unavailable("loading", "the model is being loaded");
        let response = Dialect::Anthropic.shape(error.response());
        assert_eq!(response.status().as_u16(), OVERLOADED);
        assert!(response.headers().contains_key("retry-after"));
        let told = Dialect::Anthropic.error(&error);
        assert_eq!(told["error"]["type"], "overloaded_error");
        assert_eq!(Dialect::Ollama.error(&error), json!({ "error": "the model is being loaded" }));
        assert_eq!(Dialect::OpenAi.shape(error.response()).status(), StatusCode::SERVICE_UNAVAILABLE);
    }
}
