//! Many sequences over one loaded model: admission, prompts in chunks between decodes, prefixes that are kept.
//!
//! ```text
//! submit ──► waiting ──► admitted: a slot, and blocks for all it may need ──► prefill, chunk by chunk ──► decode ──► finished
//!             (first come, first served)      (a kept prefix is not computed again; short prompts share a chunk)      (all rows at once)
//! ```
//!
//! [`Engine::step`] is one turn: some of the waiting prompts' tokens, then one decode of all running rows. It blocks for no longer than
//! the device takes, calls nobody back, and returns what happened as [`Event`]s. A request's memory is reserved when it is admitted, so nothing is
//! ever evicted half-way. An answer depends on its request alone: not on neighbours, slots, block numbers, or what was kept.
//!
//! Text, templates and networks are somebody else's: here are token ids. Threads too: an engine is driven by one.

mod depths;
mod device;
mod device_backend;
mod device_cpu;
mod media;
mod pace;
mod pool;
mod prefix;
mod prompts;
mod request;
mod results;
mod sequence;
mod speculate;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::{Duration, Instant};

pub use device::{AskedRow, Chunk, Device, Limits, Mask, Part, Picked, Picking, Row};
pub(crate) use device_backend::draft::{DraftFrom, DraftedStep};
pub use device_backend::{BackendDevice, BackendOptions};
pub use device_cpu::{CpuDevice, CpuOptions};
pub use media::Attachment;
pub use pace::Gap;
use pace::{Pace, Work};
use pool::Pool;
use prefix::{Chain, Prefixes};
pub use request::{BoxedRule, Demand, Event, Finish, Fork, Id, LONGEST_SALT, Request, RequestError, Rule};
use sequence::{Sequence, Stage};
use speculate::Speculation;
pub use speculate::{DraftCounts, DraftSource, Drafts, Guess};

use crate::{RuntimeError, Sampler};

/// What an engine is given besides its device.
pub struct Options {
    /// The longest gap between tokens that the prompts of others may cause.
    pub gap: Gap,
    /// All prompts that have room are read before the next token is decoded: nobody waits for a single answer, and full batches
    /// are the fastest.
    pub prompts_first: bool,
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
    pub free_blocks: usize,
    pub blocks: usize,
    pub snapshots: usize,
}

/// A device, its memory and its sequences.
pub struct Engine<D: Device> {
    device: D,
    limits: Limits,
    pool: Pool,
    prefixes: Prefixes,
    pace: Pace,
    speculation: Speculation,
    prompts_first: bool,
    clock: Box<dyn Fn() -> Duration + Send>,
    host_sampler: Sampler,
    waiting: VecDeque<(Id, Request, Chain)>,
    /// Of clients with waiting requests: their latest admission, by its number.
    turns: HashMap<u64, usize>,
    /// Admitted, oldest first.
    sequences: BTreeMap<Id, Sequence>,
    /// The rows of the latest decode.
    batch: Vec<Id>,
    /// Whether the latest decode can simply be repeated.
    steady: bool,
    /// Whether its picks wait for masks. One result is on its way then, for which the tokens before it must be known.
    guided: bool,
    /// Whether other rows are to be decoded as soon as all tokens on their way are known.
    draining: bool,
    in_flight: VecDeque<InFlight>,
    /// When the device began with the oldest of these.
    began: Duration,
    events: Vec<Event>,
    /// Chunks that several prompts shared.
    shared_chunks: u64,
    next: u64,
}

/// A result that the device owes.
struct InFlight {
    /// Whose tokens it has.
    rows: Vec<Id>,
    work: Work,
    /// Whether its tokens are picked by masks that are not known yet.
    waits: bool,
    /// Logits of tokens of a prompt, which come first: whose, of which token on, and how many.
    read: Option<(Id, u32, usize)>,
}

impl<D: Device> Engine<D> {
    pub fn new(device: D, options: Options) -> Result<Engine<D>, RuntimeError> {
        let limits = device.limits().clone();
        let greedy = Request::greedy(Vec::new(), 0).sampling;
        Ok(Engine {
            pool: Pool::new(&limits),
            prefixes: Prefixes::new(&limits),
            pace: Pace::new(options.gap),
            speculation: Speculation::new(options.drafts, &device)?,
            prompts_first: options.prompts_first,
            clock: options.clock,
            host_sampler: Sampler::new(greedy, 0, options.suppress)?,
            limits,
            device,
            waiting: VecDeque::new(),
            turns: HashMap::new(),
            sequences: BTreeMap::new(),
            batch: Vec::new(),
            steady: false,
            guided: false,
            draining: false,
            in_flight: VecDeque::new(),
            began: Duration::ZERO,
            events: Vec::new(),
            shared_chunks: 0,
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
            free_blocks: self.pool.free_blocks(),
            blocks: self.pool.blocks(),
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

    /// Whether a request can be served at all.
    pub fn check(&self, request: &Request) -> Result<(), RequestError> {
        sequence::check(request, &self.limits)?;
        media::check(request, self.device.towers(), self.limits.chunk())
    }

    /// Queues a request. One that could never be served is refused at once.
    pub fn submit(&mut self, request: Request) -> Result<Id, RequestError> {
        self.check(&request)?;
        let keys = media::keys(&request, self.device.towers());
        let chain = Chain::new(self.device.identity(), &request.salt, keys, self.limits.block_rows);
        let id = self.new_id();
        self.waiting.push_back((id, request, chain));
        Ok(id)
    }

    fn new_id(&mut self) -> Id {
        self.next += 1;
        Id(self.next)
    }

    /// Ends a sequence wherever it stands; its memory is free for the next step. `false` where it has ended already.
    pub fn cancel(&mut self, id: Id) -> bool {
        let waiting = self.waiting.iter().position(|(other, ..)| *other == id);
        let was_there = match waiting {
            Some(index) => self.waiting.remove(index).is_some(),
            None => self.remove(id),
        };
        if was_there {
            self.events.push(Event::Finished { id, reason: Finish::Cancelled });
        }
        was_there
    }

    /// A second sequence that begins with everything the first has generated so far, its latest token included. It shares whole blocks
    /// and has its own copies of the rest. Among the events of the next step, the parent's tokens before the fork's admission are those that the two
    /// have in common.
    pub fn fork(&mut self, parent: Id, fork: &Fork) -> Result<Id, RequestError> {
        sequence::check_sampling(&fork.sampling)?;
        self.drain()?;
        let generates = |sequence: &&Sequence| matches!(sequence.stage, Stage::Generating { .. });
        let Some(parent) = self.sequences.get(&parent).filter(generates) else {
            return Err(RequestError::NotRunning(parent.0));
        };
        let child = parent.forked(fork, &self.limits);
        if child.left == 0 {
            return Err(RequestError::NothingAsked);
        }
        let shared = (child.position() / self.limits.block_rows) as usize;
        let has_rest = !child.position().is_multiple_of(self.limits.block_rows);
        let parent_pages: Vec<u32> = parent.pages[..shared + has_rest as usize].to_vec();
        let parent_slot = parent.slot;
        let needed = self.limits.blocks_for(child.positions) as usize;
        let fresh = needed.saturating_sub(shared);
        if self.pool.free_slots() == 0 || self.sequences.len() as u32 >= self.limits.rows {
            return Err(RequestError::NoRoom("all slots are taken"));
        }
        if !self.prefixes.make_room(fresh, None, &mut self.pool, &mut self.device)? {
            return Err(RequestError::NoRoom("too few blocks are free"));
        }
        let slot = self.pool.take_slot().expect("one is free");
        let mut pages = parent_pages[..shared.min(needed)].to_vec();
        pages.iter().for_each(|block| self.pool.share(*block));
        pages.extend((0..fresh).map(|_| self.pool.take_block().expect("there is room")));
        self.device.copy(Part::Ring(parent_slot), Part::Ring(slot))?;
        if has_rest && fresh > 0 {
            self.device.copy(Part::Block(parent_pages[shared]), Part::Block(pages[shared]))?;
        }
        self.device.set_pages(slot, &pages)?;
        let id = self.new_id();
        self.steady = false;
        self.events.push(Event::Admitted { id, cached: child.position() });
        self.sequences.insert(id, Sequence { slot, pages, ..child });
        Ok(id)
    }

    /// Forgets all prefixes that are kept.
    pub fn forget_prefixes(&mut self) {
        self.prefixes.clear(&mut self.pool);
    }

    /// One turn: admits who has room, computes some of the prompts and one token for each running sequence.
    ///
    /// An error is the device's, and ends everything; what is one sequence's own is an event.
    pub fn step(&mut self) -> Result<Vec<Event>, RuntimeError> {
        self.admit()?;
        if !self.draining {
            self.queue_prompts()?;
        }
        if self.draining || !self.prompts_first || self.sequences.values().all(Sequence::has_read_all) {
            self.queue_decode()?;
        }
        self.collect_beyond(self.limits.ahead as usize)?;
        Ok(std::mem::take(&mut self.events))
    }

    /// Admits whom there is room for. Whoever is next and has no room yet keeps the others behind.
    fn admit(&mut self) -> Result<(), RuntimeError> {
        while self.pool.free_slots() > 0 && (self.sequences.len() as u32) < self.limits.rows {
            let Some(next) = self.next_waiting() else { break };
            let (id, request, chain) = &self.waiting[next];
            let id = *id;
            let positions = sequence::positions(request, &self.limits);
            let count = self.limits.blocks_for(positions) as usize;
            let slot = self.pool.take_slot().expect("one is free");
            let hit = self.prefixes.find(chain).filter(|_| !request.prompt_logits);
            let (pool, device) = (&mut self.pool, &mut self.device);
            let mut admitted = None;
            if let Some(hit) = hit
                && let Some(pages) = self.prefixes.start_from(hit, slot, count, pool, device)?
            {
                admitted = Some((pages, hit.position));
            }
            // A prefix takes a block more than its sequence while it is copied. Where that is one too many and nobody will ever
            // leave, the prompt is computed as a whole.
            let may_be_alone = hit.is_none() || self.sequences.is_empty();
            if admitted.is_none() && may_be_alone && self.prefixes.make_room(count, None, pool, device)? {
                admitted = Some(((0..count).map(|_| pool.take_block().expect("there is room")).collect(), 0));
            }
            let Some((pages, cached)) = admitted else {
                pool.release_slot(slot);
                break;
            };
            device.set_pages(slot, &pages)?;
            let (_, request, chain) = self.waiting.remove(next).expect("it waits");
            self.take_turn(request.client);
            self.prefixes.use_named(&request.snapshot_at, &chain);
            let mut sequence = Sequence::new(request, chain, slot, pages, cached, &self.limits);
            if self.speculation.reads_text() {
                sequence.keep_text();
            }
            self.sequences.insert(id, sequence);
            self.events.push(Event::Admitted { id, cached });
        }
        Ok(())
    }

    /// The place of the request that is next: of the client with the fewest sequences, then of the one whose turn was longest ago, then the first
    /// that came. One client's many requests do not keep another's from beginning.
    fn next_waiting(&self) -> Option<usize> {
        let mut running: HashMap<u64, usize> = HashMap::new();
        for sequence in self.sequences.values() {
            *running.entry(sequence.request.client).or_default() += 1;
        }
        let of = |map: &HashMap<u64, usize>, client: u64| map.get(&client).copied().unwrap_or(0);
        let turn = |client: u64| (of(&running, client), of(&self.turns, client));
        let waiting = self.waiting.iter().enumerate();
        waiting.min_by_key(|(_, (_, request, _))| turn(request.client)).map(|(place, _)| place)
    }

    /// Notes that a client had its turn. Those who wait for nothing are forgotten.
    fn take_turn(&mut self, client: u64) {
        let latest = self.turns.values().max().copied().unwrap_or(0);
        self.turns.insert(client, latest + 1);
        let waits = |client: &u64| self.waiting.iter().any(|(_, request, _)| request.client == *client);
        self.turns.retain(|client, _| waits(client));
    }

    /// Queues one decode: the latest once more, where the same rows go on, or else, once all tokens are known, one of those that are there. With
    /// drafts, where they pay.
    fn queue_decode(&mut self) -> Result<(), RuntimeError> {
        let ahead = self.in_flight.iter().filter(|result| matches!(result.work, Work::Decode(_))).count() as u32;
        let may_repeat = self.steady && self.batch.iter().all(|id| self.sequences[id].left > ahead);
        if may_repeat && !self.draining && !self.wants_round() {
            self.device.decode_again()?;
            return self.await_decode();
        }
        // Tokens are given out as they come: others must not wait for the last of them.
        self.draining = true;
        while !self.in_flight.is_empty() {
            self.collect()?;
            if !self.events.is_empty() && !self.in_flight.is_empty() {
                return Ok(());
            }
        }
        self.draining = false;
        if self.round()? {
            return Ok(());
        }
        let mut rows = Vec::new();
        self.batch.clear();
        (self.steady, self.guided) = (true, false);
        for (id, sequence) in &self.sequences {
            let Stage::Generating { pending, position } = sequence.stage else { continue };
            let picking = sequence.picking(&self.device);
            self.steady &= !picking.logits;
            self.guided |= picking.masked;
            rows.push(Row { slot: sequence.slot, position, token: pending, picking });
            self.batch.push(*id);
        }
        self.steady &= !rows.is_empty();
        if !rows.is_empty() {
            self.began = (self.clock)();
            self.device.decode(&rows)?;
            self.await_decode()?;
        }
        Ok(())
    }

    fn finish(&mut self, id: Id, reason: Finish) {
        self.remove(id);
        self.events.push(Event::Finished { id, reason });
    }

    /// Frees a sequence's memory. What is still queued for it writes there before anybody else does, since the device works in order.
    fn remove(&mut self, id: Id) -> bool {
        let Some(sequence) = self.sequences.remove(&id) else { return false };
        sequence.pages.iter().for_each(|block| self.pool.release(*block));
        self.pool.release_slot(sequence.slot);
        self.steady = false;
        true
    }

    /// Whether every block, ring and unit of memory is free or owned exactly as often as it is used: what tests ask after every step.
    pub fn audit(&self) -> Result<(), String> {
        let (mut blocks, rings) = self.prefixes.owned();
        blocks.extend(self.sequences.values().flat_map(|sequence| &sequence.pages));
        let slots: Vec<u32> = self.sequences.values().map(|sequence| sequence.slot).collect();
        self.pool.audit(&blocks, &slots, &rings, &self.limits)?;
        self.prefixes.audit(&self.limits)
    }
}
