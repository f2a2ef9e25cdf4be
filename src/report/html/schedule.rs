//! Every phase's launches: a strip as long as they take at least, a table of those that are alike, and all of them.

use std::fmt::Write;

use gemma4c_codegen::target::Target;

use super::{Hues, compact, escape, floor_mark};
use crate::output;
use crate::report::facts::{Facts, PhaseFacts, StepFacts};
use crate::report::fold::fold;
use crate::report::units::{flops, time};

pub fn section(facts: &Facts<'_>, hues: &Hues, gpu: &Target) -> String {
    let mut out = "<p>A launch takes at least as long as its bytes take at full bandwidth, or its arithmetic on full tensor cores. \
                   Strips are drawn to that time. Keys and values count at full context. A pick follows every phase.</p>"
        .to_owned();
    for (at, phase) in facts.phases.iter().enumerate() {
        out += &one(facts, phase, at, hues, gpu);
    }
    out
}

fn one(facts: &Facts<'_>, phase: &PhaseFacts<'_>, number: usize, hues: &Hues, gpu: &Target) -> String {
    let mut out = format!(
        "<details class=\"phase\"{}><summary><b>{}</b><span>{} launches</span><span>{} a layer (mean {:.1}), {} elsewhere</span>\
         <span>{}</span><span>{}</span><span class=\"sum\" data-of=\"strip{number}\">{}</span></summary>",
        if number == 0 { " open" } else { "" },
        escape(&phase.phase.name),
        phase.launches(),
        phase.launches_per_layer(),
        phase.mean_launches_per_layer(),
        phase.launches_outside_layers(),
        output::bytes(phase.bytes()),
        flops(phase.flops()),
        time(phase.floor(gpu)),
    );
    out += &strip(phase, number, hues, gpu);
    out += &alike(facts, phase, hues, gpu);
    let _ = write!(out, "<details><summary>All {} launches, in order</summary>", phase.steps.len());
    out += &all(facts, phase, hues, gpu);
    out + "</details></details>"
}

/// The launches side by side, layer by layer.
fn strip(phase: &PhaseFacts<'_>, number: usize, hues: &Hues, gpu: &Target) -> String {
    let mut out = format!("<div class=\"strip\" id=\"strip{number}\">");
    let mut rest = &phase.steps[..];
    while let Some(first) = rest.first() {
        let len = rest.iter().take_while(|step| step.layer == first.layer).count();
        let (run, behind) = rest.split_at(len);
        let word = first.layer.map_or("·".to_owned(), |layer| layer.to_string());
        let sum: f64 = run.iter().map(|step| floor_ns(gpu, step)).sum();
        let _ = write!(out, "<div class=\"run\" style=\"flex-grow:{sum:.1}\"><div>");
        for step in run {
            let (bytes, flop) = (step.step.bytes, step.step.flops);
            let _ = write!(
                out,
                "<i class=\"h{}\" style=\"flex-grow:{:.1}\" data-b=\"{bytes}\" data-f=\"{flop}\" title=\"{}: {}\"></i>",
                hues.of(step),
                floor_ns(gpu, step),
                escape(&step.kernel.name),
                escape(step.nodes.last().copied().unwrap_or("a conversion"))
            );
        }
        let _ = write!(out, "</div><small>{word}</small></div>");
        rest = behind;
    }
    out + "</div>"
}

fn floor_ns(gpu: &Target, step: &StepFacts<'_>) -> f64 {
    gpu.floor(step.step.bytes, step.step.flops) * 1e9
}

/// Launches that differ in nothing but their layer.
fn alike(facts: &Facts<'_>, phase: &PhaseFacts<'_>, hues: &Hues, gpu: &Target) -> String {
    let mut out = "<div class=\"scroll\"><table class=\"alike\"><thead><tr><th>kernel</th><th>computes</th>\
                   <th class=\"n\">grid × block</th><th class=\"n\">bytes</th><th class=\"n\">FLOPs</th><th class=\"n\">floor</th>\
                   <th class=\"n\">times</th><th class=\"n\">share</th></tr></thead><tbody>"
        .to_owned();
    let total = phase.floor(gpu).max(f64::MIN_POSITIVE);
    let entries = phase.steps.iter().map(|step| {
        let s = step.step;
        (
            step.layer,
            Alike { pattern: step.pattern(), label: facts.label(step), work: (s.launch.grid, s.bytes, s.flops), step },
        )
    });
    for entry in fold(entries) {
        let step = entry.what.step;
        let (bytes, flop) = (step.step.bytes, step.step.flops);
        let share = gpu.floor(bytes, flop) * entry.count as f64 / total;
        let place = if entry.layers.is_empty() { "outside the layers".to_owned() } else { entry.place() };
        let _ = write!(
            out,
            "<tr><td class=\"which\"><i class=\"dot h{}\"></i><a href=\"#k-{label}\"><code>{label}</code></a><small>{place}</small></td>\
             <td class=\"does\">{}<small>{}</small></td><td class=\"n\">{} × {}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>\
             <td class=\"n fl\" {}</td><td class=\"n\">{}</td>\
             <td class=\"n share\" data-b=\"{bytes}\" data-f=\"{flop}\" data-n=\"{}\" data-of=\"strip{}\"><b style=\"width:{:.1}%\"></b><span>{:.1} %</span></td></tr>",
            hues.of(step),
            escape(&compact(&entry.what.pattern.1, ", ")),
            escape(&step.choice()),
            step.grid().replace('x', "×"),
            step.kernel.block,
            output::bytes(bytes),
            flops(flop),
            floor_mark(gpu, bytes, flop),
            entry.count,
            entry.count,
            facts.phases.iter().position(|p| std::ptr::eq(p.phase, phase.phase)).unwrap_or(0),
            share * 100.0,
            share * 100.0,
            label = escape(entry.what.label),
        );
    }
    out + "</tbody></table></div>"
}

/// Equal but for its layer.
struct Alike<'a> {
    pattern: (&'a str, Vec<&'a str>),
    label: &'a str,
    work: ([u32; 3], u64, u64),
    step: &'a StepFacts<'a>,
}

impl PartialEq for Alike<'_> {
    fn eq(&self, other: &Self) -> bool {
        (&self.pattern, self.label, self.work) == (&other.pattern, other.label, other.work)
    }
}

fn all(facts: &Facts<'_>, phase: &PhaseFacts<'_>, hues: &Hues, gpu: &Target) -> String {
    let mut out = "<div class=\"scroll\"><table class=\"all\"><thead><tr><th class=\"n\">step</th><th class=\"n\">layer</th><th>kernel</th>\
                   <th>writes</th><th class=\"n\">grid × block</th><th class=\"n\">bytes</th><th class=\"n\">FLOPs</th><th class=\"n\">floor</th></tr></thead><tbody>"
        .to_owned();
    let values = &facts.plan.program.values;
    for (at, step) in phase.steps.iter().enumerate() {
        if phase.asks_from(at) {
            out += "<tr class=\"asked\"><td colspan=\"8\">from here on, the asked row alone</td></tr>";
        }
        let mut outputs: Vec<&str> = step.step.outputs.iter().map(|o| values[o.value as usize].name.as_str()).collect();
        outputs.dedup();
        let waits = phase.waits_for(at).map_or(String::new(), |waits| format!("<small>{waits}</small>"));
        let _ = write!(
            out,
            "<tr title=\"{}\"><td class=\"n\">{at}</td><td class=\"n\">{}</td><td><i class=\"dot h{}\"></i><code>{}</code></td><td class=\"does\">{}{waits}</td>\
             <td class=\"n\">{} × {}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n fl\" {}</td></tr>",
            escape(&step.nodes.join(", ")),
            step.layer.map_or(String::new(), |layer| layer.to_string()),
            hues.of(step),
            escape(facts.label(step)),
            escape(&outputs.join(", ")),
            step.grid().replace('x', "×"),
            step.kernel.block,
            output::bytes(step.step.bytes),
            flops(step.step.flops),
            floor_mark(gpu, step.step.bytes, step.step.flops)
        );
    }
    out + "</tbody></table></div>"
}
