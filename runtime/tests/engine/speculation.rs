//! Drafts in batches: the answers are those of decoding one by one, and drafts are made where they pay.

use std::time::Duration;

use gemma4c_runtime::RuntimeError;
use gemma4c_runtime::engine::{DraftSource, Drafts, Engine, Event, Gap, Limits, Options, Request};

use super::fake::{Fake, ROW_TIME, mix};
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
            (Some(4), Limits { slots: 2, rows: 2, rings: 3, decode_rows: 6, ..limits() }),
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
    let mut fake = Fake::new(Limits { context: 400, blocks: 200, ..limits() });
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
