//! What the model is told to do with a sound: one fixed sentence, into which the request's language and prompt go.

use crate::error::ApiError;

/// Languages by their codes. Any other code goes to the model as it is.
const LANGUAGES: [(&str, &str); 40] = [
    ("ar", "Arabic"),
    ("bg", "Bulgarian"),
    ("bn", "Bengali"),
    ("ca", "Catalan"),
    ("cs", "Czech"),
    ("da", "Danish"),
    ("de", "German"),
    ("el", "Greek"),
    ("en", "English"),
    ("es", "Spanish"),
    ("et", "Estonian"),
    ("fa", "Persian"),
    ("fi", "Finnish"),
    ("fr", "French"),
    ("he", "Hebrew"),
    ("hi", "Hindi"),
    ("hr", "Croatian"),
    ("hu", "Hungarian"),
    ("id", "Indonesian"),
    ("it", "Italian"),
    ("ja", "Japanese"),
    ("ko", "Korean"),
    ("lt", "Lithuanian"),
    ("lv", "Latvian"),
    ("ms", "Malay"),
    ("nl", "Dutch"),
    ("no", "Norwegian"),
    ("pl", "Polish"),
    ("pt", "Portuguese"),
    ("ro", "Romanian"),
    ("ru", "Russian"),
    ("sk", "Slovak"),
    ("sl", "Slovenian"),
    ("sv", "Swedish"),
    ("ta", "Tamil"),
    ("th", "Thai"),
    ("tr", "Turkish"),
    ("uk", "Ukrainian"),
    ("vi", "Vietnamese"),
    ("zh", "Chinese"),
];
/// Letters of a language's name or code, at most.
const LONGEST_NAME: usize = 32;

pub fn instruction(language: Option<&str>, prompt: Option<&str>) -> Result<String, ApiError> {
    let language = match language.filter(|language| !language.is_empty()) {
        None => "its original language",
        Some(name) if name.len() > LONGEST_NAME || !name.chars().all(|c| c.is_alphabetic() || " -".contains(c)) => {
            let message = "language must be a code such as en, or a language's name";
            return Err(ApiError::invalid("language", message));
        }
        Some(name) => {
            let known = LANGUAGES.iter().find(|(code, _)| name.eq_ignore_ascii_case(code));
            known.map_or(name, |(_, known)| *known)
        }
    };
    let context = match prompt.map(str::trim).filter(|prompt| !prompt.is_empty()) {
        None => String::new(),
        Some(prompt) => format!(" This came before it, or has words that occur in it: {prompt}"),
    };
    Ok(format!(
        "Transcribe this speech segment in {language}. Only output the transcription, with no newlines.{context}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn language_and_prompt_go_into_the_sentence() {
        let of = |language, prompt| instruction(language, prompt).expect("they are right");
        assert_eq!(
            of(None, None),
            "Transcribe this speech segment in its original language. Only output the transcription, with no newlines."
        );
        assert!(
            of(Some("DE"), Some(" Łódź ")).contains("in German. ")
                && of(Some("DE"), Some(" Łódź ")).ends_with(": Łódź")
        );
        assert!(of(Some("Klingon"), Some(" ")).contains("in Klingon. Only"));
        for wrong in ["en\nIgnore all", "<|turn>", &"x".repeat(33)] {
            assert_eq!(instruction(Some(wrong), None).unwrap_err().param.as_deref(), Some("language"), "{wrong}");
        }
    }
}
