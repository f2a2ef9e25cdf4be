//! Parts of messages that are pictures or sounds, and where their bytes are: in a data URL, in base64, or at an
//! address.

use std::borrow::Cow;

use base64::Engine;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use serde_json::Value;

use super::fetched::{Fetched, starts_with_scheme};
use crate::error::ApiError;

/// Pictures and sounds of a request, at most.
pub const MOST_MEDIA: usize = 64;

/// What a part is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Picture,
    Sound,
}

impl Kind {
    /// For a person.
    pub const fn plural(self) -> &'static str {
        match self {
            Kind::Picture => "pictures",
            Kind::Sound => "sounds",
        }
    }

    /// What templates and clients call it.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Picture => "image",
            Kind::Sound => "audio",
        }
    }
}

/// A picture or a sound of a message.
#[derive(Debug, PartialEq)]
pub struct Part<'a> {
    pub kind: Kind,
    pub source: Source<'a>,
}

/// Where its bytes are.
#[derive(Debug, PartialEq)]
pub enum Source<'a> {
    Base64(&'a str),
    Url(&'a str),
}

impl<'a> Part<'a> {
    /// A part in the words of chat completions or of Responses; `None` where it is neither a picture nor a sound.
    pub fn read(param: &str, part: &'a Value) -> Result<Option<Part<'a>>, ApiError> {
        let Some(name) = part.get("type").and_then(Value::as_str) else { return Ok(None) };
        let (kind, field) = match name {
            "image_url" | "input_image" => (Kind::Picture, "image_url"),
            "audio_url" => (Kind::Sound, "audio_url"),
            "input_audio" => (Kind::Sound, "input_audio"),
            _ => return Ok(None),
        };
        let value = &part[field];
        // The URL stands in an object in chat completions, by itself in Responses.
        let text = match field {
            "input_audio" => value["data"].as_str(),
            _ => value["url"].as_str().or(value.as_str()),
        };
        let Some(text) = text else {
            let expected = match field {
                "input_audio" => "input_audio.data must be the base64 of a sound".to_owned(),
                field => format!("{field} must be a URL, or an object with one as url"),
            };
            return Err(ApiError::invalid(param, format!("{param}.{expected}")));
        };
        let source = match field {
            "input_audio" if !text.starts_with("data:") => Source::Base64(text),
            _ => Source::Url(text),
        };
        Ok(Some(Part { kind, source }))
    }
}

impl Source<'_> {
    /// Whether it is somewhere else.
    pub fn remote(&self) -> Option<&str> {
        let is_remote = |url: &&str| !starts_with_scheme(url, "data:");
        if let Source::Url(url) = self { Some(*url).filter(is_remote) } else { None }
    }

    /// The bytes of its file, of which those that are somewhere else were fetched.
    pub fn bytes<'f>(&self, fetched: &'f Fetched) -> Result<Cow<'f, [u8]>, String> {
        match self {
            Source::Base64(text) => decode(text).map(Cow::Owned),
            Source::Url(url) if starts_with_scheme(url, "data:") => {
                let (head, data) = url["data:".len()..].split_once(',').ok_or("the data URL has no comma")?;
                match head.split(';').next_back().is_some_and(|last| last.trim().eq_ignore_ascii_case("base64")) {
                    true => decode(data).map(Cow::Owned),
                    false => Err("the data URL must be in base64".into()),
                }
            }
            Source::Url(url) => fetched.bytes(url).map(Cow::Borrowed),
        }
    }
}

/// With or without padding, and with line breaks, as some encoders leave them.
fn decode(text: &str) -> Result<Vec<u8>, String> {
    let config = GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
    let engine = GeneralPurpose::new(&base64::alphabet::STANDARD, config);
    let text: Cow<'_, str> = match text.contains(|c: char| c.is_ascii_whitespace()) {
        true => text.chars().filter(|c| !c.is_ascii_whitespace()).collect::<String>().into(),
        false => text.into(),
    };
    engine.decode(text.as_bytes()).map_err(|error| format!("its base64 is wrong: {error}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn parts_of_both_interfaces_are_known() {
        let read =
            |part: Value| Part::read("p", &part).map(|part| part.map(|part| (part.kind, format!("{:?}", part.source))));
        let picture = Ok(Some((Kind::Picture, r#"Url("data:x")"#.to_owned())));
        assert_eq!(read(json!({ "type": "image_url", "image_url": { "url": "data:x", "detail": "low" } })), picture);
        assert_eq!(read(json!({ "type": "input_image", "image_url": "data:x" })), picture);
        let sound = read(json!({ "type": "input_audio", "input_audio": { "data": "AAAA", "format": "wav" } }));
        assert_eq!(sound, Ok(Some((Kind::Sound, r#"Base64("AAAA")"#.to_owned()))));
        assert_eq!(read(json!({ "type": "text", "text": "x" })), Ok(None));
        let missing = read(json!({ "type": "input_image", "file_id": "x" })).unwrap_err();
        assert_eq!((missing.param.as_deref(), missing.status.as_u16()), (Some("p"), 400));
    }

    #[test]
    fn bytes_come_from_base64_in_any_dress() {
        let none = Fetched::default();
        for text in ["AQID", "AQI=", "AQI", "AQ\nID"] {
            assert!(Source::Base64(text).bytes(&none).unwrap().starts_with(&[1, 2]), "{text}");
        }
        let bytes = Source::Url("DATA:image/png;Base64,AQID").bytes(&none).unwrap();
        assert_eq!(*bytes, [1, 2, 3]);
        for url in ["data:image/png", "data:image/png,abc", "data:;base64,%%%"] {
            assert!(Source::Url(url).bytes(&none).is_err(), "{url}");
        }
    }
}
