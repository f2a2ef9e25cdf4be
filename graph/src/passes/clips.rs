//! Fuses the bounds of clipped products with what lies between two of them: a residual and its norms, or the gate of an
//! MLP. A launch then reads what a product leaves, and leaves what the next ones read: the same value within the bounds
//! of each. Such products, of one type and size, become one.

use gemma4c_ops::Op;

use crate::fused::Fused;
use crate::graph::NodeId;
use crate::kinds::{Clip, ClippedGeglu, ClippedNorm, Kind, Product};
use crate::passes::{Log, Pass, Run};

pub const PASS: Pass = Pass {
    name: "clips",
    about: "bounds of products that are kept within some, with the norms and gates between these products",
    run: Run::Fuse(run),
};

/// Products of one normed value that may have bounds of their own.
const MOST_EXITS: usize = 3;

fn run(fused: &mut Fused, log: &mut Log) {
    let ids: Vec<NodeId> = fused.graph.iter().map(|(id, _)| id).collect();
    for id in ids {
        if fused.graph.node(id).op == Op::Gelu {
            match geglu(fused, id) {
                Some(Ok((kind, nodes))) => _ = log.merge(fused, Kind::ClippedGeglu(kind), &nodes),
                Some(Err(reason)) => log.refuse(fused.graph.full_name(id), reason),
                None => {}
            }
        } else if let Kind::Norm(_) = fused.group(id).kind
            && fused.group(id).nodes[0] == id
            && let Some((kind, nodes)) = norm(fused, id)
        {
            let exits: Vec<NodeId> = kind.exits.iter().map(|exit| exit.out).collect();
            if log.merge(fused, Kind::ClippedNorm(kind), &nodes) {
                join(fused, log, exits);
            }
        }
    }
}

/// The bounds that `out` has been brought within: these, the value before them, and the nodes on the way. Nobody else
/// reads what lies between.
pub(super) fn within(fused: &Fused, out: NodeId) -> (Clip, NodeId, Vec<NodeId>) {
    let mut clip = Clip { low: None, high: None, out };
    let (mut at, mut nodes) = (out, Vec::new());
    while fused.is_single(at) && fused.sole_user(at).is_some() {
        let node = fused.graph.node(at);
        match node.op {
            // The last of each kind is the first on the way back, and holds for the whole only alone.
            Op::AtMost { weight } if clip.high.is_none() && clip.low.is_none() => clip.high = Some(weight),
            Op::AtLeast { weight } if clip.low.is_none() => clip.low = Some(weight),
            _ => break,
        }
        if node.op.weight().is_some_and(|weight| fused.graph.weight(weight).dims != [1]) {
            // A bound for every value of a row is nobody's here.
            return (Clip { low: None, high: None, out }, out, Vec::new());
        }
        nodes.push(at);
        at = node.inputs[0];
    }
    (clip, at, nodes)
}

/// The bounds that the sole reader of `from` brings it within, and their nodes.
pub(super) fn absorbed(fused: &Fused, from: NodeId) -> (Clip, Vec<NodeId>) {
    follow(fused, from, fused.sole_user(from))
}

fn follow(fused: &Fused, from: NodeId, mut next: Option<NodeId>) -> (Clip, Vec<NodeId>) {
    let mut clip = Clip { low: None, high: None, out: from };
    let mut nodes = Vec::new();
    while let Some(user) = next.filter(|user| fused.is_single(*user)) {
        let op = fused.graph.node(user).op;
        if op.weight().is_none_or(|weight| fused.graph.weight(weight).dims != [1]) {
            break;
        }
        match op {
            Op::AtLeast { weight } if clip.low.is_none() && clip.high.is_none() => clip.low = Some(weight),
            Op::AtMost { weight } if clip.high.is_none() => clip.high = Some(weight),
            _ => break,
        }
        clip.out = user;
        nodes.push(user);
        next = fused.sole_user(user);
    }
    (clip, nodes)
}

/// `gelu(gate) * up` between products of which one is clipped.
fn geglu(fused: &Fused, gelu: NodeId) -> Option<Result<(ClippedGeglu, Vec<NodeId>), &'static str>> {
    let graph = &fused.graph;
    let is_product = |id: NodeId| matches!(graph.node(id).op, Op::MatMul { .. });
    let mul = fused.sole_user(gelu).filter(|user| graph.node(*user).op == Op::Mul && fused.is_single(*user))?;
    let beside = *graph.node(mul).inputs.iter().find(|input| **input != gelu)?;
    let (gate_clip, gate, gate_nodes) = within(fused, graph.node(gelu).inputs[0]);
    let (up_clip, up, up_nodes) = within(fused, beside);
    let (exit, exit_nodes) = absorbed(fused, mul);
    let clipped = !gate_nodes.is_empty() || !up_nodes.is_empty() || !exit_nodes.is_empty();
    if !clipped || !is_product(gate) || !is_product(up) || !fused.is_single(gelu) {
        return None;
    }
    if fused.sole_user(gate).is_none() || fused.sole_user(up).is_none() {
        return Some(Err("gate or up is read by others too"));
    }
    let nodes = [gate_nodes, up_nodes, vec![gelu, mul], exit_nodes].concat();
    Some(Ok((ClippedGeglu { gate, up, gate_clip, up_clip, exit }, nodes)))
}

/// A norm next to a clipped product.
fn norm(fused: &Fused, id: NodeId) -> Option<(ClippedNorm, Vec<NodeId>)> {
    let group = fused.group(id);
    let Kind::Norm(mut norm) = group.kind else { return None };
    let plain = norm.residual.is_none_or(|residual| residual.branch.is_none() && residual.scale.is_none());
    let weighted = norm.next.is_none_or(|(_, weight)| weight.is_some());
    if !plain || !weighted {
        return None;
    }
    let mut nodes = group.nodes.clone();
    let mut entry = Clip { low: None, high: None, out: norm.input };
    if norm.residual.is_some() {
        let (clip, before, bounds) = within(fused, norm.input);
        (entry, norm.input) = (clip, before);
        nodes.extend(bounds);
    }
    let mut exits = Vec::new();
    if let Some((next, _)) = norm.next {
        let users: Vec<NodeId> = fused.users(next).to_vec();
        let followed: Vec<(Clip, Vec<NodeId>)> = users
            .iter()
            .map(|user| follow(fused, next, Some(*user)))
            .filter(|(_, bounds)| !bounds.is_empty())
            .collect();
        if followed.len() == users.len() && users.len() <= MOST_EXITS && !fused.graph.is_result(next) {
            for (clip, bounds) in followed {
                exits.push(clip);
                nodes.extend(bounds);
            }
        } else if !followed.is_empty() {
            return None;
        } else {
            exits.push(Clip { low: None, high: None, out: next });
        }
    }
    let bounded = |clip: &Clip| clip.low.is_some() || clip.high.is_some();
    (bounded(&entry) || exits.iter().any(bounded)).then_some((ClippedNorm { norm, entry, exits }, nodes))
}

/// Makes one of the products that read the same value within different bounds, where they are of one type and size.
fn join(fused: &mut Fused, log: &mut Log, mut exits: Vec<NodeId>) {
    let matmuls: Vec<NodeId> = exits.iter().filter_map(|exit| fused.sole_user(*exit)).collect();
    let graph = &fused.graph;
    let weight = |id: &NodeId| match graph.node(*id).op {
        Op::MatMul { weight } if fused.is_single(*id) && !graph.is_result(*id) => Some(graph.weight(weight)),
        _ => None,
    };
    let Some(first) = matmuls.first().and_then(weight) else { return };
    let alike = |id: &NodeId| weight(id).is_some_and(|w| w.dtype == first.dtype && w.dims == first.dims);
    if matmuls.len() != exits.len() || exits.len() < 2 || !matmuls.iter().all(alike) {
        return;
    }
    let input = exits.remove(0);
    let product = Product { others: exits, ..Product::new(input, matmuls.clone()) };
    log.merge(fused, Kind::Product(product), &matmuls);
}
