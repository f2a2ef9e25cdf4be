//! One phase: the groups of a fused graph, for one number of rows, to launches in order with places for every value.
//!
//! A value may lie in memory in several forms (f32, bf16, int8); a producer makes those its readers want, and what no producer
//! can make is converted by a launch of its own. Groups for all rows of a chunk come first, then those for the asked row:
//! the row of decode is lowered as the asked row of a prefill is, by the same code.

use std::collections::HashMap;

use gemma4c_blocks::DType;
use gemma4c_dsl::Instance;
use gemma4c_graph::memory::{self, Lifetime};
use gemma4c_graph::{Fused, Graph, Group, Kind, NodeId, Norm, Op, Rows};
use gemma4c_plan::cuda::{Argument, CudaStep, Form, KernelIndex, Launch, Phase, Range, Region, StepOutput};

use super::choice::Choice;
use super::grouped::Sorted;
use super::launch::{Arg, BufferId, NOTHING, bind};
use super::{Common, LowerError, Pass};
use crate::kernels::matvec::formats::format;
use crate::kernels::outputs::Outputs;
use crate::kernels::{product, quantise};

/// Where a value's rows lie, in one form.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    pub start: Arg,
    /// Elements from one row to the next.
    pub stride: u32,
}

/// A router's result.
#[derive(Clone, Copy, Debug)]
pub struct RoutingPlace {
    pub ids: Arg,
    pub weights: Arg,
}

/// A launch whose values have no place yet.
pub struct Draft {
    kernel: KernelIndex,
    grid: [u32; 3],
    arguments: Vec<Arg>,
    dependent: bool,
    nodes: Vec<NodeId>,
    outputs: Vec<(NodeId, Form, Arg)>,
    work: Work,
    choice: Choice,
}

/// What a launch costs at least.
#[derive(Clone, Copy, Debug, Default)]
pub struct Work {
    pub bytes: u64,
    pub flops: u64,
}

/// The launches of a phase under construction.
pub struct PhaseBuilder<'p, 'a> {
    pub common: &'p mut Common<'a>,
    pub fused: &'p Fused,
    pub groups: Vec<Group>,
    /// Rows of a chunk; 1 is decode.
    pub rows: u32,
    done: Vec<bool>,
    buffers: Vec<u64>,
    values: HashMap<NodeId, Vec<(Form, Place)>>,
    routing: HashMap<NodeId, RoutingPlace>,
    /// Of a routing, for groups of a height.
    pub sorts: HashMap<(NodeId, u32), Sorted>,
    drafts: Vec<Draft>,
}

impl<'p, 'a> PhaseBuilder<'p, 'a> {
    pub fn new(common: &'p mut Common<'a>, fused: &'p Fused, rows: u32) -> Self {
        let mut groups = fused.ordered();
        // Nothing for all rows depends on the asked row.
        groups.sort_by_key(|group| fused.graph.node(group.nodes[0]).ty.rows == Rows::Asked);
        let done = vec![false; groups.len()];
        let (values, routing, sorts) = (HashMap::new(), HashMap::new(), HashMap::new());
        let (buffers, drafts) = (Vec::new(), Vec::new());
        PhaseBuilder { common, fused, groups, rows, done, buffers, values, routing, sorts, drafts }
    }

    pub fn graph(&self) -> &'p Graph {
        &self.fused.graph
    }

    /// Lowers every group.
    pub fn lower(&mut self) -> Result<usize, LowerError> {
        let mut asked_from = None;
        for at in 0..self.groups.len() {
            if self.rows > 1 && self.is_asked(&self.groups[at]) {
                asked_from.get_or_insert(self.drafts.len());
            }
            if !std::mem::replace(&mut self.done[at], true) {
                let group = self.groups[at].clone();
                self.lower_group(&group)?;
            }
        }
        // A decoded row is asked for, all of it.
        Ok(if self.rows == 1 { 0 } else { asked_from.unwrap_or(self.drafts.len()) })
    }

    fn lower_group(&mut self, group: &Group) -> Result<(), LowerError> {
        let one_row = self.is_one_row(group);
        match &group.kind {
            Kind::Single => self.single(group),
            Kind::Embed { table, tokens: _, factor } => self.gather(group, *table, *factor),
            Kind::PerLayerInputs(inputs) => self.per_layer_inputs(group, inputs),
            Kind::Product(product) if one_row => self.product_of_one_row(group, product, None),
            Kind::Product(product) => self.product_of_many_rows(group, product),
            Kind::Norm(norm) => match (self.entry(group, norm), self.absorbers(group, norm)) {
                (Some(entry), _) => self.enter_mixture(group, norm, &entry),
                (None, Ok(products)) if one_row => self.absorbed_norm(group, norm, &products),
                (None, Err(why)) if one_row => {
                    self.refused(Pass::AbsorbNorms, group, why);
                    self.norm(group, norm, why)
                }
                _ => self.norm(group, norm, "many rows: written once"),
            },
            Kind::Heads(heads) => {
                let before = self.common.tally.count(Pass::AttentionStep);
                self.heads(group, heads)?;
                if one_row && self.common.tally.count(Pass::AttentionStep) == before {
                    self.refused(Pass::AttentionStep, group, "its queries are not read by one attention alone");
                }
                Ok(())
            }
            Kind::Router(router) => self.router(group, router),
            Kind::ExpertGateUp { .. } | Kind::ExpertDown { .. } if self.common.exact => self.one_by_one(group),
            Kind::ExpertGateUp { .. } | Kind::ExpertDown { .. } => self.experts_alone(group),
        }
    }

    /// Says that a choice of the lowering applied to a group.
    pub fn applied(&mut self, pass: Pass, group: &Group) {
        let values = self.names(&group.nodes);
        self.common.tally.applied(pass, values);
    }

    /// Says that it did not.
    pub fn refused(&mut self, pass: Pass, group: &Group, why: &str) {
        let values = self.names(&group.nodes);
        self.common.tally.refused(pass, values, why);
    }

    pub fn names(&self, nodes: &[NodeId]) -> Vec<String> {
        nodes.iter().map(|node| self.graph().full_name(*node)).collect()
    }

    fn is_asked(&self, group: &Group) -> bool {
        self.graph().node(group.nodes[0]).ty.rows == Rows::Asked
    }

    /// Whether a group works on one row: of decode, or the asked one.
    pub fn is_one_row(&self, group: &Group) -> bool {
        self.rows == 1 || self.is_asked(group)
    }

    /// Rows of a group's values, at most.
    pub fn rows_of(&self, group: &Group) -> u32 {
        if self.is_one_row(group) { 1 } else { self.rows }
    }

    /// [position, rows, …] of the rows that a group works on.
    pub fn state(&self, group: &Group) -> Arg {
        let places = &self.common.places;
        let offset = if self.rows > 1 && self.is_asked(group) { places.asked } else { places.state };
        Arg::Fixed(Range { region: Region::Arena, offset, bytes: 12 })
    }

    /// The tokens of the chunk's rows.
    pub fn tokens(&self) -> Arg {
        let places = &self.common.places;
        let (offset, words) = if self.rows == 1 { (places.state + 8, 1) } else { (places.tokens, self.rows as u64) };
        Arg::Fixed(Range { region: Region::Arena, offset, bytes: words * 4 })
    }

    // ---- values --------------------------------------------------------------------------------------------------------

    /// Memory for as long as launches use it.
    pub fn buffer(&mut self, bytes: u64) -> Arg {
        self.buffers.push(bytes);
        Arg::Buffer { buffer: BufferId(self.buffers.len() - 1), offset: 0, bytes }
    }

    /// Memory for a node's rows in a form; the graph's result has its own place.
    pub fn alloc_value(&mut self, node: NodeId, form: Form, rows: u32) -> Arg {
        let width = self.graph().node(node).ty.width;
        let elements = rows as u64 * width as u64;
        let start = if self.graph().output == Some(node) && form == Form::F32 {
            let offset = self.common.places.logits;
            Arg::Fixed(Range { region: Region::Arena, offset, bytes: elements * 4 })
        } else {
            self.buffer(match form {
                Form::F32 | Form::Experts => elements * 4,
                Form::BF16 => elements * 2,
                // Codes, then scales, then sums.
                Form::Int8 => elements + elements / 32 * 8,
            })
        };
        self.bind_location(node, form, Place { start, stride: width });
        start
    }

    /// Says where a node's rows lie.
    pub fn bind_location(&mut self, node: NodeId, form: Form, place: Place) {
        self.values.entry(node).or_default().push((form, place));
    }

    fn find(&self, node: NodeId, form: Form) -> Option<Place> {
        self.values.get(&node)?.iter().find(|(known, _)| *known == form).map(|(_, place)| *place)
    }

    /// Whether a node's rows are there, in whatever form.
    pub fn has_any(&self, node: NodeId) -> bool {
        self.values.contains_key(&node)
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

    /// A node's rows in a form, converted if need be. `group` is the reader.
    pub fn form(&mut self, group: &Group, node: NodeId, form: Form) -> Result<Place, LowerError> {
        if let Some(place) = self.find(node, form) {
            return Ok(place);
        }
        let (rows, width) = (self.rows_of(group), self.graph().node(node).ty.width);
        let from = self.floats(node)?;
        if from.stride != width && rows > 1 {
            return Err(LowerError::NoValue { node: format!("{} as whole rows", self.graph().full_name(node)) });
        }
        let (state, to) = (self.state(group), self.alloc_value(node, form, rows));
        let bytes = rows as u64 * width as u64 * 4;
        let x = from.start.take(bytes);
        let blocks = |per: u64| ((rows as u64 * width as u64).div_ceil(per)).clamp(1, 1024) as u32;
        if form == Form::Int8 {
            let mut arguments = vec![("x", x), ("state", state)];
            arguments.extend(int8_arguments(to, rows as u64 * width as u64, ["xq", "xscale", "xsum"]));
            let instance = quantise::instance(width)?;
            let grid = [blocks(2048), 1, 1];
            self.launch(instance, grid, &arguments, &[], Work { bytes, flops: 0 }, "no producer leaves int8")?;
        } else {
            let arguments = [("x", x), ("state", state), ("out", to), ("width", Arg::U32(width))];
            let instance = product::round_rows_instance()?;
            let grid = [blocks(2048), 1, 1];
            self.launch(instance, grid, &arguments, &[], Work { bytes, flops: 0 }, "no producer leaves bf16")?;
        }
        self.location(node, form)
    }

    pub fn bind_routing(&mut self, node: NodeId, place: RoutingPlace) {
        self.routing.insert(node, place);
    }

    pub fn routing(&self, node: NodeId) -> Result<RoutingPlace, LowerError> {
        self.routing.get(&node).copied().ok_or_else(|| LowerError::NoValue { node: self.graph().full_name(node) })
    }

    /// Whether a value is the residual itself or an embedding: no norm's weights have damped its massive channels, which would
    /// take the whole scale of an int8 group. Products of such a value quantise it themselves, with fine codes.
    pub fn is_unbounded(&self, node: NodeId) -> bool {
        let node = self.graph().node(node);
        match node.op {
            Op::Add | Op::Gather { .. } => true,
            Op::Scale { .. } | Op::MulWeight { .. } | Op::TakeAsked | Op::Columns { .. } => {
                self.is_unbounded(node.inputs[0])
            }
            _ => false,
        }
    }

    /// The forms in which the readers of a node want it.
    pub fn wanted(&self, node: NodeId) -> Outputs {
        let mut wanted = Outputs::NONE;
        let unbounded = self.is_unbounded(node);
        for user in self.fused.users(node) {
            let group = self.fused.group(*user);
            let one_row = self.is_one_row(group);
            let of_product = |dtype: DType| match (self.common.exact, one_row, format(dtype).integer) {
                (true, ..) => Outputs::FLOATS,
                (_, true, true) if !unbounded => Outputs::INT8,
                (_, true, _) => Outputs::FLOATS,
                (_, false, _) => Outputs::BF16,
            };
            let dtype = |id: NodeId| self.graph().node(id).op.weight().map(|w| self.graph().weight(w).dtype);
            wanted = wanted.and(match &group.kind {
                Kind::Product(product) if product.input == node => {
                    dtype(product.matmuls[0]).map_or(Outputs::FLOATS, of_product)
                }
                Kind::Single if matches!(self.graph().node(*user).op, Op::MatMul { .. }) => {
                    dtype(*user).map_or(Outputs::FLOATS, of_product)
                }
                Kind::ExpertGateUp { weight, input, .. } if *input == node => {
                    of_product(self.graph().weight(*weight).dtype)
                }
                // One row's hidden values are rounded where they are read.
                Kind::ExpertDown { weight, input, .. } if *input == node && !one_row => {
                    of_product(self.graph().weight(*weight).dtype)
                }
                _ => Outputs::FLOATS,
            });
        }
        if wanted == Outputs::NONE { Outputs::FLOATS } else { wanted }
    }

    /// The groups that a norm's result goes to, if all of them are products of it that can run right away; else why not.
    fn absorbers(&self, group: &Group, norm: &Norm) -> Result<Vec<usize>, &'static str> {
        if !self.common.absorbs {
            return Err("the pass that leaves it to products is switched off");
        }
        if self.common.exact {
            return Err("products of unrounded activations compute no norm");
        }
        let target = match (norm.next, norm.residual) {
            (Some((node, Some(_))), _) => node,
            (None, Some(residual)) => residual.sum,
            _ => return Err("it has no weights"),
        };
        let mut found = Vec::new();
        for user in self.fused.users(target) {
            let at =
                self.groups.iter().position(|g| g.nodes.contains(user)).ok_or("it is read outside of any group")?;
            let is_product = match &self.groups[at].kind {
                Kind::Product(product) => product.input == target,
                Kind::Single => matches!(self.graph().node(*user).op, Op::MatMul { .. }),
                _ => false,
            };
            let ready = |id: &NodeId| *id == target || self.values.contains_key(id);
            let can_run = is_product && self.fused.inputs(&self.groups[at]).iter().all(ready);
            match (can_run && self.is_one_row(&self.groups[at]), norm.next.is_some()) {
                (true, _) if !found.contains(&at) => found.push(at),
                (true, _) | (false, false) => {}
                (false, true) => return Err("its readers are not all products that can run right away"),
            }
        }
        let same_rows = |at: &usize| self.is_asked(&self.groups[*at]) == self.is_asked(group);
        match found.is_empty() {
            true => Err("no product reads it"),
            false if !found.iter().all(same_rows) => Err("its readers want other rows"),
            false => Ok(found),
        }
    }

    pub fn is_done(&self, at: usize) -> bool {
        self.done[at]
    }

    /// Says that a group needs no launch of its own any more.
    pub fn mark_done(&mut self, at: usize) {
        self.done[at] = true;
    }

    // ---- launches ------------------------------------------------------------------------------------------------------

    /// Appends a launch.
    pub fn launch(
        &mut self,
        instance: Instance,
        grid: [u32; 3],
        arguments: &[(&str, Arg)],
        nodes: &[NodeId],
        work: Work,
        choice: impl Into<Choice>,
    ) -> Result<(), LowerError> {
        let arguments = bind(&instance, arguments)?;
        let dependent = instance.def.launch.dependent && self.common.target.arch.has_pdl();
        let kernel = self.common.kernels.index(instance);
        let outputs = Vec::new();
        let (nodes, choice) = (nodes.to_vec(), choice.into().on(&self.common.target));
        self.drafts.push(Draft { kernel, grid, arguments, dependent, nodes, outputs, work, choice });
        Ok(())
    }

    /// Says what the last launch leaves in memory, so that it can be compared with its meaning.
    pub fn record_output(&mut self, node: NodeId, form: Form, start: Arg) {
        if let Some(draft) = self.drafts.last_mut() {
            draft.outputs.push((node, form, start));
        }
    }

    /// Gives every value its place in the arena, which starts at `base`.
    pub fn finish(self, name: String, asked_from: usize, base: u64) -> Result<Phase, LowerError> {
        let end = self.drafts.len();
        let mut lifetimes: Vec<Lifetime> =
            self.buffers.iter().map(|bytes| Lifetime { first: usize::MAX, last: 0, bytes: *bytes }).collect();
        for (at, draft) in self.drafts.iter().enumerate() {
            for argument in &draft.arguments {
                if let Arg::Buffer { buffer, .. } = argument {
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
        let range = |argument: &Arg| match *argument {
            Arg::Fixed(range) => range,
            Arg::Buffer { buffer, offset, bytes } => {
                Range { region: Region::Arena, offset: base + arena.offsets[buffer.0] + offset, bytes }
            }
            _ => NOTHING,
        };
        let argument = |argument: &Arg| match *argument {
            Arg::U32(value) => Argument::U32(value),
            Arg::F32(value) => Argument::F32(value),
            _ => Argument::Memory(range(argument)),
        };
        let graph = &self.fused.graph;
        let index = |id: &NodeId| self.common.value_index.get(&graph.full_name(*id)).copied();
        let step = |(at, draft): (usize, &Draft)| CudaStep {
            launch: Launch {
                kernel: draft.kernel,
                grid: draft.grid,
                arguments: draft.arguments.iter().map(argument).collect(),
                programmatic: draft.dependent && at != 0 && at != asked_from,
            },
            nodes: draft.nodes.iter().filter_map(index).collect(),
            outputs: draft
                .outputs
                .iter()
                .filter_map(|(id, form, start)| {
                    Some(StepOutput { value: index(id)?, form: *form, place: range(start) })
                })
                .collect(),
            layer: draft.nodes.first().and_then(|id| graph.node(*id).layer),
            bytes: draft.work.bytes,
            flops: draft.work.flops,
            reason: draft.choice.reason.clone(),
            runner_up: draft.choice.runner_up.clone(),
        };
        let steps = self.drafts.iter().enumerate().map(step).collect();
        Ok(Phase { name, rows: self.rows, steps, asked_from: asked_from as u32, arena_bytes: base + arena.bytes })
    }

    /// The bytes of keys and values of a cache that a row at the end of the context sees.
    pub fn visible_bytes(&self, cache: gemma4c_graph::CacheId) -> u64 {
        let c = self.graph().cache(cache);
        let seen = c.window.unwrap_or(u32::MAX).min(self.common.context) as u64;
        seen * c.width() as u64 * 2 * self.common.kv.bytes()
    }
}

/// Codes, scales and sums of `elements` values, under the names a kernel has for them.
pub fn int8_arguments(start: Arg, elements: u64, names: [&str; 3]) -> [(&str, Arg); 3] {
    let groups = elements / 32 * 4;
    [
        (names[0], start.take(elements)),
        (names[1], start.skip(elements).take(groups)),
        (names[2], start.skip(elements + groups).take(groups)),
    ]
}
