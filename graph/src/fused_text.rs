//! The groups of a fused graph as text, a line each: what the snapshots of passes show.
//!
//! A line says which pattern the group forms, what it reads, what it writes for other groups, and which nodes stay
//! inside it. Names of the layer's own are short; `prev.` and `next.` stand for its neighbours, so that equal layers
//! have equal texts.

use std::fmt::Write;

use crate::fused::Fused;
use crate::graph::NodeId;
use crate::kinds::Group;
use crate::kinds::Kind;

/// The groups of one layer, or those outside all layers, in an order in which they can run. A group belongs where its
/// first node does.
pub fn fused_text(fused: &Fused, layer: Option<u32>) -> String {
    let mut out = String::new();
    let ordered = fused.ordered();
    for group in ordered.iter().filter(|group| fused.graph.node(group.anchor()).layer == layer) {
        let name = |id: &NodeId| short_name(fused, layer, *id);
        let inputs: Vec<String> = fused.inputs(group).iter().map(name).collect();
        let outputs = fused.outputs(group);
        let results: Vec<String> =
            outputs.iter().map(|id| format!("{} {}", name(id), fused.graph.node(*id).ty)).collect();
        let inner: Vec<String> = group.nodes.iter().filter(|id| !outputs.contains(id)).map(name).collect();
        let by = if inner.is_empty() { String::new() } else { format!(" by {}", inner.join(", ")) };
        let _ = writeln!(out, "{}({}) -> {}{by}", pattern(fused, group), inputs.join(", "), results.join(", "));
    }
    out
}

fn short_name(fused: &Fused, layer: Option<u32>, id: NodeId) -> String {
    let node = fused.graph.node(id);
    match (layer, node.layer) {
        _ if node.name.is_empty() => fused.graph.full_name(id),
        (own, of) if own == of => node.name.clone(),
        (Some(own), Some(of)) if own == of + 1 => format!("prev.{}", node.name),
        (Some(own), Some(of)) if own + 1 == of => format!("next.{}", node.name),
        _ => fused.graph.full_name(id),
    }
}

/// The kind, and which parts of the pattern are there.
fn pattern(fused: &Fused, group: &Group) -> String {
    let mut words = vec![group.kind.name()];
    let op = |id: NodeId| fused.graph.node(id).op.name();
    match &group.kind {
        Kind::Single => words = vec![op(group.nodes[0])],
        Kind::Product(product) => {
            words.extend(product.norm.map(|norm| if norm.residual.is_some() { "residual norm" } else { "norm" }));
            words.extend(product.geglu.then_some("geglu"));
            words.extend((!product.epilogue.is_empty()).then_some("then"));
            words.extend(product.epilogue.iter().map(|epilogue| op(epilogue.node)));
        }
        Kind::Norm(norm) => {
            let residual = norm.residual.as_ref();
            words.extend(residual.map(|_| "residual"));
            words.extend(residual.and_then(|r| r.branch).map(|_| "branches"));
            words.extend(residual.and_then(|r| r.scale).map(|_| "scale"));
            words.extend(norm.residual.and(norm.next).map(|_| "next"));
        }
        Kind::Heads(heads) => {
            words.extend(heads.q.map(|_| "q"));
            words.extend(heads.kv.map(|kv| if kv.k == kv.v { "k=v" } else { "k v" }));
        }
        Kind::ExpertGateUp { dense: Some(_), .. } | Kind::ExpertDown { dense: Some(_), .. } => words.push("dense"),
        _ => {}
    }
    words.join(" ")
}
