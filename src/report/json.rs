//! A GPU plan for programs.

use gemma4c_codegen::target::Target;
use gemma4c_plan::Plan;
use gemma4c_plan::cuda::{CudaProgram, Paging, PhaseKind};
use gemma4c_plan::embedded::EmbeddedForm;
use serde_json::{Value, json};

use super::facts::{Facts, PhaseFacts};

/// The model a plan belongs to.
pub fn model(plan: &Plan) -> Value {
    json!({"name": plan.model.name, "files": plan.model.files, "layers": plan.model.layers,
           "fingerprint": format!("{:016x}", plan.model.fingerprint),
           "hidden": plan.model.hidden, "vocab_size": plan.model.vocab_size, "adapters": plan.model.adapters,
           "seats": plan.model.seats})
}

/// The weights a plan has with it.
pub fn embedded(plan: &Plan) -> Value {
    plan.embedded.as_ref().map_or(Value::Null, |weights| {
        json!({"form": match weights.form {
            EmbeddedForm::Tensors => "tensors",
            EmbeddedForm::Regions => "regions",
        }, "bytes": weights.bytes})
    })
}

/// All of it but machine code and texts of kernels.
pub fn plan(facts: &Facts<'_>, gpu: &Target) -> Value {
    let program = facts.program();
    let passes = program.passes.iter().map(|pass| {
        let refused = pass.refused.iter().map(|r| json!({"node": r.node, "reason": r.reason}));
        json!({"name": pass.name, "about": pass.about, "enabled": pass.enabled, "applied": pass.applied,
               "refused": refused.collect::<Vec<_>>()})
    });
    let kernels = program.kernels.iter().zip(&facts.labels).map(|(kernel, label)| {
        json!({"name": kernel.name, "label": label, "instance": kernel.instance, "block": kernel.block,
               "shared": kernel.shared})
    });
    let caches = facts.caches();
    let caches = caches.iter().map(|c| json!({"layer": c.layer, "window": c.window, "bytes": c.bytes}));
    let (memory, layout) = (&program.memory, &program.kv_layout);
    json!({
        "model": model(facts.plan),
        "arch": program.gpu.architecture,
        "program": gpu_of(program),
        "programs": facts.plan.programs().map(|cuda| gpu_of(&cuda.program)).collect::<Vec<_>>(),
        "toolchain": program.toolchain,
        "context": facts.plan.program.context,
        "kv_type": program.kv.name(),
        "embedded": embedded(facts.plan),
        "passes": passes.collect::<Vec<_>>(),
        "phases": facts.phases.iter().map(|p| phase(facts, p, gpu)).collect::<Vec<_>>(),
        "memory": {"weights": memory.weights, "kv": memory.kv, "arena": memory.arena, "host": memory.host,
                   "seats": memory.seats,
                   "device": memory.device().unwrap_or(u64::MAX), "total": facts.total_bytes()},
        "kv_layout": {"pages": layout.pages, "page_bytes": layout.page_bytes, "sliding": paging(layout.sliding),
                      "full": paging(layout.full)},
        "sequences": {"at_once": layout.slots, "of_whole_context": layout.sequences_of(facts.plan.program.context),
                      "tokens_of_each": layout.positions_each(facts.plan.program.context)},
        "caches": caches.collect::<Vec<_>>(),
        "kernels": kernels.collect::<Vec<_>>(),
        "gpu": {"name": gpu.name, "bandwidth": gpu.bandwidth, "compute": gpu.compute, "source": gpu.source},
    })
}

fn paging(Paging { rows, entries }: Paging) -> Value {
    json!({"rows": rows, "pages_of_a_sequence": entries})
}

fn gpu_of(program: &CudaProgram) -> Value {
    let gpu = &program.gpu;
    json!({"key": gpu.key, "name": gpu.name, "arch": gpu.architecture, "multiprocessors": gpu.multiprocessors,
           "shared_bytes_per_block": gpu.shared_bytes_per_block, "l2_bytes": gpu.l2_bytes, "measured": gpu.measured})
}

fn phase(facts: &Facts<'_>, phase: &PhaseFacts<'_>, gpu: &Target) -> Value {
    let steps = phase.steps.iter().enumerate().map(|(at, s)| {
        // From `asked_from` on a prefill phase works on one row.
        let asked = phase.phase.kind == PhaseKind::Prefill && at >= phase.phase.asked_from as usize;
        let outputs = s.step.outputs.iter().map(|o| &phase.meaning.values[o.value as usize].name);
        json!({"kernel": s.kernel.name, "label": facts.label(s), "nodes": s.nodes, "grid": s.step.launch.grid,
               "block": s.kernel.block, "layer": s.layer, "rows": if asked { 1 } else { phase.phase.rows },
               "bytes": s.step.bytes, "flops": s.step.flops, "floor_us": gpu.floor(s.step.bytes, s.step.flops) * 1e6,
               "outputs": outputs.collect::<Vec<_>>(), "after": s.step.after, "programmatic": s.step.launch.programmatic,
               "reason": s.step.reason, "runner_up": s.runner_up()})
    });
    json!({
        "name": phase.phase.name,
        "rows": phase.phase.rows,
        "launches": phase.launches(),
        "launches_per_layer": phase.launches_per_layer(),
        "mean_launches_per_layer": phase.mean_launches_per_layer(),
        "launches_outside_layers": phase.launches_outside_layers(),
        "bytes_read": phase.bytes(),
        "flops": phase.flops(),
        "floor_us": phase.floor(gpu) * 1e6,
        "arena_bytes": phase.phase.arena_bytes,
        "asked_from": phase.phase.asked_from,
        "steps": steps.collect::<Vec<_>>(),
    })
}
