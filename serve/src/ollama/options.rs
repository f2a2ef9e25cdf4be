//! What ollama's requests say beside their text: `options`, `format`, `think`, `keep_alive`, `images`.

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use serde_json::{Value, json};

use crate::error::ApiError;
use crate::fields::Fields;
use crate::translated::{SAMPLING, Translated, refuse_unless_neutral};

/// Options that would change the text and are not there, with the value that changes nothing.
const NEUTRAL: [(&str, f64); 4] = [("typical_p", 1.0), ("tfs_z", 1.0), ("mirostat", 0.0), ("penalize_newline", 1.0)];

/// Options, form and thoughts of an answer.
pub fn read(fields: Fields<'_>, body: &mut Translated) -> Result<(), ApiError> {
    if let Some(options) = fields.object("options")? {
        // What is about loading a model (`num_gpu`, `num_thread`, `use_mmap` …) was decided when the server was started
        // and is left alone, as is `num_keep`: nothing of a conversation is ever dropped.
        refuse_unless_neutral(options, "options.", &NEUTRAL)?;
        body.take(options, "options.", &SAMPLING);
        body.take_stops(options, "options.")?;
        body.take_unless_minus_one(options, "options.", "seed", "seed");
        // -1 is no limit, and -2 was the word for what the context has room for, which is the same here.
        let is_unlimited = options.get("num_predict").is_some_and(|value| matches!(value.as_i64(), Some(-1 | -2)));
        match is_unlimited {
            true => body.put("max_tokens", "options.num_predict", -1),
            false => body.take(options, "options.", &[("num_predict", "max_tokens")]),
        }
        // The context is what the server was started with. A larger one is not refused: what matters is whether the
        // prompt fits, which a prompt that does not is told.
        options.count("num_ctx", 0, u32::MAX as u64).map_err(|error| error.within("options"))?;
    }
    read_format(fields, body)?;
    match fields.get("think") {
        None => {}
        Some(Value::Bool(think)) => body.put("reasoning_effort", "think", if *think { "medium" } else { "none" }),
        Some(Value::String(level)) if ["low", "medium", "high"].contains(&level.as_str()) => {
            body.put("reasoning_effort", "think", level.as_str());
        }
        Some(other) => return Err(wrong("think", "true, false, \"low\", \"medium\" or \"high\"", other)),
    }
    Ok(())
}

fn wrong(name: &str, expected: &str, found: &Value) -> ApiError {
    let found: String = found.to_string().chars().take(80).collect();
    ApiError::invalid(name, format!("{name} must be {expected}; found {found}"))
}

fn read_format(fields: Fields<'_>, body: &mut Translated) -> Result<(), ApiError> {
    let format = match fields.get("format") {
        None => return Ok(()),
        Some(Value::String(word)) if word.is_empty() => return Ok(()),
        Some(Value::String(word)) if word == "json" => json!({ "type": "json_object" }),
        Some(schema @ Value::Object(_)) => json!({ "type": "json_schema", "json_schema": { "schema": schema } }),
        Some(other) => return Err(wrong("format", "\"json\" or a JSON schema", other)),
    };
    body.put("response_format", "format", format);
    body.call("response_format.json_schema.schema", "format");
    Ok(())
}

/// Whether a model is to be put out of memory at once: `keep_alive` is 0.
pub fn ends_at_once(fields: Fields<'_>) -> Result<bool, ApiError> {
    let Some(value) = fields.get("keep_alive") else { return Ok(false) };
    let seconds = match value {
        Value::Number(number) => number.as_f64(),
        Value::String(text) => seconds(text),
        _ => None,
    };
    let expected = "a number of seconds or a duration such as \"5m\"";
    seconds.map(|seconds| seconds == 0.0).ok_or_else(|| wrong("keep_alive", expected, value))
}

/// Of a duration as Go writes it, `1h30m`, or of a plain number.
fn seconds(text: &str) -> Option<f64> {
    let plain = |text: &str| text.parse::<f64>().ok().filter(|seconds| seconds.is_finite());
    if let Some(seconds) = plain(text) {
        return Some(seconds);
    }
    let (sign, mut rest) = match text.strip_prefix('-') {
        Some(rest) => (-1.0, rest),
        None => (1.0, text.strip_prefix('+').unwrap_or(text)),
    };
    let mut total = 0.0;
    loop {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, unit) = rest.split_at(digits);
        let end = unit.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(unit.len());
        let (unit, after) = unit.split_at(end);
        total += plain(number)?
            * match unit {
                "h" => 3600.0,
                "m" => 60.0,
                "s" => 1.0,
                "ms" => 1e-3,
                "us" | "µs" | "μs" => 1e-6,
                "ns" => 1e-9,
                _ => return None,
            };
        rest = after;
        if rest.is_empty() {
            return Some(sign * total);
        }
    }
}

/// The parts of a message that `images` makes: pictures, and sounds, which clients send in the same place.
pub fn read_images(param: &str, images: Option<&Value>) -> Result<Vec<Value>, ApiError> {
    let list = match images {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Array(list)) => list,
        Some(other) => return Err(wrong(param, "a list of files in base64", other)),
    };
    let part = |(index, image): (usize, &Value)| {
        let Value::String(file) = image else {
            return Err(wrong(&format!("{param}[{index}]"), "a file in base64", image));
        };
        Ok(match is_sound(file) {
            true => json!({ "type": "input_audio", "input_audio": { "data": file } }),
            false if file.starts_with("data:") => json!({ "type": "image_url", "image_url": { "url": file } }),
            false => json!({ "type": "image_url", "image_url": { "url": format!("data:;base64,{file}") } }),
        })
    };
    list.iter().enumerate().map(part).collect()
}

/// Whether a file in base64 begins as WAV, FLAC or MP3 do.
fn is_sound(file: &str) -> bool {
    let head = file.as_bytes().get(..16).and_then(|head| STANDARD_NO_PAD.decode(head).ok()).unwrap_or_default();
    let is_wav = head.starts_with(b"RIFF") && head.ends_with(b"WAVE");
    let is_mp3 = head.starts_with(b"ID3") || matches!(head[..], [0xff, second, ..] if second & 0xe6 == 0xe2);
    is_wav || is_mp3 || head.starts_with(b"fLaC")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_those_of_go() {
        for (text, expected) in [
            ("5m", Some(300.0)),
            ("1h30m", Some(5400.0)),
            ("-1s", Some(-1.0)),
            ("0", Some(0.0)),
            ("-1", Some(-1.0)),
            ("1.5ms", Some(0.0015)),
            ("m", None),
            ("5", Some(5.0)),
            ("5m3", None),
            ("five", None),
            ("", None),
            ("inf", None),
        ] {
            assert_eq!(seconds(text), expected, "{text}");
        }
    }

    #[test]
    fn sounds_are_known_by_their_first_bytes() {
        let encode = |bytes: &[u8]| STANDARD_NO_PAD.encode([bytes, &[0; 16]].concat());
        for sound in [&b"RIFF\x10\0\0\0WAVEfmt "[..], b"fLaC", b"ID3\x04", b"\xff\xfb\x90"] {
            assert!(is_sound(&encode(sound)), "{sound:?}");
        }
        for picture in [&b"RIFF\x10\0\0\0WEBPVP8 "[..], b"\x89PNG", b"\xff\xd8\xff\xe0", b"GIF89a"] {
            assert!(!is_sound(&encode(picture)), "{picture:?}");
        }
        assert!(!is_sound("") && !is_sound("data:image/png;base64,AAAA"));
    }
}
