//! A conversation: its turns, the pictures and sounds in them, and the prompt that a chat template makes of it.
//!
//! Thoughts are no part of it: a model does not see again what it thought in an earlier turn. What a person writes
//! never becomes a marker of the chat format, since it is quoted before the template is rendered.

use anyhow::{Context, Result, ensure};
use gemma4c_models::chat::Message;
use gemma4c_plan::Plan;
use gemma4c_runtime::Soft;
use gemma4c_serve::Speech;
use serde_json::{Map, Value, json};

use crate::commands::media::{self, Item, Media};

/// A question and its answer.
pub struct Turn {
    pub question: String,
    /// Pictures and sounds before the question.
    media: usize,
    /// `None` while it is being answered.
    pub answer: Option<String>,
}

/// Turns, the oldest first.
pub struct Conversation {
    pub system: Option<String>,
    pub turns: Vec<Turn>,
    thinking: bool,
    /// Of all turns in their order, and then those that wait for the next question.
    items: Vec<Item>,
    soft: Vec<Soft>,
    waiting: usize,
}

/// The ids of a conversation whose last question is to be answered.
pub struct Prompt {
    pub ids: Vec<u32>,
    /// Turns at the beginning that must be left out for it to fit.
    pub dropped: usize,
}

impl Conversation {
    /// Media that are there already belong to the first question.
    pub fn new(system: Option<String>, thinking: bool, media: Media, soft: Vec<Soft>) -> Conversation {
        let waiting = media.items.len();
        Conversation { system, turns: Vec::new(), thinking, items: media.items, soft, waiting }
    }

    /// A picture or a sound for the next question.
    pub fn attach(&mut self, item: Item, soft: Soft) {
        self.items.push(item);
        self.soft.push(soft);
        self.waiting += 1;
    }

    pub fn ask(&mut self, question: &str) {
        let media = std::mem::take(&mut self.waiting);
        self.turns.push(Turn { question: question.into(), media, answer: None });
    }

    /// Takes the last question back; its media wait for the next one.
    pub fn take_back(&mut self) {
        if let Some(turn) = self.turns.pop() {
            self.waiting += turn.media;
        }
    }

    /// Forgets the oldest turns.
    pub fn drop_oldest(&mut self, turns: usize) {
        let media: usize = self.turns.drain(..turns).map(|turn| turn.media).sum();
        self.items.drain(..media);
        self.soft.drain(..media);
    }

    /// The conversation from a turn on, the system prompt before it.
    fn messages(&self, from: usize, quote: &dyn Fn(&str) -> String) -> Vec<Message> {
        let system = self.system.iter().map(|text| Message::new("system", quote(text)));
        let mut at = self.media_before(from);
        let turns = self.turns[from..].iter().flat_map(|turn| {
            let media = &self.items[at..at + turn.media];
            at += turn.media;
            let text = quote(&turn.question);
            let question = match media {
                [] => Message::new("user", text),
                media => {
                    let text = json!({"type": "text", "text": text});
                    let content: Value = media.iter().map(Item::part).chain([text]).collect();
                    Message { content, ..Message::new("user", "") }
                }
            };
            let answer = turn.answer.as_ref().map(|text| Message::new("assistant", quote(text)));
            std::iter::once(question).chain(answer)
        });
        system.chain(turns.collect::<Vec<_>>()).collect()
    }

    fn media_before(&self, turn: usize) -> usize {
        self.turns[..turn].iter().map(|turn| turn.media).sum()
    }

    fn ids(&self, from: usize, speech: &Speech, plan: &Plan) -> Result<Vec<u32>> {
        let template = speech.template.as_ref().context("the model has no chat template: use -p without --chat")?;
        let mut options = Map::new();
        options.insert("enable_thinking".into(), self.thinking.into());
        let messages = self.messages(from, &|text| speech.tokenizer.quote(text));
        let ids = speech.tokenizer.encode_rendered(&template.render(&messages, &[], true, &options)?);
        media::expand_placeholders(&self.items[self.asked_media(from)], plan, &ids)
    }

    /// The media of the turns from one on.
    fn asked_media(&self, from: usize) -> std::ops::Range<usize> {
        self.media_before(from)..self.items.len() - self.waiting
    }

    /// The soft tokens of all turns.
    pub fn soft(&self) -> &[Soft] {
        &self.soft[self.asked_media(0)]
    }

    /// What the model reads to answer the last question. The oldest turns are left out where the rest of the context is
    /// less than `wanted` tokens; a question that does not fit alone is refused.
    pub fn prompt(&self, speech: &Speech, plan: &Plan, wanted: u32) -> Result<Prompt> {
        let context = plan.program.context as usize;
        let mut dropped = 0;
        loop {
            let ids = self.ids(dropped, speech, plan)?;
            if ids.len() + wanted as usize <= context {
                return Ok(Prompt { ids, dropped });
            }
            if dropped + 1 >= self.turns.len() {
                let tokens = ids.len();
                ensure!(
                    tokens <= context,
                    "the question is {tokens} tokens long with the system prompt, and the context has room for {context}"
                );
                return Ok(Prompt { ids, dropped });
            }
            dropped += 1;
        }
    }

    /// All of it as JSON messages, as a line of `run --file` takes them.
    pub fn json(&self) -> Value {
        json!(self.messages(0, &str::to_owned))
    }

    /// All of it as text.
    pub fn text(&self) -> String {
        let system = self.system.iter().map(|text| format!("System: {text}\n\n"));
        let turns = self.turns.iter().map(|turn| {
            let answer = turn.answer.as_deref().unwrap_or_default();
            format!("User: {}\n\nAssistant: {answer}\n\n", turn.question)
        });
        system.chain(turns).collect::<String>().trim_end().to_owned() + "\n"
    }
}
