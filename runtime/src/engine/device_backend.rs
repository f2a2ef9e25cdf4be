//! A GPU, or whatever stands in for one, as an engine's device: sequences through the phases of a plan.
//!
//! Every decoded row has a record in device memory that says which sequence it is of, where it stands and how its next
//! token is picked. The pick brings the record up to date, so that a decode can be repeated before the host has seen a
//! token. Tokens come back in the order of the work.

mod chunk;
mod draft;
mod inspect;
mod seats;
mod towers;

use std::collections::VecDeque;

use gemma4c_plan::cuda::{
    KvLayout, PhaseKind, Places, RECORD_WORDS, Range, Region, SEAT_WORDS, SEGMENT_ROWS, Segment, record,
};
use gemma4c_plan::{Plan, Sampling, SeatWeights};
use xxhash_rust::xxh3::xxh3_128;

use super::device::{AskedRow, Chunk, Device, Limits, Mask, Picked, Picking, Row};
use super::inspect::Inspect;
use super::seated::Seated;
use crate::backend::{Backend, MemoryUse, Pick, Run};
use crate::cuda::{CudaBackend, OnGpu};
use crate::soft::{Patches, TowerLimits};
use crate::{ModelLocation, RuntimeError};

/// Results in flight: enough that the device never waits for the host, few enough that little is computed in vain.
const AHEAD: u32 = 4;

/// What is wanted of such a device.
#[derive(Clone, Debug, Default)]
pub struct BackendOptions {
    /// Sequences at once; `None` for as many as the plan was compiled for.
    pub sequences: Option<u32>,
    /// Pinned host memory for prefixes that have no place on the device.
    pub host_bytes: u64,
    /// Tokens that are never picked.
    pub suppress: Vec<u32>,
}

/// A plan on a backend that was loaded for it.
pub struct BackendDevice {
    backend: Box<dyn Backend>,
    limits: Limits,
    /// Bytes of a seat's matrices.
    seat_bytes: Vec<u64>,
    /// The entry of each slot in the table of seats.
    seated: Vec<[u32; SEAT_WORDS as usize]>,
    identity: u128,
    layout: KvLayout,
    places: Places,
    phases: Vec<Shape>,
    /// Words of an entry of the history.
    history_rows: u32,
    most_candidates: u32,
    /// Which rules the plan can pick by, and which of them it can with the tokens that are never picked.
    plan_picks: Picks,
    picks: Picks,
    /// The entry of the history that the next pick writes.
    tick: u32,
    /// The latest decode: its run, and how its rows are picked.
    latest: Option<(Run, Vec<Picking>)>,
    /// Which of its records say that they have a mask.
    masked: Vec<bool>,
    /// The latest chunk: its phase, and whose rows it has.
    latest_chunk: Option<(usize, Vec<Segment>)>,
    /// What was run without its picks, which wait for masks.
    waiting: Option<Waiting>,
    results: VecDeque<Awaited>,
    towers: towers::Towers,
    drafter: Option<draft::DrafterShape>,
    /// Whose state entered the last norm in each row of the latest passes, by slot and position: what a drafter begins
    /// with.
    entered: Vec<Option<(u32, u32)>>,
    hidden_width: u32,
}

/// One phase.
struct Shape {
    kind: PhaseKind,
    rows: u32,
    asked_from: usize,
    steps: usize,
}

/// Which rules the plan can pick by.
#[derive(Clone, Copy)]
struct Picks {
    largest: bool,
    sampled: bool,
}

/// Rows with logits and without tokens.
struct Waiting {
    /// Without any steps.
    run: Run,
    picking: Vec<Picking>,
    /// Their records.
    records: u64,
}

/// A result in flight.
enum Awaited {
    /// Words that tell no more than that the work is done.
    Done,
    /// So many tokens.
    Tokens(u32),
    /// The tokens in some of the words.
    Some(Vec<u32>),
    /// At most so many tokens: those before a word that is none.
    Kept(u32),
    /// Read already, because the logits' place is used again.
    Read(Vec<Picked>),
}

impl BackendDevice {
    /// The first GPU, by the program of the plan that fits it. All its memory is allocated and all weights are loaded;
    /// `progress` is told the bytes done and the bytes there are.
    pub fn on_cuda(
        plan: Plan,
        location: &ModelLocation,
        on: &OnGpu,
        progress: &mut dyn FnMut(u64, u64),
        options: BackendOptions,
    ) -> Result<BackendDevice, RuntimeError> {
        let (plan, backend) = CudaBackend::open(plan, location, on, progress)?;
        BackendDevice::new(&plan, Box::new(backend), options)
    }

    /// A backend that somebody made and loaded for this plan.
    pub fn new(plan: &Plan, backend: Box<dyn Backend>, options: BackendOptions) -> Result<BackendDevice, RuntimeError> {
        let device = BackendDevice::for_any(plan, backend, options)?;
        match device.limits.chunks.is_empty() {
            true => Err(RuntimeError::Backend("the plan has no phase that reads prompts: compile it again".into())),
            false => Ok(device),
        }
    }

    /// The same for a plan that may have no phase for prompts, as long as they are decoded.
    pub(crate) fn for_any(
        plan: &Plan,
        mut backend: Box<dyn Backend>,
        options: BackendOptions,
    ) -> Result<BackendDevice, RuntimeError> {
        let BackendOptions { sequences, host_bytes, suppress } = options;
        let program = &plan.cuda.as_ref().ok_or(RuntimeError::NoProgram)?.program;
        let shape = |phase: &gemma4c_plan::cuda::Phase| Shape {
            kind: phase.kind,
            rows: phase.rows,
            asked_from: phase.asked_from as usize,
            steps: phase.steps.len(),
        };
        let (layout, places) = (program.kv_layout.clone(), program.places);
        let prefill = program.phases.iter().filter(|phase| phase.kind == PhaseKind::Prefill);
        let chunks: Vec<u32> = prefill.map(|phase| phase.rows).collect();
        let room = layout.slots.min(program.decode_rows());
        if sequences.is_some_and(|sequences| sequences == 0 || sequences > room) {
            let wanted = sequences.unwrap_or(0);
            return Err(RuntimeError::TooManySequences { wanted, room });
        }
        let limits = Limits {
            slots: room,
            pages: layout.pages,
            sliding: layout.sliding,
            full: layout.full,
            rows: sequences.unwrap_or(room),
            decode_rows: program.decode_rows(),
            verified_rows: program.verified_rows,
            drafts: program.drafter.as_ref().map_or(0, |drafter| drafter.ends.len() as u32),
            chunks,
            alignment: SEGMENT_ROWS,
            context: plan.program.context,
            vocab: plan.model.vocab_size,
            ahead: AHEAD.min(places.history_len.saturating_sub(1)),
            spare_rows: spare_rows(&layout, plan.program.context),
            host_units: u32::try_from(host_bytes / layout.page_bytes.max(1)).unwrap_or(u32::MAX),
            seats: plan.model.seats,
        };
        let every = |pick: fn(&gemma4c_plan::cuda::Phase) -> bool| program.phases.iter().all(pick);
        let plan_picks = Picks {
            largest: every(|phase| !phase.pick_largest.is_empty()),
            sampled: every(|phase| !phase.pick_sampled.is_empty()),
        };
        if limits.host_units > 0 {
            backend.reserve_tier(limits.host_units as u64 * layout.page_bytes)?;
        }
        let identity = xxh3_128(&[program.gpu.key.as_bytes(), &plan.model.fingerprint.to_le_bytes()].concat());
        let mut device = BackendDevice {
            backend,
            limits,
            seat_bytes: plan.seat_bytes(),
            seated: vec![[0; SEAT_WORDS as usize]; layout.slots as usize],
            identity,
            layout,
            places,
            phases: program.all_phases().take(program.drafter_phase()).map(shape).collect(),
            history_rows: program.decode_rows(),
            most_candidates: program.most_candidates,
            plan_picks,
            picks: plan_picks,
            tick: 0,
            latest: None,
            masked: Vec::new(),
            latest_chunk: None,
            waiting: None,
            results: VecDeque::new(),
            towers: towers::Towers::of(plan, program),
            drafter: draft::DrafterShape::of(plan, program),
            entered: vec![None; program.decode_rows() as usize],
            hidden_width: plan.model.hidden,
        };
        device.suppress(&suppress)?;
        Ok(device)
    }

    pub fn into_backend(self) -> Box<dyn Backend> {
        self.backend
    }

    fn write(&mut self, offset: u64, words: &[u32]) -> Result<(), RuntimeError> {
        let mut bytes = vec![0; 4 * words.len()];
        bytes.as_chunks_mut().0.iter_mut().zip(words).for_each(|(bytes, word)| *bytes = word.to_le_bytes());
        self.backend.write(arena(offset, bytes.len() as u64), &bytes)
    }

    /// Writes the masks of rows that lie beside each other at once.
    fn write_masks(&mut self, masks: &[Option<Mask>]) -> Result<(), RuntimeError> {
        let mut first = 0;
        for run in masks.chunk_by(|one, next| one.is_some() == next.is_some()) {
            let mut words = Vec::new();
            run.iter().flatten().for_each(|mask| words.extend_from_slice(mask.words()));
            if !words.is_empty() {
                let row_bytes = 4 * (words.len() / run.len()) as u64;
                self.write(self.places.masks + first * row_bytes, &words)?;
            }
            first += run.len() as u64;
        }
        Ok(())
    }

    /// A record whose pick goes to the current entry of the history.
    fn record(&self, position: u32, rows: u32, token: u32, slot: u32) -> [u32; RECORD_WORDS as usize] {
        let mut words = [0; RECORD_WORDS as usize];
        (words[record::POSITION], words[record::ROWS], words[record::TOKEN]) = (position, rows, token);
        (words[record::SLOT], words[record::TICK]) = (slot, self.tick);
        words
    }

    fn settings(&self, words: &mut [u32], picking: &Picking) {
        // What the device cannot pick by, it picks by the largest logit, and nobody looks.
        let sampling = match self.can_pick(&picking.sampling) {
            true => picking.sampling,
            false => Sampling { temperature: 0.0, top_k: 1, top_p: 1.0 },
        };
        (words[record::TEMPERATURE], words[record::TOP_K]) = (sampling.temperature.to_bits(), sampling.top_k);
        words[record::TOP_P] = sampling.top_p.to_bits();
        (words[record::SEED], words[record::SEED + 1]) = (picking.seed as u32, (picking.seed >> 32) as u32);
        words[record::MASKED] = picking.masked.into();
    }

    /// The pick that follows all of these rules at once.
    fn pick_for(&self, rules: &[Picking]) -> Pick {
        let sampled = |rule: &Picking| rule.token && rule.sampling.temperature != 0.0 && self.can_pick(&rule.sampling);
        match rules.iter().any(|rule| rule.token) {
            true if rules.iter().any(sampled) => Pick::Sampled,
            true if self.picks.largest => Pick::Largest,
            _ => Pick::None,
        }
    }

    /// Queues a run whose rows are picked by these rules: at once, or when their masks are known.
    fn run_rows(&mut self, run: Run, picking: &[Picking], records: u64) -> Result<(), RuntimeError> {
        if !picking.iter().any(|picking| picking.masked) {
            return self.run_picks(run, picking);
        }
        self.backend.run(Run { pick: Pick::None, ..run })?;
        let run = Run { steps: (run.steps.1, run.steps.1), ..run };
        self.waiting = Some(Waiting { run, picking: picking.to_vec(), records });
        Ok(())
    }

    fn run_picks(&mut self, run: Run, picking: &[Picking]) -> Result<(), RuntimeError> {
        if !picking.iter().any(|picking| picking.token) {
            // Logits are read at once, and there is nothing else to wait for.
            self.backend.run(run)?;
            let mut all = Vec::with_capacity(picking.len());
            for (row, picking) in (0..).zip(picking) {
                let logits = if picking.logits { self.read_logits(row)? } else { Vec::new() };
                all.push(Picked { token: u32::MAX, logits });
            }
            self.results.push_back(Awaited::Read(all));
            return Ok(());
        }
        self.run(run, picking.len() as u32)?;
        let wants_logits = picking.iter().any(|picking| picking.logits);
        let result = match wants_logits {
            true => Awaited::Read(self.read(picking)?),
            false => Awaited::Tokens(picking.len() as u32),
        };
        self.results.push_back(result);
        Ok(())
    }

    /// Queues a run and the way back of what it picks for so many rows.
    fn run(&mut self, run: Run, rows: u32) -> Result<(), RuntimeError> {
        self.backend.run(run)?;
        self.send_back(rows, run.pick != Pick::None)
    }

    /// Queues the way back of the current entry of the history, of which the picks have written so many words.
    fn send_back(&mut self, rows: u32, picked: bool) -> Result<(), RuntimeError> {
        let entry = (self.tick % self.places.history_len) as u64 * self.history_rows as u64;
        self.backend.send_back(arena(self.places.history + 4 * entry, 4 * rows as u64))?;
        if picked {
            self.tick = self.tick.wrapping_add(1);
        }
        Ok(())
    }

    /// The smallest phase that decodes so many rows.
    fn decode_phase(&self, count: u32) -> Result<usize, RuntimeError> {
        let takes_them = |shape: &Shape| shape.kind == PhaseKind::Decode && shape.rows >= count;
        let phase = self.phases.iter().position(takes_them);
        phase.ok_or_else(|| RuntimeError::Backend(format!("no phase of the plan decodes {count} rows")))
    }

    /// Queues the records of rows that a phase is to decode.
    fn write_rows(&mut self, phase: usize, rows: &[Row]) -> Result<(), RuntimeError> {
        let mut words = Vec::new();
        for row in rows {
            let mut record = self.record(row.position, 1, row.token, row.slot);
            self.settings(&mut record, &row.picking);
            words.extend(record);
        }
        // Rows that are free say so: their records are all zero.
        words.resize((self.phases[phase].rows * RECORD_WORDS) as usize, 0);
        self.write(self.places.rows, &words)?;
        self.write_row_seats(0, self.phases[phase].rows, rows.iter().map(|row| row.slot))
    }

    /// Queues the decode of rows whose records are there.
    fn run_decode(&mut self, phase: usize, rows: &[Row]) -> Result<(), RuntimeError> {
        let picking: Vec<Picking> = rows.iter().map(|row| row.picking).collect();
        let run = Run { phase, steps: (0, self.phases[phase].steps), pick: self.pick_for(&picking) };
        self.masked = picking.iter().map(|picking| picking.masked).collect();
        self.run_rows(run, &picking, self.places.rows)?;
        self.latest = Some((run, picking));
        self.entered.fill(None);
        self.entered.iter_mut().zip(rows).for_each(|(entered, row)| *entered = Some((row.slot, row.position)));
        Ok(())
    }

    /// Waits for the tokens that were just queued, and reads the logits of the rows that want them.
    fn read(&mut self, picking: &[Picking]) -> Result<Vec<Picked>, RuntimeError> {
        let tokens = self.read_tokens()?;
        let mut all = Vec::new();
        for ((row, picking), token) in (0..).zip(picking).zip(tokens) {
            let logits = if picking.logits { self.read_logits(row)? } else { Vec::new() };
            all.push(Picked { token, logits });
        }
        Ok(all)
    }

    fn read_logits(&mut self, row: u32) -> Result<Vec<f32>, RuntimeError> {
        let row_bytes = self.limits.vocab as u64 * 4;
        let mut bytes = vec![0; row_bytes as usize];
        self.backend.read(arena(self.places.logits + row as u64 * row_bytes, row_bytes), &mut bytes)?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    }

    /// Waits for the tokens that were just queued.
    fn read_tokens(&mut self) -> Result<Vec<u32>, RuntimeError> {
        // The tokens of what was queued before come first; they are kept for whoever collects.
        for index in 0..self.results.len() {
            if !matches!(self.results[index], Awaited::Read(_)) {
                let picked = self.receive(index)?;
                self.results[index] = Awaited::Read(picked);
            }
        }
        self.backend.receive()
    }

    fn receive(&mut self, index: usize) -> Result<Vec<Picked>, RuntimeError> {
        let words = self.backend.receive()?;
        let tokens: Vec<u32> = match &self.results[index] {
            Awaited::Tokens(count) => words.into_iter().take(*count as usize).collect(),
            Awaited::Some(places) => places.iter().filter_map(|at| words.get(*at as usize).copied()).collect(),
            Awaited::Kept(most) => {
                words.into_iter().take(*most as usize).take_while(|token| *token != u32::MAX).collect()
            }
            Awaited::Done | Awaited::Read(_) => Vec::new(),
        };
        Ok(tokens.into_iter().map(|token| Picked { token, logits: Vec::new() }).collect())
    }

    fn page(&self, page: u32) -> Range {
        let bytes = self.layout.page_bytes;
        Range { region: Region::Kv, offset: u64::from(page) * bytes, bytes }
    }
}

impl Device for BackendDevice {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn name(&self) -> String {
        self.backend.name()
    }

    fn memory(&self) -> Result<Option<MemoryUse>, RuntimeError> {
        self.backend.memory()
    }

    fn identity(&self) -> u128 {
        self.identity
    }

    fn can_pick(&self, sampling: &Sampling) -> bool {
        match sampling.temperature == 0.0 {
            true => self.picks.largest,
            false => self.picks.sampled && sampling.top_k > 0 && sampling.top_k <= self.most_candidates,
        }
    }

    fn towers(&self) -> &[TowerLimits] {
        &self.towers.limits
    }

    fn soft_tokens(&mut self, tower: usize, patches: Patches<'_>) -> Result<Vec<f32>, RuntimeError> {
        self.run_tower(tower, patches, None)
    }

    fn set_pages(&mut self, slot: u32, sliding: &[u32], full: &[u32]) -> Result<(), RuntimeError> {
        // It is another sequence's now.
        self.entered.iter_mut().filter(|entered| entered.is_some_and(|(of, _)| of == slot)).for_each(|of| *of = None);
        let tables = [(self.places.windows, self.layout.sliding, sliding), (self.places.pages, self.layout.full, full)];
        for (table, paging, pages) in tables.into_iter().filter(|(.., pages)| !pages.is_empty()) {
            self.write(table + u64::from(slot) * u64::from(paging.entries) * 4, pages)?;
        }
        Ok(())
    }

    fn fill_seat(&mut self, seat: u32, weights: &SeatWeights) -> Result<(), RuntimeError> {
        self.write_seat(seat, weights)
    }

    fn seat(&mut self, slot: u32, adapter: Option<Seated>) -> Result<(), RuntimeError> {
        self.write_slot_seat(slot, adapter)
    }

    fn prefill(&mut self, chunks: &[Chunk<'_>], asked: &[AskedRow]) -> Result<(), RuntimeError> {
        self.queue_chunk(chunks, asked)
    }

    fn decode(&mut self, rows: &[Row]) -> Result<(), RuntimeError> {
        let phase = self.decode_phase(rows.len() as u32)?;
        self.write_rows(phase, rows)?;
        self.run_decode(phase, rows)
    }

    fn can_draft(&self, slot: u32, position: u32) -> bool {
        self.drafter.is_some() && self.entered_row(slot, position).is_some()
    }

    fn decode_drafting(&mut self, rows: &[Row], given: bool) -> Result<(), RuntimeError> {
        self.draft_sequences(rows, given)
    }

    fn has_rounds(&self) -> bool {
        self.drafter.is_some()
    }

    fn begin_rounds(&mut self, row: &Row) -> Result<(), RuntimeError> {
        self.write_round_records(row)
    }

    fn round(&mut self, drafts: u32, given: &[u32], picking: &Picking) -> Result<(), RuntimeError> {
        self.queue_round(drafts, given, picking)
    }

    fn decode_again(&mut self) -> Result<(), RuntimeError> {
        let latest = self.latest.take().ok_or_else(|| RuntimeError::Backend("nothing was decoded yet".into()))?;
        self.run_rows(latest.0, &latest.1, self.places.rows)?;
        self.latest = Some(latest);
        self.entered.iter_mut().flatten().for_each(|(_, position)| *position += 1);
        Ok(())
    }

    fn pick(&mut self, masks: &[Option<Mask>]) -> Result<(), RuntimeError> {
        let waiting = self.waiting.take();
        let Waiting { run, picking, records } =
            waiting.ok_or_else(|| RuntimeError::Backend("no row waits for its mask".into()))?;
        if masks.len() != picking.len() {
            return Err(RuntimeError::Backend(format!("{} masks for {} rows", masks.len(), picking.len())));
        }
        self.write_masks(masks)?;
        for (row, mask) in (0u64..).zip(masks) {
            // A repeated decode keeps its records, and its rows' rules come and go.
            let said = match records == self.places.rows {
                true => std::mem::replace(&mut self.masked[row as usize], mask.is_some()),
                false => picking[row as usize].masked,
            };
            if said != mask.is_some() {
                let at = records + 4 * (row * RECORD_WORDS as u64 + record::MASKED as u64);
                self.write(at, &[mask.is_some().into()])?;
            }
        }
        self.run_picks(run, &picking)
    }

    fn collect(&mut self) -> Result<Vec<Picked>, RuntimeError> {
        let picked = match self.results.front_mut() {
            None => return Err(RuntimeError::Backend("no result is in flight".into())),
            Some(Awaited::Read(picked)) => std::mem::take(picked),
            Some(_) => self.receive(0)?,
        };
        self.results.pop_front();
        Ok(picked)
    }

    fn copy(&mut self, from: u32, to: u32) -> Result<(), RuntimeError> {
        self.backend.copy(self.page(from), self.page(to))
    }

    fn save(&mut self, from: u32, unit: u32) -> Result<(), RuntimeError> {
        self.backend.save(self.page(from), u64::from(unit) * self.layout.page_bytes)
    }

    fn load(&mut self, unit: u32, to: u32) -> Result<(), RuntimeError> {
        self.backend.load(u64::from(unit) * self.layout.page_bytes, self.page(to))
    }
}

/// At least one; as many as there are positions where nothing is ever overwritten.
fn spare_rows(layout: &KvLayout, context: u32) -> u32 {
    let kept = layout.sliding.kept();
    let windows = layout.caches.iter().filter_map(|cache| cache.window).filter(|_| kept < context);
    windows.map(|window| kept.saturating_sub(window).max(1)).min().unwrap_or(context)
}

fn arena(offset: u64, bytes: u64) -> Range {
    Range { region: Region::Arena, offset, bytes }
}
