//! Adapters in seats: whoever has one gets its answers, whoever has none or another is not touched, and no seat is
//! changed under a sequence.

use std::collections::BTreeMap;

use gemma4c_plan::{SeatWeights, Seats};
use gemma4c_runtime::engine::{Drafts, Event, Finish, Fork, Gap, Id, Limits, Request, RequestError, SeatError, Seated};

use super::fake::{Alone, effect};
use super::{Engine, Fake, Random, all_events, cached, drafting_engine, engine, limits};

fn with_seats() -> Limits {
    Limits { seats: Some(Seats { count: 3, rank: 16 }), ..limits() }
}

fn weights(of: u8) -> SeatWeights {
    SeatWeights { pairs: 1, matrices: vec![vec![of; 4]] }
}

fn seated(seat: u32, strength: f32) -> Option<Seated> {
    Some(Seated { seat, strength })
}

/// What a sequence with an adapter answers when it is alone.
fn alone(request: &Request, adapter: u64, limits: &Limits) -> (Vec<u32>, Finish) {
    Alone::with(request, adapter).answer(request, None, limits)
}

fn answers(events: &[Event]) -> BTreeMap<Id, (Vec<u32>, Option<Finish>)> {
    let mut answers: BTreeMap<Id, (Vec<u32>, Option<Finish>)> = BTreeMap::new();
    for event in events {
        let one = answers.entry(event.id()).or_default();
        match event {
            Event::Token { token, .. } => one.0.push(*token),
            Event::Finished { reason, .. } => one.1 = Some(*reason),
            _ => {}
        }
    }
    answers
}

/// Random arrivals with and without adapters, while seats are filled and emptied as often as that is allowed.
fn storm(mut engine: Engine<Fake>, seed: u64, requests: usize) -> (u64, usize, usize) {
    let limits = engine.limits().clone();
    let mut random = Random(seed);
    let beginnings: Vec<Vec<u32>> = [90, 33, 20].map(|count| random.tokens(count)).into();
    let (mut expected, mut events) = (BTreeMap::new(), Vec::new());
    let mut filled: [Option<u8>; 3] = [None; 3];
    let (mut fillings, mut in_use) = (0, 0);
    while expected.len() < requests || !engine.is_idle() {
        // One seat rests at a time: who had it ends, and it can be filled.
        let resting = 1 + (expected.len() / 8 % 3) as u32;
        while expected.len() < requests && engine.occupation().waiting < 3 && random.one_in(3) {
            let mut request = random.request(&beginnings);
            let strength = [1.0, 0.5][random.below(2) as usize];
            let adapter = seated(random.below(4) as u32, strength);
            request.adapter = adapter.filter(|adapter| adapter.seat > 0 && adapter.seat != resting);
            let inside = request.adapter.map(|adapter| filled[adapter.seat as usize - 1]);
            match (engine.submit(request.clone()), inside) {
                (Err(RequestError::Seat(SeatError::Empty { .. })), Some(None)) => {}
                (Ok(id), None) => _ = expected.insert(id, alone(&request, 0, &limits)),
                (Ok(id), Some(Some(of))) => {
                    _ = expected.insert(id, alone(&request, effect(&weights(of), strength), &limits));
                }
                (other, inside) => panic!("{other:?} with {inside:?} in the seat"),
            }
        }
        if random.one_in(6) {
            let seat = if random.one_in(2) { resting } else { 1 + random.below(3) as u32 };
            let is_used = engine.sequences_in(seat) > 0;
            let fill = (!random.one_in(4)).then(|| random.below(200) as u8);
            let done = match fill {
                Some(of) => engine.fill_seat(seat, &weights(of)),
                None => engine.empty_seat(seat),
            };
            match done {
                Ok(()) => {
                    assert!(!is_used, "seat {seat} was changed under a sequence");
                    filled[seat as usize - 1] = fill;
                    fillings += 1;
                }
                Err(SeatError::InUse { sequences, .. }) => {
                    assert!(is_used && sequences == engine.sequences_in(seat));
                    in_use += 1;
                }
                Err(other) => panic!("{other}"),
            }
        }
        events.extend(engine.step().unwrap());
        engine.audit().unwrap();
    }
    let found = answers(&events);
    for (id, (tokens, reason)) in expected {
        assert_eq!(found[&id], (tokens, Some(reason)), "{id:?}");
    }
    let of_prefixes = |event: &Event| if let Event::Admitted { cached, .. } = event { u64::from(*cached) } else { 0 };
    (events.iter().map(of_prefixes).sum(), fillings, in_use)
}

#[test]
fn answers_are_those_of_the_adapter_whoever_else_runs_and_however_seats_are_filled() {
    let (cached, fillings, in_use) = storm(engine(with_seats(), Gap::Any), 1, 1500);
    assert!(cached > 5_000 && fillings > 50 && in_use > 50, "{cached} cached, {fillings} filled, {in_use} in use");
    let (cached, ..) = storm(engine(Limits { pages: 15, ..with_seats() }, Gap::Any), 2, 400);
    assert!(cached > 500, "{cached}");
    let drafts = Drafts { source: gemma4c_runtime::DraftSource::Drafter, steps: Some(3) };
    storm(drafting_engine(Fake::new(with_seats()), Gap::Any, drafts), 3, 400);
}

/// The prefix of one filling is no other's: not of no adapter, not of another strength, not of the seat filled again.
#[test]
fn prefixes_belong_to_a_filling_and_a_strength() {
    let mut engine = engine(with_seats(), Gap::Any);
    engine.fill_seat(1, &weights(7)).unwrap();
    engine.fill_seat(2, &weights(7)).unwrap();
    let prompt = Random(3).tokens(40);
    let ask = |engine: &mut Engine<Fake>, adapter| {
        let request = Request { adapter, snapshot_at: vec![32], ..Request::greedy(&prompt[..], 2) };
        let id = engine.submit(request).unwrap();
        cached(&all_events(engine), id)
    };
    for adapter in [None, seated(1, 1.0), seated(1, 0.5), seated(2, 1.0)] {
        assert_eq!(ask(&mut engine, adapter), 0, "{adapter:?} begins anew");
        assert_eq!(ask(&mut engine, adapter), 32, "{adapter:?} begins with its own");
    }
    let kept = engine.occupation().snapshots;
    engine.fill_seat(1, &weights(7)).unwrap();
    assert_eq!(kept - engine.occupation().snapshots, 2, "what was kept of both strengths is gone");
    assert_eq!(ask(&mut engine, seated(1, 1.0)), 0, "the same adapter, filled again, begins anew");
    assert_eq!(ask(&mut engine, seated(2, 1.0)), 32, "the other seat's is there");
    assert_eq!(ask(&mut engine, None), 32);
}

#[test]
fn a_fork_keeps_its_parents_adapter() {
    let mut engine = engine(with_seats(), Gap::Any);
    engine.fill_seat(3, &weights(9)).unwrap();
    let request = Request { adapter: seated(3, 1.0), ..Request::greedy(Random(5).tokens(20), 12) };
    let parent = engine.submit(request.clone()).unwrap();
    let mut events = Vec::new();
    while !events.iter().any(|event| matches!(event, Event::Token { .. })) {
        events.extend(engine.step().unwrap());
    }
    let child = engine.fork(parent, &Fork { most: 8, sampling: request.sampling, seed: 0 }).unwrap();
    assert_eq!(engine.sequences_in(3), 2);
    engine.cancel(parent);
    assert!(matches!(engine.empty_seat(3), Err(SeatError::InUse { seat: 3, sequences: 1 })));
    events.extend(all_events(&mut engine));
    let before = events.iter().take_while(|event| event.id() != child);
    let fed = before.filter(|event| matches!(event, Event::Token { .. })).count();
    let (whole, _) = alone(&request, effect(&weights(9), 1.0), &with_seats());
    assert_eq!(answers(&events)[&child].0, whole[fed..][..8.min(whole.len() - fed)]);
    engine.empty_seat(3).unwrap();
}

#[test]
fn seats_are_refused_by_name() {
    let of = |request: Request, limits: Limits| engine(limits, Gap::Any).submit(request).unwrap_err().to_string();
    let request = |adapter| Request { adapter, ..Request::greedy([1], 1) };
    let mut texts = vec![
        of(request(seated(1, 1.0)), limits()),
        of(request(seated(1, 1.0)), with_seats()),
        of(request(seated(4, 1.0)), with_seats()),
        of(request(seated(0, 1.0)), with_seats()),
    ];
    let mut engine = engine(with_seats(), Gap::Any);
    engine.fill_seat(2, &weights(1)).unwrap();
    texts.push(engine.submit(request(seated(2, f32::NAN))).unwrap_err().to_string());
    texts.push(engine.fill_seat(9, &weights(1)).unwrap_err().to_string());
    engine.submit(request(seated(2, 1.0))).unwrap();
    texts.push(engine.fill_seat(2, &weights(1)).unwrap_err().to_string());
    texts.push(super::engine(limits(), Gap::Any).empty_seat(1).unwrap_err().to_string());
    let expected = [
        "the plan has no seats for adapters: compile it with --adapters",
        "no adapter is in seat 1",
        "there is no seat 4 for an adapter: the plan has 3, counted from 1",
        "there is no seat 0 for an adapter: the plan has 3, counted from 1",
        "an adapter's strength is NaN, expected a number",
        "there is no seat 9 for an adapter: the plan has 3, counted from 1",
        "seat 2 is in use: 1 sequences run or wait with its adapter",
        "the plan has no seats for adapters: compile it with --adapters",
    ];
    assert_eq!(texts, expected);
}
