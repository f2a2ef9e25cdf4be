//! Several sequences at once on the simulated GPU: a row's logits are the same bits alone and in any company.

use std::collections::HashMap;
use std::path::Path;

use gemma4c_codegen::arch::Arch;
use gemma4c_codegen::target::Target as Gpu;
use gemma4c_plan::cuda::KvType;
use gemma4c_runtime::ModelLocation;
use gemma4c_runtime::engine::{BackendDevice, BackendOptions, Engine, Event, Id, Options, Request};

use crate::common::lowered;
use crate::common::{Place, random_tokens};

/// A token and the bits of its logits.
type Answer = Vec<(u32, Vec<u32>)>;

fn engine(model: &Path, options: &lowered::Options, target: Gpu) -> Engine<BackendDevice> {
    let plan = lowered::plan_for(model, options, &[target]);
    let location = ModelLocation { plan: model.with_extension("bin"), given: Some(model.to_path_buf()) };
    let (plan, backend) = gemma4c::simulate::open_backend(plan, &location, None).expect("a plan that can be simulated");
    let device = BackendDevice::new(&plan, backend, BackendOptions::default()).expect("a device");
    Engine::new(device, Options::default()).expect("an engine")
}

/// The answers to all prompts, of three and two tokens in turn, so many at once: neighbours join and leave.
fn answers(engine: &mut Engine<BackendDevice>, prompts: &[Vec<u32>], at_once: usize) -> Vec<Answer> {
    let mut answers = vec![Answer::new(); prompts.len()];
    let mut running: HashMap<Id, usize> = HashMap::new();
    let mut next = 0;
    while next < prompts.len() || !engine.is_idle() {
        while next < prompts.len() && running.len() < at_once {
            let request = Request { logits: true, ..Request::greedy(prompts[next].clone(), 3 - next as u32 % 2) };
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
                Event::Admitted { .. } | Event::Prompt { .. } | Event::Drafted { .. } => {}
            }
        }
    }
    answers
}

fn check(synth: &str, target: Gpu) {
    let options = lowered::Options { context: Some(64), chunk: Some(4), sequences: 8, ..lowered::Options::default() };
    // Together the five decode in the phase of eight rows, then in that of four when the short answers have ended; the
    // first three, in pairs, in that of two.
    let lengths: Vec<usize> = (0..5).map(|number| 1 + number % 3).collect();
    let shared = check_with(synth, &options, target, &lengths, &[(3, 2), (5, 8)]);
    assert_eq!(shared, 0, "no chunk has room for two segments");
}

/// Prompts of these lengths alone, and in each company: so many of them, so many at once. Returns how many chunks
/// prompts have shared.
fn check_with(
    synth: &str,
    options: &lowered::Options,
    target: Gpu,
    lengths: &[usize],
    companies: &[(usize, usize)],
) -> u64 {
    let place = Place::new();
    place.ok(&format!("synth {synth} -o model.gguf"));
    let mut engine = engine(&place.path("model.gguf"), options, target);
    let vocabulary = engine.limits().vocab;
    let prompts = lengths.iter().enumerate();
    let prompts: Vec<Vec<u32>> =
        prompts.map(|(seed, length)| random_tokens(seed as u64, *length, vocabulary)).collect();
    let alone = answers(&mut engine, &prompts, 1);
    for &(count, at_once) in companies {
        let together = answers(&mut engine, &prompts[..count], at_once);
        for (number, (ours, expected)) in together.iter().zip(&alone).enumerate() {
            for (step, (ours, expected)) in ours.iter().zip(expected).enumerate() {
                assert_eq!(ours.0, expected.0, "{synth}: token {step} of prompt {number}, {at_once} at once");
                let unlike = ours.1.iter().zip(&expected.1).filter(|(a, b)| a != b).count();
                assert_eq!(unlike, 0, "{synth}: logits {step} of prompt {number}, {at_once} at once: {unlike} differ");
            }
            assert_eq!(ours.len(), expected.len());
        }
    }
    engine.shared_chunks()
}

/// On few SMs: products are cut into fewer and longer shares than on an H200, which is what the others below are for.
#[test]
fn per_layer_embeddings_in_company() {
    check("tiny-e -q q8_0 --layers 3", Gpu::of_arch(Arch::Sm90a).with_multiprocessors(8));
}

#[test]
fn dense_layers_in_company() {
    check("tiny-dense -q q4_0 --layers 2", Gpu::of_arch(Arch::Sm90a));
}

#[test]
fn mixtures_in_company() {
    check("tiny-moe -q q8_0 --layers 2", Gpu::of_arch(Arch::Sm90a));
}

/// On a GPU of eight SMs a block takes all splits of a row's head; here it has up to three. The end of the first
/// prompt, which has used its window's pages again, and the second share a chunk.
#[test]
fn several_splits_in_company() {
    for kv in [KvType::F16, KvType::Q8_0] {
        let options =
            lowered::Options { context: Some(512), chunk: Some(68), sequences: 8, kv, ..lowered::Options::default() };
        let target = Gpu::of_arch(Arch::Sm90a).with_multiprocessors(8);
        let shared = check_with("tiny-dense -q q8_0 --layers 2", &options, target, &[131, 2, 70], &[(3, 3)]);
        assert!(shared > 0, "prompts share a chunk");
    }
}

/// With 16-bit operands: up to eight rows by warps, more by warpgroups.
#[test]
fn rows_of_16_bits_in_company() {
    let target = Gpu::of_arch(Arch::Sm90a).with_multiprocessors(8);
    let check = |synth: &str, sequences: u32, companies: &[(usize, usize)]| {
        let options = lowered::Options { context: Some(64), chunk: Some(4), sequences, ..lowered::Options::default() };
        let most = companies.iter().map(|(count, _)| *count).max().unwrap_or(0);
        let lengths: Vec<usize> = (0..most).map(|number| 1 + number % 3).collect();
        check_with(synth, &options.with(&["gemm"]), target.clone(), &lengths, companies);
    };
    check("tiny-moe -q q4_0 --layers 2", 4, &[(3, 2), (4, 4)]);
    check("tiny-e -q q8_0 --layers 3", 32, &[(3, 2), (17, 17)]);
}

/// Rows between two segments are nobody's, and choose experts all the same.
#[test]
fn mixtures_share_a_chunk() {
    let options = lowered::Options { context: Some(128), chunk: Some(68), sequences: 2, ..lowered::Options::default() };
    let target = Gpu::of_arch(Arch::Sm90a);
    let shared = check_with("tiny-moe -q q8_0 --layers 2", &options, target, &[2, 3], &[(2, 2)]);
    assert!(shared > 0, "prompts share a chunk");
}
