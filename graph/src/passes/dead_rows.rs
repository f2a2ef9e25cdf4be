//! Dead-code elimination by rows: rows whose values are not needed are not computed.
//!
//! In prefill every row is stored in the KV cache, but logits are asked for at most one row (the *asked row*). So a
//! value is needed for all rows only if a KV cache depends on it. Everything else (the layers that share keys and
//! values, the last layer's feed-forward, the LM head) is computed for the asked row alone. At the boundary a
//! `take_asked` selects that row.

use gemma4c_ops::{Elem, Op, RowCount, Type, infer};

use crate::dataflow::needed_by;
use crate::graph::{Graph, Node, NodeId};
use crate::passes::fold_constants::drop_unused;
use crate::passes::{Goal, Log, Pass, Run, WHOLE_GRAPH};

pub const PASS: Pass = Pass {
    name: "dead-rows",
    about: "what no cache depends on is computed for the asked row alone",
    run: Run::Rewrite(run),
};

fn run(graph: &Graph, goal: Goal, log: &mut Log) -> Graph {
    if goal == Goal::Decode {
        log.refuse(WHOLE_GRAPH.into(), "the one row of decode is asked for");
        return without_takes(graph);
    }
    if goal == Goal::Tower {
        return graph.clone();
    }
    let appends = graph.iter().filter(|(_, node)| matches!(node.op, Op::KvAppend { .. })).map(|(id, _)| id);
    let mut for_all = needed_by(graph, appends);
    // No kernel computes the tokens: a node that needs them for the asked row reads those of all rows.
    for (id, node) in graph.iter() {
        for_all[id.index()] |= matches!(node.op, Op::Tokens | Op::Gather { .. });
    }

    let mut out = Graph { nodes: Vec::new(), ..graph.clone() };
    let mut now: Vec<NodeId> = Vec::new();
    let mut taken: Vec<Option<NodeId>> = vec![None; graph.nodes.len()];
    for (id, node) in graph.iter() {
        if for_all[id.index()] {
            let inputs = node.inputs.iter().map(|input| now[input.index()]).collect();
            now.push(push(&mut out, Node { inputs, ..node.clone() }));
            continue;
        }
        let inputs: Vec<NodeId> = node
            .inputs
            .iter()
            .map(|input| {
                let source = graph.node(*input);
                let is_state = matches!(source.ty.elem, Elem::Kv(_));
                if !for_all[input.index()] || is_state {
                    return now[input.index()];
                }
                *taken[input.index()].get_or_insert_with(|| {
                    let name = if source.name.is_empty() { String::new() } else { format!("{}.asked", source.name) };
                    let take = Node {
                        op: Op::TakeAsked,
                        inputs: vec![now[input.index()]],
                        ty: Type { rows: RowCount::Asked, ..source.ty },
                        layer: source.layer,
                        name,
                        line: source.line,
                    };
                    push(&mut out, take)
                })
            })
            .collect();
        if node.op == Op::TakeAsked {
            // Its input has only the asked row already.
            now.push(inputs[0]);
            continue;
        }
        log.apply();
        now.push(push(&mut out, Node { inputs, ..node.clone() }));
    }
    out.renumber_results(&now);
    drop_unused(out)
}

/// The same graph for a chunk of one row, where selecting the asked row changes nothing.
fn without_takes(graph: &Graph) -> Graph {
    let mut out = Graph { nodes: Vec::new(), ..graph.clone() };
    let mut now: Vec<NodeId> = Vec::new();
    for (_, node) in graph.iter() {
        let inputs: Vec<NodeId> = node.inputs.iter().map(|input| now[input.index()]).collect();
        now.push(match node.op {
            Op::TakeAsked => inputs[0],
            _ => push(&mut out, Node { inputs, ..node.clone() }),
        });
    }
    out.renumber_results(&now);
    out
}

fn push(graph: &mut Graph, node: Node) -> NodeId {
    let types: Vec<Type> = node.inputs.iter().map(|input| graph.node(*input).ty).collect();
    let ty = infer(graph, &node.op, &types).unwrap_or(node.ty);
    graph.nodes.push(Node { ty, ..node });
    NodeId(graph.nodes.len() as u32 - 1)
}
