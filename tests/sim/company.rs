//! Several sequences at once on the simulated GPU: a row's logits are the same bits alone and in any company.

use std::collections::HashMap;
use std::path::Path;

use gemma4c_runtime::ModelLocation;
use gemma4c_runtime::engine::{BackendDevice, BackendOptions, Engine, Event, Id, Options, Request};

use crate::common::lowered::{self, LowerOptions};
use crate::common::{Place, random_tokens};

/// A token and the bits of its logits.
type Answer = Vec<(u32, Vec<u32>)>;

fn engine(model: &Path, options: &LowerOptions) -> Engine<BackendDevice> {
    let plan = lowered::plan(model, options);
    let location = ModelLocation { plan: model.with_extension("bin"), given: Some(model.to_path_buf()) };
    let (plan, backend) = gemma4c::simulate::open_backend(plan, &location, None).expect("a plan that can be simulated");
    let device = BackendDevice::new(&plan, backend, BackendOptions::default()).expect("a device");
    Engine::new(device, Options::default()).expect("an engine")
}

/// The answers to all prompts, of two and three tokens in turn, so many at once: neighbours join and leave.
fn answers(engine: &mut Engine<BackendDevice>, prompts: &[Vec<u32>], at_once: usize) -> Vec<Answer> {
    let mut answers = vec![Answer::new(); prompts.len()];
    let mut running: HashMap<Id, usize> = HashMap::new();
    let mut next = 0;
    while next < prompts.len() || !engine.is_idle() {
        while next < prompts.len() && running.len() < at_once {
            let request = Request { logits: true, ..Request::greedy(prompts[next].clone(), 2 + next as u32 % 2) };
            running.insert(engine.submit(request).expect("it fits"), next);
            next += 1;
        }
        for event in engine.step().expect("the device works") {
            match event {
                Event::Token { id, token, logits } => {
                    let bits = logits.iter().map(|value| value.to_bits()).collect();
                    answers[running[&id]].push((token, bits));
                }
                Event::Finished { id, .. } => _ = running.remove(&id),
                Event::Failed { error, .. } => panic!("{error}"),
                Event::Admitted { .. } => {}
            }
        }
    }
    answers
}

fn check(synth: &str) {
    let place = Place::new();
    place.ok(&format!("synth {synth} -o model.gguf"));
    let options = LowerOptions { context: Some(64), chunk: Some(4), sequences: 8, ..LowerOptions::default() };
    let mut engine = engine(&place.path("model.gguf"), &options);
    let vocabulary = engine.limits().vocab;
    let prompts: Vec<Vec<u32>> = (0..6).map(|seed| random_tokens(seed, 1 + seed as usize % 3, vocabulary)).collect();
    let alone = answers(&mut engine, &prompts, 1);
    for at_once in [2, 3, 8] {
        let together = answers(&mut engine, &prompts, at_once);
        for (number, (ours, expected)) in together.iter().zip(&alone).enumerate() {
            for (step, (ours, expected)) in ours.iter().zip(expected).enumerate() {
                assert_eq!(ours.0, expected.0, "{synth}: token {step} of prompt {number}, {at_once} at once");
                let unlike = ours.1.iter().zip(&expected.1).filter(|(a, b)| a != b).count();
                assert_eq!(unlike, 0, "{synth}: logits {step} of prompt {number}, {at_once} at once: {unlike} differ");
            }
            assert_eq!(ours.len(), expected.len());
        }
    }
}

#[test]
fn per_layer_embeddings_in_company() {
    check("tiny-e -q q8_0 --layers 3");
}

#[test]
fn dense_layers_in_company() {
    check("tiny-dense -q q4_0 --layers 2");
}

#[test]
fn mixtures_in_company() {
    check("tiny-moe -q q8_0 --layers 2");
}
