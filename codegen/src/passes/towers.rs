//! Which groups of a tower are one launch: what is between clipped products, and heads and attention of patches by
//! warpgroups. The pass `cut` takes the others apart.

use gemma4c_graph::passes::Log;
use gemma4c_graph::{ClippedNorm, Kind, NodeId, Op};

use super::readers::wanted_forms;
use super::schedule::{Abilities, Pass, Schedule};
use super::warpgroups::NO_WARPGROUPS;
use crate::kernels::outputs::Outputs;
use crate::kernels::tower::clipped::WIDEST;
use crate::kernels::tower::heads::HeadTiles;

pub const PASS: Pass = Pass {
    name: "towers",
    about: "pictures and sound: what is between clipped products in one launch; heads and attention of patches by warpgroups",
    required: false,
    asked_for: false,
    run,
};

fn run(schedule: &mut Schedule, can: &Abilities, log: &mut Log) {
    for group in schedule.fused.ordered() {
        let fits = match &group.kind {
            Kind::ClippedNorm(of) => writes_stack(schedule, can, of),
            Kind::ClippedGeglu(of) => takes_bf16(schedule, can, of.exit.out),
            Kind::PatchHeads(of) => by_warpgroups(schedule, can, of.out[0]),
            Kind::PatchAttention { attention, .. } => {
                by_warpgroups(schedule, can, schedule.graph().node(*attention).inputs[0])
            }
            _ => continue,
        };
        match fits {
            Ok(()) => {
                schedule.mark(log, &group.nodes);
                schedule.tower_launches.insert(group.anchor());
            }
            Err(why) => schedule.refuse(log, &group, why),
        }
    }
}

/// Whether the readers of a value take bf16 and nothing else; or why not.
fn takes_bf16(schedule: &Schedule, can: &Abilities, node: NodeId) -> Result<(), &'static str> {
    match (can.exact, wanted_forms(schedule, can, node) == Outputs::BF16) {
        (true, _) => Err("nothing may be rounded"),
        (false, false) => Err("its readers do not all take bf16"),
        (false, true) => Ok(()),
    }
}

/// Whether a norm between clipped products writes a bf16 copy for each of them, one after the other; or why not.
fn writes_stack(schedule: &Schedule, can: &Abilities, of: &ClippedNorm) -> Result<(), &'static str> {
    let width = schedule.graph().node(of.norm.input).ty.width;
    if can.exact {
        return Err("nothing may be rounded");
    }
    if !width.is_multiple_of(8) || width > WIDEST {
        return Err("no kernel takes rows of its width");
    }
    of.exits.iter().try_for_each(|exit| takes_bf16(schedule, can, exit.out))
}

/// Whether heads of patches and the attention that reads them are computed by warpgroups; or why not. `queries` is what
/// attention reads.
fn by_warpgroups(schedule: &Schedule, can: &Abilities, queries: NodeId) -> Result<(), &'static str> {
    let graph = schedule.graph();
    let reader = schedule.fused.users(queries).first().map(|attention| (*attention, schedule.fused.group(*attention)));
    let Some((attention, Kind::PatchAttention { clip, .. })) = reader.map(|(id, group)| (id, &group.kind)) else {
        return Err("its queries are not read by an attention of patches within bounds");
    };
    let Op::FullAttention { heads } = graph.node(attention).op else {
        return Err("its attention is not of all patches");
    };
    if !can.target.arch.has_wgmma() {
        return Err(NO_WARPGROUPS);
    }
    if HeadTiles::of(graph.node(attention).ty.width / heads).is_none() {
        return Err("there are no tiles for heads of its width");
    }
    takes_bf16(schedule, can, clip.out)
}
