//! Drafters against the reference: every step's logits and hidden states, which drafts are accepted, and files that do
//! not fit.

use std::fmt::Write;
use std::path::Path;

use crate::common::gguf::{Key, rewrite};
use crate::common::{Place, Tensors, golden, ids};
use gemma4c_plan::{Plan, Sampling};
use gemma4c_runtime::{
    Asked, Counts, DraftSource, ModelLocation, Request, RuntimeError, Sampler, Session, Speculation,
};

/// Largest absolute differences behind our own target, as the data's description gives them.
const LOGITS: f32 = 3e-4;
/// Of a layer's output: root mean square of the difference over that of the values.
const LAYERS: f64 = 2e-5;
const STEPS: usize = 4;

/// Each drafter, and the model it belongs to.
const PAIRS: [(&str, &str); 2] = [("e_tiny_assistant_q8_0", "e_tiny_q8_0"), ("d_tiny_assistant_bf16", "d_tiny_q8_0")];

/// A folder with a plan of a model and its drafter.
fn prepared(folder: &Path, drafter: &str, model: &str, options: &str) -> (Place, Tensors) {
    let place = Place::new();
    let golden = Tensors::read(&folder.join(format!("assistant/{drafter}.golden.safetensors")));
    let [model, drafter] = [folder.join(format!("{model}.gguf")), folder.join(format!("assistant/{drafter}.gguf"))];
    place.ok(&format!("compile '{}' --draft '{}' {options} -o plan.bin", model.display(), drafter.display()));
    (place, golden)
}

fn session(place: &Place) -> Session {
    let plan = Plan::from_bytes(&place.read("plan.bin")).unwrap();
    Session::on_cpu(plan, &ModelLocation { plan: place.path("plan.bin"), given: None }).unwrap()
}

fn worst(ours: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(ours.len(), expected.len());
    let differences = ours.iter().zip(expected).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, |worst: f32, d| if d.is_nan() { f32::INFINITY } else { worst.max(d) })
}

/// The difference of a layer's output relative to its size.
fn relative(ours: &[f32], expected: &[f32]) -> f64 {
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
    let differences = square(&mut ours.iter().zip(expected).map(|(a, b)| f64::from(a - b)));
    (differences / square(&mut expected.iter().map(|v| f64::from(*v)))).sqrt()
}

/// Drafts at each of the data's positions and compares all that the data has under `kind`.
fn check_steps(session: &mut Session, golden: &Tensors, kind: &str, name: &str) {
    let tokens = golden.ids("target.tokens");
    let expected = golden.ids(&format!("{kind}.tokens"));
    let [logits, hidden] = ["logits", "h_next"].map(|of| golden.get(&format!("{kind}.{of}")));
    let stages = [
        ("input.out", "draft.pre"),
        ("blk.0.layer.out", "draft.layer.0"),
        ("blk.1.layer.out", "draft.layer.1"),
        ("blk.2.layer.out", "draft.layer.2"),
        ("blk.3.layer.out", "draft.layer.3"),
        ("output_norm.out", "draft.norm"),
    ];
    let mut compared = 0;
    for (index, position) in golden.ids("in.position").into_iter().enumerate() {
        let (fed, token) = (&tokens[..position as usize], tokens[position as usize]);
        session.reset();
        session.feed(fed, Asked::Last, None, |_, _| {}).unwrap();
        let (mut step, mut faults) = (0, Vec::new());
        let mut seen: Vec<(String, Vec<f32>)> = Vec::new();
        let mut drafted = Vec::new();
        session
            .draft(token, STEPS as u32, &mut |value, _, rows| seen.push((value.into(), rows.to_vec())), &mut |draft| {
                let row = index * STEPS + step;
                let width = draft.logits.len();
                let off = worst(draft.logits, &logits.values[row * width..][..width]);
                let width = draft.hidden.len();
                let off_hidden = worst(draft.hidden, &hidden.values[row * width..][..width]);
                if off > LOGITS || off_hidden > LOGITS || draft.token != expected[row] {
                    faults.push(format!("{position} {step}: logits {off:e}, hidden {off_hidden:e}, {}", draft.token));
                }
                drafted.push(draft.token);
                step += 1;
            })
            .unwrap();
        assert!(faults.is_empty(), "{name}, {kind}: {faults:#?}");
        for (value, key) in stages.iter().filter(|_| kind == "draft") {
            let of_steps = seen.iter().filter(|(name, _)| name == value).map(|(_, rows)| rows);
            for (step, rows) in of_steps.enumerate() {
                let expected = &golden.get(key).values[(index * STEPS + step) * rows.len()..][..rows.len()];
                let off = relative(rows, expected);
                assert!(off <= LAYERS, "{name}: {key} at {position}, step {step} is off by {off:e}");
                compared += 1;
            }
        }
    }
    let all = if kind == "draft" { golden.ids("in.position").len() * STEPS * stages.len() } else { 0 };
    assert_eq!(compared, all, "{name}: stages");
}

#[test]
fn every_step_is_the_references() {
    let Some(folder) = golden::folder() else { return };
    for (drafter, model) in PAIRS {
        let (place, golden) = prepared(&folder, drafter, model, "--target cpu --ctx 256");
        let mut ours = session(&place);
        check_steps(&mut ours, &golden, "draft", drafter);

        // And through the program, at the last position.
        let (positions, tokens) = (golden.ids("in.position"), golden.ids("target.tokens"));
        let at = positions[positions.len() - 1] as usize;
        let line = format!("--tokens {} --draft {STEPS}", ids(&tokens[..=at]));
        let written = place.logits("plan.bin", &line);
        let rows = golden.get("draft.logits").values.len() / positions.len();
        let expected = &golden.get("draft.logits").values[(positions.len() - 1) * rows..];
        assert!(worst(&written.get("draft.logits").values, expected) <= LOGITS, "{drafter}");
        assert_eq!(written.get("draft.logits").shape, [STEPS, rows / STEPS]);
        assert_eq!(written.ids("draft.tokens"), golden.ids("draft.tokens")[(positions.len() - 1) * STEPS..]);
        assert_eq!(written.get("draft.h_next").shape, [STEPS, golden.get("draft.h_next").shape[2]]);
        assert_eq!(written.get("logits").shape[0], 1, "the last token is not run");
    }
}

/// Most files in circulation have lost their centroids, and score every token.
#[test]
fn a_drafter_without_its_centroids_scores_every_token() {
    let Some(folder) = golden::folder() else { return };
    let (drafter, model) = PAIRS[0];
    let place = Place::new();
    let golden = Tensors::read(&folder.join(format!("assistant/{drafter}.golden.safetensors")));
    let keep = |name: &str| !name.starts_with("masked_embd");
    rewrite(
        &folder.join(format!("assistant/{drafter}.gguf")),
        &place.path("drafter.gguf"),
        |key| if key.contains("masked_embedding") { Key::Drop } else { Key::Keep },
        |tensor| keep(&tensor.name).then(|| tensor.dims().to_vec()),
    );
    let model = folder.join(format!("{model}.gguf"));
    place.ok(&format!("compile '{}' --draft drafter.gguf --target cpu --ctx 256 -o plan.bin", model.display()));
    check_steps(&mut session(&place), &golden, "full", drafter);
}

/// Drafts at every position of a text that is decoded token by token, past the windows; and the rounds of a
/// speculation.
#[test]
fn drafts_along_a_text_are_the_references() {
    let Some(folder) = golden::folder() else { return };
    for (drafter, model) in PAIRS {
        let (place, golden) = prepared(&folder, drafter, model, "--target cpu --ctx 128 --chunk 8");
        let target = Tensors::read(&folder.join(format!("{model}.golden.safetensors")));
        let (prompt, greedy) = (target.ids("tokens"), target.ids("greedy.tokens"));
        let (tokens, expected) = (golden.ids("target.tokens"), golden.ids("sweep.tokens"));
        assert_eq!(tokens, [&prompt[..], &greedy].concat());
        let mut ours = session(&place);
        ours.feed(&prompt, Asked::Last, None, |_, _| {}).unwrap();
        let mut all = Vec::new();
        for token in &greedy {
            ours.draft(*token, STEPS as u32, &mut |_, _, _| {}, &mut |draft| all.push(draft.token)).unwrap();
            ours.decode(*token, |_| {}).unwrap();
        }
        assert_eq!(all, expected, "{drafter}: the sweep");

        ours.reset();
        let mut speculation = Speculation::new(DraftSource::Drafter, Some(STEPS as u32));
        let mut sampler = Sampler::new(Sampling { temperature: 0.0, top_k: 0, top_p: 1.0 }, 0, Vec::new()).unwrap();
        let request = Request { prompt: &prompt, most: greedy.len() as u32, stop: &[] };
        let mut text = Vec::new();
        ours.generate_speculating::<RuntimeError>(request, &mut sampler, &mut speculation, &mut |token| {
            text.push(token);
            Ok(())
        })
        .unwrap();
        assert_eq!(text, greedy, "{drafter}: the text is the target's, whatever is drafted");
        let accepted = golden.ids("loop.accepted");
        let Counts { rounds, accepted: right, .. } = speculation.counts;
        let sum: u32 = accepted.iter().sum();
        assert_eq!((rounds, right), (accepted.len() as u64, u64::from(sum)), "{drafter}: rounds and accepted drafts");
    }
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let Some(folder) = golden::folder() else { return };
    let place = Place::new();
    let mut texts = String::new();
    for (drafter, _) in PAIRS {
        let from = folder.join(format!("assistant/{drafter}.gguf"));
        std::fs::copy(from, place.path(&format!("{}.gguf", &drafter[..1]))).unwrap();
    }
    std::fs::copy(folder.join("e_tiny_q8_0.gguf"), place.path("model.gguf")).unwrap();
    let whole = place.read("e.gguf");
    place.write("cut.gguf", &whole[..whole.len() / 2]);
    place.ok("compile model.gguf --target cpu --ctx 64 -o plain.bin");
    place.ok("compile model.gguf --draft e.gguf --target cpu --ctx 64 -o plan.bin");
    for (name, line) in [
        ("a drafter of another model", "compile model.gguf --draft d.gguf --target cpu -o new.bin"),
        ("a text model as a drafter", "compile model.gguf --draft model.gguf --target cpu -o new.bin"),
        ("a drafter as a model", "compile e.gguf --target cpu -o new.bin"),
        ("a cut drafter", "compile model.gguf --draft cut.gguf --target cpu -o new.bin"),
        (
            "a drafter that nothing verifies",
            "compile model.gguf --draft e.gguf --drafts 0 --target cuda --arch sm_90a -o new.bin",
        ),
        ("drafts of a plan without a drafter", "logits plain.bin --tokens 2,5,6 --draft 4 -o new.safetensors"),
        ("drafts after nothing", "logits plan.bin --tokens 2 --draft 4 -o new.safetensors"),
        ("speculation without a drafter", "run plain.bin --tokens 2,5 --draft 3"),
        ("too many drafts", "run plan.bin --tokens 2,5 --draft 8"),
    ] {
        writeln!(texts, "{name}\n    {}", place.refused(line).trim_end()).unwrap();
        assert!(!place.path("new.bin").exists() && !place.path("new.safetensors").exists(), "{name}");
    }
    // The drafter's file is one of the plan's: another in its place is noticed.
    std::fs::copy(place.path("d.gguf"), place.path("e.gguf")).unwrap();
    writeln!(
        texts,
        "another file in the drafter's place\n    {}",
        place.refused("run plan.bin --tokens 2,5 -n 1").trim_end()
    )
    .unwrap();
    assert_text!("errors", "drafts", texts);
}

/// A plan with its weights in it has the drafter's too, and says what it is.
#[test]
fn a_drafter_is_part_of_its_plan() {
    let Some(folder) = golden::folder() else { return };
    let (place, golden) = prepared(&folder, PAIRS[0].0, PAIRS[0].1, "--target cpu --ctx 128 --embed-weights");
    let plan = Plan::from_bytes(&place.read("plan.bin")).unwrap();
    let arena = plan.drafter.as_ref().unwrap().program.arena_bytes;
    let text = place.ok("inspect plan.bin");
    assert!(text.contains("of the drafter") && text.contains("layers 2 and 3, scores 96 tokens"), "{text}");
    let json: serde_json::Value = serde_json::from_str(&place.ok("inspect plan.bin --json")).unwrap();
    assert_eq!(json["drafter"]["arena_bytes"].as_u64(), Some(arena));
    let memory = |of: &str| json["memory"][of].as_u64().unwrap();
    assert_eq!(memory("total"), memory("weights") + memory("kv") + memory("arena") + arena);
    place.ok("inspect plan.bin --html page.html");
    assert!(String::from_utf8(place.read("page.html")).unwrap().contains("activations of the drafter"));
    check_steps(&mut session(&place), &golden, "draft", "embedded");
}
