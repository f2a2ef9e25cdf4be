//! Products of many rows by warpgroups, over bf16 copies of the weights: where the GPU has wgmma, memory has room and the shape fits.

use gemma4c_dsl::ElementType;
use gemma4c_graph::passes::Log;
use gemma4c_graph::{Graph, Group, Kind, NodeId, Product, WeightId};

use super::forms::wanted;
use super::{Abilities, Pass, Schedule, experts_of, product_of};
use crate::kernels::outputs::Outputs;
use crate::kernels::product::wgmma::{WgmmaProduct, WgmmaTile};
use crate::target::Target;

pub const PASS: Pass = Pass {
    name: "bf16-copies",
    about: "prefill: bf16 copies of the weights for the product by warpgroups, where memory allows",
    required: false,
    asked_for: false,
    run,
};

/// What copies are refused at where there are none at all.
const EVERY_PRODUCT: &str = "all products of many rows";
const NO_FIT: &str = "its sizes are no multiples of what they take";

fn run(schedule: &mut Schedule, can: &Abilities, log: &mut Log) {
    if can.exact {
        return;
    }
    for group in schedule.fused.ordered() {
        if schedule.is_one_row(&group) {
            continue;
        }
        let of_experts = matches!(group.kind, Kind::ExpertGateUp { .. } | Kind::ExpertDown { .. });
        let first = match product_of(schedule.graph(), &group) {
            Some(product) => product.matmuls[0],
            None if of_experts => group.nodes[0],
            None => continue,
        };
        match fits(schedule, can, &group) {
            Ok(()) => {
                schedule.mark(log, &group.nodes);
                schedule.copied.insert(first);
            }
            Err(why) if why == NO_FIT => schedule.refuse(log, &group, why),
            Err(why) => {
                // One refusal for all; where no product has them, experts are not another.
                let all = if of_experts && can.wgmma.is_ok() { "all experts of many rows" } else { EVERY_PRODUCT };
                if !log.covered.iter().any(|known| known == all) {
                    log.refuse_group(vec![all.into()], why);
                }
                schedule.notes.extend(group.last().map(|last| (last, why.to_owned())));
            }
        }
    }
}

fn fits(schedule: &Schedule, can: &Abilities, group: &Group) -> Result<(), &'static str> {
    let graph = schedule.graph();
    let tile = match &group.kind {
        Kind::ExpertGateUp { weight, routing, out, .. } => {
            can.wgmma_experts?;
            let gated = wanted(schedule, can, *out) == Outputs::BF16;
            grouped(graph, *weight, *routing, schedule.rows, true, &can.target).filter(|_| gated).map(|_| ())
        }
        Kind::ExpertDown { weight, routing, .. } => {
            can.wgmma_experts?;
            grouped(graph, *weight, *routing, schedule.rows, false, &can.target).map(|_| ())
        }
        _ => {
            can.wgmma?;
            let product = product_of(graph, group).ok_or(NO_FIT)?;
            let gated = product.geglu && group.last().is_some_and(|last| wanted(schedule, can, last) == Outputs::BF16);
            dense(graph, &product, gated, schedule.rows, &can.target).map(|_| ())
        }
    };
    tile.ok_or(NO_FIT)
}

/// The kernel of a product over a copy, its tile, and the values of a row that it stores.
pub fn dense(
    graph: &Graph,
    of: &Product,
    gated: bool,
    rows: u32,
    target: &Target,
) -> Option<(WgmmaProduct, WgmmaTile, u32)> {
    let weight = |id: &NodeId| graph.node(*id).op.weight().map(|weight| graph.weight(weight));
    let all: u64 = of.matmuls.iter().filter_map(weight).map(|weight| weight.dim(1)).sum();
    let k = weight(&of.matmuls[0])?.dim(0) as u32;
    let kind = WgmmaProduct {
        out: if gated { ElementType::BF16 } else { ElementType::F32 },
        geglu: gated,
        pairs: 0,
        epilogue: Vec::new(),
    };
    let stored = if gated { all as u32 / 2 } else { all as u32 };
    let tile = kind.choose(rows, stored, k, target)?;
    Some((kind, tile, stored))
}

/// The most pairs of an expert, on average, for which a tile is of one warpgroup: beyond, two share what they read.
const MOST_FOR_ONE_WARPGROUP: u32 = 48;

/// Rows of a group of sorted pairs.
pub fn height(pairs: u32, experts: u32) -> u32 {
    if pairs <= experts * MOST_FOR_ONE_WARPGROUP { 64 } else { 128 }
}

/// The same of sorted rows by experts: gate and up joined, or a plain product whose rows are one a pair.
pub fn grouped(
    graph: &Graph,
    weight: WeightId,
    routing: NodeId,
    rows: u32,
    geglu: bool,
    target: &Target,
) -> Option<(WgmmaProduct, WgmmaTile, u32)> {
    let (experts, top) = experts_of(graph, routing);
    let (pairs, w) = (rows * top, graph.weight(weight));
    let (k, all) = (w.dim(0) as u32, w.dim(1) as u32);
    let outputs = if geglu { all / 2 } else { all };
    let (out, share) = if geglu { (ElementType::BF16, top) } else { (ElementType::F32, 1) };
    let kind = WgmmaProduct { out, geglu, pairs: share, epilogue: Vec::new() };
    let height = height(pairs, experts);
    // An expert's last group is half full, on average.
    let groups = pairs / height + experts.min(pairs).div_ceil(2);
    let tile = kind.choose_grouped(groups, height, outputs, k, target)?;
    Some((kind, tile, outputs))
}
