//! Where a plan's memory goes: the regions, the weights by purpose, keys and values by layer, and the arena over time.

use std::fmt::Write;

use super::{Hues, arena};
use crate::output;
use crate::report::facts::{CacheFacts, Facts};
use crate::report::fold::layer_of;
use crate::report::weights::{WeightForm, groups};
use gemma4c_plan::{Kind, Plan};

/// Tokens of a sequence that is told of.
const SHORT: u32 = 1024;

pub fn section(facts: &Facts<'_>, hues: &Hues) -> String {
    let (memory, layout) = (&facts.program().memory, &facts.program().kv_layout);
    let mut regions = vec![
        ("weights", memory.weights, "h0"),
        ("keys and values", memory.kv, "h1"),
        ("activations", memory.arena, "h2"),
        ("on the host", memory.host, "h3 far"),
    ];
    regions.extend((memory.seats > 0).then_some(("seats for adapters", memory.seats, "h4")));
    let mut out = format!("<h3>{} in all</h3>", output::bytes(facts.total_bytes()));
    let piece = |(what, bytes, class): (&str, u64, &str)| Piece { what: what.into(), bytes, class: class.into() };
    out += &bar(&regions.into_iter().map(piece).collect::<Vec<_>>());
    out += "<h3>Weights</h3>";
    out += &weights(facts);
    out += "<h3>Keys and values of a whole context, layer by layer</h3>";
    out += &caches(facts.plan, &facts.caches());
    let _ = write!(
        out,
        "<p class=\"note\">Room for {}: {} pages of {}, each for {} tokens of the sliding layers or {} of the global ones. \
         A sequence of {SHORT} tokens takes {} of them, {}.</p>",
        facts.sequences(),
        layout.pages,
        output::bytes(layout.page_bytes),
        layout.sliding.rows,
        layout.full.rows,
        layout.pages_for(SHORT),
        output::bytes(layout.bytes_for(SHORT))
    );
    if let Some(decode) = facts.phases.first() {
        out += "<h3>Activations in decode</h3>";
        out += &arena::of_phase(facts, decode, hues);
    }
    if let Some(largest) = facts.phases.iter().skip(1).max_by_key(|phase| phase.phase.arena_bytes) {
        let _ = write!(out, "<h3>Activations in {}</h3>", super::escape(&largest.phase.name));
        out += &arena::of_phase(facts, largest, hues);
    }
    out
}

/// A part of a bar.
pub struct Piece {
    pub what: String,
    pub bytes: u64,
    pub class: String,
}

/// Parts side by side, as long as they are large, and their legend.
pub fn bar(pieces: &[Piece]) -> String {
    let total = pieces.iter().map(|piece| piece.bytes as f64).sum::<f64>().max(1.0);
    let mut out = "<div class=\"bar\">".to_owned();
    let present = || pieces.iter().filter(|piece| piece.bytes > 0);
    for piece in present() {
        let share = piece.bytes as f64 / total;
        let word = if share > 0.08 { piece.what.as_str() } else { "" };
        let _ = write!(
            out,
            "<div class=\"{}\" style=\"flex-grow:{:.4}\" title=\"{}: {}\"><span>{word}</span></div>",
            piece.class,
            share * 1000.0,
            piece.what,
            output::bytes(piece.bytes)
        );
    }
    out += "</div><ul class=\"legend\">";
    for piece in present() {
        let _ = write!(
            out,
            "<li><i class=\"dot {}\"></i>{} <b>{}</b> <small>{} B</small></li>",
            piece.class,
            piece.what,
            output::bytes(piece.bytes),
            digits(piece.bytes)
        );
    }
    out + "</ul>"
}

/// `13 039 886 336`.
fn digits(n: u64) -> String {
    let plain = n.to_string();
    let mut out = String::new();
    for (at, digit) in plain.chars().enumerate() {
        if at > 0 && (plain.len() - at).is_multiple_of(3) {
            out.push('\u{202f}');
        }
        out.push(digit);
    }
    out
}

fn weights(facts: &Facts<'_>) -> String {
    let groups = groups(facts);
    let mut pieces: Vec<Piece> = groups
        .iter()
        .map(|((group, form), bytes)| Piece {
            what: format!("{}, {}", group.name(), form.name()),
            bytes: *bytes,
            class: format!(
                "h{}{}",
                *group as usize,
                match form {
                    WeightForm::Stored => "",
                    WeightForm::Repacked => " repacked",
                    WeightForm::Widened => " widened",
                    WeightForm::OnHost => " far",
                }
            ),
        })
        .collect();
    let listed: u64 = groups.values().sum();
    let memory = &facts.program().memory;
    let rest = (memory.weights + memory.host).saturating_sub(listed);
    pieces.push(Piece { what: "computed tables and padding".into(), bytes: rest, class: "h11".into() });
    bar(&pieces)
}

/// A column a layer; layers without keys of their own say whose they read.
pub fn caches(plan: &Plan, caches: &[CacheFacts]) -> String {
    let most = caches.iter().map(|cache| cache.bytes).max().unwrap_or(1).max(1);
    let mut out = "<div class=\"columns\">".to_owned();
    for layer in 0..plan.model.layers {
        let (class, height, title) = match caches.iter().find(|cache| cache.layer == layer) {
            Some(cache) => {
                let (class, reach) = match cache.window {
                    Some(window) => ("h5", format!("window {window}")),
                    None => ("h2", "global".to_owned()),
                };
                let height = cache.bytes as f64 / most as f64 * 100.0;
                (class, height, format!("layer {layer}, {reach}: {}", output::bytes(cache.bytes)))
            }
            None => {
                let donor = donor(plan, layer).map_or(String::new(), |donor| format!(" of layer {donor}"));
                ("shared", 0.0, format!("layer {layer} reads the keys and values{donor}"))
            }
        };
        let _ = write!(
            out,
            "<div title=\"{title}\"><b class=\"{class}\" style=\"height:{height:.1}%\"></b><small>{layer}</small></div>"
        );
    }
    let sum = |sliding: bool| {
        let of_kind = caches.iter().filter(|cache| cache.window.is_some() == sliding);
        (of_kind.clone().count(), output::bytes(of_kind.map(|cache| cache.bytes).sum()))
    };
    let ((sliding, sliding_bytes), (global, global_bytes)) = (sum(true), sum(false));
    let shared = plan.model.layers as usize - (sliding + global).min(plan.model.layers as usize);
    let kinds = [
        ("h5", sliding, format!("with a window <b>{sliding_bytes}</b>")),
        ("h2", global, format!("global <b>{global_bytes}</b>")),
        ("none", shared, "read another layer's".to_owned()),
    ];
    out += "</div><ul class=\"legend\">";
    for (class, count, words) in kinds.iter().filter(|(_, count, _)| *count > 0) {
        let _ = write!(out, "<li><i class=\"dot {class}\"></i>{count} {words}</li>");
    }
    out += "</ul>";
    out
}

/// The layer whose keys another one reads.
fn donor(plan: &Plan, layer: u32) -> Option<u32> {
    let program = &plan.program;
    let of_layer =
        program.steps.iter().filter(|step| layer_of(&program.values[step.output as usize].name) == Some(layer));
    of_layer.flat_map(|step| &step.inputs).find_map(|input| match program.values[*input as usize].kind {
        Kind::Kv { cache } => program.caches.get(cache.index()).map(|cache| cache.layer),
        _ => None,
    })
}
