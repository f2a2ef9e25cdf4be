//! Chat templates: a conversation to the text the model was trained on, through the Jinja text in the model's own file.
//!
//! The environment is the one that Hugging Face transformers renders templates in, so that the result is the same to
//! the byte: block trimming, Python's methods on strings and maps, Python's way to print values, loop controls,
//! `tojson` and `raise_exception`. Thinking is off unless the option `enable_thinking` is set to true.
//!
//! A template comes from a file and is not trusted: it reaches nothing but its arguments, and its fuel is limited. What
//! fuel does not limit is the length of one string, which a template that doubles it on purpose can make huge.
//!
//! Two things are done to a conversation first. Thoughts get every name that templates read them by, as transformers
//! does it ([`thoughts`]). Tool results get the names of their functions, and go into the model's turn where the
//! template would give them one of their own ([`results`]).
//!
//! The rendered text spells control tokens, the one at the beginning included: encode it with `parse_special` and
//! without `add_bos`. Nothing escapes control tokens that a message spells itself.

mod known;
mod python;
mod results;
mod thoughts;

pub use known::{Known, known};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment, Error, ErrorKind};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use thiserror::Error;

/// Instructions a rendering may take, which is seconds. Google's template looks back through all messages for each one:
/// a thousand take it 3.7 million instructions, and more than three thousand may come.
const FUEL: u64 = 50_000_000;

/// The same of a trial with three short messages, which takes a few thousand.
const TRIAL_FUEL: u64 = 200_000;

/// The name of the one template in its environment.
const NAME: &str = "chat template";

/// What went wrong in a template, and where; or in a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ChatError {
    #[error("chat template, line {line}: {problem}")]
    Template { line: usize, problem: String },
    /// Templates write such a result as a turn that no model knows, or leave it out.
    #[error(
        "messages[{index}] is a tool's result without its call: an assistant message with that call must come before it"
    )]
    ResultWithoutCall { index: usize },
}

/// One message of a conversation, as in the chat APIs of the model's vendors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant` or `tool`.
    pub role: String,
    /// Text, or a list of parts such as `{"type": "text", "text": "…"}`.
    #[serde(default)]
    pub content: Value,
    /// Whatever else a template may want: `tool_calls`, `tool_responses`, `tool_call_id`, `name`, `reasoning_content` …
    #[serde(flatten)]
    pub more: Map<String, Value>,
}

impl Message {
    pub fn new(role: impl Into<String>, text: impl Into<String>) -> Message {
        Message { role: role.into(), content: Value::String(text.into()), more: Map::new() }
    }

    /// Makes objects of the arguments of calls that are JSON in a text, as clients send them: templates write an object
    /// as the model wrote it. It is not done on the way to the template, since JSON can spell a marker in escapes.
    /// Whoever quotes messages does it before.
    pub fn parse_arguments(&mut self) {
        let calls = self.more.get_mut("tool_calls").and_then(Value::as_array_mut);
        for arguments in calls.into_iter().flatten().filter_map(|call| call.pointer_mut("/function/arguments")) {
            let parsed = arguments.as_str().and_then(|text| serde_json::from_str::<Value>(text).ok());
            if let Some(object) = parsed.filter(Value::is_object) {
                *arguments = object;
            }
        }
    }
}

/// A compiled template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// Whether it gives a tool's result a turn of its own.
    moves_results: bool,
}

impl ChatTemplate {
    /// Compiles the Jinja text of a template.
    pub fn new(source: &str) -> Result<ChatTemplate, ChatError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(chat_error)?;
        environment.set_syntax(syntax);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_fuel(Some(TRIAL_FUEL));
        // For errors that name what is undefined; it costs nothing before there is one.
        environment.set_debug(true);
        environment.set_formatter(python::print);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", python::to_json);
        environment.add_function("raise_exception", raise_exception);
        environment.add_template_owned(NAME, source.to_owned()).map_err(chat_error)?;
        let mut template = ChatTemplate { environment, moves_results: false };
        template.moves_results = results::have_a_turn_of_their_own(&template);
        template.environment.set_fuel(Some(FUEL));
        Ok(template)
    }

    /// The prompt for a conversation.
    ///
    /// `tools` are function declarations in JSON Schema. `add_generation_prompt` opens the model's turn. `options` are
    /// variables for the template, such as `enable_thinking`.
    pub fn render(
        &self,
        messages: &[Message],
        tools: &[Value],
        add_generation_prompt: bool,
        options: &Map<String, Value>,
    ) -> Result<String, ChatError> {
        let messages = results::with_names(thoughts::under_every_name(messages))?;
        if !self.moves_results || !messages.iter().any(results::is_result) {
            return self.render_as_given(&messages, tools, add_generation_prompt, options);
        }
        let messages = results::move_into_turns(&messages);
        let rendered = self.render_as_given(&messages, tools, add_generation_prompt, options)?;
        Ok(results::join_turns(&rendered))
    }

    fn render_as_given(
        &self,
        messages: &[Message],
        tools: &[Value],
        add_generation_prompt: bool,
        options: &Map<String, Value>,
    ) -> Result<String, ChatError> {
        let arguments = Arguments {
            bos_token: "<bos>",
            eos_token: "<eos>",
            messages,
            tools: (!tools.is_empty()).then_some(tools),
            add_generation_prompt,
            options,
        };
        let template = self.environment.get_template(NAME).map_err(chat_error)?;
        template.render(Serde(arguments)).map_err(chat_error)
    }
}

/// The variables a template sees.
#[derive(Serialize)]
struct Arguments<'a> {
    bos_token: &'static str,
    eos_token: &'static str,
    messages: &'a [Message],
    tools: Option<&'a [Value]>,
    add_generation_prompt: bool,
    #[serde(flatten)]
    options: &'a Map<String, Value>,
}

/// How a template refuses a conversation.
fn raise_exception(problem: String) -> Result<minijinja::Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, problem))
}

fn chat_error(error: Error) -> ChatError {
    let problem = match (error.kind(), error.detail()) {
        (ErrorKind::OutOfFuel, _) => format!("it does not come to an end (stopped after {FUEL} instructions)"),
        (ErrorKind::InvalidOperation, Some(detail)) => detail.into(),
        (kind, Some(detail)) => format!("{kind}: {detail}"),
        (kind, None) => kind.to_string(),
    };
    ChatError::Template { line: error.line().unwrap_or(1), problem }
}
