//! Why a schema cannot be enforced.

use crate::error::ApiError;

/// What cannot be enforced, and why.
#[derive(Clone, Debug, PartialEq)]
pub struct Refusal {
    pub keyword: String,
    pub reason: String,
}

impl Refusal {
    pub fn new(keyword: &str, reason: impl Into<String>) -> Refusal {
        Refusal { keyword: keyword.into(), reason: reason.into() }
    }

    /// As a client is told, with the field of the request that has the schema.
    pub fn error(&self, param: &str) -> ApiError {
        let Refusal { keyword, reason } = self;
        ApiError::schema(param, format!("{param}: {keyword:?} {reason}"))
    }
}
