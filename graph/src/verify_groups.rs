//! The specification of well-formed groups, checked.
//!
//! 1. Every node is in exactly one group, and a group's nodes are in the graph's order.
//! 2. There is an order in which every group finds what it reads.
//! 3. Other groups read only what the group's pattern writes to memory: the kernel keeps its other values in registers.
//! 4. What a group recomputes is owned by another group, and stores nothing that outlives the pass.

use gemma4c_ops::{Elem, Op};

use crate::fused::Fused;
use crate::graph::NodeId;
use crate::kinds::{Group, Kind, Norm};

/// The first rule that groups break, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GroupError {
    #[error("node {node} is computed by {times} groups, not by one")]
    Cover { node: String, times: usize },
    #[error("node {node} reads {input}, whose group has not run")]
    Order { node: String, input: String },
    #[error("node {node} is read by other groups, but its own group, a {kind}, does not write it to memory")]
    Hidden { node: String, kind: &'static str },
    #[error("node {node} cannot be computed once more: it is the group's own, or a store into a cache")]
    Recomputed { node: String },
}

/// Checks the whole specification.
pub fn verify_groups(fused: &Fused) -> Result<(), GroupError> {
    let name = |id: NodeId| fused.graph.full_name(id);
    let mut times = vec![0; fused.graph.nodes.len()];
    for group in fused.ordered() {
        let stores = |id: &NodeId| matches!(fused.graph.node(*id).op, Op::KvAppend { .. });
        if let Some(id) = group.recomputes.iter().find(|id| group.nodes.contains(id) || stores(id)) {
            return Err(GroupError::Recomputed { node: name(*id) });
        }
        if let Some(input) = fused.inputs(&group).into_iter().find(|input| times[input.index()] == 0) {
            return Err(GroupError::Order { node: name(group.anchor()), input: name(input) });
        }
        group.nodes.iter().for_each(|id| times[id.index()] += 1);
        let outputs = outputs_of(fused, &group);
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
fn outputs_of(fused: &Fused, group: &Group) -> Vec<NodeId> {
    let last = || group.nodes.last().copied().into_iter().collect();
    let sum_of = |norm: &Norm| norm.residual.map(|residual| residual.sum);
    match &group.kind {
        Kind::Product(product) => {
            let results = if product.is_plain() { product.results() } else { last() };
            product.norm.as_ref().and_then(sum_of).into_iter().chain(results).collect()
        }
        Kind::Norm(norm) => sum_of(norm).into_iter().chain(norm.next.map(|(node, _)| node)).collect(),
        Kind::ClippedNorm(of) => sum_of(&of.norm).into_iter().chain(of.exits.iter().map(|exit| exit.out)).collect(),
        Kind::PatchHeads(heads) => heads.out.to_vec(),
        Kind::AttentionStep { heads, attention } => heads.kv.map(|kv| kv.out).into_iter().chain([*attention]).collect(),
        Kind::PerLayerStep { residual, projection, .. } => vec![residual.sum, *projection],
        Kind::MixtureEntry { norm, expert_norm, .. } => {
            let normed = norm.next.map(|(node, _)| node);
            let is_choice = |id: &NodeId| matches!(fused.graph.node(*id).ty.elem, Elem::Routing { .. });
            let choice = group.nodes.iter().copied().filter(is_choice);
            sum_of(norm).into_iter().chain(normed).chain([expert_norm.0]).chain(choice).collect()
        }
        Kind::ExpertGateUp { out, dense, .. } | Kind::ExpertDown { out, dense, .. } => {
            dense.iter().map(|dense| dense.out).chain([*out]).collect()
        }
        Kind::ExpertProduct { matmuls, geglu: false, .. } => matmuls.clone(),
        Kind::Heads(heads) => {
            let (q, kv) = (heads.q.map(|q| q.out), heads.kv.map(|kv| kv.out));
            q.into_iter().chain(kv).collect()
        }
        _ => last(),
    }
}
