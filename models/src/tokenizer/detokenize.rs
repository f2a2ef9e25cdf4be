//! From token ids back to text, as they come.
//!
//! A byte token may be a part of a character, so bytes wait until they are one. Bytes that cannot become UTF-8 turn
//! into U+FFFD, as do bytes that still wait when other text follows or the ids end.

use gemma4c_plan::TokenKind;

use super::spelling::{SPACE, byte_value};
use super::{Tokenizer, TokenizerError};

/// Turns ids, one by one, into pieces of text that never end within a character.
#[derive(Debug)]
pub struct Detokenizer<'t> {
    tokenizer: &'t Tokenizer,
    show_control: bool,
    /// Bytes of byte tokens that may still become a character: at most three.
    waiting: Vec<u8>,
    ready: String,
}

impl Tokenizer {
    /// The text of `ids`; control tokens such as `<turn|>` are left out unless asked for.
    pub fn decode(&self, ids: &[u32], show_control: bool) -> Result<String, TokenizerError> {
        let mut detokenizer = self.detokenizer(show_control);
        let mut text = String::with_capacity(ids.len() * 4);
        for &id in ids {
            text.push_str(detokenizer.push(id)?);
        }
        text.push_str(&detokenizer.finish());
        Ok(text)
    }

    /// For ids that come one by one.
    pub fn detokenizer(&self, show_control: bool) -> Detokenizer<'_> {
        Detokenizer::new(self, show_control)
    }
}

impl<'t> Detokenizer<'t> {
    fn new(tokenizer: &'t Tokenizer, show_control: bool) -> Self {
        Detokenizer { tokenizer, show_control, waiting: Vec::new(), ready: String::new() }
    }

    /// Takes one id and returns the text that is now certain, which may be empty.
    pub fn push(&mut self, id: u32) -> Result<&str, TokenizerError> {
        self.ready.clear();
        let (text, kind) = self.tokenizer.token(id)?;
        match kind {
            TokenKind::Byte => {
                // `Tokenizer::new` refuses byte tokens that do not name a byte.
                self.waiting.extend(byte_value(text));
                self.take_characters();
            }
            TokenKind::Control | TokenKind::Unknown if !self.show_control => {}
            TokenKind::Control | TokenKind::Unknown | TokenKind::UserDefined => {
                self.give_up_waiting();
                self.ready.push_str(text);
            }
            TokenKind::Normal | TokenKind::Unused => {
                self.give_up_waiting();
                self.ready.extend(text.chars().map(|c| if c == SPACE { ' ' } else { c }));
            }
        }
        Ok(&self.ready)
    }

    /// Ends the text: bytes that still wait cannot become a character any more.
    pub fn finish(mut self) -> String {
        self.ready.clear();
        self.give_up_waiting();
        self.ready
    }

    /// Moves everything but an unfinished character at the end from `waiting` to `ready`.
    fn take_characters(&mut self) {
        let mut unfinished = 0;
        let mut chunks = self.waiting.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            self.ready.push_str(chunk.valid());
            let invalid = chunk.invalid();
            if chunks.peek().is_none() && may_become_character(invalid) {
                unfinished = invalid.len();
            } else if !invalid.is_empty() {
                self.ready.push(char::REPLACEMENT_CHARACTER);
            }
        }
        self.waiting.drain(..self.waiting.len() - unfinished);
    }

    fn give_up_waiting(&mut self) {
        self.ready.push_str(&String::from_utf8_lossy(&self.waiting));
        self.waiting.clear();
    }
}

fn may_become_character(bytes: &[u8]) -> bool {
    str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}
