//! A text's graph with soft tokens, as the phases compute it.
//!
//! The host writes the padding token where a soft token stands, so that gathers need not know of them: a per-layer
//! table is read at its padding row, as the graph says, and what the embedding gives there is replaced. Decoded rows
//! are tokens, all of them.

use gemma4c_graph::passes::Goal;
use gemma4c_graph::{Graph, Node, NodeId, Op};

use super::error::LowerError;

/// The text's graph for a goal.
pub fn text(graph: &Graph, goal: Goal) -> Result<Graph, LowerError> {
    let mut out = Graph { nodes: Vec::new(), ..graph.clone() };
    let mut now: Vec<NodeId> = Vec::new();
    for (id, node) in graph.iter() {
        let inputs: Vec<NodeId> = node.inputs.iter().map(|input| now[input.index()]).collect();
        let op = match node.op {
            Op::PlaceSoft if goal == Goal::Decode => {
                now.push(inputs[0]);
                continue;
            }
            Op::GatherText { table, .. } => Op::Gather { table },
            Op::AttentionAhead { heads } if goal == Goal::Decode => Op::Attention { heads },
            Op::Gather { .. } if !is_replaced(graph, id) => {
                return Err(LowerError::OnCpuAlone { node: graph.full_name(id), op: node.op.name() });
            }
            op => op,
        };
        now.push(NodeId(out.nodes.len() as u32));
        out.nodes.push(Node { op, inputs, ..node.clone() });
    }
    out.output = graph.output.map(|id| now[id.index()]);
    out.kept = graph.kept.iter().map(|id| now[id.index()]).collect();
    Ok(out)
}

/// Whether soft tokens take the place of whatever a gather gives for their rows.
fn is_replaced(graph: &Graph, gather: NodeId) -> bool {
    let mut users = graph.iter().filter(|(_, node)| node.inputs.contains(&gather)).peekable();
    users.peek().is_some()
        && users.all(|(id, node)| match node.op {
            Op::PlaceSoft => true,
            Op::Scale { .. } => is_replaced(graph, id),
            _ => false,
        })
}
