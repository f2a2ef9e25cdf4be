//! Answers by masks on the simulated GPU: the device picks among the tokens that a rule allows what the host picks from
//! its logits.

use gemma4c_codegen::arch::Arch;
use gemma4c_codegen::target::Target as Gpu;
use gemma4c_plan::Sampling;
use gemma4c_runtime::ModelLocation;
use gemma4c_runtime::engine::{
    BackendDevice, BackendOptions, BoxedRule, Demand, Engine, Event, Id, Mask, Options, Request, Rule,
};

use crate::common::lowered;
use crate::common::{Place, random_tokens};

/// A token leaves its own remainder by seven to the next; every third token is free.
#[derive(Clone)]
struct SameRemainder {
    last: u32,
    count: u32,
    demand: Demand,
}

impl SameRemainder {
    fn allows(&self, token: u32) -> bool {
        token % 7 == self.last % 7 && token != self.last
    }
}

impl Rule for SameRemainder {
    fn demand(&self) -> Demand {
        if self.count % 3 == 2 { Demand::Nothing } else { self.demand }
    }

    fn restrict(&mut self, allowed: &mut Mask) {
        (0..100_000).filter(|token| !self.allows(*token)).for_each(|token| allowed.forbid(token));
    }

    fn apply(&mut self, logits: &mut [f32]) {
        let denied = logits.iter_mut().zip(0..).filter(|(_, token)| !self.allows(*token));
        denied.for_each(|(logit, _)| *logit = f32::NAN);
    }

    fn picked(&mut self, token: u32) {
        (self.last, self.count) = (token, self.count + 1);
    }

    fn copy(&self) -> Box<dyn Rule> {
        Box::new(self.clone())
    }
}

fn answers(engine: &mut Engine<BackendDevice>, prompts: &[Vec<u32>], demand: Demand) -> Vec<Vec<u32>> {
    let mut ids: Vec<Id> = Vec::new();
    for (number, prompt) in prompts.iter().enumerate() {
        // The last one has no rule.
        let rule = SameRemainder { last: number as u32, count: 0, demand };
        let rule = (number + 1 < prompts.len()).then(|| BoxedRule(Box::new(rule)));
        let sampling = match number % 2 {
            0 => Sampling { temperature: 0.0, top_k: 1, top_p: 1.0 },
            _ => Sampling { temperature: 1.0, top_k: 40, top_p: 0.95 },
        };
        let request = Request { rule, sampling, seed: 3, ..Request::greedy(prompt.clone(), 4) };
        ids.push(engine.submit(request).expect("it fits"));
    }
    let mut answers = vec![Vec::new(); prompts.len()];
    while !engine.is_idle() {
        for event in engine.step().expect("the device works") {
            if let Event::Token { id, token, .. } = event {
                answers[ids.iter().position(|other| *other == id).expect("it is ours")].push(token);
            }
        }
    }
    answers
}

#[test]
fn the_device_picks_what_a_rule_allows() {
    let place = Place::new();
    place.ok("synth tiny-dense -q q4_0 --layers 2 -o model.gguf");
    let model = place.path("model.gguf");
    let options = lowered::Options { context: Some(64), chunk: Some(4), sequences: 4, ..lowered::Options::default() };
    let plan = lowered::plan_for(&model, &options, &[Gpu::of_arch(Arch::Sm90a)]);
    let location = ModelLocation { plan: model.with_extension("bin"), given: Some(model) };
    let (plan, backend) = gemma4c::simulate::open_backend(plan, &location, None).expect("a plan that can be simulated");
    let device = BackendDevice::new(&plan, backend, BackendOptions::default()).expect("a device");
    let mut engine = Engine::new(device, Options::default()).expect("an engine");
    let vocabulary = engine.limits().vocab;
    let prompts: Vec<Vec<u32>> = (0..3).map(|seed| random_tokens(seed, 1 + seed as usize % 3, vocabulary)).collect();
    let on_host = answers(&mut engine, &prompts, Demand::Logits);
    assert!(on_host.iter().all(|answer| answer.len() == 4), "{on_host:?}");
    assert!(on_host[0][1] % 7 == on_host[0][0] % 7, "{on_host:?}");
    assert_eq!(answers(&mut engine, &prompts, Demand::Mask), on_host);
}
