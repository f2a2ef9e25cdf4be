//! The text side of a plan: vocabulary, merges, chat template and sampling defaults, as plain data.
//!
//! The tokenizer that works on it lives in `models`; a plan only carries what it needs, with merges already resolved to
//! token ids so that a start does not pay for half a million string look-ups.

use serde::{Deserialize, Serialize};

use crate::list::at_most;

/// Four times what the largest known vocabulary has, of tokens and of merges.
const MOST_TOKENS: usize = 1 << 20;
const MOST_MERGES: usize = 1 << 21;

/// Many strings in one allocation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Strings {
    text: String,
    /// End of string `i` in `text`; it starts where the one before ends.
    #[serde(deserialize_with = "at_most::<MOST_TOKENS, _, _>")]
    ends: Vec<u32>,
}

impl Strings {
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    pub fn get(&self, i: usize) -> Option<&str> {
        let start = if i == 0 { 0 } else { *self.ends.get(i - 1)? as usize };
        self.text.get(start..*self.ends.get(i)? as usize)
    }

    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> {
        (0..self.len()).map(|i| self.get(i).unwrap_or_default())
    }

    /// Appends a string; `false` where the whole would pass 4 GiB.
    #[must_use]
    pub fn push(&mut self, s: &str) -> bool {
        let Ok(end) = u32::try_from(self.text.len() + s.len()) else { return false };
        self.text.push_str(s);
        self.ends.push(end);
        true
    }

    /// Whether every end lies in order, within the text and on a character boundary.
    pub fn is_consistent(&self) -> bool {
        let starts = std::iter::once(&0).chain(&self.ends);
        starts.zip(&self.ends).all(|(a, b)| a <= b && self.text.is_char_boundary(*b as usize))
            && self.ends.last().is_none_or(|&e| e as usize == self.text.len())
    }
}

/// What a token is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TokenKind {
    Normal,
    /// Structure the model was trained on; never part of a user's text unless asked for, and not shown.
    Control,
    /// Matched before anything else in any text, and shown.
    UserDefined,
    /// One raw byte, for characters without a token.
    Byte,
    Unknown,
    Unused,
}

/// Two neighbouring tokens that become one. The index in [`Vocab::merges`] is the rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Merge {
    pub left: u32,
    pub right: u32,
    pub result: u32,
}

/// Everything the tokenizer needs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vocab {
    pub tokens: Strings,
    #[serde(deserialize_with = "at_most::<MOST_TOKENS, _, _>")]
    pub kinds: Vec<TokenKind>,
    #[serde(deserialize_with = "at_most::<MOST_MERGES, _, _>")]
    pub merges: Vec<Merge>,
    pub bos: Option<u32>,
    pub eos: Option<u32>,
    pub unknown: Option<u32>,
    pub add_bos: bool,
    /// Tokens that end a generation.
    #[serde(deserialize_with = "at_most::<65536, _, _>")]
    pub stop: Vec<u32>,
    /// Tokens that are never sampled.
    #[serde(deserialize_with = "at_most::<65536, _, _>")]
    pub suppress: Vec<u32>,
    /// Jinja text.
    pub chat_template: Option<String>,
}

/// Sampling as the model's authors advise it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    pub temperature: f32,
    pub top_k: u32,
    pub top_p: f32,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling { temperature: 1.0, top_k: 64, top_p: 0.95 }
    }
}
