//! The body of a form with files, `multipart/form-data`, as far as clients of this API write it.
//!
//! All of it is in memory already, within the limit of any body; parts are ranges of it. There are no nested parts and
//! no encodings of transfer, which browsers and clients do not write either.

use std::collections::BTreeSet;

use axum::http::{HeaderMap, header};

use crate::error::ApiError;

const MOST_PARTS: usize = 64;
/// Bytes of a part's headers, at most.
const MOST_HEADERS: usize = 4 << 10;
/// Bytes of a field that is no file.
const MOST_TEXT: usize = 64 << 10;
/// What the standard allows.
const LONGEST_BOUNDARY: usize = 70;

#[derive(Debug)]
pub struct Form<'a> {
    parts: Vec<(String, &'a [u8])>,
}

fn wrong(message: impl Into<String>) -> ApiError {
    ApiError::bad_request("invalid_form", format!("the body is no multipart/form-data: {}", message.into()))
}

/// What is between the parts, as the content type says.
pub fn boundary(headers: &HeaderMap) -> Result<String, ApiError> {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let (kind, parameters) = kind.split_once(';').unwrap_or((kind, ""));
    if !kind.trim().eq_ignore_ascii_case("multipart/form-data") {
        return Err(wrong(format!("its content-type is {kind:?}")));
    }
    let boundary = parameter(parameters, "boundary").ok_or_else(|| wrong("its content-type has no boundary"))?;
    match (1..=LONGEST_BOUNDARY).contains(&boundary.len())
        && boundary.bytes().all(|b| b.is_ascii_graphic() || b == b' ')
    {
        true => Ok(boundary),
        false => Err(wrong("its boundary must have 1 to 70 letters")),
    }
}

/// A parameter of a header, with or without quotes.
fn parameter(parameters: &str, name: &str) -> Option<String> {
    let mut rest = parameters.trim_start_matches([';', ' ', '\t']);
    while let Some((found, value)) = rest.split_once('=') {
        let (value, after) = match value.strip_prefix('"') {
            Some(quoted) => unquoted(quoted)?,
            None => {
                let (value, after) = value.split_once(';').unwrap_or((value, ""));
                (value.trim().to_owned(), after)
            }
        };
        if found.trim().eq_ignore_ascii_case(name) {
            return Some(value);
        }
        rest = after.trim_start_matches([';', ' ', '\t']);
    }
    None
}

/// A text up to its closing quote, and what follows that. Browsers escape a quote by `%22`, others by a backslash.
fn unquoted(text: &str) -> Option<(String, &str)> {
    let (mut value, mut is_escaped) = (String::new(), false);
    for (at, character) in text.char_indices() {
        match character {
            _ if is_escaped => {
                value.push(character);
                is_escaped = false;
            }
            '\\' => is_escaped = true,
            '"' => return Some((value, &text[at + 1..])),
            _ => value.push(character),
        }
    }
    None
}

/// Where a pattern that begins with its only line break is: no byte is compared more than twice.
fn find(bytes: &[u8], pattern: &[u8]) -> Option<usize> {
    bytes.windows(pattern.len()).position(|window| window == pattern)
}

impl<'a> Form<'a> {
    pub fn parse(boundary: &str, body: &'a [u8]) -> Result<Form<'a>, ApiError> {
        let delimiter = format!("\r\n--{boundary}");
        let delimiter = delimiter.as_bytes();
        // The first one may have no line break before it.
        let mut rest = match body.strip_prefix(&delimiter[2..]) {
            Some(rest) => rest,
            None => {
                let at = find(body, delimiter).ok_or_else(|| wrong("its boundary does not occur in it"))?;
                &body[at + delimiter.len()..]
            }
        };
        let mut parts: Vec<(String, &[u8])> = Vec::new();
        let mut names = BTreeSet::new();
        while !rest.starts_with(b"--") {
            let line = rest.iter().position(|byte| ![b' ', b'\t'].contains(byte)).unwrap_or(rest.len());
            let part =
                rest[line..].strip_prefix(b"\r\n").ok_or_else(|| wrong("a boundary is not followed by a line"))?;
            let end = find(part, delimiter).ok_or_else(|| wrong("it ends within a part"))?;
            let (name, content) = part_of(&part[..end])?;
            if parts.len() == MOST_PARTS {
                return Err(wrong(format!("it has more than {MOST_PARTS} parts")));
            }
            if !names.insert(name.clone()) && !name.ends_with("[]") {
                return Err(ApiError::invalid(&name, format!("{name} is there twice")));
            }
            parts.push((name, content));
            rest = &part[end + delimiter.len()..];
        }
        Ok(Form { parts })
    }

    /// The bytes of a field.
    pub fn file(&self, name: &str) -> Result<Option<&'a [u8]>, ApiError> {
        Ok(self.parts.iter().find(|(found, _)| found == name).map(|(_, content)| *content))
    }

    /// All fields but this one.
    pub fn texts(&self, but: &str) -> Result<Vec<(&str, &'a str)>, ApiError> {
        let others = self.parts.iter().filter(|(name, _)| name != but);
        let text = |(name, content): &'_ (String, &'a [u8])| match std::str::from_utf8(content) {
            Ok(text) if text.len() <= MOST_TEXT => Ok(text),
            _ => Err(ApiError::invalid(name, format!("{name} must be a text of at most {MOST_TEXT} bytes"))),
        };
        others.map(|part| Ok((part.0.as_str(), text(part)?))).collect()
    }
}

/// The name and the content of a part.
fn part_of(part: &[u8]) -> Result<(String, &[u8]), ApiError> {
    let head = &part[..part.len().min(MOST_HEADERS)];
    let end = find(head, b"\r\n\r\n").ok_or_else(|| wrong("a part has no headers, or too many"))?;
    let head = std::str::from_utf8(&head[..end]).map_err(|_| wrong("a part's headers are not UTF-8"))?;
    let name = head.split("\r\n").filter_map(|line| line.split_once(':')).find_map(|(header, value)| {
        let disposition = header.trim().eq_ignore_ascii_case("content-disposition");
        disposition.then(|| parameter(value.split_once(';')?.1, "name"))?
    });
    Ok((name.ok_or_else(|| wrong("a part has no name"))?, &part[end + 4..]))
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn parsed(body: &str) -> Result<Vec<(String, String)>, String> {
        let form = Form::parse("x y", body.as_bytes()).map_err(|error| error.message)?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok(form.parts.iter().map(|(name, content)| (name.clone(), text(content))).collect())
    }

    #[test]
    fn parts_are_found_by_their_boundary() {
        let body = "before\r\n--x y \r\nContent-Disposition: form-data; name=\"a\"\r\n\r\none\r\n--x\r\n\r\n--x y\r\n\
                    content-type: audio/wav\r\ncontent-disposition: form-data; filename=\"a \\\"b\\\";name=c.wav\"; name=file\r\n\r\n\
                    \r\n--x y--\r\nafter";
        let expected = [("a", "one\r\n--x\r\n"), ("file", "")].map(|(name, text)| (name.to_owned(), text.to_owned()));
        assert_eq!(parsed(body).expect("it is right"), expected);
        assert_eq!(parsed("--x y--").expect("it is empty"), []);
    }

    #[test]
    fn what_is_no_form_is_refused() {
        let part = |head: &str| format!("--x y\r\n{head}\r\n\r\ntext\r\n--x y--");
        let named = |name: &str| part(&format!("content-disposition: form-data; name=\"{name}\""));
        for (body, word) in [
            (String::new(), "boundary does not occur"),
            ("--x y".into(), "followed by a line"),
            ("--x yz".into(), "followed by a line"),
            ("--x y\r\n".into(), "ends within a part"),
            (named("a")[..40].into(), "ends within a part"),
            ("--x y\r\ntext\r\n--x y--".into(), "no headers"),
            (part("content-type: text/plain"), "no name"),
            (part("content-disposition: form-data; name=\"a"), "no name"),
            (part(&format!("a: {}", "x".repeat(5000))), "no headers, or too many"),
            (format!("{}{}", &named("a")[..named("a").len() - 7], named("a")), "a is there twice"),
            ("--x y\r\ncontent-disposition: form-data; name=a[]\r\n\r\n\r\n".repeat(65) + "--x y--", "more than 64"),
        ] {
            let error = parsed(&body).expect_err(&body);
            assert!(error.contains(word), "{body:?}: {error}");
        }
    }

    #[test]
    fn the_boundary_is_in_the_content_type() {
        let of = |kind: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
            boundary(&headers).ok()
        };
        assert_eq!(of("multipart/form-data; boundary=abc"), Some("abc".into()));
        assert_eq!(of("Multipart/Form-Data;charset=utf-8; Boundary=\"a b\""), Some("a b".into()));
        for wrong in
            ["application/json", "multipart/form-data", "multipart/form-data; boundary=", "multipart/mixed; boundary=a"]
        {
            assert_eq!(of(wrong), None, "{wrong}");
        }
        assert!(boundary(&HeaderMap::new()).is_err());
    }

    #[test]
    fn texts_are_texts() {
        let bytes = b"--x\r\ncontent-disposition: form-data; name=a\r\n\r\n\xff\r\n--x--";
        let form = Form::parse("x", bytes).expect("it is a form");
        assert_eq!(form.file("a").expect("it is there"), Some(&b"\xff"[..]));
        assert_eq!(form.texts("file").unwrap_err().param.as_deref(), Some("a"));
        assert!(form.texts("a").expect("there are none").is_empty());
    }
}
