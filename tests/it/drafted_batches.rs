//! Drafts in batches on the CPU: the tokens and the bits of the logits are those of decoding one by one, whatever was
//! guessed and whoever is beside.

use std::collections::BTreeMap;

use gemma4c_plan::{Plan, Sampling};
use gemma4c_runtime::ModelLocation;
use gemma4c_runtime::engine::{
    CpuDevice, CpuOptions, DraftCounts, DraftSource, Drafts, Engine, Event, Id, Options, Request,
};

use crate::common::{Place, Tensors, golden, random_tokens};

const SAMPLED: Sampling = Sampling { temperature: 1.0, top_k: 20, top_p: 0.95 };

/// Tokens and the bits of the logits each was picked from.
type Answer = (Vec<u32>, Vec<Vec<u32>>);

/// The answers to requests, so many at once.
fn answers(place: &Place, requests: &[Request], sequences: u32, drafts: Drafts) -> (Vec<Answer>, DraftCounts) {
    let location = ModelLocation { plan: place.path("plan.bin"), given: None };
    let plan = Plan::from_bytes(&place.read("plan.bin")).unwrap();
    let cpu = CpuOptions { sequences, snapshots: 2, ..CpuOptions::default() };
    let device = CpuDevice::open(plan, &location, cpu).unwrap();
    let mut engine = Engine::new(device, Options { drafts, ..Options::default() }).unwrap();
    let ids: Vec<Id> = requests.iter().map(|request| engine.submit(request.clone()).unwrap()).collect();
    let mut of: BTreeMap<Id, Answer> = BTreeMap::new();
    while !engine.is_idle() {
        for event in engine.step().unwrap() {
            if let Event::Token { id, token, logits } = event {
                let (tokens, rows) = of.entry(id).or_default();
                tokens.push(token);
                rows.push(logits.iter().map(|value| value.to_bits()).collect());
            }
        }
        engine.audit().unwrap();
    }
    (ids.iter().map(|id| of.remove(id).unwrap()).collect(), engine.draft_counts())
}

fn same(ours: &[Answer], expected: &[Answer], what: &str) {
    for (index, (ours, expected)) in ours.iter().zip(expected).enumerate() {
        assert_eq!(ours.0, expected.0, "{what}: tokens of request {index}");
        assert!(ours.1 == expected.1, "{what}: logits of request {index}");
    }
}

/// A drafter's tokens, greedy and with fifty seeds: after the reference's prompt, where they are often right, and in a
/// batch.
#[test]
fn a_drafter_changes_no_bit_of_a_batch() {
    let Some(folder) = golden::folder() else { return };
    for (drafter, model, seeds) in
        [("e_tiny_assistant_q8_0", "e_tiny_q8_0", 50), ("d_tiny_assistant_bf16", "d_tiny_q8_0", 4)]
    {
        let place = Place::new();
        let [model, drafter] = [folder.join(format!("{model}.gguf")), folder.join(format!("assistant/{drafter}.gguf"))];
        let files = format!("'{}' --draft '{}'", model.display(), drafter.display());
        place.ok(&format!("compile {files} --target cpu --ctx 128 --chunk 8 -o plan.bin"));
        let prompt = Tensors::read(&model.with_extension("golden.safetensors")).ids("tokens");
        let request = |seed: u64| {
            let (snapshot_at, logits) = (vec![prompt.len() as u32 - 1], true);
            let request = Request { seed, snapshot_at, logits, ..Request::greedy(prompt.clone(), 10) };
            if seed.is_multiple_of(5) { request } else { Request { sampling: SAMPLED, ..request } }
        };
        let requests: Vec<Request> = (0..=seeds).map(request).collect();
        let (expected, _) = answers(&place, &requests, 4, Drafts::default());
        for (count, sequences, steps) in [(requests.len(), 4, Some(3)), (5, 1, Some(7)), (9, 6, None)] {
            let drafts = Drafts { source: DraftSource::Drafter, steps };
            let (ours, counts) = answers(&place, &requests[..count.min(requests.len())], sequences, drafts);
            same(&ours, &expected, &format!("{} with {steps:?} drafts", drafter.display()));
            assert!(counts.drafted > 0, "{counts:?}");
            assert!(steps.is_none() || counts.accepted > 5, "some are right: {counts:?}");
        }
    }
}

/// Every pattern of seven right and wrong drafts, over and over, past the windows, eight sequences at once: beside each
/// others of other patterns, and one in eight for which nothing is guessed.
#[test]
fn every_pattern_of_drafts_in_a_batch_gives_the_same_text() {
    const PATTERNS: u32 = 1 << 7;
    let place = Place::new();
    place.ok("synth tiny-e -q q8_0 --layers 3 -o model.gguf");
    place.ok("compile model.gguf -o plan.bin --target cpu --ctx 64 --chunk 8");
    let common = random_tokens(3, 34, 256);
    // The first token says which pattern it is.
    let request = |pattern: u32| {
        let sampling = if pattern.is_multiple_of(3) { Request::greedy([0], 0).sampling } else { SAMPLED };
        Request { sampling, seed: 5, ..Request::greedy([&[pattern], &common[..]].concat(), 14) }
    };
    let requests: Vec<Request> = (0..PATTERNS + PATTERNS / 7).map(request).collect();
    let (expected, _) = answers(&place, &requests, 8, Drafts::default());
    let texts: Vec<Vec<u32>> =
        requests.iter().zip(&expected).map(|(request, (tokens, _))| [&request.prompt[..], tokens].concat()).collect();
    let guess = move |seen: &[u32], most: usize| -> Vec<u32> {
        let pattern = seen[0];
        let truth = texts[pattern as usize][seen.len()..].iter().take(if pattern < PATTERNS { most } else { 0 });
        truth.enumerate().map(|(i, token)| if pattern >> i & 1 == 1 { *token } else { (token + 1) % 256 }).collect()
    };
    let drafts = Drafts { source: DraftSource::Given(Box::new(guess)), steps: Some(7) };
    let (ours, counts) = answers(&place, &requests, 8, drafts);
    same(&ours, &expected, "patterns");
    assert!(counts.accepted_at[..7].iter().all(|count| *count > 0) && counts.drafted > counts.accepted, "{counts:?}");
}

/// Many prompts of a file, through the program.
#[test]
fn a_file_of_prompts_has_the_same_answers_with_drafts() {
    let place = Place::new();
    place.ok("synth tiny-dense -q q8_0 --layers 2 -o model.gguf");
    place.ok("compile model.gguf -o plan.bin --target cpu --ctx 128 --chunk 8");
    let prompt = |i: u32| format!("{{\"tokens\": [{i}, 5, 6, {i}, 5, 6, {i}, 5], \"max_tokens\": 12}}\n");
    place.write("prompts.jsonl", (0..6).map(prompt).collect::<String>());
    let line = |name: &str, draft: &str| {
        format!("run plan.bin --file prompts.jsonl -o {name} --sequences 3 --temp 0 --draft {draft}")
    };
    let plain = place.run(&line("plain", "off"));
    let drafted = place.run(&line("drafted", "ngram"));
    assert_eq!((plain.code, drafted.code), (Some(0), Some(0)), "{}", drafted.stderr);
    assert_eq!(place.read("plain"), place.read("drafted"));
    assert!(!plain.stderr.contains("[drafts: ") && drafted.stderr.contains("[drafts: "), "{}", drafted.stderr);
    let refused = place.refused(&line("none", "4"));
    assert!(refused.contains("no drafter") && refused.contains("--draft"), "{refused}");
}
