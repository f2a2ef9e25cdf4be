//! The bodies of requests: their bytes, within limits for each and for all together, and the JSON in them.
//!
//! JSON takes many times the memory of its text. So a body waits for its turn as bytes, is parsed by whoever reads the
//! request, and is dropped with that.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes, to_bytes};
use axum::http::{HeaderMap, StatusCode, header};
use serde::Deserialize;
use serde_json::Value;
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::app::App;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::media::{Fetched, fetch_all, remote_urls};

/// The longest body: a prompt of the longest context is far smaller.
const MOST_BODY: usize = 32 << 20;
/// How long a client may take to send its body.
const BODY_TIME: Duration = Duration::from_secs(60);
/// Bodies up to here are always taken: connections are limited too.
const SMALL: usize = 64 << 10;
/// Kibibytes of all larger ones together.
const MOST_LARGE_KIB: usize = 512 << 10;
/// Bytes that the values of one body may take.
const MOST_PARSED: usize = 128 << 20;

/// A body that was received; others get its share of memory when it is dropped.
pub struct Received {
    bytes: Bytes,
    _share: Option<SemaphorePermit<'static>>,
}

/// The one field that says who reads all the others.
#[derive(Deserialize)]
struct Addressed<'a> {
    #[serde(borrow)]
    model: Option<Cow<'a, str>>,
}

impl Received {
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The model that it names, found without the memory that its values would take. What cannot be read is left to
    /// whoever reads the rest.
    pub fn model(&self) -> Option<String> {
        serde_json::from_slice::<Addressed<'_>>(&self.bytes).ok()?.model.map(Cow::into_owned)
    }
}

/// The bytes of a request's body, whatever its content type says.
pub async fn receive(headers: &HeaderMap, body: Body) -> Result<Received, ApiError> {
    static LARGE: Semaphore = Semaphore::const_new(MOST_LARGE_KIB);
    let too_large = || {
        let message = format!("the body must have at most {MOST_BODY} bytes");
        ApiError::refused(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message)
    };
    let length = headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<usize>().ok());
    // One whose length is not told may become as long as any.
    let length = length.unwrap_or(MOST_BODY);
    if length > MOST_BODY {
        return Err(too_large());
    }
    let share = match length > SMALL {
        false => None,
        true => Some(LARGE.try_acquire_many(length.div_ceil(1 << 10) as u32).map_err(|_| {
            ApiError::unavailable(
                "bodies_full",
                "the bodies of other requests take all the memory that there is for them",
            )
        })?),
    };
    match tokio::time::timeout(BODY_TIME, to_bytes(body, MOST_BODY)).await {
        Err(_) => {
            let message = "the body did not come in time";
            Err(ApiError::refused(StatusCode::REQUEST_TIMEOUT, "body_timeout", message))
        }
        Ok(Err(error)) => {
            // Either it is too long, or the connection has broken and nobody reads this.
            let is_too_long = std::error::Error::source(&error).is_some_and(|e| e.to_string().contains("length limit"));
            Err(match is_too_long {
                true => too_large(),
                false => ApiError::bad_request("json_parse_error", format!("the body cannot be read: {error}")),
            })
        }
        Ok(Ok(bytes)) => Ok(Received { bytes, _share: share }),
    }
}

/// Parses a body and runs what reads it beside the threads that serve connections: a long prompt takes a while to
/// encode.
pub async fn read<T: Send + 'static>(
    app: &Arc<App>,
    body: Received,
    read: impl FnOnce(&App, Fields<'_>, &Fetched) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let hosts = &app.senses.hosts;
    let fetched = match hosts.is_empty() {
        true => Fetched::default(),
        false => {
            // Parsed for its addresses alone: what it becomes does not wait for another's host.
            let bytes = body.bytes.clone();
            let urls = beside(app, move |_| Ok(remote_urls(&parse(&bytes)?))).await?;
            fetch_all(hosts, urls).await
        }
    };
    read_value(app, body, move |app, value| read(app, app.fields(value)?, &fetched)).await
}

/// The same for whatever a body has, whichever model it names.
pub async fn read_value<T: Send + 'static>(
    app: &Arc<App>,
    body: Received,
    read: impl FnOnce(&App, &Value) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    beside(app, move |app| {
        let value = parse(&body.bytes)?;
        drop(body);
        read(app, &value)
    })
    .await
}

/// The same for a body that is no JSON.
pub async fn read_bytes<T: Send + 'static>(
    app: &Arc<App>,
    body: Received,
    read: impl FnOnce(&App, &[u8]) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    beside(app, move |app| read(app, &body.bytes)).await
}

/// Runs work that takes a core, as many at once as there are.
pub async fn beside<T: Send + 'static>(
    app: &Arc<App>,
    work: impl FnOnce(&App) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    // The semaphore is never closed.
    let _permit = app.readers.acquire().await;
    let app = Arc::clone(app);
    let work = tokio::task::spawn_blocking(move || work(&app));
    work.await.unwrap_or_else(|_| Err(ApiError::internal("reading the request has failed")))
}

fn parse(bytes: &[u8]) -> Result<Value, ApiError> {
    let parsed = parsed_size(bytes);
    if parsed > MOST_PARSED {
        let message = format!("the body has so many values that they take {parsed} bytes; {MOST_PARSED} are the most");
        return Err(ApiError::refused(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message));
    }
    serde_json::from_slice(bytes)
        .map_err(|error| ApiError::bad_request("json_parse_error", format!("the body is no JSON: {error}")))
}

/// About how many bytes the values in a JSON text take beside the text itself, found without making them.
fn parsed_size(json: &[u8]) -> usize {
    const OBJECT: usize = 256;
    const LIST: usize = 64;
    const MEMBER: usize = 128;
    const VALUE: usize = 32;
    let (mut size, mut is_text, mut is_escaped) = (0usize, false, false);
    for byte in json {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if is_text => is_escaped = true,
            b'"' => is_text = !is_text,
            _ if is_text => {}
            b'{' => size += OBJECT,
            b'[' => size += LIST,
            b':' => size += MEMBER,
            b',' => size += VALUE,
            _ => {}
        }
    }
    size
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_count_and_texts_do_not() {
        assert_eq!(parsed_size(br#"{"a":[1,2]}"#), 256 + 128 + 64 + 32);
        assert_eq!(parsed_size(br#""{[:,\"{[:,\\""#), 0);
        assert_eq!(parsed_size(br#"["\\",{"#), 64 + 32 + 256);
        // A prompt of token ids as long as any context, several times.
        assert!(parse(format!("[{}1]", "1,".repeat(2 << 20)).as_bytes()).is_ok());
    }

    #[test]
    fn a_body_says_whom_it_is_for() {
        let model = |text: &'static str| Received { bytes: Bytes::from(text), _share: None }.model();
        assert_eq!(
            model(r#"{"messages":[{"model":"inner"}],"model":"outer \"one\""}"#).as_deref(),
            Some("outer \"one\"")
        );
        for text in [r#"{"messages":[]}"#, r#"{"model":7}"#, r#"{"model":null}"#, "[]", "{"] {
            assert_eq!(model(text), None, "{text}");
        }
    }

    #[test]
    fn a_small_text_of_many_objects_is_refused_before_it_is_parsed() {
        let text = format!("[{}{{}}]", r#"{"a":1},"#.repeat(400_000));
        assert!(text.len() < 4 << 20);
        let error = parse(text.as_bytes()).unwrap_err();
        assert_eq!((error.status, error.code), (StatusCode::PAYLOAD_TOO_LARGE, "body_too_large"));
    }
}
