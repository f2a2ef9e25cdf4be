//! A server's life: it listens, loads, answers, and on a signal lets what runs come to its end.

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::http::HeaderValue;
use gemma4c_plan::Plan;
use serde_json::json;
use tokio::sync::{Semaphore, watch};
use xxhash_rust::xxh3::xxh3_128;

use crate::app::{App, now};
use crate::connection::{Connections, Stall, listen};
use crate::exchange::Deadlines;
use crate::grammar::Grammars;
use crate::http::{Gate, router};
use crate::keys::Keys;
use crate::media::{AllowedHosts, Senses};
use crate::memory::give_back_at_rest;
use crate::record::{Notice, Sink};
use crate::speech::{Speech, SpeechError};
use crate::state::{QueueLimits, State};
use crate::worker::{ServedEngine, Worker};

/// What a server is told.
#[derive(Clone, Debug)]
pub struct Options {
    /// An address, or a name: all of its addresses are listened at.
    pub host: String,
    /// 0 takes a free one.
    pub port: u16,
    /// The model's name for clients.
    pub model: String,
    pub takes_any_model: bool,
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
            model: "gemma4".into(),
            takes_any_model: false,
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
pub enum ServeError<E> {
    #[error("{0}")]
    Open(E),
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

/// Serves a plan until `end` is told to: once to let running requests finish, twice to end now. `open` opens the
/// engine, on the thread that will own it. `ready` is given the (first) address when the first request can be answered.
pub async fn serve<E: std::fmt::Display + Send + 'static>(
    plan: &Plan,
    options: Options,
    open: impl FnOnce() -> Result<ServedEngine, E> + Send + 'static,
    ready: impl FnOnce(SocketAddr),
    mut end: watch::Receiver<u32>,
) -> Result<(), ServeError<E>> {
    let speech = Arc::new(Speech::new(plan)?);
    let bytes = plan.to_bytes().map_err(|error| ServeError::Hash(error.to_string()))?;
    let fingerprint = format!("{:032x}", xxh3_128(&bytes));
    let cors = options.cors.as_ref().map(|origin| HeaderValue::from_str(origin));
    let cors = cors.transpose().map_err(|_| ServeError::Origin(options.cors.clone().unwrap_or_default()))?;
    let refused = |error| ServeError::Listen { host: options.host.clone(), port: options.port, error };
    let listeners = listen(&options.host, options.port).await.map_err(refused)?;
    let address = listeners[0].local_addr().map_err(refused)?;

    let state = Arc::new(State::new(options.queue));
    let (worker, when_ready) = Worker::start(open, Arc::clone(&state));
    let gpu = plan.cuda.as_ref().map(|cuda| cuda.program.gpu.to_string());
    let buckets = plan.cuda.iter().flat_map(|cuda| &cuda.program.phases).map(|phase| phase.rows);
    let grammars = Arc::new(Grammars::new(Arc::clone(&speech)));
    let senses = Senses::new(plan, options.image_tokens, options.media_hosts.clone(), options.media_bytes);
    let app = Arc::new(App {
        speech,
        senses,
        state: Arc::clone(&state),
        worker: worker.clone(),
        grammars: Arc::clone(&grammars),
        model: options.model.clone(),
        takes_any_model: options.takes_any_model,
        fingerprint,
        max_output: options.max_output,
        deadlines: options.deadlines,
        created: now(),
        ping: options.ping,
        readers: Semaphore::new(std::thread::available_parallelism().map_or(4, usize::from).max(2)),
        ready: OnceLock::new(),
        facts: json!({ "compiled_for": gpu, "phases": buckets.collect::<Vec<_>>() }),
    });
    // Whoever asks for a grammar before that waits.
    tokio::task::spawn_blocking(move || grammars.prepare());
    let gate = Gate {
        app: Arc::clone(&app),
        keys: Arc::new(Keys::parse(&options.api_keys)),
        cors,
        sink: options.sink.clone(),
    };
    let router = router(Arc::clone(&app), gate);
    let (close, closed) = watch::channel(false);
    let connections =
        Connections { router, state: Arc::clone(&state), stall: options.stall, sink: options.sink.clone(), closed };
    let accepting = tokio::spawn(connections.accept(listeners));
    let giving_back = tokio::spawn(give_back_at_rest(Arc::clone(&state)));

    let facts = tokio::select! {
        facts = when_ready => facts,
        _ = end.changed() => {
            accepting.abort();
            giving_back.abort();
            return Ok(());
        }
    };
    match facts {
        Ok(Ok(facts)) => _ = app.ready.set(facts),
        Ok(Err(error)) => return Err(ServeError::Open(error)),
        Err(_) => return Err(ServeError::Device("its thread has ended".into())),
    }
    ready(address);

    // A sender that is gone is a signal too: nobody could give another.
    _ = end.changed().await;
    state.drain();
    let has_ended = async {
        while state.active() > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let signalled = *end.borrow();
    tokio::select! {
        () = has_ended => {}
        () = tokio::time::sleep(options.drain) => {}
        () = again(&mut end, signalled) => {}
        () = say_what_is_waited_for(&state, options.sink.as_ref(), options.drain) => {}
    }
    if let (Some(sink), requests @ 1..) = (&options.sink, state.active()) {
        sink.tell(Notice::Cut { requests });
    }
    worker.abort();
    // Connections that still write their last event have a moment.
    _ = close.send(true);
    let last_words = async {
        while state.active() > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    _ = tokio::time::timeout(Duration::from_secs(1), last_words).await;
    accepting.abort();
    giving_back.abort();
    Ok(())
}

/// Says which requests a server that ends still waits for, again and again.
async fn say_what_is_waited_for(state: &State, sink: Option<&Sink>, drain: Duration) {
    let started = tokio::time::Instant::now();
    loop {
        if let (Some(sink), Some(oldest)) = (sink, state.oldest_active()) {
            let left = drain.saturating_sub(started.elapsed());
            sink.tell(Notice::Draining { requests: state.active(), oldest: oldest.elapsed(), left });
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
