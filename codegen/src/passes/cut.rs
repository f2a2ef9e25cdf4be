//! Takes groups apart that no kernel of the target computes in one launch, and marks what needs none: after it a group
//! is a launch.

use gemma4c_graph::passes::Log;
use gemma4c_graph::{ClippedNorm, Group, Kind, NodeId, Norm, Op, Product, WeightId};

use super::readers::wanted_forms;
use super::schedule::{Abilities, Pass, Schedule, experts_of, multiplies_exactly};
use super::{gemm, warpgroups};
use crate::kernels::outputs::Outputs;
use crate::kernels::product::Tile;
use crate::kernels::product::warpgroups::Source;

pub const PASS: Pass = Pass {
    name: "cut",
    about: "a group that no kernel computes in one launch becomes several; a value that is part of another needs none",
    required: true,
    asked_for: false,
    run,
};

fn run(schedule: &mut Schedule, can: &Abilities, log: &mut Log) {
    let mut pieces: Vec<Group> = Vec::new();
    for group in schedule.fused.ordered() {
        let cut = cut(schedule, can, &group);
        if cut.len() > 1 {
            schedule.mark(log, &group.nodes);
        }
        for piece in cut {
            let again = piece.nodes.is_empty() && pieces.iter().any(|known| known.kind == piece.kind);
            pieces.extend((!again).then_some(piece));
        }
    }
    pieces.extend(staged_row_stores(schedule, can));
    schedule.fused.regroup(pieces);
}

/// A chunk's keys and values of a sliding layer are in a stage while its rows look at the pages; a helper stores
/// the last of them there.
fn staged_row_stores(schedule: &Schedule, can: &Abilities) -> Vec<Group> {
    let graph = schedule.graph();
    let is_staged = |op: Op| matches!(op, Op::KvAppend { cache } if can.is_staged(graph.cache(cache)));
    let appends = graph.iter().filter(|(_, node)| !schedule.decodes && is_staged(node.op));
    appends.map(|(append, _)| Group::new(Kind::KeepRows { append }, Vec::new())).collect()
}

fn singles(nodes: impl IntoIterator<Item = NodeId>) -> Vec<Group> {
    nodes.into_iter().map(|id| Group::new(Kind::Single, vec![id])).collect()
}

/// The launches of a group, views among them.
fn cut(schedule: &Schedule, can: &Abilities, group: &Group) -> Vec<Group> {
    let one_row = schedule.is_int8_row(group);
    match &group.kind {
        Kind::Single => cut_single(schedule, group),
        Kind::Product(_) | Kind::ExpertGateUp { .. } | Kind::ExpertDown { .. } if can.exact => {
            singles(group.nodes.clone()).iter().flat_map(|single| cut_single(schedule, single)).collect()
        }
        Kind::Product(product) if !one_row && multiplies_exactly(schedule, can, product) => {
            singles(group.nodes.clone()).iter().flat_map(|single| cut_single(schedule, single)).collect()
        }
        Kind::Product(product) if !product.others.is_empty() && !reads_stack(schedule, product) => {
            singles(group.nodes.clone())
        }
        Kind::ClippedNorm(of) if !schedule.is_tower_launch(group) => cut_clipped_norm(schedule, of, group),
        Kind::ClippedGeglu(_) | Kind::PatchHeads(_) | Kind::PatchAttention { .. }
            if !schedule.is_tower_launch(group) =>
        {
            singles(group.nodes.clone())
        }
        Kind::Product(product) if !one_row && !product.is_plain() => cut_product(schedule, can, group, product),
        Kind::ExpertGateUp { weight, input, routing, out, .. } if !one_row => {
            let gated = wanted_forms(schedule, can, *out) == Outputs::BF16;
            let joins = schedule.source(group.nodes[0]).is_some() || schedule.is_gemm(group) && gated;
            cut_experts(schedule, group, (*weight, *input, *routing), joins, |matmuls, after| {
                let (gate, up) = gate_and_up(schedule, *out, matmuls);
                vec![Group::new(Kind::Geglu { gate, up }, after)]
            })
        }
        Kind::ExpertDown { weight, input, routing, .. } if !one_row => {
            cut_experts(schedule, group, (*weight, *input, *routing), false, |_, after| singles(after))
        }
        _ => vec![group.clone()],
    }
}

/// Whether products of one value within several bounds are one launch: by warpgroups, over what the norm before them
/// stacks.
fn reads_stack(schedule: &Schedule, of: &Product) -> bool {
    let owner = schedule.fused.group(of.input);
    match &owner.kind {
        Kind::ClippedNorm(norm) => {
            schedule.source(of.matmuls[0]).is_some()
                && schedule.is_tower_launch(owner)
                && of.inputs().eq(norm.exits.iter().map(|exit| exit.out))
        }
        _ => false,
    }
}

/// The norm as any other, and its bounds one by one.
fn cut_clipped_norm(schedule: &Schedule, of: &ClippedNorm, group: &Group) -> Vec<Group> {
    let norm = Norm { input: of.entry.out, ..of.norm };
    let is_bound = |id: &NodeId| matches!(schedule.graph().node(*id).op, Op::AtLeast { .. } | Op::AtMost { .. });
    let (bounds, nodes): (Vec<NodeId>, Vec<NodeId>) = group.nodes.iter().partition(|id| is_bound(id));
    let bounds = bounds.into_iter().map(|id| Group::new(Kind::Single, vec![id]));
    std::iter::once(Group::new(Kind::Norm(norm), nodes)).chain(bounds).collect()
}

/// The experts of many rows: the pairs are sorted, multiplied, and `rest` makes groups of what follows; nothing does
/// where the product `joins`.
fn cut_experts(
    schedule: &Schedule,
    group: &Group,
    (weight, input, routing): (WeightId, NodeId, NodeId),
    joins: bool,
    rest: impl FnOnce(&[NodeId], Vec<NodeId>) -> Vec<Group>,
) -> Vec<Group> {
    let (matmuls, after): (Vec<NodeId>, Vec<NodeId>) = group.nodes.iter().partition(|id| is_matrix(schedule, **id));
    let height = match schedule.is_gemm(group) {
        true => gemm::height(schedule.rows_of(group), experts_of(schedule.graph(), routing)),
        false => height(schedule, routing, schedule.source(group.nodes[0])),
    };
    let rest = if joins { Vec::new() } else { rest(&matmuls, after) };
    let nodes = if joins { group.nodes.clone() } else { matmuls.clone() };
    let sort = Group::new(Kind::SortPairs { routing, height }, Vec::new());
    let product = Group::new(Kind::ExpertProduct { weight, input, routing, matmuls, geglu: joins, height }, nodes);
    [vec![sort, product], rest].concat()
}

fn is_matrix(schedule: &Schedule, id: NodeId) -> bool {
    matches!(schedule.graph().node(id).op, Op::MatMul { .. } | Op::ExpertMatMul { .. })
}

/// Rows of a tile over sorted pairs, by warpgroups or by warps.
fn height(schedule: &Schedule, routing: NodeId, source: Option<Source>) -> u32 {
    let (experts, top) = experts_of(schedule.graph(), routing);
    let pairs = schedule.rows * top;
    match source {
        Some(source) => warpgroups::height(pairs, experts, source),
        None => Tile::for_groups(pairs, experts).rows,
    }
}

/// Which of two matrices is the input of the GELU of `gelu(gate) * up`.
fn gate_and_up(schedule: &Schedule, out: NodeId, matmuls: &[NodeId]) -> (NodeId, NodeId) {
    let graph = schedule.graph();
    let is_up = |id: &NodeId| graph.node(out).inputs.contains(id);
    let up = matmuls.iter().copied().find(is_up).unwrap_or(matmuls[matmuls.len() - 1]);
    let gate = matmuls.iter().copied().find(|id| *id != up).unwrap_or(matmuls[0]);
    (gate, up)
}

fn cut_single(schedule: &Schedule, group: &Group) -> Vec<Group> {
    let id = group.nodes[0];
    match schedule.graph().node(id).op {
        Op::Tokens | Op::Columns { .. } | Op::Patches { .. } => vec![Group::new(Kind::View, vec![id])],
        Op::Hidden { .. } | Op::BorrowKv { .. } | Op::Concat | Op::Candidates { .. } => {
            vec![Group::new(Kind::View, vec![id])]
        }
        Op::TakeAsked if schedule.decodes => vec![Group::new(Kind::View, vec![id])],
        Op::Attention { .. } | Op::AttentionBefore { .. } if schedule.is_one_row(group) => vec![
            Group::new(Kind::AttentionParts { attention: id }, Vec::new()),
            Group::new(Kind::AttentionMerge { attention: id }, vec![id]),
        ],
        _ => vec![group.clone()],
    }
}

/// A product of many rows: only that by warpgroups joins gate and up, and none has another epilogue.
fn cut_product(schedule: &Schedule, can: &Abilities, group: &Group, of: &Product) -> Vec<Group> {
    let graph = schedule.graph();
    let reads_bf16 = group.last().is_some_and(|last| wanted_forms(schedule, can, last) == Outputs::BF16);
    let joins = schedule.source(of.matmuls[0]).is_some() || schedule.is_gemm(group);
    if of.geglu && reads_bf16 && joins || schedule.is_gemm(group) && !of.geglu {
        return vec![group.clone()];
    }
    let plain = Group::new(Kind::Product(Product::new(of.input, of.matmuls.clone())), of.matmuls.clone());
    let after: Vec<NodeId> = group.nodes.iter().copied().filter(|id| !of.matmuls.contains(id)).collect();
    let (views, rest): (Vec<NodeId>, Vec<NodeId>) =
        after.iter().partition(|id| matches!(graph.node(**id).op, Op::Columns { .. }));
    let views = singles(views).iter().flat_map(|view| cut_single(schedule, view)).collect();
    let geglu = |gate, up| vec![Group::new(Kind::Geglu { gate, up }, rest.clone())];
    let rest = match (&of.epilogue[..], of.geglu) {
        (_, true) => {
            let (gate, up) = gate_and_up(schedule, rest[rest.len() - 1], &of.matmuls);
            geglu(gate, up)
        }
        ([gelu, mul], false) if graph.node(gelu.node).op == Op::Gelu && mul.operand.is_some() => {
            mul.operand.map_or(Vec::new(), |up| geglu(of.matmuls[0], up))
        }
        _ => singles(rest),
    };
    [vec![plain], views, rest].concat()
}
