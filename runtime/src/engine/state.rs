//! The engine itself: a device, its memory, its sequences, and the results that are in flight.
//!
//! What an engine does with them is in the files of each topic, as more methods of [`Engine`].

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::device::{Device, Limits, Picking};
use super::drafts::{Drafts, Speculation};
use super::pace::{Gap, Pace, Work};
use super::pool::Pool;
use super::prefix::{Chain, Prefixes};
use super::request::{Event, Finish, Id, Request};
use super::seated::Fillings;
use super::sequence::Sequence;
use crate::sampler::Recited;
use crate::{RuntimeError, Sampler};

/// What an engine is given besides its device.
pub struct Options {
    /// The longest gap between tokens that the prompts of others may cause.
    pub gap: Gap,
    /// All prompts that have room are read before the next token is decoded: nobody waits for a single answer, and full
    /// batches are the fastest.
    pub prompts_first: bool,
    /// Results that stay in flight between two steps; `None` for as many as the device is worth.
    pub ahead: Option<u32>,
    /// Tokens that are never picked, where the host picks; the device has its own list, which must be the same.
    pub suppress: Vec<u32>,
    /// Tokens that are guessed and verified several at once.
    pub drafts: Drafts,
    /// The time, from any beginning.
    pub clock: Box<dyn Fn() -> Duration + Send>,
}

impl Default for Options {
    fn default() -> Options {
        let started = Instant::now();
        Options {
            gap: Gap::Any,
            prompts_first: false,
            ahead: None,
            suppress: Vec::new(),
            drafts: Drafts::default(),
            clock: Box::new(move || started.elapsed()),
        }
    }
}

/// How an engine is occupied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Occupation {
    pub waiting: usize,
    pub running: usize,
    /// Of keys and values.
    pub free_pages: usize,
    pub pages: usize,
    pub snapshots: usize,
}

/// A device, its memory and its sequences.
pub struct Engine<D: Device> {
    pub(super) device: D,
    pub(super) limits: Limits,
    pub(super) pool: Pool,
    pub(super) prefixes: Prefixes,
    pub(super) fillings: Fillings,
    pub(super) pace: Pace,
    pub(super) speculation: Speculation,
    /// While a single sequence is in rounds that the device closes.
    pub(super) rounds: Option<Rounds>,
    /// What is said whatever is picked.
    pub(super) recited: Option<Recited>,
    pub(super) prompts_first: bool,
    pub(super) ahead: usize,
    pub(super) clock: Box<dyn Fn() -> Duration + Send>,
    pub(super) host_sampler: Sampler,
    pub(super) waiting: VecDeque<(Id, Request, Chain)>,
    /// Of clients with waiting requests: their latest admission, by its number.
    pub(super) turns: HashMap<u64, usize>,
    /// Admitted, oldest first.
    pub(super) sequences: BTreeMap<Id, Sequence>,
    /// The rows of the latest decode.
    pub(super) batch: Arc<[Id]>,
    /// Whether the latest decode can simply be repeated.
    pub(super) steady: bool,
    /// Whether its picks wait for masks. One result is in flight then, for which the tokens before it must be known.
    pub(super) guided: bool,
    /// Whether other rows are to be decoded as soon as all tokens in flight are known.
    pub(super) draining: bool,
    pub(super) in_flight: VecDeque<InFlight>,
    /// When the device began with the oldest of these.
    pub(super) began: Duration,
    pub(super) events: Vec<Event>,
    /// Chunks that several prompts shared.
    pub(super) shared_chunks: u64,
    /// Positions that the latest sequence to end has written, those in vain included.
    pub(super) written: u32,
    pub(super) next: u64,
}

/// A result that the device owes.
pub(super) struct InFlight {
    /// Whose tokens it has.
    pub(super) rows: Arc<[Id]>,
    pub(super) work: Work,
    /// Whether its tokens are picked by masks that are not known yet.
    pub(super) waits: bool,
    /// Logits of tokens of a prompt, which come first: whose, of which token on, and how many.
    pub(super) read: Option<(Id, u32, usize)>,
}

/// A sequence that goes on in rounds.
pub(super) struct Rounds {
    pub(super) id: Id,
    pub(super) picking: Picking,
    /// How many of its rounds may be in flight.
    pub(super) ahead: usize,
}

impl<D: Device> Engine<D> {
    pub fn new(device: D, options: Options) -> Result<Engine<D>, RuntimeError> {
        let limits = device.limits().clone();
        let greedy = Request::greedy(Vec::new(), 0).sampling;
        let speculation = Speculation::new(options.drafts);
        speculation.check(&limits)?;
        Ok(Engine {
            pool: Pool::new(&limits),
            prefixes: Prefixes::new(&limits),
            fillings: Fillings::new(limits.seats),
            pace: Pace::new(options.gap),
            speculation,
            rounds: None,
            recited: None,
            prompts_first: options.prompts_first,
            ahead: options.ahead.unwrap_or(limits.ahead) as usize,
            clock: options.clock,
            host_sampler: Sampler::new(greedy, 0, options.suppress)?,
            limits,
            device,
            waiting: VecDeque::new(),
            turns: HashMap::new(),
            sequences: BTreeMap::new(),
            batch: Arc::default(),
            steady: false,
            guided: false,
            draining: false,
            in_flight: VecDeque::new(),
            began: Duration::ZERO,
            events: Vec::new(),
            shared_chunks: 0,
            written: 0,
            next: 0,
        })
    }

    pub fn device(&self) -> &D {
        &self.device
    }

    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    pub fn occupation(&self) -> Occupation {
        Occupation {
            waiting: self.waiting.len(),
            running: self.sequences.len(),
            free_pages: self.pool.free_pages(),
            pages: self.pool.pages(),
            snapshots: self.prefixes.len(),
        }
    }

    /// Chunks that several prompts have shared so far.
    pub fn shared_chunks(&self) -> u64 {
        self.shared_chunks
    }

    /// Whether a step would do nothing.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.sequences.is_empty() && self.in_flight.is_empty() && self.events.is_empty()
    }

    pub(super) fn new_id(&mut self) -> Id {
        self.next += 1;
        Id(self.next)
    }

    /// Forgets all prefixes that are kept.
    pub fn forget_prefixes(&mut self) {
        self.prefixes.clear(&mut self.pool);
    }

    pub(super) fn finish(&mut self, id: Id, reason: Finish) {
        self.remove(id);
        self.events.push(Event::Finished { id, reason });
    }

    /// The latest decode is not one that could be repeated.
    pub(super) fn leave_batch(&mut self) {
        (self.steady, self.guided) = (false, false);
        self.batch = Arc::default();
    }

    /// Rows of a sequence that decodes in flight write, from its position on.
    pub(super) fn rows_in_flight(&self, id: Id) -> u32 {
        let rows = |result: &InFlight| match result.work {
            Work::Decode(_) => 1,
            Work::Closed { drafts, .. } => drafts + 1,
            _ => 0,
        };
        self.in_flight.iter().filter(|result| result.rows.contains(&id)).map(rows).sum()
    }

    /// Frees a sequence's memory. What is still queued for it writes there before anybody else does, since the device
    /// works in order.
    pub(super) fn remove(&mut self, id: Id) -> bool {
        let Some(sequence) = self.sequences.remove(&id) else { return false };
        self.written = sequence.written.max(sequence.position() + self.rows_in_flight(id));
        sequence.pages.iter().for_each(|page| self.pool.release(page));
        self.pool.release_slot(sequence.slot);
        self.steady = false;
        true
    }

    /// Whether every page, slot and unit of memory is free or owned exactly as often as it is used: what tests ask
    /// after every step.
    pub fn audit(&self) -> Result<(), String> {
        let mut pages = self.prefixes.owned();
        pages.extend(self.sequences.values().flat_map(|sequence| sequence.pages.iter()));
        let slots: Vec<u32> = self.sequences.values().map(|sequence| sequence.slot).collect();
        self.pool.audit(&pages, &slots, &self.limits)?;
        self.prefixes.audit(&self.limits)
    }
}
