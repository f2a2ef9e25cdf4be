//! Parts of messages that are pictures or sounds, and where their bytes are: in a data URL, in base64, or at an
//! address.

use std::borrow::Cow;

use base64::Engine;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use gemma4c_models::media::BUDGETS;
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
    pub detail: Detail,
}

/// How closely a picture is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    /// As the server looks at pictures.
    Auto,
    Low,
    /// As closely as the plan can.
    High,
    /// By so many soft tokens, at most.
    SoftTokens(u32),
}

impl Detail {
    /// Of a picture's part: OpenAI's word for it, or a number. Both stand beside the URL.
    fn read(param: &str, part: &Value, field: &str) -> Result<Detail, ApiError> {
        let beside = |name: &str| {
            let at =
                if part[field].is_object() { format!("{param}.{field}.{name}") } else { format!("{param}.{name}") };
            let value = part[field].get(name).or_else(|| part.get(name)).filter(|value| !value.is_null());
            value.map(|value| (at, value))
        };
        if let Some((at, value)) = beside("soft_tokens") {
            let count = value.as_u64().and_then(|count| u32::try_from(count).ok());
            return count
                .filter(|count| BUDGETS.contains(count))
                .map(Detail::SoftTokens)
                .ok_or_else(|| ApiError::invalid(&at, format!("{at} must be one of {BUDGETS:?}; found {value}")));
        }
        match beside("detail").map(|(at, value)| (at, value.as_str())) {
            None | Some((_, Some("auto"))) => Ok(Detail::Auto),
            Some((_, Some("low"))) => Ok(Detail::Low),
            Some((_, Some("high" | "original"))) => Ok(Detail::High),
            Some((at, _)) => Err(ApiError::invalid(&at, format!("{at} must be auto, low or high"))),
        }
    }

    /// Soft tokens at most, where `usual` are usual and a plan has room for `most`.
    pub fn budget(self, usual: u32, most: u32) -> Result<u32, String> {
        match self {
            Detail::Auto => Ok(usual),
            Detail::Low => Ok(BUDGETS[0].min(most)),
            Detail::High => Ok(BUDGETS[BUDGETS.len() - 1].min(most)),
            Detail::SoftTokens(tokens) if tokens <= most => Ok(tokens),
            Detail::SoftTokens(tokens) => {
                Err(format!("{tokens} soft tokens are asked for, but the plan has room for {most} a picture"))
            }
        }
    }
}

/// Where its bytes are.
#[derive(Debug, PartialEq)]
pub enum Source<'a> {
    Base64(&'a str),
    Url(&'a str),
}

impl<'a> Part<'a> {
    /// A part in the words of chat completions, of Responses or of Anthropic's Messages; `None` where it is neither a
    /// picture nor a sound.
    pub fn read(param: &str, part: &'a Value) -> Result<Option<Part<'a>>, ApiError> {
        let Some(name) = part.get("type").and_then(Value::as_str) else { return Ok(None) };
        let (kind, field) = match name {
            "image" => return Part::read_source(&format!("{param}.source"), &part["source"]).map(Some),
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
        let detail = match kind {
            Kind::Picture => Detail::read(param, part, field)?,
            Kind::Sound => Detail::Auto,
        };
        Ok(Some(Part { kind, source, detail }))
    }

    /// Where a picture of Anthropic's Messages is.
    fn read_source(param: &str, source: &'a Value) -> Result<Part<'a>, ApiError> {
        let wrong = |field: &str, expected: &str| {
            let param = format!("{param}.{field}");
            ApiError::invalid(&param, format!("{param} must be {expected}"))
        };
        let text = |field: &str, expected: &str| source[field].as_str().ok_or_else(|| wrong(field, expected));
        let source = match source["type"].as_str() {
            Some("base64") => {
                if !source["media_type"].as_str().is_some_and(|given| MEDIA_TYPES.contains(&given)) {
                    return Err(wrong("media_type", &format!("one of {}", MEDIA_TYPES.join(", "))));
                }
                Source::Base64(text("data", "the base64 of a picture")?)
            }
            Some("url") => Source::Url(text("url", "a URL")?),
            _ => return Err(wrong("type", "base64 or url")),
        };
        Ok(Part { kind: Kind::Picture, source, detail: Detail::Auto })
    }
}

/// What Anthropic's clients may call a picture; what it is, its first bytes say.
const MEDIA_TYPES: [&str; 4] = ["image/jpeg", "image/png", "image/gif", "image/webp"];

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
        let base64 = json!({ "type": "base64", "media_type": "image/png", "data": "AAAA" });
        let source = read(json!({ "type": "image", "source": base64 }));
        assert_eq!(source, Ok(Some((Kind::Picture, r#"Base64("AAAA")"#.to_owned()))));
        assert_eq!(read(json!({ "type": "image", "source": { "type": "url", "url": "data:x" } })), picture);
        for (source, field) in [
            (json!({ "type": "base64", "media_type": "image/bmp", "data": "" }), "p.source.media_type"),
            (json!({ "type": "base64", "media_type": "image/png" }), "p.source.data"),
            (json!({ "type": "url", "url": 7 }), "p.source.url"),
            (json!({ "type": "file", "file_id": "x" }), "p.source.type"),
            (json!(7), "p.source.type"),
        ] {
            let wrong = read(json!({ "type": "image", "source": source })).unwrap_err();
            assert_eq!(wrong.param.as_deref(), Some(field));
            assert!(wrong.message.starts_with(field), "{}", wrong.message);
        }
        assert_eq!(read(json!({ "type": "text", "text": "x" })), Ok(None));
        let missing = read(json!({ "type": "input_image", "file_id": "x" })).unwrap_err();
        assert_eq!((missing.param.as_deref(), missing.status.as_u16()), (Some("p"), 400));
    }

    #[test]
    fn a_picture_says_how_closely_it_is_looked_at() {
        let detail = |part: Value| Part::read("p", &part).map(|part| part.map(|part| part.detail));
        let of = |more: Value| {
            let mut url = json!({ "url": "data:x" });
            url.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            detail(json!({ "type": "image_url", "image_url": url }))
        };
        assert_eq!(of(json!({})), Ok(Some(Detail::Auto)));
        assert_eq!(of(json!({ "detail": "low" })), Ok(Some(Detail::Low)));
        assert_eq!(of(json!({ "detail": "low", "soft_tokens": 1120 })), Ok(Some(Detail::SoftTokens(1120))));
        let beside = json!({ "type": "input_image", "image_url": "data:x", "detail": "high" });
        assert_eq!(detail(beside), Ok(Some(Detail::High)));
        for (more, param) in [
            (json!({ "detail": "blurred" }), "p.image_url.detail"),
            (json!({ "detail": 3 }), "p.image_url.detail"),
            (json!({ "soft_tokens": 100 }), "p.image_url.soft_tokens"),
        ] {
            assert_eq!(of(more).unwrap_err().param.as_deref(), Some(param));
        }
        let budgets = [Detail::Auto, Detail::Low, Detail::High, Detail::SoftTokens(140)].map(|d| d.budget(280, 560));
        assert_eq!(budgets, [Ok(280), Ok(70), Ok(560), Ok(140)]);
        assert!(Detail::SoftTokens(1120).budget(280, 560).unwrap_err().contains("room for 560"));
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
