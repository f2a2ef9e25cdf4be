//! The form of every value in memory: f32, bf16, f16 or int8 codes with scales. A producer writes what its readers
//! want, as far as its kernel can; what a reader cannot do without and its producer does not write is converted by a
//! launch of its own.

use std::collections::HashMap;

use gemma4c_graph::passes::Log;
use gemma4c_graph::{Clip, ClippedGeglu, ClippedNorm, Form, Group, Kind, NodeId, Op, Product};
use gemma4c_plan::cuda::KvType;

use super::readers::{narrows_by_tiles, takes_f16, wanted_forms, weight_of};
use super::schedule::{Abilities, Pass, Schedule, multiplies_exactly, product_of};
use crate::kernels::matvec::formats::format;
use crate::kernels::matvec::shape::whole_groups_pay;
use crate::kernels::outputs::Outputs;

pub const PASS: Pass = Pass {
    name: "forms",
    about: "a value is written in the forms that its readers want, and converted where its producer cannot",
    required: true,
    asked_for: false,
    run,
};

fn run(schedule: &mut Schedule, can: &Abilities, log: &mut Log) {
    let mut forms = HashMap::new();
    for group in schedule.fused.ordered() {
        for (node, outputs) in written_by(schedule, can, &group) {
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
        let required = required_by(schedule, can, group);
        let through_floats = |(value, form): &(NodeId, Form)| !is_written(schedule, *value, *form);
        let first = required.iter().filter(|of| through_floats(of)).map(|(value, _)| (*value, Form::F32));
        for (value, form) in first.chain(required.iter().copied()) {
            let kind = Kind::Convert { value, form };
            if !is_written(schedule, value, form) && !helpers.iter().any(|known| known.kind == kind) {
                let what = if form == Form::F32 { "rows without a gap" } else { "16 bits" };
                let name = schedule.graph().full_name(value);
                log.refuse_group(vec![name], format!("its reader takes {what}, which its producer does not write"));
                helpers.push(Group::new(kind, Vec::new()));
            }
        }
    }
    groups.extend(helpers);
    schedule.fused.regroup(groups);
}

/// The forms that the group's kernel writes of each value that others may want in another form than f32.
fn written_by(schedule: &Schedule, can: &Abilities, group: &Group) -> Vec<(NodeId, Outputs)> {
    let wanted = |node: NodeId| wanted_forms(schedule, can, node);
    let alone = |outputs: Outputs, form: Outputs| if outputs == form { form } else { Outputs::FLOATS };
    match &group.kind {
        Kind::Norm(norm) => match (norm.next, norm.residual) {
            (Some((next, _)), _) => vec![(next, wanted(next))],
            // The residual itself is written as floats anyway.
            (None, Some(residual)) => vec![(residual.sum, wanted(residual.sum).and(Outputs::FLOATS))],
            (None, None) => Vec::new(),
        },
        Kind::MixtureEntry { norm, expert_norm, .. } => {
            let both = norm.next.map_or(Outputs::NONE, |(dense, _)| wanted(dense)).and(wanted(expert_norm.0));
            norm.next.iter().map(|(dense, _)| *dense).chain([expert_norm.0]).map(|node| (node, both)).collect()
        }
        Kind::AttentionStep { attention, .. } | Kind::AttentionMerge { attention } => {
            let wanted = wanted(*attention);
            let merged = matches!(group.kind, Kind::AttentionMerge { .. });
            let halves = !merged && (wanted == Outputs::BF16 || wanted == Outputs::F16);
            let form = if halves { wanted } else { alone(wanted, Outputs::INT8) };
            vec![(*attention, form)]
        }
        Kind::Single
            if matches!(schedule.graph().node(group.nodes[0]).op, Op::Attention { .. } | Op::AttentionAhead { .. }) =>
        {
            // The plain kernel, which f32 keys take, writes floats alone.
            let form =
                if can.kv == KvType::F32 { Outputs::FLOATS } else { alone(wanted(group.nodes[0]), Outputs::BF16) };
            vec![(group.nodes[0], form)]
        }
        // Those that the pass `towers` has not marked were taken apart by `cut`.
        Kind::ClippedNorm(of) => of.exits.iter().map(|exit| (exit.out, Outputs::BF16)).collect(),
        Kind::ClippedGeglu(ClippedGeglu { exit: Clip { out, .. }, .. })
        | Kind::PatchAttention { clip: Clip { out, .. }, .. } => vec![(*out, Outputs::BF16)],
        Kind::Geglu { .. } => group.last().map(|last| (last, alone(wanted(last), Outputs::BF16))).into_iter().collect(),
        Kind::ExpertGateUp { out, dense, .. } if schedule.is_int8_row(group) && schedule.is_decoded_together(group) => {
            // Both halves are written in one form.
            let all: Vec<NodeId> = [*out].into_iter().chain(dense.as_ref().map(|dense| dense.out)).collect();
            let int8 = all.iter().all(|node| wanted(*node) == Outputs::INT8);
            all.into_iter().map(|node| (node, if int8 { Outputs::INT8 } else { Outputs::FLOATS })).collect()
        }
        Kind::Product(product) if product.geglu && schedule.is_int8_row(group) => {
            // Several rows that are not written as activation tiles are quantised by the launch before their reader.
            let int8 = |last: &NodeId| match schedule.rows_of(group) {
                1 => writes_int8(schedule, can, group, product),
                _ => schedule.is_in_tiles(*last),
            };
            group.last().filter(int8).map(|last| (last, Outputs::INT8)).into_iter().collect()
        }
        Kind::Product(product) if schedule.is_gemm(group) && !product.epilogue.is_empty() => {
            group.last().map(|last| (last, alone(wanted(last), Outputs::BF16))).into_iter().collect()
        }
        Kind::Product(product) if product.geglu => group.last().map(|last| (last, Outputs::BF16)).into_iter().collect(),
        // Gate and up are rounded before their gate where nothing else reads them: twice their bytes would go to memory
        // and back.
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

/// Whether gate and up of one row are written as int8: where their reader wants that and it pays.
pub fn writes_int8(schedule: &Schedule, can: &Abilities, group: &Group, product: &Product) -> bool {
    let graph = schedule.graph();
    let weight = |id: &NodeId| graph.node(*id).op.weight().and_then(|weight| graph.weight(weight).bytes());
    let bytes = product.matmuls.iter().filter_map(weight).sum();
    let pays = |last: NodeId| whole_groups_pay(graph.node(last).ty.width, bytes, &can.target);
    let last = group.last().filter(|last| product.geglu && !can.exact && pays(*last));
    last.is_some_and(|last| wanted_forms(schedule, can, last) == Outputs::INT8)
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

fn is_written(schedule: &Schedule, node: NodeId, form: Form) -> bool {
    let written = schedule.forms(node);
    match form {
        Form::F32 => written.floats && has_whole_rows(schedule, node),
        Form::BF16 => written.bf16,
        Form::F16 => written.f16,
        Form::Int8 => written.int8,
    }
}

/// The forms that a group's kernel cannot do without.
fn required_by(schedule: &Schedule, can: &Abilities, group: &Group) -> Vec<(NodeId, Form)> {
    let graph = schedule.graph();
    let floats = |nodes: Vec<NodeId>| nodes.into_iter().map(|node| (node, Form::F32)).collect();
    let of_single = || graph.node(group.nodes[0]);
    if matches!(group.kind, Kind::Single) && of_single().op == Op::TakeAsked {
        return floats(of_single().inputs.clone());
    }
    if schedule.rows_of(group) == 1 && !schedule.in_16_bits {
        return Vec::new();
    }
    match &group.kind {
        // Products of decoded rows take what there is.
        _ if product_of(graph, group).is_some() && schedule.decodes && !can.exact && !schedule.in_16_bits => Vec::new(),
        _ if product_of(graph, group).is_some() => {
            let form = |product: &Product, input: NodeId| match multiplies_exactly(schedule, can, product) {
                true => Form::F32,
                false if takes_f16(schedule, can, group, input, weight_of(graph, product)) => Form::F16,
                false => Form::BF16,
            };
            let inputs = |product: Product| product.inputs().map(|input| (input, form(&product, input))).collect();
            product_of(graph, group).map_or(Vec::new(), inputs)
        }
        Kind::ExpertProduct { weight, input, .. } => {
            let halved = takes_f16(schedule, can, group, *input, Some(*weight));
            vec![(*input, if halved { Form::F16 } else { Form::BF16 })]
        }
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
            Op::Narrow { .. } if narrows_by_tiles(schedule, can, group) => vec![(of_single().inputs[0], Form::BF16)],
            Op::Narrow { .. } => floats(of_single().inputs.clone()),
            Op::Add | Op::Widen { .. } => floats(vec![of_single().inputs[1]]),
            _ => Vec::new(),
        },
        _ => Vec::new(),
    }
}
