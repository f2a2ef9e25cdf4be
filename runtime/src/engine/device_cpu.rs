//! The CPU as an engine's device: the plan's CPU program over rows of several sequences.
//!
//! Work is done when it is queued, so nothing is ever in flight. Memory is only reserved: what is not written costs
//! nothing.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use gemma4c_plan::{Plan, RowCount, Sampling, SeatWeights, Value};
use xxhash_rust::xxh3::xxh3_128;

use super::device::{AskedRow, Chunk, Device, Limits, Mask, Picked, Picking, Row};
use super::inspect::{DraftFrom, Inspect, Logits};
use super::seated::Seated;
use crate::acceptance::{MOST_DRAFTS, MOST_LOOKED_UP};
use crate::backend::Backend;
use crate::cpu::drafting::{self, Beginning, Draft};
use crate::cpu::kv;
use crate::cpu::{Executor, Grid, Pass, Picture, Room, Seat, Span, Tap};
use crate::soft::{Patches, SoftRows, TowerLimits};
use crate::{ModelLocation, RuntimeError, Sampler};

/// How many sequences the CPU is to have room for.
#[derive(Clone, Debug)]
pub struct CpuOptions {
    /// Sequences at once.
    pub sequences: u32,
    /// Snapshots of prefixes that there is room for beside them; they also take the pages that no sequence has.
    pub snapshots: u32,
    /// Bytes for prefixes that have no place there.
    pub host_bytes: u64,
    /// Tokens that are never picked.
    pub suppress: Vec<u32>,
}

impl Default for CpuOptions {
    fn default() -> CpuOptions {
        CpuOptions { sequences: 1, snapshots: 1, host_bytes: 0, suppress: Vec::new() }
    }
}

const MOST_SEQUENCES: u32 = 1024;

/// Rows whose tokens wait for masks.
struct Unpicked {
    logits: Vec<f32>,
    picking: Vec<(Picking, u32)>,
    /// They are those of the latest decode.
    is_decode: bool,
}

/// What goes through the model in one pass.
#[derive(Default)]
struct Parts<'a> {
    tokens: Vec<u32>,
    spans: Vec<Span>,
    asked: Vec<usize>,
    /// Of one sequence, which has the pass for itself.
    soft: &'a [SoftRows<'a>],
}

impl Parts<'_> {
    fn add(&mut self, slot: u32, first_position: usize, tokens: &[u32], asked: &[usize]) {
        self.asked.extend(asked.iter().map(|row| self.tokens.len() + row));
        self.spans.push(Span { slot, first_position, rows: tokens.len() });
        self.tokens.extend_from_slice(tokens);
    }

    /// The slots and positions of the asked rows.
    fn places(&self) -> Vec<(u32, u32)> {
        let of = |span: &Span| {
            let (slot, first) = (span.slot, span.first_position as u32);
            (first..first + span.rows as u32).map(move |position| (slot, position))
        };
        let all: Vec<(u32, u32)> = self.spans.iter().flat_map(of).collect();
        self.asked.iter().map(|row| all[*row]).collect()
    }
}

/// A plan on this machine's processor.
pub struct CpuDevice {
    plan: Arc<Plan>,
    executor: Executor,
    /// Of those towers that were used.
    towers: BTreeMap<usize, Executor>,
    tower_limits: Vec<TowerLimits>,
    limits: Limits,
    sampler: Sampler,
    /// The rows of the latest decode, as they go on.
    latest: Vec<Row>,
    waiting: Option<Unpicked>,
    results: VecDeque<Vec<Picked>>,
    /// What is in the second tier.
    host: Vec<Vec<f32>>,
    /// Of a plan with a drafter: what runs it, and what the LM head read at the positions of the latest decode and of
    /// the prompts since, by slot and position.
    drafter: Option<Executor>,
    hidden: BTreeMap<(u32, u32), Vec<f32>>,
}

impl CpuDevice {
    /// Maps the model's files, checks that they are the plan's, and reserves all memory.
    pub fn open(plan: Plan, location: &ModelLocation, options: CpuOptions) -> Result<CpuDevice, RuntimeError> {
        let program = &plan.program;
        let slots = options.sequences;
        if slots == 0 || slots > MOST_SEQUENCES {
            let found = slots.to_string();
            return Err(RuntimeError::Setting { what: "a number of sequences", expected: "1 to 1024".into(), found });
        }
        let layout = kv::layout(&plan);
        // A snapshot has the pages of a window and that of its last positions.
        let of_snapshots = options.snapshots.saturating_mul(layout.sliding.entries + 1);
        let pages = layout.pages_for(program.context).saturating_mul(slots).saturating_add(of_snapshots);
        let room = Room { slots: slots as usize, pages: pages as usize };
        let verified_rows = program.chunk.min(MOST_LOOKED_UP + 1);
        let limits = Limits {
            slots,
            pages,
            sliding: layout.sliding,
            full: layout.full,
            rows: slots,
            // More rows than a pass takes are computed in several.
            decode_rows: slots.saturating_mul(verified_rows),
            verified_rows,
            drafts: if plan.drafter.is_some() { MOST_DRAFTS } else { 0 },
            chunks: vec![program.chunk],
            alignment: 1,
            context: program.context,
            vocab: plan.model.vocab_size,
            ahead: 0,
            // A chunk's rows besides its window.
            spare_rows: program.chunk,
            host_units: u32::try_from(options.host_bytes / layout.page_bytes.max(1)).unwrap_or(u32::MAX),
            seats: plan.model.seats,
        };
        let plan = Arc::new(plan);
        let executor = Executor::open(Arc::clone(&plan), location, room)?;
        let greedy = Sampling { temperature: 0.0, top_k: 1, top_p: 1.0 };
        let sampler = Sampler::new(greedy, 0, options.suppress)?;
        Ok(CpuDevice {
            towers: BTreeMap::new(),
            tower_limits: TowerLimits::of(&plan),
            plan,
            executor,
            limits,
            sampler,
            latest: vec![],
            waiting: None,
            drafter: None,
            hidden: BTreeMap::new(),
            results: VecDeque::new(),
            host: vec![],
        })
    }

    pub fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    /// Picks from rows of logits, each by its rule and for its position.
    fn pick_rows(&mut self, logits: &[f32], picking: &[(Picking, u32)], masks: &[Option<Mask>]) -> Vec<Picked> {
        let masks = masks.iter().map(Option::as_ref).chain(std::iter::repeat(None));
        let rows = logits.chunks_exact(self.limits.vocab as usize).zip(picking).zip(masks);
        let mut all = Vec::with_capacity(picking.len());
        for ((row, (picking, position)), mask) in rows {
            self.sampler.set(picking.sampling, picking.seed);
            let token = match mask {
                _ if !picking.token => None,
                None => self.sampler.pick(row, *position as u64),
                Some(mask) => {
                    let mut allowed = row.to_vec();
                    mask.apply(&mut allowed);
                    self.sampler.pick(&allowed, *position as u64)
                }
            };
            let logits = if picking.logits { row.to_vec() } else { Vec::new() };
            all.push(Picked { token: token.unwrap_or(u32::MAX), logits });
        }
        all
    }

    /// Logits are there: their tokens are picked, now or when their masks are known.
    fn finish(&mut self, logits: Vec<f32>, picking: Vec<(Picking, u32)>, is_decode: bool) {
        if picking.iter().any(|(picking, _)| picking.masked) {
            self.waiting = Some(Unpicked { logits, picking, is_decode });
            return;
        }
        let picked = self.pick_rows(&logits, &picking, &[]);
        self.finish_picked(picked, is_decode);
    }

    fn finish_picked(&mut self, picked: Vec<Picked>, is_decode: bool) {
        if is_decode {
            for (row, picked) in self.latest.iter_mut().zip(&picked) {
                (row.position, row.token) = (row.position + 1, picked.token);
            }
        }
        self.results.push_back(picked);
    }

    /// The logits of the asked rows. What they were made of is kept for a drafter.
    fn run(&mut self, parts: &Parts) -> &[f32] {
        self.run_tapped(parts, &mut |_, _, _| {})
    }

    /// The same, with every value shown.
    fn run_tapped(&mut self, parts: &Parts, tap: &mut Tap<'_>) -> &[f32] {
        let Parts { tokens, spans, asked, soft } = parts;
        let pass = Pass { tokens, spans, asked, soft, ..Pass::default() };
        let Some(drafter) = &self.plan.drafter else { return self.executor.run(&pass, tap) };
        let reads = self.plan.program.values[drafter.reads as usize].name.as_str();
        let hidden = &mut self.hidden;
        self.executor.run(&pass, &mut |name, width, values| {
            if name == reads {
                hidden.extend(parts.places().into_iter().zip(values.chunks_exact(width).map(<[f32]>::to_vec)));
            }
            tap(name, width, values);
        })
    }

    fn run_tower(&mut self, tower: usize, patches: Patches<'_>, tap: &mut Tap<'_>) -> Result<Vec<f32>, RuntimeError> {
        let soft = self.tower_limits.get(tower).ok_or(RuntimeError::NoTower)?.soft_tokens(patches)?;
        let executor = self.towers.entry(tower).or_insert_with(|| self.executor.tower(tower));
        let grid = Grid { columns: patches.columns as usize, rows: patches.rows as usize };
        let picture = Picture { grid, patches: patches.values, soft };
        Ok(executor.run(&Pass { picture: Some(picture), ..Pass::default() }, tap).to_vec())
    }

    fn decode_latest(&mut self) {
        let rows = self.latest.clone();
        self.hidden.clear();
        // More rows than the plan has activations for go through one part after another, with the same bits.
        let at_once = self.plan.program.asked.min(self.plan.program.chunk) as usize;
        let mut logits = Vec::with_capacity(rows.len() * self.limits.vocab as usize);
        for rows in rows.chunks(at_once) {
            let mut parts = Parts::default();
            for run in rows.chunk_by(|one, next| one.slot == next.slot) {
                let tokens: Vec<u32> = run.iter().map(|row| row.token).collect();
                parts.add(run[0].slot, run[0].position as usize, &tokens, &(0..run.len()).collect::<Vec<_>>());
            }
            logits.extend_from_slice(self.run(&parts));
        }
        let picking = rows.iter().map(|row| (row.picking, row.position + 1)).collect();
        self.finish(logits, picking, true);
    }
}

impl Device for CpuDevice {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn name(&self) -> String {
        "cpu".into()
    }

    fn identity(&self) -> u128 {
        xxh3_128(&[&b"cpu"[..], &self.plan.model.fingerprint.to_le_bytes()].concat())
    }

    fn can_pick(&self, _: &Sampling) -> bool {
        true
    }

    fn towers(&self) -> &[TowerLimits] {
        &self.tower_limits
    }

    fn soft_tokens(&mut self, tower: usize, patches: Patches<'_>) -> Result<Vec<f32>, RuntimeError> {
        self.run_tower(tower, patches, &mut |_, _, _| {})
    }

    fn set_pages(&mut self, slot: u32, sliding: &[u32], full: &[u32]) -> Result<(), RuntimeError> {
        self.executor.set_pages(slot, sliding, full);
        // It is another sequence's now.
        self.hidden.retain(|(of, _), _| *of != slot);
        Ok(())
    }

    fn fill_seat(&mut self, seat: u32, weights: &SeatWeights) -> Result<(), RuntimeError> {
        if !weights.fit(&self.plan.seat_bytes()) {
            return Err(RuntimeError::OtherPlan);
        }
        self.executor.fill_seat(seat, weights);
        Ok(())
    }

    fn seat(&mut self, slot: u32, adapter: Option<Seated>) -> Result<(), RuntimeError> {
        let of = |Seated { seat, strength }| Seat { number: seat, strength };
        self.executor.seat(slot, adapter.map(of).unwrap_or_default());
        Ok(())
    }

    fn prefill(&mut self, chunks: &[Chunk<'_>], asked: &[AskedRow]) -> Result<(), RuntimeError> {
        let picking = |row: &AskedRow| (row.picking, chunks[row.chunk].position + row.row + 1);
        let picking: Vec<(Picking, u32)> = asked.iter().map(picking).collect();
        let (mut logits, mut parts) = (Vec::new(), Parts::default());
        // A pass has memory for so many asked rows: more are computed in several, with the same bits.
        let most = self.plan.program.asked as usize;
        for (index, chunk) in chunks.iter().enumerate() {
            if !parts.tokens.is_empty() && (!chunk.soft.is_empty() || !parts.soft.is_empty()) {
                logits.extend_from_slice(self.run(&std::mem::take(&mut parts)));
            }
            parts.soft = chunk.soft;
            let rows: Vec<usize> = asked.iter().filter(|row| row.chunk == index).map(|row| row.row as usize).collect();
            let step = if rows.len() > most { most } else { chunk.tokens.len() };
            for (first, tokens) in (0..).step_by(step).zip(chunk.tokens.chunks(step)) {
                let own = rows.iter().filter(|row| (first..first + tokens.len()).contains(row));
                let own: Vec<usize> = own.map(|row| row - first).collect();
                if parts.asked.len() + own.len() > most {
                    logits.extend_from_slice(self.run(&std::mem::take(&mut parts)));
                    parts.soft = chunk.soft;
                }
                parts.add(chunk.slot, chunk.position as usize + first, tokens, &own);
            }
        }
        logits.extend_from_slice(self.run(&parts));
        self.finish(logits, picking, false);
        Ok(())
    }

    fn decode(&mut self, rows: &[Row]) -> Result<(), RuntimeError> {
        self.latest = rows.to_vec();
        self.decode_latest();
        Ok(())
    }

    fn can_draft(&self, slot: u32, position: u32) -> bool {
        position.checked_sub(1).is_some_and(|before| self.hidden.contains_key(&(slot, before)))
    }

    fn decode_drafting(&mut self, rows: &[Row], given: bool) -> Result<(), RuntimeError> {
        let mut rows = rows.to_vec();
        let mut drafts = Vec::new();
        for sequence in Row::sequences(&rows.clone()).filter(|rows| rows.len() > 1) {
            let Row { slot, token, position, .. } = rows[sequence.start];
            let first = drafts.len();
            let from = DraftFrom { slot, token, position };
            let mut each = |draft: Draft<'_>| drafts.push(Picked { token: draft.token, logits: Vec::new() });
            self.draft(from, sequence.len() as u32 - 1, &mut |_, _, _| {}, &mut each)?;
            if !given {
                let guessed = rows[sequence].iter_mut().skip(1);
                guessed.zip(&drafts[first..]).for_each(|(row, draft)| row.token = draft.token);
            }
        }
        self.results.push_back(drafts);
        self.decode(&rows)
    }

    fn decode_again(&mut self) -> Result<(), RuntimeError> {
        self.decode_latest();
        Ok(())
    }

    fn pick(&mut self, masks: &[Option<Mask>]) -> Result<(), RuntimeError> {
        let waiting = self.waiting.take();
        let Unpicked { logits, picking, is_decode } =
            waiting.ok_or_else(|| RuntimeError::Backend("no row waits for its mask".into()))?;
        let picked = self.pick_rows(&logits, &picking, masks);
        self.finish_picked(picked, is_decode);
        Ok(())
    }

    fn collect(&mut self) -> Result<Vec<Picked>, RuntimeError> {
        self.results.pop_front().ok_or_else(|| RuntimeError::Backend("no result is in flight".into()))
    }

    fn copy(&mut self, from: u32, to: u32) -> Result<(), RuntimeError> {
        self.executor.kv_mut().copy_page(from, to);
        Ok(())
    }

    fn save(&mut self, from: u32, unit: u32) -> Result<(), RuntimeError> {
        let unit = unit as usize;
        if self.host.len() <= unit {
            self.host.resize(unit + 1, Vec::new());
        }
        self.host[unit] = self.executor.kv().page(from).to_vec();
        Ok(())
    }

    fn load(&mut self, unit: u32, to: u32) -> Result<(), RuntimeError> {
        self.executor.kv_mut().page_mut(to).copy_from_slice(&self.host[unit as usize]);
        Ok(())
    }
}

impl Inspect for CpuDevice {
    fn suppress(&mut self, tokens: &[u32]) -> Result<(), RuntimeError> {
        self.sampler.set_suppress(tokens);
        Ok(())
    }

    fn asked_rows(&self) -> u32 {
        self.plan.program.asked.min(self.plan.program.chunk)
    }

    fn read(
        &mut self,
        chunk: &Chunk<'_>,
        asked: Range<usize>,
        tap: Option<&mut Tap<'_>>,
        logits: &mut Logits<'_>,
    ) -> Result<(), RuntimeError> {
        let plan = Arc::clone(&self.plan);
        let (program, vocab) = (&plan.program, self.limits.vocab as usize);
        let mut nothing = |_: &str, _: usize, _: &mut [f32]| {};
        let tap: &mut Tap<'_> = match tap {
            Some(tap) => tap,
            None => &mut nothing,
        };
        let rows: Vec<usize> = asked.collect();
        // A picture that must not be cut may be more rows than a pass has logits for: the pass is repeated.
        let parts = if rows.is_empty() { vec![&rows[..]] } else { rows.chunks(program.asked as usize).collect() };
        for (part, asked) in parts.into_iter().enumerate() {
            let is_new = |name: &str| {
                let of_asked = |value: &Value| value.rows == RowCount::Asked && value.name == name;
                part == 0 || program.values.iter().any(of_asked)
            };
            self.hidden.retain(|(slot, _), _| *slot != chunk.slot);
            let mut parts = Parts { soft: chunk.soft, ..Parts::default() };
            parts.add(chunk.slot, chunk.position as usize, chunk.tokens, asked);
            let out = self.run_tapped(&parts, &mut |name, width, values| {
                if is_new(name) {
                    tap(name, width, values);
                }
            });
            asked.iter().zip(out.chunks_exact(vocab)).for_each(|(row, values)| logits(*row, values));
        }
        Ok(())
    }

    fn look(
        &mut self,
        tower: usize,
        patches: Patches<'_>,
        tap: Option<&mut Tap<'_>>,
    ) -> Result<Vec<f32>, RuntimeError> {
        match tap {
            Some(tap) => self.run_tower(tower, patches, tap),
            None => self.run_tower(tower, patches, &mut |_, _, _| {}),
        }
    }

    fn draft(
        &mut self,
        from: DraftFrom,
        steps: u32,
        tap: &mut Tap<'_>,
        each: &mut dyn FnMut(Draft<'_>),
    ) -> Result<(), RuntimeError> {
        let DraftFrom { slot, token, position } = from;
        let drafter = self.plan.drafter.as_ref().ok_or(RuntimeError::NoDrafter)?;
        let before = position.checked_sub(1).and_then(|before| self.hidden.get(&(slot, before)));
        let hidden = before.ok_or(RuntimeError::NothingToDraftFrom)?.clone();
        if self.drafter.is_none() {
            self.drafter = self.executor.drafter();
        }
        let Some(executor) = &mut self.drafter else { return Err(RuntimeError::NoDrafter) };
        let from = Beginning { slot, token, position: position as usize, hidden };
        drafting::draft((executor, drafter), &self.executor, from, steps, tap, each)
    }

    fn uncollected(&self) -> usize {
        self.results.len()
    }

    fn wait(&mut self) -> Result<(), RuntimeError> {
        self.results.clear();
        Ok(())
    }

    fn backend(&mut self) -> Option<&mut dyn Backend> {
        None
    }
}
