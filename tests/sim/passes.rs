//! Every pass switched off in turn: the plan is another one, and what it computes is the same.
//!
//! Plans of the smallest models of each kind run in the simulator, and are compared with what their steps mean, which
//! the CPU computes in f32. A pass that makes no difference to a model's launches is not run for it.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

use crate::common::lowered::{self, Options};
use crate::common::{Place, random_tokens};
use crate::simulated::{Distance, Feed, each, exhaustive, on_cpu, on_simulator};
use gemma4c_codegen::arch::Arch;
use gemma4c_codegen::passes::optional;
use gemma4c_codegen::target::Target;
use gemma4c_graph::passes::PASSES;
use gemma4c_plan::Plan;
use gemma4c_plan::cuda::{KvType, Phase};
use gemma4c_runtime::Asked;

/// The kinds of models, as small as they come, and the passes that must make a difference to each.
const MODELS: [(&str, &str); 3] = [
    ("tiny-dense -q q4_0 --layers 2", "dead-rows scale-gathers geglu join-products epilogues heads norms"),
    (
        "tiny-e -q q8_0 --layers 3",
        "dead-rows per-layer-inputs per-layer-gate per-layer-step geglu join-products epilogues heads norms",
    ),
    (
        "tiny-moe -q q8_0 --layers 2",
        "dead-rows scale-gathers geglu join-products epilogues heads norms router expert-sums mixtures",
    ),
];

/// With rounded activations, and without.
const ROUNDED: (f64, f32) = (0.15, 1.0);
const EXACT: (f64, f32) = (1e-3, 1e-3);

fn phases(plan: &Plan) -> &[Phase] {
    &plan.cuda.as_ref().expect("a GPU plan").program.phases
}

/// Compares a plan in the simulator with its meaning.
fn check(model: &Path, what: &str, options: &Options, limits: (f64, f32)) -> Result<(), String> {
    check_pieces(model, what, options, limits, &[4]).map(|_| ())
}

/// The seed of the tokens that are fed.
const TOKENS: u64 = 7;

/// The same for a prompt in these pieces, and a token after it. Returns the rows of the simulator.
fn check_pieces(
    model: &Path,
    what: &str,
    options: &Options,
    (rms, largest): (f64, f32),
    pieces: &[usize],
) -> Result<Vec<(usize, Vec<f32>)>, String> {
    let started = Instant::now();
    let plan = lowered::plan(model, options);
    let tokens = random_tokens(TOKENS, pieces.iter().sum::<usize>() + 1, plan.model.vocab_size);
    let feed = Feed { tokens: &tokens, pieces: pieces.to_vec(), asked: Asked::Last };
    let expected = feed.rows(&mut on_cpu(plan.clone(), model));
    let ours = feed.rows(&mut on_simulator(plan, model));
    let mut all = Distance::default();
    for ((at, ours), (of, expected)) in ours.iter().zip(&expected) {
        assert_eq!(at, of);
        all = all.and(Distance::of(ours, expected));
    }
    let seconds = started.elapsed().as_secs_f32();
    let report =
        format!("{what}: {} rows, rms {:.5}, largest {:.5}, {seconds:.0} s", ours.len(), all.rms(), all.largest);
    writeln!(std::io::stderr(), "{report}").expect("stderr takes a message");
    if all.rms() <= rms && all.largest <= largest { Ok(ours) } else { Err(report) }
}

#[test]
fn each_pass_switched_off_computes_the_same() {
    let place = Place::new();
    let whole = Options { context: Some(64), chunk: Some(4), ..Options::default() };
    let mut jobs = Vec::new();
    let mut of_dense = BTreeSet::new();
    for (index, (synth, must_differ)) in MODELS.iter().enumerate() {
        let file = format!("{index}.gguf");
        place.ok(&format!("synth {synth} -o {file}"));
        let preset = synth.split(' ').next().expect("a preset");
        jobs.push((file.clone(), format!("{preset} as it is"), whole.clone(), ROUNDED));
        let all = lowered::plan(&place.path(&file), &whole);
        for pass in optional() {
            let without = whole.clone().without(&[pass]);
            if phases(&lowered::plan(&place.path(&file), &without)) == phases(&all) {
                assert!(!must_differ.split(' ').any(|name| name == pass), "{preset}: {pass} makes no difference");
                continue;
            }
            // What a pass does to a dense model's layers it does to those of a model with per-layer embeddings, too.
            match preset {
                "tiny-dense" => _ = of_dense.insert(pass),
                "tiny-e" if of_dense.contains(pass) && !exhaustive() => continue,
                _ => {}
            }
            if pass != "int8" {
                jobs.push((file.clone(), format!("{preset} without {pass}"), without, ROUNDED));
            }
            if pass == "int8" || exhaustive() {
                let exact = Options { kv: KvType::F32, ..whole.clone() }.without(&["int8", pass]);
                jobs.push((file.clone(), format!("{preset} in f32 without {pass}"), exact, EXACT));
            }
        }
    }
    each(&jobs, |(file, what, options, limits)| check(&place.path(file), what, options, *limits));
}

/// Experts whose results are summed by a kernel of its own, for all rows, by a router in single steps.
#[test]
fn experts_in_single_steps_compute_the_same() {
    let place = Place::new();
    place.ok("synth tiny-moe -q q4_k --layers 2 -o model.gguf");
    let options = Options { context: Some(64), chunk: Some(4), ..Options::default() };
    let options = options.without(&["router", "expert-sums", "dead-rows"]);
    check(&place.path("model.gguf"), "tiny-moe in single steps", &options, ROUNDED)
        .unwrap_or_else(|wrong| panic!("{wrong}"));
}

/// Enough rows that experts have several tiles of them: by warpgroups over repacked weight planes and over bf16 copies,
/// which give the same bits, and by warps.
#[test]
fn experts_of_many_rows_compute_the_same() {
    let place = Place::new();
    place.ok("synth tiny-moe -q q4_0 --layers 2 -o model.gguf");
    let options = Options { context: Some(512), chunk: Some(512), ..Options::default() };
    let mut of_planes = None;
    for (what, options) in [
        ("by warpgroups", options.clone()),
        ("with bf16 copies", options.clone().with_copies()),
        ("by warps", options.without(&["warpgroups"])),
    ] {
        let model = place.path("model.gguf");
        let rows = check_pieces(&model, &format!("tiny-moe {what}"), &options, ROUNDED, &[9, 191])
            .unwrap_or_else(|wrong| panic!("{wrong}"));
        // In phases of 32 and 512, and of 128 rows: the result of a row does not depend on the other rows of its chunk.
        let plan = lowered::plan(&model, &options);
        let tokens = random_tokens(TOKENS, 200, plan.model.vocab_size);
        let feed = Feed { tokens: &tokens, pieces: vec![104, 96], asked: Asked::Last };
        let otherwise = feed.rows(&mut on_simulator(plan, &model));
        assert_eq!((rows[1].0, otherwise[1].0), (199, 199), "the last row of the prompt");
        assert!(rows[1] == otherwise[1], "{what}");
        match what {
            "by warpgroups" => of_planes = Some(rows),
            "with bf16 copies" => assert!(of_planes.as_ref() == Some(&rows), "a copy changes no bit"),
            _ => {}
        }
    }
}

/// On a GPU of one SM a tiny model's tiles are many, so that bulk copies bring the operands of its products, from
/// copies that are kept and from weights that are widened for one product after another: the bits are those of weights
/// decoded on the way, and of chunks of other sizes.
#[test]
fn products_by_bulk_copies_change_no_bit() {
    let place = Place::new();
    place.ok("synth tiny-e -q q8_0 --layers 3 -o model.gguf");
    let model = place.path("model.gguf");
    let gpu = [Target::of_arch(Arch::Sm90a).with_multiprocessors(1)];
    let options = Options { context: Some(256), chunk: Some(256), ..Options::default() };
    let plan = |options: &Options| lowered::plan_for(&model, options, &gpu);
    let by_bulk_copies = |plan: &Plan| {
        let program = &plan.cuda.as_ref().expect("a GPU plan").program;
        let is_one = |kernel: u32| program.kernels[kernel as usize].name == "product_tiles";
        let steps = program.phases.iter().flat_map(|phase| &phase.steps);
        steps.filter(|step| is_one(step.launch.kernel)).count()
    };
    let (decoding, widened) = (plan(&options.clone().without(&["widened-weights"])), plan(&options));
    let copied = plan(&options.with_copies());
    // The per-layer projection is bf16 in every file.
    assert!(by_bulk_copies(&copied) > by_bulk_copies(&decoding) + 3);
    assert!(by_bulk_copies(&widened) > by_bulk_copies(&decoding) + 3);
    let tokens = random_tokens(TOKENS, 150, copied.model.vocab_size);
    let rows = |plan: &Plan, pieces: &[usize]| {
        let feed = Feed { tokens: &tokens, pieces: pieces.to_vec(), asked: Asked::Last };
        feed.rows(&mut on_simulator(plan.clone(), &model)).pop()
    };
    let expected = rows(&decoding, &[150]);
    assert!(expected.is_some() && rows(&copied, &[150]) == expected && rows(&copied, &[133, 17]) == expected);
    assert!(rows(&widened, &[150]) == expected, "what is widened for one product is what a copy has");
    let early = with_weights_widened_early(&widened);
    assert!(phases(&early) != phases(&widened), "nothing runs beside the chain");
    assert!(rows(&early, &[150]) == expected, "weights are widened as early as the edges allow");
}

/// The same launches, each that widens weights right behind the last step that it waits for.
fn with_weights_widened_early(plan: &Plan) -> Plan {
    let mut plan = plan.clone();
    let program = &mut plan.cuda.as_mut().expect("a GPU plan").program;
    for phase in &mut program.phases {
        let mut order: Vec<usize> = Vec::new();
        for (at, step) in phase.steps.iter().enumerate() {
            let is_early = program.kernels[step.launch.kernel as usize].name == "widen";
            let last =
                step.after.iter().filter_map(|before| order.iter().position(|placed| *placed == *before as usize));
            let behind = last.max().map_or(0, |last| last + 1);
            order.insert(if is_early { behind } else { at }, at);
        }
        let moved = |at: u32| order.iter().position(|placed| *placed == at as usize).map_or(at, |to| to as u32);
        let step = |at: &usize| {
            let mut step = phase.steps[*at].clone();
            step.after.iter_mut().for_each(|before| *before = moved(*before));
            step.after.sort_unstable();
            step
        };
        phase.steps = order.iter().map(step).collect();
    }
    plan
}

/// Nothing fused at all: the plain kernels alone.
#[test]
fn all_passes_switched_off_compute_the_same() {
    let place = Place::new();
    let passes: Vec<&str> = PASSES.iter().map(|pass| pass.name).collect();
    for (synth, _) in MODELS {
        place.ok(&format!("synth {synth} -o model.gguf"));
        let options = Options { context: Some(64), chunk: Some(4), kv: KvType::F32, ..Options::default() };
        let options = options.without(&[&passes[..], &["int8"]].concat());
        check(&place.path("model.gguf"), &format!("{synth} without any pass"), &options, EXACT)
            .unwrap_or_else(|wrong| panic!("{wrong}"));
    }
}

/// So many keys that decode splits them over several blocks (split-KV): the parts are merged in a cluster, or in global
/// memory.
#[test]
fn attention_of_several_blocks_computes_the_same() {
    let place = Place::new();
    place.ok("synth tiny-e -q q8_0 --layers 3 -o model.gguf");
    let options = Options { context: Some(300), chunk: Some(32), ..Options::default() };
    for (what, options) in [("in clusters", options.clone()), ("in memory", options.without(&["clusters"]))] {
        check_pieces(&place.path("model.gguf"), &format!("tiny-e, {what}"), &options, ROUNDED, &[32, 32, 5])
            .unwrap_or_else(|wrong| panic!("{wrong}"));
    }
}
