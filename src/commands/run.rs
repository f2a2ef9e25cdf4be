//! `gemma4c run`: text from a plan.

use std::io::{BufRead, IsTerminal};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use gemma4c_models::chat::{ChatTemplate, Message};
use gemma4c_models::tokenizer::{EncodeOptions, Tokenizer};
use gemma4c_plan::Vocab;
use gemma4c_runtime::Soft;

use super::Outcome;
use super::batch::{self, Batch, Defaults};
use super::cached::{ModelArgs, Needs};
use super::generation::{DraftArg, Generation, SamplingArgs};
use super::media::{Item, Media, MediaArgs, Sense};
use super::plan_file::{EngineArgs, PlanArgs};
use super::tokenize::parse_ids;
use crate::output::{self, OutputFile};

/// Generate text.
///
/// With -p the text is continued as it stands. With --chat it is a question: the model's own chat template is put around it,
/// which is what instruction-tuned models need; without -p the questions are read line by line, and the lines `/image FILE` and `/audio FILE`
/// put a picture or a sound before the next one. With --file many prompts are answered
/// together, each as if it were alone. A GGUF model will do instead of a plan: it is compiled for this machine, once.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    plan: PlanArgs,

    /// The text to continue, or with --chat the question.
    #[arg(short, long, value_name = "TEXT", conflicts_with = "tokens")]
    prompt: Option<String>,

    /// Token ids to continue instead of a text. Ids are printed, and no token is suppressed. For models without a vocabulary.
    #[arg(long, value_name = "IDS", conflicts_with = "chat")]
    tokens: Option<String>,

    /// Tokens to generate at most; generation ends earlier at a stop token or a full context.
    #[arg(short, value_name = "N", default_value_t = 256)]
    n: u32,

    // Media stand before the text. With --tokens they take the places that the ids hold for them.
    #[command(flatten)]
    media: MediaArgs,

    #[command(flatten)]
    sampling: SamplingArgs,

    /// Guess tokens, which the model then verifies several at once; the text is the same. auto: by the plan's drafter (compile --draft) where it has
    /// one, as far as that pays; off; ngram: by looking the last tokens up in prompt and text so far; N: by the drafter, N in a row; FILE: with a GGUF model, by the drafter in this file.
    #[arg(long, value_name = "auto|off|ngram|N|FILE", default_value = "auto", hide_default_value = true)]
    draft: DraftArg,

    /// Talk to an instruction-tuned model through its chat template.
    #[arg(long)]
    chat: bool,

    /// With --chat: the system prompt.
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system: Option<String>,

    /// With --chat: let the model think before it answers, and show its thoughts.
    #[arg(long, requires = "chat")]
    thinking: bool,

    /// Prompts to answer, one JSON object a line: with `prompt`, `messages` or `tokens`, and if wanted `max_tokens`, `temperature`, `top_k`,
    /// `top_p`, `seed`, `ignore_eos`.
    #[arg(long, value_name = "PROMPTS.jsonl", requires = "output", conflicts_with_all = ["prompt", "tokens", "chat"])]
    file: Option<PathBuf>,

    /// With --file: the answers, one line for each prompt in their order. Answers that are there already are kept.
    #[arg(short, long, value_name = "ANSWERS.jsonl", requires = "file")]
    output: Option<OutputFile>,

    /// With --file: begin anew, and replace the answers that are there.
    #[arg(long, requires = "file")]
    restart: bool,

    /// With --file: how many are worked on at once [default: what the plan was compiled for; 8 on a CPU]
    #[arg(long, value_name = "N", requires = "file")]
    sequences: Option<u32>,

    #[command(flatten)]
    engine: EngineArgs,

    #[command(flatten)]
    model: ModelArgs,
}

/// `/image PATH` and `/audio PATH`: a medium for the next question.
fn attached(line: &str) -> Option<(Sense, &Path)> {
    let (command, path) = line.trim().split_once(char::is_whitespace)?;
    let sense = match command {
        "/image" => Sense::Sight,
        "/audio" => Sense::Hearing,
        _ => return None,
    };
    Some((sense, Path::new(path.trim())))
}

fn attach(args: &Args, generation: &mut Generation, sense: Sense, path: &Path) -> Result<(Item, Soft)> {
    let item = args.media.read_one(generation.session.plan(), sense, path)?;
    let soft = item.look(&mut generation.session, None)?;
    Ok((item, soft))
}

/// Sequences that a model is compiled for where a file of prompts does not say.
const USUAL_SEQUENCES: u32 = 8;

pub fn run(mut args: Args) -> Result<Outcome> {
    let usual = if args.file.is_some() { USUAL_SEQUENCES } else { 1 };
    let needs = Needs {
        sequences: args.sequences.unwrap_or(usual),
        verified: args.draft.verified_rows(),
        drafter: args.draft.file(),
        image_tokens: args.media.image_tokens(),
    };
    args.model.resolve(&mut args.plan, &needs)?;
    let args = &args;
    if let (Some(prompts), Some(answers)) = (&args.file, &args.output) {
        ensure!(args.media.is_empty(), "--image and --audio are for one prompt: a file of prompts has none");
        let (restart, sequences, engine, draft) = (args.restart, args.sequences, args.engine, &args.draft);
        let batch = Batch { plan: &args.plan, prompts, answers, restart, sequences, engine, draft };
        batch::run(&batch, |plan| {
            let sampler = args.sampling.sampler(plan.sampling, Vec::new())?;
            Ok(Defaults { most: args.n, sampling: sampler.sampling(), seed: sampler.seed() })
        })?;
        return Ok(Outcome::Done);
    }
    args.engine.refuse_without("--file")?;
    let mut session = args.plan.open()?;
    let media = args.media.read(session.plan())?;
    let soft = media.look(&mut session, None)?;
    let vocab = session.plan().vocab.clone();
    // Tokens of other media make no sense in a text; whoever speaks ids gets what the model says.
    let suppress = vocab.as_ref().filter(|_| args.tokens.is_none()).map(|v| v.suppress.clone()).unwrap_or_default();
    let stop = vocab.as_ref().map(|v| v.stop.clone()).unwrap_or_default();
    let sampler = args.sampling.sampler(session.plan().sampling, suppress)?;
    if let Some(why) = session.picks_on_host(&sampler) {
        eprintln!("[tokens are picked on the host, which is slower: {why}]");
    }
    let speculation = args.draft.speculation(session.plan())?;
    let mut generation = Generation { session, sampler, stop, most: args.n, speculation };
    if let Some(ids) = &args.tokens {
        let (ids, mut first) = (parse_ids(ids)?, true);
        generation.session.set_soft(&ids, &soft)?;
        let speed = generation.answer(&ids, &mut |id| {
            let separator = if std::mem::take(&mut first) { "" } else { " " };
            output::print(&format!("{separator}{id}"))
        })?;
        output::print("\n")?;
        speed.report();
        return Ok(Outcome::Done);
    }
    let Some(vocab) = vocab else {
        bail!("the model has no vocabulary, so it cannot read or write text: give token ids with --tokens");
    };
    let tokenizer = Tokenizer::new(&vocab)?;
    match (&args.prompt, args.chat) {
        (_, true) => chat(args, &mut generation, &vocab, &tokenizer, media, soft),
        (Some(prompt), false) => {
            let mut ids = tokenizer.encode("", EncodeOptions { add_bos: true, parse_special: false });
            ids.extend(media.tokens(generation.session.plan()));
            ids.extend(tokenizer.encode(prompt, EncodeOptions { add_bos: false, parse_special: false }));
            generation.session.set_soft(&ids, &soft)?;
            generation.stream(&ids, &tokenizer)?.speed.report();
            Ok(Outcome::Done)
        }
        (None, false) => bail!("nothing to do: give a text with -p, or talk with --chat"),
    }
}

fn chat(
    args: &Args,
    generation: &mut Generation,
    vocab: &Vocab,
    tokenizer: &Tokenizer,
    mut media: Media,
    mut soft: Vec<Soft>,
) -> Result<Outcome> {
    let source = vocab.chat_template.as_deref().context("the model has no chat template: use -p without --chat")?;
    let template = ChatTemplate::new(source)?;
    let mut options = serde_json::Map::new();
    options.insert("enable_thinking".into(), args.thinking.into());
    let mut messages: Vec<Message> = args.system.iter().map(|text| Message::new("system", text)).collect();
    // Items that no question has yet: those of the command line belong to the first.
    let mut fresh = media.items.len();
    let mut ask =
        |generation: &mut Generation, question: &str, media: &Media, soft: &[Soft], fresh: usize| -> Result<()> {
            let new = &media.items[media.items.len() - fresh..];
            messages.push(match new.is_empty() {
                true => Message::new("user", question),
                false => {
                    let text = serde_json::json!({"type": "text", "text": question});
                    let content = new.iter().map(Item::part).chain([text]).collect();
                    Message { content, ..Message::new("user", question) }
                }
            });
            let text = template.render(&messages, &[], true, &options)?;
            // The template spells the beginning-of-sequence token itself.
            let ids = tokenizer.encode(&text, EncodeOptions { add_bos: false, parse_special: true });
            let ids = media.expand(generation.session.plan(), &ids)?;
            generation.session.set_soft(&ids, soft)?;
            let answer = generation.stream(&ids, tokenizer)?;
            answer.speed.report();
            messages.push(Message::new("assistant", answer.text));
            Ok(())
        };
    if let Some(question) = &args.prompt {
        ask(generation, question, &media, &soft, fresh)?;
        return Ok(Outcome::Done);
    }
    let stdin = std::io::stdin();
    let prompt = || {
        if stdin.is_terminal() {
            eprint!("> ");
        }
    };
    prompt();
    for line in stdin.lock().lines() {
        let line = line.context("cannot read standard input")?;
        match (line.trim(), attached(&line)) {
            ("", _) => {}
            (_, Some((sense, path))) => match attach(args, generation, sense, path) {
                Ok((item, rows)) => {
                    media.items.push(item);
                    soft.push(rows);
                    fresh += 1;
                }
                // A mistyped path does not end a conversation.
                Err(error) => eprintln!("error: {error:#}"),
            },
            (question, None) => ask(generation, question, &media, &soft, std::mem::take(&mut fresh))?,
        }
        prompt();
    }
    Ok(Outcome::Done)
}
