//! One phase: the groups of a schedule to launches in order, with a place for every value.
//!
//! The passes have decided everything else: which nodes are a launch, over which copies of weights, in which form every
//! value is. Here each group gets its kernel, its arguments and its memory: exactly one launch, or it is an error of
//! the compiler. Groups for all rows of a chunk come first, then those for the asked row: the row of decode is lowered
//! as the asked row of a prefill is.

use std::collections::HashMap;

use gemma4c_dsl::{Instance, LaunchArguments};
use gemma4c_graph::memory::{self, Lifetime};
use gemma4c_graph::{CacheId, Fused, Graph, Group, Kind, NodeId, Op};
use gemma4c_plan::cuda::{CudaStep, DrafterPlaces, Form, KernelIndex, Launch, Phase, Range, Region, StepOutput};

use super::choice::Choice;
use super::common::Common;
use super::edges;
use super::error::LowerError;
use super::launch::{BoundArgument, BufferId, Int8Span, MixedSpan, NOTHING, Span, bind};

use crate::passes::Schedule;

/// Where a value's rows are, in one form.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    pub start: Span,
    /// Elements from one row to the next; of experts' values, from one expert's to the next one's.
    pub stride: u32,
    /// Elements of one expert, where rows are of several experts and have gaps.
    pub part: Option<u32>,
}

/// A router's result.
#[derive(Clone, Copy, Debug)]
pub struct RoutingPlace {
    pub ids: Span,
    pub weights: Span,
}

/// The pairs of rows and experts, sorted, and cut into groups of one height.
#[derive(Clone, Copy, Debug)]
pub struct SortedPairs {
    pub order: Span,
    pub groups: Span,
    pub most_groups: u32,
}

/// The partial results of split-KV attention, for its merge.
#[derive(Clone, Copy, Debug)]
pub struct PartsPlace {
    pub extrema: Span,
    pub values: Span,
}

/// The rows that a product of several rows multiplies, as the launch before it writes them.
#[derive(Clone, Copy, Debug, Default)]
pub struct PreparedRows {
    pub int8: Int8Span,
    pub fine: Span,
    pub fine_sums: Span,
    pub floats: Span,
    pub factor: Span,
    /// Codes lie in panels of eight rows.
    pub in_panels: bool,
}

/// A launch whose values have no place yet.
pub struct PendingLaunch {
    kernel: KernelIndex,
    grid: [u32; 3],
    arguments: Vec<BoundArgument>,
    dependent: bool,
    nodes: Vec<NodeId>,
    outputs: Vec<(NodeId, Form, Span)>,
    work: Work,
    choice: Choice,
    /// It is forked from the chain of the others (`edges`).
    forked: bool,
}

/// What a launch costs at least.
#[derive(Clone, Copy, Debug, Default)]
pub struct Work {
    pub bytes: u64,
    pub flops: u64,
}

/// The name of a text's phase.
pub fn phase_name(decodes: bool, rows: u32) -> String {
    match (decodes, rows) {
        (true, 1) => "decode".to_owned(),
        (true, rows) => format!("decode {rows}"),
        (false, rows) => format!("prefill {rows}"),
    }
}

/// The launches of a phase under construction.
pub struct PhaseBuilder<'p, 'a> {
    pub common: &'p mut Common<'a>,
    pub schedule: &'p Schedule,
    buffers: Vec<u64>,
    /// Two buffers that take turns, and how many turns there were.
    in_turn: [Option<BufferId>; 2],
    turns: usize,
    values: HashMap<NodeId, Vec<(Form, Place)>>,
    routing: HashMap<NodeId, RoutingPlace>,
    /// Of a routing, for groups of a height.
    pub sorts: HashMap<(NodeId, u32), SortedPairs>,
    /// Of an attention.
    pub parts: HashMap<NodeId, PartsPlace>,
    /// Of a product of several rows, by its first matrix.
    pub prepared: HashMap<NodeId, PreparedRows>,
    /// Weights of a product of many rows, dequantised to bf16, by its first matrix.
    pub widened: HashMap<NodeId, Span>,
    /// Of a value within several bounds, one copy after the other: by the first of them, all of them and where they
    /// are.
    pub stacks: HashMap<NodeId, (Vec<NodeId>, Span)>,
    /// Queries, keys or values of patches, as attention by warpgroups reads them.
    pub tiles: HashMap<NodeId, Span>,
    /// What lies between the halves of the pairs of a product of decoded rows, and each row's seat, by its first matrix.
    pub narrowed: HashMap<NodeId, [Span; 2]>,
    /// Where the blocks of a product with adapters send each other words, by its first matrix.
    pub packets: Vec<(NodeId, Span)>,
    /// Keys and values of a chunk that are not on their pages yet.
    pub stages: HashMap<CacheId, [Span; 2]>,
    pending: Vec<PendingLaunch>,
    /// The launch with which the asked part of a chunk begins.
    asked_from: Option<usize>,
}

impl<'p, 'a> PhaseBuilder<'p, 'a> {
    pub fn new(common: &'p mut Common<'a>, schedule: &'p Schedule) -> Self {
        let (values, routing, sorts, parts) = (HashMap::new(), HashMap::new(), HashMap::new(), HashMap::new());
        let (buffers, pending, prepared, stages) = (Vec::new(), Vec::new(), HashMap::new(), HashMap::new());
        let (stacks, tiles, widened) = (HashMap::new(), HashMap::new(), HashMap::new());
        PhaseBuilder {
            common,
            schedule,
            buffers,
            in_turn: [None; 2],
            turns: 0,
            values,
            routing,
            sorts,
            parts,
            prepared,
            widened,
            stacks,
            tiles,
            narrowed: HashMap::new(),
            packets: Vec::new(),
            stages,
            pending,
            asked_from: None,
        }
    }

    pub fn fused(&self) -> &'p Fused {
        &self.schedule.fused
    }

    pub fn graph(&self) -> &'p Graph {
        &self.schedule.fused.graph
    }

    /// Rows of a chunk, or sequences that decode together.
    pub fn rows(&self) -> u32 {
        self.schedule.rows
    }

    /// Its name in messages.
    pub fn phase_name(&self) -> String {
        match self.schedule.soft_rows {
            Some(soft) => format!("a tower of {soft} soft tokens"),
            None => phase_name(self.schedule.decodes, self.rows()),
        }
    }

    /// Lowers every group, and says with which launch the asked part begins.
    pub fn lower(&mut self) -> Result<usize, LowerError> {
        for group in self.schedule.ordered() {
            if !self.schedule.decodes && self.schedule.is_asked(&group) {
                self.asked_from.get_or_insert(self.pending.len());
            }
            let before = self.pending.len();
            self.lower_group(&group)?;
            let (launches, expected) = (self.pending.len() - before, usize::from(group.kind != Kind::View));
            if launches != expected {
                let node = self.graph().full_name(group.anchor());
                return Err(LowerError::Launches { kind: group.kind.name(), node, launches });
            }
        }
        // Decoded rows are asked for, all of them.
        Ok(if self.schedule.decodes { 0 } else { self.asked_from.unwrap_or(self.pending.len()) })
    }

    fn lower_group(&mut self, group: &Group) -> Result<(), LowerError> {
        let int8_row = self.schedule.is_int8_row(group);
        match &group.kind {
            Kind::Single => self.single(group),
            Kind::View => self.view(group.nodes[0]),
            Kind::Embed { table, tokens: _, factor } => self.gather(group, *table, *factor),
            Kind::PerLayerInputs(inputs) => self.per_layer_inputs(group, inputs),
            Kind::Product(product) if int8_row => self.decoded_product(group, product),
            Kind::Product(product) => self.product_of_many_rows(group, product),
            Kind::Norm(norm) => self.norm(group, norm),
            Kind::Heads(heads) => self.heads(group, heads),
            Kind::AttentionStep { heads, attention } => self.attention_step(group, heads, *attention),
            Kind::AttentionParts { attention } => self.attention_parts(group, *attention),
            Kind::AttentionMerge { attention } => self.attention_merge(group, *attention),
            Kind::PerLayerStep { gate, slice, residual, projection } => {
                self.per_layer_step(group, gate, *slice, residual, *projection)
            }
            Kind::MixtureEntry { norm, expert_norm, router } => self.enter_mixture(group, norm, *expert_norm, router),
            Kind::Router(router) => self.router(group, router),
            Kind::ExpertGateUp { .. } => self.expert_gate_up(group),
            Kind::ExpertDown { .. } => self.expert_down(group),
            Kind::ExpertProduct { .. } => self.expert_product(group),
            Kind::SortPairs { routing, height } => self.sort_pairs(group, *routing, *height),
            Kind::Geglu { gate, up } => self.geglu(group, *gate, *up),
            Kind::ClippedNorm(of) => self.clipped_norm(group, of),
            Kind::ClippedGeglu(of) => self.clipped_geglu(group, of),
            Kind::PatchHeads(of) => self.patch_heads(group, of),
            Kind::PatchAttention { attention, clip } => self.patch_attention(group, *attention, *clip),
            Kind::Convert { value, form } => self.convert(group, *value, *form),
            Kind::RowsPrologue { of } => self.rows_prologue(group, *of),
            Kind::NarrowRows { of } => self.narrow_rows_of(group, *of),
            Kind::WidenWeights { of } => self.widen_weights(*of),
            Kind::KeepRows { append } => self.keep_rows(group, *append),
        }
    }

    /// Whether a group computes rows one by one: decoded rows, or the asked one.
    pub fn is_one_row(&self, group: &Group) -> bool {
        self.schedule.is_one_row(group)
    }

    /// Rows of a group's values, at most.
    pub fn rows_of(&self, group: &Group) -> u32 {
        self.schedule.rows_of(group)
    }

    // ---- values
    // --------------------------------------------------------------------------------------------------------

    /// Memory for as long as launches use it.
    pub fn buffer(&mut self, bytes: u64) -> Span {
        self.buffers.push(bytes);
        Span::Buffer { buffer: BufferId(self.buffers.len() - 1), offset: 0, bytes }
    }

    /// Memory for what a forked launch writes for the launch after it in the chain. Two buffers take turns, as large as
    /// the largest of their turns. They are nobody else's from the first turn to the last, so that such a launch waits
    /// for nobody but the reader of the turn before the last.
    pub fn buffer_in_turn(&mut self, bytes: u64) -> Span {
        let buffers = &mut self.buffers;
        let buffer = *self.in_turn[self.turns % 2].get_or_insert_with(|| {
            buffers.push(0);
            BufferId(buffers.len() - 1)
        });
        buffers[buffer.0] = buffers[buffer.0].max(bytes);
        self.turns += 1;
        Span::Buffer { buffer, offset: 0, bytes }
    }

    /// Memory for a node's rows in a form; the graph's result has its own place.
    pub fn alloc_value(&mut self, node: NodeId, form: Form, rows: u32) -> Span {
        let width = self.graph().node(node).ty.width;
        let elements = rows as u64 * width as u64;
        let start = if let Some(offset) = self.fixed_place(node).filter(|_| form == Form::F32) {
            Span::Fixed(Range { region: Region::Arena, offset, bytes: elements * 4 })
        } else {
            self.buffer(match form {
                Form::F32 | Form::Experts => elements * 4,
                Form::BF16 | Form::F16 => elements * 2,
                Form::Kv => elements * self.common.can.kv.bytes(),
                // Codes, then scales, then sums.
                Form::Int8 => elements + elements / 32 * 8,
                Form::Mixed { loose } => MixedSpan::bytes(elements, rows as u64 * loose as u64),
            })
        };
        self.bind_location(node, form, Place { start, stride: width, part: None });
        start
    }

    /// The fixed place of a value that is read after the phase, or that is stored next to another.
    fn fixed_place(&self, node: NodeId) -> Option<u64> {
        let graph = self.graph();
        if graph.output == Some(node) {
            return Some(self.common.tower.map_or(self.common.places.logits, |places| places.soft));
        }
        let places = self.common.drafter?;
        let width = graph.node(node).ty.width as u64 * 4;
        match self.drafter_places() {
            None => graph.kept.contains(&node).then_some(places.entering),
            Some(_) if graph.kept.contains(&node) => Some(places.hidden),
            // The hidden state follows the embedding that it is read with.
            Some(_) => {
                let is_first = |user: &&NodeId| graph.node(**user).op == Op::Concat;
                self.fused().users(node).iter().find(is_first).map(|_| places.hidden - width)
            }
        }
    }

    /// What the drafter exchanges with the host, where it is the drafter that is lowered.
    pub fn drafter_places(&self) -> Option<DrafterPlaces> {
        self.common.drafter.filter(|_| self.common.drafting.is_some())
    }

    /// Forgets where values are, so that the groups can be lowered once more after what there is.
    pub fn forget_values(&mut self) {
        self.values.clear();
        self.routing.clear();
        self.parts.clear();
        self.prepared.clear();
    }

    /// Launches so far.
    pub fn launches(&self) -> usize {
        self.pending.len()
    }

    /// Records where a node's rows are.
    pub fn bind_location(&mut self, node: NodeId, form: Form, place: Place) {
        self.values.entry(node).or_default().push((form, place));
    }

    pub fn find(&self, node: NodeId, form: Form) -> Option<Place> {
        self.values.get(&node)?.iter().find(|(known, _)| *known == form).map(|(_, place)| *place)
    }

    /// A node whose values are int8, and how many of them, the last ones, are floats instead.
    pub fn find_int8(&self, node: NodeId) -> Option<(Place, u32)> {
        self.values.get(&node)?.iter().find_map(|(form, place)| match form {
            Form::Int8 => Some((*place, 0)),
            Form::Mixed { loose } => Some((*place, *loose)),
            _ => None,
        })
    }

    pub fn has(&self, node: NodeId, form: Form) -> bool {
        self.find(node, form).is_some()
    }

    /// A node's f32 rows.
    pub fn floats(&self, node: NodeId) -> Result<Place, LowerError> {
        self.location(node, Form::F32)
    }

    /// A node's rows in a form that somebody has made.
    pub fn location(&self, node: NodeId, form: Form) -> Result<Place, LowerError> {
        self.find(node, form).ok_or_else(|| LowerError::NoValue { node: self.graph().full_name(node) })
    }

    /// A node's f32 rows, one after the other without a gap.
    pub fn whole_rows(&self, node: NodeId) -> Result<Span, LowerError> {
        let width = self.graph().node(node).ty.width;
        let forms = self.values.get(&node).map_or(&[][..], Vec::as_slice);
        let one_row = self.schedule.rows_of(self.fused().group(node)) == 1;
        let whole = |(form, place): &&(Form, Place)| *form == Form::F32 && (one_row || place.stride == width);
        let place = forms.iter().find(whole).map(|(_, place)| place.start);
        place.ok_or_else(|| LowerError::NoValue { node: format!("{} as whole rows", self.graph().full_name(node)) })
    }

    pub fn bind_routing(&mut self, node: NodeId, place: RoutingPlace) {
        self.routing.insert(node, place);
    }

    pub fn routing(&self, node: NodeId) -> Result<RoutingPlace, LowerError> {
        self.routing.get(&node).copied().ok_or_else(|| LowerError::NoValue { node: self.graph().full_name(node) })
    }

    // ---- launches
    // ------------------------------------------------------------------------------------------------------

    /// Appends a launch.
    pub fn launch(
        &mut self,
        instance: Instance,
        grid: [u32; 3],
        arguments: impl Into<LaunchArguments<Span>>,
        nodes: &[NodeId],
        work: Work,
        choice: impl Into<Choice>,
    ) -> Result<(), LowerError> {
        let arguments = bind(arguments.into(), &instance)?;
        let dependent = instance.def.launch.dependent && self.common.can.target.arch.has_pdl();
        let kernel = self.common.kernels.index(instance);
        let outputs = Vec::new();
        let (nodes, choice) = (nodes.to_vec(), choice.into().on(&self.common.can.target));
        self.pending.push(PendingLaunch {
            kernel,
            grid,
            arguments,
            dependent,
            nodes,
            outputs,
            work,
            choice,
            forked: false,
        });
        Ok(())
    }

    /// Forks the last launch from the chain of the others: it waits only for those that touched its memory, and only
    /// those wait for it that touch what it wrote.
    pub fn fork_last_launch(&mut self) {
        if let Some(launch) = self.pending.last_mut() {
            launch.forked = true;
        }
    }

    /// Whether whoever writes to this memory has ended when the next launch starts: it may be read before the wait.
    pub fn is_settled(&self, spans: &[Span]) -> bool {
        let is_same = |a: &Range, b: &Range| match (a.region, b.region) {
            // Pages of different caches are interleaved.
            (Region::Kv, Region::Kv) => a.offset == b.offset,
            (one, other) => one == other && a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes,
        };
        let is_read = |written: &Span| {
            spans.iter().any(|read| match (read, written) {
                (Span::Fixed(read), Span::Fixed(written)) => is_same(read, written),
                (Span::Buffer { buffer: read, .. }, Span::Buffer { buffer: written, .. }) => read == written,
                _ => false,
            })
        };
        // The launches that may still run, from the last on: the first that waits before it lets others start, and
        // those after it.
        for (at, launch) in self.pending.iter().enumerate().rev() {
            if self.asked_from == Some(at + 1) {
                return true;
            }
            let instance = &self.common.kernels.instances[launch.kernel as usize];
            let written = instance.params().iter().zip(&launch.arguments).filter(|(param, _)| instance.writes(param));
            if written.into_iter().any(|(_, to)| matches!(to, BoundArgument::Memory(span) if is_read(span))) {
                return false;
            }
            if instance.def.launch.waits_first {
                return true;
            }
        }
        true
    }

    /// Records what the last launch writes, so that it can be compared with its meaning.
    pub fn record_output(&mut self, node: NodeId, form: Form, start: Span) {
        if let Some(launch) = self.pending.last_mut() {
            launch.outputs.push((node, form, start));
        }
    }

    /// Gives every value its place in the arena, which starts at `base`.
    pub fn finish(self, name: String, asked_from: usize, base: u64) -> Result<Phase, LowerError> {
        let end = self.pending.len();
        let mut lifetimes: Vec<Lifetime> =
            self.buffers.iter().map(|bytes| Lifetime { first: usize::MAX, last: 0, bytes: *bytes }).collect();
        for (at, launch) in self.pending.iter().enumerate() {
            for argument in &launch.arguments {
                if let BoundArgument::Memory(Span::Buffer { buffer, .. }) = argument {
                    let life = &mut lifetimes[buffer.0];
                    (life.first, life.last) = (life.first.min(at), life.last.max(at));
                }
            }
        }
        for life in &mut lifetimes {
            if life.first == usize::MAX {
                *life = Lifetime { first: 0, last: 0, bytes: 0 };
            } else if life.first < asked_from && life.last >= asked_from {
                // The asked part may run once for each of several rows.
                life.last = end;
            }
        }
        let arena = memory::place(&lifetimes);
        if let Some((a, b)) = memory::overlap(&lifetimes, &arena) {
            return Err(LowerError::Overlap { phase: name, a, b });
        }
        let range = |span: Span| match span {
            Span::Fixed(range) => range,
            Span::Buffer { buffer, offset, bytes } => {
                Range { region: Region::Arena, offset: base + arena.offsets[buffer.0] + offset, bytes }
            }
            Span::Unused => NOTHING,
        };
        let graph = self.graph();
        let index = |id: &NodeId| self.common.value_index.get(&graph.full_name(*id)).copied();
        let step = |launch: &PendingLaunch| CudaStep {
            launch: Launch {
                kernel: launch.kernel,
                grid: launch.grid,
                arguments: launch.arguments.iter().map(|argument| argument.placed(range)).collect(),
                // As far as its edges allow it.
                programmatic: launch.dependent,
            },
            after: Vec::new(),
            nodes: launch.nodes.iter().filter_map(index).collect(),
            outputs: launch
                .outputs
                .iter()
                .filter_map(|(id, form, start)| {
                    Some(StepOutput { value: index(id)?, form: *form, place: range(*start) })
                })
                .collect(),
            layer: launch.nodes.first().and_then(|id| graph.node(*id).layer),
            bytes: launch.work.bytes,
            flops: launch.work.flops,
            reason: launch.choice.reason.clone(),
            runner_up: launch.choice.runner_up.clone(),
        };
        let mut steps: Vec<CudaStep> = self.pending.iter().map(step).collect();
        let forked: Vec<bool> = self.pending.iter().map(|launch| launch.forked).collect();
        edges::connect(&mut steps, &forked, asked_from, &self.common.kernels.described())
            .ok_or_else(|| LowerError::Pieces { phase: name.clone() })?;
        Ok(Phase {
            name,
            kind: self.kind(),
            rows: self.rows(),
            steps,
            asked_from: asked_from as u32,
            pick_largest: Vec::new(),
            pick_sampled: Vec::new(),
            arena_bytes: base + arena.bytes,
        })
    }

    /// The bytes of keys and values of a cache that a row at the end of the context sees.
    pub fn visible_bytes(&self, cache: gemma4c_graph::CacheId) -> u64 {
        let c = self.graph().cache(cache);
        self.seen(cache) * 2 * self.common.can.kv.row_bytes(c.kv_heads, c.head_dim)
    }

    /// As many values.
    pub fn visible_values(&self, cache: gemma4c_graph::CacheId) -> u64 {
        self.seen(cache) * 2 * self.graph().cache(cache).width() as u64
    }

    fn seen(&self, cache: gemma4c_graph::CacheId) -> u64 {
        self.graph().cache(cache).window.unwrap_or(u32::MAX).min(self.common.can.context) as u64
    }
}
