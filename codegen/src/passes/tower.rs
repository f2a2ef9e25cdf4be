//! Which groups of a tower a launch computes: what `cut` asks.

use gemma4c_graph::{ClippedNorm, Group, Kind, NodeId, Norm, Op};

use super::forms::wanted;
use super::{Abilities, Schedule};
use crate::kernels::outputs::Outputs;
use crate::kernels::tower::clipped::WIDEST;
use crate::kernels::tower::heads::HeadTiles;

/// Whether the readers of a value take bf16 and nothing else.
pub fn is_rounded(schedule: &Schedule, can: &Abilities, node: NodeId) -> bool {
    !can.exact && wanted(schedule, can, node) == Outputs::BF16
}

/// Whether a norm between clipped products leaves a bf16 copy for each of them.
pub fn leaves_stack(schedule: &Schedule, can: &Abilities, of: &ClippedNorm) -> bool {
    let width = schedule.graph().node(of.norm.input).ty.width;
    width.is_multiple_of(8)
        && width <= WIDEST
        && of.exits.iter().all(|exit| is_rounded(schedule, can, exit.out))
        && !can.exact
}

/// The norm as any other, and its bounds one by one.
pub fn cut_norm(schedule: &Schedule, of: &ClippedNorm, group: &Group) -> Vec<Group> {
    let norm = Norm { input: of.entry.out, ..of.norm };
    let is_bound = |id: &NodeId| matches!(schedule.graph().node(*id).op, Op::AtLeast { .. } | Op::AtMost { .. });
    let (bounds, nodes): (Vec<NodeId>, Vec<NodeId>) = group.nodes.iter().partition(|id| is_bound(id));
    let bounds = bounds.into_iter().map(|id| Group::new(Kind::Single, vec![id]));
    std::iter::once(Group::new(Kind::Norm(norm), nodes)).chain(bounds).collect()
}

/// Whether heads of patches and the attention that reads them are made by warpgroups. `queries` is what attention reads.
pub fn by_warpgroups(schedule: &Schedule, can: &Abilities, queries: NodeId) -> bool {
    let graph = schedule.graph();
    let reader = schedule.fused.users(queries).first().map(|attention| (*attention, schedule.fused.group(*attention)));
    let Some((attention, Kind::PatchAttention { clip, .. })) = reader.map(|(id, group)| (id, &group.kind)) else {
        return false;
    };
    let Op::FullAttention { heads } = graph.node(attention).op else { return false };
    let fits = HeadTiles::of(graph.node(attention).ty.width / heads).is_some();
    can.target.arch.has_wgmma() && fits && is_rounded(schedule, can, clip.out)
}
