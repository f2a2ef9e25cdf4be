//! Answers as Python sees them: whole, or as an iterator over their text.

use std::sync::{Mutex, MutexGuard, PoisonError};

use gemma4c::{Finish, Interrupt};
use pyo3::prelude::*;

use crate::Error;
use crate::worker::{Pending, ended, wait};

/// An answer of a model; `str(completion)` is its text.
#[pyclass(frozen, eq, get_all, module = "gemma4c")]
#[derive(Clone, PartialEq)]
pub struct Completion {
    /// The text, up to a stop string.
    text: String,
    /// What the model thought before it answered, in a chat.
    thoughts: String,
    /// The tools that it calls.
    tool_calls: Vec<ToolCall>,
    /// Ids of all tokens that were generated, without the one that ended the answer.
    tokens: Vec<u32>,
    /// Why it ended: "stop", "length", "context", or "tool_calls".
    finish_reason: &'static str,
    /// Tokens of the prompt.
    prompt_tokens: usize,
}

/// A call of a tool.
#[pyclass(frozen, eq, get_all, module = "gemma4c")]
#[derive(Clone, PartialEq)]
pub struct ToolCall {
    /// The tool's name.
    name: String,
    /// A JSON object as text; of an answer that was cut, as far as it came.
    arguments: String,
}

impl From<gemma4c::Completion> for Completion {
    fn from(answer: gemma4c::Completion) -> Completion {
        let call = |call: gemma4c::Call| ToolCall { name: call.name, arguments: call.arguments };
        let has_called = !answer.calls.is_empty() && answer.finish == Finish::Stop;
        Completion {
            text: answer.text,
            thoughts: answer.thoughts,
            tool_calls: answer.calls.into_iter().map(call).collect(),
            tokens: answer.tokens,
            finish_reason: if has_called { "tool_calls" } else { answer.finish.name() },
            prompt_tokens: answer.prompt_tokens,
        }
    }
}

#[pymethods]
impl Completion {
    fn __str__(&self) -> &str {
        &self.text
    }

    fn __repr__(&self) -> String {
        let (text, tokens, reason) = (&self.text, self.tokens.len(), self.finish_reason);
        format!("Completion({text:?}, {tokens} tokens, {reason})")
    }
}

#[pymethods]
impl ToolCall {
    fn __repr__(&self) -> String {
        format!("ToolCall({}({}))", self.name, self.arguments)
    }
}

/// What comes of an answer while it is written.
pub enum Piece {
    Text(String),
    Whole(Box<gemma4c::Completion>),
}

/// An answer as it comes: an iterator over pieces of its text. The model writes ahead of who reads; an answer that is
/// dropped or closed half-way ends there.
#[pyclass(frozen, module = "gemma4c")]
pub struct Stream {
    state: Mutex<State>,
    interrupt: Interrupt,
}

enum State {
    Open(Pending<Piece>),
    /// Somebody waits for the next piece.
    Awaited,
    /// With the whole answer, if it came to its end.
    Ended(Option<Completion>),
}

impl Stream {
    pub fn new(pending: Pending<Piece>) -> Stream {
        let interrupt = pending.interrupt.clone();
        Stream { state: Mutex::new(State::Open(pending)), interrupt }
    }

    /// Nobody waits under this lock.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the next piece is waited for with; `None` where there are no more.
    fn take(&self) -> PyResult<Option<Pending<Piece>>> {
        let mut state = self.state();
        match std::mem::replace(&mut *state, State::Awaited) {
            State::Open(pending) => Ok(Some(pending)),
            State::Awaited => Err(Error::new_err("another thread waits for the next piece of this stream")),
            ended => {
                *state = ended;
                Ok(None)
            }
        }
    }
}

#[pymethods]
impl Stream {
    fn __iter__(stream: PyRef<'_, Self>) -> PyRef<'_, Self> {
        stream
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let Some(mut pending) = self.take()? else { return Ok(None) };
        let piece = wait(py, &mut pending);
        let mut state = self.state();
        match piece {
            Ok(Some(Piece::Text(text))) => {
                *state = State::Open(pending);
                Ok(Some(text))
            }
            Ok(Some(Piece::Whole(answer))) => {
                *state = State::Ended(Some((*answer).into()));
                Ok(None)
            }
            Ok(None) => {
                *state = State::Ended(None);
                Err(ended())
            }
            Err(error) => {
                *state = State::Ended(None);
                Err(error)
            }
        }
    }

    /// The whole answer, once its last piece was read; None before that.
    #[getter]
    fn completion(&self) -> Option<Completion> {
        match &*self.state() {
            State::Ended(whole) => whole.clone(),
            _ => None,
        }
    }

    /// Ends the answer where it stands.
    fn close(&self) {
        self.interrupt.set();
        let mut state = self.state();
        if matches!(*state, State::Open(_)) {
            *state = State::Ended(None);
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.interrupt.set();
    }
}
