//! The thread that owns the engine. Requests come to it over a channel, tokens leave it over one channel a request.
//!
//! Text is not its business, and it never waits for a client: a channel of replies is not bounded by itself, because
//! what it can hold is: a request's tokens are limited when it is admitted. A client that is gone cancels its request,
//! wherever that stands. Nor does it wake anybody: what a step has to tell goes to another thread (`dispatcher.rs`) at
//! once, so that the device gets its next step.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use gemma4c_plan::SeatWeights;
use gemma4c_runtime::engine::{Device, Engine, Event, Finish, Id, Request};
use tokio::sync::{mpsc as replies, oneshot};

use crate::adapters::Adapters;
use crate::dispatcher::{Dispatcher, PendingReply};
use crate::error::ApiError;
use crate::metrics::Metrics;
use crate::reply::Reply;
use crate::state::{Health, Place, State};

/// The engine of a model.
pub type ServedEngine = Engine<Box<dyn Device>>;

/// One request: a prompt, and as many sequences as there are choices.
pub struct Job {
    pub ticket: u64,
    pub choices: Vec<Request>,
    /// All choices have the same prompt: the others wait until the first has read it, and begin with what is kept of
    /// it.
    pub is_shared: bool,
    /// How many of the likeliest tokens are wanted beside each.
    pub top_logprobs: Option<usize>,
    pub replies: replies::UnboundedSender<Reply>,
    /// Its place in the queue, until it is admitted.
    pub place: Place,
}

enum Command {
    Submit(Box<Job>),
    Cancel(u64),
    /// Of one choice that is complete; the others go on.
    CancelChoice(u64, usize),
    /// Of an adapter, with what it is to have; without, it is emptied.
    Seat {
        seat: u32,
        weights: Option<Arc<SeatWeights>>,
        done: oneshot::Sender<Result<(), ApiError>>,
    },
    /// Whatever still runs is told that the server ends.
    Abort,
    /// Nobody will ask for anything any more.
    End,
}

/// The way to the thread.
#[derive(Clone)]
pub struct Worker {
    commands: mpsc::Sender<Command>,
}

/// A thread that panics leaves a server that knows of it: requests in its hands end with an error when their channels
/// are dropped.
struct Guard(Arc<State>);

impl Drop for Guard {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.set_health(Health::Failed("the engine's thread has panicked".into()));
        }
    }
}

/// What the engine says of itself when it is ready.
#[derive(Clone, Debug)]
pub struct Ready {
    pub device: String,
    pub sequences: u32,
    /// Of keys and values, and the positions of one in full layers.
    pub pages: u32,
    pub page_rows: u32,
    pub memory_bytes: Option<u64>,
}

/// Opens an engine on the thread that will own it, as often as its model is loaded.
pub type Opener = dyn Fn() -> Result<ServedEngine, OpenError> + Send + Sync;

/// Why an engine does not open.
pub type OpenError = Box<dyn std::error::Error + Send + Sync>;

/// Gets what an engine says of itself once it is open.
type WhenReady = oneshot::Receiver<Result<Ready, OpenError>>;

impl Worker {
    /// Starts the thread, which opens the engine first: that takes as long as weights take to load. Its seats get what
    /// they are to have.
    pub fn start(open: Arc<Opener>, state: Arc<State>, adapters: Arc<Adapters>) -> (Worker, JoinHandle<()>, WhenReady) {
        let (commands, received) = mpsc::channel();
        let (ready, when_ready) = oneshot::channel();
        let guard = Guard(Arc::clone(&state));
        let work = move || {
            let _guard = guard;
            Worker::work(&|| open_seated(&*open, &adapters), state, &received, ready);
        };
        (Worker { commands }, thread::spawn(work), when_ready)
    }

    fn work(
        open: &dyn Fn() -> Result<ServedEngine, OpenError>,
        state: Arc<State>,
        received: &mpsc::Receiver<Command>,
        ready: oneshot::Sender<Result<Ready, OpenError>>,
    ) {
        match open() {
            Ok(engine) => {
                let limits = engine.limits();
                let facts = Ready {
                    device: engine.device().name(),
                    sequences: limits.rows,
                    pages: limits.pages,
                    page_rows: limits.full.rows,
                    memory_bytes: engine.device().memory().ok().flatten().map(|memory| memory.planned),
                };
                // Nobody waits any more where the server has ended in the meantime.
                if ready.send(Ok(facts)).is_ok() {
                    let (open, of, pending_replies) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
                    let (dispatcher, step_began) = (Dispatcher::start(), Instant::now());
                    Thread { engine, state, open, of, pending_replies, dispatcher, step_began }.run(received);
                }
            }
            Err(error) => _ = ready.send(Err(error)),
        }
    }

    pub fn submit(&self, job: Job) -> Result<(), ApiError> {
        let sent = self.commands.send(Command::Submit(Box::new(job)));
        sent.map_err(|_| ApiError::internal("the engine has ended"))
    }

    /// Ends a request. One that has ended already is none the worse.
    pub fn cancel(&self, ticket: u64) {
        _ = self.commands.send(Command::Cancel(ticket));
    }

    /// Ends one choice of a request.
    pub fn cancel_choice(&self, ticket: u64, choice: usize) {
        _ = self.commands.send(Command::CancelChoice(ticket, choice));
    }

    /// Fills a seat, in which no request may be.
    pub async fn fill_seat(&self, seat: u32, weights: Arc<SeatWeights>) -> Result<(), ApiError> {
        self.seat(seat, Some(weights)).await
    }

    /// Empties a seat, in which no request may be.
    pub async fn empty_seat(&self, seat: u32) -> Result<(), ApiError> {
        self.seat(seat, None).await
    }

    async fn seat(&self, seat: u32, weights: Option<Arc<SeatWeights>>) -> Result<(), ApiError> {
        let ended = || ApiError::internal("the engine has ended");
        let (done, is_done) = oneshot::channel();
        self.commands.send(Command::Seat { seat, weights, done }).map_err(|_| ended())?;
        is_done.await.unwrap_or_else(|_| Err(ended()))
    }

    pub fn abort(&self) {
        _ = self.commands.send(Command::Abort);
    }

    /// Closes the engine, with whatever it still has.
    pub fn end(&self) {
        _ = self.commands.send(Command::End);
    }
}

/// An engine whose seats have their adapters.
fn open_seated(open: &Opener, adapters: &Adapters) -> Result<ServedEngine, OpenError> {
    let mut engine = open()?;
    for (seat, weights) in adapters.fillings() {
        engine.fill_seat(seat, &weights)?;
    }
    Ok(engine)
}

/// A request that has not ended.
struct Open {
    replies: replies::UnboundedSender<Reply>,
    top_logprobs: Option<usize>,
    place: Option<Place>,
    /// Choices that are asked for when the first has read the prompt, which is then kept.
    later: Vec<Request>,
    running: Vec<Id>,
    submitted: Instant,
    prompt_tokens: usize,
    /// Of each choice.
    prompts: Vec<Arc<[u32]>>,
    times: Vec<Times>,
}

/// When things happened to a choice.
#[derive(Clone, Copy, Default)]
struct Times {
    admitted: Option<Instant>,
    first: Option<Instant>,
    latest: Option<Instant>,
    tokens: u32,
}

struct Thread {
    engine: ServedEngine,
    state: Arc<State>,
    open: BTreeMap<u64, Open>,
    of: BTreeMap<Id, (u64, usize)>,
    /// What is to be told of the latest step.
    pending_replies: Vec<PendingReply>,
    dispatcher: Dispatcher,
    /// What is admitted is admitted there, and told with all that the step has brought.
    step_began: Instant,
}

impl Thread {
    fn run(mut self, commands: &mpsc::Receiver<Command>) {
        loop {
            if self.engine.is_idle() {
                self.observe();
                self.publish();
                let Ok(command) = commands.recv() else { return };
                if !self.obey(command) {
                    return;
                }
            }
            while let Ok(command) = commands.try_recv() {
                if !self.obey(command) {
                    return;
                }
            }
            self.step_began = Instant::now();
            match self.engine.step() {
                Ok(events) => {
                    let tokens = events.iter().filter(|event| matches!(event, Event::Token { .. })).count();
                    if tokens > 0 {
                        self.state.metrics.step(tokens);
                    }
                    events.into_iter().for_each(|event| self.tell(event));
                }
                Err(error) => {
                    self.fail(&error.to_string());
                    return self.refuse_all(commands);
                }
            }
            self.observe();
            self.publish();
        }
    }

    /// Hands over what is to be told.
    fn publish(&mut self) {
        if !self.pending_replies.is_empty() {
            self.dispatcher.dispatch(std::mem::take(&mut self.pending_replies));
        }
    }

    fn observe(&self) {
        let occupation = self.engine.occupation();
        self.state.metrics.occupy(occupation.running, occupation.pages - occupation.free_pages, occupation.pages);
    }

    /// Whether to go on.
    fn obey(&mut self, command: Command) -> bool {
        match command {
            Command::End => return false,
            Command::Submit(job) => self.submit(*job),
            Command::Cancel(ticket) => self.end(ticket, None),
            Command::CancelChoice(ticket, choice) => {
                let of_choice = |(id, of): (&Id, &(u64, usize))| (*of == (ticket, choice)).then_some(*id);
                if let Some(id) = self.of.iter().find_map(of_choice) {
                    self.engine.cancel(id);
                    self.state.metrics.finished("stop");
                    self.finish(ticket, id);
                }
            }
            Command::Seat { seat, weights, done } => {
                let changed = match weights {
                    Some(weights) => self.engine.fill_seat(seat, &weights),
                    None => self.engine.empty_seat(seat),
                };
                // Whoever waits for it is a task that nobody ends.
                _ = done.send(changed.map_err(|error| ApiError::internal(error.to_string())));
            }
            Command::Abort => {
                let error = ApiError::unavailable("draining", "the server is shutting down");
                let tickets: Vec<u64> = self.open.keys().copied().collect();
                tickets.into_iter().for_each(|ticket| self.end(ticket, Some(error.clone())));
            }
        }
        true
    }

    fn submit(&mut self, job: Job) {
        let Job { ticket, choices, is_shared, top_logprobs, replies, place } = job;
        let times = vec![Times::default(); choices.len()];
        let prompt_tokens = choices.first().map_or(0, |first| first.prompt.len());
        let prompts = choices.iter().map(|choice| Arc::clone(&choice.prompt)).collect();
        let (place, submitted, running) = (Some(place), Instant::now(), Vec::new());
        let open =
            Open { replies, top_logprobs, place, later: choices, running, submitted, prompt_tokens, prompts, times };
        self.open.insert(ticket, open);
        self.submit_choices(ticket, if is_shared { 1 } else { usize::MAX });
    }

    fn end(&mut self, ticket: u64, error: Option<ApiError>) {
        let Some(open) = self.open.remove(&ticket) else { return };
        for id in open.running {
            self.engine.cancel(id);
            self.of.remove(&id);
        }
        self.state.metrics.finished("abort");
        if let Some(error) = error {
            self.pending_replies.push(PendingReply::reply(&open.replies, Reply::Failed(error)));
        }
    }

    fn tell(&mut self, event: Event) {
        let Some(&(ticket, choice)) = self.of.get(&event.id()) else { return };
        let Some(open) = self.open.get_mut(&ticket) else { return };
        let metrics = &self.state.metrics;
        let now = Instant::now();
        match event {
            Event::Admitted { cached, .. } => {
                let at = self.step_began;
                open.times[choice].admitted = Some(at);
                if open.place.take().is_some() {
                    metrics.admitted(open.prompt_tokens, cached as usize, at - open.submitted);
                    self.pending_replies.push(PendingReply::reply(&open.replies, Reply::Admitted { cached, at }));
                }
            }
            Event::Prompt { position, logits, .. } => {
                if let Some(&token) = open.prompts[choice].get(position as usize + 1) {
                    let top = open.top_logprobs.unwrap_or(0);
                    self.pending_replies.push(PendingReply::prompt(&open.replies, choice, token, logits, top));
                }
            }
            Event::Drafted { drafted, accepted, .. } => {
                metrics.drafted(drafted, accepted);
                self.pending_replies
                    .push(PendingReply::reply(&open.replies, Reply::Drafted { choice, drafted, accepted }));
            }
            Event::Token { token, logits, .. } => {
                let times = &mut open.times[choice];
                match times.latest {
                    None => {
                        times.first = Some(now);
                        metrics.first_token(now - open.submitted, now - times.admitted.unwrap_or(now));
                    }
                    Some(latest) => metrics.next_token(now - latest),
                }
                times.latest = Some(now);
                times.tokens += 1;
                self.pending_replies.push(PendingReply::token(&open.replies, choice, token, logits, open.top_logprobs));
                if !open.later.is_empty() {
                    self.submit_choices(ticket, usize::MAX);
                }
            }
            Event::Finished { id, reason } => {
                record_end(metrics, open, choice, reason, now);
                self.pending_replies
                    .push(PendingReply::reply(&open.replies, Reply::Finished { choice, reason, at: now }));
                self.finish(ticket, id);
            }
            Event::Failed { error, .. } => self.end(ticket, Some(ApiError::internal(error.to_string()))),
        }
    }

    /// A sequence has ended; with the last one its request has.
    fn finish(&mut self, ticket: u64, id: Id) {
        self.of.remove(&id);
        self.submit_choices(ticket, usize::MAX);
        let Some(open) = self.open.get_mut(&ticket) else { return };
        open.running.retain(|running| *running != id);
        if open.running.is_empty() {
            self.open.remove(&ticket);
        }
    }

    /// Asks for some of the choices that were not asked for yet.
    fn submit_choices(&mut self, ticket: u64, most: usize) {
        let Some(open) = self.open.get_mut(&ticket) else { return };
        let choices = open.times.len() - open.later.len()..open.times.len();
        let now: Vec<Request> = open.later.drain(..most.min(open.later.len())).collect();
        for (request, choice) in now.into_iter().zip(choices) {
            match self.engine.submit(request) {
                Ok(id) => {
                    open.running.push(id);
                    self.of.insert(id, (ticket, choice));
                }
                Err(error) => {
                    let error = error.into();
                    return self.end(ticket, Some(error));
                }
            }
        }
    }

    /// The device has failed, and with it everything.
    fn fail(&mut self, error: &str) {
        let message = format!("the device has failed: {error}");
        self.state.set_health(Health::Failed(message.clone()));
        for (_, open) in std::mem::take(&mut self.open) {
            self.pending_replies.push(PendingReply::reply(&open.replies, Reply::Failed(ApiError::internal(&message))));
        }
        self.of.clear();
        self.publish();
    }

    /// Requests that were on their way when the device failed.
    fn refuse_all(self, commands: &mpsc::Receiver<Command>) {
        for command in commands {
            if let Command::Submit(job) = command {
                _ = job.replies.send(Reply::Failed(ApiError::internal("the device has failed")));
            }
        }
    }
}

fn record_end(metrics: &Metrics, open: &Open, choice: usize, reason: Finish, now: Instant) {
    let times = open.times[choice];
    let decode = match (times.first, times.latest) {
        (Some(first), Some(latest)) => latest - first,
        _ => Duration::ZERO,
    };
    let name = if reason == Finish::Stop { "stop" } else { "length" };
    metrics.finished(name);
    metrics.ended(now - open.submitted, decode, open.prompt_tokens, times.tokens);
}
