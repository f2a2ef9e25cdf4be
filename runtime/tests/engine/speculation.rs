//! Drafts in batches: the answers are those of decoding one by one, and drafts are made where they pay.

use std::collections::BTreeMap;
use std::time::Duration;

use gemma4c_runtime::RuntimeError;
use gemma4c_runtime::engine::{DraftSource, Drafts, Engine, Event, Gap, Id, Limits, Options, Request};

use super::fake::{Alone, Fake, ROW_TIME, mix};
use super::{as_it_is, drafting_engine, limits, storm_on};

/// Random arrivals, cancellations, forks and rules with drafts from everywhere, of any number and as many as pay.
#[test]
fn answers_do_not_depend_on_drafts() {
    type Source = fn() -> DraftSource;
    let sources: [(Source, u64); 3] = [
        (|| DraftSource::Drafter, 25),
        // The tokens of a hash never repeat themselves for long.
        (|| DraftSource::Lookup, 0),
        // Some are right by chance, and some are no tokens.
        (
            || {
                DraftSource::Given(Box::new(|text, most| {
                    (0..most as u64).map(|i| mix(text.len() as u64, i) as u32 % 52).collect()
                }))
            },
            0,
        ),
    ];
    for (of, (source, least_percent)) in (0..).zip(sources) {
        for (steps, limits) in [
            (None, limits()),
            (Some(1), limits()),
            (Some(7), limits()),
            (Some(3), Limits { ahead: 0, ..limits() }),
            (Some(4), Limits { slots: 2, rows: 2, decode_rows: 6, ..limits() }),
        ] {
            let mut fake = Fake::new(limits);
            fake.times.chunk = |rows| (8 + rows as u64) * ROW_TIME;
            let drafts = Drafts { source: source(), steps };
            let engine = drafting_engine(fake, Gap::Within(Duration::from_millis(8)), drafts);
            let (_, engine) = storm_on(engine, 31 + of, 300, [90, 64, 33, 20, 5], as_it_is);
            let (counts, device) = (engine.draft_counts(), engine.device().counts);
            assert_eq!(counts.accepted_at.iter().sum::<u64>(), counts.accepted);
            assert!(counts.accepted * 100 >= counts.drafted * least_percent, "{steps:?}: {counts:?}");
            if of != 1 {
                assert!(device.verified > 100, "{steps:?}: {device:?}");
            }
            assert_eq!(device.drafted > 100, of == 0, "{steps:?}: {device:?}");
        }
    }
}

/// One request after another on a device where a decode takes so long: tokens, and seconds of the virtual clock.
fn run(drafts: Drafts, decode: fn(u32) -> u64, requests: usize, at_once: usize) -> (f64, Engine<Fake>) {
    let mut fake = Fake::new(Limits { context: 400, pages: 300, ..limits() });
    fake.times.decode = decode;
    let clock = fake.clock();
    let mut engine = drafting_engine(fake, Gap::Any, drafts);
    let (mut tokens, mut left) = (0, requests);
    loop {
        while left > 0 && engine.occupation().waiting + engine.occupation().running < at_once {
            engine.submit(Request::greedy([left as u32 % 50, 3, 4], 300)).unwrap();
            left -= 1;
        }
        if engine.is_idle() {
            break;
        }
        tokens += engine.step().unwrap().iter().filter(|event| matches!(event, Event::Token { .. })).count();
    }
    (tokens as f64 / clock().as_secs_f64(), engine)
}

/// The same on a device that closes the rounds of a single sequence by itself, while others come, go and fork.
#[test]
fn nor_on_who_closes_their_rounds() {
    let replaced = || DraftSource::Replaced(Box::new(|text, most| vec![mix(text.len() as u64, 1) as u32 % 50; most]));
    let mut closed = 0;
    for (seed, steps, sequences) in [(1, None, 1), (2, Some(4), 1), (3, None, 2), (4, Some(5), 2), (5, None, 4)] {
        for source in [DraftSource::Drafter, replaced()] {
            let spare_rows = if seed == 2 { 5 } else { 16 };
            let limits = Limits { slots: sequences, rows: sequences, spare_rows, ..limits() };
            let mut fake = Fake::new(limits);
            fake.closes_rounds = true;
            let engine = drafting_engine(fake, Gap::Any, Drafts { source, steps });
            let (_, engine) = storm_on(engine, 70 + seed, 200, [90, 64, 33, 20, 5], as_it_is);
            closed += engine.device().counts.closed;
        }
    }
    assert!(closed > 500, "{closed}");
}

/// A sequence in rounds is joined by others, which leave again: it goes on in rounds, and says what it says alone.
#[test]
fn rounds_end_when_somebody_joins_and_begin_again() {
    let mut fake = Fake::new(Limits { context: 400, pages: 300, spare_rows: 16, ..limits() });
    fake.closes_rounds = true;
    let drafts = Drafts { source: DraftSource::Drafter, steps: Some(3) };
    let mut engine = drafting_engine(fake, Gap::Any, drafts);
    let long = Request::greedy([2, 3, 4], 300);
    let first = engine.submit(long.clone()).unwrap();
    let (mut told, mut joined, mut closed) = (BTreeMap::<Id, Vec<u32>>::new(), BTreeMap::new(), vec![]);
    for step in 0.. {
        if [10, 40].contains(&step) {
            closed.push(engine.device().counts.closed);
            let short = Request::greedy([step, 1], 12);
            joined.insert(engine.submit(short.clone()).unwrap(), short);
        }
        if engine.is_idle() {
            break;
        }
        for event in engine.step().unwrap() {
            if let Event::Token { id, token, .. } = event {
                told.entry(id).or_default().push(token);
            }
        }
        engine.audit().unwrap();
    }
    closed.push(engine.device().counts.closed);
    assert!(closed.is_sorted_by(|before, after| before + 5 < *after), "{closed:?}");
    assert!(engine.device().counts.decodes > 5, "{:?}", engine.device().counts);
    joined.insert(first, long);
    for (id, request) in joined {
        let (expected, _) = Alone::of(&request).answer(&request, None, engine.limits());
        assert_eq!(told[&id], expected, "{request:?}");
    }
}

/// Rounds that a device closes are queued behind each other, where that need not wait for the text: with drafts that
/// pay, tokens come faster than from a device whose drafts the host judges.
#[test]
fn a_device_that_closes_rounds_is_not_waited_for() {
    let run = |closes_rounds: bool, steps: Option<u32>| {
        let mut fake = Fake::new(Limits { context: 400, pages: 300, spare_rows: 16, ..limits() });
        fake.times.decode = |rows| 5_000_000 + 50_000 * u64::from(rows);
        fake.closes_rounds = closes_rounds;
        let clock = fake.clock();
        let mut engine = drafting_engine(fake, Gap::Any, Drafts { source: DraftSource::Drafter, steps });
        engine.submit(Request::greedy([2, 3, 4], 300)).unwrap();
        let mut tokens = vec![];
        while !engine.is_idle() {
            let token = |event| if let Event::Token { token, .. } = event { Some(token) } else { None };
            tokens.extend(engine.step().unwrap().into_iter().filter_map(token));
        }
        (tokens, clock(), engine.device().counts, engine.draft_counts())
    };
    for steps in [None, Some(5)] {
        let (tokens, time, device, counts) = run(true, steps);
        let (by_host, time_by_host, waited, counts_by_host) = run(false, steps);
        assert_eq!(tokens, by_host);
        assert!(device.closed > 50 && device.closed_behind_others * 10 > device.closed * 9, "{device:?}");
        assert!(waited.closed == 0 && device.decodes == 0, "{device:?}");
        assert!(time <= time_by_host + time_by_host / 10, "{time:?} against {time_by_host:?}");
        if steps.is_some() {
            // All but what lies behind the end.
            assert!(counts.accepted.abs_diff(counts_by_host.accepted) <= 5);
        }
    }
}

fn of(source: DraftSource) -> Drafts {
    Drafts { source, steps: None }
}

fn wrong() -> Drafts {
    of(DraftSource::Given(Box::new(|text, most| vec![(text[text.len() - 1] + 1) % 50; most])))
}

#[test]
fn drafts_are_made_where_they_pay() {
    // Rows are nearly free: a batch has several times the tokens.
    let cheap = |rows: u32| 5_000_000 + 50_000 * u64::from(rows);
    for at_once in [1, 4] {
        let (plain, _) = run(Drafts::default(), cheap, 4, at_once);
        let (drafted, engine) = run(of(DraftSource::Drafter), cheap, 4, at_once);
        let times = if at_once == 1 { 2.5 } else { 1.9 };
        assert!(drafted > times * plain, "{at_once}: {drafted} against {plain}: {:?}", engine.draft_counts());
        // Drafts that are never right are given up.
        let (vain, engine) = run(wrong(), cheap, 4, at_once);
        assert!(vain > 0.97 * plain, "{at_once}: {vain} against {plain}: {:?}", engine.draft_counts());
        assert!(engine.draft_counts().drafted > 0);
    }
    // Every row takes as long as the first: nobody gains by guessing.
    let dear = |rows: u32| 5_000_000 * u64::from(rows);
    let (plain, _) = run(Drafts::default(), dear, 4, 4);
    let (drafted, engine) = run(of(DraftSource::Drafter), dear, 4, 4);
    assert!(drafted > 0.97 * plain, "{drafted} against {plain}: {:?}", engine.draft_counts());
}

#[test]
fn a_device_that_cannot_is_refused() {
    let refused = |source: DraftSource, limits: Limits| {
        let options = Options { drafts: of(source), ..Options::default() };
        Engine::new(Fake::new(limits), options).err()
    };
    let no_drafter = Limits { drafts: 0, ..limits() };
    assert!(matches!(refused(DraftSource::Drafter, no_drafter.clone()), Some(RuntimeError::NoDrafter)));
    assert!(refused(DraftSource::Lookup, no_drafter).is_none());
    let one_row = Limits { verified_rows: 1, ..limits() };
    assert!(matches!(refused(DraftSource::Lookup, one_row), Some(RuntimeError::NoRoomToVerify)));
}
