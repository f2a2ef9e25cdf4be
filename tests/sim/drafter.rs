//! Drafters on the simulated GPU: their steps against the reference's numbers, and texts that are the same with and
//! without them.

use std::path::Path;

use gemma4c_codegen::arch::Arch;
use gemma4c_codegen::target::Target as Gpu;
use gemma4c_dsl::sim::Interleaving;
use gemma4c_plan::Sampling;
use gemma4c_plan::cuda::KvType;
use gemma4c_runtime::{
    Asked, DraftSource, Finish, ModelLocation, Request, RuntimeError, Sampler, Session, Speculation,
};

use crate::common::lowered::{self, Options};
use crate::common::{Tensors, golden};
use crate::simulated::generate;

const GREEDY: Sampling = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0 };
const SAMPLED: Sampling = Sampling { temperature: 1.0, top_k: 8, top_p: 0.95 };

/// A drafter, its model, and how far logits and hidden states may be off, at most and as the root of the mean square:
/// what the data's description gives for such activations behind an engine's own target.
struct Pair {
    drafter: &'static str,
    model: &'static str,
    logits: [f64; 2],
    hidden: [f64; 2],
    positions: &'static [u32],
    /// Whether it looks at some groups of tokens only.
    grouped: bool,
}

const PAIRS: [Pair; 2] = [
    Pair {
        drafter: "e_tiny_assistant_q8_0",
        model: "e_tiny_q8_0",
        logits: [1.0, 0.13],
        hidden: [1.2, 0.17],
        positions: &[1, 76],
        grouped: true,
    },
    Pair {
        drafter: "d_tiny_assistant_bf16",
        model: "d_tiny_q8_0",
        logits: [0.6, 0.07],
        hidden: [0.7, 0.1],
        positions: &[70],
        grouped: false,
    },
];

fn options(folder: &Path, drafter: &str) -> Options {
    let drafter = Some(folder.join(format!("assistant/{drafter}.gguf")));
    Options { context: Some(256), chunk: Some(64), drafts: Some(7), drafter, ..Options::default() }
}

/// A GPU of eight SMs, for what does not depend on how launches are shaped: their blocks are a fifth of an H200's, and
/// each does more.
fn few_sms() -> Gpu {
    Gpu::of_arch(Arch::Sm90a).with_multiprocessors(8)
}

fn session(folder: &Path, model: &str, options: &Options, gpu: Gpu, chained: bool) -> Session {
    let model = folder.join(format!("{model}.gguf"));
    let plan = lowered::plan_for(&model, options, &[gpu]);
    let location = ModelLocation { plan: model.with_extension("bin"), given: None };
    let session = match chained {
        false => gemma4c::simulate::open(plan, &location, None),
        true => gemma4c::simulate::open_chained(plan, &location, Interleaving::SuccessorFirst),
    };
    session.expect("a plan that can be simulated")
}

/// The largest difference, and the root of the mean square.
fn difference(ours: &[f32], expected: &[f32]) -> [f64; 2] {
    assert_eq!(ours.len(), expected.len());
    let all = || ours.iter().zip(expected).map(|(a, b)| f64::from((a - b).abs()));
    [all().fold(0.0, f64::max), (all().map(|d| d * d).sum::<f64>() / ours.len() as f64).sqrt()]
}

/// Steps are compared as long as drafts agree, which they do for most. Where two groups of tokens have nearly the same
/// score, another may be looked at: then only the hidden state is compared.
#[test]
fn every_step_agrees_with_the_reference() {
    const STEPS: usize = 4;
    let Some(folder) = golden::folder() else { return };
    for pair in PAIRS {
        let data = Tensors::read(&folder.join(format!("assistant/{}.golden.safetensors", pair.drafter)));
        let gpu = Gpu::of_arch(Arch::Sm90a);
        let mut session = session(&folder, pair.model, &options(&folder, pair.drafter), gpu, false);
        let (tokens, expected) = (data.ids("target.tokens"), data.ids("draft.tokens"));
        let [logits, hidden] = ["draft.logits", "draft.h_next"].map(|name| data.get(name));
        let gaps = pair.grouped.then(|| data.get("draft.centroid_gap"));
        let mut compared = 0;
        for (index, position) in data.ids("in.position").into_iter().enumerate() {
            if !pair.positions.contains(&position) {
                continue;
            }
            session.reset();
            session.feed(&tokens[..position as usize], Asked::Last, None, |_, _| {}).expect("it runs");
            let (mut step, mut agrees) = (0, true);
            let mut each = |draft: gemma4c_runtime::Draft<'_>| {
                let row = index * STEPS + step;
                if agrees {
                    let of = |values: &[f32], width: usize| values[row * width..][..width].to_vec();
                    if gaps.is_none_or(|gaps| gaps.values[row] > 0.4) {
                        let off = difference(draft.logits, &of(&logits.values, draft.logits.len()));
                        assert!(off[0] < pair.logits[0] && off[1] < pair.logits[1], "{position}, step {step}: {off:?}");
                        compared += 1;
                    }
                    let off = difference(draft.hidden, &of(&hidden.values, draft.hidden.len()));
                    assert!(off[0] < pair.hidden[0] && off[1] < pair.hidden[1], "{position}, step {step}: h {off:?}");
                }
                agrees = agrees && draft.token == expected[row];
                step += 1;
            };
            let token = tokens[position as usize];
            session.draft(token, STEPS as u32, &mut |_, _, _| {}, &mut each).expect("it drafts");
        }
        assert!(compared > pair.positions.len(), "{}: {compared} steps", pair.drafter);
    }
}

/// Drafts that are the text.
fn right(text: Vec<u32>) -> impl Fn(&[u32], usize) -> Vec<u32> + Clone {
    move |seen, most| text[seen.len()..].iter().copied().take(most).collect()
}

/// Three drafts of which the first is right: the third does not count.
fn half_right(text: Vec<u32>) -> impl Fn(&[u32], usize) -> Vec<u32> {
    let right = right(text);
    move |seen, most| {
        let drafts = right(seen, most).into_iter().enumerate();
        drafts.map(|(at, token)| if at == 1 { token ^ 1 } else { token }).collect()
    }
}

/// Where some drafts are right: the drafter's own, what is verified in place of them, and a text that stops within a
/// round.
#[test]
fn a_drafter_on_a_gpu_changes_no_text() {
    const MOST: u32 = 5;
    let Some(folder) = golden::folder() else { return };
    let pair = &PAIRS[0];
    let prompt = Tensors::read(&folder.join(format!("{}.golden.safetensors", pair.model))).ids("tokens");
    let mut session = session(&folder, pair.model, &options(&folder, pair.drafter), few_sms(), false);
    let plain = generate(&mut session, &prompt, MOST, GREEDY, None);
    let text = [&prompt[..], &plain].concat();
    let mut speculation = Speculation::new(DraftSource::Drafter, Some(3));
    assert_eq!(generate(&mut session, &prompt, MOST, GREEDY, Some(&mut speculation)), plain);
    assert!(speculation.counts.accepted > 0, "some drafts are right: {:?}", speculation.counts);
    let mut replaced = Speculation::new(DraftSource::Replaced(Box::new(half_right(text.clone()))), Some(3));
    assert_eq!(generate(&mut session, &prompt, MOST, GREEDY, Some(&mut replaced)), plain);
    assert_eq!((replaced.counts.rounds, replaced.counts.accepted), (2, 2));

    // Where all of them are right the text stops within a round: what was computed behind the stop token, in its own
    // round and in those that were on their way, is no part of the text, which goes on from there.
    assert!(!plain[..2].contains(&plain[2]), "{plain:?}");
    let mut sampler = Sampler::new(GREEDY, 3, Vec::new()).expect("a rule");
    let mut tokens = Vec::new();
    let each: &mut dyn FnMut(u32) -> Result<(), RuntimeError> = &mut |token| {
        tokens.push(token);
        Ok(())
    };
    session.reset();
    let mut replaced = Speculation::new(DraftSource::Replaced(Box::new(right(text))), Some(3));
    let request = Request { prompt: &prompt, most: MOST, stop: &plain[2..3] };
    let end = session.generate_speculating(request, &mut sampler, &mut replaced, each).expect("it runs");
    assert_eq!((end, session.position() as usize), (Finish::Stop, prompt.len() + 2));
    assert_eq!((replaced.counts.drafted, replaced.counts.accepted), (3, 3));
    let request = Request { prompt: &plain[2..3], most: 2, stop: &[] };
    session.generate(request, &mut sampler, each).expect("it goes on");
    assert_eq!(tokens, [&plain[..2], &plain[3..]].concat());
}

/// With keys and values in 8 bits, as chains that overlap: rounds of the drafter's drafts, and of others that are in
/// part right. A launch that does not wait for another's results is found whatever is accepted, and the text without
/// drafts needs no chains.
#[test]
fn a_drafter_in_overlapping_chains_changes_no_text() {
    const MOST: u32 = 4;
    let Some(folder) = golden::folder() else { return };
    let pair = &PAIRS[1];
    let prompt = &Tensors::read(&folder.join(format!("{}.golden.safetensors", pair.model))).ids("tokens")[..5];
    let options = Options { kv: KvType::Q8_0, ..options(&folder, pair.drafter) };
    let mut unchained = session(&folder, pair.model, &options, few_sms(), false);
    let plain = generate(&mut unchained, prompt, MOST, SAMPLED, None);
    let mut session = session(&folder, pair.model, &options, few_sms(), true);
    let mut speculation = Speculation::new(DraftSource::Drafter, Some(3));
    assert_eq!(generate(&mut session, prompt, MOST, SAMPLED, Some(&mut speculation)), plain);
    let text = [prompt, &plain].concat();
    let mut replaced = Speculation::new(DraftSource::Replaced(Box::new(half_right(text))), Some(3));
    assert_eq!(generate(&mut session, prompt, MOST, SAMPLED, Some(&mut replaced)), plain);
    // Behind the first token there is room for two drafts, and behind what is kept of them for none.
    assert_eq!((replaced.counts.rounds, replaced.counts.drafted, replaced.counts.accepted), (2, 2, 1));
}
