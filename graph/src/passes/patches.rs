//! Fuses what lies between the QKV product of patches and their attention: bounds, head norms and the rotation by
//! column and row; and attention with the bounds of the product that reads it.

use gemma4c_ops::{Op, WeightId};

use super::clips::{absorbed, within};
use crate::fused::Fused;
use crate::graph::NodeId;
use crate::kinds::{Clip, Kind, PatchHeads};
use crate::passes::{Log, Pass, Run};

pub const PASS: Pass = Pass {
    name: "patches",
    about: "head norms and rotation of patches as one; their attention within the bounds of its reader",
    run: Run::Fuse(run),
};

fn run(fused: &mut Fused, log: &mut Log) {
    let is_attention = |op: Op| matches!(op, Op::FullAttention { .. });
    let all: Vec<NodeId> = fused.graph.iter().filter(|(_, node)| is_attention(node.op)).map(|(id, _)| id).collect();
    for attention in all {
        match heads(fused, attention) {
            Some((heads, nodes)) => _ = log.merge(fused, Kind::PatchHeads(heads), &nodes),
            None => {
                log.refuse(fused.graph.full_name(attention), "its queries or keys are not normed and rotated heads");
                continue;
            }
        }
        let reader = fused.sole_user(attention);
        let (clip, mut nodes) = reader.map_or((nothing(attention), Vec::new()), |_| absorbed(fused, attention));
        nodes.push(attention);
        log.merge(fused, Kind::PatchAttention { attention, clip }, &nodes);
    }
}

/// No bounds.
fn nothing(out: NodeId) -> Clip {
    Clip { low: None, high: None, out }
}

/// One of the three, back to its product: its norm's weight, epsilon, and the nodes on the way.
struct Branch {
    raw: NodeId,
    clip: Clip,
    weight: Option<WeightId>,
    eps: f32,
    rotation: Option<(u32, f32)>,
    nodes: Vec<NodeId>,
}

fn branch(fused: &Fused, out: NodeId, dim: u32) -> Option<Branch> {
    let graph = &fused.graph;
    let alone = |id: NodeId| (fused.is_single(id) && fused.sole_user(id).is_some()).then_some(id);
    let (rotation, normed) = match graph.node(alone(out)?).op {
        Op::GridRope { head_dim, base } => (Some((head_dim, base)), graph.node(out).inputs[0]),
        _ => (None, out),
    };
    let Op::RmsNorm { weight, group, eps } = graph.node(alone(normed)?).op else { return None };
    if group != dim {
        return None;
    }
    let mut nodes = vec![out, normed];
    nodes.dedup();
    let (clip, raw, bounds) = within(fused, graph.node(normed).inputs[0]);
    nodes.extend(bounds);
    matches!(graph.node(raw).op, Op::MatMul { .. })
        .then_some(Branch { raw, clip, weight, eps, rotation, nodes })
        .filter(|_| fused.sole_user(raw).is_some())
}

fn heads(fused: &Fused, attention: NodeId) -> Option<(PatchHeads, Vec<NodeId>)> {
    let node = fused.graph.node(attention);
    let Op::FullAttention { heads } = node.op else { return None };
    let dim = node.ty.width / heads;
    let [q, k, v] = [0, 1, 2].map(|at| branch(fused, node.inputs[at], dim));
    let (q, k, v) = (q?, k?, v?);
    let alike = q.eps == k.eps && q.eps == v.eps && q.rotation == k.rotation && v.rotation.is_none();
    let (rotated, base) = q.rotation?;
    if !alike || rotated != dim || v.weight.is_some() {
        return None;
    }
    let of = PatchHeads {
        dim,
        base,
        eps: q.eps,
        raw: [q.raw, k.raw, v.raw],
        clips: [q.clip, k.clip, v.clip],
        q_weight: q.weight?,
        k_weight: k.weight?,
        out: [node.inputs[0], node.inputs[1], node.inputs[2]],
    };
    Some((of, [q.nodes, k.nodes, v.nodes].concat()))
}
