//! A server's life: it listens, loads its first model, answers, and on a signal lets what runs come to its end.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::http::HeaderValue;
use gemma4c_plan::Plan;
use serde_json::{Map, Value};
use tokio::sync::{Semaphore, watch};
use tokio::task::AbortHandle;
use xxhash_rust::xxh3::xxh3_128;

use crate::about::About;
use crate::adapters::{Adapters, Folders, Named, SeatingError};
use crate::app::{App, now};
use crate::connection::{Connections, Stall, listen};
use crate::exchange::Deadlines;
use crate::grammar::Grammars;
use crate::house::{House, Room};
use crate::http::{Gate, router};
use crate::keys::Keys;
use crate::media::{AllowedHosts, Senses};
use crate::memory::give_back_at_rest;
use crate::models::Models;
use crate::record::{Notice, Sink};
use crate::slot::Slot;
use crate::speech::{Speech, SpeechError};
use crate::state::{Health, QueueLimits, State};
use crate::worker::{OpenError, Opener};

/// A model that a server offers.
pub struct Offer {
    /// Its name for clients.
    pub model: String,
    /// What else they may call it.
    pub aliases: Vec<String>,
    pub plan: Plan,
    pub open: Box<Opener>,
    /// Those that have a seat of the plan from the start.
    pub adapters: Vec<Named>,
}

/// What a server is told.
#[derive(Clone, Debug)]
pub struct Options {
    /// An address, or a name: all of its addresses are listened at.
    pub host: String,
    /// 0 takes a free one.
    pub port: u16,
    /// Clients may load and unload adapters, from below these folders.
    pub adapter_folders: Option<Vec<PathBuf>>,
    /// Requests may name any model: one that is not offered is the first.
    pub takes_any_model: bool,
    /// Models that may be in memory at once.
    pub room: Room,
    /// Keys, one a line; empty for none.
    pub api_keys: String,
    /// The origin whose pages may call.
    pub cors: Option<String>,
    /// Tokens of an answer whose request does not limit it.
    pub max_output: u32,
    pub queue: QueueLimits,
    pub deadlines: Deadlines,
    /// How long running requests have when the server is told to end.
    pub drain: Duration,
    pub stall: Stall,
    /// After so long without anything to say, a stream says that it lives.
    pub ping: Duration,
    /// Soft tokens of a picture, at most; `None` for the usual number, as far as the plan has room for it.
    pub image_tokens: Option<u32>,
    /// Hosts that media are fetched from.
    pub media_hosts: AllowedHosts,
    /// Bytes that decoded media of all requests without an answer may take.
    pub media_bytes: usize,
    /// Is told what became of each request.
    pub sink: Option<Sink>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            host: "127.0.0.1".into(),
            port: 8080,
            adapter_folders: None,
            takes_any_model: false,
            room: Room::default(),
            api_keys: String::new(),
            cors: None,
            max_output: 4096,
            queue: QueueLimits { requests: 1024, prompt_tokens: 4 << 20 },
            deadlines: Deadlines { queue: Duration::from_secs(300), whole: Duration::from_secs(3600) },
            drain: Duration::from_secs(30),
            stall: Stall { contended: Duration::from_secs(10), at_most: Duration::from_secs(300) },
            ping: Duration::from_secs(15),
            image_tokens: None,
            media_hosts: AllowedHosts::default(),
            media_bytes: 2 << 30,
            sink: None,
        }
    }
}

/// Why a server does not start, or has ended.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("no model is offered")]
    NoModel,
    #[error("two models are called {0:?}")]
    SameName(String),
    #[error(transparent)]
    Seating(#[from] SeatingError),
    #[error("--lora-dir {}: {error}", folder.display())]
    Folder { folder: PathBuf, error: std::io::Error },
    #[error("adapters may be loaded, but no plan has seats for them: compile one with --adapters N")]
    NoSeats,
    #[error("{0}")]
    Open(OpenError),
    #[error(transparent)]
    Speech(#[from] SpeechError),
    #[error("cannot listen on {host}, port {port}: {error}")]
    Listen { host: String, port: u16, error: std::io::Error },
    #[error("--cors {0:?} is no origin")]
    Origin(String),
    #[error("the plan cannot be hashed: {0}")]
    Hash(String),
    #[error("the server's threads cannot be started: {0}")]
    Runtime(std::io::Error),
    #[error("the device has failed: {0}")]
    Device(String),
}

/// How often a server that waits for its last requests says so.
const SAY_AGAIN: Duration = Duration::from_secs(3);

/// Serves models until `end` is told to: once to let running requests finish, twice to end now. `ready` is given the
/// (first) address when the first model is loaded.
pub async fn serve(
    offers: Vec<Offer>,
    options: Options,
    ready: impl FnOnce(SocketAddr),
    mut end: watch::Receiver<u32>,
) -> Result<(), ServeError> {
    let cors = options.cors.as_ref().map(|origin| HeaderValue::from_str(origin));
    let cors = cors.transpose().map_err(|_| ServeError::Origin(options.cors.clone().unwrap_or_default()))?;
    let (models, house) = models(offers, &options)?;
    let refused = |error| ServeError::Listen { host: options.host.clone(), port: options.port, error };
    let listeners = listen(&options.host, options.port).await.map_err(refused)?;
    let address = listeners[0].local_addr().map_err(refused)?;
    for app in models.all() {
        let grammars = Arc::clone(&app.grammars);
        // Whoever asks for a grammar before that waits.
        tokio::task::spawn_blocking(move || grammars.prepare());
    }
    let keys = Arc::new(Keys::parse(&options.api_keys));
    let router = router(Gate { models: Arc::clone(&models), keys, cors, sink: options.sink.clone() });
    let (close, closed) = watch::channel(false);
    let connections =
        Connections { router, models: Arc::clone(&models), stall: options.stall, sink: options.sink.clone(), closed };
    let tasks = [
        tokio::spawn(connections.accept(listeners)),
        tokio::spawn(give_back_at_rest(Arc::clone(&models.hand))),
        tokio::spawn(Arc::clone(&house).empty_when_idle()),
    ];
    let _tasks = AbortOnDrop(tasks.map(|task| task.abort_handle()));

    let first = models.first();
    tokio::select! {
        came = house.bring_first(&first.slot) => came.map_err(ServeError::Open)?,
        _ = end.changed() => return Ok(()),
    }
    first.state.set_health(Health::Ready);
    ready(address);

    // A sender that is gone is a signal too: nobody could give another.
    _ = end.changed().await;
    models.all().iter().for_each(|app| app.state.drain());
    let has_ended = async {
        while models.active() > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let signalled = *end.borrow();
    tokio::select! {
        () = has_ended => {}
        () = tokio::time::sleep(options.drain) => {}
        () = again(&mut end, signalled) => {}
        () = say_what_is_waited_for(&models, options.sink.as_ref(), options.drain) => {}
    }
    if let (Some(sink), requests @ 1..) = (&options.sink, models.active()) {
        sink.tell(Notice::Cut { requests });
    }
    models.all().iter().for_each(|app| app.slot.abort());
    // Connections that still write their last event have a moment.
    _ = close.send(true);
    let last_words = async {
        while models.active() > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    _ = tokio::time::timeout(Duration::from_secs(1), last_words).await;
    Ok(())
}

/// Ends what runs beside a server with it.
struct AbortOnDrop<const N: usize>([AbortHandle; N]);

impl<const N: usize> Drop for AbortOnDrop<N> {
    fn drop(&mut self) {
        self.0.iter().for_each(AbortHandle::abort);
    }
}

/// What is known of the models without their weights, and the places for those.
fn models(offers: Vec<Offer>, options: &Options) -> Result<(Arc<Models>, Arc<House>), ServeError> {
    let folders = options.adapter_folders.as_deref().map(Folders::open).transpose();
    let folders = folders.map_err(|(folder, error)| ServeError::Folder { folder, error })?;
    let (mut slots, mut plans) = (Vec::new(), Vec::new());
    for Offer { model, aliases, plan, open, adapters } in offers {
        let adapters = Adapters::new(&plan, adapters)?;
        let state = State::new(options.queue);
        if !slots.is_empty() {
            // Loaded when it is asked for.
            state.set_health(Health::Ready);
        }
        let bytes = plan.cuda.as_ref().and_then(|cuda| cuda.program.memory.device()).unwrap_or(0);
        slots.push(Arc::new(Slot::new(model, bytes, open.into(), Arc::new(state), Arc::new(adapters))));
        plans.push((aliases, plan));
    }
    refuse_same_names(&slots, &plans)?;
    if folders.is_some() && slots.iter().all(|slot| slot.adapters.seats().is_none()) {
        return Err(ServeError::NoSeats);
    }
    let offered: Arc<[_]> = slots.iter().map(|slot| (slot.model.clone(), Arc::clone(&slot.adapters))).collect();
    let house = Arc::new(House::new(slots.clone(), options.room));
    let readers = std::thread::available_parallelism().map_or(4, usize::from).max(2);
    let readers = Arc::new(Semaphore::new(readers));
    let mut all = Vec::new();
    for (slot, (aliases, plan)) in slots.into_iter().zip(plans) {
        let speech = Arc::new(Speech::new(&plan)?);
        let senses = Senses::new(&plan, options.image_tokens, options.media_hosts.clone(), options.media_bytes);
        let bytes = plan.to_bytes().map_err(|error| ServeError::Hash(error.to_string()))?;
        all.push(Arc::new(App {
            grammars: Arc::new(Grammars::new(Arc::clone(&speech))),
            senses: Arc::new(senses),
            speech,
            state: Arc::clone(&slot.state),
            adapters: Arc::clone(&slot.adapters),
            model: slot.model.clone(),
            parent: None,
            slot,
            house: Arc::clone(&house),
            aliases,
            offered: Arc::clone(&offered),
            takes_any_model: options.takes_any_model,
            fingerprint: format!("{:032x}", xxh3_128(&bytes)),
            max_output: options.max_output,
            deadlines: options.deadlines,
            created: now(),
            ping: options.ping,
            readers: Arc::clone(&readers),
            about: Arc::new(About::new(&plan)),
            facts: Arc::new(facts(&plan)),
        }));
    }
    match all.is_empty() {
        true => Err(ServeError::NoModel),
        false => Ok((Arc::new(Models::new(all, folders)), house)),
    }
}

/// Models are told apart by their names, and an adapter has a name that is no model's and no other adapter's.
fn refuse_same_names(slots: &[Arc<Slot>], plans: &[(Vec<String>, Plan)]) -> Result<(), ServeError> {
    let mut models = BTreeSet::new();
    if let Some(twice) = slots.iter().find(|slot| !models.insert(slot.model.as_str())) {
        return Err(ServeError::SameName(twice.model.clone()));
    }
    let mut taken: BTreeSet<&str> = plans.iter().flat_map(|(aliases, _)| aliases.iter().map(String::as_str)).collect();
    taken.append(&mut models);
    let adapters: Vec<_> = slots.iter().flat_map(|slot| slot.adapters.list()).collect();
    match adapters.iter().find(|listed| !taken.insert(&listed.name)) {
        None => Ok(()),
        Some(twice) => Err(SeatingError::SameName(twice.name.to_string()).into()),
    }
}

/// What `/version` says of a plan.
fn facts(plan: &Plan) -> Map<String, Value> {
    let program = plan.cuda.as_ref().map(|cuda| &cuda.program);
    let phases: Vec<u32> = program.iter().flat_map(|program| &program.phases).map(|phase| phase.rows).collect();
    let mut facts = Map::new();
    facts.insert("compiled_for".into(), program.map(|program| program.gpu.to_string()).into());
    facts.insert("phases".into(), phases.into());
    facts.insert("kv_type".into(), program.map_or(plan.program.kv, |program| program.kv).name().into());
    let seats = plan.model.seats;
    facts.insert("adapter_seats".into(), seats.map_or(0, |seats| seats.count).into());
    facts.insert("adapter_rank".into(), seats.map(|seats| seats.rank).into());
    facts.insert("has_drafter".into(), plan.drafter.is_some().into());
    facts
}

/// Says which requests a server that ends still waits for, again and again.
async fn say_what_is_waited_for(models: &Models, sink: Option<&Sink>, drain: Duration) {
    let started = tokio::time::Instant::now();
    loop {
        if let (Some(sink), Some(oldest)) = (sink, models.oldest_active()) {
            let left = drain.saturating_sub(started.elapsed());
            sink.tell(Notice::Draining { requests: models.active(), oldest: oldest.elapsed(), left });
        }
        tokio::time::sleep(SAY_AGAIN).await;
    }
}

/// Waits for another signal.
async fn again(end: &mut watch::Receiver<u32>, before: u32) {
    while *end.borrow_and_update() == before {
        if end.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}
