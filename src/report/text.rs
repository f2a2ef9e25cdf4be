//! A plan for people, on a terminal.

use std::collections::BTreeMap;
use std::fmt::Write;

use gemma4c_blocks::DType;
use gemma4c_codegen::target::Target;
use gemma4c_plan::embedded::EmbeddedForm;
use gemma4c_plan::{Plan, Seats, Weight};

use super::facts::{Facts, PhaseFacts};
use super::fold::{fold, layer_of, local_name};
use super::units::{flops, time};
use crate::output;

/// What every plan has: its model, its limits, its vocabulary.
pub fn header(plan: &Plan) -> String {
    let program = &plan.program;
    let mut out = String::new();
    let _ = writeln!(out, "model          {}", plan.model.name.as_deref().unwrap_or("(unnamed)"));
    for file in &plan.model.files {
        let _ = writeln!(out, "file           {} ({})", file.path, output::bytes(file.bytes));
    }
    for adapter in &plan.model.adapters {
        let (name, pairs, scale) = (&adapter.name, adapter.pairs, adapter.scale);
        let merged = if adapter.is_merged { ", merged" } else { "" };
        let _ = writeln!(out, "adapter        {name}: {pairs} pairs, times {scale}{merged}");
    }
    if let Some(Seats { count, rank }) = plan.model.seats {
        let _ = writeln!(out, "seats          {count} for adapters of rank {rank}");
    }
    let _ = writeln!(out, "fingerprint    {:016x}", plan.model.fingerprint);
    match &plan.cuda {
        None => {
            let _ = writeln!(out, "target         {}", plan.target.name());
            let kv = if program.kv.is_narrow() {
                format!(", keys and values rounded to {}", program.kv.name())
            } else {
                String::new()
            };
            let _ = writeln!(out, "context        {} of {} trained{kv}", program.context, plan.model.trained_context);
            let _ = writeln!(out, "chunk          {} tokens a pass, logits for {}", program.chunk, program.asked);
        }
        Some(cuda) => {
            let _ = writeln!(
                out,
                "target         {} for {}, by {}",
                plan.target.name(),
                gpus(plan),
                cuda.program.toolchain
            );
            if !plan.others.is_empty() {
                let _ = writeln!(out, "program        that for {}", cuda.program.gpu);
            }
            let _ = writeln!(
                out,
                "context        {} of {} trained, keys and values in {}",
                program.context,
                plan.model.trained_context,
                cuda.program.kv.name()
            );
            let rows = cuda.program.phases.iter().map(|phase| phase.rows).max().unwrap_or(1);
            let _ = writeln!(out, "chunk          {rows} tokens a pass");
        }
    }
    let _ = writeln!(out, "layers         {}, {} with keys of their own", plan.model.layers, program.caches.len());
    let types = by_type(plan.stored().map(|w: &Weight| (w.dtype, w.bytes)));
    let _ = writeln!(out, "weights        {types}");
    if let Some(embedded) = &plan.embedded {
        let form = match embedded.form {
            EmbeddedForm::Tensors => "as in the model file",
            EmbeddedForm::Regions => "as the GPU's memory holds them",
        };
        let _ = writeln!(out, "embedded       {}, {form}: no model file is needed", output::bytes(embedded.bytes));
    }
    let text = match &plan.vocab {
        Some(v) => format!("{} tokens, {} merges", v.tokens.len(), v.merges.len()),
        None => "none: runs on token ids".into(),
    };
    let _ = writeln!(out, "vocabulary     {text}");
    let template = plan.vocab.as_ref().is_some_and(|v| v.chat_template.is_some());
    let _ = writeln!(out, "chat template  {}", if template { "yes" } else { "none" });
    let s = plan.sampling;
    let _ = writeln!(out, "sampling       temperature {}, top-k {}, top-p {}", s.temperature, s.top_k, s.top_p);
    out
}

/// `3 f32 (1.20 kB), 27 q8_0 (4.58 GB)`.
pub fn by_type(sizes: impl Iterator<Item = (DType, u64)>) -> String {
    let mut types: BTreeMap<DType, (u64, u64)> = BTreeMap::new();
    for (dtype, bytes) in sizes {
        let entry = types.entry(dtype).or_default();
        *entry = (entry.0 + 1, entry.1 + bytes);
    }
    let text = types.iter().map(|(t, (count, bytes))| format!("{count} {t} ({})", output::bytes(*bytes)));
    text.collect::<Vec<_>>().join(", ")
}

pub fn memory_table(rows: &[(&str, u64)]) -> String {
    let mut out = "\nmemory\n".to_owned();
    for (what, bytes) in rows {
        let _ = writeln!(out, "  {what:<17}{bytes:>16}  {}", output::bytes(*bytes));
    }
    out
}

/// Tokens of a sequence that is told of.
const SHORT: u32 = 1024;

/// The GPUs that a plan has programs for, that of the shown program first.
pub fn gpus(plan: &Plan) -> String {
    plan.programs().map(|cuda| cuda.program.gpu.to_string()).collect::<Vec<_>>().join(", ")
}

/// All of a GPU plan but its steps.
pub fn plan(facts: &Facts<'_>, gpu: &Target) -> String {
    let memory = &facts.program().memory;
    let mut out = header(facts.plan);
    let layout = &facts.program().kv_layout;
    let mut rows = vec![("weights", memory.weights), ("keys and values", memory.kv), ("activations", memory.arena)];
    rows.extend((memory.seats > 0).then_some(("seats", memory.seats)));
    rows.extend([
        ("on the device", memory.device().unwrap_or(u64::MAX)),
        ("on the host", memory.host),
        ("total", facts.total_bytes()),
    ]);
    out += &memory_table(&rows);
    let _ = writeln!(out, "\nsequences      room for {}", facts.sequences());
    let (page, short) = (layout.page_bytes, SHORT.min(facts.plan.program.context));
    let _ = writeln!(
        out,
        "pages          {} of {page} bytes, each {} tokens of sliding layers or {} of full ones\n\
         {:15}{short} tokens take {} pages, {}",
        layout.pages,
        layout.sliding.rows,
        layout.full.rows,
        "",
        layout.pages_for(short),
        output::bytes(layout.bytes_for(short))
    );
    out += &passes(facts);
    out += &phases(facts, gpu);
    let kernels = &facts.program().kernels;
    let cubins = facts.cuda.code.iter().map(|code| code.image.0.len() as u64).sum();
    let what = if facts.target().arch.is_ptx() { "PTX" } else { "machine code" };
    let _ = writeln!(out, "\nkernels        {}, {} of {what}", kernels.len(), output::bytes(cubins));
    out
}

fn passes(facts: &Facts<'_>) -> String {
    let mut out = "\npasses                applied  refused\n".to_owned();
    for pass in &facts.program().passes {
        let applied = if pass.enabled { pass.applied.to_string() } else { "off".into() };
        let _ = writeln!(out, "  {:<20}{applied:>7}  {:>7}  {}", pass.name, pass.refused.len(), pass.about);
        let refusals = pass.refused.iter().map(|r| (layer_of(&r.node), (local_name(&r.node), r.reason.as_str())));
        for refusal in fold(refusals) {
            let (node, reason) = refusal.what;
            let place = if refusal.layers.is_empty() { String::new() } else { format!("{}, ", refusal.place()) };
            let _ = writeln!(out, "    {place}{node}: {reason}");
        }
    }
    out
}

fn phases(facts: &Facts<'_>, gpu: &Target) -> String {
    let floor = format!("floor on {}", gpu.name);
    let mut out = String::new();
    let _ = writeln!(
        out,
        "\nphases          launches  a layer (mean)  elsewhere   bytes read        FLOPs  {floor:>15}     arena"
    );
    for phase in &facts.phases {
        let _ = writeln!(
            out,
            "  {:<14}{:>8}  {:>7} {:>6}  {:>9}  {:>11}  {:>11}  {:>15}  {:>8}",
            phase.phase.name,
            phase.launches(),
            phase.launches_per_layer(),
            format!("({:.1})", phase.mean_launches_per_layer()),
            phase.launches_outside_layers(),
            output::bytes(phase.bytes()),
            flops(phase.flops()),
            time(phase.floor(gpu)),
            output::bytes(phase.phase.arena_bytes),
        );
    }
    out
}

/// The launches of one phase.
pub fn steps(facts: &Facts<'_>, phase: &PhaseFacts<'_>, gpu: &Target) -> String {
    let mut out = format!(
        "{}: {} launches (the pick is one), {} read, {}, at least {} on {} ({} GB/s, {} TFLOP/s, {})\n\n",
        phase.phase.name,
        phase.launches(),
        output::bytes(phase.bytes()),
        flops(phase.flops()),
        time(phase.floor(gpu)),
        gpu.name,
        gpu.bandwidth / 1e9,
        gpu.compute / 1e12,
        gpu.source
    );
    let width = phase.steps.iter().map(|step| facts.label(step).len()).max().unwrap_or(0).max(6);
    let _ = writeln!(out, "step  layer  {:<width$}      grid  block      bytes        FLOPs     floor", "kernel");
    for (at, step) in phase.steps.iter().enumerate() {
        if phase.asks_from(at) {
            let _ = writeln!(out, "      from here on: the asked row alone");
        }
        let _ = writeln!(
            out,
            "{at:>4}  {:>5}  {:<width$}  {:>8}  {:>5}  {:>9}  {:>11}  {:>8}",
            step.layer.map_or("-".into(), |layer| layer.to_string()),
            facts.label(step),
            step.grid(),
            step.kernel.block,
            output::bytes(step.step.bytes),
            flops(step.step.flops),
            time(gpu.floor(step.step.bytes, step.step.flops)),
        );
        if !step.nodes.is_empty() {
            let _ = writeln!(out, "             = {}", step.nodes.join(", "));
        }
        let _ = writeln!(out, "             {}", step.step.reason);
        if let Some(waits) = phase.waits_for(at) {
            let _ = writeln!(out, "             {waits}");
        }
        if let Some(other) = step.runner_up() {
            let _ = writeln!(out, "             instead of: {other}");
        }
    }
    out
}
