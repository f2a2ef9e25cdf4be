//! Answers: one that is read as it comes, and many that are computed together.

use std::collections::{BTreeMap, VecDeque};

use gemma4c_runtime::engine::{Device, Engine, Event, Finish, Id, Request};

use super::interrupt::Interrupt;
use crate::error::Error;
use crate::reader::{Reader, Shown};

/// An engine over whatever device runs the plan.
pub(crate) type AnyEngine = Engine<Box<dyn Device>>;

/// An answer.
///
/// ```
/// use gemma4c::{Finish, Model, Sampling};
///
/// # fn main() -> Result<(), gemma4c::Error> {
/// # let folder = tempfile::tempdir().unwrap();
/// # let mut model = Model::compile(gemma4c::demo_model(folder.path())?).cpu().open()?;
/// let answer = model.generate("She was", &Sampling::greedy().max_tokens(8))?;
/// assert_eq!(answer.tokens.len(), 8);
/// assert_eq!(answer.finish, Finish::Length);
/// assert_eq!(answer.text, model.detokenize(&answer.tokens)?);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Completion {
    /// The text, up to a stop string; empty where the model has no vocabulary.
    pub text: String,
    /// What the model thought before it answered, in a conversation.
    pub thoughts: String,
    /// The tools that it calls, in a conversation with tools.
    pub calls: Vec<Call>,
    /// All tokens that were generated, without the one that ended the answer.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish: Finish,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
}

/// A call of a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// The tool's name.
    pub name: String,
    /// A JSON object; of an answer that was cut, as far as it came.
    pub arguments: String,
}

/// A prompt, and how the tokens after it become text: not at all without a vocabulary.
pub(crate) struct Job<'a> {
    pub request: Request,
    pub reader: Option<Reader<'a>>,
}

/// An answer that is being written.
struct Running<'a> {
    reader: Option<Reader<'a>>,
    answer: Completion,
}

impl<'a> Running<'a> {
    fn new(prompt_tokens: usize, reader: Option<Reader<'a>>) -> Running<'a> {
        let (text, thoughts, calls, tokens) = Default::default();
        let answer = Completion { text, thoughts, calls, tokens, finish: Finish::Cancelled, prompt_tokens };
        Running { reader, answer }
    }

    /// Adds a token; returns the text that it adds, and whether a stop string has come.
    fn push(&mut self, token: u32) -> Result<(String, bool), Error> {
        self.answer.tokens.push(token);
        let Some(reader) = &mut self.reader else { return Ok((String::new(), false)) };
        let (shown, has_stopped) = reader.push(token)?;
        Ok((self.add(shown), has_stopped))
    }

    /// Ends the answer; returns the text that was held back.
    fn finish(&mut self, finish: Finish, has_stopped: bool) -> String {
        self.answer.finish = finish;
        match self.reader.take() {
            Some(reader) => self.add(reader.finish(finish, has_stopped)),
            None => String::new(),
        }
    }

    fn add(&mut self, shown: Vec<Shown>) -> String {
        let mut added = String::new();
        for piece in shown {
            match piece {
                Shown::Text(text) => added += &text,
                Shown::Thought(text) => self.answer.thoughts += &text,
                Shown::Call(name) => self.answer.calls.push(Call { name, arguments: String::new() }),
                Shown::Arguments(text) => {
                    if let Some(call) = self.answer.calls.last_mut() {
                        call.arguments += &text;
                    }
                }
            }
        }
        self.answer.text += &added;
        added
    }
}

/// An answer as it comes: an iterator over pieces of its text, which together are [`Completion::text`].
///
/// Nothing is computed while nobody asks for the next piece. An answer that is dropped half-way ends there.
///
/// ```
/// use gemma4c::{Model, Sampling};
///
/// # fn main() -> Result<(), gemma4c::Error> {
/// # let folder = tempfile::tempdir().unwrap();
/// # let mut model = Model::compile(gemma4c::demo_model(folder.path())?).cpu().open()?;
/// let mut text = String::new();
/// for piece in model.stream("She was", &Sampling::greedy().max_tokens(8))? {
///     text += &piece?;
/// }
/// assert_eq!(text, model.generate("She was", &Sampling::greedy().max_tokens(8))?.text);
///
/// let mut answer = model.stream("She was", &Sampling::greedy().max_tokens(8))?;
/// let first = answer.next().unwrap()?;
/// assert!(text.starts_with(&first));
/// assert_eq!(answer.complete()?.text, text);
/// # Ok(())
/// # }
/// ```
pub struct Stream<'a> {
    engine: &'a mut AnyEngine,
    id: Id,
    running: Running<'a>,
    pieces: VecDeque<String>,
    has_ended: bool,
    interrupt: Interrupt,
}

impl<'a> Stream<'a> {
    pub(crate) fn new(engine: &'a mut AnyEngine, job: Job<'a>, interrupt: Interrupt) -> Result<Stream<'a>, Error> {
        let running = Running::new(job.request.prompt.len(), job.reader);
        let id = engine.submit(job.request)?;
        Ok(Stream { engine, id, running, pieces: VecDeque::new(), has_ended: false, interrupt })
    }

    /// The whole answer, computed to its end.
    pub fn complete(mut self) -> Result<Completion, Error> {
        while !self.has_ended {
            self.step()?;
        }
        Ok(self.running.answer.clone())
    }

    /// Takes the engine one step on.
    fn step(&mut self) -> Result<(), Error> {
        self.interrupt.check()?;
        let stepped = self.engine.step();
        self.has_ended = stepped.is_err();
        for event in stepped?.into_iter().filter(|event| event.id() == self.id) {
            if self.has_ended {
                break;
            }
            let added = match event {
                Event::Token { token, .. } => {
                    let (mut text, has_stopped) = self.running.push(token)?;
                    if has_stopped {
                        self.engine.cancel(self.id);
                        self.has_ended = true;
                        text += &self.running.finish(Finish::Stop, true);
                    }
                    text
                }
                Event::Finished { reason, .. } => {
                    self.has_ended = true;
                    self.running.finish(reason, false)
                }
                Event::Failed { error, .. } => {
                    self.has_ended = true;
                    return Err(error.into());
                }
                Event::Admitted { .. } | Event::Prompt { .. } | Event::Drafted { .. } => String::new(),
            };
            self.pieces.extend(Some(added).filter(|text| !text.is_empty()));
        }
        Ok(())
    }
}

impl Iterator for Stream<'_> {
    type Item = Result<String, Error>;

    fn next(&mut self) -> Option<Result<String, Error>> {
        while self.pieces.is_empty() && !self.has_ended {
            if let Err(error) = self.step() {
                return Some(Err(error));
            }
        }
        self.pieces.pop_front().map(Ok)
    }
}

impl Drop for Stream<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            self.engine.cancel(self.id);
        }
    }
}

/// What is told of answers that are computed together.
pub(crate) enum News {
    /// So many tokens of a prompt are read: without those that were kept from another.
    Reads(u64),
    /// A token has come.
    Token,
    /// The answer to a prompt, by its number.
    Answer(usize, Completion),
    /// A prompt that could not be answered.
    Failed(usize, Error),
    /// The engine has taken a step.
    Step,
}

/// Answers all prompts, as many together as the engine runs; `tell` hears of each answer when it ends, in any order.
/// After an error nothing of them is left in the engine.
pub(crate) fn answer_all<'a, E: From<Error>>(
    engine: &mut AnyEngine,
    jobs: impl Iterator<Item = Job<'a>>,
    tell: &mut dyn FnMut(News) -> Result<(), E>,
) -> Result<(), E> {
    let mut running = BTreeMap::new();
    let answered = answer_running(engine, jobs, &mut running, tell);
    for id in running.into_keys() {
        engine.cancel(id);
    }
    answered
}

fn answer_running<'a, E: From<Error>>(
    engine: &mut AnyEngine,
    jobs: impl Iterator<Item = Job<'a>>,
    running: &mut BTreeMap<Id, (usize, Running<'a>)>,
    tell: &mut dyn FnMut(News) -> Result<(), E>,
) -> Result<(), E> {
    let mut jobs = jobs.enumerate();
    let ahead = 2 * engine.limits().slots as usize;
    loop {
        for (index, Job { request, reader }) in jobs.by_ref().take(ahead.saturating_sub(running.len())) {
            let answer = Running::new(request.prompt.len(), reader);
            let id = engine.submit(request).map_err(Error::from)?;
            running.insert(id, (index, answer));
        }
        if running.is_empty() {
            return Ok(());
        }
        for event in engine.step().map_err(Error::from)? {
            let id = event.id();
            // One that a stop string ended has been told already.
            let Some((index, answer)) = running.get_mut(&id) else { continue };
            match event {
                Event::Admitted { cached, .. } => {
                    tell(News::Reads(answer.answer.prompt_tokens as u64 - u64::from(cached)))?;
                }
                Event::Prompt { .. } | Event::Drafted { .. } => {}
                Event::Token { token, .. } => {
                    let (_, has_stopped) = answer.push(token)?;
                    tell(News::Token)?;
                    if has_stopped {
                        engine.cancel(id);
                        answer.finish(Finish::Stop, true);
                        tell(News::Answer(*index, answer.answer.clone()))?;
                        running.remove(&id);
                    }
                }
                Event::Finished { reason, .. } => {
                    answer.finish(reason, false);
                    tell(News::Answer(*index, answer.answer.clone()))?;
                    running.remove(&id);
                }
                Event::Failed { error, .. } => tell(News::Failed(*index, error.into()))?,
            }
        }
        tell(News::Step)?;
    }
}
