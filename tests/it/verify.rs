//! `gemma4c verify` on a simulated GPU: what the compiler makes passes, and what is made wrong in it is found and
//! named.

use crate::common::Place;
use crate::common::lowered::{self, Options};
use gemma4c_plan::Plan;
use gemma4c_plan::cuda::{Argument, CudaStep, KvType, Phase, Range, Region};

/// A plan for a GPU, but for its machine code.
fn plan(place: &Place, model: &str, options: Options) -> Plan {
    place.ok(&format!("synth {model} -o model.gguf"));
    lowered::plan(&place.path("model.gguf"), &Options { context: Some(64), ..options })
}

fn chunks_of(rows: u32) -> Options {
    Options { chunk: Some(rows), ..Options::default() }
}

/// Verifies a plan and returns the exit code and the report.
fn verify(place: &Place, plan: &Plan, options: &str) -> (Option<i32>, String) {
    place.write("plan.bin", plan.to_bytes().unwrap());
    let ran = place.run(&format!("verify plan.bin --device sim {options}"));
    assert_eq!(ran.stderr, "", "{}", ran.stdout);
    (ran.code, ran.stdout)
}

#[track_caller]
fn assert_passes(model: &str, tokens: u32) {
    let place = Place::new();
    let plan = plan(&place, model, chunks_of(32));
    let (code, report) = verify(&place, &plan, &format!("--tokens {tokens} --decode 1"));
    assert!(code == Some(0) && report.ends_with("\nok\n"), "{report}");
    for phase in &plan.cuda.as_ref().unwrap().program.phases {
        let row = report.lines().find(|line| line.trim_start().starts_with(&phase.name)).unwrap();
        let steps = phase.steps.len();
        assert!(row.contains(&format!("{steps} of {steps}")), "{report}");
    }
    assert!(report.contains("replay    2 passes as they run otherwise: the same bits"), "{report}");
}

#[test]
fn a_model_with_per_layer_embeddings_passes() {
    assert_passes("tiny-e -q q8_0 --layers 3", 4);
}

#[test]
fn a_mixture_of_experts_passes() {
    assert_passes("tiny-moe -q q8_0 --layers 2", 4);
}

/// What is stored in 8 bits is compared, too, with what the CPU rounds to the same type.
#[test]
fn keys_and_values_in_8_bits_pass() {
    for kv in [KvType::Q8_0, KvType::Fp8] {
        let place = Place::new();
        let plan = plan(&place, "tiny-dense -q q8_0 --layers 2", Options { kv, ..chunks_of(4) });
        let (code, report) = verify(&place, &plan, "--tokens 4 --decode 1");
        assert!(code == Some(0) && report.ends_with("\nok\n"), "{kv:?}: {report}");
    }
}

/// Decode of one row and prefill are compared with the CPU; decode of several rows is said to be compared elsewhere.
#[test]
fn a_plan_for_several_sequences_passes() {
    let place = Place::new();
    let plan = plan(&place, "tiny-dense -q q8_0 --layers 2", Options { sequences: 3, ..chunks_of(4) });
    let phases = &plan.cuda.as_ref().unwrap().program.phases;
    let names: Vec<&str> = phases.iter().map(|phase| phase.name.as_str()).collect();
    assert_eq!(names, ["decode", "decode 2", "decode 4", "prefill 4"]);
    let (code, report) = verify(&place, &plan, "--tokens 3 --decode 1");
    assert!(code == Some(0) && report.ends_with("\nok\n"), "{report}");
    assert!(report.contains("replay    2 passes as they run otherwise: the same bits"), "{report}");
    let judged = |phase: &str| report.lines().any(|line| line.trim_start().starts_with(&format!("{phase}  ")));
    assert_eq!(["decode", "decode 2", "decode 4", "prefill 4"].map(judged), [true, false, false, true], "{report}");
    assert!(report.contains("decode of 2 to 4 rows is not run here: --company"), "{report}");
    let refused = place.refused("verify plan.bin --device sim --phase 'decode 4'");
    assert!(
        refused.contains("decode 4 is compared with decode of one row, to the bit: run with --company 3"),
        "{refused}"
    );
    // As many rows as prefill has mean prefill.
    let (code, report) = verify(&place, &plan, "--tokens 3 --decode 0 --phase 4");
    assert!(code == Some(0) && report.contains("prefill 4"), "{report}");
}

/// A plan of which only decode is left: small enough to be run over and over.
fn decoder(place: &Place, model: &str) -> Plan {
    let mut plan = plan(place, model, chunks_of(2));
    plan.cuda.as_mut().unwrap().program.phases.truncate(1);
    plan
}

/// The launch of decode that leaves a value.
fn maker<'a>(plan: &'a mut Plan, value: &str) -> (usize, &'a mut CudaStep) {
    let index = plan.program.values.iter().position(|v| v.name == value).unwrap() as u32;
    let Phase { steps, .. } = &mut plan.cuda.as_mut().unwrap().program.phases[0];
    let at = steps.iter().position(|step| step.outputs.iter().any(|output| output.value == index)).unwrap();
    (at, &mut steps[at])
}

fn scalars(step: &mut CudaStep) -> Vec<&mut f32> {
    let scalars = step.launch.arguments.iter_mut().filter_map(|argument| match argument {
        Argument::F32(value) => Some(value),
        _ => None,
    });
    scalars.collect()
}

/// A launch's weights, from the largest to the smallest.
fn weights(step: &mut CudaStep) -> Vec<&mut Range> {
    let ranges = step.launch.arguments.iter_mut().filter_map(|argument| match argument {
        Argument::Memory(range) if range.region == Region::Weights => Some(range),
        _ => None,
    });
    let mut ranges: Vec<_> = ranges.collect();
    ranges.sort_by_key(|range| std::cmp::Reverse(range.bytes));
    ranges
}

#[track_caller]
fn assert_names(place: &Place, plan: &Plan, node: &str, words: &[&str]) {
    let (code, report) = verify(place, plan, "--tokens 1 --decode 0 --worst 0");
    assert!(code == Some(1) && report.ends_with("\nFAILED\n"), "{report}");
    let first = report.lines().find(|line| line.starts_with("the first bad node is ")).unwrap_or_default();
    assert!(first.starts_with(&format!("the first bad node is {node}, ")), "{report}");
    for word in words {
        assert!(report.contains(word), "no {word:?} in\n{report}");
    }
}

#[test]
fn a_wrong_scalar_is_found_where_it_is_used() {
    let place = Place::new();
    let mut wrong = decoder(&place, "tiny-e -q q8_0 --layers 3");
    let (_, step) = maker(&mut wrong, "per_layer_inputs.out");
    // The factors of the projection, of the table's rows and of their sum, and epsilon.
    let [_, _, out_scale, _] = &mut scalars(step)[..] else { panic!("other scalars") };
    **out_scale *= 1.01;
    assert_names(&place, &wrong, "per_layer_inputs.out", &["error    1.00 %, limit 0.01 %", "expected", "found"]);

    let mut wrong = decoder(&place, "tiny-dense -q q8_0 --layers 2");
    let (at, step) = maker(&mut wrong, "head.out");
    let cap = scalars(step).into_iter().find(|value| **value == 30.0).unwrap();
    *cap = 20.0;
    assert_names(&place, &wrong, "head.out", &[&format!("as f32 of step {at} of decode")]);
}

#[test]
fn weights_of_another_layer_are_found() {
    let place = Place::new();
    let mut plan = decoder(&place, "tiny-dense -q q4_0 --layers 2");
    let others: Vec<_> = weights(maker(&mut plan, "blk.1.gated.out").1).into_iter().map(|range| *range).collect();
    for (range, other) in weights(maker(&mut plan, "blk.0.gated.out").1).into_iter().zip(others) {
        *range = other;
    }
    assert_names(&place, &plan, "blk.0.gated.out", &["meaning  blk.0.gated.out\n", "kernel   matvec["]);
}

#[test]
fn keys_that_are_stored_wrong_are_found() {
    let place = Place::new();
    let mut plan = decoder(&place, "tiny-dense -q q8_0 --layers 2");
    let (_, step) = maker(&mut plan, "blk.1.attention.mixed");
    // The queries' norm weights, where the keys' should be: only what is stored shows which is wrong.
    let [q, k] =
        weights(step).into_iter().filter(|range| range.bytes == 512 * 4).collect::<Vec<_>>().try_into().unwrap();
    *k = *q;
    assert_names(&place, &plan, "blk.1.attention.k", &["as f16", "blk.1.attention.mixed"]);
}

#[test]
fn a_router_that_chooses_others_is_found() {
    let place = Place::new();
    let mut plan = decoder(&place, "tiny-moe -q q8_0 --layers 2");
    let other = *weights(maker(&mut plan, "blk.1.router.out").1)[0];
    *weights(maker(&mut plan, "blk.0.router.out").1)[0] = other;
    assert_names(&place, &plan, "blk.0.router.out", &["as experts", "expected expert "]);
}

#[test]
fn a_launch_that_is_left_out_is_found() {
    let place = Place::new();
    let mut plan = decoder(&place, "tiny-dense -q q8_0 --layers 2");
    let (at, _) = maker(&mut plan, "blk.1.gated.out");
    let steps = &mut plan.cuda.as_mut().unwrap().program.phases[0].steps;
    // Gate and up once more instead: it makes what it has made.
    steps[at].launch = steps[at - 1].launch.clone();
    // The head reads what would have been made, and is wrong too.
    let launches = format!("{} of {}", steps.len() - 2, steps.len());
    assert_names(&place, &plan, "blk.1.gated.out", &["nothing was written", &launches]);
}

#[test]
fn what_cannot_be_compared_is_refused() {
    let place = Place::new();
    let plan = plan(&place, "tiny-dense -q q8_0 --layers 2", chunks_of(8));
    place.write("plan.bin", plan.to_bytes().unwrap());
    place.ok("compile model.gguf -o cpu.bin --target cpu");
    for (line, words) in [
        ("cpu.bin", "the plan is for the CPU"),
        ("plan.bin --device cpu", "the plan runs on the CPU here"),
        ("plan.bin --phase 9", "the plan has no phase \"9\"; there are decode, prefill 8"),
        ("plan.bin --tokens 9", "9 tokens do not fit prefill 8"),
        ("plan.bin --tokens 0", "at least one is needed"),
        ("plan.bin --tolerance 0", "--tolerance 0"),
    ] {
        let message = place.refused(&format!("verify {line}"));
        assert!(message.contains(words), "{line}: {message}");
    }
}

/// Hundreds of prompts in a batch: every row has the bits it has alone, and nobody owns anything afterwards.
#[test]
fn a_pool_is_whole_after_many_prompts() {
    let place = Place::new();
    place.ok("synth tiny-dense -q q8_0 --layers 2 -o model.gguf");
    place.ok("compile model.gguf -o plan.bin --target cpu --ctx 64 --chunk 16");
    let report = place.ok("verify plan.bin --device cpu --company 3,8 --prompts 300 --tokens 6 --decode 2 --seed 5");
    assert!(report.contains("in batches of 8: 600 rows, 0 differ\n"), "{report}");
    assert!(report.ends_with("\npool: all 24 pages are free again\nok\n"), "{report}");
    let shared = report
        .lines()
        .find_map(|line| line.strip_suffix(" chunks of prompts were shared by several")?.parse::<u32>().ok());
    assert!(shared.is_some_and(|shared| shared > 25), "{report}");
    let hits = report.lines().find_map(|line| line.strip_prefix("after ")?.split(' ').next()?.parse::<u32>().ok());
    assert!(hits.is_some_and(|hits| hits > 100), "{report}");
}
