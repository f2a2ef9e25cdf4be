//! How every value lies in memory: f32, bf16 or int8 codes with scales. A producer leaves what its readers want, as far as its kernel
//! can; what is left of their wishes is converted by a launch of its own.
//!
//! A wish is of two kinds. Products of many rows take bf16 and nothing else. Products of one row take int8 where somebody has
//! left it, and round floats themselves where nobody has, so that they are never a reason for a conversion.

use std::collections::HashMap;

use gemma4c_blocks::DType;
use gemma4c_graph::passes::Log;
use gemma4c_graph::{Clip, ClippedGeglu, ClippedNorm, Form, Graph, Group, Kind, NodeId, Op, Product};
use gemma4c_plan::cuda::KvType;

use super::panels::leaves_panels;
use super::{Abilities, Pass, Schedule, multiplies_exactly, product_of};
use crate::kernels::matvec::formats::format;
use crate::kernels::matvec::shape::whole_groups_pay;
use crate::kernels::outputs::Outputs;

pub const PASS: Pass = Pass {
    name: "forms",
    about: "a value is left in the forms that its readers want, and converted where its producer cannot",
    required: true,
    asked_for: false,
    run,
};

fn run(schedule: &mut Schedule, can: &Abilities, log: &mut Log) {
    let mut forms = HashMap::new();
    for group in schedule.fused.ordered() {
        for (node, outputs) in left_by(schedule, can, &group) {
            if outputs != Outputs::FLOATS {
                schedule.mark(log, &[node]);
                forms.insert(node, outputs);
            }
        }
    }
    schedule.forms = forms;
    let mut groups = schedule.fused.ordered();
    let mut helpers: Vec<Group> = Vec::new();
    for group in &groups {
        let demanded = demanded_by(schedule, can, group);
        let through_floats = |(value, form): &(NodeId, Form)| !is_there(schedule, *value, *form);
        let first = demanded.iter().filter(|of| through_floats(of)).map(|(value, _)| (*value, Form::F32));
        for (value, form) in first.chain(demanded.iter().copied()) {
            let kind = Kind::Convert { value, form };
            if !is_there(schedule, value, form) && !helpers.iter().any(|known| known.kind == kind) {
                let what = if form == Form::F32 { "rows without a gap" } else { "bf16" };
                let name = schedule.graph().full_name(value);
                log.refuse_group(vec![name], format!("its reader takes {what}, which its producer does not leave"));
                helpers.push(Group::new(kind, Vec::new()));
            }
        }
    }
    groups.extend(helpers);
    schedule.fused.regroup(groups);
}

/// Whether a value is the residual itself or an embedding: no norm's weights have damped its massive channels, which would
/// take the whole scale of an int8 group. Products of such a value quantise it themselves, with fine codes.
pub fn is_unbounded(graph: &Graph, node: NodeId) -> bool {
    let node = graph.node(node);
    match node.op {
        Op::Add | Op::Gather { .. } | Op::PlaceSoft | Op::Concat => true,
        Op::Scale { .. } | Op::MulWeight { .. } | Op::TakeAsked | Op::Columns { .. } => {
            is_unbounded(graph, node.inputs[0])
        }
        _ => false,
    }
}

/// The forms in which the readers of a node want it.
pub fn wanted(schedule: &Schedule, can: &Abilities, node: NodeId) -> Outputs {
    let graph = schedule.graph();
    let unbounded = is_unbounded(graph, node);
    let dtype = |id: NodeId| graph.node(id).op.weight().map(|weight| graph.weight(weight).dtype);
    let mut all = Outputs::NONE;
    for user in schedule.fused.users(node) {
        let group = schedule.fused.group(*user);
        if group.computes(node) {
            continue;
        }
        let one_row = schedule.is_one_row(group);
        let of_product = |dtype: Option<DType>| match (can.exact, one_row, dtype.is_some_and(|d| format(d).integer)) {
            (true, ..) => Outputs::FLOATS,
            (_, true, true) if !unbounded => Outputs::INT8,
            (_, true, _) => Outputs::FLOATS,
            (_, false, _) => Outputs::BF16,
        };
        all = all.and(match &group.kind {
            Kind::ExpertGateUp { weight, input, dense, .. }
                if *input == node || dense.as_ref().is_some_and(|dense| dense.product.input == node) =>
            {
                of_product(Some(graph.weight(*weight).dtype))
            }
            // One row's hidden values are rounded where they are read, those of several where they are made.
            Kind::ExpertDown { .. } if one_row && !schedule.is_decoded_together(group) => Outputs::FLOATS,
            Kind::ExpertDown { weight, dense: Some(dense), .. } if dense.product.input == node => {
                of_product(Some(graph.weight(*weight).dtype))
            }
            Kind::ExpertDown { weight, input, .. } | Kind::ExpertProduct { weight, input, .. } if *input == node => {
                of_product(Some(graph.weight(*weight).dtype))
            }
            Kind::ExpertDown { .. } => Outputs::FLOATS,
            _ => match product_of(graph, group) {
                Some(product) if !one_row && multiplies_exactly(schedule, can, &product) => Outputs::FLOATS,
                Some(product) if product.inputs().any(|input| input == node) && !is_operand(&product, node) => {
                    of_product(dtype(product.matmuls[0]))
                }
                _ => Outputs::FLOATS,
            },
        });
    }
    if all == Outputs::NONE { Outputs::FLOATS } else { all }
}

fn is_operand(product: &Product, node: NodeId) -> bool {
    product.epilogue.iter().any(|epilogue| epilogue.operand == Some(node))
}

/// What the group's kernel leaves of each value that others may want in another form than f32.
fn left_by(schedule: &Schedule, can: &Abilities, group: &Group) -> Vec<(NodeId, Outputs)> {
    let wanted = |node: NodeId| wanted(schedule, can, node);
    let alone = |outputs: Outputs, form: Outputs| if outputs == form { form } else { Outputs::FLOATS };
    match &group.kind {
        Kind::Norm(norm) => match (norm.next, norm.residual) {
            (Some((next, _)), _) => vec![(next, wanted(next))],
            // The residual itself is left as floats anyway.
            (None, Some(residual)) => vec![(residual.sum, wanted(residual.sum).and(Outputs::FLOATS))],
            (None, None) => Vec::new(),
        },
        Kind::MixtureEntry { norm, expert_norm, .. } => {
            let both = norm.next.map_or(Outputs::NONE, |(dense, _)| wanted(dense)).and(wanted(expert_norm.0));
            norm.next.iter().map(|(dense, _)| *dense).chain([expert_norm.0]).map(|node| (node, both)).collect()
        }
        Kind::AttentionStep { attention, .. } | Kind::AttentionMerge { attention } => {
            vec![(*attention, alone(wanted(*attention), Outputs::INT8))]
        }
        Kind::Single
            if matches!(schedule.graph().node(group.nodes[0]).op, Op::Attention { .. } | Op::AttentionAhead { .. }) =>
        {
            // The plain kernel, which f32 keys take, leaves floats alone.
            let form =
                if can.kv == KvType::F32 { Outputs::FLOATS } else { alone(wanted(group.nodes[0]), Outputs::BF16) };
            vec![(group.nodes[0], form)]
        }
        // Without another reader the pass `cut` would have taken them apart.
        Kind::ClippedNorm(of) => of.exits.iter().map(|exit| (exit.out, Outputs::BF16)).collect(),
        Kind::ClippedGeglu(ClippedGeglu { exit: Clip { out, .. }, .. })
        | Kind::PatchAttention { clip: Clip { out, .. }, .. } => vec![(*out, Outputs::BF16)],
        Kind::Geglu { .. } => group.last().map(|last| (last, alone(wanted(last), Outputs::BF16))).into_iter().collect(),
        Kind::ExpertGateUp { out, dense, .. } if schedule.is_decoded_together(group) => {
            // Both halves are left alike.
            let all: Vec<NodeId> = [*out].into_iter().chain(dense.as_ref().map(|dense| dense.out)).collect();
            let int8 = all.iter().all(|node| wanted(*node) == Outputs::INT8);
            all.into_iter().map(|node| (node, if int8 { Outputs::INT8 } else { Outputs::FLOATS })).collect()
        }
        Kind::Product(product) if product.geglu && schedule.is_one_row(group) => {
            // Several rows that are not left as panels are rounded by the launch before their reader.
            let int8 = match schedule.rows_of(group) {
                1 => leaves_int8(schedule, can, group, product),
                _ => leaves_panels(schedule, can, group, product),
            };
            let last = group.last().filter(|_| int8);
            last.map(|last| (last, Outputs::INT8)).into_iter().collect()
        }
        Kind::Product(product) if product.geglu => group.last().map(|last| (last, Outputs::BF16)).into_iter().collect(),
        // Gate and up are rounded before their gate where nothing else reads them: twice their bytes would go to memory and back.
        Kind::Product(product) if product.is_plain() && schedule.source(product.matmuls[0]).is_some() => {
            let is_gated = |user: &NodeId| matches!(schedule.fused.group(*user).kind, Kind::ClippedGeglu(_));
            let all = || product.matmuls.iter().flat_map(|id| schedule.fused.users(*id));
            let forms = (all().next().is_some() && all().all(is_gated)).then_some(Outputs::BF16);
            forms.map_or(Vec::new(), |form| product.matmuls.iter().map(|id| (*id, form)).collect())
        }
        Kind::ExpertProduct { geglu: true, .. } => group.last().map(|last| (last, Outputs::BF16)).into_iter().collect(),
        _ => Vec::new(),
    }
}

/// Whether gate and up of one row leave int8: where their reader wants that and it pays.
pub fn leaves_int8(schedule: &Schedule, can: &Abilities, group: &Group, product: &Product) -> bool {
    let graph = schedule.graph();
    let weight = |id: &NodeId| graph.node(*id).op.weight().and_then(|weight| graph.weight(weight).bytes());
    let bytes = product.matmuls.iter().filter_map(weight).sum();
    let pays = |last: NodeId| whole_groups_pay(graph.node(last).ty.width, bytes, &can.target);
    let last = group.last().filter(|last| product.geglu && !can.exact && pays(*last));
    last.is_some_and(|last| wanted(schedule, can, last) == Outputs::INT8)
}

/// Whether the rows of a value follow each other without a gap, or there is one row.
fn has_whole_rows(schedule: &Schedule, node: NodeId) -> bool {
    let owner = schedule.fused.group(node);
    let parts = match &owner.kind {
        Kind::Product(product) if product.is_plain() => product.matmuls.len(),
        Kind::ExpertProduct { matmuls, geglu: false, .. } => matmuls.len(),
        // Patches are a value of their own; other views are parts of a wider one.
        Kind::View if matches!(schedule.graph().node(node).op, Op::Patches { .. }) => 1,
        Kind::View => 2,
        _ => 1,
    };
    parts == 1 || schedule.rows_of(owner) == 1
}

fn is_there(schedule: &Schedule, node: NodeId, form: Form) -> bool {
    let left = schedule.forms(node);
    match form {
        Form::F32 => left.floats && has_whole_rows(schedule, node),
        Form::BF16 => left.bf16,
        Form::Int8 => left.int8,
    }
}

/// The forms that a group's kernel cannot do without.
fn demanded_by(schedule: &Schedule, can: &Abilities, group: &Group) -> Vec<(NodeId, Form)> {
    let graph = schedule.graph();
    let floats = |nodes: Vec<NodeId>| nodes.into_iter().map(|node| (node, Form::F32)).collect();
    let of_single = || graph.node(group.nodes[0]);
    if matches!(group.kind, Kind::Single) && of_single().op == Op::TakeAsked {
        return floats(of_single().inputs.clone());
    }
    if schedule.rows_of(group) == 1 {
        return Vec::new();
    }
    match &group.kind {
        // Products of decoded rows take what there is.
        _ if product_of(graph, group).is_some() && schedule.decodes && !can.exact => Vec::new(),
        _ if product_of(graph, group).is_some() => {
            let form = |product: &Product| match multiplies_exactly(schedule, can, product) {
                true => Form::F32,
                false => Form::BF16,
            };
            let inputs = |product: Product| product.inputs().map(|input| (input, form(&product))).collect();
            product_of(graph, group).map_or(Vec::new(), inputs)
        }
        Kind::ExpertProduct { input, .. } => vec![(*input, Form::BF16)],
        Kind::ExpertGateUp { weight, input, dense, .. } | Kind::ExpertDown { weight, input, dense, .. } => {
            let form = if format(graph.weight(*weight).dtype).integer { Form::Int8 } else { Form::F32 };
            let inputs = [*input].into_iter().chain(dense.as_ref().map(|dense| dense.product.input));
            inputs.map(|input| (input, form)).collect()
        }
        Kind::Norm(norm) | Kind::MixtureEntry { norm, .. } => {
            let residual = norm.residual.map(|residual| residual.before);
            let branch = norm.residual.and_then(|residual| residual.branch).map(|branch| branch.other);
            floats([norm.input].into_iter().chain(residual).chain(branch).collect())
        }
        Kind::ClippedNorm(ClippedNorm { norm, .. }) => {
            floats([norm.input].into_iter().chain(norm.residual.map(|residual| residual.before)).collect())
        }
        Kind::Router(router) => floats(vec![router.input]),
        Kind::PerLayerInputs(inputs) => floats(vec![inputs.projected]),
        Kind::Single => match of_single().op {
            Op::RmsNorm { .. }
            | Op::Rope { .. }
            | Op::Route { .. }
            | Op::KvAppend { .. }
            | Op::PlaceSoft
            | Op::SubMean { .. }
            | Op::GridMean { .. }
            | Op::GridRope { .. }
            | Op::HalvingConv { .. }
            | Op::CausalConv { .. }
            | Op::NearAttention { .. }
            | Op::FullAttention { .. } => floats(of_single().inputs.clone()),
            Op::Attention { .. } | Op::AttentionAhead { .. } | Op::ExpertMatMul { .. } | Op::ExpertSum { .. } => {
                floats(vec![of_single().inputs[0]])
            }
            Op::Add => floats(vec![of_single().inputs[1]]),
            _ => Vec::new(),
        },
        _ => Vec::new(),
    }
}
