//! What the memory of a plan's weights is spent on: by group of tensors, and by the form they are held in.

use std::collections::BTreeMap;

use gemma4c_plan::Plan;
use gemma4c_plan::cuda::{Argument, LoadPart, Range, Region};

use super::facts::Facts;
use super::fold::local_name;

/// Tensors that serve one purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WeightGroup {
    Embedding,
    PerLayerTable,
    PerLayer,
    Attention,
    Mlp,
    Experts,
    Small,
}

impl WeightGroup {
    fn of(tensor: &str) -> WeightGroup {
        let name = local_name(tensor);
        match name {
            _ if name.contains("norm") || name.contains("scale") || name.starts_with("rope") => WeightGroup::Small,
            "per_layer_token_embd.weight" => WeightGroup::PerLayerTable,
            _ if name.starts_with("per_layer") || name.starts_with("inp_gate") || name.starts_with("proj") => {
                WeightGroup::PerLayer
            }
            _ if name.starts_with("token_embd") || name.starts_with("output.") => WeightGroup::Embedding,
            _ if name.starts_with("attn") => WeightGroup::Attention,
            _ if name.contains("exps") => WeightGroup::Experts,
            _ if name.starts_with("ffn") => WeightGroup::Mlp,
            _ => WeightGroup::Small,
        }
    }

    pub const fn name(self) -> &'static str {
        match self {
            WeightGroup::Embedding => "embedding and LM head",
            WeightGroup::PerLayerTable => "per-layer table",
            WeightGroup::PerLayer => "per-layer gates",
            WeightGroup::Attention => "attention",
            WeightGroup::Mlp => "MLP",
            WeightGroup::Experts => "experts",
            WeightGroup::Small => "norms and scales",
        }
    }
}

/// The form in which a tensor is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WeightForm {
    Stored,
    Repacked,
    Widened,
    OnHost,
}

impl WeightForm {
    pub const fn name(self) -> &'static str {
        match self {
            WeightForm::Stored => "as in the file",
            WeightForm::Repacked => "repacked for decode",
            WeightForm::Widened => "bf16 copy for prefill",
            WeightForm::OnHost => "in the host's memory",
        }
    }
}

/// Bytes in the model's file, by group of tensors.
pub fn in_file(plan: &Plan) -> BTreeMap<WeightGroup, u64> {
    let mut groups = BTreeMap::new();
    for weight in plan.stored() {
        *groups.entry(WeightGroup::of(&weight.name)).or_default() += weight.bytes;
    }
    groups
}

/// What the weights' memory is spent on: by group of tensors and by the form they are held in.
pub fn groups(facts: &Facts<'_>) -> BTreeMap<(WeightGroup, WeightForm), u64> {
    let program = facts.program();
    let mut groups = BTreeMap::new();
    for load in &program.loads {
        let group = WeightGroup::of(&facts.plan.weights[load.weight.index()].name);
        for part in &load.parts {
            let (form, to) = match part {
                LoadPart::Copy { to } if to.region == Region::Host => (WeightForm::OnHost, to),
                LoadPart::Copy { to } => (WeightForm::Stored, to),
                LoadPart::Kernel { to, .. } => (WeightForm::Repacked, to),
            };
            *groups.entry((group, form)).or_default() += to.bytes;
        }
    }
    for launch in &program.prepare {
        let ranges: Vec<&Range> = launch.arguments.iter().filter_map(memory).collect();
        let loaded = |range: &&&Range| range.offset < program.loaded_bytes();
        let (Some(from), Some(to)) = (ranges.iter().find(loaded), ranges.iter().find(|range| !loaded(range))) else {
            continue;
        };
        let is_source = |part: &LoadPart| match part {
            LoadPart::Copy { to } | LoadPart::Kernel { to, .. } => {
                to.region == from.region && (to.offset..to.offset + to.bytes).contains(&from.offset)
            }
        };
        if let Some(load) = program.loads.iter().find(|load| load.parts.iter().any(is_source)) {
            let group = WeightGroup::of(&facts.plan.weights[load.weight.index()].name);
            *groups.entry((group, WeightForm::Widened)).or_default() += to.bytes;
        }
    }
    groups
}

fn memory(argument: &Argument) -> Option<&Range> {
    match argument {
        Argument::Memory(range) if range.region == Region::Weights && range.bytes > 0 => Some(range),
        _ => None,
    }
}
