//! An answer as a person reads it: from tokens to text, up to a stop string, with thoughts apart.
//!
//! What a chat answers is read by the server's own machine, so that library, terminal and HTTP show the same.

use gemma4c_models::text::Stops;
use gemma4c_models::tokenizer::{Detokenizer, Tokenizer};
use gemma4c_runtime::engine::Finish;
use gemma4c_serve::{Dialogue, Part, Speech};

use crate::error::Error;

/// What a token adds.
#[derive(Clone, Debug, PartialEq)]
pub enum Shown {
    Text(String),
    /// What a model thinks before it answers.
    Thought(String),
    /// A call of a tool begins, by the tool's name.
    Call(String),
    /// More of the arguments of the latest call, as JSON.
    Arguments(String),
}

/// Turns tokens into what is shown, one by one.
pub enum Reader<'a> {
    /// The ids themselves.
    Ids { is_first: bool },
    /// Text as it stands.
    Plain { detokenizer: Detokenizer<'a>, stops: Stops },
    /// What a model answers in a chat.
    Chat { answer: Box<gemma4c_serve::Answer>, speech: &'a Speech },
}

impl<'a> Reader<'a> {
    pub fn ids() -> Reader<'a> {
        Reader::Ids { is_first: true }
    }

    pub fn plain(tokenizer: &'a Tokenizer, stop: &[String]) -> Reader<'a> {
        Reader::Plain { detokenizer: tokenizer.detokenizer(false), stops: Stops::new(stop.to_vec()) }
    }

    /// Of the answer to a prompt that a chat template has written.
    pub fn chat(speech: &'a Speech, prompt: &[u32], stop: &[String]) -> Reader<'a> {
        let answer = gemma4c_serve::Answer::chat(speech.start(prompt), std::sync::Arc::default(), stop.to_vec());
        Reader::Chat { answer: Box::new(answer), speech }
    }

    /// Of the answer in a conversation that may have tools.
    pub fn dialogue(speech: &'a Speech, dialogue: &Dialogue, stop: &[String]) -> Reader<'a> {
        Reader::Chat { answer: Box::new(dialogue.answer(stop.to_vec())), speech }
    }

    /// What a token adds, and whether a stop string has come.
    pub fn push(&mut self, token: u32) -> Result<(Vec<Shown>, bool), Error> {
        Ok(match self {
            Reader::Ids { is_first } => {
                let separator = if std::mem::take(is_first) { "" } else { " " };
                (vec![Shown::Text(format!("{separator}{token}"))], false)
            }
            Reader::Plain { detokenizer, stops } => {
                let (text, has_stopped) = stops.push(detokenizer.push(token)?);
                (vec![Shown::Text(text)], has_stopped)
            }
            Reader::Chat { answer, speech } => {
                let parts = answer.token(speech, token, None);
                (parts.into_iter().filter_map(shown).collect(), answer.has_stopped())
            }
        })
    }

    /// What was held back, once the last token has come.
    pub fn finish(self, finish: Finish, has_stopped: bool) -> Vec<Shown> {
        match self {
            Reader::Ids { .. } => Vec::new(),
            Reader::Plain { .. } if has_stopped => Vec::new(),
            Reader::Plain { detokenizer, mut stops } => {
                let (text, has_stopped) = stops.push(&detokenizer.finish());
                let held = if has_stopped { String::new() } else { stops.finish() };
                vec![Shown::Text(text + &held)]
            }
            Reader::Chat { mut answer, .. } => answer.finish(finish).0.into_iter().filter_map(shown).collect(),
        }
    }
}

/// Calls come one after another.
fn shown(part: Part) -> Option<Shown> {
    match part {
        Part::Content { text, .. } => Some(Shown::Text(text)),
        Part::Reasoning(text) => Some(Shown::Thought(text)),
        Part::Call { name, .. } => Some(Shown::Call(name)),
        Part::Arguments { text, .. } => Some(Shown::Arguments(text)),
        Part::Prompt(_) => None,
    }
}
