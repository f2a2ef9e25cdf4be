//! One choice of an answer, from tokens to the parts that a client sees. A stream sends the parts; a whole answer is
//! the parts put together.

use std::sync::Arc;

use gemma4c_models::text::{Characters, Stops};
use gemma4c_runtime::engine::Finish;

use crate::language::{Delta, Language, Mark, Piece, Start, Tool};
use crate::logprobs::Logprobs;
use crate::speech::Speech;

/// A piece of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    /// A token of the prompt, which comes before everything else.
    Prompt(Logprobs),
    Reasoning(String),
    /// With the log probabilities of the tokens it came from, where they are wanted.
    Content {
        text: String,
        logprobs: Vec<Logprobs>,
    },
    Call {
        index: usize,
        name: String,
    },
    Arguments {
        index: usize,
        text: String,
    },
}

enum Reader {
    /// Text as it stands: markers are what they spell.
    Plain(Characters),
    Gemma(Box<Language>),
}

/// A choice while it is generated.
pub struct Answer {
    reader: Reader,
    stops: Stops,
    /// Of tokens whose text was not given out yet.
    logprobs: Vec<Logprobs>,
    has_stopped: bool,
    pub tokens: u32,
    pub reasoning_tokens: u32,
}

impl Answer {
    pub fn plain(stop: Vec<String>) -> Answer {
        Answer::new(Reader::Plain(Characters::default()), stop)
    }

    /// What a model answers in a chat.
    pub fn chat(start: Start, tools: Arc<[Tool]>, stop: Vec<String>) -> Answer {
        Answer::new(Reader::Gemma(Box::new(Language::new(start, tools))), stop)
    }

    fn new(reader: Reader, stop: Vec<String>) -> Answer {
        let (stops, logprobs) = (Stops::new(stop), Vec::new());
        Answer { reader, stops, logprobs, has_stopped: false, tokens: 0, reasoning_tokens: 0 }
    }

    /// Whether a stop string has come: whatever follows is not part of the answer.
    pub fn has_stopped(&self) -> bool {
        self.has_stopped
    }

    /// The stop string that has come.
    pub fn stop_string(&self) -> Option<&str> {
        self.stops.found()
    }

    pub fn token(&mut self, speech: &Speech, token: u32, logprobs: Option<Logprobs>) -> Vec<Part> {
        if self.has_stopped {
            return Vec::new();
        }
        self.tokens += 1;
        let mut deltas = Vec::new();
        let (was_content, was_thinking) = match &self.reader {
            Reader::Plain(_) => (true, false),
            Reader::Gemma(language) => (language.is_content(), language.is_thinking()),
        };
        let is_text = speech.piece(token, |piece| {
            match (&mut self.reader, piece) {
                (Reader::Plain(_), Piece::Mark(Mark::Hidden)) => {}
                (Reader::Plain(characters), piece) => {
                    let bytes = match piece {
                        Piece::Bytes(bytes) => bytes,
                        Piece::Mark(mark) => mark.spelling().as_bytes(),
                    };
                    deltas.push(Delta::Content(characters.push(bytes)));
                }
                (Reader::Gemma(language), piece) => language.push(piece, &mut deltas),
            }
            matches!(piece, Piece::Bytes(_))
        });
        let is_thinking = matches!(&self.reader, Reader::Gemma(language) if language.is_thinking());
        self.reasoning_tokens += u32::from(was_thinking || is_thinking);
        if was_content && is_text {
            self.logprobs.extend(logprobs);
        }
        self.parts(deltas)
    }

    fn parts(&mut self, deltas: Vec<Delta>) -> Vec<Part> {
        let mut parts = Vec::new();
        for delta in deltas {
            if let Delta::Content(text) = delta {
                let (text, has_stopped) = self.stops.push(&text);
                self.content(text, &mut parts);
                if has_stopped {
                    self.has_stopped = true;
                    self.logprobs.clear();
                    break;
                }
                continue;
            }
            let held = self.stops.finish();
            self.content(held, &mut parts);
            parts.push(match delta {
                Delta::Reasoning(text) => Part::Reasoning(text),
                Delta::Call { index, name } => Part::Call { index, name },
                Delta::Arguments { index, text } => Part::Arguments { index, text },
                Delta::Content(_) => continue,
            });
        }
        parts
    }

    fn content(&mut self, text: String, parts: &mut Vec<Part>) {
        if !text.is_empty() {
            parts.push(Part::Content { text, logprobs: std::mem::take(&mut self.logprobs) });
        }
    }

    /// The rest, and the word for why it ended.
    pub fn finish(&mut self, reason: Finish) -> (Vec<Part>, &'static str) {
        let is_cut = matches!(reason, Finish::Length | Finish::Context);
        let mut deltas = Vec::new();
        if !self.has_stopped {
            match &mut self.reader {
                Reader::Plain(characters) => deltas.push(Delta::Content(characters.finish())),
                Reader::Gemma(language) => language.finish(is_cut, &mut deltas),
            }
        }
        let mut parts = self.parts(deltas);
        if !self.has_stopped {
            let held = self.stops.finish();
            self.content(held, &mut parts);
            let logprobs = std::mem::take(&mut self.logprobs);
            if !logprobs.is_empty() {
                parts.push(Part::Content { text: String::new(), logprobs });
            }
        }
        let has_called = matches!(&self.reader, Reader::Gemma(language) if language.calls() > 0);
        let word = match (self.has_stopped, is_cut, has_called) {
            (true, ..) => "stop",
            (_, true, _) => "length",
            (_, _, true) => "tool_calls",
            _ => "stop",
        };
        (parts, word)
    }
}

/// The parts of a whole answer, put together.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Whole {
    pub reasoning: String,
    pub content: String,
    pub logprobs: Vec<Logprobs>,
    /// Of the prompt's tokens after the first, where they were wanted.
    pub prompt: Vec<Logprobs>,
    /// Names and arguments.
    pub calls: Vec<(String, String)>,
}

impl Whole {
    pub fn add(&mut self, parts: Vec<Part>) {
        for part in parts {
            match part {
                Part::Prompt(logprobs) => self.prompt.push(logprobs),
                Part::Reasoning(text) => self.reasoning.push_str(&text),
                Part::Content { text, logprobs } => {
                    self.content.push_str(&text);
                    self.logprobs.extend(logprobs);
                }
                Part::Call { name, .. } => self.calls.push((name, String::new())),
                Part::Arguments { index, text } => {
                    if let Some(call) = self.calls.get_mut(index) {
                        call.1.push_str(&text);
                    }
                }
            }
        }
    }
}
