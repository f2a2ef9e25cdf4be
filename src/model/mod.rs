//! A model that other programs use: compiled or opened, asked for one answer or many, for tokens and for logits.
//!
//! All of it goes through the engine that `serve` and `run --file` use, so an answer depends on its prompt and its
//! settings alone. Pictures and sound are not here.

mod compiler;
pub(crate) mod completion;
mod demo;
mod interrupt;
mod numbers;
mod opener;
mod prompt;
mod sampling;

use std::fmt;
use std::path::{Path, PathBuf};

use gemma4c_models::chat;
use gemma4c_models::tokenizer::{EncodeOptions, Tokenizer};
use gemma4c_plan::Plan;
use gemma4c_runtime::engine::{DraftSource, Drafts, Request};
use gemma4c_runtime::{ModelLocation, Session};
use gemma4c_serve::{Dialogue, Speech};
use serde_json::Map;

use crate::by_name::{self, Beside};
use crate::device::{Device, EngineOptions, Place};
use crate::error::Error;
use crate::reader::Reader;
use crate::{files, progress};
pub use compiler::Compiler;
use completion::{AnyEngine, Job, News, answer_all};
pub use completion::{Call, Completion, Stream};
pub(crate) use demo::{DRAFTER, MODEL};
pub use demo::{demo_drafter, demo_model};
pub use interrupt::Interrupt;
pub use numbers::{HiddenStates, Perplexity};
pub use opener::Opener;
pub use prompt::{Conversation, Message, Prompt};
pub use sampling::Sampling;

/// A model with its weights, ready to answer.
///
/// ```
/// use gemma4c::{Model, Sampling};
///
/// # fn main() -> Result<(), gemma4c::Error> {
/// # let folder = tempfile::tempdir().unwrap();
/// # let gguf = gemma4c::demo_model(folder.path())?;
/// let mut model = Model::compile(gguf).cpu().open()?;
/// let answer = model.generate("\"Tell me, Mr. Darcy,\" said Elizabeth,", &Sampling::greedy().max_tokens(12))?;
/// println!("{}", answer.text);
/// # assert_eq!(answer.tokens.len(), 12);
/// # Ok(())
/// # }
/// ```
pub struct Model {
    engine: AnyEngine,
    /// `None` without a vocabulary.
    speech: Option<Speech>,
    plan: Plan,
    location: ModelLocation,
    /// For what a device does not show, once that is asked for.
    on_cpu: Option<Session>,
    interrupt: Interrupt,
}

/// How a plan is loaded.
struct Loading {
    device: Device,
    /// `None`: as many as the plan was compiled for.
    sequences: Option<u32>,
    is_drafted: bool,
    is_quiet: bool,
}

impl Loading {
    fn on(device: Device) -> Loading {
        Loading { device, sequences: None, is_drafted: true, is_quiet: true }
    }
}

impl Model {
    /// Begins to compile a GGUF file; of a split model, any of its parts.
    pub fn compile(gguf: impl Into<PathBuf>) -> Compiler {
        Compiler::new(gguf.into())
    }

    /// Begins to compile a model by its name on Hugging Face's hub, with the drafter that is beside it: a repository,
    /// and after a colon a quantisation if not the best that fits this machine. What is not in the cache is fetched.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), gemma4c::Error> {
    /// let mut model = gemma4c::Model::pull("ggml-org/gemma-4-E4B-it-GGUF:Q8_0")?.open()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn pull(name: &str) -> Result<Compiler, Error> {
        let parsed = by_name::name(Path::new(name));
        let parsed =
            parsed.ok_or_else(|| Error::Option(format!("{name} is not the name of a model: user/repository is")))?;
        let beside = Beside { projector: false, drafter: true };
        let brought = by_name::bring(&parsed, Device::Auto, beside, &mut |_| {})?;
        let compiler = Compiler::new(brought.model);
        Ok(brought.drafter.into_iter().fold(compiler, Compiler::drafter))
    }

    /// Opens a plan that [`Compiler::write`] or `gemma4c compile` has written, on the device that it was compiled for;
    /// on the CPU if there is no GPU. Its model is looked for where it was, and beside the plan.
    pub fn open(plan: impl AsRef<Path>) -> Result<Model, Error> {
        Model::open_on(plan, Device::Auto)
    }

    /// The same on a device of your choice. Of several GPUs it is the first that `CUDA_VISIBLE_DEVICES` leaves visible.
    pub fn open_on(plan: impl AsRef<Path>, device: Device) -> Result<Model, Error> {
        let path = plan.as_ref();
        Model::load(files::read_plan(path)?, path.into(), Loading::on(device))
    }

    fn load(plan: Plan, path: PathBuf, loading: Loading) -> Result<Model, Error> {
        let Loading { device, sequences, is_drafted, is_quiet } = loading;
        let speech = plan.vocab.as_ref().map(|_| Speech::new(&plan)).transpose()?;
        let suppress = speech.as_ref().map(|speech| speech.suppress.clone()).unwrap_or_default();
        let has_drafter = is_drafted && plan.drafter.is_some();
        let source = if has_drafter { DraftSource::Drafter } else { DraftSource::Nowhere };
        let drafts = Drafts { source, steps: None };
        let options = EngineOptions { sequences, suppress, drafts, ..EngineOptions::default() };
        let location = ModelLocation { plan: path, given: None };
        let place = Place { location: location.clone(), device, ..Place::default() };
        let bar = progress::bytes("loading", 0);
        let engine = place.open_engine(plan.clone(), options, &mut |told| {
            if !is_quiet {
                progress::show_loading(&bar, told);
            }
        });
        bar.finish_and_clear();
        Ok(Model { engine: engine?, speech, plan, location, on_cpu: None, interrupt: Interrupt::default() })
    }

    /// From here on what this model computes ends with [`Error::Interrupted`] once somebody sets the interrupt.
    pub fn interrupt_by(&mut self, interrupt: Interrupt) {
        self.interrupt = interrupt;
    }

    /// The device's name: `cpu`, or what the driver calls the GPU.
    pub fn device(&self) -> String {
        self.engine.device().name()
    }

    /// Positions that a sequence may have, its prompt and its answer together.
    pub fn context(&self) -> u32 {
        self.plan.program.context
    }

    /// Sequences that are computed at once, at most.
    pub fn sequences(&self) -> u32 {
        self.engine.limits().rows
    }

    /// Tokens of the vocabulary: as many as a row of logits has numbers.
    pub fn vocab_size(&self) -> u32 {
        self.plan.model.vocab_size
    }

    /// The answer to a prompt: a text, tokens, or the messages of a conversation.
    ///
    /// ```
    /// use gemma4c::{Message, Model, Sampling};
    ///
    /// # fn main() -> Result<(), gemma4c::Error> {
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let mut model = Model::compile(gemma4c::demo_model(folder.path())?).cpu().open()?;
    /// let sampling = Sampling::default().temperature(0.7).seed(3).max_tokens(40).stop("\n");
    /// let answer = model.generate("The carriage", &sampling)?;
    /// assert!(!answer.text.contains('\n'));
    /// // The same prompt as tokens, and the same seed: the same answer.
    /// let tokens = model.tokenize("The carriage")?;
    /// assert_eq!(model.generate(tokens, &sampling)?, answer);
    /// // A conversation, for models that were taught to chat.
    /// let chat = vec![Message::system("Be brief."), Message::user("Who wrote Emma?")];
    /// println!("{}", model.generate(chat, &sampling)?.text);
    /// # Ok(())
    /// # }
    /// ```
    pub fn generate(&mut self, prompt: impl Into<Prompt>, sampling: &Sampling) -> Result<Completion, Error> {
        self.stream(prompt, sampling)?.complete()
    }

    /// The answer to a prompt as it comes.
    pub fn stream(&mut self, prompt: impl Into<Prompt>, sampling: &Sampling) -> Result<Stream<'_>, Error> {
        let asker = Asker { speech: self.speech.as_ref(), default: self.plan.sampling, sampling };
        let job = asker.job(prompt.into())?;
        Stream::new(&mut self.engine, job, self.interrupt.clone())
    }

    /// The answers to many prompts, in their order. They are computed together, which takes far less time than one
    /// after another; each is as if it were alone.
    ///
    /// ```
    /// use gemma4c::{Model, Sampling};
    ///
    /// # fn main() -> Result<(), gemma4c::Error> {
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let mut model = Model::compile(gemma4c::demo_model(folder.path())?).cpu().open()?;
    /// let sampling = Sampling::greedy().max_tokens(6);
    /// let answers = model.generate_many(["The carriage", "Her sister", "Mr. Knightley"], &sampling)?;
    /// assert_eq!(answers.len(), 3);
    /// assert_eq!(answers[1], model.generate("Her sister", &sampling)?);
    /// # Ok(())
    /// # }
    /// ```
    pub fn generate_many<P: Into<Prompt>>(
        &mut self,
        prompts: impl IntoIterator<Item = P>,
        sampling: &Sampling,
    ) -> Result<Vec<Completion>, Error> {
        let asker = Asker { speech: self.speech.as_ref(), default: self.plan.sampling, sampling };
        let jobs = prompts.into_iter().map(|prompt| asker.job(prompt.into())).collect::<Result<Vec<_>, _>>()?;
        // What cannot be answered is refused before anything is computed.
        for job in &jobs {
            self.engine.check(&job.request)?;
        }
        let mut answers: Vec<Option<Completion>> = vec![None; jobs.len()];
        answer_all(&mut self.engine, jobs.into_iter(), &mut |news| match news {
            News::Answer(index, answer) => {
                answers[index] = Some(answer);
                Ok(())
            }
            News::Failed(_, error) => Err(error),
            News::Step => self.interrupt.check(),
            News::Reads(_) | News::Token => Ok(()),
        })?;
        Ok(answers.into_iter().flatten().collect())
    }

    /// The logits after each of these tokens: as many rows as tokens, each as long as the vocabulary.
    ///
    /// ```
    /// use gemma4c::{Model, Sampling};
    ///
    /// # fn main() -> Result<(), gemma4c::Error> {
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let mut model = Model::compile(gemma4c::demo_model(folder.path())?).cpu().open()?;
    /// let tokens = model.tokenize("She was")?;
    /// let rows = model.logits(&tokens)?;
    /// assert_eq!(rows.len(), tokens.len());
    /// let largest = (0..model.vocab_size()).max_by(|a, b| rows[rows.len() - 1][*a as usize].total_cmp(&rows[rows.len() - 1][*b as usize]));
    /// assert_eq!(largest, Some(model.generate(tokens, &Sampling::greedy().max_tokens(1))?.tokens[0]));
    /// # Ok(())
    /// # }
    /// ```
    pub fn logits(&mut self, tokens: &[u32]) -> Result<Vec<Vec<f32>>, Error> {
        let mut rows = Vec::with_capacity(tokens.len());
        self.each_row(tokens, &mut |row| {
            rows.push(row);
            Ok(())
        })?;
        Ok(rows)
    }

    /// The ids of a text, behind the one that begins a sequence: what the model reads where it is given the text.
    /// Markers in it are text.
    ///
    /// ```
    /// # fn main() -> Result<(), gemma4c::Error> {
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let model = gemma4c::Model::compile(gemma4c::demo_model(folder.path())?).cpu().open()?;
    /// let tokens = model.tokenize("She was")?;
    /// assert_eq!(model.detokenize(&tokens)?, "She was");
    /// # Ok(())
    /// # }
    /// ```
    pub fn tokenize(&self, text: &str) -> Result<Vec<u32>, Error> {
        Ok(plain(&self.speech()?.tokenizer, text))
    }

    /// The text of tokens, without control tokens.
    pub fn detokenize(&self, tokens: &[u32]) -> Result<String, Error> {
        Ok(self.speech()?.tokenizer.decode(tokens, false)?)
    }

    /// A conversation as the model's chat template writes it, up to where the answer begins.
    ///
    /// ```
    /// use gemma4c::Message;
    ///
    /// # fn main() -> Result<(), gemma4c::Error> {
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let model = gemma4c::Model::compile(gemma4c::demo_model(folder.path())?).cpu().open()?;
    /// let prompt = model.format_chat(&[Message::user("Who wrote Emma?")])?;
    /// assert!(prompt.contains("<|turn>user\nWho wrote Emma?<turn|>"));
    /// # Ok(())
    /// # }
    /// ```
    pub fn format_chat(&self, messages: &[Message]) -> Result<String, Error> {
        render(self.speech()?, messages, &str::to_owned)
    }

    fn speech(&self) -> Result<&Speech, Error> {
        self.speech.as_ref().ok_or(Error::NoVocabulary)
    }
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Model")
            .field("device", &self.device())
            .field("context", &self.context())
            .finish_non_exhaustive()
    }
}

impl Compiler {
    /// Compiles in memory, and opens what was compiled.
    pub fn open(&self) -> Result<Model, Error> {
        let (plan, _) = self.compile(self.folder())?;
        // The plan is in no file; what it names is found from the model's folder.
        Model::load(plan, self.folder().join("plan.bin"), Loading::on(Device::Auto))
    }
}

fn plain(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode(text, EncodeOptions { add_bos: true, parse_special: false })
}

/// A conversation through the chat template, with its texts as `quote` leaves them.
fn render(speech: &Speech, messages: &[Message], quote: &dyn Fn(&str) -> String) -> Result<String, Error> {
    let template = speech.template.as_ref().ok_or(Error::NoChatTemplate)?;
    let message = |Message { role, text }: &Message| chat::Message::new(role.as_str(), quote(text));
    let messages: Vec<chat::Message> = messages.iter().map(message).collect();
    Ok(template.render(&messages, &[], true, &Map::new())?)
}

/// Makes requests of prompts.
struct Asker<'m, 's> {
    speech: Option<&'m Speech>,
    /// The plan's rule.
    default: gemma4c_plan::Sampling,
    sampling: &'s Sampling,
}

impl<'m> Asker<'m, '_> {
    fn job(&self, prompt: Prompt) -> Result<Job<'m>, Error> {
        let stop = &self.sampling.stop;
        let speech = || self.speech.ok_or(Error::NoVocabulary);
        if !stop.is_empty() {
            speech()?;
        }
        let of_text = self.speech.map(|speech| Reader::plain(&speech.tokenizer, stop));
        let (ids, reader, snapshot_at) = match prompt {
            Prompt::Tokens(ids) => (ids, of_text, Vec::new()),
            Prompt::Text(text) => (plain(&speech()?.tokenizer, &text), of_text, Vec::new()),
            Prompt::Chat(messages) => {
                let speech = speech()?;
                let text = render(speech, &messages, &|text| speech.tokenizer.quote(text))?;
                let ids = speech.tokenizer.encode_rendered(&text);
                let has_system = messages.first().is_some_and(|message| message.role == "system");
                let snapshots = speech.snapshots(&ids, has_system);
                let reader = Reader::chat(speech, &ids, stop);
                (ids, Some(reader), snapshots)
            }
            Prompt::Conversation(Conversation { messages, tools, thinking }) => {
                let speech = speech()?;
                speech.template.as_ref().ok_or(Error::NoChatTemplate)?;
                let mut dialogue = Dialogue::read(speech, &messages, &tools, thinking)?;
                let ids = std::mem::take(&mut dialogue.prompt);
                let snapshots = std::mem::take(&mut dialogue.snapshot_at);
                (ids, Some(Reader::dialogue(speech, &dialogue, stop)), snapshots)
            }
        };
        let request = Request {
            most: self.sampling.max_tokens,
            sampling: self.sampling.rule(self.default),
            seed: self.sampling.seed_or_any(),
            stop: self.speech.map(|speech| speech.stop.clone()).unwrap_or_default(),
            snapshot_at,
            ..Request::greedy(ids, 0)
        };
        Ok(Job { request, reader })
    }
}
