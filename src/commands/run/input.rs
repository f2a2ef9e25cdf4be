//! Where the lines of a chat come from: a terminal with editing and history, or any other standard input.

use std::fs;
use std::io::{BufRead, Read};
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use rustyline::error::ReadlineError;
use rustyline::history::FileHistory;
use rustyline::{Behavior, Config, Editor};

use crate::commands::tokenize::LONGEST_PROMPT;

/// What is asked for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    Question,
    /// More lines of a text.
    More,
}

/// What came.
#[derive(Debug, PartialEq)]
pub enum Line {
    Text(String),
    /// Ctrl-C, while a line was written.
    Interrupted,
    End,
}

/// A source of lines.
pub trait Input {
    fn line(&mut self, wanted: Wanted) -> Result<Line>;
}

/// Lines of a pipe or a file.
pub struct Lines<R>(pub R);

impl<R: BufRead> Input for Lines<R> {
    fn line(&mut self, _: Wanted) -> Result<Line> {
        let mut bytes = Vec::new();
        let mut bounded = Read::take(&mut self.0, LONGEST_PROMPT + 1);
        bounded.read_until(b'\n', &mut bytes).context("cannot read standard input")?;
        ensure!(bytes.len() as u64 <= LONGEST_PROMPT, "a line of standard input has more than {LONGEST_PROMPT} bytes");
        if bytes.is_empty() {
            return Ok(Line::End);
        }
        let text = String::from_utf8(bytes).ok().context("standard input is not UTF-8 text")?;
        let text = text.strip_suffix('\n').unwrap_or(&text);
        Ok(Line::Text(text.strip_suffix('\r').unwrap_or(text).to_owned()))
    }
}

/// A person at a terminal.
pub struct Terminal {
    editor: Editor<(), FileHistory>,
    /// Where lines are kept for the next chat, if there is such a place.
    history: Option<PathBuf>,
}

impl Terminal {
    pub fn open() -> Result<Terminal> {
        // The prompt goes to the terminal itself: answers may be piped to a file.
        let config = Config::builder().behavior(Behavior::PreferTerm).build();
        let mut editor = Editor::with_history(config, FileHistory::new()).context("cannot use the terminal")?;
        let history = history_file();
        if let Some(path) = &history {
            // The first chat has none, and a chat is possible without.
            _ = editor.load_history(path);
        }
        Ok(Terminal { editor, history })
    }

    fn remember(&mut self, line: &str) {
        // History is a convenience: where it cannot be written, the chat goes on without.
        if self.editor.add_history_entry(line).unwrap_or(false)
            && let Some(path) = &self.history
        {
            _ = path.parent().map(fs::create_dir_all);
            _ = self.editor.append_history(path);
        }
    }
}

impl Input for Terminal {
    fn line(&mut self, wanted: Wanted) -> Result<Line> {
        let prompt = if wanted == Wanted::Question { "> " } else { ". " };
        loop {
            match self.editor.readline(prompt) {
                Ok(line) => {
                    if !line.trim().is_empty() {
                        self.remember(&line);
                    }
                    return Ok(Line::Text(line));
                }
                Err(ReadlineError::Interrupted) => return Ok(Line::Interrupted),
                Err(ReadlineError::Eof) => return Ok(Line::End),
                // The window has another size.
                Err(ReadlineError::Signal(_)) => {}
                Err(error) => return Err(error).context("cannot read the terminal"),
            }
        }
    }
}

/// Lines of earlier chats are state of this user's, by the rules of the XDG base directories.
fn history_file() -> Option<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let state = variable("XDG_STATE_HOME").or_else(|| Some(variable("HOME")?.join(".local/state")));
    Some(state?.join("gemma4c/history"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_end_with_either_newline_or_the_input() {
        let mut lines = Lines("one\r\n\ntwo".as_bytes());
        let mut next = || lines.line(Wanted::Question).unwrap();
        let text = |text: &str| Line::Text(text.into());
        assert_eq!([next(), next(), next(), next()], [text("one"), text(""), text("two"), Line::End]);
    }

    #[test]
    fn what_is_no_text_or_too_much_of_it_is_refused() {
        assert!(Lines(&b"\xff\n"[..]).line(Wanted::Question).is_err());
        let mut endless = Lines(std::io::BufReader::new(std::io::repeat(b'a')));
        assert!(endless.line(Wanted::Question).unwrap_err().to_string().contains("more than 16777216 bytes"));
    }
}
