//! A graph whose nodes are gathered into fusion groups. One launch computes a group.
//!
//! Fusion moves no node and invents no operation. A group is a set of nodes of the graph, so its meaning is that small graph
//! itself: a kernel is checked by running the group's nodes one by one. What a pass adds is a [`Kind`]: which pattern the
//! nodes form and which node plays which part, so that the lowering need not recognise the pattern again.

use petgraph::Direction::Incoming;
use petgraph::algo::toposort;
use petgraph::graph::{DiGraph, NodeIndex};
use petgraph::stable_graph::StableDiGraph;
use petgraph::visit::{Dfs, Reversed, VisitMap};

use crate::dataflow::index_of;
use crate::graph::{CacheId, Graph, NodeId, WeightId};

/// Which pattern the nodes of a group form.
#[derive(Clone, Debug, PartialEq)]
pub enum Kind {
    /// One operation on its own.
    Single,
    /// A row of a table, times a factor.
    Embed { table: WeightId, tokens: NodeId, factor: f32 },
    /// The per-layer inputs of all layers, from a token's embedding and the per-layer table.
    PerLayerInputs(PerLayerInputs),
    /// Matrix products that share their input, as one.
    Product(Product),
    /// Residual, norms and layer scale between two products.
    Norm(Norm),
    /// Norms and RoPE of attention heads, and the store into the KV cache.
    Heads(Heads),
    /// A mixture's router: from the residual to the experts chosen for a row.
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
/// `stream` is the residual before the update.
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
    /// The residual after the update.
    pub sum: NodeId,
}

/// Two branches that meet before a residual.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Branch {
    pub weight: WeightId,
    pub other: NodeId,
    pub other_weight: WeightId,
}

/// Queries, keys and values between their product and attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Heads {
    pub dim: u32,
    pub base: f32,
    pub factors: Option<WeightId>,
    pub eps: f32,
    pub q: Option<QueryHeads>,
    pub kv: Option<KeyValueHeads>,
}

/// Raw queries, their norm's weight, and the normed and rotated result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueryHeads {
    pub raw: NodeId,
    pub weight: WeightId,
    pub out: NodeId,
}

/// Raw keys and values before their store into a cache. They may be the same node.
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
    /// An edge from every group to each that reads it. A group's index is the id of its first node; it never has a cycle.
    groups: StableDiGraph<Group, ()>,
    owner: Vec<NodeIndex>,
    users: Vec<Vec<NodeId>>,
}

impl Fused {
    /// Every node on its own.
    pub fn new(graph: Graph) -> Fused {
        let mut users = vec![Vec::new(); graph.nodes.len()];
        let mut groups = StableDiGraph::with_capacity(graph.nodes.len(), 2 * graph.nodes.len());
        let mut owner = Vec::with_capacity(graph.nodes.len());
        for (id, node) in graph.iter() {
            owner.push(groups.add_node(Group { kind: Kind::Single, nodes: vec![id] }));
            for input in &node.inputs {
                if !users[input.index()].contains(&id) {
                    users[input.index()].push(id);
                    groups.add_edge(index_of(*input), index_of(id), ());
                }
            }
        }
        Fused { graph, groups, owner, users }
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

    /// Merges `nodes`, and the groups they are in already, into one group. Refused if a group outside would have to run both
    /// before and after it.
    pub fn merge(&mut self, kind: Kind, nodes: &[NodeId]) -> Result<(), String> {
        let mut parts: Vec<NodeIndex> = nodes.iter().map(|id| self.owner[id.index()]).collect();
        parts.sort_unstable();
        parts.dedup();
        if let Some(between) = self.lies_between(&parts) {
            let nodes = &self.groups[between].nodes;
            let name = self.graph.full_name(nodes[nodes.len() - 1]);
            return Err(format!("{name} needs a part of it and is needed by another"));
        }
        let mut all: Vec<NodeId> = parts.iter().flat_map(|part| self.groups[*part].nodes.clone()).collect();
        all.sort_unstable();
        let whole = parts[0];
        for part in &parts[1..] {
            let outside = |group: &NodeIndex| !parts.contains(group);
            let needed: Vec<NodeIndex> = self.groups.neighbors_directed(*part, Incoming).filter(outside).collect();
            let readers: Vec<NodeIndex> = self.groups.neighbors(*part).filter(outside).collect();
            self.groups.remove_node(*part);
            needed.into_iter().for_each(|from| _ = self.groups.update_edge(from, whole, ()));
            readers.into_iter().for_each(|to| _ = self.groups.update_edge(whole, to, ()));
        }
        all.iter().for_each(|id| self.owner[id.index()] = whole);
        self.groups[whole] = Group { kind, nodes: all };
        Ok(())
    }

    /// A group outside `parts` that reads one of them and that another depends on: merged, they would be in a cycle with it.
    fn lies_between(&self, parts: &[NodeIndex]) -> Option<NodeIndex> {
        let needed = |group: NodeIndex| self.groups.neighbors_directed(group, Incoming);
        // Walks backwards from the inputs of the parts, never through a part.
        let mut walk = Dfs::empty(&self.groups);
        for part in parts {
            walk.discovered.visit(*part);
            walk.stack.extend(needed(*part).filter(|group| !parts.contains(group)));
        }
        while let Some(group) = walk.next(Reversed(&self.groups)) {
            if needed(group).any(|before| parts.contains(&before)) {
                return Some(group);
            }
        }
        None
    }

    /// The groups in an order in which they can run: that of their first nodes, but what a group needs comes before it.
    pub fn ordered(&self) -> Vec<Group> {
        // The search visits edges oldest first, so they are added in the groups' own order.
        let mut edges: Vec<_> =
            self.groups.edge_indices().filter_map(|edge| self.groups.edge_endpoints(edge)).collect();
        edges.sort_unstable();
        let mut sorted: DiGraph<(), ()> = DiGraph::new();
        self.graph.nodes.iter().for_each(|_| _ = sorted.add_node(()));
        sorted.extend_with_edges(edges);
        // From each group in turn back to what it needs.
        let order = toposort(Reversed(&sorted), None).expect("a merge that would make a cycle is refused");
        order.into_iter().rev().filter_map(|group| self.groups.node_weight(group).cloned()).collect()
    }
}
