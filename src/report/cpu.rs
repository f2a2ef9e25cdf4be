//! A plan for the CPU alone: one operation a step, one phase for any number of rows.

use std::collections::BTreeMap;
use std::fmt::Write;

use gemma4c_plan::Plan;
use serde_json::{Value, json};

use super::text::{header, memory_table};

/// Bytes of weights, keys and values, and activations; all of it is known before anything runs.
fn memory(plan: &Plan) -> (u64, u64, u64) {
    let weights = plan.weights.iter().map(|w| w.bytes).sum();
    (weights, plan.program.cache_bytes().unwrap_or(u64::MAX), plan.program.arena_bytes)
}

/// For people.
pub fn text(plan: &Plan) -> String {
    let (program, (weights, kv, arena)) = (&plan.program, memory(plan));
    let mut out = header(plan);
    let total = weights.saturating_add(kv).saturating_add(arena);
    out += &memory_table(&[
        ("weights (mapped)", weights),
        ("keys and values", kv),
        ("activations", arena),
        ("total", total),
    ]);
    let _ = writeln!(out, "\nsteps          {}", program.steps.len());
    for (kind, count) in kinds(plan) {
        let _ = writeln!(out, "  {kind:<15}{count}");
    }
    out
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
    json!({
        "model": super::json::model(plan),
        "arch": plan.target.name(),
        "context": program.context,
        "embedded": super::json::embedded(plan),
        "passes": [],
        "phases": [{"name": "any", "rows": program.chunk, "launches": program.steps.len(), "arena_bytes": arena,
                    "steps": steps.collect::<Vec<_>>()}],
        "memory": {"weights": weights, "kv": kv, "arena": arena, "host": 0,
                   "total": weights.saturating_add(kv).saturating_add(arena)},
    })
}
