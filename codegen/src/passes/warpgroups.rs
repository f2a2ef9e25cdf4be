//! Products of many rows by warpgroups: where the GPU has wgmma and the shape fits. They dequantise weights as they
//! read them; those that are bf16 are read as they are.

use gemma4c_dsl::ElementType;
use gemma4c_graph::passes::Log;
use gemma4c_graph::{Graph, Group, Kind, NodeId, Product, WeightId};

use super::readers::wanted_forms;
use super::schedule::{Abilities, Pass, Schedule, experts_of, product_of};
use crate::kernels::outputs::Outputs;
use crate::kernels::product::warpgroups::{Source, WgmmaProduct, WgmmaTile};
use crate::target::Target;

pub const PASS: Pass = Pass {
    name: "warpgroups",
    about: "prefill: products by warpgroups, which dequantise weights as they read them",
    required: false,
    asked_for: false,
    run,
};

/// What warpgroups are refused at where there are none at all.
pub const EVERY_PRODUCT: &str = "all products of many rows";
pub const NO_WARPGROUPS: &str = "the GPU has no warpgroup products";
pub const NO_FIT: &str = "its sizes are no multiples of what they take";

fn run(schedule: &mut Schedule, can: &Abilities, log: &mut Log) {
    if can.exact {
        return;
    }
    let mut products = products_of_many_rows(schedule);
    let of_tower = schedule.soft_rows.is_some();
    if of_tower {
        // Whether gate and up are joined depends on whether the product that reads them is one by warpgroups.
        products.reverse();
    }
    for (group, first) in products {
        if !can.target.arch.has_wgmma() {
            if log.covered.is_empty() {
                log.refuse_group(vec![EVERY_PRODUCT.into()], NO_WARPGROUPS);
            }
            schedule.notes.extend(group.last().map(|last| (last, NO_WARPGROUPS.to_owned())));
            continue;
        }
        let dtype = schedule.graph().node(first).op.weight().map(|weight| schedule.graph().weight(weight).dtype);
        // A tower is small compared with its text, and its rows are many: it has bf16 copies, whatever its types.
        let source = if of_tower { Some(Source::Copy) } else { dtype.and_then(Source::without_copy) };
        let source = source.ok_or("weights of f32 are not converted by products");
        match source.and_then(|source| fits(schedule, can, &group, source).map(|()| source)) {
            Ok(source) => {
                schedule.mark(log, &group.nodes);
                schedule.sources.insert(first, source);
            }
            Err(why) => schedule.refuse(log, &group, why),
        }
    }
}

/// The products of many rows, each with its first matrix.
pub fn products_of_many_rows(schedule: &Schedule) -> Vec<(Group, NodeId)> {
    let of = |group: Group| {
        let of_experts = matches!(group.kind, Kind::ExpertGateUp { .. } | Kind::ExpertDown { .. });
        let first = match product_of(schedule.graph(), &group) {
            Some(product) => product.matmuls[0],
            None if of_experts => group.nodes[0],
            None => return None,
        };
        (!schedule.is_one_row(&group)).then_some((group, first))
    };
    schedule.fused.ordered().into_iter().filter_map(of).collect()
}

/// Whether warpgroups can multiply by these weights; or why not.
pub fn fits(schedule: &Schedule, can: &Abilities, group: &Group, source: Source) -> Result<(), &'static str> {
    let graph = schedule.graph();
    let tile = match &group.kind {
        Kind::ExpertGateUp { weight, routing, out, .. } => {
            let gated = wanted_forms(schedule, can, *out) == Outputs::BF16;
            grouped(graph, *weight, *routing, schedule.rows, true, source, &can.target).filter(|_| gated).map(|_| ())
        }
        Kind::ExpertDown { weight, routing, .. } => {
            grouped(graph, *weight, *routing, schedule.rows, false, source, &can.target).map(|_| ())
        }
        _ => {
            let product = product_of(graph, group).ok_or(NO_FIT)?;
            let gated =
                product.geglu && group.last().is_some_and(|last| wanted_forms(schedule, can, last) == Outputs::BF16);
            dense(graph, &product, gated, schedule.rows_of(group), source, &can.target).map(|_| ())
        }
    };
    tile.ok_or(NO_FIT)
}

/// The kernel of a product, its tile, and the values of a row that it stores.
pub fn dense(
    graph: &Graph,
    of: &Product,
    gated: bool,
    rows: u32,
    source: Source,
    target: &Target,
) -> Option<(WgmmaProduct, WgmmaTile, u32)> {
    let weight = |id: &NodeId| graph.node(*id).op.weight().map(|weight| graph.weight(weight));
    let all: u64 = of.matmuls.iter().filter_map(weight).map(|weight| weight.dim(1)).sum();
    let k = weight(&of.matmuls[0])?.dim(0) as u32;
    let out = if gated { ElementType::BF16 } else { ElementType::F32 };
    let kind = WgmmaProduct {
        geglu: gated,
        part_columns: if of.others.is_empty() { 0 } else { all as u32 / of.matmuls.len() as u32 },
        ragged: !k.is_multiple_of(64),
        ..WgmmaProduct::plain(out, source)
    };
    let stored = if gated { all as u32 / 2 } else { all as u32 };
    let tile = kind.choose(rows, stored, k, target)?;
    Some((kind, tile, stored))
}

/// The most pairs of an expert, on average, for which a group has 32 rows, and 64: beyond, 128 share what is read.
const MOST_FOR_32: u32 = 36;
const MOST_FOR_64: u32 = 48;
/// The same of warp-specialised products, which have tiles of 64 and 192: with 8 pairs an expert it was slower than
/// groups of 32, with 32 faster.
const MOST_FOR_32_SPECIALISED: u32 = 16;
const MOST_SPECIALISED: u32 = 192;

/// Rows of a group of sorted pairs. A product over a bf16 copy has no tile of 32.
pub fn height(pairs: u32, experts: u32, source: Source) -> u32 {
    let (most_for_32, most) = match source {
        Source::Copy => (0, 128),
        _ if source.is_fed() => (MOST_FOR_32_SPECIALISED, MOST_SPECIALISED),
        _ => (MOST_FOR_32, 128),
    };
    if pairs <= experts * most_for_32 {
        32
    } else if pairs <= experts * MOST_FOR_64 {
        64
    } else {
        most
    }
}

/// The same of sorted rows by experts: gate and up joined, or a plain product whose rows are one a pair.
pub fn grouped(
    graph: &Graph,
    weight: WeightId,
    routing: NodeId,
    rows: u32,
    geglu: bool,
    source: Source,
    target: &Target,
) -> Option<(WgmmaProduct, WgmmaTile, u32)> {
    let (experts, top) = experts_of(graph, routing);
    let (pairs, w) = (rows * top, graph.weight(weight));
    let (k, all) = (w.dim(0) as u32, w.dim(1) as u32);
    let outputs = if geglu { all / 2 } else { all };
    let (out, share) = if geglu { (ElementType::BF16, top) } else { (ElementType::F32, 1) };
    let kind = WgmmaProduct { geglu, pairs: share, ..WgmmaProduct::plain(out, source) };
    let height = height(pairs, experts, source);
    // An expert's last group is half full, on average.
    let groups = pairs / height + experts.min(pairs).div_ceil(2);
    let tile = kind.choose_grouped(groups, height, outputs, k, target)?;
    Some((kind, tile, outputs))
}
