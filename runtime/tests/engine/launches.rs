//! The same device without a model behind the interface of a GPU: records, pages and a history in memory, which
//! launches read and write.

use std::collections::VecDeque;
use std::ops::Range as Bytes;

use gemma4c_plan::cuda::{
    KvCache, KvLayout, Paging, PhaseKind, Places, RECORD_WORDS, Range, Region, SEGMENT_ROWS, SEGMENT_WORDS, record,
};
use gemma4c_plan::{Plan, Sampling};
use gemma4c_runtime::engine::{BackendDevice, BackendOptions, Mask};
use gemma4c_runtime::{Backend, Pick, Run, RuntimeError};

use crate::fake::{WINDOW, logits, pick, row};
use crate::support;

pub const VOCAB: u32 = 50;
const CONTEXT: u32 = 600;
const ROW: u64 = 8;
const DECODE: [u32; 3] = [1, 2, 4];
const PREFILL: [u32; 3] = [4, 32, 192];

/// A plan with four slots and thirty pages, whose launches are nobody's.
pub fn plan() -> Plan {
    let mut plan = support::plan();
    plan.model.vocab_size = VOCAB;
    plan.program.context = CONTEXT;
    let program = &mut plan.cuda.as_mut().unwrap().program;
    let (sliding, full) = (Paging { rows: 64, entries: 4 }, Paging { rows: 256, entries: CONTEXT.div_ceil(256) });
    let mut next = 0;
    let mut reserve = |words: u32| {
        next += 4 * words as u64;
        next - 4 * words as u64
    };
    let rows = DECODE[2];
    program.places = Places {
        tokens: reserve(PREFILL[2]),
        rows: reserve(rows * RECORD_WORDS),
        chunk: reserve(RECORD_WORDS),
        segments: reserve(PREFILL[2].div_ceil(SEGMENT_ROWS) * SEGMENT_WORDS),
        asked: reserve(RECORD_WORDS),
        pages: reserve(4 * full.entries),
        windows: reserve(4 * sliding.entries),
        suppress: reserve(4),
        suppress_len: 4,
        history: reserve(8 * rows),
        history_len: 8,
        logits: reserve(rows * VOCAB),
        masks: reserve(rows * Places::mask_words(VOCAB)),
        soft: None,
        seats: None,
    };
    let caches = vec![KvCache { keys: 0, values: 0, window: Some(WINDOW as u32) }];
    program.kv_layout = KvLayout { slots: 4, pages: 30, page_bytes: 256 * ROW, sliding, full, caches };
    (program.memory.arena, program.memory.kv) = (next, program.kv_layout.bytes());
    program.most_candidates = 16;
    let of = |kind| program.phases.iter().find(|phase| phase.kind == kind).unwrap().clone();
    let (decode, prefill) = (of(PhaseKind::Decode), of(PhaseKind::Prefill));
    let mut phases = vec![];
    for (shape, ladder) in [(decode, DECODE), (prefill, PREFILL)] {
        phases.extend(ladder.map(|rows| gemma4c_plan::cuda::Phase { rows, ..shape.clone() }));
    }
    program.phases = phases;
    plan
}

pub fn device(sequences: Option<u32>, host_bytes: u64) -> BackendDevice {
    let plan = plan();
    let program = &plan.cuda.as_ref().unwrap().program;
    let launches = Launches {
        arena: vec![0; program.memory.arena as usize],
        kv: vec![0; program.memory.kv as usize],
        tier: vec![],
        places: program.places,
        layout: program.kv_layout.clone(),
        phases: program.phases.iter().map(|p| (p.kind, p.rows, p.asked_from as usize, p.steps.len())).collect(),
        on_their_way: VecDeque::new(),
        values: vec![],
        chunk_values: vec![],
    };
    BackendDevice::new(&plan, Box::new(launches), BackendOptions { sequences, host_bytes, suppress: vec![] }).unwrap()
}

struct Launches {
    arena: Vec<u8>,
    kv: Vec<u8>,
    tier: Vec<u8>,
    places: Places,
    layout: KvLayout,
    phases: Vec<(PhaseKind, u32, usize, usize)>,
    on_their_way: VecDeque<Range>,
    /// What the rows of the latest run have computed.
    values: Vec<(u64, u32, u64)>,
    /// Position, slot and value of each row of the latest chunk, where it is of somebody.
    chunk_values: Vec<Option<(u32, u32, u64)>>,
}

fn place(range: Range) -> Bytes<usize> {
    range.offset as usize..(range.offset + range.bytes) as usize
}

impl Launches {
    fn memory(&mut self, region: Region) -> &mut Vec<u8> {
        match region {
            Region::Arena => &mut self.arena,
            Region::Kv => &mut self.kv,
            other => panic!("{other:?} is not touched"),
        }
    }

    fn words(&self, offset: u64, count: usize) -> Vec<u32> {
        let bytes = &self.arena[offset as usize..][..4 * count];
        bytes.chunks(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    }

    fn set(&mut self, offset: u64, words: &[u32]) {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.arena[offset as usize..][..bytes.len()].copy_from_slice(&bytes);
    }

    fn record(&self, at: u64, index: u32) -> (u64, Vec<u32>) {
        let at = at + (4 * index * RECORD_WORDS) as u64;
        (at, self.words(at, RECORD_WORDS as usize))
    }

    fn value(&self, at: u64) -> u64 {
        u64::from_le_bytes(self.kv[at as usize..][..8].try_into().unwrap())
    }

    fn place(&self, (table, paging): (u64, Paging), slot: u32, position: u64) -> u64 {
        let (rows, entries) = (u64::from(paging.rows), u64::from(paging.entries));
        let entry = u64::from(slot) * entries + position / rows % entries;
        let page = self.words(table + 4 * entry, 1)[0];
        assert!(page < self.layout.pages);
        u64::from(page) * self.layout.page_bytes + position % rows * ROW
    }

    /// Where a sliding layer has a position, and where a full one has it.
    fn places_of(&self, slot: u32, position: u64) -> [u64; 2] {
        let tables = [(self.places.windows, self.layout.sliding), (self.places.pages, self.layout.full)];
        tables.map(|table| self.place(table, slot, position))
    }

    fn feed(&mut self, slot: u32, position: u32, token: u32, decoded: bool) -> u64 {
        let at = position as u64;
        let window = (at.saturating_sub(WINDOW as u64 - 1)..at).map(|p| self.value(self.places_of(slot, p)[0]));
        let all = (0..at).map(|p| self.value(self.places_of(slot, p)[1]));
        let value = row(token, decoded, window, all);
        for place in self.places_of(slot, at) {
            self.kv[place as usize..][..8].copy_from_slice(&value.to_le_bytes());
        }
        value
    }

    /// Leaves a row's logits.
    fn finish(&mut self, value: u64, at: u64, index: u32) {
        let bits: Vec<u32> = logits(value, VOCAB).iter().map(|value| value.to_bits()).collect();
        self.set(self.places.logits + (4 * index * VOCAB) as u64, &bits);
        self.values.push((at, index, value));
    }

    /// Picks a row's token.
    fn pick(&mut self, value: u64, at: u64, index: u32, rule: Pick) {
        let mut words = self.words(at, RECORD_WORDS as usize);
        let mut allowed = Mask::all(VOCAB);
        if words[record::MASKED] != 0 {
            let count = Places::mask_words(VOCAB);
            allowed.set(&self.words(self.places.masks + (4 * index * count) as u64, count as usize));
        }
        let sampling = Sampling {
            temperature: if rule == Pick::Largest { 0.0 } else { f32::from_bits(words[record::TEMPERATURE]) },
            top_k: words[record::TOP_K],
            top_p: f32::from_bits(words[record::TOP_P]),
        };
        let seed = words[record::SEED] as u64 | (words[record::SEED + 1] as u64) << 32;
        words[record::POSITION] += words[record::ROWS];
        words[record::TOKEN] = pick(value, sampling, seed, words[record::POSITION], &allowed, VOCAB);
        let column = index + words[record::COLUMN];
        assert!(column < DECODE[2], "an entry of the history has a word for each decoded row");
        let entry = words[record::TICK] % self.places.history_len * DECODE[2] + column;
        self.set(self.places.history + 4 * entry as u64, &[words[record::TOKEN]]);
        words[record::TICK] += 1;
        self.set(at, &words);
    }

    fn compute(&mut self, kind: PhaseKind, rows: u32, (asked_from, end): (usize, usize), steps: (usize, usize)) {
        if kind == PhaseKind::Decode {
            assert_eq!(steps, (0, end));
            for index in 0..rows {
                let (at, words) = self.record(self.places.rows, index);
                if words[record::ROWS] == 0 {
                    continue;
                }
                let [position, _, token, slot] = words[..4] else { unreachable!() };
                let value = self.feed(slot, position, token, true);
                self.finish(value, at, index);
            }
            return;
        }
        if steps.0 == 0 {
            self.chunk_values = self.chunk(rows);
        } else {
            assert_eq!(steps.0, asked_from);
        }
        if steps.1 == end {
            let (at, asked) = self.record(self.places.asked, 0);
            let (position, slot, value) =
                self.chunk_values[asked[record::TOKEN] as usize].expect("the row is not free");
            assert_eq!((asked[record::POSITION], asked[record::SLOT]), (position, slot));
            self.finish(value, at, 0);
        } else {
            assert_eq!(steps.1, asked_from);
        }
    }

    /// Feeds the rows of a chunk that are not free. Every row has a token, and finds its segment by its own number.
    fn chunk(&mut self, rows: u32) -> Vec<Option<(u32, u32, u64)>> {
        let count = self.record(self.places.chunk, 0).1[record::ROWS];
        assert!(count <= rows);
        let tokens = self.words(self.places.tokens, count as usize);
        assert!(tokens.iter().all(|token| *token < VOCAB));
        let mut values = Vec::new();
        for row in 0..rows {
            let at = self.places.segments + 4 * (row / SEGMENT_ROWS * SEGMENT_WORDS) as u64;
            let [position, used, first, slot] = self.words(at, 4)[..] else { unreachable!() };
            assert!(row >= first, "row {row} is before its segment");
            values.push((row - first < used).then(|| {
                assert!(row < count, "row {row} is of a segment, and beyond the chunk");
                let position = position + row - first;
                (position, slot, self.feed(slot, position, tokens[row as usize], false))
            }));
        }
        values
    }
}

impl Backend for Launches {
    fn name(&self) -> String {
        "launches".into()
    }

    fn write(&mut self, to: Range, bytes: &[u8]) -> Result<(), RuntimeError> {
        self.memory(to.region)[place(to)][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn read(&mut self, from: Range, bytes: &mut [u8]) -> Result<(), RuntimeError> {
        bytes.copy_from_slice(&self.memory(from.region)[place(from)]);
        Ok(())
    }

    fn run(&mut self, run: Run) -> Result<(), RuntimeError> {
        let (kind, rows, asked_from, end) = self.phases[run.phase];
        // Picks alone are of what was computed last.
        if run.steps != (end, end) {
            self.values.clear();
            self.compute(kind, rows, (asked_from, end), run.steps);
        }
        if run.pick != Pick::None {
            for (at, index, value) in std::mem::take(&mut self.values) {
                self.pick(value, at, index, run.pick);
            }
        }
        Ok(())
    }

    fn send_back(&mut self, from: Range) -> Result<(), RuntimeError> {
        assert!(from.bytes <= 4 * DECODE[2] as u64);
        self.on_their_way.push_back(from);
        Ok(())
    }

    fn receive(&mut self) -> Result<Vec<u32>, RuntimeError> {
        // As late as it may be: whoever wrote over them meanwhile is found out.
        let from = self.on_their_way.pop_front().expect("words were sent");
        let bytes = &self.arena[place(from)];
        Ok(bytes.chunks(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }

    fn copy(&mut self, from: Range, to: Range) -> Result<(), RuntimeError> {
        assert_eq!((from.region, to.region, from.bytes), (Region::Kv, Region::Kv, to.bytes));
        self.kv.copy_within(place(from), to.offset as usize);
        Ok(())
    }

    fn reserve_tier(&mut self, bytes: u64) -> Result<(), RuntimeError> {
        self.tier = vec![0; bytes as usize];
        Ok(())
    }

    fn save(&mut self, from: Range, at: u64) -> Result<(), RuntimeError> {
        let bytes = self.memory(from.region)[place(from)].to_vec();
        self.tier[at as usize..][..bytes.len()].copy_from_slice(&bytes);
        Ok(())
    }

    fn load(&mut self, at: u64, to: Range) -> Result<(), RuntimeError> {
        let bytes = self.tier[at as usize..][..to.bytes as usize].to_vec();
        self.memory(to.region)[place(to)].copy_from_slice(&bytes);
        Ok(())
    }

    fn wait(&mut self) -> Result<(), RuntimeError> {
        Ok(())
    }
}
