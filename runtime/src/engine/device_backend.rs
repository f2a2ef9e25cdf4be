//! A GPU, or what stands in for one, as an engine's device: records, page tables and the phases of a plan.
//!
//! A decode takes the smallest phase that has room for its rows. The records of rows that are not there are free, so they change nothing. When
//! the same rows go on, nothing is written: the picks have brought their records up to date. Ticks number the picks. Those of prompts
//! count in another half of the history than those of decodes, so neither overwrites what the other has yet to send.

use std::collections::VecDeque;
use std::sync::Arc;

use gemma4c_plan::cuda::{CudaProgram, KvLayout, PhaseKind, Places, RECORD_WORDS, Range, Region, record};
use gemma4c_plan::{Plan, Sampling};
use xxhash_rust::xxh3::xxh3_128;

use super::device::{Chunk, Device, Limits, Part, Picked, Picking, Row};
use crate::RuntimeError;
use crate::backend::{Backend, Pick, Run};

/// Results on their way to the host, at most: enough that the device never waits, few enough that little is computed in vain.
const AHEAD: u32 = 4;
/// Bytes of a unit of the second tier.
const UNIT: u64 = 1 << 20;

/// How a backend is used.
#[derive(Clone, Debug, Default)]
pub struct DeviceOptions {
    /// Sequences at once, at most; else as many as the plan decodes together.
    pub sequences: Option<u32>,
    /// Tokens that are never picked.
    pub suppress: Vec<u32>,
    /// Bytes of host memory for prefixes that have no place on the device.
    pub host_bytes: u64,
}

/// A plan on a backend.
pub struct BackendDevice {
    plan: Arc<Plan>,
    backend: Box<dyn Backend>,
    limits: Limits,
    /// The phase, the rows and the pick of the latest decode.
    latest: (usize, usize, Pick),
    /// Of the next decode.
    tick: u32,
    prompts: u32,
    results: VecDeque<Outstanding>,
    host: Vec<Vec<u8>>,
}

/// A result that was not collected.
enum Outstanding {
    /// Words are on their way: a token for each row, or for a chunk without one the sign that it is done.
    Tokens { rows: usize },
    /// It was waited for.
    Here(Vec<Picked>),
}

impl BackendDevice {
    /// A backend that has loaded the plan.
    pub fn new(
        plan: Arc<Plan>,
        mut backend: Box<dyn Backend>,
        options: &DeviceOptions,
    ) -> Result<BackendDevice, RuntimeError> {
        let program = &plan.cuda.as_ref().ok_or(RuntimeError::NoProgram)?.program;
        let (places, kv) = (program.places, &program.kv_layout);
        let rows = program.decode_rows();
        let slots = options.sequences.map_or(rows, |wanted| wanted.clamp(1, rows));
        let chunks = program.phases.iter().filter(|phase| phase.kind == PhaseKind::Prefill).map(|phase| phase.rows);
        let limits = Limits {
            slots: slots.min(kv.rings),
            rings: kv.rings,
            blocks: kv.blocks,
            block_rows: kv.block_rows,
            rows: slots,
            chunks: chunks.collect(),
            context: plan.program.context,
            vocab: plan.model.vocab_size,
            ahead: AHEAD.min(places.history_len / 4).max(1),
            host_units: u32::try_from(options.host_bytes / UNIT).unwrap_or(u32::MAX),
            ring_units: u32::try_from(kv.ring_bytes.div_ceil(UNIT)).unwrap_or(u32::MAX),
            block_units: u32::try_from(kv.block_bytes.div_ceil(UNIT)).unwrap_or(u32::MAX),
        };
        let most = places.suppress_len as usize;
        if options.suppress.len() > most {
            let (expected, found) = ("as many as the plan has room for", format!("{}", options.suppress.len()));
            return Err(RuntimeError::Setting { what: "a list of tokens that are never picked", expected, found });
        }
        let mut suppress = vec![u32::MAX; most];
        suppress[..options.suppress.len()].copy_from_slice(&options.suppress);
        write(&mut *backend, places.suppress, &suppress)?;
        let (results, host, latest) = (VecDeque::new(), Vec::new(), (0, 0, Pick::None));
        Ok(BackendDevice { plan: Arc::clone(&plan), backend, limits, latest, tick: 0, prompts: 0, results, host })
    }

    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The backend, for whoever measures it.
    pub fn backend(&mut self) -> &mut dyn Backend {
        &mut *self.backend
    }

    fn program(&self) -> &CudaProgram {
        &self.plan.cuda.as_ref().expect("a device is only made for a plan that has one").program
    }

    fn places(&self) -> Places {
        self.program().places
    }

    /// Queues launches, and what is to come back of them: the words of the first rows at a tick.
    fn run(&mut self, run: Run, rows: usize, tick: u32, logits: bool) -> Result<(), RuntimeError> {
        self.backend.run(run)?;
        let (places, entry_words) = (self.places(), self.program().decode_rows());
        let entry = u64::from(tick % places.history_len) * u64::from(entry_words);
        self.backend.send_back(arena(places.history + 4 * entry, rows.max(1) * 4))?;
        let outstanding = match logits {
            true => Outstanding::Here(self.with_logits(rows)?),
            false => Outstanding::Tokens { rows },
        };
        self.results.push_back(outstanding);
        Ok(())
    }

    /// Waits for tokens and logits of the latest run.
    fn with_logits(&mut self, rows: usize) -> Result<Vec<Picked>, RuntimeError> {
        // Words come back in order: those before these are for whoever collects them.
        for earlier in &mut self.results {
            if let Outstanding::Tokens { rows } = *earlier {
                *earlier = Outstanding::Here(picked(self.backend.receive()?, rows));
            }
        }
        let mut all = picked(self.backend.receive()?, rows);
        let vocabulary = self.limits.vocab as usize;
        let mut bytes = vec![0; vocabulary * 4];
        for (row, picked) in all.iter_mut().enumerate() {
            let from = self.program().places.logits + (row * vocabulary * 4) as u64;
            self.backend.read(arena(from, bytes.len()), &mut bytes)?;
            let words = bytes.chunks_exact(4);
            picked.logits = words.map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect();
        }
        Ok(all)
    }

    fn pick(picking: &Picking) -> Pick {
        if picking.sampling.temperature == 0.0 { Pick::Largest } else { Pick::Sampled }
    }

    fn range(&self, part: Part) -> Range {
        let KvLayout { ring_bytes, block_bytes, blocks_at, .. } = self.program().kv_layout;
        let (offset, bytes) = match part {
            Part::Ring(ring) => (u64::from(ring) * ring_bytes, ring_bytes),
            Part::Block(block) => (blocks_at + u64::from(block) * block_bytes, block_bytes),
        };
        Range { region: Region::Kv, offset, bytes }
    }
}

/// The tokens of the first rows.
fn picked(words: Vec<u32>, rows: usize) -> Vec<Picked> {
    words.into_iter().take(rows).map(|token| Picked { token, logits: Vec::new() }).collect()
}

fn arena(offset: u64, bytes: usize) -> Range {
    Range { region: Region::Arena, offset, bytes: bytes as u64 }
}

fn write(backend: &mut dyn Backend, offset: u64, words: &[u32]) -> Result<(), RuntimeError> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    backend.write(arena(offset, bytes.len()), &bytes)
}

/// A record; what is not picked has no settings.
fn record_of(
    slot: u32,
    position: u32,
    rows: u32,
    token: u32,
    tick: u32,
    picking: Option<&Picking>,
) -> [u32; RECORD_WORDS as usize] {
    let mut words = [0; RECORD_WORDS as usize];
    words[record::POSITION] = position;
    words[record::ROWS] = rows;
    words[record::TOKEN] = token;
    words[record::SLOT] = slot;
    words[record::TICK] = tick;
    if let Some(Picking { sampling, seed, .. }) = picking {
        words[record::TEMPERATURE] = sampling.temperature.to_bits();
        words[record::TOP_K] = sampling.top_k;
        words[record::TOP_P] = sampling.top_p.to_bits();
        words[record::SEED] = *seed as u32;
        words[record::SEED + 1] = (*seed >> 32) as u32;
    }
    words
}

impl Device for BackendDevice {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn name(&self) -> String {
        self.backend.name()
    }

    fn identity(&self) -> u128 {
        let key = &self.program().gpu.key;
        xxh3_128(&[key.as_bytes(), &self.plan.model.fingerprint.to_le_bytes()].concat())
    }

    fn can_pick(&self, sampling: &Sampling) -> bool {
        sampling.temperature == 0.0 || (1..=self.program().most_candidates).contains(&sampling.top_k)
    }

    fn set_pages(&mut self, slot: u32, pages: &[u32]) -> Result<(), RuntimeError> {
        let places = self.places();
        let at = places.pages + u64::from(slot) * u64::from(places.max_pages) * 4;
        write(&mut *self.backend, at, pages)
    }

    fn prefill(&mut self, chunk: Chunk<'_>, picking: Option<Picking>) -> Result<(), RuntimeError> {
        let (places, rows) = (self.places(), chunk.tokens.len() as u32);
        let takes = |phase: &gemma4c_plan::cuda::Phase| phase.kind == PhaseKind::Prefill && phase.rows >= rows;
        let phase = self.program().phases.iter().position(takes).ok_or(RuntimeError::NoProgram)?;
        let (asked_from, steps) = (self.program().phases[phase].asked_from, self.program().phases[phase].steps.len());
        let Chunk { slot, position, tokens } = chunk;
        self.prompts = (self.prompts + 1) % (places.history_len / 4);
        let tick = self.tick.wrapping_add(places.history_len / 2 + self.prompts);
        write(&mut *self.backend, places.tokens, tokens)?;
        write(&mut *self.backend, places.chunk, &record_of(slot, position, rows, tokens[0], tick, None))?;
        let Some(picking) = picking else {
            let run = Run { phase, steps: (0, asked_from as usize), pick: Pick::None };
            return self.run(run, 0, tick, false);
        };
        let asked = record_of(slot, position + rows - 1, 1, rows - 1, tick, Some(&picking));
        write(&mut *self.backend, places.asked, &asked)?;
        let run = Run { phase, steps: (0, steps), pick: Self::pick(&picking) };
        self.run(run, 1, tick, picking.logits)
    }

    fn decode(&mut self, rows: &[Row]) -> Result<(), RuntimeError> {
        let takes = |phase: &gemma4c_plan::cuda::Phase| {
            phase.kind == PhaseKind::Decode && phase.rows as usize >= rows.len()
        };
        let phase = self.program().phases.iter().position(takes).ok_or(RuntimeError::NoProgram)?;
        let places = self.places();
        let mut words: Vec<u32> = Vec::new();
        for row in rows {
            words.extend(record_of(row.slot, row.position, 1, row.token, self.tick, Some(&row.picking)));
        }
        words.resize(self.program().phases[phase].rows as usize * RECORD_WORDS as usize, 0);
        write(&mut *self.backend, places.rows, &words)?;
        let all_greedy = rows.iter().all(|row| Self::pick(&row.picking) == Pick::Largest);
        self.latest = (phase, rows.len(), if all_greedy { Pick::Largest } else { Pick::Sampled });
        let logits = rows.iter().any(|row| row.picking.logits);
        self.decode_latest(logits)
    }

    fn decode_again(&mut self) -> Result<(), RuntimeError> {
        self.decode_latest(false)
    }

    fn collect(&mut self) -> Result<Vec<Picked>, RuntimeError> {
        match self.results.pop_front() {
            Some(Outstanding::Tokens { rows }) => Ok(picked(self.backend.receive()?, rows)),
            Some(Outstanding::Here(picked)) => Ok(picked),
            None => Ok(Vec::new()),
        }
    }

    fn copy(&mut self, from: Part, to: Part) -> Result<(), RuntimeError> {
        let (from, to) = (self.range(from), self.range(to));
        self.backend.copy(from, to)
    }

    fn save(&mut self, from: Part, units: &[u32]) -> Result<(), RuntimeError> {
        let range = self.range(from);
        let mut bytes = vec![0; range.bytes as usize];
        self.backend.read(range, &mut bytes)?;
        let at = units.first().map_or(0, |unit| *unit as usize);
        if self.host.len() <= at {
            self.host.resize(at + 1, Vec::new());
        }
        self.host[at] = bytes;
        Ok(())
    }

    fn load(&mut self, units: &[u32], to: Part) -> Result<(), RuntimeError> {
        let range = self.range(to);
        let at = units.first().map_or(0, |unit| *unit as usize);
        let bytes = self.host.get(at).map_or(&[][..], Vec::as_slice);
        self.backend.write(range, bytes)
    }
}

impl BackendDevice {
    fn decode_latest(&mut self, logits: bool) -> Result<(), RuntimeError> {
        let (phase, rows, pick) = self.latest;
        let steps = self.program().phases[phase].steps.len();
        let tick = self.tick;
        self.tick = self.tick.wrapping_add(1);
        self.run(Run { phase, steps: (0, steps), pick }, rows, tick, logits)
    }
}
