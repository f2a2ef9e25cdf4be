//! Tokens through the phases of a plan, whatever backend runs them.
//!
//! A prompt goes through the prefill phases, even if it is one token: decode rounds differently, and the results must not depend
//! on how a prompt is cut into chunks. A generated token goes through the first phase (decode), which picks the next token on
//! the device; the host queues a few of these ahead and reads the tokens as they arrive. There is one sequence here: it has the first
//! slot, the first record and the first pages.

use gemma4c_plan::Plan;
use gemma4c_plan::cuda::{
    CudaProgram, KvCache, PhaseKind, Places, RECORD_WORDS, Range, Region, SEGMENT_ROWS, Segment, record,
};

use crate::backend::{Backend, Pick, Run};
use crate::{Asked, RuntimeError, Sampler};

/// Replays of decode queued before the host reads the first of their tokens: enough that the device never waits for the host, few
/// enough that little is computed in vain after a stop token.
const AHEAD: u32 = 4;

/// What is wanted of the tokens fed.
pub(crate) enum Want<'a> {
    /// The logits of these rows, each given to the function with its token's index.
    Logits(Asked, &'a mut dyn FnMut(usize, &[f32])),
    /// The next token, copied to the host.
    Token(Pick),
}

/// Every run that is asked for here, so that a backend can be ready for all of them.
pub(crate) fn runs(program: &CudaProgram) -> Vec<Run> {
    const PICKS: [Pick; 3] = [Pick::None, Pick::Largest, Pick::Sampled];
    let mut all: Vec<Run> = Vec::new();
    for (phase, shape) in program.phases.iter().enumerate() {
        let (asked_from, end) = (shape.asked_from as usize, shape.steps.len());
        let whole = PICKS.map(|pick| Run { phase, steps: (0, end), pick });
        let trunk = Run { phase, steps: (0, asked_from), pick: Pick::None };
        // Where a chunk may have several segments, several rows are asked for.
        let is_packed = shape.rows > SEGMENT_ROWS;
        let asked = PICKS.into_iter().filter(|pick| *pick == Pick::None || is_packed);
        let parts = asked.map(|pick| Run { phase, steps: (asked_from, end), pick });
        // Decode is not run in part.
        let parts = [trunk].into_iter().chain(parts);
        let parts = parts.filter(|run| shape.kind == PhaseKind::Prefill && run.steps.0 < run.steps.1);
        for run in whole.into_iter().chain(parts) {
            if !all.contains(&run) {
                all.push(run);
            }
        }
    }
    all
}

/// How a plan's phases take tokens.
pub(crate) struct Feeder {
    places: Places,
    /// Words of an entry of the history.
    history_rows: u32,
    /// Rows that every ring has besides its window.
    slack: u32,
    /// Of the picks: temperature, top-k, top-p, the seed.
    settings: [u32; 5],
    phases: Vec<Shape>,
    vocabulary: usize,
    /// Bytes of a row of logits, and the row.
    bytes: Vec<u8>,
    row: Vec<f32>,
}

struct Shape {
    kind: PhaseKind,
    rows: u32,
    asked_from: usize,
    steps: usize,
}

impl Feeder {
    /// `None` for a plan without a GPU's program.
    pub fn new(plan: &Plan) -> Option<Feeder> {
        let program = &plan.cuda.as_ref()?.program;
        let shape = |phase: &gemma4c_plan::cuda::Phase| Shape {
            kind: phase.kind,
            rows: phase.rows,
            asked_from: phase.asked_from as usize,
            steps: phase.steps.len(),
        };
        let vocabulary = plan.model.vocab_size as usize;
        Some(Feeder {
            places: program.places,
            history_rows: program.decode_rows(),
            slack: slack(program, plan.program.context),
            settings: [0; 5],
            phases: program.phases.iter().map(shape).collect(),
            vocabulary,
            bytes: vec![0; vocabulary * 4],
            row: vec![0.0; vocabulary],
        })
    }

    /// Gives the sequence its pages.
    pub fn start(&self, backend: &mut dyn Backend) -> Result<(), RuntimeError> {
        let pages: Vec<u32> = (0..self.places.max_pages).collect();
        self.write(backend, self.places.pages, &pages)
    }

    /// Most tokens of a prompt that go through at once.
    pub fn chunk(&self) -> u32 {
        self.phases.last().filter(|phase| phase.kind == PhaseKind::Prefill).map_or(1, |phase| phase.rows)
    }

    /// Tokens in flight to the host, at most.
    pub fn ahead(&self) -> u32 {
        // A token decoded in vain overwrites the oldest row of a ring.
        AHEAD.min(self.slack).min(self.places.history_len)
    }

    /// Feeds a prompt from `position` on, in chunks of at most `chunk`.
    pub fn feed(
        &mut self,
        backend: &mut dyn Backend,
        tokens: &[u32],
        position: u32,
        chunk: Option<u32>,
        mut want: Want<'_>,
    ) -> Result<(), RuntimeError> {
        // Rows that are asked for one by one look at the rings when all of the chunk is in them.
        let most = match want {
            Want::Logits(Asked::All, _) => self.chunk().min(self.slack),
            _ => self.chunk(),
        };
        let chunk = chunk.unwrap_or(most).clamp(1, most) as usize;
        let mut first = 0;
        while first < tokens.len() {
            let piece = &tokens[first..(first + chunk).min(tokens.len())];
            let is_last = first + piece.len() == tokens.len();
            self.feed_chunk(backend, piece, position + first as u32, first, is_last, &mut want)?;
            first += piece.len();
        }
        Ok(())
    }

    fn feed_chunk(
        &mut self,
        backend: &mut dyn Backend,
        tokens: &[u32],
        position: u32,
        first: usize,
        is_last: bool,
        want: &mut Want<'_>,
    ) -> Result<(), RuntimeError> {
        let rows = tokens.len() as u32;
        let phase = self.prompt_phase(rows);
        let Shape { kind, asked_from, steps, .. } = self.phases[phase];
        let run = |steps, pick| Run { phase, steps, pick };
        // A decoded row is the asked one.
        let asked_from = if kind == PhaseKind::Decode { steps } else { asked_from };
        match kind {
            PhaseKind::Decode => self.place_row(backend, tokens[0], position)?,
            PhaseKind::Prefill => {
                self.write(backend, self.places.tokens, tokens)?;
                self.write(backend, self.places.chunk, &self.record(position, rows, tokens[0]))?;
                let segments = Segment::words(&[Segment::alone(position, rows, 0)], self.phases[phase].rows);
                self.write(backend, self.places.segments, &segments)?;
            }
        }
        match want {
            Want::Logits(Asked::All, each) => {
                backend.run(run((0, asked_from), Pick::None))?;
                for row in 0..rows {
                    self.ask(backend, position, row)?;
                    if asked_from < steps {
                        backend.run(run((asked_from, steps), Pick::None))?;
                    }
                    each(first + row as usize, self.logits(backend)?);
                }
            }
            Want::Logits(Asked::Last, each) if is_last => {
                self.ask(backend, position, rows - 1)?;
                backend.run(run((0, steps), Pick::None))?;
                each(first + tokens.len() - 1, self.logits(backend)?);
            }
            Want::Token(pick) if is_last => {
                self.ask(backend, position, rows - 1)?;
                backend.run(run((0, steps), *pick))?;
                self.send_back(backend, position + rows)?;
            }
            _ => backend.run(run((0, asked_from), Pick::None))?,
        }
        Ok(())
    }

    /// Feeds one token the way generated ones are, and returns the logits after it.
    pub fn decode(&mut self, backend: &mut dyn Backend, token: u32, position: u32) -> Result<&[f32], RuntimeError> {
        self.place_row(backend, token, position)?;
        backend.run(Run { phase: 0, steps: (0, self.phases[0].steps), pick: Pick::None })?;
        self.logits(backend)
    }

    /// Makes a token at `position` the decoded row.
    pub fn place_row(&self, backend: &mut dyn Backend, token: u32, position: u32) -> Result<(), RuntimeError> {
        self.write(backend, self.places.rows, &self.record(position, 1, token))
    }

    /// Queues the token that was placed or picked last, now at `position`, through the first phase; its successor comes back.
    pub fn decode_picked(&self, backend: &mut dyn Backend, position: u32, pick: Pick) -> Result<(), RuntimeError> {
        backend.run(Run { phase: 0, steps: (0, self.phases[0].steps), pick })?;
        self.send_back(backend, position + 1)
    }

    /// How many suppressed tokens the device has room for.
    pub fn most_suppressed(&self) -> usize {
        self.places.suppress_len as usize
    }

    /// Sets the sampling parameters of the following picks.
    pub fn set(&mut self, backend: &mut dyn Backend, sampler: &Sampler) -> Result<(), RuntimeError> {
        let (sampling, seed) = (sampler.sampling(), sampler.seed());
        let (temperature, top_p) = (sampling.temperature.to_bits(), sampling.top_p.to_bits());
        self.settings = [temperature, sampling.top_k, top_p, seed as u32, (seed >> 32) as u32];
        let mut suppress = vec![u32::MAX; self.most_suppressed()];
        suppress[..sampler.suppress().len()].copy_from_slice(sampler.suppress());
        self.write(backend, self.places.suppress, &suppress)
    }

    /// The smallest prefill phase that takes so many rows; of a plan that has none, the first.
    fn prompt_phase(&self, rows: u32) -> usize {
        let prefill = |phase: &Shape| phase.kind == PhaseKind::Prefill && phase.rows >= rows;
        self.phases.iter().position(prefill).unwrap_or(0)
    }

    fn ask(&self, backend: &mut dyn Backend, position: u32, row: u32) -> Result<(), RuntimeError> {
        self.write(backend, self.places.asked, &self.record(position + row, 1, row))
    }

    /// A record whose next pick is for the position after its rows: that is its tick.
    fn record(&self, position: u32, rows: u32, token: u32) -> [u32; RECORD_WORDS as usize] {
        let mut words = [0; RECORD_WORDS as usize];
        (words[record::POSITION], words[record::ROWS], words[record::TOKEN]) = (position, rows, token);
        words[record::TICK] = position + rows;
        words[record::TEMPERATURE..record::TEMPERATURE + 5].copy_from_slice(&self.settings);
        words
    }

    fn write(&self, backend: &mut dyn Backend, offset: u64, words: &[u32]) -> Result<(), RuntimeError> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        backend.write(arena(offset, bytes.len()), &bytes)
    }

    /// Queues the copy of the token for `position` to the host.
    fn send_back(&self, backend: &mut dyn Backend, position: u32) -> Result<(), RuntimeError> {
        let entry = (position % self.places.history_len) as u64 * self.history_rows as u64;
        let place = self.places.history + 4 * entry;
        backend.send_back(arena(place, 4))
    }

    fn logits(&mut self, backend: &mut dyn Backend) -> Result<&[f32], RuntimeError> {
        backend.read(arena(self.places.logits, self.vocabulary * 4), &mut self.bytes)?;
        for (value, bytes) in self.row.iter_mut().zip(self.bytes.chunks_exact(4)) {
            *value = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        Ok(&self.row)
    }
}

/// Rows that every ring has besides its window, at least one; as many as there are positions where nothing is ever overwritten.
fn slack(program: &CudaProgram, context: u32) -> u32 {
    let of = |cache: &KvCache| match cache.window {
        Some(window) if cache.rows < context => cache.rows.saturating_sub(window).max(1),
        _ => context,
    };
    program.kv_layout.caches.iter().map(of).min().unwrap_or(context)
}

fn arena(offset: u64, bytes: usize) -> Range {
    Range { region: Region::Arena, offset, bytes: bytes as u64 }
}
