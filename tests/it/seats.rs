//! Adapters in seats: what an adapter in a seat computes is what it computes compiled in, whoever else is there, and
//! nothing that a seat cannot hold is passed over.

use std::collections::BTreeMap;
use std::path::Path;

use gemma4c_models::adapter::Seating;
use gemma4c_plan::{Plan, SeatWeights};
use gemma4c_runtime::ModelLocation;
use gemma4c_runtime::engine::{
    CpuDevice, CpuOptions, DraftSource, Drafts, Engine, Event, Id, Options, Request, SeatError, Seated,
};
use serde_json::Value;

use crate::common::adapter::{Matrix, seated, write_adapter};
use crate::common::{Place, Tensors, golden, ids, random_tokens};

/// Largest absolute difference of a logit from the reference, of adapters whose values are bf16 as a seat's are.
const LOGITS: f32 = 1e-3;

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn plan(place: &Place, name: &str) -> Plan {
    Plan::from_bytes(&place.read(name)).expect("a plan")
}

/// A small mixture with two seats, and adapters for them: `a.gguf`, `b.gguf` and `small.gguf`, which is of rank 4.
fn prepared(options: &str) -> (Place, Plan) {
    let place = Place::new();
    std::fs::copy(golden::some().join("m_tiny_q4_0.gguf"), place.path("model.gguf")).expect("a copy");
    place.ok(&format!("compile model.gguf -o plan.bin --target cpu --ctx 256 --chunk 32 --adapters 2 {options}"));
    let plan = plan(&place, "plan.bin");
    let matrices = seated(&plan);
    for (name, rank, seed) in [("a.gguf", 16, 1), ("b.gguf", 16, 2), ("small.gguf", 4, 3)] {
        write_adapter(&place.path(name), &matrices, rank, seed);
    }
    (place, plan)
}

fn engine(place: &Place, plan: &Plan, sequences: u32, drafts: Drafts) -> Engine<CpuDevice> {
    let location = ModelLocation { plan: place.path("plan.bin"), given: None };
    let options = CpuOptions { sequences, snapshots: 3, host_bytes: 0, suppress: vec![] };
    let device = CpuDevice::open(plan.clone(), &location, options).expect("a device");
    Engine::new(device, Options { drafts, ..Options::default() }).expect("an engine")
}

fn ready(place: &Place, plan: &Plan, name: &str) -> SeatWeights {
    Seating::of(plan).expect("seats").prepare(&place.path(name)).expect("an adapter")
}

/// Tokens and the bits of the logits that each was picked from.
type Answer = (Vec<u32>, Vec<u32>);

fn run(engine: &mut Engine<CpuDevice>) -> BTreeMap<Id, Answer> {
    let mut answers: BTreeMap<Id, Answer> = BTreeMap::new();
    while !engine.is_idle() {
        for event in engine.step().expect("a step") {
            match event {
                Event::Token { id, token, logits } => {
                    let answer = answers.entry(id).or_default();
                    answer.0.push(token);
                    answer.1.extend(logits.iter().map(|value| value.to_bits()));
                }
                Event::Failed { error, .. } => panic!("{error}"),
                _ => {}
            }
        }
    }
    answers
}

fn request(prompt: u64, adapter: Option<Seated>) -> Request {
    let prompt = random_tokens(prompt, 20 + prompt as usize, 512);
    Request { logits: true, adapter, snapshot_at: vec![16], ..Request::greedy(prompt, 6) }
}

fn in_seat(seat: u32, strength: f32) -> Option<Seated> {
    Some(Seated { seat, strength })
}

/// An adapter of the reference in a seat computes what the reference does; one that a seat cannot hold is refused by the
/// name of its first tensor.
#[test]
fn seats_agree_with_the_reference() {
    let Some(folder) = golden::folder() else { return };
    let folder = folder.join("lora");
    let cases = std::fs::read(folder.join("cases.json")).expect("the cases");
    let cases: Vec<Value> = serde_json::from_slice(&cases).expect("a list of cases");
    let (mut agreed, mut refused) = (0, 0);
    for case in &cases {
        let [adapter] = &case["adapters"].as_array().expect("a list")[..] else { continue };
        let text = |value: &Value| value.as_str().expect("a text").to_owned();
        let (name, scale) = (text(&adapter["name"]), adapter["scale"].to_string());
        let golden = Tensors::read(&folder.join(text(&case["golden"])));
        let base = folder.join("..").join(text(&case["base"]));
        let place = Place::new();
        place.ok(&format!("compile '{}' -o plan.bin --target cpu --ctx 256 --adapters 2", base.display()));
        let tokens = golden.ids("tokens");
        let line = format!("--tokens {} --all --prefill {}", ids(&tokens), tokens.len());
        for ending in [".gguf", ""] {
            let lora = format!("--lora '{}:{scale}'", folder.join(format!("{name}{ending}")).display());
            // What others than the seven matrices of a layer have.
            if let Some(held) = [("e_r16", ["inp_gate", "per_layer_input_gate"]), ("m_r", ["_exps", "experts"])]
                .iter()
                .find_map(|(of, tensors)| name.starts_with(of).then_some(tensors))
            {
                let message = place.refused(&format!("logits plan.bin -o no.safetensors {line} {lora}"));
                assert!(held.iter().any(|tensor| message.contains(tensor)), "{name}: {message}");
                refused += 1;
                continue;
            }
            let found = place.logits("plan.bin", &format!("{line} {lora}"));
            let off = largest_difference(&found.get("logits").values, &golden.get("logits").values);
            eprintln!("{name}{ending} times {scale}: off {off:.1e}");
            assert!(off <= LOGITS, "{name}{ending} times {scale}: off by {off}");
            agreed += 1;
        }
    }
    assert!(agreed >= 8 && refused >= 4, "{agreed} agreed, {refused} were refused");
}

/// Compiled in or in a seat, an adapter gives the same bits; of a rank that is less than the seat's, as good as these.
#[test]
fn an_adapter_in_a_seat_is_what_it_is_compiled_in() {
    let (place, _) = prepared("");
    let line = format!("--tokens {} --all", ids(&random_tokens(5, 40, 512)));
    let of = |plan: &str, options: &str| place.logits(plan, &format!("{line} {options}")).get("logits").values.clone();
    place.ok("compile model.gguf -o none.bin --target cpu --ctx 256 --chunk 32");
    let none = of("none.bin", "");
    assert_eq!(of("plan.bin", ""), none, "empty seats change nothing");
    for (adapter, most) in [("a.gguf", 0.0), ("b.gguf:-0.5", 0.0), ("small.gguf:2", 1e-4)] {
        place.ok(&format!("compile model.gguf -o with.bin --target cpu --ctx 256 --chunk 32 --lora {adapter}"));
        let (compiled, in_seat) = (of("with.bin", ""), of("plan.bin", &format!("--lora {adapter}")));
        let (off, moved) = (largest_difference(&compiled, &in_seat), largest_difference(&compiled, &none));
        assert!(off <= most && moved > 0.1, "{adapter}: off by {off}, moved by {moved}");
    }
}

/// Rows with one adapter, with another and with none are computed together, and each has the bits that it has where its
/// adapter is the only one.
#[test]
fn neighbours_with_other_adapters_change_no_bit() {
    let (place, plan) = prepared("");
    let (a, b) = (ready(&place, &plan, "a.gguf"), ready(&place, &plan, "b.gguf"));
    let cases: Vec<(u64, Option<(u32, f32)>)> =
        (0..12).map(|at| (at % 3, [None, Some((1, 1.0)), Some((2, 1.0)), Some((2, 0.5))][at as usize % 4])).collect();
    let alone: Vec<Answer> = cases
        .iter()
        .map(|(prompt, adapter)| {
            let mut engine = engine(&place, &plan, 1, Drafts::default());
            // In the other seat than in company: which one it is does not matter.
            let adapter = adapter.map(|(seat, strength)| {
                engine.fill_seat(3 - seat, if seat == 1 { &a } else { &b }).expect("a seat");
                Seated { seat: 3 - seat, strength }
            });
            let id = engine.submit(request(*prompt, adapter)).expect("a request");
            run(&mut engine).remove(&id).expect("an answer")
        })
        .collect();
    let are_apart = |one: usize| (0..one).all(|other| alone[one] != alone[other]);
    assert!((0..alone.len()).all(are_apart), "each prompt has another answer by each adapter");
    let mut engine = engine(&place, &plan, 5, Drafts::default());
    engine.fill_seat(1, &a).expect("a seat");
    engine.fill_seat(2, &b).expect("a seat");
    let submit = |(prompt, adapter): &(u64, Option<(u32, f32)>)| {
        let adapter = adapter.map(|(seat, strength)| Seated { seat, strength });
        engine.submit(request(*prompt, adapter)).expect("a request")
    };
    let of: Vec<Id> = cases.iter().map(submit).collect();
    let answers = run(&mut engine);
    for (index, id) in of.iter().enumerate() {
        assert!(answers[id] == alone[index], "request {index}: {:?}", cases[index]);
    }
}

/// A seat that is filled while others are used, and filled again, gives the bits of what is in it now.
#[test]
fn a_seat_filled_again_gives_the_new_adapters_bits() {
    let (place, plan) = prepared("");
    let [a, b, small] = ["a.gguf", "b.gguf", "small.gguf"].map(|name| ready(&place, &plan, name));
    let fresh = |weights: &SeatWeights| {
        let mut engine = engine(&place, &plan, 1, Drafts::default());
        engine.fill_seat(1, weights).expect("a seat");
        let id = engine.submit(request(7, in_seat(1, 1.0))).expect("a request");
        run(&mut engine).remove(&id).expect("an answer")
    };
    let of_each = [&a, &b, &small].map(fresh);
    assert!(of_each[0] != of_each[1] && of_each[1] != of_each[2]);
    let mut engine = engine(&place, &plan, 3, Drafts::default());
    engine.fill_seat(2, &a).expect("a seat");
    // Somebody else runs all the time, with an adapter of its own.
    let other = Request { most: 150, ..request(9, in_seat(2, 1.0)) };
    engine.submit(other).expect("a request");
    for (weights, expected) in [&a, &b, &small, &a].into_iter().zip([0, 1, 2, 0]) {
        engine.fill_seat(1, weights).expect("nobody has it");
        let id = engine.submit(request(7, in_seat(1, 1.0))).expect("a request");
        assert!(matches!(engine.fill_seat(1, weights), Err(SeatError::InUse { seat: 1, sequences: 1 })));
        assert!(matches!(engine.empty_seat(2), Err(SeatError::InUse { .. })), "the other still runs");
        let (mut answer, mut cached): (Answer, Option<u32>) = Default::default();
        while engine.sequences_in(1) > 0 {
            for event in engine.step().expect("a step") {
                match event {
                    Event::Admitted { id: of, cached: tokens } if of == id => cached = Some(tokens),
                    Event::Token { id: of, token, logits } if of == id => {
                        answer.0.push(token);
                        answer.1.extend(logits.iter().map(|value| value.to_bits()));
                    }
                    _ => {}
                }
            }
        }
        assert_eq!(cached, Some(0), "no prefix of another filling is used");
        assert!(answer == of_each[expected], "filling {expected}");
    }
    engine.empty_seat(1).expect("nobody has it");
    assert!(engine.submit(request(7, in_seat(1, 1.0))).is_err(), "an empty seat is nobody's");
}

/// Drafts are verified by rows with the sequence's adapter: the text is that without drafts.
#[test]
fn drafts_change_nothing_with_an_adapter() {
    let (place, plan) = prepared("");
    let weights = ready(&place, &plan, "a.gguf");
    // A text that repeats itself, so that something is looked up.
    let prompt: Vec<u32> = random_tokens(3, 12, 512).repeat(4);
    let answer = |drafts: Drafts, adapter| {
        let mut engine = engine(&place, &plan, 2, drafts);
        engine.fill_seat(2, &weights).expect("a seat");
        let of = |adapter| Request { logits: true, adapter, ..Request::greedy(&prompt[..], 40) };
        let id = engine.submit(of(adapter)).expect("a request");
        engine.submit(of(None)).expect("a neighbour");
        let answers = run(&mut engine);
        (answers[&id].clone(), engine.draft_counts().drafted)
    };
    let by_text = Drafts { source: DraftSource::Lookup, steps: Some(4) };
    let with = in_seat(2, 1.0);
    let ((drafted, count), (one_by_one, none)) = (answer(by_text, with), answer(Drafts::default(), with));
    assert!(count > 0 && none == 0, "{count} drafts");
    assert!(drafted == one_by_one, "drafts change the text");
    assert!(drafted != answer(Drafts::default(), None).0, "the adapter changes it");
}

/// Seats in a plan with its weights take no bytes of the file, and what is in the plan is known to the byte.
#[test]
fn seats_take_memory_and_no_bytes_of_a_plan() {
    let (place, plan) = prepared("");
    let line = format!("--tokens {} --all --lora a.gguf", ids(&random_tokens(5, 40, 512)));
    let mapped = place.logits("plan.bin", &line);
    place.ok("compile model.gguf -o held.bin --target cpu --ctx 256 --chunk 32 --adapters 2 --embed-weights");
    place.ok("compile model.gguf -o none.bin --target cpu --ctx 256 --chunk 32 --embed-weights");
    std::fs::rename(place.path("model.gguf"), place.path("gone.gguf")).expect("a move");
    assert!(place.logits("held.bin", &line) == mapped);
    let size = |name: &str| place.read(name).len() as u64;
    let seats: u64 = plan.reserved().map(|(_, weight)| weight.bytes).sum();
    // Names and steps, and not the matrices.
    assert!(size("held.bin") < size("none.bin") + seats / 2, "{} and {}", size("held.bin"), size("none.bin"));
    place.ok("inspect held.bin --check-weights");
    let text = place.ok("inspect held.bin");
    assert!(text.contains("2 for adapters of rank 16") && text.contains(&seats.to_string()), "{text}");
    let json: Value = serde_json::from_str(&place.ok("inspect held.bin --json")).expect("JSON");
    let none: Value = serde_json::from_str(&place.ok("inspect none.bin --json")).expect("JSON");
    assert_eq!((&json["memory"]["seats"], &json["model"]["seats"]["rank"]), (&seats.into(), &16.into()));
    assert_eq!(json["memory"]["weights"], none["memory"]["weights"], "seats are a line of their own");
    assert_eq!(none["memory"]["seats"], 0);
    place.ok("inspect held.bin --html page.html");
}

#[test]
fn what_no_seat_holds_is_refused_by_name() {
    let (place, plan) = prepared("");
    let matrices = seated(&plan);
    let (name, [inputs, outputs]) = matrices[0].clone();
    let one = |file: &str, matrix: Matrix, rank: u64| write_adapter(&place.path(file), &[matrix], rank, 1);
    one("rank.gguf", (name.clone(), [inputs, outputs]), 17);
    one("wide.gguf", (name.clone(), [inputs + 32, outputs]), 4);
    one("tall.gguf", (name.clone(), [inputs, outputs + 1]), 4);
    one("router.gguf", ("blk.0.ffn_gate_inp.weight".into(), [inputs, 4]), 4);
    one("layer.gguf", ("blk.99.attn_q.weight".into(), [inputs, outputs]), 4);
    one("tower.gguf", ("v.blk.0.attn_q.weight".into(), [inputs, outputs]), 4);
    one("nothing.gguf", ("blk.0.attn_z.weight".into(), [inputs, outputs]), 4);
    // Half of the first pair, and a value that is none.
    one("nan.gguf", (name.clone(), [inputs, outputs]), 4);
    let mut bytes = place.read("nan.gguf");
    let end = bytes.len();
    bytes[end - 4..end - 2].copy_from_slice(&[0xc0, 0x7f]);
    place.write("nan.gguf", bytes);
    place.ok("compile model.gguf -o none.bin --target cpu --ctx 256 --chunk 32");
    let of = |plan: &str, options: &str| place.refused(&format!("run {plan} --tokens 2 -n 1 {options}"));
    let (of_a, of_b) = (format!("{name}.lora_a"), format!("{name}.lora_b"));
    for (adapter, said) in [
        ("rank.gguf", &[of_a.as_str(), "rank 17", "16 at most", "--rank"][..]),
        ("wide.gguf", &[&of_a, "inputs"]),
        ("tall.gguf", &[&of_b, "outputs"]),
        ("router.gguf", &["blk.0.ffn_gate_inp.weight.lora_a", "a seat holds attn_q", "--lora"]),
        ("layer.gguf", &["layer 99: the model has"]),
        ("tower.gguf", &["v.blk.0.attn_q.weight.lora_a", "a seat holds attn_q"]),
        ("nothing.gguf", &["blk.0.attn_z.weight, which the model does not have"]),
        ("nan.gguf", &[&of_b, "no number"]),
        ("absent.gguf", &["absent.gguf"]),
        ("model.gguf", &["not an adapter"]),
        ("a.gguf --lora b.gguf", &["--lora is given 2 times"]),
    ] {
        let refused = of("plan.bin", &format!("--lora {adapter}"));
        assert!(said.iter().all(|text| refused.contains(text)), "{adapter}: {refused}");
    }
    let refused = of("none.bin", "--lora a.gguf");
    assert!(refused.contains("the plan has no seats for adapters: compile it with --adapters"), "{refused}");
    for (options, said) in
        [("--adapters 0", "--adapters"), ("--rank 4", "--adapters"), ("--adapters 2 --rank 513", "--rank")]
    {
        let ran = place.run(&format!("compile model.gguf -o no.bin --target cpu {options}"));
        assert!(ran.code == Some(2) && ran.stderr.contains(said), "{options}: {}", ran.stderr);
    }
    assert!(!Path::new("no.bin").exists());
    // Rank is rounded up: seats of rank 20 take adapters of rank 17.
    place.ok("compile model.gguf -o high.bin --target cpu --ctx 256 --adapters 1 --rank 20");
    assert_eq!(self::plan(&place, "high.bin").model.seats.map(|seats| seats.rank), Some(32));
    place.ok("run high.bin --tokens 2 -n 1 --lora rank.gguf");
}

/// A file of prompts, and a measurement of several sequences, have adapters, too.
#[test]
fn batches_have_adapters() {
    let (place, _) = prepared("");
    place.write("prompts.jsonl", "{\"tokens\": [2, 5, 6], \"max_tokens\": 5, \"temperature\": 0}\n");
    let answer = |lora: &str| {
        place.ok(&format!("run plan.bin --file prompts.jsonl -o answers.jsonl --restart {lora}"));
        let answers = String::from_utf8(place.read("answers.jsonl")).expect("text");
        serde_json::from_str::<Value>(answers.trim()).expect("JSON")["tokens"].clone()
    };
    let one = |lora: &str| {
        let out = place.ok(&format!("run plan.bin --tokens 2,5,6 -n 5 --temp 0 --json {lora}"));
        serde_json::from_str::<Value>(&out).expect("JSON")["tokens"].clone()
    };
    let (with, without) = (answer("--lora a.gguf"), answer(""));
    assert!(with != without);
    assert_eq!((&with, &without), (&one("--lora a.gguf"), &one("")));
    let continued = place.run("run plan.bin --file prompts.jsonl -o answers.jsonl --lora a.gguf");
    assert!(continued.code == Some(2) && continued.stderr.contains("other settings"), "{}", continued.stderr);
    place.ok("bench plan.bin --sequences 3 -p 8 -n 2 -r 1 --lora a.gguf --lora b.gguf");
}
