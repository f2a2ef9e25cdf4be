//! `gemma4c run`: text from a plan. One answer, a chat, or the answers to a file of prompts.

mod chat;
mod conversation;
mod input;
mod screen;
#[cfg(test)]
mod tests;

use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail, ensure};
use gemma4c_models::tokenizer::{EncodeOptions, Tokenizer};
use gemma4c_plan::Vocab;
use gemma4c_runtime::Soft;
use gemma4c_serve::Speech;

use super::Outcome;
use super::batch::{self, Batch, Defaults};
use super::cached::{ModelArgs, Needs};
use super::generation::{DraftArg, Generation, PenaltyArgs, SamplingArgs, Unseeded, most_tokens};
use super::lora::LoraArgs;
use super::media::{Media, MediaArgs};
use super::plan_file::{EngineArgs, PlanArgs};
use super::tokenize::{parse_ids, read_prompt};
use crate::output::{self, OutputFile};
use crate::reader::{Reader, Shown};
use chat::Chat;
use conversation::Conversation;
use input::{Input, Lines, Terminal};
use screen::Screen;

/// Generate text.
///
/// With -p the text is continued as it stands; without it, the text is standard input. With --chat it is a question:
/// the model's own chat template is put around it, which is what instruction-tuned models need. A chat begins where
/// there is no question: at a terminal with editing and history (/help lists its commands), else with a question a
/// line. With --file many prompts are answered together, each as if it were alone. A GGUF model, or the name
/// of one such as ggml-org/gemma-4-E4B-it-GGUF, will do instead of a plan: it is compiled for this machine, once.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    plan: PlanArgs,

    /// The text to continue, or with --chat the question; - is standard input [default: standard input, or a chat at a
    /// terminal]
    #[arg(short, long, value_name = "TEXT", conflicts_with = "tokens")]
    prompt: Option<String>,

    /// Token ids to continue instead of a text. Ids are printed, and no token is suppressed. For models without a
    /// vocabulary.
    #[arg(long, value_name = "IDS", conflicts_with_all = ["chat", "system", "thinking", "stop"])]
    tokens: Option<String>,

    /// Tokens to generate at most, -1 for as many as the context has room for; generation ends earlier at a stop token
    /// or a full context.
    #[arg(short = 'n', long, value_name = "N", default_value = "256", value_parser = most_tokens, allow_negative_numbers = true)]
    max_tokens: u32,

    /// End the answer before this text. May be repeated.
    #[arg(long, value_name = "TEXT", conflicts_with = "file", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    stop: Vec<String>,

    // Media stand before the text. With --tokens they take the places that the ids hold for them.
    #[command(flatten)]
    media: MediaArgs,

    #[command(flatten)]
    sampling: SamplingArgs,

    #[command(flatten)]
    penalties: PenaltyArgs,

    /// Guess tokens, which the model then verifies several at once; the text is the same. auto: by the plan's drafter
    /// (compile --draft) where it has one, as far as that pays; off; ngram: by looking the last tokens up in prompt and
    /// text so far; N: by the drafter, N in a row; FILE: with a GGUF model, by the drafter in this file.
    #[arg(long, value_name = "auto|off|ngram|N|FILE", default_value = "auto", hide_default_value = true)]
    draft: DraftArg,

    /// Talk to an instruction-tuned model through its chat template.
    #[arg(long)]
    chat: bool,

    /// The system prompt. Implies that the text is a question, as --chat does.
    #[arg(long, value_name = "TEXT", conflicts_with = "file")]
    system: Option<String>,

    /// Let the model think before it answers, and show its thoughts on standard error. Implies that the text is a
    /// question.
    #[arg(long, conflicts_with = "file")]
    thinking: bool,

    /// Print the answer as one JSON object: `tokens`, `text`, `finish_reason`, `seed`, `prompt_tokens`, `timings`; of a
    /// chat one a line.
    #[arg(long, conflicts_with = "file")]
    json: bool,

    /// Prompts to answer, one JSON object a line, - for standard input: with `prompt`, `messages` or `tokens`, and if
    /// wanted `max_tokens`, `temperature`, `top_k`, `top_p`, `seed`, `stop`, `ignore_eos`.
    #[arg(long, value_name = "PROMPTS.jsonl", requires = "output", conflicts_with_all = ["prompt", "tokens", "chat"])]
    file: Option<PathBuf>,

    /// Write the answer to this file; - is standard output. With --file: the answers, one line for each prompt in their
    /// order; answers that are there already are kept.
    #[arg(short, long, value_name = "FILE")]
    output: Option<OutputFile>,

    /// With --file: begin anew, and replace the answers that are there.
    #[arg(long, requires = "file")]
    restart: bool,

    /// With --file: how many are worked on at once, at most: as many as there are pages of keys and values for [default:
    /// what the plan was compiled for, which of a GGUF model is 128; 8 on a CPU]
    #[arg(long, value_name = "N", requires = "file")]
    sequences: Option<u32>,

    #[command(flatten)]
    engine: EngineArgs,

    #[command(flatten)]
    lora: LoraArgs,

    #[command(flatten)]
    model: ModelArgs,
}

/// What is to be answered.
enum Task {
    Ids(Vec<u32>),
    /// One text: to continue, or a question.
    Text(String),
    /// Questions that come one after another.
    Chat {
        is_terminal: bool,
    },
}

/// Sequences that a model is compiled for where a file of prompts does not say: as many rows as decode phases have at
/// most, since nobody waits for one answer.
const USUAL_SEQUENCES: u32 = 128;

pub fn run(mut args: Args) -> Result<Outcome> {
    let task = if args.file.is_none() { Some(args.task()?) } else { None };
    let usual = if args.file.is_some() { USUAL_SEQUENCES } else { 1 };
    let needs = Needs {
        sequences: args.sequences.unwrap_or(usual),
        may_be_fewer: args.sequences.is_none(),
        verified: args.draft.verified_rows(),
        drafter: args.draft.file(),
        is_drafted: args.draft.is_by_drafter(),
        adapters: &args.lora.lora,
        seats: None,
        image_tokens: args.media.image_tokens(),
        sharing: 1,
    };
    args.model.resolve(&mut args.plan, &needs)?;
    match (&task, &args.file, &args.output) {
        (Some(task), ..) => args.answer(task)?,
        (None, Some(prompts), Some(answers)) => args.answer_file(prompts, answers)?,
        // clap asks for the output with --file.
        (None, ..) => bail!("--file needs -o, for the answers"),
    }
    Ok(Outcome::Done)
}

impl Args {
    fn answer_file(&self, prompts: &Path, answers: &OutputFile) -> Result<()> {
        ensure!(self.media.is_empty(), "--image and --audio are for one prompt: a file of prompts has none");
        let Args { plan, lora, restart, sequences, engine, draft, .. } = self;
        let (restart, sequences, engine) = (*restart, *sequences, *engine);
        let batch = Batch { plan, lora, prompts, answers, restart, sequences, engine, draft };
        batch::run(&batch, |plan| {
            // A run that goes on where another was cut must have its seed.
            let sampler = self.sampling.sampler(plan.sampling, Vec::new(), Unseeded::Zero)?;
            Ok(Defaults { most: self.max_tokens, sampling: sampler.sampling(), seed: sampler.seed() })
        })
    }

    /// What the flags and standard input ask for. Standard input is read where it is no terminal and no prompt was
    /// given, and before anything is loaded.
    fn task(&self) -> Result<Task> {
        self.engine.refuse_without("--file")?;
        let is_terminal = io::stdin().is_terminal();
        let task = match (&self.tokens, self.prompt.as_deref()) {
            (Some(ids), _) => Task::Ids(parse_ids(ids)?),
            (_, Some("-")) => Task::Text(read_prompt(io::stdin().lock())?),
            (_, Some(text)) => Task::Text(text.into()),
            (_, None) if self.chat || is_terminal => Task::Chat { is_terminal },
            (_, None) => {
                let text = read_prompt(io::stdin().lock())?;
                ensure!(
                    !text.is_empty(),
                    "nothing to do: give a text with -p or on standard input, or talk with --chat"
                );
                Task::Text(text)
            }
        };
        if let Task::Chat { is_terminal } = task {
            ensure!(self.output.is_none(), "-o is for one answer: in a chat, /save FILE writes the conversation");
            ensure!(!(self.json && is_terminal), "--json is for programs: a chat at a terminal has none");
        }
        Ok(task)
    }

    /// Whether texts are questions.
    fn is_chat(&self) -> bool {
        self.chat || self.system.is_some() || self.thinking
    }

    /// Where an answer is written, if not to standard output.
    fn output_file(&self) -> Option<&OutputFile> {
        self.output.as_ref().filter(|path| !path.is_stdout())
    }

    fn answer(&self, task: &Task) -> Result<()> {
        let plan = self.plan.read()?;
        let adapters = self.lora.for_seat(&self.plan, &plan)?;
        let mut session = self.plan.open_read(plan)?;
        adapters.sit(&mut session)?;
        let media = self.media.read(session.plan())?;
        let soft = media.look(&mut session, None)?;
        let vocab = session.plan().vocab.clone();
        // Tokens of other media make no sense in a text; whoever speaks ids gets what the model says.
        let suppress = vocab.as_ref().filter(|_| self.tokens.is_none()).map(|v| v.suppress.clone()).unwrap_or_default();
        let stop = vocab.as_ref().map(|v| v.stop.clone()).unwrap_or_default();
        let mut sampler = self.sampling.sampler(session.plan().sampling, suppress, Unseeded::Random)?;
        sampler.set_penalties(self.penalties.penalties(session.plan())?)?;
        if let Some(why) = session.picks_on_host(&sampler) {
            eprintln!("[tokens are picked on the host, which is slower: {why}]");
        }
        let speculation = self.draft.speculation(session.plan())?;
        let mut generation = Generation::new(session, sampler, stop, self.max_tokens);
        generation.speculation = speculation;
        match (task, vocab) {
            (Task::Ids(ids), vocab) => {
                generation.session.set_soft(ids, &soft)?;
                let tokenizer = vocab.as_ref().map(Tokenizer::new).transpose()?;
                self.answer_once(&mut generation, ids, Reader::ids(), tokenizer.as_ref())
            }
            (_, None) => {
                bail!("the model has no vocabulary, so it cannot read or write text: give token ids with --tokens")
            }
            (Task::Text(text), Some(vocab)) if !self.is_chat() => {
                let tokenizer = Tokenizer::new(&vocab)?;
                let mut ids = tokenizer.encode("", EncodeOptions { add_bos: true, parse_special: false });
                ids.extend(media.tokens(generation.session.plan()));
                ids.extend(tokenizer.encode(text, EncodeOptions { add_bos: false, parse_special: false }));
                generation.session.set_soft(&ids, &soft)?;
                self.answer_once(&mut generation, &ids, Reader::plain(&tokenizer, &self.stop), Some(&tokenizer))
            }
            (task, Some(vocab)) => {
                self.check_template(&vocab)?;
                let speech = Speech::new(generation.session.plan())?;
                self.talk(task, &mut generation, &speech, media, soft)
            }
        }
    }

    /// Says by which seed answers are picked, where nobody gave one.
    fn seed_note(&self, generation: &Generation) -> Option<String> {
        let seed = generation.sampled_by().filter(|_| !self.sampling.has_seed());
        seed.map(|seed| format!("[seed {seed}]"))
    }

    /// A model without a chat template cannot answer questions.
    fn check_template(&self, vocab: &Vocab) -> Result<()> {
        let has_template = vocab.chat_template.is_some();
        ensure!(
            has_template || self.is_chat(),
            "nothing to do: give a text to continue with -p. The model has no chat template, so it cannot chat"
        );
        ensure!(has_template, "the model has no chat template: use -p without --chat, --system and --thinking");
        Ok(())
    }

    /// Writes one answer, to standard output as it comes, or whole.
    fn answer_once(
        &self,
        generation: &mut Generation,
        prompt: &[u32],
        reader: Reader<'_>,
        tokenizer: Option<&Tokenizer>,
    ) -> Result<()> {
        let (mut out, mut notes) = (io::stdout(), io::stderr());
        let mut screen = Screen::new(&mut out, &mut notes);
        let is_ids = matches!(reader, Reader::Ids { .. });
        let streams = !self.json && self.output_file().is_none();
        let mut seed = self.seed_note(generation);
        let answer = generation.write(prompt, reader, &mut |piece| {
            // Not before the first token: what cannot be answered has no seed.
            seed.take().map_or(Ok(()), |note| screen.note(&note))?;
            match piece {
                Shown::Text(_) if !streams => Ok(()),
                Shown::Thought(_) if self.json => Ok(()),
                piece => screen.show(piece),
            }
        })?;
        screen.end_thoughts()?;
        let whole = match self.json {
            true => {
                // Of a prompt of ids the text is what the ids spell, if they spell anything.
                let spelled = tokenizer.filter(|_| is_ids).map(|tokenizer| tokenizer.decode(&answer.tokens, false));
                let text = if is_ids { spelled.transpose()? } else { Some(answer.text.clone()) };
                format!("{}\n", answer.json(text.as_deref(), generation.sampled_by()))
            }
            false if streams => "\n".into(),
            false => format!("{}\n", answer.text),
        };
        match self.output_file() {
            Some(path) => output::write_whole(path, whole.as_bytes())?,
            None => screen.print(&whole)?,
        }
        answer.speed.report();
        Ok(())
    }

    /// Answers one question, or those of a chat.
    fn talk(
        &self,
        task: &Task,
        generation: &mut Generation,
        speech: &Speech,
        media: Media,
        soft: Vec<Soft>,
    ) -> Result<()> {
        let mut conversation = Conversation::new(self.system.clone(), self.thinking, media, soft);
        let is_terminal = match task {
            Task::Chat { is_terminal } => *is_terminal,
            Task::Ids(_) => false,
            Task::Text(question) => {
                conversation.ask(question);
                let prompt = conversation.prompt(speech, generation.session.plan(), 0)?.ids;
                generation.session.set_soft(&prompt, conversation.soft())?;
                let reader = Reader::chat(speech, &prompt, &self.stop);
                return self.answer_once(generation, &prompt, reader, Some(&speech.tokenizer));
            }
        };
        let (mut out, mut notes) = (io::stdout(), io::stderr());
        let mut screen = Screen::new(&mut out, &mut notes);
        self.seed_note(generation).map_or(Ok(()), |note| screen.note(&note))?;
        if is_terminal {
            // From here on Ctrl-C stops an answer, not the program.
            let interrupt = Arc::new(AtomicBool::new(false));
            let listens = signal_hook::flag::register(signal_hook::consts::SIGINT, Arc::clone(&interrupt));
            listens.context("cannot listen for Ctrl-C")?;
            generation.is_interrupted = Arc::new(move || interrupt.swap(false, Ordering::Relaxed));
        }
        let mut chat = Chat {
            generation,
            speech,
            media: &self.media,
            conversation,
            stop: self.stop.clone(),
            json: self.json,
            is_interactive: is_terminal,
            screen,
        };
        if !is_terminal {
            return chat.run(&mut Lines(io::stdin().lock()) as &mut dyn Input);
        }
        let mut terminal = Terminal::open()?;
        chat.screen.note("[/help lists commands; /exit or Ctrl-D leaves]")?;
        chat.run(&mut terminal)
    }
}
