//! A Graphviz drawing of some layers: `gemma4c inspect MODEL.gguf --dot 0 | dot -Tsvg`.

use petgraph::dot::{Config, Dot};
use petgraph::graph::DiGraph;

use crate::graph::{Graph, NodeId};

/// Draws the nodes of the layers for which `is_drawn` is true, everything they read, and the nodes outside all layers
/// that read them.
pub fn to_dot(graph: &Graph, is_drawn: impl Fn(u32) -> bool) -> String {
    let mut drawn = vec![false; graph.nodes.len()];
    for (id, node) in graph.iter() {
        let inside = node.layer.is_some_and(&is_drawn);
        drawn[id.index()] |= inside;
        for input in &node.inputs {
            let reads_inside = node.layer.is_none() && graph.node(*input).layer.is_some_and(&is_drawn);
            drawn[input.index()] |= inside;
            drawn[id.index()] |= reads_inside;
        }
    }
    let mut picture: DiGraph<NodeId, &'static str> = DiGraph::new();
    let mut places = vec![None; graph.nodes.len()];
    for (id, node) in graph.iter().filter(|(id, _)| drawn[id.index()]) {
        let place = picture.add_node(id);
        places[id.index()] = Some(place);
        for from in node.inputs.iter().filter_map(|i| places[i.index()]) {
            picture.add_edge(from, place, "");
        }
    }
    let label = |_: &DiGraph<NodeId, &str>, (_, id): (_, &NodeId)| {
        let node = graph.node(*id);
        let weight = node.op.weight().map_or(String::new(), |w| format!("\\n{}", graph.weight(w).name));
        let text = format!("{}\\n{}{weight}\\n{}", graph.full_name(*id), node.op.name(), node.ty);
        format!("label=\"{}\"", text.replace('"', "'"))
    };
    let config = &[Config::EdgeNoLabel, Config::NodeNoLabel, Config::GraphContentOnly];
    let content = format!("{:?}", Dot::with_attr_getters(&picture, config, &|_, _| String::new(), &label));
    format!("digraph {{\n    node [shape=box fontname=monospace]\n{content}}}\n")
}
