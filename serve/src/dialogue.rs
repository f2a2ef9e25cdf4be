//! A conversation for programs that are no servers: messages and tools as OpenAI's API has them in JSON, without HTTP.
//!
//! Prompt and answer are those of a request. Answers are not held to the tools' schemas, and pictures and sounds are
//! refused.

use std::sync::Arc;

use serde_json::{Map, Value};

use crate::answer::Answer;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::language::{Start, Tool};
use crate::media::{Fetched, Senses};
use crate::prompt::{Conversation, Messages};
use crate::speech::Speech;
use crate::tools;

/// A conversation that a model is asked to go on with.
pub struct Dialogue {
    pub prompt: Vec<u32>,
    /// Where others may part from it.
    pub snapshot_at: Vec<u32>,
    tools: Arc<[Tool]>,
    start: Start,
}

/// Messages or tools that are not what they must be; the text begins with the field's name.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct DialogueError(String);

impl From<ApiError> for DialogueError {
    fn from(error: ApiError) -> DialogueError {
        DialogueError(error.message)
    }
}

impl Dialogue {
    /// `messages` is a list, `tools` a list or null.
    pub fn read(speech: &Speech, messages: &Value, tools: &Value, thinking: bool) -> Result<Dialogue, DialogueError> {
        let fields: Map<String, Value> = Map::from_iter([("tools".to_owned(), tools.clone())]);
        let (declared, _) = tools::read(Fields(&fields))?;
        let senses = Senses::none();
        let conversation = Conversation {
            messages: Messages::read(messages, &senses, &Fetched::default())?,
            tools: declared.iter().map(|tool| tool.declaration.clone()).collect(),
            thinking,
            generation_prompt: true,
            options: Map::new(),
        };
        let prompt = conversation.encode(speech, &senses)?;
        let start = speech.start(&prompt.tokens);
        let tools = declared.into_iter().map(|declared| declared.tool).collect();
        Ok(Dialogue { prompt: prompt.tokens, snapshot_at: prompt.snapshot_at, tools, start })
    }

    /// What reads the answer.
    pub fn answer(&self, stop: Vec<String>) -> Answer {
        Answer::chat(self.start, Arc::clone(&self.tools), stop)
    }
}
