//! A plan as one page for a browser: no other file, no network, readable without scripts.
//!
//! What the page shows is drawn here, as SVG and HTML. The page of a GPU plan has one small script, which recomputes
//! the floors when another GPU is chosen; there a launch has the same colour everywhere, that of the value it computes
//! last. The page of a CPU plan is in `cpu.rs`.

mod arena;
mod cpu;
mod cuda_text;
mod draw;
mod fusion;
mod kernels;
mod layer;
mod layout;
mod memory;
mod schedule;

use std::fmt::Write;

use gemma4c_codegen::target::{GPUS, Target};
use gemma4c_plan::Plan;

use super::facts::{Facts, StepFacts};
use super::fold::local_name;
use super::text::by_type;
use super::units::time;
use crate::output;

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// The page of a plan. Of a GPU plan, `gpu` gives the floors; the best known one of its architecture where none is
/// given.
pub fn page(plan: &Plan, gpu: Option<&Target>) -> String {
    match Facts::of(plan) {
        Some(facts) => gpu_page(&facts, gpu.unwrap_or(&facts.target())),
        None => cpu::page(plan),
    }
}

fn gpu_page(facts: &Facts<'_>, gpu: &Target) -> String {
    let hues = Hues::of_plan(facts);
    let name = escape(facts.plan.model.name.as_deref().unwrap_or("(unnamed)"));
    let sections = [
        ("layer", "A layer, before and after", fusion::layers(facts, &hues, gpu)),
        ("fusion", "What was fused, what was not", fusion::section(facts, &hues)),
        ("schedule", "The schedule", schedule::section(facts, &hues, gpu)),
        ("memory", "Memory, to the byte", memory::section(facts, &hues)),
        ("kernels", "The kernels", kernels::section(facts)),
    ];
    document(&name, &gpu_choice(gpu), &header(facts, &name, gpu), &sections, SCRIPT)
}

/// A page of sections, each with its name in the address, its title and its body; `choice` stands in the bar above
/// them.
fn document(name: &str, choice: &str, header: &str, sections: &[(&str, &str, String)], script: &str) -> String {
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"><title>{name}: a plan</title>\
         <style>\n{STYLE}</style></head><body>\n<nav><a class=\"home\" href=\"#top\">gemma4c</a>"
    );
    for (id, title, _) in sections {
        let _ = write!(out, "<a href=\"#{id}\" title=\"{title}\">{id}</a>");
    }
    out += choice;
    out += "</nav>\n<main id=\"top\">";
    out += header;
    for (id, title, body) in sections {
        let _ = write!(out, "\n<section id=\"{id}\"><h2>{title}</h2>{body}</section>");
    }
    out += "\n</main>";
    if !script.is_empty() {
        let _ = write!(out, "<script>\n{script}</script>");
    }
    out + "</body></html>\n"
}

/// Panes of which one is shown at a time, each with its title, what stands below that, and its body.
fn tabs(panes: &[(String, String, String)]) -> String {
    let mut out = "<div class=\"tabs\">".to_owned();
    for (at, (title, below, _)) in panes.iter().enumerate() {
        let _ = write!(
            out,
            "<input type=\"radio\" name=\"layer\" id=\"tab{at}\"{}><label for=\"tab{at}\">{title}<small>{below}</small></label>",
            if at == 0 { " checked" } else { "" },
        );
    }
    for (_, _, body) in panes {
        let _ = write!(out, "<div class=\"pane scroll\">{body}</div>");
    }
    out + "</div>"
}

/// The GPUs, for the script to choose among.
fn gpu_choice(chosen: &Target) -> String {
    let mut out = "<label>floors on <select id=\"gpu\">".to_owned();
    for gpu in &GPUS {
        let _ = write!(
            out,
            "<option data-w=\"{:e}\" data-c=\"{:e}\"{}>{}</option>",
            gpu.bandwidth,
            gpu.compute,
            if gpu.key == chosen.key { " selected" } else { "" },
            gpu.name
        );
    }
    out + "</select></label>"
}

fn header(facts: &Facts<'_>, name: &str, gpu: &Target) -> String {
    let (plan, program) = (facts.plan, facts.program());
    let mut out = format!("<header><h1>{name}</h1><p class=\"lead\">");
    let files: Vec<String> = plan.model.files.iter().map(|file| escape(&file.path)).collect();
    let _ = write!(
        out,
        "Compiled for {} by {} from <code>{}</code>, fingerprint <code>{:016x}</code>.</p><div class=\"tiles\">",
        escape(&program.gpu.to_string()),
        escape(&program.toolchain),
        files.join("</code>, <code>"),
        plan.model.fingerprint
    );
    let mut tile = |value: String, what: &str| out += &tile(&value, what);
    if let Some(decode) = facts.phases.first() {
        let floor = decode.floor(gpu);
        let rate = if floor > 0.0 { 1.0 / floor } else { 0.0 };
        tile(decode.launches().to_string(), "launches a token");
        let mean = format!("launches a layer at most, {:.1} on average", decode.mean_launches_per_layer());
        tile(decode.launches_per_layer().to_string(), &mean);
        tile(output::bytes(decode.bytes()), "read for a token at full context");
        tile(format!("<span class=\"sum\" data-of=\"strip0\">{}</span>", time(floor)), "floor of a token");
        tile(format!("<span class=\"rate\" data-of=\"strip0\">{rate:.0}</span>"), "tokens/s at most, batch 1");
    }
    tile(output::bytes(program.memory.device().unwrap_or(u64::MAX)), "on the device");
    out += "</div>";
    out += &described(&[
        ("layers", format!("{}, {} with keys of their own", plan.model.layers, plan.program.caches.len())),
        ("hidden", plan.model.hidden.to_string()),
        ("vocabulary", vocabulary(plan)),
        ("context", format!("{} of {} trained", plan.program.context, plan.model.trained_context)),
        ("keys and values", program.kv.name().to_owned()),
        ("room for", facts.sequences()),
        ("weights", by_type(plan.stored().map(|w| (w.dtype, w.bytes)))),
        ("phases", program.phases.iter().map(|phase| phase.name.clone()).collect::<Vec<_>>().join(", ")),
        ("kernels", program.kernels.len().to_string()),
    ]);
    out + "</header>"
}

/// A number and what it counts.
fn tile(value: &str, what: &str) -> String {
    format!("<div class=\"tile\"><b>{value}</b><span>{what}</span></div>")
}

/// Words and what they stand for.
fn described(facts: &[(&str, String)]) -> String {
    let mut out = "<dl class=\"facts\">".to_owned();
    for (what, value) in facts {
        let _ = write!(out, "<div><dt>{what}</dt><dd>{}</dd></div>", escape(value));
    }
    out + "</dl>"
}

fn vocabulary(plan: &Plan) -> String {
    plan.vocab.as_ref().map_or("none: runs on token ids".to_owned(), |v| {
        format!(
            "{} tokens, {} merges{}",
            v.tokens.len(),
            v.merges.len(),
            v.chat_template.as_ref().map_or("", |_| ", chat template")
        )
    })
}

/// Colours of launches, by the value each computes last.
pub struct Hues {
    keys: Vec<String>,
}

/// Colours in the style sheet.
const HUES: usize = 12;

impl Hues {
    fn of_plan(facts: &Facts<'_>) -> Hues {
        let mut keys: Vec<String> = Vec::new();
        for step in facts.phases.iter().flat_map(|phase| &phase.steps) {
            let key = Hues::key(step);
            if !keys.contains(&key) {
                keys.push(key);
            }
        }
        Hues { keys }
    }

    fn key(step: &StepFacts<'_>) -> String {
        step.nodes.last().map_or(format!("({})", step.kernel.name), |name| local_name(name).to_owned())
    }

    /// The number of its class.
    pub fn of(&self, step: &StepFacts<'_>) -> usize {
        let key = Hues::key(step);
        self.keys.iter().position(|known| *known == key).unwrap_or(0) % HUES
    }
}

/// A launch's floor as an element's attributes and text, without the start of its tag: the script finds it by them.
pub fn floor_mark(gpu: &Target, bytes: u64, flops: u64) -> String {
    format!("data-b=\"{bytes}\" data-f=\"{flops}\">{}", time(gpu.floor(bytes, flops)))
}

/// Joins names; consecutive names of one module have its prefix once: `attention.q_raw, k_raw`.
pub fn compact(names: &[&str], between: &str) -> String {
    let mut module = None;
    let mut short_names = Vec::new();
    for name in names {
        match name.rsplit_once('.') {
            Some((same, leaf)) if module == Some(same) => short_names.push(leaf),
            other => {
                module = other.map(|(module, _)| module);
                short_names.push(name);
            }
        }
    }
    short_names.join(between)
}

/// Text for HTML.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\'' => out += "&#39;",
            c => out.push(c),
        }
    }
    out
}

/// The first so many characters.
pub fn shorten(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        None => text.to_owned(),
        Some(_) => text.chars().take(most - 1).chain(['…']).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_is_said_once() {
        assert_eq!(compact(&["a.x", "a.y", "b.x", "c", "b.y"], ", "), "a.x, y, b.x, c, b.y");
        assert_eq!(compact(&[], ", "), "");
    }

    #[test]
    fn texts_are_safe_and_short() {
        assert_eq!(escape("<a href='x'>\"&\"</a>"), "&lt;a href=&#39;x&#39;&gt;&quot;&amp;&quot;&lt;/a&gt;");
        assert_eq!((shorten("äöü", 3), shorten("äöü!", 3)), ("äöü".to_owned(), "äö…".to_owned()));
    }
}
