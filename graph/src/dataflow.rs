//! A graph's edges as a petgraph graph, for questions of order and reachability. The graph itself stays three vectors:
//! a pass that rewrites it builds new ones, and derives the edges again.

use petgraph::graph::{DiGraph, NodeIndex};
use petgraph::visit::{Dfs, Reversed, VisitMap};

use crate::graph::{Graph, NodeId};

/// A node's index in petgraph: its own id.
pub(crate) fn index_of(id: NodeId) -> NodeIndex {
    NodeIndex::new(id.index())
}

/// An edge from every node to each that reads it.
fn dataflow(graph: &Graph) -> DiGraph<NodeId, ()> {
    let mut edges = DiGraph::with_capacity(graph.nodes.len(), 2 * graph.nodes.len());
    for (id, node) in graph.iter() {
        let reader = edges.add_node(id);
        for input in &node.inputs {
            edges.add_edge(index_of(*input), reader, ());
        }
    }
    edges
}

/// For each node whether one of `roots` depends on it. A root is needed by itself.
pub(crate) fn needed_by(graph: &Graph, roots: impl Iterator<Item = NodeId>) -> Vec<bool> {
    let edges = dataflow(graph);
    let mut walk = Dfs::empty(&edges);
    walk.stack.extend(roots.map(index_of));
    while walk.next(Reversed(&edges)).is_some() {}
    graph.iter().map(|(id, _)| walk.discovered.is_visited(&index_of(id))).collect()
}
