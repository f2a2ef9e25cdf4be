//! A device without a model: a row is the hash of everything it can see, so that a wrong page, a stale window, or a row
//! that another sequence wrote changes every token after it.
//!
//! Time is virtual: work takes as long as it says, and whoever waits for a result moves the clock.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use gemma4c_plan::cuda::Paging;
use gemma4c_plan::{Sampling, SeatWeights};
use gemma4c_runtime::engine::{
    AskedRow, Chunk, Demand, Device, Finish, Limits, Mask, Picked, Picking, Request, Row, Rule, Seated,
};
use gemma4c_runtime::{Patches, RuntimeError, Sampler, TowerLimits};

/// Positions that a sliding layer looks back on, its own among them.
pub const WINDOW: usize = 20;
/// Positions of a page for the window.
pub const SLIDING_ROWS: u32 = 8;

pub fn mix(a: u64, b: u64) -> u64 {
    let mut z = (a ^ b.rotate_left(32)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// What is stored at a position: it depends on the token, on all rows before it, and on which kind of pass computed it.
pub fn row(token: u32, decoded: bool, window: impl Iterator<Item = u64>, all: impl Iterator<Item = u64>) -> u64 {
    let seen = all.fold(window.fold(1, mix), mix);
    mix(mix(seen, token as u64), decoded as u64)
}

/// The same of a sequence with an adapter; 0 is none.
pub fn adapted(row: u64, adapter: u64) -> u64 {
    if adapter == 0 { row } else { mix(row, adapter) }
}

/// What an adapter of that strength does to rows.
pub fn effect(weights: &SeatWeights, strength: f32) -> u64 {
    let bytes = weights.matrices.iter().flatten();
    mix(
        bytes.fold(weights.matrices.len() as u64, |all, byte| mix(all, u64::from(*byte))),
        u64::from(strength.to_bits()),
    )
}

pub fn logits(row: u64, vocab: u32) -> Vec<f32> {
    (0..vocab as u64).map(|token| (mix(row, token) % 1000) as f32 / 200.0).collect()
}

pub fn pick(row: u64, sampling: Sampling, seed: u64, position: u32, allowed: &Mask, vocab: u32) -> u32 {
    let mut sampler = Sampler::new(sampling, seed, vec![]).unwrap();
    let mut logits = logits(row, vocab);
    allowed.apply(&mut logits);
    sampler.pick(&logits, position as u64).unwrap()
}

/// After a token that three divides, an even one must come; which of them is allowed depends on the token.
#[derive(Clone)]
pub struct EvenAfterThree {
    last: Option<u32>,
    /// What it demands then.
    demand: Demand,
}

impl EvenAfterThree {
    pub fn by(demand: Demand) -> EvenAfterThree {
        EvenAfterThree { last: None, demand }
    }

    fn allows(&self, token: u32) -> bool {
        token.is_multiple_of(2) && self.last.is_none_or(|last| token != last && !(token + last).is_multiple_of(10))
    }
}

impl Rule for EvenAfterThree {
    fn demand(&self) -> Demand {
        match self.last.is_some_and(|token| token.is_multiple_of(3)) {
            true => self.demand,
            false => Demand::Nothing,
        }
    }

    fn restrict(&mut self, allowed: &mut Mask) {
        assert_eq!(self.demand(), Demand::Mask);
        (0..1000).filter(|token| !self.allows(*token)).for_each(|token| allowed.forbid(token));
    }

    fn apply(&mut self, logits: &mut [f32]) {
        let denied = logits.iter_mut().zip(0..).filter(|(_, token)| !self.allows(*token));
        denied.for_each(|(logit, _)| *logit = f32::NAN);
    }

    fn picked(&mut self, token: u32) {
        self.last = Some(token);
    }

    fn copy(&self) -> Box<dyn Rule> {
        Box::new(self.clone())
    }
}

/// One number a soft token, beyond every vocabulary, which depends on all patches.
pub fn soft_tokens(tower: usize, patches: Patches<'_>) -> Vec<f32> {
    let shape = mix(patches.columns as u64, patches.rows as u64);
    let all = patches.values.iter().fold(mix(shape, tower as u64), |all, value| mix(all, value.to_bits() as u64));
    let soft = if tower == 0 { patches.columns / 3 * (patches.rows / 3) } else { patches.columns };
    (0..soft as u64).map(|index| (1000 + mix(all, index) % 100_000) as f32).collect()
}

/// A sequence alone, without pages or chunks.
#[derive(Clone, Default)]
pub struct Alone {
    rows: Vec<u64>,
    adapter: u64,
}

impl Alone {
    fn feed(&mut self, token: u32, decoded: bool) -> u64 {
        let window = self.rows.iter().rev().take(WINDOW - 1).rev().copied();
        let value = adapted(row(token, decoded, window, self.rows.iter().copied()), self.adapter);
        self.rows.push(value);
        value
    }

    /// What has read a request's prompt, without an adapter.
    pub fn of(request: &Request) -> Alone {
        Alone::with(request, 0)
    }

    /// The same with what an adapter does to rows.
    pub fn with(request: &Request, adapter: u64) -> Alone {
        let mut tokens = request.prompt.to_vec();
        for attachment in &*request.media {
            let soft = soft_tokens(attachment.tower, attachment.patches());
            for (token, soft) in tokens[attachment.position as usize..].iter_mut().zip(soft) {
                *token = soft as u32;
            }
        }
        let mut alone = Alone { adapter, ..Alone::default() };
        tokens.iter().for_each(|token| _ = alone.feed(*token, false));
        alone
    }

    /// The logits after every token but the last.
    pub fn read(&self, vocab: u32) -> Vec<Vec<f32>> {
        self.rows.iter().take(self.rows.len() - 1).map(|row| logits(*row, vocab)).collect()
    }

    /// Feeds generated tokens.
    pub fn decode(&mut self, tokens: &[u32]) {
        tokens.iter().for_each(|token| _ = self.feed(*token, true));
    }

    /// What follows by a request's rules; `pending` is a token that is not fed yet.
    pub fn answer(mut self, request: &Request, pending: Option<u32>, limits: &Limits) -> (Vec<u32>, Finish) {
        let mut tokens = vec![];
        let mut rule = request.rule.clone();
        if let Some(token) = pending {
            self.feed(token, true);
            rule.iter_mut().for_each(|rule| rule.0.picked(token));
        }
        loop {
            if tokens.len() as u32 == request.most {
                return (tokens, Finish::Length);
            }
            let position = self.rows.len() as u32;
            let mut row = logits(self.rows[position as usize - 1], limits.vocab);
            let demanding = rule.iter_mut().filter(|rule| rule.0.demand() != Demand::Nothing);
            demanding.for_each(|rule| rule.0.apply(&mut row));
            let mut sampler = Sampler::new(request.sampling, request.seed, vec![]).unwrap();
            let token = sampler.pick(&row, position as u64).unwrap();
            if request.stop.contains(&token) {
                return (tokens, Finish::Stop);
            }
            tokens.push(token);
            rule.iter_mut().for_each(|rule| rule.0.picked(token));
            if position == limits.context && (tokens.len() as u32) < request.most {
                return (tokens, Finish::Context);
            }
            if (tokens.len() as u32) < request.most {
                self.feed(token, true);
            }
        }
    }
}

/// What a row has seen, as a hash, how its token is picked, and at which position.
type Unpicked = (u64, Picking, u32);

pub struct Fake {
    limits: Limits,
    pub towers: Vec<TowerLimits>,
    pub times: Times,
    clock: Arc<AtomicU64>,
    busy_until: u64,
    pages: Vec<Vec<u64>>,
    host: Vec<Vec<u64>>,
    /// Of each slot the pages for the window, and for all positions.
    tables: Vec<[Vec<u32>; 2]>,
    /// What is in the seats, and of each slot which it has and how strong that is.
    seats: Vec<SeatWeights>,
    seated: Vec<Option<Seated>>,
    latest: Vec<Row>,
    /// Rows whose picks wait for masks, the time when they have logits, and whether they are the latest decode's.
    waiting: Option<(Vec<Unpicked>, u64, bool)>,
    results: VecDeque<(u64, Vec<Picked>)>,
    /// Slots and positions whose rows the latest passes have left for a drafter.
    entered: BTreeSet<(u32, u32)>,
    /// Whether it closes rounds by itself, and where the next one begins.
    pub closes_rounds: bool,
    next_round: Option<Row>,
    pub counts: Counts,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub prompt_tokens: u64,
    /// Chunks, and those of several prompts.
    pub chunks: u64,
    pub shared: u64,
    pub decodes: u64,
    pub repeated: u64,
    pub saved: u64,
    pub loaded: u64,
    pub most_on_their_way: usize,
    /// Decodes whose picks waited for masks, while others were on their way.
    pub guided: u64,
    /// Media that a tower has read.
    pub looked: u64,
    pub guided_behind_others: u64,
    /// Decodes with several rows of a sequence, and those for which the drafter has run.
    pub verified: u64,
    pub drafted: u64,
    /// Rounds that were closed here, and those of them that were queued behind others.
    pub closed: u64,
    pub closed_behind_others: u64,
}

/// Nanoseconds of a row of a prompt, and of a decode.
pub const ROW_TIME: u64 = 100_000;
pub const DECODE_TIME: u64 = 5_000_000;
/// Of a token of the drafter.
pub const DRAFT_TIME: u64 = 50_000;

/// Nanoseconds of a chunk and of a decode of so many rows, and of each asked row of a chunk but the first.
#[derive(Clone, Copy)]
pub struct Times {
    pub chunk: fn(u32) -> u64,
    pub decode: fn(u32) -> u64,
    pub asked: u64,
}

impl Fake {
    /// A window has pages of eight positions, and one chunk beyond it.
    pub fn new(mut limits: Limits) -> Fake {
        let kept = WINDOW as u32 + limits.chunk().max(limits.ahead);
        limits.sliding = Paging { rows: SLIDING_ROWS, entries: kept.div_ceil(SLIDING_ROWS) };
        limits.full.entries = limits.context.div_ceil(limits.full.rows);
        let rows = limits.full.rows.max(SLIDING_ROWS) as usize;
        Fake {
            towers: vec![],
            times: Times { chunk: |rows| rows as u64 * ROW_TIME, decode: |_| DECODE_TIME, asked: 0 },
            clock: Arc::default(),
            busy_until: 0,
            pages: vec![vec![0; rows]; limits.pages as usize],
            host: vec![vec![]; limits.host_units as usize],
            tables: vec![Default::default(); limits.slots as usize],
            seats: vec![SeatWeights::default(); limits.seats.map_or(0, |seats| seats.count) as usize],
            seated: vec![None; limits.slots as usize],
            latest: vec![],
            waiting: None,
            results: VecDeque::new(),
            entered: BTreeSet::new(),
            closes_rounds: false,
            next_round: None,
            counts: Counts::default(),
            limits,
        }
    }

    pub fn clock(&self) -> Box<dyn Fn() -> Duration + Send> {
        let clock = Arc::clone(&self.clock);
        Box::new(move || Duration::from_nanos(clock.load(Ordering::Relaxed)))
    }

    fn feed(&mut self, slot: u32, position: u32, token: u32, decoded: bool) -> u64 {
        assert!(slot < self.limits.slots);
        let at = position as usize;
        let place = |kind: usize, position: usize| {
            let Paging { rows, entries } = [self.limits.sliding, self.limits.full][kind];
            let (rows, entries) = (rows as usize, entries as usize);
            (self.tables[slot as usize][kind][position / rows % entries] as usize, position % rows)
        };
        let value = |(page, row): (usize, usize)| self.pages[page][row];
        let window = (at.saturating_sub(WINDOW - 1)..at).map(|p| value(place(0, p)));
        let all = (0..at).map(|p| value(place(1, p)));
        let adapter = self.seated[slot as usize].map_or(0, |of| effect(&self.seats[of.seat as usize - 1], of.strength));
        let value = adapted(row(token, decoded, window, all), adapter);
        for (page, row) in [place(0, at), place(1, at)] {
            self.pages[page][row] = value;
        }
        value
    }

    fn picked(&self, (value, picking, position): (u64, Picking, u32), mask: Option<&Mask>) -> Picked {
        let all = Mask::all(self.limits.vocab);
        let allowed = mask.unwrap_or(&all);
        let token = match picking.token {
            true => pick(value, picking.sampling, picking.seed, position, allowed, self.limits.vocab),
            // What nobody may look at.
            false => 0,
        };
        assert!(picking.logits || picking.token, "who picks?");
        assert!(!picking.token || self.can_pick(&picking.sampling), "the device cannot");
        let logits = if picking.logits { logits(value, self.limits.vocab) } else { vec![] };
        Picked { token, logits }
    }

    /// Rows have logits after so much time: they are picked, or wait for masks.
    fn take_time(&mut self, time: u64, rows: Vec<Unpicked>, is_decode: bool) {
        assert!(self.waiting.is_none(), "the picks before come first");
        self.busy_until = self.busy_until.max(self.clock.load(Ordering::Relaxed)) + time;
        if rows.iter().any(|(_, picking, _)| picking.masked) {
            self.counts.guided += 1;
            self.counts.guided_behind_others += u64::from(!self.results.is_empty());
            self.waiting = Some((rows, self.busy_until, is_decode));
        } else {
            self.finish(rows, &[], self.busy_until, is_decode);
        }
    }

    fn finish(&mut self, rows: Vec<(u64, Picking, u32)>, masks: &[Option<Mask>], time: u64, is_decode: bool) {
        let mask = |row: usize| masks.get(row).and_then(Option::as_ref);
        let picked: Vec<Picked> = rows.into_iter().enumerate().map(|(at, row)| self.picked(row, mask(at))).collect();
        if is_decode {
            for (row, picked) in self.latest.iter_mut().zip(&picked) {
                (row.position, row.token) = (row.position + 1, picked.token);
            }
        }
        self.results.push_back((time, picked));
        self.counts.most_on_their_way = self.counts.most_on_their_way.max(self.results.len());
    }

    fn run(&mut self) {
        let mut rows = vec![];
        for row in self.latest.clone() {
            let value = self.feed(row.slot, row.position, row.token, true);
            rows.push((value, row.picking, row.position + 1));
        }
        self.entered = self.latest.iter().map(|row| (row.slot, row.position)).collect();
        self.counts.decodes += 1;
        self.next_round = None;
        self.take_time((self.times.decode)(rows.len() as u32), rows, true);
    }

    /// Guesses what follows the first of these rows: mostly what will be picked, where no rule has a say in it.
    fn draft(&mut self, rows: &mut [Row]) {
        let pages = self.pages.clone();
        let mut token = rows[0].token;
        for row in &mut *rows {
            row.token = token;
            let value = self.feed(row.slot, row.position, token, true);
            let all = Mask::all(self.limits.vocab);
            token = pick(value, row.picking.sampling, row.picking.seed, row.position + 1, &all, self.limits.vocab);
            if mix(value, 2).is_multiple_of(5) {
                token = (token + 1) % self.limits.vocab;
            }
        }
        self.pages = pages;
    }
}

impl Device for Fake {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn name(&self) -> String {
        "fake".into()
    }

    fn identity(&self) -> u128 {
        7
    }

    fn can_pick(&self, sampling: &Sampling) -> bool {
        sampling.top_k != 0
    }

    fn towers(&self) -> &[TowerLimits] {
        &self.towers
    }

    fn soft_tokens(&mut self, tower: usize, patches: Patches<'_>) -> Result<Vec<f32>, RuntimeError> {
        assert!(self.waiting.is_none() && self.results.is_empty());
        self.counts.looked += 1;
        self.clock.fetch_add(3 * DECODE_TIME, Ordering::Relaxed);
        Ok(soft_tokens(tower, patches))
    }

    fn set_pages(&mut self, slot: u32, sliding: &[u32], full: &[u32]) -> Result<(), RuntimeError> {
        assert!(sliding.iter().chain(full).all(|page| *page < self.limits.pages));
        self.tables[slot as usize] = [sliding, full].map(<[u32]>::to_vec);
        self.entered.retain(|(of, _)| *of != slot);
        Ok(())
    }

    fn fill_seat(&mut self, seat: u32, weights: &SeatWeights) -> Result<(), RuntimeError> {
        self.seats[seat as usize - 1] = weights.clone();
        Ok(())
    }

    fn seat(&mut self, slot: u32, adapter: Option<Seated>) -> Result<(), RuntimeError> {
        self.seated[slot as usize] = adapter;
        Ok(())
    }

    fn prefill(&mut self, chunks: &[Chunk<'_>], asked: &[AskedRow]) -> Result<(), RuntimeError> {
        let (mut rows, mut values) = (0, vec![]);
        for (index, chunk) in chunks.iter().enumerate() {
            assert!(!chunk.tokens.is_empty());
            assert!(chunks[..index].iter().all(|other| other.slot != chunk.slot), "a sequence has one chunk");
            rows = u32::next_multiple_of(rows, self.limits.alignment) + chunk.tokens.len() as u32;
            assert!(chunk.soft.is_empty() || chunks.len() == 1, "a chunk with media is for itself");
            let mut tokens = chunk.tokens.to_vec();
            assert!(tokens.iter().all(|token| *token < self.limits.vocab));
            for soft in chunk.soft {
                assert!(soft.ahead == 1 || soft.ahead as usize == soft.values.len(), "a picture is cut");
                let places = tokens[soft.first..].iter_mut().zip(soft.values);
                places.for_each(|(token, soft)| *token = *soft as u32);
            }
            for (position, token) in (chunk.position..).zip(tokens) {
                values.push((index, position, self.feed(chunk.slot, position, token, false)));
            }
            self.counts.prompt_tokens += chunk.tokens.len() as u64;
        }
        assert!(rows <= self.limits.chunk());
        assert!(asked.len() < 2 || asked.iter().all(|row| !row.picking.masked));
        let asked_rows = asked.len();
        let entered = asked.last().map(|row| (chunks[row.chunk].slot, chunks[row.chunk].position + row.row));
        let asked = asked.iter().map(|row| {
            let behind = chunks[row.chunk].tokens.len() as u32 - row.row;
            assert!(behind <= self.limits.spare_rows.max(1), "the rows behind it write over what it looks back on");
            let at = (row.chunk, chunks[row.chunk].position + row.row);
            let (_, position, value) = values.iter().find(|value| (value.0, value.1) == at).unwrap();
            (*value, row.picking, position + 1)
        });
        let asked: Vec<Unpicked> = asked.collect();
        // As on a GPU, whose asked rows leave it in the same place.
        self.entered.clear();
        self.next_round = None;
        if asked_rows == 1 {
            self.entered.extend(entered);
        }
        self.counts.chunks += 1;
        self.counts.shared += u64::from(chunks.len() > 1);
        let size = self.limits.chunks.iter().find(|size| **size >= rows).unwrap();
        let time = (self.times.chunk)(*size) + asked.len().saturating_sub(1) as u64 * self.times.asked;
        self.take_time(time, asked, false);
        Ok(())
    }

    fn decode(&mut self, rows: &[Row]) -> Result<(), RuntimeError> {
        assert!(!rows.is_empty());
        let sequences: Vec<&[Row]> = Row::sequences(rows).map(|range| &rows[range]).collect();
        let slots: BTreeSet<u32> = sequences.iter().map(|rows| rows[0].slot).collect();
        assert!(slots.len() == sequences.len() && slots.len() as u32 <= self.limits.rows, "a sequence's are together");
        if sequences.iter().any(|rows| rows.len() > 1) {
            self.counts.verified += 1;
            assert!(rows.len() as u32 <= self.limits.decode_rows);
            assert!(sequences.iter().all(|rows| rows.len() as u32 <= self.limits.verified_rows));
            let follows = |rows: &&[Row]| rows.windows(2).all(|pair| pair[0].position + 1 == pair[1].position);
            assert!(sequences.iter().all(follows));
        }
        self.latest = rows.to_vec();
        self.run();
        Ok(())
    }

    fn can_draft(&self, slot: u32, position: u32) -> bool {
        self.entered.contains(&(slot, position - 1))
    }

    fn has_rounds(&self) -> bool {
        self.closes_rounds
    }

    fn begin_rounds(&mut self, row: &Row) -> Result<(), RuntimeError> {
        assert!(self.can_draft(row.slot, row.position) && !row.picking.masked && row.picking.token);
        self.entered.clear();
        self.next_round = Some(*row);
        Ok(())
    }

    fn round(&mut self, drafts: u32, given: &[u32], picking: &Picking) -> Result<(), RuntimeError> {
        assert!(drafts <= self.limits.drafts && drafts < self.limits.verified_rows);
        let first = self.next_round.expect("a round follows another, or where rounds begin");
        assert_eq!(first.picking, *picking);
        let mut rows: Vec<Row> = (0..=drafts).map(|row| Row { position: first.position + row, ..first }).collect();
        self.draft(&mut rows);
        rows[1..].iter_mut().zip(given).for_each(|(row, given)| row.token = *given);
        let all = Mask::all(self.limits.vocab);
        let (mut kept, mut is_right) = (vec![], true);
        for (at, row) in rows.iter().enumerate() {
            // Rows behind a wrong draft are computed, and nobody's.
            let value = self.feed(row.slot, row.position, row.token, true);
            if is_right {
                let token = pick(value, picking.sampling, picking.seed, row.position + 1, &all, self.limits.vocab);
                kept.push(Picked { token, logits: vec![] });
                is_right = rows.get(at + 1).is_some_and(|next| next.token == token);
            }
        }
        let token = kept[kept.len() - 1].token;
        self.next_round = Some(Row { position: first.position + kept.len() as u32, token, ..first });
        self.counts.closed += 1;
        self.counts.closed_behind_others += u64::from(!self.results.is_empty());
        let time = u64::from(drafts) * DRAFT_TIME + (self.times.decode)(drafts + 1);
        self.busy_until = self.busy_until.max(self.clock.load(Ordering::Relaxed)) + time;
        self.results.push_back((self.busy_until, kept));
        Ok(())
    }

    fn decode_drafting(&mut self, rows: &[Row], given: bool) -> Result<(), RuntimeError> {
        let own = rows.to_vec();
        let mut rows = rows.to_vec();
        let mut drafts = vec![];
        for range in Row::sequences(&rows.clone()).filter(|range| range.len() > 1) {
            assert!(
                range.len() as u32 <= self.limits.drafts + 1
                    && self.can_draft(rows[range.start].slot, rows[range.start].position)
            );
            self.draft(&mut rows[range.clone()]);
            drafts.extend(rows[range].iter().skip(1).map(|row| Picked { token: row.token, logits: vec![] }));
        }
        self.counts.drafted += 1;
        self.busy_until = self.busy_until.max(self.clock.load(Ordering::Relaxed)) + drafts.len() as u64 * DRAFT_TIME;
        self.results.push_back((self.busy_until, drafts));
        self.decode(if given { &own } else { &rows })
    }

    fn decode_again(&mut self) -> Result<(), RuntimeError> {
        assert!(Row::sequences(&self.latest).all(|rows| rows.len() == 1));
        assert!(self.latest.iter().all(|row| !row.picking.logits));
        self.counts.repeated += 1;
        self.run();
        Ok(())
    }

    fn pick(&mut self, masks: &[Option<Mask>]) -> Result<(), RuntimeError> {
        let (rows, time, is_decode) = self.waiting.take().expect("rows wait for masks");
        assert_eq!(masks.len(), rows.len());
        self.finish(rows, masks, time, is_decode);
        Ok(())
    }

    fn collect(&mut self) -> Result<Vec<Picked>, RuntimeError> {
        let (time, picked) = self.results.pop_front().expect("something is in flight");
        self.clock.fetch_max(time, Ordering::Relaxed);
        Ok(picked)
    }

    fn copy(&mut self, from: u32, to: u32) -> Result<(), RuntimeError> {
        self.pages[to as usize] = self.pages[from as usize].clone();
        Ok(())
    }

    fn save(&mut self, from: u32, unit: u32) -> Result<(), RuntimeError> {
        self.counts.saved += 1;
        self.host[unit as usize] = self.pages[from as usize].clone();
        Ok(())
    }

    fn load(&mut self, unit: u32, to: u32) -> Result<(), RuntimeError> {
        self.counts.loaded += 1;
        self.pages[to as usize] = self.host[unit as usize].clone();
        Ok(())
    }
}
