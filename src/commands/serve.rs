//! `gemma4c serve`: an OpenAI server over a plan.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use gemma4c_plan::Plan;
use gemma4c_runtime::RuntimeError;
use gemma4c_serve::{AllowedHosts, Deadlines, Options, QueueLimits, ServeError, Stall};

use super::Outcome;
use super::cached::{ModelArgs, Needs};
use super::generation::DraftArg;
use super::media;
use super::plan_file::{EngineArgs, PlanArgs};
use crate::device::EngineOptions;
use crate::output;

mod log;

use log::{Log, LogFormat};

/// Serve a plan over HTTP, to clients of OpenAI's API.
///
/// The first line on standard output is the server's address, printed when it is ready. Standard error has a line for
/// each request that has ended. SIGTERM or Ctrl-C lets running requests finish, and says which; a second one ends at
/// once. A GGUF model, or the name of one such as ggml-org/gemma-4-E4B-it-GGUF, will do instead of a plan: it is
/// compiled for this machine, once.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    plan: PlanArgs,

    /// The address to listen on, or a name for all of its addresses, such as localhost; 0.0.0.0 for all of this
    /// machine's.
    #[arg(long, value_name = "IP|NAME", default_value = "127.0.0.1")]
    host: String,

    /// The port to listen on; 0 takes a free one.
    #[arg(long, default_value_t = 8080)]
    port: u16,

    /// The model's name for clients [default: the model's own]
    #[arg(long, value_name = "NAME")]
    alias: Option<String>,

    /// Answer requests that name another model too.
    #[arg(long)]
    any_model: bool,

    /// A file of keys, one a line: requests must have one of them.
    #[arg(long, value_name = "FILE")]
    api_keys: Option<PathBuf>,

    /// The origin whose web pages may call, such as https://chat.example.org [default: none]
    #[arg(long, value_name = "ORIGIN")]
    cors: Option<String>,

    /// How many requests are worked on at once [default: what the plan was compiled for; 8 on a CPU]
    #[arg(long, value_name = "N")]
    sequences: Option<u32>,

    /// Guess tokens, which the model then verifies several at once, of all requests together; answers are the same.
    /// auto: by the plan's drafter (compile --draft) where it has one, as far as that pays; off; ngram: by looking the
    /// last tokens up in prompt and answer so far; N: by the drafter, N in a row; FILE: with a GGUF model, by the
    /// drafter in this file.
    #[arg(long, value_name = "auto|off|ngram|N|FILE", default_value = "auto", hide_default_value = true)]
    draft: DraftArg,

    /// Tokens of an answer whose request sets no limit.
    #[arg(long, value_name = "N", default_value_t = 4096)]
    max_output: u32,

    /// Requests that may wait; one more is told to come back later.
    #[arg(long, value_name = "N", default_value_t = 1024)]
    max_waiting: usize,

    /// Tokens of prompts that may wait.
    #[arg(long, value_name = "N", default_value_t = 4_194_304)]
    max_waiting_tokens: usize,

    /// Seconds that a request may wait before it begins.
    #[arg(long, value_name = "S", default_value_t = 300)]
    queue_timeout: u64,

    /// Seconds that a request may take in all.
    #[arg(long, value_name = "S", default_value_t = 3600)]
    deadline: u64,

    /// Seconds that running requests have when the server is told to end.
    #[arg(long, value_name = "S", default_value_t = 30)]
    drain: u64,

    /// Seconds that a client may leave its answer unread while other requests wait for their turn; then its own ends.
    /// Thirty times as long where none waits.
    #[arg(long, value_name = "S", default_value_t = 10)]
    stall_timeout: u64,

    /// What standard error says of each request when it has ended, without its text: text, json (one object a line) or
    /// off. /health, /ping and /metrics are left out unless they fail.
    #[arg(long, value_name = "text|json|off", default_value = "text", hide_possible_values = true)]
    log: LogFormat,

    /// Soft tokens of a picture, at most: 70, 140, 280, 560 or 1120 [default: 280, or what the plan has room for if
    /// that is less]
    #[arg(long, value_name = "N", value_parser = media::budget)]
    image_tokens: Option<u32>,

    /// Hosts that pictures and sounds are fetched from, where a request gives a URL: names, *.example.org for all below
    /// a domain, * for all. A host that is not listed by its own name is fetched from at public addresses alone.
    /// [default: none; requests bring files in data URLs]
    #[arg(long, value_name = "HOST", num_args = 1.., value_delimiter = ',')]
    media_url_allow: Vec<String>,

    #[command(flatten)]
    engine: EngineArgs,

    #[command(flatten)]
    model: ModelArgs,
}

/// Sequences that a model is compiled for where nobody says.
const USUAL_SEQUENCES: u32 = 16;

pub fn run(mut args: Args) -> Result<Outcome> {
    let needs = Needs {
        sequences: args.sequences.unwrap_or(USUAL_SEQUENCES),
        may_be_fewer: args.sequences.is_none(),
        verified: args.draft.verified_rows(),
        drafter: args.draft.file(),
        is_drafted: args.draft.is_by_drafter(),
        image_tokens: args.image_tokens,
    };
    args.model.resolve(&mut args.plan, &needs)?;
    let plan = args.plan.read()?;
    let api_keys = match &args.api_keys {
        None => String::new(),
        Some(path) => {
            let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
            let is_key = |line: &str| !line.trim().is_empty() && !line.trim().starts_with('#');
            ensure!(text.lines().any(is_key), "{} has no key: one a line is needed", path.display());
            text
        }
    };
    if let Some(tokens) = args.image_tokens {
        let tower = plan.towers.iter().find(|tower| tower.medium.is_picture()).ok_or(RuntimeError::NoTower)?;
        media::has_room(tower, tokens)?;
    }
    let log = Log::start(args.log, io::stderr());
    let options = Options {
        host: args.host.clone(),
        port: args.port,
        model: args.alias.clone().unwrap_or_else(|| model_name(&plan, &args)),
        takes_any_model: args.any_model,
        api_keys,
        cors: args.cors.clone(),
        max_output: args.max_output,
        queue: QueueLimits { requests: args.max_waiting, prompt_tokens: args.max_waiting_tokens },
        deadlines: Deadlines {
            queue: Duration::from_secs(args.queue_timeout),
            whole: Duration::from_secs(args.deadline),
        },
        drain: Duration::from_secs(args.drain),
        stall: Stall {
            contended: Duration::from_secs(args.stall_timeout),
            at_most: Duration::from_secs(args.stall_timeout.saturating_mul(30)),
        },
        sink: log.as_ref().map(Log::sink),
        image_tokens: args.image_tokens,
        media_hosts: AllowedHosts::parse(&args.media_url_allow)
            .map_err(|error| anyhow!("--media-url-allow: {error}"))?,
        ..Options::default()
    };
    let suppress = plan.vocab.as_ref().map(|vocab| vocab.suppress.clone()).unwrap_or_default();
    let (plan_args, opened) = (args.plan, plan.clone());
    let (sequences, drafts) = (args.sequences, args.draft.for_engine(&plan));
    let engine = EngineOptions { gap: args.engine.gap(true), sequences, suppress, drafts, ..args.engine.options() };
    let open = move || plan_args.open_engine(opened, engine);
    let mut printed = Ok(());
    let served = gemma4c_serve::run(&plan, options, open, |address| {
        // A name is shown as it was given, whichever of its addresses a client will take.
        let place = match args.host.parse::<IpAddr>() {
            Ok(_) => address.to_string(),
            Err(_) => format!("{}:{}", args.host, address.port()),
        };
        printed = output::print(&format!("http://{place}\n"));
    });
    log.into_iter().for_each(Log::finish);
    match served {
        // Its causes are worth reading too.
        Err(ServeError::Open(error)) => return Err(error),
        served => served?,
    }
    printed?;
    Ok(Outcome::Done)
}

/// As the model's file has it, or as the plan's file is called.
fn model_name(plan: &Plan, args: &Args) -> String {
    let of_file = || args.plan.plan.file_stem().map(|stem| stem.to_string_lossy().into_owned());
    plan.model.name.clone().or_else(of_file).unwrap_or_else(|| "gemma4".into())
}
