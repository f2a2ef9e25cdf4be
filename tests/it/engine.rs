//! Sequences in a batch on the CPU: every row of logits is, to the bit, what its request gets alone.

use std::collections::BTreeMap;
use std::sync::Arc;

use gemma4c_plan::{Plan, Sampling};
use gemma4c_runtime::engine::{CpuDevice, CpuOptions, Device, Engine, Event, Finish, Fork, Id, Options, Request};
use gemma4c_runtime::{Asked, ModelLocation, Session};

use crate::common::{Place, Random, random_tokens};

/// Tokens and the bits of the logits each was picked from.
type Answer = (Vec<u32>, Vec<Vec<u32>>);

fn place(preset: &str) -> Place {
    let place = Place::new();
    place.ok(&format!("synth {preset} -q q8_0 -o model.gguf --seed 4"));
    // Windows of 32 and chunks of 16: prompts use a window's page again, and the longest take two of full layers.
    place.ok("compile model.gguf -o plan.bin --target cpu --ctx 400 --chunk 16");
    place
}

fn plan(place: &Place) -> (Plan, ModelLocation) {
    let location = ModelLocation { plan: place.path("plan.bin"), given: None };
    (Plan::from_bytes(&place.read("plan.bin")).unwrap(), location)
}

fn engine(place: &Place, sequences: u32, snapshots: u32, host_bytes: u64) -> Engine<CpuDevice> {
    let (plan, location) = plan(place);
    let options = CpuOptions { sequences, snapshots, host_bytes, suppress: vec![] };
    Engine::new(CpuDevice::open(plan, &location, options).unwrap(), Options::default()).unwrap()
}

fn requests(seed: u64, count: usize) -> Vec<Request> {
    let mut random = Random(seed);
    let beginnings: Vec<Vec<u32>> = [300, 70, 33].map(|n| random_tokens(random.bits(), n, 1024)).into();
    let request = |i: usize| {
        let beginning = &beginnings[random.below(3) as usize];
        // A long prompt is slow: few are.
        let kept = 1 + random.below(if i.is_multiple_of(10) { beginning.len() as u64 } else { 60 }) as usize;
        let beginning = &beginning[..kept.min(beginning.len())];
        let tail = random_tokens(random.bits(), random.below(12) as usize, 1024);
        let temperature = if random.below(2) == 0 { 0.0 } else { 1.0 };
        Request {
            sampling: Sampling { temperature, top_k: 50, top_p: 0.95 },
            seed: random.below(100),
            snapshot_at: vec![beginning.len() as u32],
            logits: true,
            ..Request::greedy([beginning, &tail].concat(), 1 + random.below(6) as u32)
        }
    };
    (0..count).map(request).collect()
}

fn take(answers: &mut BTreeMap<Id, Answer>, events: Vec<Event>) -> Vec<(Id, Finish)> {
    let mut ended = vec![];
    for event in events {
        match event {
            Event::Token { id, token, logits } => {
                let (tokens, rows) = answers.entry(id).or_default();
                tokens.push(token);
                rows.push(logits.iter().map(|value| value.to_bits()).collect());
            }
            Event::Finished { id, reason } => ended.push((id, reason)),
            Event::Failed { error, .. } => panic!("{error}"),
            Event::Admitted { .. } | Event::Prompt { .. } | Event::Drafted { .. } => {}
        }
    }
    ended
}

fn run<D: Device>(engine: &mut Engine<D>) -> BTreeMap<Id, Answer> {
    let mut answers = BTreeMap::new();
    while !engine.is_idle() {
        take(&mut answers, engine.step().unwrap());
        engine.audit().unwrap();
    }
    answers
}

/// One after another in an engine that has room for one and keeps nothing.
fn alone(place: &Place, requests: &[Request]) -> Vec<Answer> {
    let mut engine = engine(place, 1, 0, 0);
    let one = |request: &Request| {
        let id = engine.submit(Request { snapshot_at: vec![], ..request.clone() }).unwrap();
        run(&mut engine).remove(&id).unwrap()
    };
    requests.iter().map(one).collect()
}

/// Enough prompts that some begin alike while the pool keeps what they share.
const MANY: usize = 60;

#[test]
fn many_prompts_have_the_same_bits_alone_and_in_company() {
    let rooms = [(5, 2, 0), (40, 3, 4 << 20), (2, 0, 0)];
    for (preset, count, rooms) in
        [("tiny-e", MANY, &rooms[..]), ("tiny-dense", 15, &rooms[..1]), ("tiny-moe", 15, &rooms[..1])]
    {
        let place = place(preset);
        let requests = requests(7, count);
        let alone = alone(&place, &requests);
        for &(sequences, snapshots, host_bytes) in rooms {
            let mut engine = engine(&place, sequences, snapshots, host_bytes);
            let mut random = Random(sequences as u64);
            let (mut answers, mut of, mut cancelled) = (BTreeMap::new(), BTreeMap::new(), vec![]);
            let mut next = requests.iter().enumerate();
            let mut cached = 0;
            loop {
                // They join a few at a time; every third comes with a neighbour that will be cancelled.
                for (index, request) in next.by_ref().take(random.below(4) as usize) {
                    of.insert(engine.submit(request.clone()).unwrap(), index);
                    if index.is_multiple_of(3) {
                        let doomed = Request { most: 50, seed: 99, ..requests[(index + 1) % count].clone() };
                        cancelled.push(engine.submit(doomed).unwrap());
                    }
                }
                if !cancelled.is_empty() && random.below(5) == 0 {
                    engine.cancel(cancelled.swap_remove(random.below(cancelled.len() as u64) as usize));
                }
                if next.len() == 0 {
                    cancelled.drain(..).for_each(|id| _ = engine.cancel(id));
                }
                let events = engine.step().unwrap();
                for event in &events {
                    if let Event::Admitted { cached: tokens, .. } = event {
                        cached += tokens;
                    }
                }
                take(&mut answers, events);
                engine.audit().unwrap();
                if next.len() == 0 && engine.is_idle() {
                    break;
                }
            }
            assert!(engine.shared_chunks() > 3, "{preset}: no prompts shared a chunk");
            assert!(snapshots == 0 || count < MANY || cached > 0, "{preset}: no prompt began like another");
            for (id, index) in &of {
                assert!(answers[id] == alone[*index], "{preset}, {sequences} sequences: request {index}");
            }
        }
    }
}

#[test]
fn an_engine_gives_the_bits_of_a_session() {
    let place = place("tiny-e");
    let requests: Vec<Request> =
        requests(11, 6).into_iter().map(|r| Request { sampling: Request::greedy(vec![], 0).sampling, ..r }).collect();
    let alone = alone(&place, &requests);
    let (plan, location) = plan(&place);
    let mut session = Session::on_cpu(plan, &location).unwrap();
    for (request, (tokens, rows)) in requests.iter().zip(&alone) {
        session.reset();
        let mut bits: Vec<Vec<u32>> = vec![];
        let mut each = |row: &[f32]| bits.push(row.iter().map(|value| value.to_bits()).collect());
        session.feed(&request.prompt, Asked::Last, None, |_, row| each(row)).unwrap();
        for token in &tokens[..tokens.len() - 1] {
            session.decode(*token, &mut each).unwrap();
        }
        assert!(bits == *rows);
    }
}

/// A snapshot at every place of a prompt, around the windows' and the blocks' edges; from each the prompt goes on with
/// the same bits.
#[test]
fn a_prefix_hit_changes_no_bit() {
    let place = place("tiny-e");
    let prompt: Arc<[u32]> = random_tokens(3, 290, 1024).into();
    let request =
        |at: &[u32]| Request { snapshot_at: at.to_vec(), logits: true, ..Request::greedy(Arc::clone(&prompt), 4) };
    // What comes from the host's memory is what was there: a few places are enough.
    let places = [1, 15, 16, 17, 31, 32, 33, 48, 100, 255, 256, 257, 272, 288, 289];
    for (most, host_bytes, places) in [(4, 0, &places[..]), (111, 64 << 20, &[1, 17, 256, 289])] {
        let request = |at: &[u32]| Request { most, ..request(at) };
        let alone = alone(&place, &[request(&[])]).remove(0);
        // One that may be as long as the context has all pages.
        let mut engine = engine(&place, 1, if host_bytes > 0 { 0 } else { 2 }, host_bytes);
        for &at in places {
            engine.forget_prefixes();
            let first = engine.submit(request(&[at])).unwrap();
            assert!(run(&mut engine)[&first] == alone, "snapshot at {at}");
            let second = engine.submit(request(&[])).unwrap();
            let events = engine.step().unwrap();
            let Event::Admitted { cached, .. } = events[0] else { panic!("{events:?}") };
            assert_eq!(cached, at);
            let mut answers = BTreeMap::new();
            take(&mut answers, events);
            while !engine.is_idle() {
                take(&mut answers, engine.step().unwrap());
            }
            assert!(answers[&second] == alone, "from a snapshot at {at}, host {host_bytes}");
        }
    }
}

/// A fork has the tokens of its parent so far, and goes on as its parent does where it has the parent's rules.
#[test]
fn a_fork_goes_on_with_the_same_bits() {
    let place = place("tiny-moe");
    for length in [20, 253] {
        let request = Request { logits: true, ..Request::greedy(random_tokens(length as u64, length, 1024), 12) };
        let (tokens, rows) = alone(&place, std::slice::from_ref(&request)).remove(0);
        let mut engine = engine(&place, 3, 0, 0);
        let parent = engine.submit(request.clone()).unwrap();
        let mut answers = BTreeMap::new();
        while answers.get(&parent).is_none_or(|(tokens, _): &Answer| tokens.len() < 3) {
            take(&mut answers, engine.step().unwrap());
        }
        let so_far = answers[&parent].0.len();
        let same = engine.fork(parent, &Fork { most: 5, sampling: request.sampling, seed: 0 }).unwrap();
        let hot = Sampling { temperature: 2.0, top_k: 0, top_p: 1.0 };
        let other = engine.fork(parent, &Fork { most: 5, sampling: hot, seed: 5 }).unwrap();
        while !engine.is_idle() {
            take(&mut answers, engine.step().unwrap());
            engine.audit().unwrap();
        }
        assert!(answers[&parent] == (tokens.clone(), rows.clone()), "neighbours change nothing");
        let range = so_far..so_far + 5;
        assert!(answers[&same] == (tokens[range.clone()].to_vec(), rows[range.clone()].to_vec()));
        let (others, their_rows) = &answers[&other];
        assert!(others != &tokens[range] && their_rows[0] == rows[so_far], "the same state, another choice");
    }
}

#[test]
fn the_context_ends_a_sequence() {
    let place = place("tiny-dense");
    let mut engine = engine(&place, 2, 0, 0);
    let id = engine.submit(Request::greedy(random_tokens(1, 398, 1024), 10)).unwrap();
    let (mut answers, mut ended) = (BTreeMap::new(), vec![]);
    while !engine.is_idle() {
        ended.extend(take(&mut answers, engine.step().unwrap()));
    }
    assert_eq!((answers[&id].0.len(), ended), (3, vec![(id, Finish::Context)]), "two positions, and what follows them");
}
