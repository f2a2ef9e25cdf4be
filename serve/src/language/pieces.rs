//! What the machine reads and what it makes of it: markers and pieces of text on one side, deltas on the other; and the
//! tools that may be called.

use serde_json::Value;

/// A marker of the chat format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    ChannelOpen,
    ChannelClose,
    CallOpen,
    CallClose,
    ResponseOpen,
    ResponseClose,
    /// Around the strings of a call.
    Quote,
    /// Structure that is not shown.
    Hidden,
}

impl Mark {
    /// Every marker that has a spelling.
    pub const SPELLED: [(Mark, &'static str); 7] = [
        (Mark::ChannelOpen, "<|channel>"),
        (Mark::ChannelClose, "<channel|>"),
        (Mark::CallOpen, "<|tool_call>"),
        (Mark::CallClose, "<tool_call|>"),
        (Mark::ResponseOpen, "<|tool_response>"),
        (Mark::ResponseClose, "<tool_response|>"),
        (Mark::Quote, "<|\"|>"),
    ];

    pub fn spelling(self) -> &'static str {
        Mark::SPELLED.iter().find(|(mark, _)| *mark == self).map_or("", |(_, text)| text)
    }
}

/// One token.
#[derive(Clone, Copy, Debug)]
pub enum Piece<'a> {
    Mark(Mark),
    /// A part of a text, which may be a part of a character.
    Bytes(&'a [u8]),
}

/// What a token adds to the answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Delta {
    Reasoning(String),
    Content(String),
    /// A call begins; calls are counted from 0.
    Call {
        index: usize,
        name: String,
    },
    /// More of its arguments, as JSON.
    Arguments {
        index: usize,
        text: String,
    },
}

/// A function that may be called: its name, and the schema of its arguments.
#[derive(Clone, Debug)]
pub struct Tool {
    pub name: String,
    pub parameters: Value,
}
