//! An adapter, as its file says it: what it changes, how strongly, and for which model it was trained.

use std::fmt::Write;

use gemma4c_models::adapter::Summary;
use serde_json::{Value, json};

/// For people.
pub fn text(adapter: &Summary) -> String {
    let mut out = String::new();
    let _ = writeln!(out, "file           an adapter (LoRA), beside a model (--lora): {}", adapter.form);
    for (what, name) in [("name", &adapter.name), ("trained for", &adapter.base)] {
        if let Some(name) = name {
            let _ = writeln!(out, "{what:<15}{name}");
        }
    }
    let ranks: Vec<String> = adapter.ranks.iter().map(u64::to_string).collect();
    let _ = writeln!(out, "rank           {}", ranks.join(", "));
    let _ = writeln!(out, "alpha          {}", adapter.alpha);
    let _ = writeln!(out, "changes        {} pairs in {} layers", adapter.pairs, adapter.layers);
    for (target, count) in &adapter.targets {
        let _ = writeln!(out, "  {target:<24}{count}");
    }
    let _ = writeln!(out, "runs           with any model whose matrices have these shapes; `compile` compares them");
    out
}

/// For programs.
pub fn json(adapter: &Summary) -> Value {
    let targets: Vec<Value> =
        adapter.targets.iter().map(|(target, count)| json!({"target": target, "pairs": count})).collect();
    json!({"form": adapter.form, "name": adapter.name, "base": adapter.base, "ranks": adapter.ranks,
           "alpha": adapter.alpha, "pairs": adapter.pairs, "layers": adapter.layers, "targets": targets})
}
