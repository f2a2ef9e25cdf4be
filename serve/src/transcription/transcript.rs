//! The text of a sound, piece by piece: each is asked for when the one before it is complete.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::Asked;
use crate::adapters::Sitting;
use crate::answer::Part;
use crate::app::{App, Prepared};
use crate::body::beside;
use crate::chat;
use crate::error::ApiError;
use crate::progress::Progress;
use crate::prompt::{Conversation, Messages};
use crate::record::Record;
use crate::tools::ToolChoice;

pub struct Transcript {
    app: Arc<App>,
    record: Arc<Record>,
    asked: Arc<Asked>,
    /// All pieces are read by one adapter, whatever its name stands for meanwhile.
    sitting: Option<Sitting>,
    /// Pieces that were begun.
    begun: usize,
    /// Of the piece that is being answered.
    progress: Option<Progress>,
    joined: Joined,
    prompt_tokens: usize,
    tokens: u32,
}

impl Transcript {
    /// Begins with the first piece: what is wrong with the request is found out by then.
    pub async fn begin(app: Arc<App>, record: Arc<Record>, asked: Asked) -> Result<Transcript, ApiError> {
        let sitting = app.sit(asked.generation.lora.as_ref()).await?;
        let (asked, joined) = (Arc::new(asked), Joined::default());
        let mut transcript =
            Transcript { app, record, asked, sitting, begun: 0, progress: None, joined, prompt_tokens: 0, tokens: 0 };
        transcript.begin_piece().await?;
        Ok(transcript)
    }

    async fn begin_piece(&mut self) -> Result<(), ApiError> {
        let (asked, piece) = (Arc::clone(&self.asked), self.begun);
        let prepared = beside(&self.app, move |app| prepare(app, &asked, piece)).await?;
        let begun = self.app.begin_seated(prepared, Arc::clone(&self.record), self.sitting.clone());
        self.progress = Some(begun.await?);
        self.begun += 1;
        Ok(())
    }

    /// Text that has come; nothing once all of it has.
    pub async fn next(&mut self) -> Result<Option<String>, ApiError> {
        loop {
            let Some(progress) = &mut self.progress else {
                if self.begun == self.asked.pieces.len() {
                    return Ok(None);
                }
                self.begin_piece().await?;
                continue;
            };
            let updates = progress.next().await?;
            if updates.is_empty() {
                let usage = progress.usage();
                self.prompt_tokens += usage.prompt;
                self.tokens += usage.completion;
                self.progress = None;
                self.joined.end_piece();
                continue;
            }
            let mut text = String::new();
            for part in updates.into_iter().flat_map(|update| update.parts) {
                if let Part::Content { text: more, .. } = part {
                    text.push_str(&self.joined.push(&more));
                }
            }
            if !text.is_empty() {
                return Ok(Some(text));
            }
        }
    }

    pub fn text(&self) -> &str {
        &self.joined.text
    }

    pub fn usage(&self) -> Value {
        json!({
            "type": "tokens",
            "input_tokens": self.prompt_tokens,
            "output_tokens": self.tokens,
            "total_tokens": self.prompt_tokens + self.tokens as usize,
        })
    }

    /// The stream ends with an error.
    pub fn fail(&self, error: &ApiError) {
        self.record.fail(error.code);
    }
}

/// The request for a piece: a chat about it.
fn prepare(app: &App, asked: &Asked, piece: usize) -> Result<Prepared, ApiError> {
    let samples = &asked.samples[asked.pieces[piece].clone()];
    let conversation = Conversation {
        messages: Messages::of_sound("file", samples, &asked.instruction, &app.senses)?,
        tools: Vec::new(),
        thinking: false,
        generation_prompt: true,
        options: Map::new(),
    };
    let choice = ToolChoice::Auto { parallel: true };
    let chat = chat::prepare_conversation(app, asked.generation.clone(), conversation, &[], &choice, None)?;
    Ok(chat.prepared)
}

/// The texts of pieces with one space between them, whatever blanks are around each.
#[derive(Default)]
struct Joined {
    text: String,
    /// Blanks that are part of the text once something follows them.
    blanks: String,
    is_within_piece: bool,
}

impl Joined {
    /// What is added to the text.
    fn push(&mut self, more: &str) -> String {
        let mut added = std::mem::take(&mut self.blanks) + more;
        if !self.is_within_piece {
            added = added.trim_start().to_owned();
            if added.is_empty() {
                return added;
            }
            if !self.text.is_empty() {
                added.insert(0, ' ');
            }
            self.is_within_piece = true;
        }
        self.blanks = added.split_off(added.trim_end().len());
        self.text.push_str(&added);
        added
    }

    fn end_piece(&mut self) {
        self.blanks.clear();
        self.is_within_piece = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_joined_by_one_space() {
        let mut joined = Joined::default();
        let mut streamed = String::new();
        for piece in [&[" ", "One", " two", " \n"][..], &["  "], &["\n three ", "", "four", "  five"], &[], &["six"]] {
            for text in piece {
                streamed.push_str(&joined.push(text));
            }
            joined.end_piece();
        }
        assert_eq!(joined.text, "One two three four  five six");
        assert_eq!(streamed, joined.text);
    }
}
