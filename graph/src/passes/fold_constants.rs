//! Folds constant factors: a factor of 1 is dropped, two consecutive factors become one, and a factor after a gather
//! becomes part of it.
//!
//! A factor never moves into a stored tensor. For the embedding's factor it would be tempting, but the table is also
//! the LM head's matrix, and the logits would be scaled too.

use gemma4c_ops::Op;

use crate::dataflow::needed_by;
use crate::fused::Fused;
use crate::graph::{Graph, NodeId};
use crate::kinds::Kind;
use crate::passes::{Goal, Log, Pass, Run};

pub const FOLD: Pass = Pass {
    name: "fold-constants",
    about: "factors of 1 vanish, neighbouring factors are one",
    run: Run::Rewrite(fold),
};

pub const EMBED: Pass = Pass {
    name: "scale-gathers",
    about: "a factor after a gather is applied by the gather, and never to its table",
    run: Run::Fuse(embed),
};

fn fold(graph: &Graph, _: Goal, log: &mut Log) -> Graph {
    let mut out = Graph { nodes: Vec::new(), ..graph.clone() };
    // The node that now computes each old node's value.
    let mut now: Vec<NodeId> = Vec::new();
    for (id, node) in graph.iter() {
        let inputs: Vec<NodeId> = node.inputs.iter().map(|i| now[i.index()]).collect();
        let mut node = crate::Node { inputs, ..node.clone() };
        if let Op::Scale { factor } = node.op {
            let before = &out.nodes[node.inputs[0].index()];
            if factor == 1.0 {
                log.apply();
                now.push(node.inputs[0]);
                continue;
            }
            if let Op::Scale { factor: first } = before.op {
                log.apply();
                node.op = Op::Scale { factor: first * factor };
                node.inputs = before.inputs.clone();
            }
            if let Op::Gather { table } = before.op {
                let reader = graph.iter().find(|(_, other)| other.op == Op::MatMul { weight: table });
                let why = match reader {
                    Some((other, _)) => format!("{} multiplies by it too", graph.full_name(other)),
                    None => "what is stored stays as it is".to_owned(),
                };
                log.refuse(graph.full_name(id), format!("not into {}: {why}", graph.weight(table).name));
            }
        }
        now.push(NodeId(out.nodes.len() as u32));
        out.nodes.push(node);
    }
    out.renumber_results(&now);
    drop_unused(out)
}

/// The graph without nodes that nothing needs.
pub(super) fn drop_unused(graph: Graph) -> Graph {
    // An append is needed for what it stores in the KV cache, even if no node reads it in this pass.
    let appends = graph.iter().filter(|(_, node)| matches!(node.op, Op::KvAppend { .. })).map(|(id, _)| id);
    let needed = needed_by(&graph, appends.chain(graph.results()));
    let mut now = vec![NodeId(0); graph.nodes.len()];
    let mut nodes = Vec::new();
    for (id, node) in graph.iter().filter(|(id, _)| needed[id.index()]) {
        now[id.index()] = NodeId(nodes.len() as u32);
        let inputs = node.inputs.iter().map(|input| now[input.index()]).collect();
        nodes.push(crate::Node { inputs, ..node.clone() });
    }
    let mut out = Graph { nodes, ..graph };
    out.renumber_results(&now);
    out
}

fn embed(fused: &mut Fused, log: &mut Log) {
    let ids: Vec<NodeId> = fused.graph.iter().map(|(id, _)| id).collect();
    for id in ids {
        let Op::Gather { table } = fused.graph.node(id).op else { continue };
        let tokens = fused.graph.node(id).inputs[0];
        let Some(user) = fused.sole_user(id) else {
            log.refuse(fused.graph.full_name(id), "its rows are read unscaled too");
            continue;
        };
        let Op::Scale { factor } = fused.graph.node(user).op else { continue };
        log.merge(fused, Kind::Embed { table, tokens, factor }, &[id, user]);
    }
}
