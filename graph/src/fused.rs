//! A graph whose nodes are gathered into groups: what one launch computes.
//!
//! Fusion moves no node and invents no operation. A group is a set of nodes of the graph, so its meaning is that small graph
//! itself: whoever wants to check a kernel runs the group's nodes one by one. What a pass adds is a [`Kind`]: which pattern
//! the nodes form and which of them plays which part, so that nobody has to recognise it again.

use std::collections::BinaryHeap;

use crate::graph::{CacheId, Graph, NodeId, WeightId};

/// Which pattern the nodes of a group form.
#[derive(Clone, Debug, PartialEq)]
pub enum Kind {
    /// One operation on its own.
    Single,
    /// A row of a table, times a factor.
    Embed { table: WeightId, tokens: NodeId, factor: f32 },
    /// What all layers are told of a token.
    PerLayerInputs(PerLayerInputs),
    /// Matrix products that share their input, as one.
    Product(Product),
    /// Residual, norms and layer scale between two products.
    Norm(Norm),
    /// Norms and rotation of heads, and the store into the cache.
    Heads(Heads),
    /// Which experts a row goes to, from the residual stream.
    Router(Router),
    /// `gelu(gate) * up` of the chosen experts.
    ExpertGateUp { weight: WeightId, input: NodeId, routing: NodeId },
    /// The chosen experts' last product, and their weighted sum.
    ExpertDown { weight: WeightId, scale: Option<WeightId>, input: NodeId, routing: NodeId },
}

impl Kind {
    /// The pattern's name in reports.
    pub const fn name(&self) -> &'static str {
        match self {
            Kind::Single => "single",
            Kind::Embed { .. } => "embed",
            Kind::PerLayerInputs(_) => "per_layer_inputs",
            Kind::Product(_) => "product",
            Kind::Norm(_) => "norm",
            Kind::Heads(_) => "heads",
            Kind::Router(_) => "router",
            Kind::ExpertGateUp { .. } => "expert_gate_up",
            Kind::ExpertDown { .. } => "expert_down",
        }
    }
}

/// `(norm(projected * projected_scale) * norm + table[token] * row_scale) * out_scale`, a norm for each `width` values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PerLayerInputs {
    pub projected: NodeId,
    pub tokens: NodeId,
    pub table: WeightId,
    pub norm: WeightId,
    pub width: u32,
    pub eps: f32,
    pub projected_scale: f32,
    pub row_scale: f32,
    pub out_scale: f32,
}

/// One or several products of the same rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Product {
    pub input: NodeId,
    /// One a matrix, all of one type. With `geglu`: gate, then up.
    pub matmuls: Vec<NodeId>,
    /// The result is `gelu(gate) * up`.
    pub geglu: bool,
    /// Element-wise operations on the result, in order.
    pub epilogue: Vec<Epilogue>,
}

/// An element-wise operation after a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Epilogue {
    pub node: NodeId,
    /// Its other operand, of two.
    pub operand: Option<NodeId>,
}

/// `normed = norm(sum) * next`, `sum = (stream + norm(input) * post) * scale`; without the residual, `sum` is `input`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    pub input: NodeId,
    pub residual: Option<Residual>,
    /// The norm at the end, with its weight.
    pub next: Option<(NodeId, Option<WeightId>)>,
    pub eps: f32,
}

/// The first half of a [`Norm`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Residual {
    pub stream: NodeId,
    pub post: WeightId,
    /// `input` is the norm of `Norm::input` plus the norm of another value, each with its weight.
    pub branch: Option<Branch>,
    pub scale: Option<WeightId>,
    /// The residual stream after it.
    pub sum: NodeId,
}

/// Two branches that meet before a residual.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Branch {
    pub weight: WeightId,
    pub other: NodeId,
    pub other_weight: WeightId,
}

/// Heads on their way from a product to attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Heads {
    pub dim: u32,
    pub base: f32,
    pub factors: Option<WeightId>,
    pub eps: f32,
    pub q: Option<QueryHeads>,
    pub kv: Option<KeyValueHeads>,
}

/// Raw queries, their norm's weight, and what becomes of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueryHeads {
    pub raw: NodeId,
    pub weight: WeightId,
    pub out: NodeId,
}

/// Raw keys and values on their way into a cache. They may be the same node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyValueHeads {
    pub k: NodeId,
    pub k_weight: WeightId,
    pub v: NodeId,
    pub cache: CacheId,
    pub out: NodeId,
}

/// A router: norm, scale, product, choice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Router {
    pub input: NodeId,
    pub scale: WeightId,
    pub weight: WeightId,
    pub factor: f32,
    pub top_k: u32,
    pub eps: f32,
}

/// Nodes that are computed together.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    pub kind: Kind,
    /// In the graph's order.
    pub nodes: Vec<NodeId>,
}

/// A graph and its groups.
#[derive(Clone, Debug)]
pub struct Fused {
    pub graph: Graph,
    groups: Vec<Group>,
    owner: Vec<usize>,
    users: Vec<Vec<NodeId>>,
}

impl Fused {
    /// Every node on its own.
    pub fn new(graph: Graph) -> Fused {
        let mut users = vec![Vec::new(); graph.nodes.len()];
        for (id, node) in graph.iter() {
            for input in &node.inputs {
                if !users[input.index()].contains(&id) {
                    users[input.index()].push(id);
                }
            }
        }
        let groups = graph.iter().map(|(id, _)| Group { kind: Kind::Single, nodes: vec![id] }).collect();
        Fused { owner: (0..graph.nodes.len()).collect(), graph, groups, users }
    }

    /// The nodes that read `id`, in order, each once.
    pub fn users(&self, id: NodeId) -> &[NodeId] {
        &self.users[id.index()]
    }

    /// The one node that reads `id`, if it is one and `id` is not the graph's result.
    pub fn sole_user(&self, id: NodeId) -> Option<NodeId> {
        match self.users(id) {
            [user] if self.graph.output != Some(id) => Some(*user),
            _ => None,
        }
    }

    pub fn group(&self, id: NodeId) -> &Group {
        &self.groups[self.owner[id.index()]]
    }

    pub fn is_single(&self, id: NodeId) -> bool {
        self.group(id).kind == Kind::Single
    }

    /// Nodes of a group that something outside it reads.
    pub fn outputs(&self, group: &Group) -> Vec<NodeId> {
        let read_outside = |id: NodeId| self.users(id).iter().any(|user| !group.nodes.contains(user));
        group.nodes.iter().copied().filter(|id| self.graph.output == Some(*id) || read_outside(*id)).collect()
    }

    /// Values a group reads, each once, in order.
    pub fn inputs(&self, group: &Group) -> Vec<NodeId> {
        let mut found = Vec::new();
        for input in group.nodes.iter().flat_map(|id| &self.graph.node(*id).inputs) {
            if !group.nodes.contains(input) && !found.contains(input) {
                found.push(*input);
            }
        }
        found
    }

    /// Makes one group of `nodes`, and of the groups they are in already. Refused where something outside would have to run
    /// both before and after it.
    pub fn merge(&mut self, kind: Kind, nodes: &[NodeId]) -> Result<(), String> {
        let mut all: Vec<NodeId> = nodes.iter().flat_map(|id| self.group(*id).nodes.clone()).collect();
        all.sort_unstable();
        all.dedup();
        if let Some(between) = self.lies_between(&all) {
            return Err(format!("{} needs a part of it and is needed by another", self.graph.full_name(between)));
        }
        let group = self.owner[all[0].index()];
        for id in &all {
            let old = std::mem::replace(&mut self.owner[id.index()], group);
            if old != group {
                self.groups[old].nodes.clear();
            }
        }
        self.groups[group] = Group { kind, nodes: all };
        Ok(())
    }

    /// A node outside `nodes` that depends on one of them and that another depends on, through groups as they are.
    fn lies_between(&self, nodes: &[NodeId]) -> Option<NodeId> {
        let first = nodes[0];
        let mut seen = vec![false; self.groups.len()];
        let mut stack: Vec<NodeId> = Vec::new();
        let outside_inputs = |members: &[NodeId], stack: &mut Vec<NodeId>| {
            let inputs = members.iter().flat_map(|id| &self.graph.node(*id).inputs);
            stack.extend(inputs.filter(|input| !members.contains(input)));
        };
        outside_inputs(nodes, &mut stack);
        while let Some(id) = stack.pop() {
            if nodes.contains(&id) {
                continue;
            }
            let group = self.owner[id.index()];
            // What ends before the first of `nodes` cannot depend on any.
            if std::mem::replace(&mut seen[group], true) || self.groups[group].nodes.iter().all(|n| *n < first) {
                continue;
            }
            let members = &self.groups[group].nodes;
            let reads = |of: &NodeId| self.graph.node(*of).inputs.iter().any(|input| nodes.contains(input));
            if members.iter().any(reads) {
                return Some(id);
            }
            outside_inputs(members, &mut stack);
        }
        None
    }

    /// The groups in an order in which they can run: the earliest first node first among those that are ready.
    pub fn ordered(&self) -> Vec<Group> {
        let mut waits: Vec<usize> = vec![0; self.groups.len()];
        let mut unblocks: Vec<Vec<usize>> = vec![Vec::new(); self.groups.len()];
        for (at, group) in self.groups.iter().enumerate() {
            let mut before: Vec<usize> = self.inputs(group).iter().map(|id| self.owner[id.index()]).collect();
            before.sort_unstable();
            before.dedup();
            waits[at] = before.len();
            before.into_iter().for_each(|b| unblocks[b].push(at));
        }
        let key = |at: usize| std::cmp::Reverse((self.groups[at].nodes.first().copied(), at));
        let live = |at: &usize| !self.groups[*at].nodes.is_empty();
        let mut ready: BinaryHeap<_> =
            (0..self.groups.len()).filter(live).filter(|at| waits[*at] == 0).map(key).collect();
        let mut order = Vec::new();
        while let Some(std::cmp::Reverse((_, at))) = ready.pop() {
            for &next in &unblocks[at] {
                waits[next] -= 1;
                if waits[next] == 0 {
                    ready.push(key(next));
                }
            }
            order.push(self.groups[at].clone());
        }
        order
    }
}
