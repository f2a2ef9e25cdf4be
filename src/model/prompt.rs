//! What a model is asked: a text to continue, tokens, or a conversation.

use serde_json::Value;

/// What a model goes on from.
///
/// Whatever takes a prompt takes what can become one: a text to continue, token ids, or the messages of a conversation.
///
/// ```
/// use gemma4c::{Message, Prompt};
///
/// assert_eq!(Prompt::from("She was"), Prompt::Text("She was".into()));
/// assert_eq!(Prompt::from([2, 105]), Prompt::Tokens(vec![2, 105]));
/// let chat = [Message::system("Be brief."), Message::user("Who wrote Emma?")];
/// assert!(matches!(Prompt::from(&chat[..]), Prompt::Chat(messages) if messages.len() == 2));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// A text that is continued as it is, behind the token that begins a sequence. Markers in it are text.
    Text(String),
    /// Token ids, as they are.
    Tokens(Vec<u32>),
    /// A conversation, which the model's own chat template turns into tokens. The answer is the assistant's next
    /// message.
    Chat(Vec<Message>),
    /// The same with tools, calls and thoughts, in the words of OpenAI's API.
    Conversation(Conversation),
}

impl From<&str> for Prompt {
    fn from(text: &str) -> Prompt {
        Prompt::Text(text.into())
    }
}

impl From<String> for Prompt {
    fn from(text: String) -> Prompt {
        Prompt::Text(text)
    }
}

impl From<&[u32]> for Prompt {
    fn from(tokens: &[u32]) -> Prompt {
        Prompt::Tokens(tokens.into())
    }
}

impl From<Vec<u32>> for Prompt {
    fn from(tokens: Vec<u32>) -> Prompt {
        Prompt::Tokens(tokens)
    }
}

impl<const N: usize> From<[u32; N]> for Prompt {
    fn from(tokens: [u32; N]) -> Prompt {
        Prompt::Tokens(tokens.into())
    }
}

impl From<&[Message]> for Prompt {
    fn from(messages: &[Message]) -> Prompt {
        Prompt::Chat(messages.into())
    }
}

impl From<Vec<Message>> for Prompt {
    fn from(messages: Vec<Message>) -> Prompt {
        Prompt::Chat(messages)
    }
}

impl From<Conversation> for Prompt {
    fn from(conversation: Conversation) -> Prompt {
        Prompt::Conversation(conversation)
    }
}

/// A conversation as OpenAI's chat API has it in JSON, without pictures and sounds.
///
/// ```
/// use gemma4c::Conversation;
/// use serde_json::json;
///
/// let conversation = Conversation {
///     messages: json!([{ "role": "user", "content": "What is the weather in Bath?" }]),
///     tools: json!([{ "type": "function", "function": { "name": "weather", "parameters": { "type": "object" } } }]),
///     thinking: false,
/// };
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conversation {
    /// The list of messages, with `tool_calls` of the assistant and results of role `tool`.
    pub messages: Value,
    /// The list of functions that may be called, or null.
    pub tools: Value,
    /// Whether the model may think before it answers.
    pub thinking: bool,
}

/// A message of a conversation.
///
/// ```
/// use gemma4c::Message;
///
/// let question = Message::user("Who wrote Emma?");
/// assert_eq!((question.role.as_str(), question.text.as_str()), ("user", "Who wrote Emma?"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// What it says. Markers in it are text: nobody can end a turn by writing its end.
    pub text: String,
}

impl Message {
    /// What holds for the whole conversation; it comes first.
    pub fn system(text: impl Into<String>) -> Message {
        Message { role: "system".into(), text: text.into() }
    }

    /// A question.
    pub fn user(text: impl Into<String>) -> Message {
        Message { role: "user".into(), text: text.into() }
    }

    /// An answer of the model, of an earlier turn.
    pub fn assistant(text: impl Into<String>) -> Message {
        Message { role: "assistant".into(), text: text.into() }
    }
}
