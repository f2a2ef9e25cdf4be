//! Where an answer goes while it is generated: its text to standard output, its thoughts and all notes to standard
//! error.

use std::io::{IsTerminal, Write};

use anyhow::Result;

use crate::reader::Shown;

/// Two places to write to, which tests replace.
pub struct Screen<'a> {
    pub out: &'a mut dyn Write,
    pub notes: &'a mut dyn Write,
    /// Thoughts are dimmed, where that can be seen.
    pub dims: bool,
    in_thoughts: bool,
}

impl<'a> Screen<'a> {
    pub fn new(out: &'a mut dyn Write, notes: &'a mut dyn Write) -> Screen<'a> {
        let dims = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        Screen { out, notes, dims, in_thoughts: false }
    }

    /// Shows a piece of an answer as soon as it is there.
    pub fn show(&mut self, piece: &Shown) -> Result<()> {
        match piece {
            Shown::Text(text) if text.is_empty() => {}
            Shown::Text(text) => {
                self.end_thoughts()?;
                self.print(text)?;
            }
            Shown::Thought(text) => {
                if !std::mem::replace(&mut self.in_thoughts, true) {
                    let begin = if self.dims { "\x1b[2m" } else { "" };
                    writeln!(self.notes, "{begin}[thinking]")?;
                }
                self.notes.write_all(text.as_bytes())?;
                self.notes.flush()?;
            }
            // Without tools there are none.
            Shown::Call(_) | Shown::Arguments(_) => {}
        }
        Ok(())
    }

    /// Text that is a result.
    pub fn print(&mut self, text: &str) -> Result<()> {
        self.out.write_all(text.as_bytes())?;
        Ok(self.out.flush()?)
    }

    /// A line that is no result.
    pub fn note(&mut self, text: &str) -> Result<()> {
        self.end_thoughts()?;
        writeln!(self.notes, "{text}")?;
        Ok(self.notes.flush()?)
    }

    /// What went wrong without ending the program.
    pub fn error(&mut self, error: &anyhow::Error) -> Result<()> {
        self.note(&format!("error: {}", crate::output::message(error)))
    }

    /// Closes the thoughts, if they are open.
    pub fn end_thoughts(&mut self) -> Result<()> {
        if std::mem::take(&mut self.in_thoughts) {
            let end = if self.dims { "\x1b[0m" } else { "" };
            writeln!(self.notes, "\n[answer]{end}")?;
            self.notes.flush()?;
        }
        Ok(())
    }
}
