//! What Gemma writes, by token: thoughts in channels, calls of tools, and the text in between.
//!
//! ```text
//! [<|channel> "thought\n" … <channel|>]  text  <|tool_call> "call:" NAME "{" … "}" <tool_call|>  <|tool_response>
//! ```
//!
//! Markers are recognised by their ids, so that a marker that somebody only spells is text. One machine makes the
//! pieces of a stream, and a whole answer is those pieces joined: the two cannot differ. Whatever is not understood is
//! content, never nothing.

mod call;
mod pieces;

use std::sync::Arc;

use call::{Call, Flow};
use gemma4c_models::text::Characters;
pub use pieces::{Delta, Mark, Piece, Tool};

/// What a channel of thoughts begins with.
const LABEL: &str = "thought\n";

#[derive(Debug)]
enum State {
    /// So much of the label has been seen.
    Label(String),
    Thinking,
    /// Right after a channel, where models forget the marker of a call.
    AfterChannel(String),
    /// Whitespace is held until something follows it.
    AfterCall(String),
    Content,
    Call(Box<Call>),
}

/// Where an answer begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    Content,
    Thinking,
    /// A channel was opened, and its label is the model's to write.
    Label,
}

/// The machine.
#[derive(Debug)]
pub struct Language {
    state: State,
    characters: Characters,
    tools: Arc<[Tool]>,
    calls: usize,
}

impl Language {
    /// Without tools, calls are content.
    pub fn new(start: Start, tools: Arc<[Tool]>) -> Language {
        let state = match start {
            Start::Content => State::Content,
            Start::Thinking => State::Thinking,
            Start::Label => State::Label(String::new()),
        };
        Language { state, characters: Characters::default(), tools, calls: 0 }
    }

    pub fn is_thinking(&self) -> bool {
        matches!(self.state, State::Thinking | State::Label(_))
    }

    /// Whether text that comes now is visible.
    pub fn is_content(&self) -> bool {
        matches!(self.state, State::Content | State::AfterChannel(_) | State::AfterCall(_))
    }

    pub fn calls(&self) -> usize {
        self.calls
    }

    pub fn push(&mut self, piece: Piece<'_>, out: &mut Vec<Delta>) {
        match piece {
            Piece::Bytes(bytes) => {
                let text = self.characters.push(bytes);
                self.text(&text, out);
            }
            Piece::Mark(mark) => {
                let rest = self.characters.finish();
                self.text(&rest, out);
                self.mark(mark, out);
            }
        }
    }

    /// The end. An answer that was cut by a limit leaves its last call as far as it came; else the call is closed.
    pub fn finish(&mut self, cut: bool, out: &mut Vec<Delta>) {
        let rest = self.characters.finish();
        self.text(&rest, out);
        match std::mem::replace(&mut self.state, State::Content) {
            State::Call(mut call) if call.is_named() && cut => call.cut(out),
            // Nobody knows yet what it calls, and its notation is not for readers.
            State::Call(_) if cut => {}
            State::AfterChannel(held) if cut && held.trim_start().starts_with("call:") => {}
            State::Call(call) => self.leave(*call, out),
            state => self.flush(state, out),
        }
    }

    /// Gives out what a state has held back when something else than text comes.
    fn flush(&mut self, state: State, out: &mut Vec<Delta>) {
        match state {
            State::Label(seen) if !LABEL.starts_with(&seen) => push_text(out, Delta::Reasoning(seen)),
            State::AfterChannel(held) => push_text(out, Delta::Content(held)),
            _ => {}
        }
    }

    fn text(&mut self, text: &str, out: &mut Vec<Delta>) {
        if text.is_empty() {
            return;
        }
        match std::mem::replace(&mut self.state, State::Content) {
            State::Label(mut seen) => {
                seen.push_str(text);
                if let Some(thought) = seen.strip_prefix(LABEL) {
                    self.state = State::Thinking;
                    push_text(out, Delta::Reasoning(thought.into()));
                } else if LABEL.starts_with(&seen) {
                    self.state = State::Label(seen);
                } else {
                    self.state = State::Thinking;
                    push_text(out, Delta::Reasoning(seen));
                }
            }
            State::Thinking => {
                self.state = State::Thinking;
                push_text(out, Delta::Reasoning(text.into()));
            }
            State::AfterChannel(mut held) => {
                held.push_str(text);
                self.after_channel(held, out);
            }
            State::AfterCall(mut held) => {
                held.push_str(text);
                if held.trim().is_empty() {
                    self.state = State::AfterCall(held);
                } else {
                    push_text(out, Delta::Content(held));
                }
            }
            State::Content => push_text(out, Delta::Content(text.into())),
            State::Call(call) => self.call_text(call, text, out),
        }
    }

    /// `call:NAME{` of a tool is a call without its marker; what may still become one is held back.
    fn after_channel(&mut self, held: String, out: &mut Vec<Delta>) {
        let text = held.trim_start();
        let mut may_become_call = text.is_empty();
        for tool in self.tools.iter() {
            let head = format!("call:{}{{", tool.name);
            if text.starts_with(&head) {
                let call = Call::new(self.calls, Arc::clone(&self.tools), false);
                let text = text.to_owned();
                return self.call_text(Box::new(call), &text, out);
            }
            may_become_call |= head.starts_with(text);
        }
        if may_become_call {
            self.state = State::AfterChannel(held);
        } else {
            push_text(out, Delta::Content(held));
        }
    }

    fn call_text(&mut self, mut call: Box<Call>, text: &str, out: &mut Vec<Delta>) {
        let was_named = call.is_named();
        let flow = call.text(text, out);
        self.calls += usize::from(!was_named && call.is_named());
        match flow {
            Flow::On => self.state = State::Call(call),
            Flow::Failed(rest) => {
                self.state = State::Content;
                push_text(out, Delta::Content(rest));
            }
        }
    }

    /// Ends a call where it stands.
    fn leave(&mut self, mut call: Call, out: &mut Vec<Delta>) {
        let rest = call.close(out);
        push_text(out, Delta::Content(rest));
    }

    fn mark(&mut self, mark: Mark, out: &mut Vec<Delta>) {
        let state = match std::mem::replace(&mut self.state, State::Content) {
            State::Call(mut call) => {
                if call.mark(mark, out) {
                    self.state = State::Call(call);
                    return;
                }
                let was_named = call.is_named();
                self.leave(*call, out);
                if mark == Mark::CallClose {
                    self.state = if was_named { State::AfterCall(String::new()) } else { State::Content };
                    return;
                }
                State::AfterCall(String::new())
            }
            state => {
                if matches!(state, State::Label(_) | State::AfterChannel(_)) {
                    let kept = matches!(state, State::Label(_));
                    self.flush(state, out);
                    if kept { State::Thinking } else { State::Content }
                } else {
                    state
                }
            }
        };
        self.state = match mark {
            Mark::ChannelOpen => State::Label(String::new()),
            // A stray one closes nothing.
            Mark::ChannelClose if matches!(state, State::Thinking) => State::AfterChannel(String::new()),
            Mark::CallOpen if !self.tools.is_empty() => {
                State::Call(Box::new(Call::new(self.calls, Arc::clone(&self.tools), true)))
            }
            Mark::CallOpen | Mark::Quote => {
                self.state = state;
                return self.text(mark.spelling(), out);
            }
            // Without tools the end of a call is as visible as its beginning.
            Mark::CallClose if self.tools.is_empty() => {
                self.state = state;
                return self.text(mark.spelling(), out);
            }
            _ => state,
        };
    }
}

/// Adds text to the last delta, where that is of the same kind.
fn push_text(out: &mut Vec<Delta>, delta: Delta) {
    match (out.last_mut(), delta) {
        (_, Delta::Reasoning(text) | Delta::Content(text)) if text.is_empty() => {}
        (Some(Delta::Reasoning(last)), Delta::Reasoning(text)) => last.push_str(&text),
        (Some(Delta::Content(last)), Delta::Content(text)) => last.push_str(&text),
        (_, delta) => out.push(delta),
    }
}

#[cfg(test)]
mod tests;
