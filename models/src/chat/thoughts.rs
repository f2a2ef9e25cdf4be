//! Thoughts of earlier answers under the names that templates read them by.
//!
//! Google's interleaved template reads `reasoning_content`, the later one also `reasoning`; clients send one of these,
//! or `thinking`. transformers copies thoughts from one name to another in the same way.

use std::borrow::Cow;

use serde_json::Value;

use super::Message;

/// The first of them that a message has is copied to those that it lacks.
const NAMES: [&str; 3] = ["reasoning_content", "reasoning", "thinking"];

pub(super) fn under_every_name(messages: &[Message]) -> Cow<'_, [Message]> {
    if !messages.iter().any(|message| thoughts(message).is_some()) {
        return messages.into();
    }
    let mut messages = messages.to_vec();
    for message in &mut messages {
        let Some(thoughts) = thoughts(message).cloned() else { continue };
        for name in NAMES {
            let field = message.more.entry(name).or_insert(Value::Null);
            if field.is_null() {
                *field = thoughts.clone();
            }
        }
    }
    messages.into()
}

fn thoughts(message: &Message) -> Option<&Value> {
    NAMES.iter().find_map(|name| message.more.get(*name).filter(|thoughts| !thoughts.is_null()))
}
