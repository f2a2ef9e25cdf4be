//! The stable text of a graph: what snapshots and `inspect` show.
//!
//! Layers that are the same but for their number are printed once, under a line that lists them; inside, `N` stands for
//! the layer's number and `prev` for the output of the layer before it (in the first layer, the input). No line
//! numbers, ids or paths, so that the text changes only when the graph does.

use std::collections::BTreeMap;
use std::fmt::Write;

use gemma4c_ops::{Attribute, Elem, Op, WeightId};

use crate::graph::{Graph, Node, NodeId};

/// Prints a graph.
pub fn to_text(graph: &Graph) -> String {
    let mut out = String::new();
    let layers = graph.nodes.iter().filter_map(|n| n.layer).max().map_or(0, |l| l + 1);
    let (weights, caches, nodes) = (graph.weights.len(), graph.caches.len(), graph.nodes.len());
    let _ = writeln!(out, "graph: {layers} layers, {nodes} nodes, {weights} weights, {caches} caches");
    let mut bodies: BTreeMap<u32, String> = BTreeMap::new();
    let (mut before, mut after) = (String::new(), String::new());
    for (id, node) in graph.iter() {
        match node.layer {
            Some(layer) => bodies.entry(layer).or_default().push_str(&line(graph, id, "  ")),
            None if bodies.is_empty() => before.push_str(&line(graph, id, "")),
            None => after.push_str(&line(graph, id, "")),
        }
    }
    let mut folded: Vec<(Vec<u32>, &String)> = Vec::new();
    for (layer, body) in &bodies {
        match folded.iter_mut().find(|(_, b)| *b == body) {
            Some((same, _)) => same.push(*layer),
            None => folded.push((vec![*layer], body)),
        }
    }
    let _ = write!(out, "\n{before}");
    for (same, body) in folded {
        let noun = if same.len() == 1 { "layer" } else { "layers" };
        let _ = write!(out, "\n{noun} {}:\n{body}", layer_ranges(&same));
    }
    let _ = write!(out, "\n{after}");
    if let Some(output) = graph.output {
        let _ = writeln!(out, "output {}", graph.full_name(output));
    }
    out
}

fn line(graph: &Graph, id: NodeId, indent: &str) -> String {
    let node = graph.node(id);
    let name = if node.name.is_empty() { graph.full_name(id) } else { node.name.clone() };
    let mut args: Vec<String> = node.inputs.iter().map(|&i| operand(graph, id, i)).collect();
    args.extend(parameters(graph, node));
    format!("{indent}{name} = {}({}) : {}\n", node.op.name(), args.join(", "), node.ty)
}

fn operand(graph: &Graph, reader: NodeId, input: NodeId) -> String {
    let (from, to) = (graph.node(input), graph.node(reader));
    if let Elem::Kv(cache) = from.ty.elem
        && from.layer != to.layer
    {
        return format!("kv[{}]", graph.cache(cache).layer);
    }
    let is_own_input = to.layer == Some(0) && from.layer.is_none() && !read_beyond_layer_0(graph, input);
    let is_previous = matches!((from.layer, to.layer), (Some(a), Some(b)) if a + 1 == b);
    match from.layer {
        _ if is_own_input || is_previous => "prev".into(),
        layer if layer == to.layer && !from.name.is_empty() => from.name.clone(),
        _ => graph.full_name(input),
    }
}

fn read_beyond_layer_0(graph: &Graph, id: NodeId) -> bool {
    graph.nodes.iter().any(|n| n.inputs.contains(&id) && n.layer.is_some_and(|l| l > 0))
}

fn parameters(graph: &Graph, node: &Node) -> Vec<String> {
    let mut out: Vec<String> = node.op.weight().map(|w| weight_text(graph, node.layer, w)).into_iter().collect();
    let (mut op, layer) = (node.op, node.layer);
    op.each_attribute(|name, attribute| match attribute {
        Attribute::Weight(_) | Attribute::OptionalWeight(_) => {}
        // The type says it. Most norms are over the whole row; the ones over heads stand out if only they say so.
        Attribute::Number(width) if matches!(name, "width" | "group") && *width == node.ty.width => {}
        Attribute::Number(number) => out.push(match node.op {
            Op::Columns { first, len } if name == "first" && layer.and_then(|l| l.checked_mul(len)) == Some(first) => {
                format!("first={len}*N")
            }
            _ => format!("{name}={number}"),
        }),
        Attribute::Real(number) if matches!(name, "eps" | "base") => out.push(format!("{name}={number:e}")),
        Attribute::Real(number) => out.push(format!("{name}={number}")),
        Attribute::Cache(cache) => {
            let c = graph.cache(*cache);
            out.extend(matches!(node.op, Op::BorrowKv { .. }).then(|| format!("of={}", c.layer)));
            out.extend([format!("kv_heads={}", c.kv_heads), format!("head_dim={}", c.head_dim)]);
            out.extend(c.window.map(|w| format!("window={w}")));
        }
    });
    out
}

fn weight_text(graph: &Graph, layer: Option<u32>, id: WeightId) -> String {
    let w = graph.weight(id);
    // A tower's tensors have a word before that: `v.blk.3.`.
    let own = layer.and_then(|l| w.name.split_once(&format!("blk.{l}.")));
    let own = own.filter(|(before, _)| before.is_empty() || before.ends_with('.'));
    let name = own.map_or(w.name.clone(), |(before, rest)| format!("{before}blk.N.{rest}"));
    format!("{name} {}{:?}", w.dtype, w.dims)
}

/// `0-3, 5, 7-8` for a sorted list.
pub fn layer_ranges(layers: &[u32]) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for &l in layers {
        match runs.last_mut() {
            Some((_, end)) if *end + 1 == l => *end = l,
            _ => runs.push((l, l)),
        }
    }
    let text = |&(a, b): &(u32, u32)| if a == b { a.to_string() } else { format!("{a}-{b}") };
    runs.iter().map(text).collect::<Vec<_>>().join(", ")
}
