//! What the passes make of the tiny models: before and after each, group by group, and launch by launch for the choices
//! that the lowering makes. What a pass refuses is for the most part a test of the graph's own.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::common::Place;
use crate::common::lowered::{self, Options, header};
use gemma4c::launched;
use gemma4c::launched::recipes::Recipe;
use gemma4c_blocks::DType;
use gemma4c_codegen::arch::Arch;
use gemma4c_codegen::passes::PASSES as TARGET_PASSES;
use gemma4c_graph::passes::{Goal, PASSES, Report, fuse};
use gemma4c_graph::{Fused, Graph, fused_text, layer_ranges, verify, verify_groups};
use gemma4c_models::gemma4::{self, Config};
use gemma4c_models::gguf::Gguf;
use gemma4c_models::synth::{Preset, Types};
use gemma4c_plan::Plan;
use gemma4c_plan::cuda::{CudaProgram, CudaStep};

const TINY: [Preset; 3] = [Preset::TinyE, Preset::TinyDense, Preset::TinyMoe];

fn graph(preset: Preset) -> Graph {
    let place = Place::new();
    header(&place.path("model.gguf"), preset, DType::Q8_0);
    let file = Gguf::open(place.path("model.gguf")).expect("a model");
    gemma4::graph(&file, &Config::read(&file).expect("a config")).expect("a graph")
}

/// The first `count` passes alone.
fn after(graph: &Graph, goal: Goal, count: usize) -> (Fused, Vec<Report>) {
    let later: Vec<String> = PASSES[count..].iter().map(|pass| pass.name.to_owned()).collect();
    fuse(graph, goal, &later)
}

/// What has changed, place by place: the lines that are gone and the new ones. Equal changes are options once.
fn changes(before: &BTreeMap<Option<u32>, String>, now: &BTreeMap<Option<u32>, String>) -> String {
    let mut options: Vec<(String, Vec<u32>, bool)> = Vec::new();
    for (layer, text) in now {
        let old = before.get(layer).map_or("", String::as_str);
        let missing = |from: &str, to: &str, mark: &str| -> String {
            let gone = from.lines().filter(|line| !to.lines().any(|other| other == *line));
            gone.map(|line| format!("    {mark} {line}\n")).collect()
        };
        let change = missing(old, text, "-") + &missing(text, old, "+");
        if change.is_empty() {
            continue;
        }
        match options.iter_mut().find(|(known, _, outside)| *known == change && *outside == layer.is_none()) {
            Some((_, layers, _)) => layers.extend(layer),
            None => options.push((change, layer.iter().copied().collect(), layer.is_none())),
        }
    }
    let place = |layers: &[u32], outside: bool| match (outside, layers.len()) {
        (true, _) => "outside the layers".into(),
        (false, 1) => format!("layer {}", layers[0]),
        (false, _) => format!("layers {}", layer_ranges(layers)),
    };
    options.iter().map(|(change, layers, outside)| format!("  {}\n{change}", place(layers, *outside))).collect()
}

fn layers_of(graph: &Graph) -> Vec<Option<u32>> {
    let mut layers: Vec<Option<u32>> = graph.nodes.iter().map(|node| node.layer).collect();
    layers.sort();
    layers.dedup();
    layers
}

fn texts(fused: &Fused) -> BTreeMap<Option<u32>, String> {
    layers_of(&fused.graph).into_iter().map(|layer| (layer, fused_text(fused, layer))).collect()
}

/// Prefill, where every pass has something to do, pass by pass; then what is left of decode.
#[test]
fn before_and_after_each_pass() {
    for preset in TINY {
        let graph = graph(preset);
        let mut text = String::new();
        for (at, pass) in PASSES.iter().enumerate() {
            let (before, (now, reports)) = (after(&graph, Goal::Prefill, at).0, after(&graph, Goal::Prefill, at + 1));
            let log = &reports[at].log;
            writeln!(text, "{}: {}\n  applied {} times", pass.name, pass.about, log.applied).expect("a string");
            for (node, reason) in &log.refused {
                writeln!(text, "  refused {node}: {reason}").expect("a string");
            }
            writeln!(text, "{}", changes(&texts(&before), &texts(&now))).expect("a string");
        }
        let (decode, _) = fuse(&graph, Goal::Decode, &[]);
        let whole = changes(&BTreeMap::new(), &texts(&decode)).replace("    + ", "    ");
        write!(text, "decode, all passes\n{whole}").expect("a string");
        assert_text!("passes", preset.name(), text);
    }
}

/// Whatever is switched off, graph and groups are well-formed, and nothing is left out.
#[test]
fn groups_are_well_formed_whichever_pass_is_left_out() {
    for preset in TINY {
        let graph = graph(preset);
        for goal in [Goal::Decode, Goal::Prefill] {
            let all_off = PASSES.iter().map(|pass| pass.name.to_owned()).collect();
            let one_off = PASSES.iter().map(|pass| vec![pass.name.to_owned()]);
            for disabled in one_off.chain([vec![], all_off]) {
                let (fused, reports) = fuse(&graph, goal, &disabled);
                let what = format!("{} for {goal:?} without {disabled:?}", preset.name());
                assert_eq!(verify(&fused.graph), Ok(()), "{what}");
                assert_eq!(verify_groups(&fused), Ok(()), "{what}");
                for report in reports.iter().filter(|report| !report.enabled) {
                    assert_eq!((report.log.applied, report.log.refused.len()), (0, 0), "{what}: {}", report.name);
                }
                let appends = |graph: &Graph| graph.nodes.iter().filter(|node| node.op.name() == "kv_append").count();
                assert_eq!(appends(&fused.graph), appends(&graph), "{what}: keys and values are left behind");
            }
        }
    }
}

/// A phase's launches by the layer of their last value: the kernel, and the values it computes.
fn launches(plan: &Plan, phase: usize) -> BTreeMap<Option<u32>, String> {
    let program = &plan.cuda.as_ref().expect("a GPU plan").program;
    let mut texts: BTreeMap<Option<u32>, String> = BTreeMap::new();
    let layer_of = |name: &str| name.strip_prefix("blk.")?.split('.').next()?.parse().ok();
    let mut next = None;
    for step in program.phases[phase].steps.iter().rev() {
        let names: Vec<&str> = step.nodes.iter().map(|v| plan.program.values[*v as usize].name.as_str()).collect();
        next = names.last().map_or(next, |name| layer_of(name));
        let own = next.map(|layer: u32| format!("blk.{layer}."));
        let short = |name: &&str| own.as_ref().and_then(|own| name.strip_prefix(own)).unwrap_or(name).to_string();
        let before = next.and_then(|layer| layer.checked_sub(1)).map(|layer| format!("blk.{layer}."));
        let short = |name: &&str| match before.as_ref().and_then(|before| name.strip_prefix(before)) {
            Some(rest) => format!("prev.{rest}"),
            None => short(name),
        };
        let names = if names.is_empty() {
            "(a conversion)".into()
        } else {
            names.iter().map(short).collect::<Vec<_>>().join(", ")
        };
        let kernel = &program.kernels[step.launch.kernel as usize].name;
        let text = texts.entry(next).or_default();
        *text = format!("{kernel}: {names}\n{text}");
    }
    texts
}

/// The choices that the lowering makes, each against the plan without it.
#[test]
fn before_and_after_each_choice_of_the_lowering() {
    let place = Place::new();
    let model = place.path("model.gguf");
    header(&model, Preset::TinyE, DType::Q8_0);
    let options = Options { context: Some(128), chunk: Some(32), ..Options::default() };
    let now = lowered::plan(&model, &options);
    let mut text = String::new();
    for (name, about) in TARGET_PASSES.iter().filter(|pass| !pass.required).map(|pass| (pass.name, pass.about)) {
        let before = lowered::plan(&model, &options.clone().without(&[name]));
        writeln!(text, "{name}: {about}").expect("a string");
        for (phase, of) in now.cuda.iter().flat_map(|cuda| &cuda.program.phases).enumerate() {
            let changed = changes(&launches(&before, phase), &launches(&now, phase));
            let changed = if changed.is_empty() { "  nothing\n".into() } else { changed };
            writeln!(text, "{}\n{changed}", of.name).expect("a string");
        }
    }
    assert_text!("passes", "lowering", text);
}

/// Products with 8-bit activations that a launch is, by what was compiled into its kernel.
fn int8_products(program: &CudaProgram, step: &CudaStep) -> u32 {
    let kernel = &program.kernels[step.launch.kernel as usize];
    let has = |choice: &str| kernel.instance.contains(choice);
    match kernel.name.as_str() {
        "matvec" => u32::from(has("INTEGER = true")),
        // Gate and projection.
        "per_layer_step" => 2,
        // Of the experts, and of a dense half that comes along.
        "expert_geglu" | "expert_down" if has("INTEGER = true") => {
            if has("DENSE = 0,") {
                1
            } else {
                2
            }
        }
        _ => 0,
    }
}

/// How often each choice of the lowering applied, and where it did not and why: as the plan reports it.
#[test]
fn the_lowering_reports_what_it_did() {
    let place = Place::new();
    let model = place.path("model.gguf");
    let options = Options { context: Some(128), chunk: Some(32), ..Options::default() };
    let mut text = String::new();
    for (preset, dtype, options) in [
        (Preset::TinyE, DType::Q8_0, options.clone()),
        (Preset::TinyDense, DType::BF16, options.clone()),
        (Preset::TinyDense, DType::Q4_0, options.clone().with_copies()),
        (Preset::TinyMoe, DType::Q4_0, options.clone()),
        (Preset::TinyMoe, DType::Q8_0, options.clone().without(&["mixtures", "warpgroups"])),
        (Preset::TinyDense, DType::Q8_0, options.without(&["int8", "attention-step"])),
    ] {
        header(&model, preset, dtype);
        let plan = lowered::plan(&model, &options);
        let program = plan.cuda.as_ref().expect("a GPU plan").program.clone();
        writeln!(text, "{} {dtype}{}", preset.name(), without(&options.disabled)).expect("a string");
        for pass in program.passes.iter().filter(|pass| TARGET_PASSES.iter().any(|known| known.name == pass.name)) {
            writeln!(text, "  {}: {}", pass.name, if pass.enabled { pass.applied.to_string() } else { "off".into() })
                .expect("a string");
            assert!(pass.enabled || (pass.applied, pass.refused.len()) == (0, 0), "{}: it is off", pass.name);
            for refusal in &pass.refused {
                writeln!(text, "    not {}: {}", refusal.node, refusal.reason).expect("a string");
            }
        }
        // Counts are of the phase where there are most: each is a launch of the kernel it is about, or two.
        let launches = |phase: usize, kernels: &[&str]| {
            let steps = program.phases[phase].steps.iter();
            let names = steps.map(|step| program.kernels[step.launch.kernel as usize].name.as_str());
            names.filter(|name| kernels.contains(name)).count() as u32
        };
        let applied = |pass: &str| program.passes.iter().find(|known| known.name == pass).map_or(0, |p| p.applied);
        assert_eq!(applied("attention-step"), launches(0, &["attention_step"]));
        assert_eq!(
            applied("warpgroups"),
            launches(1, &["product_wgmma", "product_tiles", "product_decoding", "product_team"])
        );
        assert_eq!(applied("attention-warpgroups"), launches(1, &["attention_warpgroups"]));
        let copied = if applied("bf16-copies") > 0 { launches(1, &["product_wgmma", "product_tiles"]) } else { 0 };
        assert_eq!(applied("bf16-copies"), copied);
        let integer: u32 = program.phases[0].steps.iter().map(|step| int8_products(&program, step)).sum();
        assert_eq!(applied("int8"), integer, "products of a row with 8-bit activations, and nothing else");
        for pass in &program.passes {
            let mut nodes: Vec<&str> = pass.refused.iter().map(|refusal| refusal.node.as_str()).collect();
            let all = nodes.len();
            nodes.sort();
            nodes.dedup();
            assert_eq!(nodes.len(), all, "{}: a node is refused twice", pass.name);
        }
        // What decode multiplies in 8 bits is not refused, whatever prefill does with it.
        let refused = |name: &str| {
            let int8 = program.passes.iter().find(|pass| pass.name == "int8").expect("a report");
            int8.refused.iter().any(|refusal| refusal.node == name)
        };
        for step in program.phases[0].steps.iter().filter(|step| int8_products(&program, step) > 0) {
            let names = step.nodes.iter().map(|index| plan.program.values[*index as usize].name.as_str());
            assert!(!names.clone().any(refused), "{:?}", names.collect::<Vec<_>>());
        }
    }
    assert_text!("passes", "lowering-counts", text);
}

/// The passes of batches and of towers, which the tiny models have nothing for: what they decide saves launches.
#[test]
fn passes_of_batches_and_towers_save_launches() {
    let lower = |recipe: Recipe| launched::Plan::lower(recipe).expect("a plan").lowered.program;
    let recipe = |preset| Recipe::new(preset, Types::All(DType::Q4_0), Arch::Sm90a);
    let without = |recipe: &Recipe, pass| Recipe { options: recipe.options.clone().without(&[pass]), ..recipe.clone() };
    let mut batch = recipe(Preset::Dense12b);
    batch.options.sequences = 8;
    let prologues = |program: &CudaProgram| {
        let phase = program.phases.iter().find(|phase| phase.name == "decode 8").expect("a decode of 8 rows");
        let names = phase.steps.iter().map(|step| program.kernels[step.launch.kernel as usize].name.as_str());
        names.filter(|name| *name == "prepare_rows").count() as u32
    };
    let tiled = lower(batch.clone());
    let quantised = lower(without(&batch, "activation-tiles"));
    let tiles = tiled.passes.iter().find(|pass| pass.name == "activation-tiles").expect("a report").applied;
    assert_eq!((tiles, prologues(&quantised) - prologues(&tiled)), (48, 48), "one launch of each layer");
    let pictures = Recipe { has_towers: true, ..recipe(Preset::E4b) };
    let of_towers =
        |program: CudaProgram| program.towers[0].phases.iter().map(|phase| phase.steps.len()).sum::<usize>();
    let (fused, single) = (lower(pictures.clone()), lower(without(&pictures, "towers")));
    let report = fused.passes.iter().find(|pass| pass.name == "towers").expect("a report");
    // Of each of 16 layers two norms, the gate, heads and attention; and the last residual.
    assert_eq!((report.applied, report.refused.len()), (81, 0), "{:?}", report.refused);
    let (fused, single) = (of_towers(fused), of_towers(single));
    assert!(fused * 2 < single, "{fused} launches, {single} without the pass");
}

fn without(passes: &[String]) -> String {
    if passes.is_empty() { String::new() } else { format!(" without {}", passes.join(", ")) }
}

/// Where a choice of the lowering does not apply, the launch that is there instead says why.
#[test]
fn what_the_lowering_leaves_alone_has_its_reason() {
    let place = Place::new();
    let options = Options { context: Some(128), chunk: Some(32), ..Options::default() };
    let reason = |preset: Preset, dtype: DType, options: &Options, phase: &str, kernel: &str, value: &str| -> String {
        header(&place.path("model.gguf"), preset, dtype);
        let plan = lowered::plan(&place.path("model.gguf"), options);
        let program = &plan.cuda.as_ref().expect("a GPU plan").program;
        let phase = program.phases.iter().find(|known| known.name == phase).expect("a phase");
        let computes = |step: &&CudaStep| {
            let names = step.nodes.iter().any(|v| plan.program.values[*v as usize].name == value);
            names && program.kernels[step.launch.kernel as usize].name == kernel
        };
        let step = phase.steps.iter().find(computes).unwrap_or_else(|| panic!("no {kernel} computes {value}"));
        format!("{}\n    instead of: {}", step.reason, if step.runner_up.is_empty() { "-" } else { &step.runner_up })
    };
    let mut text = String::new();
    let mut tell = |what: &str, reason: String| writeln!(text, "{what}\n    {reason}").expect("a string");
    tell(
        "absorb-norms: a norm that a router's experts read",
        reason(
            Preset::TinyMoe,
            DType::Q8_0,
            &options.clone().without(&["mixtures"]),
            "decode",
            "rms_norm",
            "blk.0.mixture_of_experts.expert_input",
        ),
    );
    tell(
        "absorb-norms: a norm of many rows",
        reason(Preset::TinyDense, DType::Q8_0, &options, "prefill 32", "residual_norm", "blk.0.mlp.normed"),
    );
    tell(
        "attention-step: heads of many rows",
        reason(Preset::TinyDense, DType::Q8_0, &options, "prefill 32", "heads", "blk.0.attention.q"),
    );
    let f32_keys = Options { kv: gemma4c_plan::cuda::KvType::F32, ..options.clone() };
    tell(
        "tensor cores for attention: keys and values in f32",
        reason(Preset::TinyDense, DType::Q8_0, &f32_keys, "prefill 32", "attention_plain", "blk.0.attention.mixed"),
    );
    let q8_0_keys = Options { kv: gemma4c_plan::cuda::KvType::Q8_0, ..options.clone() };
    tell(
        "attention-warpgroups: keys and values in 8 bits",
        reason(Preset::TinyDense, DType::Q8_0, &q8_0_keys, "prefill 32", "attention_flash", "blk.0.attention.mixed"),
    );
    tell(
        "attention-warpgroups: switched off",
        reason(
            Preset::TinyDense,
            DType::Q8_0,
            &options.clone().without(&["attention-warpgroups"]),
            "prefill 32",
            "attention_flash",
            "blk.0.attention.mixed",
        ),
    );
    tell(
        "warpgroups: switched off",
        reason(
            Preset::TinyDense,
            DType::Q8_0,
            &options.clone().without(&["warpgroups"]),
            "prefill 32",
            "product",
            "blk.0.attention.projected",
        ),
    );
    assert_text!("passes", "lowering-refusals", text);
}
