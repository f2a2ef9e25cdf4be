//! `gemma4c inspect`: what is in a plan or a model.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;

use anyhow::{Result, bail};
use gemma4c_blocks::DType;
use gemma4c_graph::{layer_ranges, to_dot};
use gemma4c_models::gemma4::{self, Config, Keys, Reach};
use gemma4c_models::gguf::Gguf;
use gemma4c_plan::{Plan, Weight};
use serde_json::{Value, json};

use super::{Outcome, plan_file};
use crate::output;

/// Show what is in a plan or in a GGUF model.
#[derive(clap::Args)]
pub struct Args {
    /// A plan or a GGUF model.
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// For programs.
    #[arg(long, conflicts_with_all = ["graph", "dot"])]
    json: bool,

    /// The dataflow graph as text, equal layers folded.
    #[arg(long, conflicts_with = "dot")]
    graph: bool,

    /// Of a model: one layer's dataflow as a Graphviz drawing.
    #[arg(long, value_name = "LAYER")]
    dot: Option<u32>,
}

pub fn run(args: &Args) -> Result<Outcome> {
    let text = if plan_file::is_gguf(&args.file)? {
        let file = Gguf::open(&args.file)?;
        let config = Config::read(&file)?;
        match (args.json, args.graph, args.dot) {
            (_, _, Some(layer)) if layer as usize >= config.layers.len() => {
                bail!("there is no layer {layer}: the model has {}, counted from 0", config.layers.len())
            }
            (_, _, Some(layer)) => to_dot(&gemma4::graph(&file, &config)?, |l| l == layer),
            (_, true, _) => gemma4c_graph::to_text(&gemma4::graph(&file, &config)?),
            (true, _, _) => pretty(&config_json(&config))?,
            _ => config_text(&file, &config),
        }
    } else {
        let plan = plan_file::read(&args.file)?;
        match (args.json, args.graph, args.dot) {
            (_, _, Some(_)) => bail!("--dot draws a model: give the GGUF file"),
            (_, true, _) => plan.report,
            (true, _, _) => pretty(&plan_json(&plan))?,
            _ => plan_text(&plan),
        }
    };
    output::print(&text)?;
    Ok(Outcome::Done)
}

fn pretty(value: &Value) -> Result<String> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}

fn config_json(config: &Config) -> Value {
    let layers = config.layers.iter().map(|l| {
        let a = &l.attention;
        let (window, keys) = (window(a.reach), keys(a.keys));
        json!({"window": window, "heads": a.heads, "kv_heads": a.kv_heads, "head_dim": a.head_dim,
               "rope_base": a.rope_base, "keys": keys, "ffn": l.ffn})
    });
    let mixture = config.mixture.map(|m| json!({"experts": m.experts, "used": m.used, "ffn": m.ffn}));
    json!({"name": config.name, "hidden": config.hidden, "vocab_size": config.vocab_size, "context": config.context,
           "rms_eps": config.rms_eps, "softcap": config.softcap, "per_layer_width": config.per_layer_width,
           "mixture": mixture, "layers": layers.collect::<Vec<_>>()})
}

fn window(reach: Reach) -> Option<u32> {
    match reach {
        Reach::Sliding { window } => Some(window),
        Reach::Global => None,
    }
}

fn keys(keys: Keys) -> String {
    match keys {
        Keys::Projected => "own".into(),
        Keys::ValuesFromKeys => "own, values from keys".into(),
        Keys::SharedWith { donor } => format!("of layer {donor}"),
    }
}

fn config_text(file: &Gguf, config: &Config) -> String {
    let mut out = String::new();
    let _ = writeln!(out, "model          {}", config.name.as_deref().unwrap_or("(unnamed)"));
    let _ = writeln!(out, "hidden         {}", config.hidden);
    let _ = writeln!(out, "vocabulary     {}", config.vocab_size);
    let _ = writeln!(out, "context        {}", config.context);
    let _ = writeln!(out, "rms eps        {:e}", config.rms_eps);
    let _ = writeln!(out, "softcap        {}", config.softcap.map_or("none".into(), |c| c.to_string()));
    if let Some(width) = config.per_layer_width {
        let _ = writeln!(out, "per-layer      {width} wide embeddings");
    }
    if let Some(m) = config.mixture {
        let _ = writeln!(out, "experts        {} of {}, {} wide", m.used, m.experts, m.ffn);
    }
    let sizes = file.tensors().iter().filter_map(|t| Some((t.dtype().ok()?, t.len)));
    let _ = writeln!(out, "tensors        {}", by_type(sizes));
    let _ = writeln!(out, "\nlayers (equal ones once)");
    let mut seen: Vec<(String, Vec<u32>)> = Vec::new();
    for (i, l) in (0..).zip(&config.layers) {
        let a = &l.attention;
        let reach = window(a.reach).map_or("global".into(), |w| format!("window {w}"));
        let line = format!(
            "{reach}, {} heads of {} over {} kv, rope {:e}, keys {}, ffn {}",
            a.heads,
            a.head_dim,
            a.kv_heads,
            a.rope_base,
            keys(a.keys),
            l.ffn
        );
        match seen.iter_mut().find(|(text, _)| *text == line) {
            Some((_, layers)) => layers.push(i),
            None => seen.push((line, vec![i])),
        }
    }
    for (line, layers) in seen {
        let noun = if layers.len() == 1 { "layer" } else { "layers" };
        let _ = writeln!(out, "  {line}\n    {noun} {}", layer_ranges(&layers));
    }
    out
}

/// `3 f32 (1.20 kB), 27 q8_0 (4.58 GB)`.
fn by_type(sizes: impl Iterator<Item = (DType, u64)>) -> String {
    let mut types: BTreeMap<DType, (u64, u64)> = BTreeMap::new();
    for (dtype, bytes) in sizes {
        let entry = types.entry(dtype).or_default();
        *entry = (entry.0 + 1, entry.1 + bytes);
    }
    let text = types.iter().map(|(t, (count, bytes))| format!("{count} {t} ({})", output::bytes(*bytes)));
    text.collect::<Vec<_>>().join(", ")
}

/// Bytes of weights, keys and values, and activations; all of it is known before anything runs.
fn memory(plan: &Plan) -> (u64, u64, u64) {
    let weights = plan.weights.iter().map(|w| w.bytes).sum();
    (weights, plan.program.cache_bytes().unwrap_or(u64::MAX), plan.program.arena_bytes)
}

fn plan_text(plan: &Plan) -> String {
    let (program, (weights, kv, arena)) = (&plan.program, memory(plan));
    let mut out = String::new();
    let _ = writeln!(out, "model          {}", plan.model.name.as_deref().unwrap_or("(unnamed)"));
    for file in &plan.model.files {
        let _ = writeln!(out, "file           {} ({})", file.path, output::bytes(file.bytes));
    }
    let _ = writeln!(out, "fingerprint    {:016x}", plan.model.fingerprint);
    let _ = writeln!(out, "target         {}", plan.target.name());
    let _ = writeln!(out, "context        {} of {} trained", program.context, plan.model.trained_context);
    let _ = writeln!(out, "chunk          {} tokens a pass, logits for {}", program.chunk, program.asked);
    let _ = writeln!(out, "layers         {}, {} with keys of their own", plan.model.layers, program.caches.len());
    let types = by_type(plan.weights.iter().map(|w: &Weight| (w.dtype, w.bytes)));
    let _ = writeln!(out, "weights        {types}");
    let text = match &plan.vocab {
        Some(v) => format!("{} tokens, {} merges", v.tokens.len(), v.merges.len()),
        None => "none: runs on token ids".into(),
    };
    let _ = writeln!(out, "vocabulary     {text}");
    let template = plan.vocab.as_ref().is_some_and(|v| v.chat_template.is_some());
    let _ = writeln!(out, "chat template  {}", if template { "yes" } else { "none" });
    let s = plan.sampling;
    let _ = writeln!(out, "sampling       temperature {}, top-k {}, top-p {}", s.temperature, s.top_k, s.top_p);
    let _ = writeln!(out, "\nmemory");
    let total = weights.saturating_add(kv).saturating_add(arena);
    for (what, bytes) in
        [("weights (mapped)", weights), ("keys and values", kv), ("activations", arena), ("total", total)]
    {
        let _ = writeln!(out, "  {what:<17}{bytes:>16}  {}", output::bytes(bytes));
    }
    let _ = writeln!(out, "\nsteps          {}", program.steps.len());
    let mut kinds: BTreeMap<&str, usize> = BTreeMap::new();
    program.steps.iter().for_each(|s| *kinds.entry(s.op.name()).or_default() += 1);
    for (kind, count) in kinds {
        let _ = writeln!(out, "  {kind:<15}{count}");
    }
    out
}

fn plan_json(plan: &Plan) -> Value {
    let (program, (weights, kv, arena)) = (&plan.program, memory(plan));
    let steps = program.steps.iter().map(|s| {
        let out = &program.values[s.output as usize];
        json!({"kernel": s.op.name(), "nodes": [out.name], "width": out.width})
    });
    json!({
        "model": {"name": plan.model.name, "files": plan.model.files, "layers": plan.model.layers,
                  "fingerprint": format!("{:016x}", plan.model.fingerprint),
                  "hidden": plan.model.hidden, "vocab_size": plan.model.vocab_size},
        "arch": plan.target.name(),
        "context": program.context,
        "passes": [],
        "phases": [{"name": "any", "rows": program.chunk, "launches": program.steps.len(), "arena_bytes": arena,
                    "steps": steps.collect::<Vec<_>>()}],
        "memory": {"weights": weights, "kv": kv, "arena": arena, "host": 0,
                   "total": weights.saturating_add(kv).saturating_add(arena)},
    })
}
