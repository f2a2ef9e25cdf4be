//! Films, as pictures with their times: a client cuts a film into frames, and the model reads each frame as a picture
//! behind the time that it was taken at.
//!
//! No container and no codec is read here. That is said to whoever sends one.

use serde_json::Value;

use super::source::Source;
use crate::error::ApiError;

/// Frames of a film, at most: as many seconds, where nobody says how many there are in one.
pub const MOST_FRAMES: usize = 60;
/// How frames come together in one data URL, one after the other with commas between them.
const FRAMES_URL: &str = "data:video/jpeg;base64,";

/// A film among the parts of a message.
#[derive(Debug, PartialEq)]
pub struct Film<'a> {
    pub frames: Vec<Source<'a>>,
    /// Frames that a second has.
    rate: f64,
}

impl<'a> Film<'a> {
    /// A part in the words of vLLM (`video_url`, frames in one data URL) or of Qwen's tools (`video`, a list of data
    /// URLs); `None` where it is no film.
    pub fn read(param: &str, part: &'a Value) -> Result<Option<Film<'a>>, ApiError> {
        let field = match part.get("type").and_then(Value::as_str) {
            Some("video_url" | "input_video") => "video_url",
            Some("video") => "video",
            _ => return Ok(None),
        };
        let wrong = |name: &str, what: &str| ApiError::invalid(name, format!("{name} {what}"));
        let at = format!("{param}.{field}");
        let value = &part[field];
        let frames: Vec<Source<'a>> = match (value, value["url"].as_str().or(value.as_str())) {
            (Value::Array(urls), _) => {
                let urls = urls.iter().map(|url| url.as_str().filter(|url| url.starts_with("data:")).map(Source::Url));
                urls.collect::<Option<_>>().ok_or_else(|| wrong(&at, "must be a list of pictures in data URLs"))?
            }
            (_, Some(url)) => match url.strip_prefix(FRAMES_URL) {
                Some(frames) => frames.split(',').map(Source::Base64).collect(),
                None => {
                    let what = format!(
                        "is no list of frames: films are not decoded here; send pictures of it, one a second, as \
                         {FRAMES_URL}FRAME,FRAME,..."
                    );
                    return Err(wrong(&at, &what));
                }
            },
            _ => return Err(wrong(&at, "must be frames in a data URL, or a list of pictures")),
        };
        if frames.is_empty() || frames.len() > MOST_FRAMES {
            return Err(wrong(&at, &format!("must have 1 to {MOST_FRAMES} frames; found {}", frames.len())));
        }
        let rate = match value.get("fps").or_else(|| part.get("fps")).filter(|rate| !rate.is_null()) {
            None => 1.0,
            Some(rate) => {
                let rate = rate.as_f64().filter(|rate| (0.01..=60.0).contains(rate));
                rate.ok_or_else(|| wrong(&format!("{param}.fps"), "must be a number from 0.01 to 60"))?
            }
        };
        Ok(Some(Film { frames, rate }))
    }

    /// What stands in the prompt for it: each frame behind its minute and second, as Google's processor writes them.
    pub fn text(&self, picture: &str) -> String {
        let frame = |at: usize| {
            let seconds = (at as f64 / self.rate) as u64;
            format!("{:02}:{:02} {picture}", seconds / 60, seconds % 60)
        };
        (0..self.frames.len()).map(frame).collect::<Vec<_>>().join(" ")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn frames_come_in_one_url_or_in_a_list() {
        let read =
            |part: Value| Film::read("p", &part).map(|film| film.map(|film| (film.frames.len(), film.text("X"))));
        let one = json!({ "type": "video_url", "video_url": { "url": "data:video/jpeg;base64,AAAA,BBBB" } });
        assert_eq!(read(one), Ok(Some((2, "00:00 X 00:01 X".into()))));
        let many = json!({ "type": "video", "video": vec!["data:image/png;base64,AAAA"; 3], "fps": 0.02 });
        assert_eq!(read(many), Ok(Some((3, "00:00 X 00:50 X 01:40 X".into()))));
        assert_eq!(read(json!({ "type": "image_url", "image_url": "data:x" })), Ok(None));
        for (part, param, word) in [
            (
                json!({ "type": "video_url", "video_url": { "url": "data:video/mp4;base64,AAAA" } }),
                "p.video_url",
                "one a second",
            ),
            (json!({ "type": "video_url" }), "p.video_url", "must be frames"),
            (json!({ "type": "video", "video": ["https://example.org/x.png"] }), "p.video", "data URLs"),
            (json!({ "type": "video", "video": [] }), "p.video", "1 to 60"),
            (json!({ "type": "video", "video": ["data:image/png;base64,A"], "fps": 0 }), "p.fps", "0.01"),
        ] {
            let error = read(part).unwrap_err();
            assert_eq!((error.param.as_deref(), error.message.contains(word)), (Some(param), true), "{error:?}");
        }
    }
}
