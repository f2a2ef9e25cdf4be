//! What is in a GGUF file, whatever it is: a model, a projector, a drafter, or none that runs. Of adapters,
//! [`super::adapter`] tells.
//!
//! Everything is read from the header. Nothing is left out because it cannot be read: a tensor of a type that no model
//! is read in is counted with the others.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::Write;

use gemma4c_models::gguf::{Header, TensorInfo, stored_bytes, type_name};
use serde_json::{Value, json};

use crate::output;

/// What a file is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Text,
    Projector,
    Drafter,
    VocabularyOnly,
    Other,
}

impl Kind {
    pub fn of(file: &Header) -> Kind {
        let text = |key| file.metadata().str(key).unwrap_or("");
        match text("general.architecture") {
            "gemma4" if file.tensors().is_empty() => Kind::VocabularyOnly,
            "gemma4" => Kind::Text,
            "gemma4-assistant" => Kind::Drafter,
            "clip" => Kind::Projector,
            _ => Kind::Other,
        }
    }

    fn says(self, file: &Header) -> String {
        let architecture = || file.metadata().str("general.architecture").unwrap_or("no architecture");
        match self {
            Kind::Text => "a Gemma 4 model".into(),
            Kind::Projector => "a projector: towers for pictures and sound, beside a model (--mmproj)".into(),
            Kind::Drafter => "a drafter, beside its model (--draft)".into(),
            Kind::VocabularyOnly => "a vocabulary alone, without weights".into(),
            Kind::Other => {
                let found: String = architecture().chars().take(40).flat_map(char::escape_debug).collect();
                format!("a model of another architecture: {found}")
            }
        }
    }
}

/// What a tensor is part of, by its name.
fn group(tensor: &TensorInfo) -> &'static str {
    let name = tensor.name.as_ref();
    let in_layer = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')).map_or(name, |(_, name)| name);
    if tensor.dims().iter().filter(|dim| **dim > 1).count() < 2 {
        return "norms and scales";
    }
    match in_layer {
        _ if name.ends_with(".lora_a") || name.ends_with(".lora_b") => "adapter",
        _ if name.starts_with("v.") => "vision",
        _ if name.starts_with("a.") => "sound",
        _ if name.starts_with("mm.") => "projection",
        "token_embd.weight" | "per_layer_token_embd.weight" | "output.weight" => "tables",
        "inp_gate.weight" | "proj.weight" | "per_layer_model_proj.weight" => "per layer",
        "ffn_gate_inp.weight" => "router",
        _ if in_layer.starts_with("attn_") => "attention",
        _ if in_layer.contains("_exps.") => "experts",
        _ if in_layer.starts_with("ffn_") => "mlp",
        _ => "other",
    }
}

/// The order in which groups are told.
const GROUPS: [&str; 12] = [
    "tables",
    "attention",
    "mlp",
    "router",
    "experts",
    "per layer",
    "norms and scales",
    "vision",
    "sound",
    "projection",
    "adapter",
    "other",
];

/// What a group has of one type.
#[derive(Default)]
struct Share {
    tensors: u64,
    values: u64,
    /// `None` where a type is not even known by its size.
    bytes: Option<u64>,
}

/// Groups, types by their names, and what there is of each.
struct Weights(BTreeMap<(usize, String), Share>);

impl Weights {
    fn of(file: &Header) -> Weights {
        let mut shares: BTreeMap<(usize, String), Share> = BTreeMap::new();
        for tensor in file.tensors() {
            let at = GROUPS.iter().position(|known| *known == group(tensor)).unwrap_or(GROUPS.len() - 1);
            let name = tensor.dtype().map_or_else(|_| type_name(tensor.ggml_type), |dtype| dtype.to_string());
            let share = shares.entry((at, name)).or_insert(Share { bytes: Some(0), ..Share::default() });
            let values = tensor.dims().iter().fold(1u64, |values, dim| values.saturating_mul(*dim));
            share.tensors += 1;
            share.values = share.values.saturating_add(values);
            let stored = match tensor.dtype() {
                Ok(_) => Some(tensor.spans().fold(0, |bytes: u64, span| bytes.saturating_add(span.bytes))),
                Err(_) => stored_bytes(tensor.ggml_type, values),
            };
            let bytes = share.bytes.zip(stored);
            share.bytes = bytes.map(|(all, one)| all.saturating_add(one));
        }
        Weights(shares)
    }

    /// Bits that a value takes in the mean, of these shares.
    fn bits<'a>(mut shares: impl Iterator<Item = &'a Share>) -> Option<f64> {
        let sums = shares.try_fold((0u64, 0u64), |(bytes, values), share| {
            Some((bytes.saturating_add(share.bytes?), values.saturating_add(share.values)))
        });
        sums.filter(|(_, values)| *values > 0).map(|(bytes, values)| bytes as f64 * 8.0 / values as f64)
    }

    /// The types of a group, that of most tensors first.
    fn in_group(&self, group: usize) -> Vec<(&str, &Share)> {
        let of_group = self.0.iter().filter(|((at, _), _)| *at == group);
        let mut types: Vec<_> = of_group.map(|((_, name), share)| (name.as_str(), share)).collect();
        types.sort_by_key(|(_, share)| Reverse(share.tensors));
        types
    }
}

/// For people: what the file is, its types by groups of tensors, and whether this program runs it.
pub fn text(file: &Header, kind: Kind, runs: &Result<(), String>) -> String {
    let weights = Weights::of(file);
    let mut out = String::new();
    let _ = writeln!(out, "file           {}", kind.says(file));
    if let Some(bits) = Weights::bits(weights.0.values()) {
        let bytes = weights.0.values().filter_map(|share| share.bytes).fold(0, u64::saturating_add);
        let count = file.tensors().len();
        let _ = writeln!(out, "tensors        {count}, {}, {bits:.2} bits a weight", output::bytes(bytes));
    } else if !file.tensors().is_empty() {
        let _ = writeln!(out, "tensors        {}, some of an unknown type", file.tensors().len());
    }
    for (at, name) in GROUPS.iter().enumerate() {
        let types = weights.in_group(at);
        let named: Vec<String> = types.iter().map(|(name, share)| format!("{} {name}", share.tensors)).collect();
        if let Some(bits) = Weights::bits(types.iter().map(|(_, share)| *share)) {
            let _ = writeln!(out, "  {name:<18}{:<40} {bits:5.2} bits a weight", named.join(", "));
        } else if !named.is_empty() {
            let _ = writeln!(out, "  {name:<18}{}", named.join(", "));
        }
    }
    for line in unusual(file, kind) {
        let _ = writeln!(out, "unusual        {line}");
    }
    let _ = match runs {
        Ok(()) => writeln!(out, "runs           yes"),
        Err(why) => writeln!(out, "runs           no: {why}"),
    };
    out
}

/// For programs.
pub fn json(file: &Header, kind: Kind, runs: &Result<(), String>) -> Value {
    let weights = Weights::of(file);
    let groups = weights.0.iter().map(|((group, name), share)| {
        json!({"group": GROUPS[*group], "type": name, "tensors": share.tensors, "values": share.values,
               "bytes": share.bytes})
    });
    json!({"file": kind.says(file), "tensors": file.tensors().len(), "types": groups.collect::<Vec<_>>(),
           "bits_per_weight": Weights::bits(weights.0.values()), "unusual": unusual(file, kind),
           "runs": runs.is_ok(), "why_not": runs.as_ref().err()})
}

/// What most files of the kind do not have.
fn unusual(file: &Header, kind: Kind) -> Vec<String> {
    let mut lines = Vec::new();
    let has = |suffix: &str| file.tensors().iter().filter(|tensor| tensor.name.ends_with(suffix)).count();
    let inputs = has(".input_scale");
    if inputs > 0 {
        lines.push(format!("{inputs} scales of activations, which are ignored: activations are not quantised by them"));
    }
    if kind == Kind::Text {
        if file.metadata().str("tokenizer.chat_template").is_err() {
            lines.push("no chat template".into());
        }
        if file.tensor("output.weight").is_some() {
            lines.push("a head of its own: it is not the table of embeddings".into());
        }
    }
    lines
}
