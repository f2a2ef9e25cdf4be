//! The specification of well-formed groups, checked.
//!
//! 1. Every node is in exactly one group, and a group's nodes are in the graph's order.
//! 2. There is an order in which every group finds what it reads.
//! 3. Other groups read only what the group's pattern writes to memory: the kernel keeps its other values in registers.

use crate::fused::{Fused, Group, Kind};
use crate::graph::NodeId;

/// The first rule that groups break, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GroupError {
    #[error("node {node} is computed by {times} groups, not by one")]
    Cover { node: String, times: usize },
    #[error("node {node} reads {input}, whose group has not run")]
    Order { node: String, input: String },
    #[error("node {node} is read by other groups, but its own group, a {kind}, does not write it to memory")]
    Hidden { node: String, kind: &'static str },
}

/// Checks the whole specification.
pub fn verify_groups(fused: &Fused) -> Result<(), GroupError> {
    let name = |id: NodeId| fused.graph.full_name(id);
    let mut times = vec![0; fused.graph.nodes.len()];
    for group in fused.ordered() {
        for id in &group.nodes {
            let inputs = &fused.graph.node(*id).inputs;
            let missing = inputs.iter().find(|input| times[input.index()] == 0);
            if let Some(input) = missing {
                return Err(GroupError::Order { node: name(*id), input: name(*input) });
            }
            times[id.index()] += 1;
        }
        let outputs = outputs_of(&group);
        if let Some(id) = fused.outputs(&group).into_iter().find(|id| !outputs.contains(id)) {
            return Err(GroupError::Hidden { node: name(id), kind: group.kind.name() });
        }
    }
    match fused.graph.iter().find(|(id, _)| times[id.index()] != 1) {
        Some((id, _)) => Err(GroupError::Cover { node: name(id), times: times[id.index()] }),
        None => Ok(()),
    }
}

/// The values that a kernel for this pattern writes to memory.
fn outputs_of(group: &Group) -> Vec<NodeId> {
    let last = || group.nodes.last().copied().into_iter().collect();
    match &group.kind {
        Kind::Product(product) if !product.geglu && product.epilogue.is_empty() => product.matmuls.clone(),
        Kind::Norm(norm) => {
            let (sum, next) = (norm.residual.map(|residual| residual.sum), norm.next.map(|(node, _)| node));
            sum.into_iter().chain(next).collect()
        }
        Kind::Heads(heads) => {
            let (q, kv) = (heads.q.map(|q| q.out), heads.kv.map(|kv| kv.out));
            q.into_iter().chain(kv).collect()
        }
        _ => last(),
    }
}
