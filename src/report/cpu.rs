//! A plan for the CPU alone: one operation a step, one phase for any number of rows.

use std::collections::BTreeMap;
use std::fmt::Write;

use gemma4c_plan::{Drafter, Kind, Medium, Op, Plan, Step, WeightId};
use serde_json::{Value, json};

use super::facts::CacheFacts;
use super::text::{header, memory_table};

/// Bytes of weights, keys and values, and activations; all of it is known before anything runs. What is reserved for
/// adapters is not among the weights.
pub fn memory(plan: &Plan) -> (u64, u64, u64) {
    let weights = plan.stored().map(|w| w.bytes).sum();
    (weights, plan.program.cache_bytes().unwrap_or(u64::MAX), plan.program.arena_bytes)
}

/// Bytes of a drafter's activations; it has no keys and values.
pub fn drafter_arena(plan: &Plan) -> u64 {
    plan.drafter.as_ref().map_or(0, |drafter| drafter.program.arena_bytes)
}

/// Bytes of the towers' activations.
pub fn tower_arenas(plan: &Plan) -> u64 {
    plan.towers.iter().fold(0u64, |sum, tower| sum.saturating_add(tower.program.arena_bytes))
}

/// All that a plan takes, in bytes: one sum for all that say it.
pub fn total_bytes(plan: &Plan) -> u64 {
    let (weights, kv, arena) = memory(plan);
    [weights, kv, arena, plan.reserved_bytes(), tower_arenas(plan), drafter_arena(plan)]
        .into_iter()
        .fold(0, u64::saturating_add)
}

/// Keys and values by the layer that owns them.
pub fn caches(plan: &Plan) -> Vec<CacheFacts> {
    let caches = plan.program.caches.iter();
    caches.map(|c| CacheFacts { layer: c.layer, window: c.window, bytes: c.bytes().unwrap_or(u64::MAX) }).collect()
}

/// What a step takes for one token, as far as weights go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Of weights that are read.
    pub bytes: u64,
    /// Multiplications and additions of a product.
    pub flops: u64,
}

impl Cost {
    pub fn of(plan: &Plan, step: &Step) -> Cost {
        let weight = |id: WeightId| &plan.weights[id.index()];
        let all = |id: WeightId| Cost { bytes: weight(id).bytes, flops: 0 };
        match step.op {
            // A row reads the matrix of its own seat.
            Op::Narrow { weight: w, .. } | Op::Widen { weight: w } if weight(w).is_reserved() => {
                let bytes = weight(w).bytes / weight(w).dim(2).max(1);
                // Of bf16, one multiplied and one added.
                Cost { bytes, flops: bytes }
            }
            Op::MatMul { weight: w } | Op::Narrow { weight: w, .. } | Op::Widen { weight: w } => {
                let products = weight(w).dims.iter().fold(2u64, |n, dim| n.saturating_mul(*dim));
                Cost { bytes: weight(w).bytes, flops: products }
            }
            // One row of the table.
            Op::Gather { table } => {
                let rows = weight(table).dims.get(1).copied().unwrap_or(1);
                Cost { bytes: weight(table).bytes / rows.max(1), flops: 0 }
            }
            // Some rows of the experts that the token goes to.
            Op::ExpertMatMul { weight: w, len, .. } => {
                let [width, rows, experts] = [0, 1, 2].map(|at| weight(w).dims.get(at).copied().unwrap_or(1));
                let chosen = plan.program.values[step.inputs[1] as usize].width as u64;
                let outputs = (len as u64).saturating_mul(chosen);
                let row_bytes = weight(w).bytes / rows.saturating_mul(experts).max(1);
                Cost {
                    bytes: row_bytes.saturating_mul(outputs),
                    flops: outputs.saturating_mul(width).saturating_mul(2),
                }
            }
            Op::RmsNorm { weight: Some(w), .. } | Op::MulWeight { weight: w } => all(w),
            Op::ExpertSum { scale: Some(w) } | Op::Rope { factors: Some(w), .. } => all(w),
            _ => Cost::default(),
        }
    }
}

impl std::iter::Sum for Cost {
    fn sum<I: Iterator<Item = Cost>>(costs: I) -> Cost {
        costs.fold(Cost::default(), |a, b| Cost {
            bytes: a.bytes.saturating_add(b.bytes),
            flops: a.flops.saturating_add(b.flops),
        })
    }
}

/// For people.
pub fn text(plan: &Plan) -> String {
    let (program, (weights, kv, arena)) = (&plan.program, memory(plan));
    let mut out = header(plan);
    let mut rows = vec![("weights (mapped)", weights), ("keys and values", kv), ("activations", arena)];
    rows.extend(plan.towers.iter().map(|tower| ("  of a tower", tower.program.arena_bytes)));
    rows.extend(plan.drafter.iter().map(|drafter| ("  of the drafter", drafter.program.arena_bytes)));
    rows.extend(plan.model.seats.map(|_| ("seats", plan.reserved_bytes())));
    rows.push(("total", total_bytes(plan)));
    out += &memory_table(&rows);
    let _ = writeln!(out, "\nsteps          {}", program.steps.len());
    for (kind, count) in kinds(plan) {
        let _ = writeln!(out, "  {kind:<15}{count}");
    }
    for tower in &plan.towers {
        let (steps, soft) = (tower.program.steps.len(), tower.program.asked);
        let share = match tower.medium {
            Medium::Picture { patch, pool } => format!("{0} x {0} pixels", patch * pool),
            Medium::Mel { bins } => format!("4 frames of {bins} bins"),
            Medium::Samples { frame } => format!("{frame} samples"),
        };
        let _ = writeln!(out, "\ntower {}   {steps} steps, {soft} soft tokens at most, one for {share}", tower.name);
    }
    if let Some(drafter) = &plan.drafter {
        let _ = writeln!(out, "\ndrafter        {}", describe_drafter(drafter));
    }
    out
}

/// What a drafter is, in a line.
pub fn describe_drafter(drafter: &Drafter) -> String {
    let steps = drafter.program.steps.len();
    let layers: Vec<String> = drafter.program.caches.iter().map(|cache| cache.layer.to_string()).collect();
    let scored = drafter.program.values.iter().find(|value| value.kind == Kind::Tokens && value.width > 1);
    let scored = scored.map_or("all tokens".to_owned(), |value| format!("{} tokens", value.width));
    format!("{steps} steps over the keys and values of layers {}, scores {scored}", layers.join(" and "))
}

/// How often each operation is in it.
pub fn kinds(plan: &Plan) -> BTreeMap<&'static str, usize> {
    let mut kinds = BTreeMap::new();
    plan.program.steps.iter().for_each(|s| *kinds.entry(s.op.name()).or_default() += 1);
    kinds
}

/// For programs.
pub fn json(plan: &Plan) -> Value {
    let (program, (weights, kv, arena)) = (&plan.program, memory(plan));
    let steps = program.steps.iter().map(|s| {
        let out = &program.values[s.output as usize];
        json!({"kernel": s.op.name(), "nodes": [out.name], "width": out.width})
    });
    let towers = plan.towers.iter().map(|tower| {
        let reads = match tower.medium {
            Medium::Picture { patch, pool } => json!({"patch": patch, "pool": pool}),
            Medium::Mel { bins } => json!({"mel_bins": bins}),
            Medium::Samples { frame } => json!({"frame": frame}),
        };
        json!({"name": tower.name, "steps": tower.program.steps.len(), "reads": reads,
               "soft_tokens": tower.program.asked, "arena_bytes": tower.program.arena_bytes})
    });
    let towers: Vec<Value> = towers.collect();
    let mut out = json!({
        "model": super::json::model(plan),
        "arch": plan.target.name(),
        "context": program.context,
        "embedded": super::json::embedded(plan),
        "passes": [],
        "phases": [{"name": "any", "rows": program.chunk, "launches": program.steps.len(), "arena_bytes": arena,
                    "steps": steps.collect::<Vec<_>>()}],
        "memory": {"weights": weights, "kv": kv, "arena": arena, "host": 0, "seats": plan.reserved_bytes(),
                   "total": total_bytes(plan)},
    });
    // A plan that reads text alone says nothing of towers.
    if !towers.is_empty() {
        out["towers"] = towers.into();
    }
    if let Some(drafter) = &plan.drafter {
        let program = &drafter.program;
        let layers: Vec<u32> = program.caches.iter().map(|cache| cache.layer).collect();
        out["drafter"] = json!({"steps": program.steps.len(), "arena_bytes": program.arena_bytes, "layers": layers,
                                "centroids": !drafter.token_order.is_empty()});
    }
    out
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use gemma4c_blocks::DType;
    use gemma4c_models::synth::{self, Preset};

    use super::*;
    use crate::options::Options;
    use crate::pipeline::{Files, compile};

    fn tiny(preset: Preset) -> Plan {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("model.gguf");
        synth::write(&synth::Options::new(preset, DType::Q8_0), &path, &|_, _| {}).expect("a model");
        let options = Options::default();
        compile(&Files::open(&path, &options).expect("a model"), folder.path(), &options).expect("a plan")
    }

    #[test]
    fn a_token_reads_every_matrix_once_and_a_row_of_a_table() {
        let plan = tiny(Preset::TinyE);
        let token: Cost = plan.program.steps.iter().map(|step| Cost::of(&plan, step)).sum();
        let table = plan.weights.iter().find(|w| w.name == "per_layer_token_embd.weight").expect("a table");
        let row = |name: &str| {
            let w = plan.weights.iter().find(|w| w.name == name).expect("a table");
            w.bytes / w.dims[1]
        };
        let all: u64 = plan.weights.iter().map(|w| w.bytes).sum();
        let rope = plan.weights.iter().find(|w| w.name == "rope_freqs.weight").expect("factors").bytes;
        let is_rope_with_factors = |step: &&Step| matches!(step.op, Op::Rope { factors: Some(_), .. });
        let ropes = plan.program.steps.iter().filter(is_rope_with_factors).count() as u64;
        // The embedding is the LM head's matrix too; the factors are read by every rotation that has some.
        let rows = row("per_layer_token_embd.weight") + row("token_embd.weight");
        assert_eq!(token.bytes, all - table.bytes + rows + (ropes - 1) * rope);
    }

    #[test]
    fn a_token_reads_the_experts_it_goes_to() {
        let plan = tiny(Preset::TinyMoe);
        let mut read: BTreeMap<WeightId, (u64, u64)> = BTreeMap::new();
        for step in &plan.program.steps {
            let Op::ExpertMatMul { weight, .. } = step.op else { continue };
            let tensor = &plan.weights[weight.index()];
            let chosen = plan.program.values[step.inputs[1] as usize].width as u64;
            let entry = read.entry(weight).or_insert((0, tensor.bytes / tensor.dims[2] * chosen));
            entry.0 += Cost::of(&plan, step).bytes;
        }
        assert!(read.len() >= 2, "gate, up and down of every layer: {read:?}");
        for (weight, (found, expected)) in read {
            assert_eq!(found, expected, "{}", plan.weights[weight.index()].name);
        }
    }
}
