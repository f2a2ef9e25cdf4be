//! The text side of a plan: its vocabulary, its chat template, and the markers that both share.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use gemma4c_models::chat::{ChatError, ChatTemplate};
use gemma4c_models::tokenizer::{EncodeOptions, Tokenizer, TokenizerError};
use gemma4c_plan::{Plan, Sampling, TokenKind, Vocab};

use crate::error::ApiError;
use crate::language::{Mark, Piece, Start};

/// Everything that is known of a plan without its weights.
pub struct Speech {
    pub tokenizer: Tokenizer,
    pub template: Option<ChatTemplate>,
    marks: BTreeMap<u32, Mark>,
    turn_open: Option<u32>,
    turn_close: Option<u32>,
    /// Tokens that hold the place of a medium, and how they are spelled.
    placeholders: Vec<(u32, &'static str)>,
    /// What follows the opening of the model's turn.
    model_line: Vec<u32>,
    pub stop: Arc<[u32]>,
    pub suppress: Vec<u32>,
    pub sampling: Sampling,
    pub context: u32,
    pub vocab_size: u32,
    /// Bytes of the longest token.
    longest: usize,
    usual_breakers: OnceLock<Arc<[u32]>>,
}

/// What chat templates write in the place of a picture, a sound or a film.
const PLACEHOLDERS: [&str; 3] = ["<|image|>", "<|audio|>", "<|video|>"];

/// What ends a match of DRY where nobody says: the punctuation of forms.
const USUAL_BREAKERS: [&str; 4] = ["\n", ":", "\"", "*"];

/// A plan that cannot be talked to.
#[derive(Debug, thiserror::Error)]
pub enum SpeechError {
    #[error("the model has no vocabulary, so it cannot be served: text is what clients send")]
    NoVocabulary,
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    #[error(transparent)]
    Template(#[from] ChatError),
}

impl Speech {
    pub fn new(plan: &Plan) -> Result<Speech, SpeechError> {
        let vocab = plan.vocab.as_ref().ok_or(SpeechError::NoVocabulary)?;
        Speech::of(vocab, plan.sampling, plan.program.context, plan.model.vocab_size)
    }

    fn of(vocab: &Vocab, sampling: Sampling, context: u32, vocab_size: u32) -> Result<Speech, SpeechError> {
        let tokenizer = Tokenizer::new(vocab)?;
        let marks = Mark::SPELLED.iter().filter_map(|(mark, text)| Some((tokenizer.marker(text)?, *mark)));
        let plain = EncodeOptions { add_bos: false, parse_special: false };
        let longest = vocab.tokens.iter().map(str::len).max().unwrap_or(1);
        Ok(Speech {
            longest,
            usual_breakers: OnceLock::new(),
            marks: marks.collect(),
            turn_open: tokenizer.marker("<|turn>"),
            turn_close: tokenizer.marker("<turn|>"),
            placeholders: PLACEHOLDERS.iter().filter_map(|text| Some((tokenizer.marker(text)?, *text))).collect(),
            model_line: tokenizer.encode("model\n", plain),
            template: vocab.chat_template.as_deref().map(ChatTemplate::new).transpose()?,
            tokenizer,
            stop: vocab.stop.clone().into(),
            suppress: vocab.suppress.clone(),
            sampling,
            context,
            vocab_size,
        })
    }

    /// The id of a marker in this vocabulary.
    pub fn id(&self, mark: Mark) -> Option<u32> {
        self.marks.iter().find(|(_, other)| **other == mark).map(|(id, _)| *id)
    }

    /// Hands a token to whoever reads the answer.
    pub fn piece<T>(&self, token: u32, read: impl FnOnce(Piece<'_>) -> T) -> T {
        if let Some(mark) = self.marks.get(&token) {
            return read(Piece::Mark(*mark));
        }
        match self.tokenizer.token(token) {
            Ok((_, TokenKind::Control | TokenKind::Unknown)) | Err(_) => read(Piece::Mark(Mark::Hidden)),
            Ok(_) => read(Piece::Bytes(&self.tokenizer.bytes(token).unwrap_or_default())),
        }
    }

    /// Tokens with one of these texts in them, in order: what ends a match of DRY.
    pub fn breakers(&self, texts: Option<&[String]>) -> Arc<[u32]> {
        let with = |texts: &[&str]| -> Arc<[u32]> {
            let has = |token: &u32| {
                let bytes = self.bytes(*token);
                let spelled = String::from_utf8_lossy(&bytes);
                texts.iter().any(|text| !text.is_empty() && spelled.contains(text))
            };
            (0..self.vocab_size).filter(has).collect()
        };
        match texts {
            Some(texts) => with(&texts.iter().map(String::as_str).collect::<Vec<_>>()),
            None => Arc::clone(self.usual_breakers.get_or_init(|| with(&USUAL_BREAKERS))),
        }
    }

    /// What a token spells, for lists of log probabilities.
    pub fn bytes(&self, token: u32) -> Vec<u8> {
        self.tokenizer.bytes(token).unwrap_or_default()
    }

    /// Refuses a text that cannot fit whatever its tokens are, before anybody takes the time to find them.
    pub fn check_length(&self, text: &str) -> Result<(), ApiError> {
        let least = text.len() / self.longest.max(1);
        match least > self.context as usize {
            true => {
                let more = format!("at least, in the {} bytes of the prompt", text.len());
                Err(ApiError::context_exceeded(self.context, least, &more))
            }
            false => Ok(()),
        }
    }

    /// A token that holds the place of a medium means nothing without one.
    pub fn refuse_placeholders(&self, param: &str, prompt: &[u32]) -> Result<(), ApiError> {
        let found = self.placeholders.iter().find(|(id, _)| prompt.contains(id));
        found.map_or(Ok(()), |(id, text)| {
            let message =
                format!("{param}: token {id} ({text}) holds the place of a medium, and none comes with token ids");
            Err(ApiError::invalid(param, message))
        })
    }

    /// Where the answer to a prompt begins.
    pub fn start(&self, prompt: &[u32]) -> Start {
        let of = |mark| self.id(mark);
        for (at, token) in prompt.iter().enumerate().rev() {
            if Some(*token) == self.turn_open || Some(*token) == of(Mark::ChannelClose) {
                break;
            }
            if Some(*token) == of(Mark::ChannelOpen) {
                return if at + 1 == prompt.len() { Start::Label } else { Start::Thinking };
            }
        }
        Start::Content
    }

    /// Where other prompts may part from this one: after the system's turn, and where the model's last turn is opened.
    pub fn snapshots(&self, prompt: &[u32], has_system: bool) -> Vec<u32> {
        let after_system = prompt.iter().position(|id| Some(*id) == self.turn_close).filter(|_| has_system);
        let last_turn = prompt.iter().rposition(|id| Some(*id) == self.turn_open);
        let opened = last_turn.filter(|at| prompt[at + 1..].starts_with(&self.model_line));
        let opened = opened.map(|at| at + 1 + self.model_line.len());
        let mut places: Vec<u32> =
            after_system.map(|at| at + 1).into_iter().chain(opened).map(|at| at as u32).collect();
        places.dedup();
        places
    }
}

#[cfg(test)]
pub mod tests {
    use gemma4c_plan::Strings;

    use super::*;

    /// Every byte, and Gemma's markers behind them.
    pub fn bytes_and_markers() -> Speech {
        let (mut tokens, mut kinds) = (Strings::default(), Vec::new());
        for byte in 0..=255u8 {
            assert!(tokens.push(&format!("<0x{byte:02X}>")));
            kinds.push(TokenKind::Byte);
        }
        for text in ["<turn|>", "<|turn>"].into_iter().chain(Mark::SPELLED.iter().map(|(_, text)| *text)) {
            assert!(tokens.push(text));
            kinds.push(if text.contains("turn") { TokenKind::Control } else { TokenKind::UserDefined });
        }
        for text in PLACEHOLDERS {
            assert!(tokens.push(text));
            kinds.push(TokenKind::Control);
        }
        let stop = vec![256, 256 + 2 + 4];
        let vocab = Vocab { tokens, kinds, stop, ..Vocab::default() };
        let size = vocab.tokens.len() as u32;
        Speech::of(&vocab, Sampling::default(), 100, size).unwrap()
    }

    #[test]
    fn the_place_of_a_medium_is_refused_by_name() {
        let speech = bytes_and_markers();
        for text in PLACEHOLDERS {
            let id = speech.tokenizer.marker(text).expect("it is in the vocabulary");
            let error = speech.refuse_placeholders("prompt", &[65, id, 66]).expect_err(text);
            let error = format!("{error:?}");
            assert!(error.contains(&format!("token {id} ({text})")), "{error}");
        }
        assert!(speech.refuse_placeholders("prompt", &[65, 66]).is_ok());
    }

    #[test]
    fn an_answer_begins_where_its_prompt_ends() {
        let speech = bytes_and_markers();
        let [open, close] = [Mark::ChannelOpen, Mark::ChannelClose].map(|mark| speech.id(mark).unwrap());
        let (turn, end) = (speech.turn_open.unwrap(), speech.turn_close.unwrap());
        let text = |text: &str| text.bytes().map(u32::from).collect::<Vec<u32>>();
        let opened = [vec![turn], text("model\n")].concat();
        for (more, start) in [
            (vec![], Start::Content),
            (vec![open, 116, 10, close], Start::Content),
            (vec![open, 116, 10], Start::Thinking),
            (vec![open], Start::Label),
        ] {
            assert_eq!(speech.start(&[opened.clone(), more].concat()), start);
        }
        let system = [vec![turn], text("system\nA"), vec![end]].concat();
        let prompt = [system.clone(), opened.clone(), vec![open, close]].concat();
        let places = [system.len() as u32, (system.len() + opened.len()) as u32];
        assert_eq!(speech.snapshots(&prompt, true), places);
        assert_eq!(speech.snapshots(&prompt, false), places[1..]);
        assert_eq!(speech.snapshots(&text("model\n"), true), [0; 0]);
    }
}
