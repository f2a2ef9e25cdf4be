//! A model, as its config says it.

use std::fmt::Write;

use gemma4c_graph::layer_ranges;
use gemma4c_models::gemma4::{Config, Keys, Reach};
use serde_json::{Value, json};

/// For programs.
pub fn json(config: &Config) -> Value {
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

/// For people.
pub fn text(config: &Config) -> String {
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
