//! `gemma4c serve`: an OpenAI server over a plan.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use gemma4c_runtime::RuntimeError;
use gemma4c_serve::{AllowedHosts, Deadlines, Notice, Offer, Options, QueueLimits, Room, ServeError, Sink, Stall};

use super::Outcome;
use super::cached::{ModelArgs, Needs};
use super::generation::DraftArg;
use super::media;
use super::plan_file::{EngineArgs, PlanArgs};
use crate::device::EngineOptions;
use crate::{by_name, files, output};

mod log;
mod lora;
mod traces;

use log::{Log, LogFormat};
use lora::{Called, LoraArgs};
use traces::{Collector, Traces};

/// Serve a plan over HTTP, to clients of OpenAI's API.
///
/// The first line on standard output is the server's address, printed when it is ready. Standard error has a line for
/// each request that has ended. SIGTERM or Ctrl-C lets running requests finish, and says which; a second one ends at
/// once. A GGUF model, or the name of one such as ggml-org/gemma-4-E4B-it-GGUF, will do instead of a plan: it is
/// compiled for this machine, once. Of several, the first is loaded at once, and the others when a request names them.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    plan: PlanArgs,

    /// More plans or models.
    #[arg(value_name = "MORE")]
    more: Vec<PathBuf>,

    /// Of several models, how many may be in memory at once: each is compiled for its part of it. The one that was not
    /// asked for the longest makes room for another [default: all of them]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    models_max: Option<u64>,

    /// Seconds without a request after which a model leaves the memory, until it is asked for again [default: never]
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(1..))]
    unload_after: Option<u64>,

    /// The address to listen on, or a name for all of its addresses, such as localhost; 0.0.0.0 for all of this
    /// machine's.
    #[arg(long, value_name = "IP|NAME", default_value = "127.0.0.1")]
    host: String,

    /// The port to listen on; 0 takes a free one.
    #[arg(long, default_value_t = 8080)]
    port: u16,

    /// The models' names for clients, in their order [default: the models' own]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    alias: Vec<String>,

    /// Answer requests that name another model too.
    #[arg(long)]
    any_model: bool,

    /// A file of keys, one a line: requests must have one of them.
    #[arg(long, value_name = "FILE")]
    api_keys: Option<PathBuf>,

    /// The origin whose web pages may call, such as https://chat.example.org [default: none]
    #[arg(long, value_name = "ORIGIN")]
    cors: Option<String>,

    /// How many requests are worked on at once, at most: as many as there are pages of keys and values for [default: what
    /// the plan was compiled for, which of a GGUF model is 32; 8 on a CPU]
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

    /// A collector of OpenTelemetry that is sent a span for each request, such as http://localhost:4318: OTLP in JSON
    /// [default: what OTEL_EXPORTER_OTLP_ENDPOINT says, or none]
    #[arg(long, value_name = "URL")]
    otlp: Option<String>,

    /// Soft tokens of a picture, at most, whose request does not say how closely to look: 70, 140, 280, 560 or 1120
    /// [default: 280, or what the plan has room for if that is less]
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
    lora: LoraArgs,

    #[command(flatten)]
    model: ModelArgs,
}

/// Sequences that a model is compiled for where nobody says. Memory is pages, of which a sequence takes what it needs, so
/// that more would cost none; but from 64 on products have 16-bit operands, with which one client has half the speed.
const USUAL_SEQUENCES: u32 = 32;

pub fn run(args: Args) -> Result<Outcome> {
    let given = 1 + args.more.len();
    ensure!(
        args.alias.is_empty() || args.alias.len() == given,
        "--alias names {} models, but there are {given}",
        args.alias.len()
    );
    for (name, is_given) in [
        ("--model", args.plan.model.is_some()),
        ("--mmproj", args.model.has_projector()),
        ("--lora FILE", !args.lora.always().is_empty()),
        ("--draft FILE", args.draft.file().is_some()),
    ] {
        ensure!(given == 1 || !is_given, "{name} is for one model; {given} are given");
    }
    let called: Vec<Called<'_>> = (0..given).map(|at| called(&args, at)).collect();
    args.lora.check(&called)?;
    let models = args.models_max.unwrap_or(given as u64).min(given as u64);
    let offers: Vec<Offer> = (0..given).map(|at| offer(&args, at, models)).collect::<Result<_>>()?;
    let is_on_gpu = offers.iter().any(|offer| offer.plan.cuda.is_some());
    let room = Room {
        models: models as usize,
        bytes: args.model.device_bytes().filter(|_| is_on_gpu && given > 1),
        idle: args.unload_after.map(Duration::from_secs),
    };
    let api_keys = match &args.api_keys {
        None => String::new(),
        Some(path) => {
            let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
            let is_key = |line: &str| !line.trim().is_empty() && !line.trim().starts_with('#');
            ensure!(text.lines().any(is_key), "{} has no key: one a line is needed", path.display());
            text
        }
    };
    let traces = Collector::find(args.otlp.as_deref())?.map(Traces::start);
    let log = Log::start(args.log, io::stderr());
    let options = Options {
        host: args.host.clone(),
        port: args.port,
        adapter_folders: args.lora.folders(),
        takes_any_model: args.any_model,
        room,
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
        sink: sink(log.as_ref(), traces.as_ref()),
        image_tokens: args.image_tokens,
        media_hosts: AllowedHosts::parse(&args.media_url_allow)
            .map_err(|error| anyhow!("--media-url-allow: {error}"))?,
        ..Options::default()
    };
    let mut printed = Ok(());
    let served = gemma4c_serve::run(offers, options, |address| {
        // A name is shown as it was given, whichever of its addresses a client will take.
        let place = match args.host.parse::<IpAddr>() {
            Ok(_) => address.to_string(),
            Err(_) => format!("{}:{}", args.host, address.port()),
        };
        printed = output::print(&format!("http://{place}\n"));
    });
    log.into_iter().for_each(Log::finish);
    traces.into_iter().for_each(Traces::finish);
    match served {
        // Its causes are worth reading too.
        Err(ServeError::Open(error)) => return Err(anyhow::Error::from_boxed(error)),
        served => served?,
    }
    printed?;
    Ok(Outcome::Done)
}

/// Whoever is told what became of requests.
fn sink(log: Option<&Log>, traces: Option<&Traces>) -> Option<Sink> {
    let (log, traces) = (log.map(Log::sink), traces.map(Traces::teller));
    let Some(traces) = traces else { return log };
    Some(Sink::new(move |notice| {
        if let Notice::Request(line) = &notice {
            traces(line);
        }
        log.iter().for_each(|log| log.tell(notice.clone()));
    }))
}

/// The model that was given at a place.
fn given(args: &Args, at: usize) -> &PathBuf {
    at.checked_sub(1).map_or(&args.plan.plan, |more| &args.more[more])
}

fn called(args: &Args, at: usize) -> Called<'_> {
    Called { alias: args.alias.get(at).map(String::as_str), argument: given(args, at) }
}

/// One of the models that are given, ready to be loaded.
fn offer(args: &Args, at: usize, sharing: u64) -> Result<Offer> {
    let (always, adapters) = (args.lora.always(), args.lora.named(&called(args, at)));
    let is_plan = files::is_plan(given(args, at)).unwrap_or(false);
    let needs = Needs {
        sequences: args.sequences.unwrap_or(USUAL_SEQUENCES),
        may_be_fewer: args.sequences.is_none(),
        verified: args.draft.verified_rows(),
        drafter: args.draft.file(),
        is_drafted: args.draft.is_by_drafter(),
        adapters: &always,
        seats: if is_plan { None } else { args.lora.seats(&adapters)? },
        image_tokens: args.image_tokens,
        sharing,
    };
    let given = given(args, at).clone();
    let mut plan_args = PlanArgs { plan: given.clone(), ..args.plan.clone() };
    args.model.resolve(&mut plan_args, &needs)?;
    let plan = plan_args.read()?;
    if is_plan {
        args.lora.check_plan(&plan, &given, &adapters)?;
    }
    if let Some(tokens) = args.image_tokens {
        let tower = plan.towers.iter().find(|tower| tower.medium.is_picture()).ok_or(RuntimeError::NoTower)?;
        media::has_room(tower, tokens)?;
    }
    // As the model's file has it, or as the plan's file is called; and as it was asked for.
    let of_file = || plan_args.plan.file_stem().map(|stem| stem.to_string_lossy().into_owned());
    let own = || plan.model.name.clone().or_else(of_file).unwrap_or_else(|| "gemma4".into());
    let model = args.alias.get(at).cloned().unwrap_or_else(own);
    let aliases = by_name::name(&given).map(|_| given.to_string_lossy().into_owned()).into_iter().collect();
    let (engine, sequences, draft) = (args.engine, args.sequences, args.draft.clone());
    let opened = plan.clone();
    let open = move || {
        let suppress = opened.vocab.as_ref().map(|vocab| vocab.suppress.clone()).unwrap_or_default();
        let drafts = draft.for_engine(&opened);
        let options = EngineOptions { gap: engine.gap(true), sequences, suppress, drafts, ..engine.options() };
        plan_args.open_engine(opened.clone(), options).map_err(anyhow::Error::into_boxed_dyn_error)
    };
    Ok(Offer { model, aliases, plan, open: Box::new(open), adapters })
}
