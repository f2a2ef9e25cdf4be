//! A chat: questions, their answers, and commands that begin with a slash.
//!
//! It knows nothing of terminals: lines come from an [`Input`], and what is shown goes to a [`Screen`]. Ctrl-C during
//! an answer is the generation's business: the answer then ends where it stands, and stays a turn of the conversation.

use std::io::{ErrorKind, Write};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use gemma4c_runtime::engine::Finish;
use gemma4c_serve::Speech;

use super::conversation::Conversation;
use super::input::{Input, Line, Wanted};
use super::screen::Screen;
use crate::commands::answer::Answer;
use crate::commands::generation::Generation;
use crate::commands::media::{MediaArgs, Sense};
use crate::commands::tokenize::LONGEST_PROMPT;
use crate::output::{self, OutputFile};
use crate::reader::Reader;

/// Begins and ends a text of several lines.
const FENCE: &str = "\"\"\"";

const HELP: &str = r#"/help         show this list
/exit         leave, as Ctrl-D does
/system TEXT  set the system prompt; without TEXT remove it
/regenerate   answer the last question again
/save FILE    write the conversation to a new file: JSON messages if its name ends in .json, else text
/image FILE   put a picture before the next question
/audio FILE   put a sound before the next question
"""           begin a text of several lines, which the next """ ends
Ctrl-C        stop an answer; what was written stays part of the conversation"#;

/// How a chat answers.
pub struct Chat<'a> {
    pub generation: &'a mut Generation,
    pub speech: &'a Speech,
    pub media: &'a MediaArgs,
    pub conversation: Conversation,
    /// Stop strings.
    pub stop: Vec<String>,
    /// Answers are JSON, one a line.
    pub json: bool,
    /// Somebody reads along, who can correct what went wrong.
    pub is_interactive: bool,
    pub screen: Screen<'a>,
}

/// Whether a chat goes on.
#[derive(PartialEq, Eq)]
enum Next {
    Line,
    Leave,
}

impl Chat<'_> {
    /// Until its input ends or somebody leaves.
    pub fn run(&mut self, input: &mut dyn Input) -> Result<()> {
        loop {
            let next = match input.line(Wanted::Question)? {
                Line::End => Next::Leave,
                Line::Interrupted => {
                    self.screen.note("[/exit or Ctrl-D leaves, /help lists commands]")?;
                    Next::Line
                }
                Line::Text(line) => self.read(line.trim(), input)?,
            };
            if next == Next::Leave {
                return Ok(());
            }
        }
    }

    fn read(&mut self, line: &str, input: &mut dyn Input) -> Result<Next> {
        if let Some(first) = line.strip_prefix(FENCE) {
            if let Some(text) = self.fenced(first, input)? {
                self.ask(text.trim_matches('\n'))?;
            }
        } else if line.starts_with('/') {
            if line == "/exit" {
                return Ok(Next::Leave);
            }
            match self.command(line) {
                // A mistyped command does not end a conversation.
                Err(Failure::Said(error)) => self.screen.error(&error)?,
                Err(Failure::Fatal(error)) => return Err(error),
                Ok(()) => {}
            }
        } else {
            self.ask(line)?;
        }
        Ok(Next::Line)
    }

    /// The lines up to the closing fence; nothing, if they were given up.
    fn fenced(&mut self, first: &str, input: &mut dyn Input) -> Result<Option<String>> {
        let mut text = first.to_owned();
        loop {
            if let Some(text) = text.trim_end().strip_suffix(FENCE) {
                return Ok(Some(text.to_owned()));
            }
            let line = input.line(Wanted::More)?;
            match line {
                Line::Text(line) => {
                    ensure!(
                        ((text.len() + line.len()) as u64) < LONGEST_PROMPT,
                        "a text between {FENCE} has more than {LONGEST_PROMPT} bytes"
                    );
                    text.push('\n');
                    text.push_str(&line);
                }
                Line::End if !self.is_interactive => bail!("the text that {FENCE} began has no {FENCE} at its end"),
                Line::Interrupted | Line::End => {
                    self.screen.note("[the text was dropped]")?;
                    return Ok(None);
                }
            }
        }
    }

    /// Answers a question, which becomes a turn of the conversation.
    fn ask(&mut self, question: &str) -> Result<()> {
        if question.trim().is_empty() {
            return Ok(());
        }
        self.conversation.ask(question);
        match self.reply()? {
            Some(answer) => self.keep(answer),
            None => {
                self.conversation.take_back();
                self.screen.note("[the question was dropped]")?;
            }
        }
        Ok(())
    }

    fn keep(&mut self, answer: String) {
        if let Some(turn) = self.conversation.turns.last_mut() {
            turn.answer = Some(answer);
        }
    }

    /// The answer to the last question; nothing, if it was refused or stopped before it began.
    fn reply(&mut self) -> Result<Option<String>> {
        let generation = &mut *self.generation;
        // An interruption from before the question is not meant for its answer.
        (generation.is_interrupted)();
        let plan = generation.session.plan();
        // An answer should not be cut soon after it began.
        let wanted = generation.most.min(plan.program.context / 4);
        let prompt = match self.conversation.prompt(self.speech, plan, wanted) {
            Ok(prompt) => prompt,
            Err(error) if self.is_interactive => {
                self.screen.error(&error)?;
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        if prompt.dropped > 0 {
            self.conversation.drop_oldest(prompt.dropped);
            let (context, what) = (plan.program.context, turns(prompt.dropped));
            self.screen.note(&format!("[the context of {context} positions is full: the oldest {what} dropped]"))?;
        }
        generation.session.set_soft(&prompt.ids, self.conversation.soft())?;
        let reader = Reader::chat(self.speech, &prompt.ids, &self.stop);
        let (screen, json) = (&mut self.screen, self.json);
        let answer = generation.write(&prompt.ids, reader, &mut |piece| {
            if json { Ok(()) } else { screen.show(piece) }
        })?;
        self.report(&answer)?;
        let is_empty = answer.finish == Finish::Cancelled && answer.text.is_empty();
        Ok((!is_empty).then_some(answer.text))
    }

    fn report(&mut self, answer: &Answer) -> Result<()> {
        self.screen.end_thoughts()?;
        match self.json {
            true => {
                let seed = self.generation.sampled_by();
                self.screen.print(&format!("{}\n", answer.json(Some(&answer.text), seed)))?;
            }
            false => self.screen.print("\n")?,
        }
        if answer.finish == Finish::Cancelled {
            self.screen.note("[stopped]")?;
        }
        for line in answer.speed.lines() {
            self.screen.note(&line)?;
        }
        Ok(())
    }

    fn command(&mut self, line: &str) -> Result<(), Failure> {
        let (name, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let rest = rest.trim();
        let file = || match rest {
            "" => bail!("{name} needs a file: {name} FILE"),
            path => Ok(Path::new(path)),
        };
        match name {
            "/system" => {
                self.conversation.system = Some(rest.to_owned()).filter(|text| !text.is_empty());
                let what = if rest.is_empty() { "there is no system prompt" } else { "the system prompt is set" };
                self.screen.note(&format!("[{what}]")).map_err(Failure::Fatal)
            }
            "/save" => {
                let path = file()?;
                self.save(path)?;
                self.screen.note(&format!("[wrote {}]", path.display())).map_err(Failure::Fatal)
            }
            "/image" => Ok(self.attach(Sense::Sight, file()?)?),
            "/audio" => Ok(self.attach(Sense::Hearing, file()?)?),
            "/help" | "/regenerate" if !rest.is_empty() => Err(anyhow::anyhow!("{name} takes nothing else").into()),
            "/help" => self.screen.note(HELP).map_err(Failure::Fatal),
            "/regenerate" => self.regenerate(),
            _ => Err(anyhow::anyhow!(
                "there is no command {name}; /help lists them. A question that begins with / goes between {FENCE}"
            )
            .into()),
        }
    }

    fn attach(&mut self, sense: Sense, path: &Path) -> Result<()> {
        let item = self.media.read_one(self.generation.session.plan(), sense, path)?;
        let soft = item.look(&mut self.generation.session, None)?;
        self.conversation.attach(item, soft);
        Ok(())
    }

    /// Another answer to the last question, by another seed. The old one stays until there is a new one.
    fn regenerate(&mut self) -> Result<(), Failure> {
        let Some(turn) = self.conversation.turns.last_mut() else {
            return Err(anyhow::anyhow!("there is no answer yet").into());
        };
        let before = turn.answer.take();
        if let Some(seed) = self.generation.sampled_by() {
            let seed = seed.wrapping_add(1);
            self.generation.sampler.set_seed(seed);
            self.screen.note(&format!("[seed {seed}]")).map_err(Failure::Fatal)?;
        }
        match self.reply().map_err(Failure::Fatal)? {
            Some(answer) => self.keep(answer),
            None => {
                self.keep(before.unwrap_or_default());
                self.screen.note("[the answer stays as it was]").map_err(Failure::Fatal)?;
            }
        }
        Ok(())
    }

    /// Writes the conversation to a file that was not there.
    fn save(&self, path: &Path) -> Result<()> {
        let text = match path.extension().is_some_and(|extension| extension == "json") {
            true => format!("{:#}\n", self.conversation.json()),
            false => self.conversation.text(),
        };
        let cannot_write = || format!("cannot write {}", path.display());
        let mut file = output::new_file(&OutputFile::from(path.to_path_buf()))?;
        file.write_all(text.as_bytes()).with_context(cannot_write)?;
        match file.persist_noclobber(path) {
            Err(error) if error.error.kind() == ErrorKind::AlreadyExists => {
                bail!("{} is there already: give another name", path.display())
            }
            persisted => persisted.map(drop).with_context(cannot_write),
        }
    }
}

/// Why a command did not do what it should.
enum Failure {
    /// The person is told, and the chat goes on.
    Said(anyhow::Error),
    /// Nothing can be shown or computed any more.
    Fatal(anyhow::Error),
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Failure {
        Failure::Said(error)
    }
}

fn turns(count: usize) -> String {
    if count == 1 { "turn was".into() } else { format!("{count} turns were") }
}
