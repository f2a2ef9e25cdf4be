//! Adapters in seats on the simulated GPU: against the golden files, and in company.

use std::collections::BTreeMap;

use gemma4c_codegen::arch::Arch;
use gemma4c_codegen::target::Target as Gpu;
use gemma4c_models::adapter::Seating;
use gemma4c_plan::Seats;
use gemma4c_plan::cuda::KvType;
use gemma4c_runtime::engine::{BackendDevice, BackendOptions, Engine, Event, Id, Options, Request, Seated};
use gemma4c_runtime::{Asked, ModelLocation};

use crate::common::adapter::{seated, write_adapter};
use crate::common::{Place, Tensors, golden, lowered, random_tokens};
use crate::golden::{F32, check_session};
use crate::simulated::{each, on_simulator};

const SEATS: Option<Seats> = Some(Seats { count: 2, rank: 16 });

/// In f32 an adapter in a seat is as near to the reference as one that is compiled in; none, and one that is a tenth too
/// weak, are not.
#[test]
fn a_seat_agrees_with_the_reference() {
    let Some(folder) = golden::folder() else { return };
    let adapters = folder.join("lora");
    let options = lowered::Options {
        context: Some(128),
        chunk: Some(4),
        kv: KvType::F32,
        seats: SEATS,
        ..lowered::Options::default()
    };
    let options = options.without(&["int8"]);
    let check = |name: &str, (base, adapter): (&str, &str), strength: Option<f32>| {
        let file = Tensors::read(&adapters.join(format!("{name}.golden.safetensors")));
        let base = folder.join(base);
        let plan = lowered::plan(&base, &options);
        let weights = Seating::of(&plan).expect("seats").prepare(&adapters.join(adapter)).expect("an adapter");
        let mut session = on_simulator(plan, &base);
        if let Some(strength) = strength {
            session.adapt(&weights, strength).expect("a seat");
        }
        check_session(name, &mut session, &file, &options, |_| (vec![4], Asked::All, 5), &F32)
    };
    let half = ("d_tiny_q8_0.gguf", "d_r16.gguf");
    let right = [("e_r4", ("e_tiny_q8_0.gguf", "e_r4.gguf"), 1.0), ("d_half", half, 0.5)];
    each(&right, |(name, of, strength)| check(name, *of, Some(*strength)));
    each(&[Some(0.45), None], |strength| match check("d_half", half, *strength) {
        Ok(()) => Err(format!("d_half agrees at {strength:?}, too")),
        Err(_) => Ok(()),
    });
}

/// A token and the bits of its logits.
type Answer = Vec<(u32, Vec<u32>)>;

/// All requests at once.
fn answers(engine: &mut Engine<BackendDevice>, requests: &[Request]) -> Vec<Answer> {
    let ids: Vec<Id> = requests.iter().map(|one| engine.submit(one.clone()).expect("it fits")).collect();
    let mut answers: BTreeMap<Id, Answer> = BTreeMap::new();
    while !engine.is_idle() {
        for event in engine.step().expect("the device works") {
            match event {
                Event::Token { id, token, logits } => {
                    let bits = logits.iter().map(|value| value.to_bits()).collect();
                    answers.entry(id).or_default().push((token, bits));
                }
                Event::Failed { error, .. } => panic!("{error}"),
                _ => {}
            }
        }
    }
    ids.iter().map(|id| answers.remove(id).expect("an answer")).collect()
}

/// Rows with one adapter, with another and with none in one batch, in whichever slots: each has the bits that it has
/// alone. A seat that is filled again has the new adapter's.
#[test]
fn rows_with_other_adapters_are_in_one_batch() {
    for (synth, passes) in [
        ("tiny-e -q q8_0 --layers 3", &[][..]),
        ("tiny-moe -q q4_0 --layers 2", &[]),
        ("tiny-dense -q q4_0 --layers 2", &["gemm"]),
    ] {
        let place = Place::new();
        place.ok(&format!("synth {synth} -o model.gguf"));
        let model = place.path("model.gguf");
        let options = lowered::Options {
            context: Some(64),
            chunk: Some(4),
            sequences: 4,
            seats: SEATS,
            ..lowered::Options::default()
        };
        let options = options.with(passes);
        let plan = lowered::plan_for(&model, &options, &[Gpu::of_arch(Arch::Sm90a).with_multiprocessors(8)]);
        let matrices = seated(&plan);
        let seating = Seating::of(&plan).expect("seats");
        let ready = |name: &str, rank: u64, seed: u64| {
            write_adapter(&place.path(name), &matrices, rank, seed);
            seating.prepare(&place.path(name)).expect("an adapter")
        };
        let [a, b] = [ready("a.gguf", 16, 1), ready("b.gguf", 4, 2)];
        let location = ModelLocation { plan: model.with_extension("bin"), given: Some(model) };
        let (plan, backend) = gemma4c::simulate::open_backend(plan, &location, None).expect("a plan to simulate");
        let device = BackendDevice::new(&plan, backend, BackendOptions::default()).expect("a device");
        let mut engine = Engine::new(device, Options::default()).expect("an engine");
        engine.fill_seat(1, &a).expect("a seat");
        engine.fill_seat(2, &b).expect("a seat");
        let prompt = random_tokens(1, 3, engine.limits().vocab);
        let request = |adapter| Request { logits: true, adapter, ..Request::greedy(&prompt[..], 2) };
        let in_seat = |seat, strength| request(Some(Seated { seat, strength }));
        let requests = [request(None), in_seat(1, 1.0), in_seat(2, 1.0), in_seat(2, 0.5)];
        let alone: Vec<Answer> =
            requests.iter().flat_map(|request| answers(&mut engine, std::slice::from_ref(request))).collect();
        for one in 0..alone.len() {
            assert!((0..one).all(|other| alone[one] != alone[other]), "{synth}: {one} is another's answer");
        }
        assert!(answers(&mut engine, &requests) == alone, "{synth}: in company");
        let mut turned = requests.clone();
        turned.reverse();
        let mut again = answers(&mut engine, &turned);
        again.reverse();
        assert!(again == alone, "{synth}: in other slots");
        engine.fill_seat(1, &b).expect("nobody has it");
        assert!(answers(&mut engine, &[in_seat(1, 1.0)])[0] == alone[2], "{synth}: filled again");
    }
}

/// A row on its own takes its adapter with its products: as many launches as without seats.
#[test]
fn a_row_takes_no_launch_more() {
    for synth in ["tiny-e -q q8_0 --layers 3", "tiny-dense -q q4_0 --layers 2"] {
        let place = Place::new();
        place.ok(&format!("synth {synth} -o model.gguf"));
        let launches = |seats| {
            let options = lowered::Options { context: Some(64), seats, ..lowered::Options::default() };
            let plan = lowered::plan_for(&place.path("model.gguf"), &options, &[Gpu::of_arch(Arch::Sm90a)]);
            plan.programs().next().expect("a program").program.phases[0].steps.len()
        };
        assert_eq!(launches(SEATS), launches(None), "{synth}");
    }
}
