//! Speculation changes how many passes a text takes, and nothing else: the same tokens, the same end, the same state
//! behind it.

use std::path::Path;

use crate::common::lowered::{self, Options};
use crate::common::{Place, Tensors, golden, random_tokens};
use gemma4c_plan::cuda::{CudaStep, Phase, PhaseKind};
use gemma4c_plan::{Plan, Sampling};
use gemma4c_runtime::{
    Asked, Counts, DraftSource, Finish, ModelLocation, Request, RuntimeError, Sampler, Session, Speculation,
};

const GREEDY: Sampling = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0 };
const SAMPLED: Sampling = Sampling { temperature: 1.0, top_k: 20, top_p: 0.95 };

fn session(place: &Place, plan: &str) -> Session {
    let location = ModelLocation { plan: place.path(plan), given: None };
    Session::on_cpu(Plan::from_bytes(&place.read(plan)).unwrap(), &location).unwrap()
}

/// A plan of a small model whose rings are as short as its chunks allow.
fn small(preset: &str) -> Place {
    let place = Place::new();
    place.ok(&format!("synth {preset} -q q8_0 -o model.gguf"));
    place.ok("compile model.gguf -o plan.bin --target cpu --ctx 128 --chunk 8");
    place
}

/// What a generation gives: tokens, why it ended, where the session stands, and the logits of one token more.
#[derive(PartialEq, Debug)]
struct Outcome {
    tokens: Vec<u32>,
    end: Finish,
    position: u32,
    logits: Vec<u32>,
}

struct Case<'a> {
    request: Request<'a>,
    sampling: Sampling,
    seed: u64,
    /// Tokens that are never picked.
    suppress: Vec<u32>,
}

impl<'a> Case<'a> {
    fn new(prompt: &'a [u32], most: u32, sampling: Sampling, seed: u64) -> Case<'a> {
        Case { request: Request { prompt, most, stop: &[] }, sampling, seed, suppress: Vec::new() }
    }
}

/// Generates with or without drafts in a session that is at its beginning.
fn generate(session: &mut Session, case: &Case<'_>, speculation: Option<&mut Speculation>) -> Outcome {
    session.reset();
    let mut sampler = Sampler::new(case.sampling, case.seed, case.suppress.clone()).unwrap();
    let mut tokens = Vec::new();
    let each: &mut dyn FnMut(u32) -> Result<(), RuntimeError> = &mut |token| {
        tokens.push(token);
        Ok(())
    };
    let end = match speculation {
        None => session.generate(case.request, &mut sampler, each),
        Some(speculation) => session.generate_speculating(case.request, &mut sampler, speculation, each),
    };
    let (end, position) = (end.unwrap(), session.position());
    // All layers still have what the next token looks back on, and nothing of rejected drafts.
    let mut logits = Vec::new();
    if position < session.plan().program.context {
        session.feed(&[7], Asked::Last, None, |_, row| logits = row.iter().map(|x| x.to_bits()).collect()).unwrap();
    }
    Outcome { tokens, end, position, logits }
}

/// Drafts of `text` of which in each round as many are right as `pattern` says, over and over; the next one is wrong.
fn forced(text: Vec<u32>, pattern: Vec<usize>) -> Speculation {
    let mut rounds = pattern.into_iter().cycle();
    let guess = move |seen: &[u32], most: usize| {
        let right = rounds.next().unwrap();
        let follows = &text[seen.len().min(text.len())..];
        let drafts = follows.iter().take(most).enumerate();
        drafts.map(|(i, token)| if i < right { *token } else { (token + 1) % 256 }).collect()
    };
    Speculation::new(DraftSource::Given(Box::new(guess)), Some(7))
}

/// Every number of accepted drafts, alone and after every other, behind prompts that are shorter and longer than a
/// window.
#[test]
fn every_pattern_of_accepted_drafts_gives_the_same_text() {
    for (preset, prompts) in [("tiny-e", &[(5, GREEDY), (45, SAMPLED)][..]), ("tiny-dense", &[(45, GREEDY)])] {
        let place = small(preset);
        let mut session = session(&place, "plan.bin");
        for &(length, sampling) in prompts {
            let prompt = random_tokens(3, length, 256);
            let case = Case::new(&prompt, 50, sampling, 9);
            let plain = generate(&mut session, &case, None);
            let text = [&prompt[..], &plain.tokens].concat();
            let mut patterns: Vec<Vec<usize>> = (0..=7).map(|n| vec![n]).collect();
            patterns.push((0..8).flat_map(|a| (0..8).flat_map(move |b| [a, b])).collect());
            for pattern in patterns {
                let mut speculation = forced(text.clone(), pattern.clone());
                let drafted = generate(&mut session, &case, Some(&mut speculation));
                assert_eq!(drafted, plain, "{preset}, {pattern:?} after {length} tokens");
                let Counts { rounds, accepted, .. } = speculation.counts;
                assert_eq!(rounds + accepted, 49, "a round gives what it accepts and one token: {pattern:?}");
                if let [every] = pattern[..] {
                    assert!(accepted + 7 >= 49 * every as u64 / (every as u64 + 1), "{pattern:?}: {accepted}");
                }
            }
        }
    }
}

/// Wherever a text ends (its length, a stop token, the context), it ends there with drafts too.
#[test]
fn a_text_ends_where_it_ends_without_drafts() {
    let place = small("tiny-e");
    let mut session = session(&place, "plan.bin");
    let prompt = random_tokens(5, 40, 256);
    let all = Case::new(&prompt, 200, SAMPLED, 1);
    let plain = generate(&mut session, &all, None);
    assert_eq!((plain.end, plain.tokens.len()), (Finish::Context, 128 - 40 + 1));
    let text = [&prompt[..], &plain.tokens].concat();
    let mut check = |request: Request<'_>| {
        let case = Case { request, ..Case::new(&prompt, 0, SAMPLED, 1) };
        let plain = generate(&mut session, &case, None);
        for pattern in [vec![7], vec![3], vec![0, 7, 1]] {
            let drafted = generate(&mut session, &case, Some(&mut forced(text.clone(), pattern.clone())));
            assert_eq!(drafted, plain, "{pattern:?}, at most {}, stop at {:?}", request.most, request.stop);
        }
        plain.end
    };
    assert_eq!(check(all.request), Finish::Context);
    for most in 0..12 {
        assert_eq!(check(Request { most, ..all.request }), Finish::Length);
    }
    for stop in &plain.tokens[..12] {
        assert_eq!(check(Request { stop: &[*stop], ..all.request }), Finish::Stop);
    }
}

/// Whoever listens may give up in the middle of a round; the session then stands behind what was told.
#[test]
fn a_listener_that_gives_up_leaves_a_session_that_goes_on() {
    let place = small("tiny-e");
    let mut session = session(&place, "plan.bin");
    let prompt = random_tokens(5, 40, 256);
    let case = Case::new(&prompt, 20, GREEDY, 0);
    let plain = generate(&mut session, &case, None);
    let text = [&prompt[..], &plain.tokens].concat();
    for patience in 0..9 {
        session.reset();
        let (mut sampler, mut told) = (Sampler::new(GREEDY, 0, Vec::new()).unwrap(), 0);
        let given_up = session.generate_speculating::<RuntimeError>(
            case.request,
            &mut sampler,
            &mut forced(text.clone(), vec![7]),
            &mut |_| {
                told += 1;
                if told > patience { Err(RuntimeError::NoTokens) } else { Ok(()) }
            },
        );
        assert!(matches!(given_up, Err(RuntimeError::NoTokens)));
        assert_eq!(session.position() as usize, prompt.len() + patience);
        let mut picked = None;
        let last = text[session.position() as usize];
        let at = session.position() as u64 + 1;
        session.decode(last, |row| picked = sampler.pick(row, at)).unwrap();
        assert_eq!(picked, Some(text[prompt.len() + patience + 1]), "after {patience}");
    }
}

#[test]
fn a_plan_of_one_row_a_pass_says_that_it_cannot_verify() {
    let place = small("tiny-e");
    place.ok("compile model.gguf -o narrow.bin --target cpu --ctx 64 --chunk 1");
    let error = place.refused("run narrow.bin --tokens 2,5 -n 4 --draft ngram");
    assert!(error.contains("one row a pass") && error.contains("--chunk"), "{error}");
}

/// The model that comes with the program, on a text that repeats itself: looking up guesses most of it.
#[test]
fn a_text_that_repeats_itself_is_looked_up() {
    let place = Place::new();
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/austen_q4_0.gguf");
    place.ok(&format!("compile '{}' -o plan.bin --target cpu --ctx 512", model.display()));
    let prompt = "She was very sorry. She was very glad. ".repeat(6);
    let line = |draft: &str| format!("run plan.bin -p '{prompt}' -n 60 --temp 0 --draft {draft}");
    let plain = place.run(&line("off"));
    let drafted = place.run(&line("ngram"));
    assert_eq!((plain.code, drafted.code), (Some(0), Some(0)), "{}", drafted.stderr);
    assert_eq!(plain.stdout, drafted.stdout);
    assert!(!plain.stderr.contains("[drafts: ") && drafted.stderr.contains("[drafts: "), "{}", drafted.stderr);

    // How many are made depends on the clock; with a fixed number the passes can be counted.
    let mut session = session(&place, "plan.bin");
    let ids: Vec<u32> = place
        .ok(&format!("tokenize plan.bin -p '{prompt}'"))
        .split_whitespace()
        .map(|id| id.parse().unwrap())
        .collect();
    // A model that may say but one word repeats itself from the second one on.
    let all_but_one: Vec<u32> = (0..session.plan().model.vocab_size).filter(|token| *token != 9).collect();
    for (sampling, suppress, most_rounds) in
        [(GREEDY, vec![], 58), (SAMPLED, vec![], 59), (GREEDY, all_but_one.clone(), 10), (SAMPLED, all_but_one, 10)]
    {
        let case = Case { suppress, ..Case::new(&ids, 60, sampling, 4) };
        let plain = generate(&mut session, &case, None);
        for (drafts, most_rounds) in [(7, most_rounds), (15, if most_rounds == 10 { 6 } else { most_rounds })] {
            let mut lookup = Speculation::new(DraftSource::Lookup, Some(drafts));
            assert_eq!(generate(&mut session, &case, Some(&mut lookup)), plain);
            assert!(lookup.counts.rounds <= most_rounds, "{:?}", lookup.counts);
        }
    }
}

/// The reference's drafters, greedy and with fifty seeds.
#[test]
fn a_drafter_changes_no_text() {
    let Some(folder) = golden::folder() else { return };
    for (drafter, model, seeds) in
        [("e_tiny_assistant_q8_0", "e_tiny_q8_0", 50), ("d_tiny_assistant_bf16", "d_tiny_q8_0", 8)]
    {
        let place = Place::new();
        let [model, drafter] = [folder.join(format!("{model}.gguf")), folder.join(format!("assistant/{drafter}.gguf"))];
        let files = format!("'{}' --draft '{}'", model.display(), drafter.display());
        place.ok(&format!("compile {files} --target cpu --ctx 128 --chunk 8 -o plan.bin"));
        let mut session = session(&place, "plan.bin");
        let target = Tensors::read(&model.with_extension("golden.safetensors"));
        let (mut accepted, prompt) = (0, target.ids("tokens"));
        for seed in 0..=seeds {
            let sampling = if seed == seeds { GREEDY } else { SAMPLED };
            let case = Case::new(&prompt, 12, sampling, seed);
            let plain = generate(&mut session, &case, None);
            let steps = [None, Some(2), Some(7)][seed as usize % 3];
            let mut speculation = Speculation::new(DraftSource::Drafter, steps);
            assert_eq!(generate(&mut session, &case, Some(&mut speculation)), plain, "seed {seed}, {steps:?}");
            accepted += speculation.counts.accepted;
        }
        assert!(accepted > 3, "some drafts are right: {accepted}");
        let ran = place.run("run plan.bin --tokens 2,5,6 -n 12 --temp 0");
        assert!(ran.stderr.contains("[drafts: "), "a drafter is used where there is one: {}", ran.stderr);
        assert_eq!(ran.stdout, place.ok("run plan.bin --tokens 2,5,6 -n 12 --temp 0 --draft off"));
    }
}

/// On a GPU, phases whose rows may be of one sequence store all keys before a row looks at them; others keep it in one
/// launch.
#[test]
fn keys_are_stored_before_rows_of_one_sequence_look_at_them() {
    let place = Place::new();
    place.ok("synth tiny-e -q q8_0 -o model.gguf");
    let stores = |verified: u32, sequences: u32| {
        let options = Options { context: Some(64), drafts: Some(verified - 1), sequences, ..Options::default() };
        let program = lowered::plan(&place.path("model.gguf"), &options).cuda.unwrap().program;
        assert_eq!(program.verified_rows, verified);
        let caches = program.kv_layout.caches.len();
        let count = |phase: &Phase| {
            let is_store = |step: &&CudaStep| program.kernels[step.launch.kernel as usize].name.starts_with("heads");
            (phase.rows, phase.steps.iter().filter(is_store).count())
        };
        let decode = program.phases.iter().filter(|phase| phase.kind == PhaseKind::Decode);
        (caches, decode.map(count).collect::<Vec<_>>(), program.kv_layout.slots)
    };
    let (caches, decode, slots) = stores(4, 1);
    assert_eq!((decode, slots), (vec![(1, 0), (2, caches), (4, caches)], 1), "more rows, and no more sequences");
    let (_, decode, _) = stores(1, 4);
    assert_eq!(decode, [(1, 0), (2, 0), (4, 0)]);
}
