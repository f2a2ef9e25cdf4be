//! Drafts in batches on the simulated GPU: what is guessed for several sequences is verified in one decode, and their
//! texts stay the same.

use gemma4c_codegen::arch::Arch;
use gemma4c_codegen::target::Target as Gpu;
use gemma4c_plan::Sampling;
use gemma4c_runtime::ModelLocation;
use gemma4c_runtime::engine::{
    BackendDevice, BackendOptions, BoxedRule, Demand, DraftSource, Drafts, Engine, Event, Mask, Options, Request, Rule,
};

use crate::common::lowered;
use crate::common::{Tensors, golden};

const SAMPLED: Sampling = Sampling { temperature: 1.0, top_k: 8, top_p: 0.95 };

/// Only tokens below 300.
#[derive(Clone)]
struct Small;

impl Rule for Small {
    fn demand(&self) -> Demand {
        Demand::Mask
    }

    fn restrict(&mut self, allowed: &mut Mask) {
        (300..100_000).for_each(|token| allowed.forbid(token));
    }

    fn apply(&mut self, logits: &mut [f32]) {
        logits[300..].fill(f32::NAN);
    }

    fn picked(&mut self, _: u32) {}

    fn copy(&self) -> Box<dyn Rule> {
        Box::new(self.clone())
    }
}

/// Two sequences whose drafts are verified in one decode, one of them by masks: tokens are those of decoding without
/// drafts.
#[test]
fn sequences_of_a_batch_speculate_together() {
    let Some(folder) = golden::folder() else { return };
    let drafter = Some(folder.join("assistant/e_tiny_assistant_q8_0.gguf"));
    let (context, chunk) = (Some(256), Some(64));
    let drafts = Some(3);
    let options = lowered::Options { context, chunk, sequences: 2, drafts, drafter, ..lowered::Options::default() };
    let model = folder.join("e_tiny_q8_0.gguf");
    // Who is verified with whom does not depend on the shapes of launches: few SMs have few blocks to simulate.
    let plan = lowered::plan_for(&model, &options, &[Gpu::of_arch(Arch::Sm90a).with_multiprocessors(8)]);
    assert_eq!(plan.cuda.as_ref().expect("a program").program.decode_rows(), 8, "rows of both");
    let prompt = Tensors::read(&folder.join("e_tiny_q8_0.golden.safetensors")).ids("tokens");
    let answers = |source: DraftSource| {
        let location = ModelLocation { plan: model.with_extension("bin"), given: None };
        let (plan, backend) =
            gemma4c::simulate::open_backend(plan.clone(), &location, None).expect("it can be simulated");
        let device = BackendDevice::new(&plan, backend, BackendOptions::default()).expect("a device");
        let drafts = Drafts { source, steps: Some(3) };
        let mut engine = Engine::new(device, Options { drafts, ..Options::default() }).expect("an engine");
        let free = Request::greedy(prompt.clone(), 4);
        let rule = Some(BoxedRule(Box::new(Small)));
        let guided = Request { rule, sampling: SAMPLED, seed: 3, ..Request::greedy(&prompt[..5], 4) };
        let ids = [free, guided].map(|request| engine.submit(request).expect("it fits"));
        let mut tokens = vec![Vec::new(); 2];
        while !engine.is_idle() {
            for event in engine.step().expect("the device works") {
                if let Event::Token { id, token, .. } = event {
                    tokens[usize::from(id == ids[1])].push(token);
                }
            }
        }
        (tokens, engine.draft_counts())
    };
    let (plain, _) = answers(DraftSource::Nowhere);
    let (drafted, counts) = answers(DraftSource::Drafter);
    assert_eq!(drafted, plain);
    assert!(drafted[1].iter().all(|token| *token < 300), "{drafted:?}");
    assert!(counts.accepted > 0 && counts.rounds > 1, "{counts:?}");
    let text: Vec<Vec<u32>> = vec![[&prompt[..], &plain[0]].concat(), [&prompt[..5], &plain[1]].concat()];
    let longest = prompt.len();
    let guess = move |seen: &[u32], most: usize| {
        let text = if seen.len() < longest { &text[1] } else { &text[0] };
        // The third is wrong.
        text[seen.len()..].iter().take(most).enumerate().map(|(i, token)| token + u32::from(i == 2)).collect()
    };
    let (given, counts) = answers(DraftSource::Given(Box::new(guess)));
    assert_eq!(given, plain);
    assert!(counts.accepted_at[1] > 0 && counts.accepted_at[2] == 0, "{counts:?}");
}
