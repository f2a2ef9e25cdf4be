//! Walks the steps of a plan over some rows: a chunk of one sequence's tokens, one token of each of several, or a
//! picture's patches. A drafter's steps read the keys and values of the text's executor.

use std::ops::Range;
use std::sync::Arc;

use gemma4c_blocks::{DType, decode};
use gemma4c_plan::cuda::KvLayout;
use gemma4c_plan::{Kind, Op, Plan, Program, RowCount, SeatWeights, Step, Value, Weight, WeightId};

use super::aligned::Aligned;
use super::kv::{self, KvMemory, Pages};
use super::ops::adapter::{self, Seat};
use super::ops::grid::{self, Grid};
use super::ops::matmul::{Experts, Matrix};
use super::ops::moe::Routes;
use super::ops::rope::RopeTable;
use super::ops::sound::{self, Near};
use super::ops::{attention, candidates, elementwise, gather, matmul, moe, norm, rope, rows};
use crate::soft::SoftRows;
use crate::weights::Weights;
use crate::{ModelLocation, RuntimeError, machine};

/// Rows at consecutive positions of the sequence in a slot.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    pub slot: u32,
    pub first_position: usize,
    pub rows: usize,
}

/// A picture or a sound, as a tower reads it.
#[derive(Clone, Copy, Debug)]
pub struct Picture<'a> {
    pub grid: Grid,
    /// The grid's patches, whole rows one after the other.
    pub patches: &'a [f32],
    /// Soft tokens that become of it.
    pub soft: usize,
}

/// One pass over the model: which tokens, where they stand, and which of them want logits. Or one over a tower.
#[derive(Clone, Debug, Default)]
pub struct Pass<'a> {
    pub tokens: &'a [u32],
    /// As many rows together as there are tokens, in their order.
    pub spans: &'a [Span],
    /// Rows of the pass, in order.
    pub asked: &'a [usize],
    pub soft: &'a [SoftRows<'a>],
    /// What a tower looks at, in place of all the others.
    pub picture: Option<Picture<'a>>,
    /// Of a drafter: the hidden state of each row, one after the other.
    pub hidden: &'a [f32],
}

impl Pass<'_> {
    fn rows(&self, rows: RowCount) -> usize {
        match rows {
            RowCount::Chunk => self.tokens.len(),
            RowCount::Asked => self.asked.len(),
            RowCount::Patches => self.picture.map_or(0, |picture| picture.grid.patches()),
            RowCount::Halves => self.picture.map_or(0, |picture| picture.grid.patches().div_ceil(2)),
            RowCount::Soft => self.picture.map_or(0, |picture| picture.soft),
        }
    }

    /// The tokens whose embeddings are looked up, with `pad` where a soft token stands.
    fn text_tokens(&self, pad: u32, width: usize) -> Vec<u32> {
        let mut tokens = self.tokens.to_vec();
        for soft in self.soft {
            tokens[soft.first..][..soft.values.len() / width].fill(pad);
        }
        tokens
    }

    /// `x`, but for the rows in whose places soft tokens stand.
    fn place_soft(&self, x: &[f32], width: usize, out: &mut [f32]) {
        out.copy_from_slice(x);
        for soft in self.soft {
            out[soft.first * width..][..soft.values.len()].copy_from_slice(soft.values);
        }
    }

    /// Where its soft tokens stand that see each other, which are all of one sequence.
    fn soft_positions(&self, width: usize) -> Vec<Range<usize>> {
        let first = self.spans.first().map_or(0, |span| span.first_position);
        let range = |soft: &SoftRows<'_>| first + soft.first..first + soft.first + soft.values.len() / width;
        self.soft.iter().filter(|soft| soft.ahead > 1).map(range).collect()
    }

    /// Where rows stand.
    fn spans(&self, rows: RowCount) -> Vec<Span> {
        match rows {
            RowCount::Chunk => return self.spans.to_vec(),
            RowCount::Asked => {}
            RowCount::Patches | RowCount::Halves | RowCount::Soft => {
                unreachable!("the plan was checked: patches have no positions")
            }
        }
        let (mut first_row, mut asked, mut parts) = (0, self.asked, Vec::new());
        for span in self.spans {
            let (own, others) = asked.split_at(asked.partition_point(|row| *row < first_row + span.rows));
            // Rows without a gap stay together.
            for run in own.chunk_by(|row, next| row + 1 == *next) {
                parts.push(Span { first_position: span.first_position + run[0] - first_row, rows: run.len(), ..*span });
            }
            (first_row, asked) = (first_row + span.rows, others);
        }
        parts
    }

    /// Where the sequences of rows sit, by their slots.
    fn seats(&self, rows: RowCount, of_slots: &[Seat]) -> Vec<Seat> {
        let of = |span: Span| std::iter::repeat_n(of_slots[span.slot as usize], span.rows);
        match rows {
            RowCount::Chunk | RowCount::Asked => self.spans(rows).into_iter().flat_map(of).collect(),
            RowCount::Patches | RowCount::Halves | RowCount::Soft => Vec::new(),
        }
    }

    fn positions(&self, rows: RowCount) -> Vec<usize> {
        let spans = self.spans(rows);
        spans.iter().flat_map(|span| (span.first_position..).take(span.rows)).collect()
    }
}

/// How many sequences there is memory for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    pub slots: usize,
    /// Pages of keys and values.
    pub pages: usize,
}

/// Sees every f32 value as it is made: its name, its width and its rows. What it changes, later steps read.
pub type Tap<'a> = dyn FnMut(&str, usize, &mut [f32]) + Send + 'a;

/// Which of a plan's programs an executor runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Text,
    Tower(usize),
    Drafter,
}

impl Part {
    fn program(self, plan: &Plan) -> &Program {
        match self {
            Part::Text => &plan.program,
            Part::Tower(index) => &plan.towers[index].program,
            Part::Drafter => &plan.drafter.as_ref().expect("whoever made this looked for one").program,
        }
    }
}

/// Which pages are whose.
struct Tables {
    layout: KvLayout,
    /// Those of each slot's sequence, in sliding layers and in full ones.
    of_slots: Vec<[Vec<u32>; 2]>,
}

/// A plan with its weights, its state and its working memory.
pub struct Executor {
    plan: Arc<Plan>,
    part: Part,
    weights: Arc<Weights>,
    /// Weight vectors (f32), copied once because mapped bytes need not be aligned. Empty for matrices.
    vectors: Vec<Vec<f32>>,
    /// One for each RoPE step, shared by steps with the same frequencies.
    ropes: Vec<Option<Arc<RopeTable>>>,
    arena: Aligned,
    kv: KvMemory,
    tables: Tables,
    /// Where the sequence of each slot sits.
    seats: Vec<Seat>,
    /// By the weight's index: what is in the seats. Empty for all that is not reserved for them.
    banks: Vec<Vec<u8>>,
    /// One for each value that is a routing.
    routes: Vec<Option<Routes>>,
    /// One for each value that is tokens, but for those of the pass.
    tokens: Vec<Option<Vec<u32>>>,
}

impl Executor {
    /// Maps the model's files, checks that they are the plan's, and reserves all memory that there will ever be need
    /// of.
    pub(crate) fn open(plan: Arc<Plan>, location: &ModelLocation, room: Room) -> Result<Executor, RuntimeError> {
        let drafter = plan.drafter.iter().map(|drafter| &drafter.program);
        let programs =
            std::iter::once(&plan.program).chain(plan.towers.iter().map(|tower| &tower.program)).chain(drafter);
        let arenas = programs.map(|program| program.arena_bytes);
        let made = Weights::bytes_to_make(&plan).saturating_add(plan.reserved_bytes());
        let pages = kv::layout(&plan).page_bytes.checked_mul(room.pages as u64);
        let needed = arenas.fold(pages, |sum, bytes| sum?.checked_add(bytes));
        let needed = needed.and_then(|sum| sum.checked_add(made)).unwrap_or(u64::MAX);
        if let Some(available) = machine::physical_memory().filter(|available| needed > *available) {
            let what = if made == 0 { "keys, values and activations" } else { "weights, keys, values and activations" };
            let advice = "ask for fewer --sequences, or compile with a smaller --ctx";
            return Err(RuntimeError::OutOfMemory { what, needed, available, advice });
        }
        let mut weights = Weights::open(&plan, location)?;
        weights.check(&plan)?;
        weights.make(&plan)?;
        Ok(Executor::new(plan, Part::Text, Arc::new(weights), room))
    }

    /// One that runs a tower of the same plan over the same weights.
    pub(crate) fn tower(&self, index: usize) -> Executor {
        let room = Room { slots: 0, pages: 0 };
        Executor::new(Arc::clone(&self.plan), Part::Tower(index), Arc::clone(&self.weights), room)
    }

    /// One that runs the plan's drafter over the same weights; `None` for a plan without one. It has no keys and
    /// values.
    pub(crate) fn drafter(&self) -> Option<Executor> {
        let room = Room { slots: 0, pages: 0 };
        let drafter = || Executor::new(Arc::clone(&self.plan), Part::Drafter, Arc::clone(&self.weights), room);
        self.plan.drafter.as_ref().map(|_| drafter())
    }

    fn new(plan: Arc<Plan>, part: Part, weights: Arc<Weights>, room: Room) -> Executor {
        let vectors: Vec<Vec<f32>> = plan
            .weights
            .iter()
            .enumerate()
            .map(|(index, w)| {
                let mut vector =
                    vec![0.0; if w.dims.len() == 1 && w.dtype == DType::F32 { w.dim(0) as usize } else { 0 }];
                if !vector.is_empty() {
                    decode::decode_row(w.dtype, weights.bytes(&plan, WeightId(index as u32)), &mut vector);
                }
                vector
            })
            .collect();
        let program = part.program(&plan);
        // A drafter reads another executor's.
        let own_caches = if part == Part::Drafter { &[] } else { program.caches.as_slice() };
        let layout = kv::layout(&plan);
        Executor {
            part,
            ropes: rope_tables(&program.steps, &vectors),
            arena: Aligned::zeros(program.arena_bytes as usize / 4),
            kv: KvMemory::new(&layout, own_caches, room.pages, program.kv),
            tables: Tables { layout, of_slots: vec![Default::default(); room.slots] },
            seats: vec![Seat::default(); room.slots],
            banks: banks(&plan, part),
            routes: program.values.iter().map(|_| None).collect(),
            tokens: program.values.iter().map(|_| None).collect(),
            vectors,
            weights,
            plan,
        }
    }

    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The pages that hold the positions of a slot's sequence, in sliding layers and in full ones.
    pub fn set_pages(&mut self, slot: u32, sliding: &[u32], full: &[u32]) {
        self.tables.of_slots[slot as usize] = [sliding, full].map(<[u32]>::to_vec);
    }

    /// The seat of a slot's sequence.
    pub fn seat(&mut self, slot: u32, seat: Seat) {
        self.seats[slot as usize] = seat;
    }

    /// Puts an adapter into a seat, counted from 1. Its matrices fit.
    pub fn fill_seat(&mut self, seat: u32, weights: &SeatWeights) {
        for ((id, _), matrix) in self.plan.reserved().zip(&weights.matrices) {
            let start = (seat as usize - 1) * matrix.len();
            self.banks[id.index()][start..][..matrix.len()].copy_from_slice(matrix);
        }
    }

    pub fn kv(&self) -> &KvMemory {
        &self.kv
    }

    pub fn kv_mut(&mut self) -> &mut KvMemory {
        &mut self.kv
    }

    /// Runs every step and returns the logits of the asked rows.
    pub fn run(&mut self, pass: &Pass<'_>, tap: &mut Tap<'_>) -> &[f32] {
        // Runs on a pool thread: from any other thread each product would be handed over and waited for.
        rayon::scope(|_| self.walk(pass, tap, None));
        self.value(self.part.program(&self.plan).output, pass)
    }

    /// The same of a drafter, which looks at the keys and values of `text`: the executor of the same plan's text.
    pub(crate) fn run_beside(&mut self, text: &Executor, pass: &Pass<'_>, tap: &mut Tap<'_>) {
        rayon::scope(|_| self.walk(pass, tap, Some(text)));
    }

    /// A value of the last pass that is there until its end.
    pub(crate) fn value(&self, index: u32, pass: &Pass<'_>) -> &[f32] {
        let value = &self.part.program(&self.plan).values[index as usize];
        place(value, pass).map_or(&[], |place| &self.arena.as_slice()[place])
    }

    fn walk(&mut self, pass: &Pass<'_>, tap: &mut Tap<'_>, text: Option<&Executor>) {
        let nothing_asked = pass.asked.is_empty();
        for index in 0..self.part.program(&self.plan).steps.len() {
            let program = self.part.program(&self.plan);
            let output = &program.values[program.steps[index].output as usize];
            if nothing_asked && output.rows == RowCount::Asked {
                continue;
            }
            self.step(index, pass, text);
            let program = self.part.program(&self.plan);
            let output = &program.values[program.steps[index].output as usize];
            if let Some(place) = place(output, pass) {
                tap(&output.name, output.width as usize, &mut self.arena.as_mut_slice()[place]);
            }
        }
    }

    fn step(&mut self, index: usize, pass: &Pass<'_>, text: Option<&Executor>) {
        let program = self.part.program(&self.plan);
        let step = &program.steps[index];
        let value = |i: u32| &program.values[i as usize];
        let output = value(step.output);
        let width = output.width as usize;
        let x_width = step.inputs.first().map_or(0, |x| value(*x).width as usize);
        let (before, out, after) = split(self.arena.as_mut_slice(), place(output, pass).unwrap_or(0..0));
        let after_starts = before.len() + out.len();
        let read = |i: usize| {
            let place = place(value(step.inputs[i]), pass).unwrap_or(0..0);
            // An input lies wholly before or wholly after the output: the plan was checked.
            match place.end <= before.len() {
                true => &before[place],
                false => &after[place.start - after_starts..place.end - after_starts],
            }
        };
        let matrix = |w: WeightId| {
            let weight = &self.plan.weights[w.index()];
            let (rows, cols) = (weight.dim(1) as usize, weight.dim(0) as usize);
            Matrix { dtype: weight.dtype, bytes: bytes_of(&self.plan, &self.weights, &self.banks, w), rows, cols }
        };
        let vector = |w: WeightId| self.vectors[w.index()].as_slice();
        let picture = || pass.picture.expect("a tower is given a picture");
        let routes =
            |i: usize| self.routes[step.inputs[i] as usize].as_ref().expect("a route is made before it is read");
        let tokens = |i: usize| self.tokens[step.inputs[i] as usize].as_deref().unwrap_or(pass.tokens);
        let seats = |w: WeightId| {
            let is_of_seats = self.plan.weights[w.index()].dims.len() == 3;
            is_of_seats.then(|| pass.seats(output.rows, &self.seats))
        };
        match step.op {
            // What they hold lies elsewhere.
            Op::Tokens | Op::BorrowKv { .. } => {}
            Op::Hidden { .. } => out.copy_from_slice(pass.hidden),
            Op::Concat => rows::concat(read(0), x_width, read(1), width, out),
            Op::Candidates { each } => {
                let order = &self.plan.drafter.as_ref().expect("the plan was checked").token_order;
                let listed = candidates::list(&routes(0).ids, order, each as usize);
                self.tokens[step.output as usize] = Some(listed);
            }
            Op::TokenMatMul { weight } => candidates::matmul(&matrix(weight), tokens(1), read(0), out),
            Op::SpreadTokens { .. } => candidates::spread(read(0), tokens(1), width, out),
            Op::AttentionBefore { heads } => {
                let Kind::Kv { cache } = value(step.inputs[1]).kind else { unreachable!("the plan was checked") };
                let text = text.expect("a drafter runs beside the text");
                let cache = &program.caches[cache.index()];
                let lent = self.plan.program.caches.iter().position(|own| own == cache).expect("the plan was checked");
                // What a row sees without its own position is what one at the position before sees in a window less.
                let window = cache.window.map(|window| window as usize - 1);
                let mut spans = pass.spans(output.rows);
                spans.iter_mut().for_each(|span| span.first_position -= 1);
                let spans = text.tables.seen(&text.kv, lent, &spans);
                attention::attention(read(0), &spans, window, &[], heads as usize, out);
            }
            Op::Gather { table } => gather::gather(&matrix(table), pass.tokens, out),
            Op::GatherText { table, pad } => {
                let tokens = pass.text_tokens(pad, self.plan.model.hidden as usize);
                gather::gather(&matrix(table), &tokens, out);
            }
            Op::PlaceSoft => pass.place_soft(read(0), width, out),
            Op::Patches { .. } => out.copy_from_slice(picture().patches),
            Op::AxisRows { table, axis } => {
                let all = matrix(table);
                let tables = self.plan.weights[table.index()].dim(2) as usize;
                grid::axis_rows(&all.part(axis as usize, tables), picture().grid, axis as usize, out);
            }
            Op::SubMean { group } => norm::sub_mean(read(0), group as usize, out),
            Op::HalvingConv { weight, channels } => {
                sound::halving_conv(&matrix(weight), read(0), x_width, channels as usize, out);
            }
            Op::CausalConv { weight } => sound::causal_conv(&matrix(weight), read(0), out),
            Op::NearAttention { heads, reach, cap, weight } => {
                let near = Near { heads: heads as usize, reach: reach as usize, cap, distances: matrix(weight) };
                sound::near_attention(read(0), read(1), read(2), &near, out);
            }
            Op::Sigmoid => elementwise::sigmoid(read(0), out),
            Op::Relu => elementwise::relu(read(0), out),
            Op::GridMean { side } => grid::grid_mean(read(0), picture().grid, side as usize, width, out),
            Op::GridRope { head_dim, .. } => {
                let table = self.ropes[index].as_ref().expect("every rotating step has its table");
                out.copy_from_slice(read(0));
                grid::grid_rope(out, width, head_dim as usize, picture().grid, table);
            }
            Op::FullAttention { heads } => {
                attention::full_attention(read(0), read(1), read(2), heads as usize, width, out);
            }
            Op::AddConstant { term } => elementwise::add_constant(read(0), term, out),
            Op::AddWeight { weight } => elementwise::add_weight(read(0), vector(weight), out),
            Op::AtLeast { weight } => elementwise::at_least(read(0), vector(weight), out),
            Op::AtMost { weight } => elementwise::at_most(read(0), vector(weight), out),
            Op::TakeAsked => rows::take(read(0), width, pass.asked, out),
            Op::Columns { first, .. } => rows::columns(read(0), x_width, first as usize, width, out),
            Op::MatMul { weight } => matmul::matmul(&matrix(weight), read(0), out),
            Op::Narrow { weight, factor } => {
                adapter::narrow(&matrix(weight), seats(weight).as_deref(), factor, read(0), out)
            }
            Op::Widen { weight } => adapter::widen(&matrix(weight), seats(weight).as_deref(), read(0), read(1), out),
            Op::ExpertMatMul { weight, first, len } => {
                let Matrix { dtype, bytes, rows, cols } = matrix(weight);
                let experts = self.plan.weights[weight.index()].dim(2) as usize;
                let rows_used = first as usize..(first + len) as usize;
                let experts = Experts { dtype, bytes, experts, rows, cols };
                matmul::expert_matmul(&experts, &routes(1).ids, read(0), rows_used, out);
            }
            Op::RmsNorm { weight, group, eps } => {
                norm::rms_norm(read(0), weight.map(vector), group as usize, eps, out);
            }
            Op::Route { top_k } => {
                self.routes[step.output as usize] = Some(moe::route(read(0), x_width, top_k as usize));
            }
            Op::ExpertSum { scale } => {
                moe::mix_experts(read(0), routes(1), scale.map(vector), width, out);
            }
            Op::Add => elementwise::add(read(0), read(1), out),
            Op::Mul => elementwise::mul(read(0), read(1), out),
            Op::Scale { factor } => elementwise::scale(read(0), factor, out),
            Op::MulWeight { weight } => elementwise::mul_weight(read(0), vector(weight), out),
            Op::Gelu => elementwise::gelu_tanh(read(0), out),
            Op::Softcap { cap } => elementwise::softcap(read(0), cap, out),
            Op::Rope { head_dim, .. } => {
                let table = self.ropes[index].as_ref().expect("every rotating step has its table");
                let heads = width / head_dim as usize;
                out.copy_from_slice(read(0));
                rope::rope(out, heads, head_dim as usize, &pass.positions(output.rows), table);
            }
            Op::KvAppend { cache } => {
                let (mut keys, mut values) = (read(0), read(1));
                for Span { slot, first_position, rows } in pass.spans(value(step.inputs[0]).rows) {
                    let (own_keys, other_keys) = keys.split_at(rows * x_width);
                    let (own_values, other_values) = values.split_at(rows * x_width);
                    let pages = self.tables.pages(slot, cache.index());
                    self.kv.append(cache.index(), pages, first_position, own_keys, own_values);
                    (keys, values) = (other_keys, other_values);
                }
            }
            Op::Attention { heads } | Op::AttentionAhead { heads } => {
                let Kind::Kv { cache } = value(step.inputs[1]).kind else { unreachable!("the plan was checked") };
                let window = program.caches[cache.index()].window.map(|w| w as usize);
                let spans = self.tables.seen(&self.kv, cache.index(), &pass.spans(output.rows));
                let ahead = match step.op {
                    Op::AttentionAhead { .. } => pass.soft_positions(self.plan.model.hidden as usize),
                    _ => Vec::new(),
                };
                attention::attention(read(0), &spans, window, &ahead, heads as usize, out);
            }
        }
    }
}

/// The bytes of a weight: what is in the seats, or what was loaded.
fn bytes_of<'a>(plan: &'a Plan, weights: &'a Weights, banks: &'a [Vec<u8>], id: WeightId) -> &'a [u8] {
    if plan.weights[id.index()].is_reserved() { &banks[id.index()] } else { weights.bytes(plan, id) }
}

/// Memory for the adapters of a plan's seats, which the text alone looks at.
fn banks(plan: &Plan, part: Part) -> Vec<Vec<u8>> {
    let bank = |weight: &Weight| vec![0; if weight.is_reserved() { weight.bytes as usize } else { 0 }];
    if part == Part::Text { plan.weights.iter().map(bank).collect() } else { Vec::new() }
}

impl Tables {
    /// Where a slot's sequence lies in a layer.
    fn pages(&self, slot: u32, layer: usize) -> Pages<'_> {
        let [sliding, full] = &self.of_slots[slot as usize];
        let place = &self.layout.caches[layer];
        Pages::of(if place.window.is_some() { sliding } else { full }, self.layout.paging(place))
    }

    /// What rows see of a layer.
    fn seen<'a>(&'a self, kv: &'a KvMemory, layer: usize, spans: &[Span]) -> Vec<attention::Span<'a>> {
        let span = |&Span { slot, first_position, rows }: &Span| attention::Span {
            kv: kv.view(layer, self.pages(slot, layer)),
            first_position,
            rows,
        };
        spans.iter().map(span).collect()
    }
}

/// The table of each RoPE step. Steps with the same frequencies share one, so that the angles of a pass are computed
/// once.
fn rope_tables(steps: &[Step], vectors: &[Vec<f32>]) -> Vec<Option<Arc<RopeTable>>> {
    let mut tables: Vec<Arc<RopeTable>> = Vec::new();
    let mut table_of = |step: &Step| {
        let table = match step.op {
            Op::Rope { head_dim, base, factors } => {
                RopeTable::new(base, head_dim as usize, factors.map(|w| vectors[w.index()].as_slice()))
            }
            Op::GridRope { head_dim, base } => RopeTable::new(base, head_dim as usize / 2, None),
            _ => return None,
        };
        let index = tables.iter().position(|other| other.same_as(&table)).unwrap_or_else(|| {
            tables.push(Arc::new(table));
            tables.len() - 1
        });
        Some(tables[index].clone())
    };
    steps.iter().map(&mut table_of).collect()
}

/// Where a value's rows lie in the arena during this pass, in floats; `None` for what does not lie there.
fn place(value: &Value, pass: &Pass<'_>) -> Option<Range<usize>> {
    let Kind::Floats { offset } = value.kind else { return None };
    let start = offset as usize / 4;
    Some(start..start + pass.rows(value.rows) * value.width as usize)
}

fn split(arena: &mut [f32], middle: Range<usize>) -> (&[f32], &mut [f32], &[f32]) {
    let (before, rest) = arena.split_at_mut(middle.start);
    let (out, after) = rest.split_at_mut(middle.len());
    (before, out, after)
}
