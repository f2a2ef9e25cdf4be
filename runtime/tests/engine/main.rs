//! The engine over a device whose every token depends on all that its sequence may see and on nothing else.
//!
//! What is tested here is bookkeeping: pages, prefixes, order and time. That the CPU computes the same bits in a
//! batch is tested on models, by the whole program's tests.

#![allow(clippy::unwrap_used)]

mod fake;
mod launches;
mod media;
mod prompts;
mod seats;
mod speculation;
#[path = "../../plan/tests/support/mod.rs"]
mod support;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use fake::{Alone, EvenAfterThree, Fake, ROW_TIME, mix};
use gemma4c_plan::Sampling;
use gemma4c_plan::cuda::Paging;
use gemma4c_runtime::engine::{
    BackendDevice, BackendOptions, BoxedRule, Demand, Device, Drafts, Engine, Event, Finish, Fork, Gap, Id, Limits,
    Options, Request, RequestError,
};

fn limits() -> Limits {
    Limits {
        slots: 4,
        pages: 60,
        // Of the fake.
        sliding: Paging::default(),
        full: Paging { rows: 16, entries: 10 },
        rows: 4,
        decode_rows: 16,
        verified_rows: 6,
        drafts: 5,
        chunks: vec![4, 8, 16],
        alignment: 4,
        context: 160,
        vocab: 50,
        ahead: 3,
        spare_rows: 5,
        host_units: 30,
        seats: None,
    }
}

fn as_it_is(_: &mut Random, request: Request) -> Request {
    request
}

fn engine(limits: Limits, gap: Gap) -> Engine<Fake> {
    engine_on(Fake::new(limits), gap)
}

fn engine_on(fake: Fake, gap: Gap) -> Engine<Fake> {
    drafting_engine(fake, gap, Drafts::default())
}

fn drafting_engine(fake: Fake, gap: Gap, drafts: Drafts) -> Engine<Fake> {
    // One storm is an offline batch.
    let prompts_first = fake.limits().ahead == 2;
    let clock = fake.clock();
    Engine::new(fake, Options { gap, clock, prompts_first, drafts, ..Options::default() }).unwrap()
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = mix(self.0, 1);
        self.0 % n
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    fn tokens(&mut self, count: u64) -> Vec<u32> {
        (0..count).map(|_| self.below(50) as u32).collect()
    }

    fn sampling(&mut self) -> Sampling {
        match self.below(4) {
            0 => Sampling { temperature: 0.0, top_k: 1, top_p: 1.0 },
            // The device cannot pick from all.
            1 => Sampling { temperature: 1.0, top_k: 0, top_p: 0.9 },
            _ => Sampling { temperature: 0.7, top_k: 10, top_p: 0.95 },
        }
    }

    fn rule(&mut self) -> Option<BoxedRule> {
        let demand = [Demand::Mask, Demand::Mask, Demand::Logits].get(self.below(9) as usize).copied();
        demand.map(|demand| BoxedRule(Box::new(EvenAfterThree::by(demand))))
    }

    /// A prompt that begins like some others, with snapshots where they part and elsewhere.
    fn request(&mut self, beginnings: &[Vec<u32>]) -> Request {
        let beginning = &beginnings[self.below(beginnings.len() as u64) as usize];
        let kept = 1 + self.below(beginning.len() as u64) as usize;
        let kept = if self.one_in(3) { kept } else { beginning.len() };
        let more = self.below(20);
        let prompt = [&beginning[..kept], &self.tokens(more)].concat();
        let mut snapshot_at = vec![kept as u32];
        for _ in 0..self.below(3) {
            snapshot_at.push(1 + self.below(prompt.len() as u64) as u32);
        }
        Request {
            most: if self.one_in(20) { 0 } else { self.below(30) as u32 + if self.one_in(15) { 200 } else { 1 } },
            sampling: self.sampling(),
            seed: self.below(1000),
            stop: Arc::from([7]),
            snapshot_at,
            salt: Arc::from(if self.one_in(4) { &b"another"[..] } else { b"" }),
            logits: self.one_in(10),
            prompt_logits: self.one_in(25),
            rule: self.rule(),
            prompt: prompt.into(),
            media: Arc::default(),
            adapter: None,
            client: self.below(3),
        }
    }
}

/// What a sequence was asked for, and what it has given so far.
struct Told {
    request: Request,
    /// Of a fork: what its parent had fed, and the token it had not.
    from: Option<(Alone, u32)>,
    tokens: Vec<u32>,
    /// Logits after tokens of its prompt.
    read: Vec<Vec<f32>>,
    admitted: Option<u32>,
    finished: Option<Finish>,
}

impl Told {
    fn check(&self, limits: &Limits) {
        let (alone, pending) = match &self.from {
            Some((alone, pending)) => (alone.clone(), Some(*pending)),
            None => (Alone::of(&self.request), None),
        };
        if self.request.prompt_logits && self.from.is_none() && self.finished != Some(Finish::Cancelled) {
            assert_eq!(self.read, alone.read(limits.vocab), "{:?}", self.request);
        }
        let (tokens, reason) = alone.answer(&self.request, pending, limits);
        match self.finished {
            Some(Finish::Cancelled) => assert!(tokens.starts_with(&self.tokens)),
            finished => assert_eq!((&self.tokens, finished), (&tokens, Some(reason)), "{:?}", self.request),
        }
    }
}

fn take(told: &mut BTreeMap<Id, Told>, forks: &mut BTreeMap<Id, (Id, Fork)>, events: Vec<Event>) {
    for event in events {
        let id = event.id();
        if let Some((parent, fork)) = forks.remove(&id) {
            let Event::Admitted { cached, .. } = event else { panic!("a fork begins by being admitted: {event:?}") };
            let Told { request, from, tokens, .. } = &told[&parent];
            let (&pending, fed) = tokens.split_last().expect("its parent has a token");
            let mut alone = match from {
                Some((alone, pending)) => {
                    let mut alone = alone.clone();
                    alone.decode(&[*pending]);
                    alone
                }
                None => Alone::of(request),
            };
            alone.decode(fed);
            let Fork { most, sampling, seed } = fork;
            let request = Request { most, sampling, seed, snapshot_at: vec![], ..request.clone() };
            let from = Some((alone, pending));
            told.insert(
                id,
                Told { request, from, tokens: vec![], read: vec![], admitted: Some(cached), finished: None },
            );
            continue;
        }
        let one = told.get_mut(&id).unwrap();
        assert_eq!(one.finished, None, "nothing comes after the end: {event:?}");
        match event {
            Event::Admitted { cached, .. } => {
                assert!((cached as usize) < one.request.prompt.len(), "at least one token is computed");
                assert!(one.admitted.replace(cached).is_none());
            }
            Event::Prompt { position, logits, .. } => {
                assert!(one.request.prompt_logits && one.tokens.is_empty());
                assert_eq!(position as usize, one.read.len());
                one.read.push(logits);
            }
            Event::Token { token, logits, .. } => {
                assert_eq!(logits.is_empty(), !one.request.logits);
                one.tokens.push(token);
            }
            Event::Drafted { drafted, accepted, .. } => assert!(accepted <= drafted && drafted > 0),
            Event::Finished { reason, .. } => one.finished = Some(reason),
            Event::Failed { error, .. } => panic!("{error}"),
        }
    }
}

/// Random arrivals, cancellations and forks; after every step nothing is lost or owned twice, and in the end every
/// answer is what its request gets alone. Returns how many prompt tokens were cached.
fn storm(seed: u64, requests: usize, limits: Limits) -> (u64, Engine<Fake>) {
    let mut fake = Fake::new(limits);
    // What each chunk takes for its weights.
    fake.times.chunk = |rows| (8 + rows as u64) * ROW_TIME;
    storm_on(engine_on(fake, Gap::Within(Duration::from_millis(8))), seed, requests, [90, 64, 33, 20, 5], as_it_is)
}

/// The same on any device, with prompts that begin with so many tokens, and with what `attach` makes of them.
fn storm_on<D: Device>(
    mut engine: Engine<D>,
    seed: u64,
    requests: usize,
    beginnings: [u64; 5],
    attach: impl Fn(&mut Random, Request) -> Request,
) -> (u64, Engine<D>) {
    let limits = engine.limits().clone();
    let mut random = Random(seed);
    let beginnings: Vec<Vec<u32>> = beginnings.map(|count| random.tokens(count)).into();
    let (mut told, mut forks) = (BTreeMap::new(), BTreeMap::new());
    let mut submitted = 0;
    while submitted < requests || !engine.is_idle() {
        while submitted < requests && random.one_in(3) {
            let request = random.request(&beginnings);
            let request = attach(&mut random, request);
            let id = engine.submit(request.clone()).unwrap();
            let one = Told { request, from: None, tokens: vec![], read: vec![], admitted: None, finished: None };
            told.insert(id, one);
            submitted += 1;
        }
        let alive: Vec<Id> = told.iter().filter(|(_, one)| one.finished.is_none()).map(|(id, _)| *id).collect();
        if random.one_in(12) && !alive.is_empty() {
            engine.cancel(alive[random.below(alive.len() as u64) as usize]);
            engine.audit().unwrap();
        }
        if random.one_in(9) && !alive.is_empty() {
            let parent = alive[random.below(alive.len() as u64) as usize];
            let most = 1 + random.below(20) as u32;
            let fork = Fork { most, sampling: random.sampling(), seed: random.below(1000) };
            match engine.fork(parent, &fork) {
                Ok(id) => _ = forks.insert(id, (parent, fork)),
                Err(RequestError::NotRunning(_) | RequestError::NoRoom(_)) => {}
                Err(other) => panic!("{other}"),
            }
            engine.audit().unwrap();
        }
        take(&mut told, &mut forks, engine.step().unwrap());
        engine.audit().unwrap();
    }
    assert!(forks.is_empty());
    told.values().for_each(|one| one.check(&limits));
    let cached = told.values().filter(|one| one.from.is_none()).filter_map(|one| one.admitted);
    let cached = cached.map(u64::from).sum();
    let kept = engine.occupation();
    engine.forget_prefixes();
    engine.audit().unwrap();
    assert_eq!(engine.occupation().free_pages, kept.pages, "everything is free in the end");
    (cached, engine)
}

#[test]
fn answers_do_not_depend_on_company_prefixes_or_memory() {
    let (cached, engine) = storm(1, 2500, limits());
    let counts = engine.device().counts;
    assert!(cached > 20_000, "prefixes were used: {cached} tokens");
    assert!(counts.saved > 100 && counts.loaded > 50 && counts.repeated > 500, "{counts:?}");
    assert!(counts.most_on_their_way >= 4, "{counts:?}");
    assert!(counts.shared > 200, "short prompts share chunks: {counts:?}");
    // Logits are computed while masks are: the tokens before are still on their way when a pass is queued.
    assert!(counts.guided > 200 && counts.guided_behind_others > 50, "{counts:?}");
}

#[test]
fn nor_on_how_much_of_it_there_is() {
    let no_host = Limits { host_units: 0, ..limits() };
    let cached = storm(2, 800, no_host.clone()).0;
    assert!(cached > 1_000, "{cached}");
    storm(3, 500, Limits { slots: 1, rows: 1, pages: 15, ..limits() });
    storm(4, 300, Limits { pages: 15, ..no_host.clone() });
    storm(5, 800, Limits { pages: 20, host_units: 14, ..limits() });
    storm(6, 500, Limits { pages: 25, ..no_host });
    storm(7, 500, Limits { ahead: 0, ..limits() });
    storm(10, 500, Limits { ahead: 2, ..limits() });
    storm(8, 500, Limits { slots: 1, rows: 1, pages: 21, ..limits() });
    storm(9, 500, Limits { slots: 3, rows: 2, chunks: vec![1], ..limits() });
}

/// The same through the records, pages and phases of a plan.
#[test]
fn nor_on_the_launches_that_compute_them() {
    // Every result takes a millisecond, so that prompts share chunks.
    let clock = || {
        let looks = std::sync::atomic::AtomicU64::new(0);
        Box::new(move || Duration::from_millis(looks.fetch_add(1, std::sync::atomic::Ordering::Relaxed)))
    };
    let engine = |sequences, host| {
        let options = Options { clock: clock(), ..Options::default() };
        Engine::new(launches::device(sequences, host), options).unwrap()
    };
    let (cached, kept) = storm_on(engine(None, 40_000), 21, 250, [400, 256, 130, 40, 5], as_it_is);
    assert!(cached > 5_000, "{cached}");
    assert_eq!((kept.limits().slots, kept.limits().rows, kept.limits().chunk()), (4, 4, 192));
    storm_on(engine(Some(3), 0), 22, 100, [300, 256, 130, 40, 5], as_it_is);
    storm_on(engine(Some(1), 9_000), 23, 40, [300, 256, 130, 40, 5], as_it_is);
}

#[test]
fn a_plan_for_fewer_sequences_is_refused() {
    for wanted in [0, 5] {
        let backend = launches::device(None, 0).into_backend();
        let options = BackendOptions { sequences: Some(wanted), ..BackendOptions::default() };
        let refused = BackendDevice::new(&launches::plan(), backend, options).err().unwrap();
        let expected = format!("the plan runs 4 sequences at once, not {wanted}: compile it with --sequences {wanted}");
        assert_eq!(refused.to_string(), expected);
    }
}

fn all_events(engine: &mut Engine<Fake>) -> Vec<Event> {
    let mut events = vec![];
    while !engine.is_idle() {
        events.extend(engine.step().unwrap());
        engine.audit().unwrap();
    }
    events
}

fn cached(events: &[Event], of: Id) -> u32 {
    let admitted = events.iter().find_map(|event| match event {
        Event::Admitted { id, cached } if *id == of => Some(*cached),
        _ => None,
    });
    admitted.unwrap()
}

#[test]
fn a_prompt_starts_from_the_longest_snapshot_it_begins_with() {
    let mut engine = engine(limits(), Gap::Any);
    let tokens = Random(3).tokens(100);
    let request = |prompt: &[u32], at: &[u32], salt: &[u8]| Request {
        snapshot_at: at.to_vec(),
        salt: salt.into(),
        ..Request::greedy(prompt, 4)
    };
    let first = engine.submit(request(&tokens, &[32, 50, 100], b"")).unwrap();
    assert_eq!(cached(&all_events(&mut engine), first), 0);
    let mut hit = |prompt: &[u32], salt: &[u8]| {
        let id = engine.submit(request(prompt, &[], salt)).unwrap();
        cached(&all_events(&mut engine), id)
    };
    assert_eq!(hit(&tokens, b""), 50, "a snapshot of the whole prompt leaves nothing to compute");
    assert_eq!(hit(&[&tokens[..], &[1]].concat(), b""), 100);
    assert_eq!(hit(&tokens[..99], b""), 50);
    assert_eq!(hit(&tokens[..51], b""), 50);
    assert_eq!(hit(&tokens[..50], b""), 32);
    assert_eq!(hit(&tokens[..32], b""), 0);
    let other = [&tokens[..31], &[(tokens[31] + 1) % 50], &tokens[32..]].concat();
    assert_eq!(hit(&other, b""), 0);
    assert_eq!(hit(&tokens, b"salt"), 0, "another salt shares nothing");
}

/// A chat departs from its latest turn, wherever there is room for one snapshot, of six pages, beside its twelve. With a
/// second, the system prompt stays for other chats, although no turn but the first starts from it.
#[test]
fn a_chat_goes_on_from_its_latest_turn_and_keeps_its_system_prompt() {
    for (pages, host_units, system_stays) in [(18, 0, false), (24, 0, true), (18, 9, true), (12, 0, false)] {
        let limits = Limits { slots: 1, rows: 1, pages, host_units, ..limits() };
        let mut engine = engine(limits, Gap::Any);
        let mut random = Random(12);
        let system = random.tokens(40);
        let mut conversation = system.clone();
        let mut departs = 0;
        for turn in 0..5 {
            conversation.extend(random.tokens(5));
            let prompt = conversation.len() as u32;
            let request = Request { snapshot_at: vec![40, prompt - 1], ..Request::greedy(conversation.clone(), 7) };
            let id = engine.submit(request).unwrap();
            let events = all_events(&mut engine);
            assert_eq!(cached(&events, id), departs, "turn {turn} with {pages} pages");
            let token = |event: &Event| match event {
                Event::Token { token, .. } => Some(*token),
                _ => None,
            };
            conversation.extend(events.iter().filter_map(token));
            departs = if pages > 12 { prompt - 1 } else { 0 };
        }
        let other = [system, random.tokens(5)].concat();
        let id = engine.submit(Request::greedy(other, 1)).unwrap();
        let expected = if system_stays { 40 } else { 0 };
        assert_eq!(cached(&all_events(&mut engine), id), expected, "{pages} pages, {host_units} on the host");
        engine.audit().unwrap();
    }
}

/// Rows that decode wrote are never part of a prefix: the second turn reads the first answer as a prompt.
#[test]
fn generated_rows_are_not_reused() {
    let mut engine = engine(limits(), Gap::Any);
    let prompt = Random(5).tokens(40);
    let first = Request { snapshot_at: vec![38], ..Request::greedy(prompt.clone(), 20) };
    let id = engine.submit(first).unwrap();
    let events = all_events(&mut engine);
    let answer: Vec<u32> = events
        .iter()
        .filter_map(|event| match event {
            Event::Token { id: of, token, .. } if *of == id => Some(*token),
            _ => None,
        })
        .collect();
    let next = Request::greedy([&prompt[..], &answer, &[3, 4]].concat(), 5);
    let expected = Alone::of(&next).answer(&next, None, &limits()).0;
    let id = engine.submit(next).unwrap();
    let events = all_events(&mut engine);
    assert_eq!(cached(&events, id), 38);
    let tokens = events.iter().filter_map(|event| match event {
        Event::Token { token, .. } => Some(*token),
        _ => None,
    });
    assert_eq!(tokens.collect::<Vec<_>>(), expected);
}

#[test]
fn requests_are_served_in_the_order_they_came() {
    let mut engine = engine(Limits { pages: 15, ..limits() }, Gap::Any);
    let mut random = Random(9);
    // The second needs more than the first leaves; the third would fit, and waits its turn.
    let ids: Vec<Id> = [(60, 40), (90, 60), (5, 2)]
        .map(|(prompt, most)| engine.submit(Request::greedy(random.tokens(prompt), most)).unwrap())
        .into();
    let events = all_events(&mut engine);
    let admitted: Vec<Id> = events.iter().filter(|e| matches!(e, Event::Admitted { .. })).map(Event::id).collect();
    assert_eq!(admitted, ids);
}

/// Who has many requests shares the device with who has one: a client with fewer running begins first.
#[test]
fn a_client_does_not_wait_for_all_requests_of_another() {
    let mut engine = engine(Limits { slots: 1, rows: 1, ..limits() }, Gap::Any);
    let mut random = Random(9);
    let mut submit = |client: u64| {
        let request = Request { client, ..Request::greedy(random.tokens(9), 6) };
        engine.submit(request).unwrap()
    };
    let crowd: Vec<Id> = (0..6).map(|_| submit(1)).collect();
    let (other, third) = (submit(2), submit(3));
    let events = all_events(&mut engine);
    let admitted: Vec<Id> = events.iter().filter(|e| matches!(e, Event::Admitted { .. })).map(Event::id).collect();
    // The crowd came first and has the first place, then it is the others' turn.
    assert_eq!(admitted, [&[crowd[0], other, third], &crowd[1..]].concat());
}

/// What is wrong with one request is said once, and others go on.
#[test]
fn what_cannot_be_served_is_refused_and_disturbs_nobody() {
    let mut engine = engine(Limits { pages: 10, ..limits() }, Gap::Any);
    let good = Request::greedy(Random(13).tokens(30), 10);
    let id = engine.submit(good.clone()).unwrap();
    let mut events = engine.step().unwrap();
    let mut refused = |request: Request| engine.submit(request).unwrap_err().to_string();
    let said = [
        refused(Request::greedy(vec![], 1)),
        refused(Request::greedy(vec![1; 161], 1)),
        refused(Request::greedy(vec![1, 50], 1)),
        refused(Request::greedy(vec![1; 50], 40)),
        refused(Request { salt: vec![0; 1 << 20].into(), ..good.clone() }),
        refused(Request { snapshot_at: vec![31], ..good.clone() }),
        refused(Request { snapshot_at: vec![0], ..good.clone() }),
        refused(Request { sampling: Sampling { temperature: -1.0, top_k: 1, top_p: 1.0 }, ..good.clone() }),
    ];
    let expected = [
        "no tokens were given; at least one is needed",
        "the prompt has 161 tokens, the context has room for 160: compile with a larger --ctx",
        "token 50 is out of range: the vocabulary has 50 tokens (0 to 49)",
        "89 positions take 11 pages of keys and values, there are 10 in all: ask for fewer tokens, or give it more memory",
        "a salt of 1048576 bytes is too long: 256 at most",
        "a snapshot was asked for after 31 tokens of a prompt of 30",
        "a snapshot was asked for after 0 tokens of a prompt of 30",
        "a temperature of -1 is out of range, expected 0 to 2",
    ];
    assert_eq!(said, expected);
    events.extend(all_events(&mut engine));
    let tokens: Vec<u32> = events
        .iter()
        .filter_map(|event| match event {
            Event::Token { token, .. } => Some(*token),
            _ => None,
        })
        .collect();
    assert_eq!(tokens, Alone::of(&good).answer(&good, None, &limits()).0);
    assert!(!engine.cancel(id), "it has ended");
    let fork = Fork { most: 3, sampling: good.sampling, seed: 0 };
    assert!(matches!(engine.fork(id, &fork), Err(RequestError::NotRunning(_))));
}

#[test]
fn a_cancelled_sequence_frees_its_memory_at_once() {
    let mut engine = engine(Limits { pages: 45, ..limits() }, Gap::Any);
    let mut random = Random(17);
    let ids: Vec<Id> = (0..6).map(|_| engine.submit(Request::greedy(random.tokens(20), 100)).unwrap()).collect();
    for _ in 0..5 {
        engine.step().unwrap();
    }
    assert_eq!(
        (engine.occupation().running, engine.occupation().waiting),
        (3, 3),
        "eight pages and five of a window each"
    );
    // One that generates, and one that waits.
    assert!(engine.cancel(ids[0]) && engine.cancel(ids[5]) && !engine.cancel(ids[5]));
    engine.audit().unwrap();
    let events = engine.step().unwrap();
    let cancelled =
        |id: Id| events.iter().any(|e| matches!(e, Event::Finished { id: of, reason: Finish::Cancelled } if *of == id));
    assert!(cancelled(ids[0]) && cancelled(ids[5]));
    assert!(events.iter().any(|e| matches!(e, Event::Admitted { id, .. } if *id == ids[3])), "its place is taken");
    ids.iter().for_each(|id| _ = engine.cancel(*id));
    engine.step().unwrap();
    assert_eq!((engine.occupation().free_pages, engine.is_idle()), (45, true));
}
