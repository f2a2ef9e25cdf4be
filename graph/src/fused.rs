//! A graph whose nodes are gathered into fusion groups. When all passes have run, a group is a launch.
//!
//! Fusion moves no node and invents no operation. A group is a set of nodes of the graph, so its meaning is that small
//! graph itself: a kernel is checked by running the group's nodes one by one. What a pass adds is a [`Kind`]: which
//! pattern the nodes form and which node plays which part, so that the lowering need not recognise the pattern again.
//!
//! Two things are not plain sets of nodes. A group may *recompute* nodes that another group owns, where that is cheaper
//! than a launch: two products each compute the norm before them. And a *helper* computes no node at all: it prepares
//! what other groups read, such as a value in another form.

use petgraph::Direction::Incoming;
use petgraph::algo::toposort;
use petgraph::graph::{DiGraph, NodeIndex};
use petgraph::stable_graph::StableDiGraph;
use petgraph::visit::{Dfs, NodeIndexable, Reversed, VisitMap};

use gemma4c_ops::RowCount;

use crate::dataflow::index_of;
use crate::graph::{Graph, NodeId};
use crate::kinds::{Form, Group, Kind};

/// A graph and its groups.
#[derive(Clone, Debug)]
pub struct Fused {
    pub graph: Graph,
    /// An edge from every group to each that reads it. A group's index is the id of its first node, a helper's is
    /// larger than any node's; it never has a cycle.
    groups: StableDiGraph<Group, ()>,
    owner: Vec<NodeIndex>,
    /// Groups that compute a node without owning it.
    recomputers: Vec<Vec<NodeIndex>>,
    users: Vec<Vec<NodeId>>,
}

impl Fused {
    /// Every node on its own.
    pub fn new(graph: Graph) -> Fused {
        let mut users = vec![Vec::new(); graph.nodes.len()];
        let mut groups = StableDiGraph::with_capacity(graph.nodes.len(), 2 * graph.nodes.len());
        let mut owner = Vec::with_capacity(graph.nodes.len());
        for (id, node) in graph.iter() {
            owner.push(groups.add_node(Group::new(Kind::Single, vec![id])));
            for input in &node.inputs {
                if !users[input.index()].contains(&id) {
                    users[input.index()].push(id);
                    groups.add_edge(index_of(*input), index_of(id), ());
                }
            }
        }
        let recomputers = vec![Vec::new(); graph.nodes.len()];
        Fused { graph, groups, owner, recomputers, users }
    }

    /// Groups all nodes anew. Every node is in one of the groups; helpers come before the groups that read what they
    /// prepare.
    pub fn regroup(&mut self, all: Vec<Group>) {
        let count = self.graph.nodes.len();
        let (helpers, owners): (Vec<Group>, Vec<Group>) = all.into_iter().partition(|group| group.nodes.is_empty());
        let mut groups = StableDiGraph::with_capacity(count + helpers.len(), 2 * count);
        // Every index is taken before one is given back, so that helpers come behind all nodes.
        self.graph.nodes.iter().for_each(|_| _ = groups.add_node(Group::new(Kind::Single, Vec::new())));
        let helpers: Vec<NodeIndex> = helpers.into_iter().map(|helper| groups.add_node(helper)).collect();
        self.recomputers.iter_mut().for_each(Vec::clear);
        for group in owners {
            let at = index_of(group.nodes[0]);
            group.nodes.iter().for_each(|id| self.owner[id.index()] = at);
            group.recomputes.iter().for_each(|id| self.recomputers[id.index()].push(at));
            groups[at] = group;
        }
        groups.retain_nodes(|groups, at| !groups[at].nodes.is_empty() || groups[at].kind.helps().is_some());
        self.groups = groups;
        for at in self.groups.node_indices().collect::<Vec<_>>() {
            self.link(at);
        }
        for helper in helpers {
            for reader in self.readers_of_helper(helper) {
                self.groups.update_edge(helper, reader, ());
            }
        }
    }

    /// Renews the edges from what a group reads to it.
    fn link(&mut self, at: NodeIndex) {
        let old: Vec<_> = self.groups.neighbors_directed(at, Incoming).collect();
        for from in old {
            // A helper's edges are not of a node that is read.
            if self.groups[from].kind.helps().is_none()
                && let Some(edge) = self.groups.find_edge(from, at)
            {
                self.groups.remove_edge(edge);
            }
        }
        for input in self.inputs(&self.groups[at]) {
            self.groups.update_edge(self.owner[input.index()], at, ());
        }
    }

    /// The groups that read what a helper prepares.
    fn readers_of_helper(&self, helper: NodeIndex) -> Vec<NodeIndex> {
        let node = match self.groups[helper].kind {
            // What lies between the halves is made of the rows as the product multiplies them.
            Kind::RowsPrologue { of } => {
                let narrow = self.groups.node_indices().filter(|at| self.groups[*at].kind == Kind::NarrowRows { of });
                return narrow.chain([self.owner[of.index()]]).collect();
            }
            Kind::AttentionParts { attention: of } | Kind::NarrowRows { of } | Kind::WidenWeights { of } => {
                return vec![self.owner[of.index()]];
            }
            Kind::KeepRows { append } => {
                let asked = self.users(append).iter().filter(|user| self.graph.node(**user).ty.rows == RowCount::Asked);
                return asked.map(|user| self.owner[user.index()]).collect();
            }
            ref kind => kind.helps(),
        };
        // Other forms are made of whole rows.
        let makes_whole_rows = matches!(self.groups[helper].kind, Kind::Convert { form: Form::F32, .. });
        let reads = |at: &NodeIndex| {
            let group = &self.groups[*at];
            let waits = match group.kind {
                Kind::Convert { form, .. } => makes_whole_rows && form != Form::F32,
                Kind::NarrowRows { .. } => true,
                ref kind => kind.helps().is_none(),
            };
            waits && node.is_some_and(|node| self.inputs(group).contains(&node))
        };
        self.groups.node_indices().filter(reads).collect()
    }

    /// Makes a group compute `nodes` of another group for itself, under a new kind.
    pub fn recompute(&mut self, of: NodeId, kind: Kind, nodes: &[NodeId]) {
        let at = self.owner[of.index()];
        let group = &mut self.groups[at];
        group.kind = kind;
        group.recomputes.extend(nodes);
        group.recomputes.sort_unstable();
        group.recomputes.dedup();
        for id in nodes {
            if !self.recomputers[id.index()].contains(&at) {
                self.recomputers[id.index()].push(at);
            }
        }
        self.link(at);
    }

    /// The nodes that read `id`, in order, each once.
    pub fn users(&self, id: NodeId) -> &[NodeId] {
        &self.users[id.index()]
    }

    /// The one node that reads `id`, if it is one and `id` is no result of the graph.
    pub fn sole_user(&self, id: NodeId) -> Option<NodeId> {
        match self.users(id) {
            [user] if !self.graph.is_result(id) => Some(*user),
            _ => None,
        }
    }

    pub fn group(&self, id: NodeId) -> &Group {
        &self.groups[self.owner[id.index()]]
    }

    pub fn is_single(&self, id: NodeId) -> bool {
        self.group(id).kind == Kind::Single
    }

    /// Nodes that a group owns and another reads.
    pub fn outputs(&self, group: &Group) -> Vec<NodeId> {
        let is_output = |id: &NodeId| {
            let readers = self.users(*id).iter().flat_map(|user| self.computing(*user));
            self.graph.is_result(*id) || readers.into_iter().any(|reader| !reader.computes(*id))
        };
        group.nodes.iter().copied().filter(is_output).collect()
    }

    /// The group that owns a node, and those that recompute it.
    fn computing(&self, id: NodeId) -> impl Iterator<Item = &Group> {
        let recomputers = &self.recomputers[id.index()];
        std::iter::once(&self.owner[id.index()]).chain(recomputers).map(|at| &self.groups[*at])
    }

    /// Values a group reads, each once, in order.
    pub fn inputs(&self, group: &Group) -> Vec<NodeId> {
        let mut found = match group.kind {
            Kind::AttentionParts { attention } => self.graph.node(attention).inputs.clone(),
            // Weights are read from the start on; at once before the product, they need no room for longer.
            Kind::RowsPrologue { of } | Kind::NarrowRows { of } | Kind::WidenWeights { of } => {
                self.inputs(self.group(of))
            }
            // Whoever reads the chunk's rows, and not the ring, comes first.
            Kind::KeepRows { append } => {
                let all_rows =
                    self.users(append).iter().filter(|user| self.graph.node(**user).ty.rows == RowCount::Chunk);
                std::iter::once(append).chain(all_rows.copied()).collect()
            }
            ref kind => kind.helps().into_iter().collect(),
        };
        for input in group.recomputes.iter().chain(&group.nodes).flat_map(|id| &self.graph.node(*id).inputs) {
            if !group.computes(*input) && !found.contains(input) {
                found.push(*input);
            }
        }
        found
    }

    /// The groups that `nodes` are in, if they can be one; refused if a group outside would have to run both before and
    /// after it.
    fn mergeable(&self, nodes: &[NodeId]) -> Result<Vec<NodeIndex>, String> {
        let mut parts: Vec<NodeIndex> = nodes.iter().map(|id| self.owner[id.index()]).collect();
        parts.sort_unstable();
        parts.dedup();
        match self.lies_between(&parts) {
            Some(between) => {
                let name = self.graph.full_name(self.groups[between].last().unwrap_or(nodes[0]));
                Err(format!("{name} needs a part of it and is needed by another"))
            }
            None => Ok(parts),
        }
    }

    /// Whether [`merge`](Self::merge) would do it.
    pub fn can_merge(&self, nodes: &[NodeId]) -> Result<(), String> {
        self.mergeable(nodes).map(drop)
    }

    /// Merges `nodes`, and the groups they are in already, into one group.
    pub fn merge(&mut self, kind: Kind, nodes: &[NodeId]) -> Result<(), String> {
        let parts = self.mergeable(nodes)?;
        let mut all: Vec<NodeId> = parts.iter().flat_map(|part| self.groups[*part].nodes.clone()).collect();
        all.sort_unstable();
        let again = parts.iter().flat_map(|part| self.groups[*part].recomputes.clone()).filter(|id| !all.contains(id));
        let mut recomputes: Vec<NodeId> = again.collect();
        recomputes.sort_unstable();
        recomputes.dedup();
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
        self.recomputers.iter_mut().for_each(|of| of.retain(|at| !parts.contains(at)));
        recomputes.iter().for_each(|id| self.recomputers[id.index()].push(whole));
        self.groups[whole] = Group { kind, nodes: all, recomputes };
        Ok(())
    }

    /// A group outside `parts` that reads one of them and that another depends on: merged, they would be in a cycle
    /// with it.
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
        (0..self.groups.node_bound().max(self.graph.nodes.len())).for_each(|_| _ = sorted.add_node(()));
        sorted.extend_with_edges(edges);
        // From each group in turn back to what it needs.
        let order = toposort(Reversed(&sorted), None).expect("a merge that would make a cycle is refused");
        order.into_iter().rev().filter_map(|group| self.groups.node_weight(group).cloned()).collect()
    }
}
