//! Drafts verified on the simulated GPU: rows of one sequence in one decode give the tokens and the logits of decoding
//! one by one.

use std::path::Path;

use gemma4c_codegen::arch::Arch;
use gemma4c_codegen::target::Target as Gpu;
use gemma4c_dsl::sim::Interleaving;
use gemma4c_plan::Sampling;
use gemma4c_plan::cuda::KvType;
use gemma4c_runtime::{DraftSource, ModelLocation, Session, Speculation};

use crate::common::lowered::{self, Options};
use crate::common::{Place, random_tokens};
use crate::simulated::generate;

fn session(model: &Path, options: &Options, target: Gpu, chained: bool) -> Session {
    let plan = lowered::plan_for(model, options, &[target]);
    let location = ModelLocation { plan: model.with_extension("bin"), given: Some(model.to_path_buf()) };
    let session = match chained {
        false => gemma4c::simulate::open(plan, &location, None),
        true => gemma4c::simulate::open_chained(plan, &location, Interleaving::SuccessorFirst),
    };
    session.expect("a plan that can be simulated")
}

/// The tokens after a prompt, and the bits of the logits of one token more.
fn with_logits(
    session: &mut Session,
    prompt: &[u32],
    case: &Case,
    drafts: Option<&mut Speculation>,
) -> (Vec<u32>, Vec<u32>) {
    let tokens = generate(session, prompt, case.most, case.sampling, drafts);
    let mut logits = Vec::new();
    session
        .decode(tokens[tokens.len() - 1], |row| logits = row.iter().map(|x| x.to_bits()).collect())
        .expect("it runs");
    (tokens, logits)
}

/// Drafts of which in each round as many are right as `pattern` says; the next one is wrong.
fn forced(text: Vec<u32>, pattern: &'static [usize], drafts: u32) -> Speculation {
    let mut rounds = pattern.iter().cycle();
    let guess = move |seen: &[u32], most: usize| {
        let right = *rounds.next().expect("a cycle");
        let follows = text[seen.len().min(text.len())..].iter().take(most).enumerate();
        follows.map(|(i, token)| if i < right { *token } else { (token + 1) % 256 }).collect()
    };
    Speculation::new(DraftSource::Given(Box::new(guess)), Some(drafts))
}

struct Case {
    synth: &'static str,
    kv: KvType,
    target: Gpu,
    sampling: Sampling,
    prompt: usize,
    most: u32,
    drafts: u32,
    pattern: &'static [usize],
    chained: bool,
}

fn check(case: &Case) {
    let place = Place::new();
    place.ok(&format!("synth {} -o model.gguf", case.synth));
    let options = Options {
        context: Some(64),
        chunk: Some(4),
        kv: case.kv,
        drafts: Some(case.drafts),
        snapshots: Some(0),
        ..Options::default()
    };
    let mut session = session(&place.path("model.gguf"), &options, case.target.clone(), case.chained);
    let prompt = random_tokens(2, case.prompt, 256);
    let plain = with_logits(&mut session, &prompt, case, None);
    let mut drafts = forced([&prompt[..], &plain.0].concat(), case.pattern, case.drafts);
    let drafted = with_logits(&mut session, &prompt, case, Some(&mut drafts));
    assert_eq!(drafted.0, plain.0, "{}: tokens", case.synth);
    assert!(drafted.1 == plain.1, "{}: logits behind them differ", case.synth);
    assert!(drafts.counts.accepted > 0 && drafts.counts.drafted > drafts.counts.accepted, "{:?}", drafts.counts);
}

/// In clusters, with launches side by side: the store of keys and the rows that look at them must wait for each other.
#[test]
fn rows_of_one_sequence_wait_for_each_others_keys() {
    let (kv, target) = (KvType::F16, Gpu::of_arch(Arch::Sm90a));
    let (sampling, pattern) = (Sampling { temperature: 1.0, top_k: 40, top_p: 0.95 }, &[2]);
    check(&Case {
        synth: "tiny-dense -q q8_0 --layers 2",
        kv,
        target,
        sampling,
        prompt: 3,
        most: 5,
        drafts: 3,
        pattern,
        chained: true,
    });
}

/// As many as are looked up: the rows of a round are those of the widest decode, and wrong ones have written over keys
/// that are out of every window.
#[test]
fn sixteen_rows_of_one_sequence_have_the_bits_of_one_by_one() {
    let sampling = Sampling { temperature: 0.0, top_k: 1, top_p: 1.0 };
    check(&Case {
        synth: "tiny-e -q q8_0 --layers 3",
        kv: KvType::F16,
        // Twenty tokens one by one are the most of it, and take a third of the time where launches have few blocks.
        target: Gpu::of_arch(Arch::Sm90a).with_multiprocessors(8),
        sampling,
        prompt: 5,
        most: 19,
        drafts: 15,
        pattern: &[11, 1],
        chained: false,
    });
}

/// Experts, keys and values in 8 bits, and a GPU without clusters.
#[test]
fn rows_of_one_sequence_of_other_models_have_the_bits_of_one_by_one() {
    let (kv, target) = (KvType::Q8_0, Gpu::of_arch(Arch::Sm89));
    let (sampling, pattern) = (Sampling { temperature: 0.0, top_k: 1, top_p: 1.0 }, &[2]);
    // Four rows, then two: none is free, whose numbers would be whatever was there.
    check(&Case {
        synth: "tiny-moe -q q4_0 --layers 2",
        kv,
        target,
        sampling,
        prompt: 3,
        most: 6,
        drafts: 3,
        pattern,
        chained: false,
    });
}
