//! Which prompts go before the next decode, which of them share a chunk, and how long the tokens of others wait for
//! them.

use std::collections::BTreeMap;
use std::time::Duration;

use gemma4c_plan::cuda::Paging;
use gemma4c_runtime::engine::{BoxedRule, Demand, Engine, Event, Gap, Id, Limits, Mask, Options, Request, Rule};

use super::fake::{Alone, DECODE_TIME, Fake, ROW_TIME, Times};
use super::{Random, all_events, engine, limits};

/// Prompts that have room for all of theirs in a chunk go in together, in order; nobody overtakes one that has not.
#[test]
fn short_prompts_share_a_chunk() {
    let limits = Limits { slots: 9, rows: 9, pages: 105, ..limits() };
    let mut engine = engine(limits.clone(), Gap::Any);
    let mut random = Random(41);
    // Four fit into 16 rows, each from a multiple of four on; the next is too long, the last comes behind it.
    let requests: Vec<Request> = [3, 4, 2, 4, 40, 3, 1].map(|count| Request::greedy(random.tokens(count), 3)).into();
    let ids: Vec<Id> = requests.iter().map(|request| engine.submit(request.clone()).unwrap()).collect();
    let mut events = engine.step().unwrap();
    let counts = engine.device().counts;
    assert_eq!((counts.chunks, counts.shared, counts.prompt_tokens), (1, 1, 13));
    events.extend(all_events(&mut engine));
    let counts = engine.device().counts;
    // 40 tokens are three chunks, the last of which has room for the two prompts behind them.
    assert_eq!((counts.chunks, counts.shared, counts.prompt_tokens), (4, 2, 57));
    let mut firsts: Vec<Id> = Vec::new();
    let mut tokens: BTreeMap<Id, Vec<u32>> = BTreeMap::new();
    for event in &events {
        if let Event::Token { id, token, .. } = event {
            tokens.entry(*id).or_default().push(*token);
            if !firsts.contains(id) {
                firsts.push(*id);
            }
        }
    }
    assert_eq!(firsts, ids, "first tokens come in order of arrival");
    for (id, request) in ids.iter().zip(&requests) {
        assert_eq!(tokens[id], Alone::of(request).answer(request, None, &limits).0);
    }
}

/// What a prompt needs for itself it has for itself: logits of its tokens, a mask for the first of its answer, a
/// snapshot where its piece ends.
#[test]
fn some_prompts_do_not_share_a_chunk() {
    let limits = Limits { slots: 9, rows: 9, pages: 105, ..limits() };
    let mut random = Random(43);
    let short: Vec<Request> = (0..3).map(|_| Request::greedy(random.tokens(4), 2)).collect();
    let chunks = |requests: &[Request]| {
        let mut engine = engine(limits.clone(), Gap::Any);
        requests.iter().for_each(|request| _ = engine.submit(request.clone()).unwrap());
        all_events(&mut engine);
        (engine.device().counts.chunks, engine.device().counts.shared)
    };
    assert_eq!(chunks(&short), (1, 1));
    let read = Request { prompt_logits: true, ..short[1].clone() };
    assert_eq!(chunks(&[short[0].clone(), read, short[2].clone()]), (3, 0));
    let guided = Request { rule: Some(BoxedRule(Box::new(AlwaysEven))), ..short[1].clone() };
    assert_eq!(chunks(&[short[0].clone(), guided, short[2].clone()]), (3, 0));
    // Both stop where a snapshot is wanted, and go on together.
    let kept = |at: usize| Request { snapshot_at: vec![3], ..short[at].clone() };
    assert_eq!(chunks(&[kept(0), kept(1)]), (2, 2));
}

/// A long prompt comes while another sequence is generating: its chunks are as long as the limit allows.
#[test]
fn a_prompt_does_not_hold_up_the_tokens_of_others() {
    let wide = Limits { chunks: vec![4, 8, 16, 32, 64], context: 2000, pages: 300, ..limits() };
    let gaps = |gap: Gap| {
        let mut engine = engine(wide.clone(), gap);
        let mut random = Random(11);
        let running = engine.submit(Request::greedy(random.tokens(10), 300)).unwrap();
        let clock = engine.device().clock();
        let (mut times, mut reading) = (vec![], None);
        while !engine.is_idle() {
            if times.len() == 40 && reading.is_none() {
                reading = Some(engine.submit(Request::greedy(random.tokens(1000), 1)).unwrap());
            }
            for event in engine.step().unwrap() {
                match event {
                    Event::Token { id, .. } if id == running => times.push(clock()),
                    _ => {}
                }
            }
        }
        // The first prompt's tokens are the guess; after them the rate is known.
        times.windows(2).skip(45).map(|pair| pair[1] - pair[0]).max().unwrap()
    };
    let chunk = |rows: u64| Duration::from_nanos(DECODE_TIME + rows * ROW_TIME);
    let within = |micros| Gap::Within(Duration::from_micros(micros));
    assert_eq!(gaps(Gap::Any), chunk(64));
    assert_eq!(gaps(within(9_000)), chunk(32));
    assert_eq!(gaps(within(7_000)), chunk(16));
    assert_eq!(gaps(within(1_000)), chunk(4), "something always goes in");
    assert_eq!(gaps(Gap::Measured), chunk(64), "20 ms are enough for all of a chunk");
}

/// Many short prompts come while another sequence is generating: together they take no more time than one long chunk
/// may.
#[test]
fn short_prompts_do_not_hold_up_the_tokens_of_others_either() {
    let wide = Limits { slots: 40, rows: 40, pages: 860, chunks: vec![4, 8, 16, 32, 64], ..limits() };
    let gap = Duration::from_micros(7_000);
    let mut engine = engine(wide, Gap::Within(gap));
    let mut random = Random(12);
    let running = engine.submit(Request::greedy(random.tokens(10), 120)).unwrap();
    let clock = engine.device().clock();
    let (mut times, mut first_tokens, mut submitted) = (vec![], std::collections::BTreeSet::new(), false);
    while !engine.is_idle() {
        if times.len() == 40 && !std::mem::replace(&mut submitted, true) {
            (0..30).for_each(|_| _ = engine.submit(Request::greedy(random.tokens(4), 2)).unwrap());
        }
        for event in engine.step().unwrap() {
            match event {
                Event::Token { id, .. } if id == running => times.push(clock()),
                Event::Token { id, .. } => _ = first_tokens.insert(id),
                _ => {}
            }
        }
    }
    assert_eq!(first_tokens.len(), 30);
    // What the first of them takes is not known yet.
    let gaps: Vec<Duration> = times.windows(2).skip(41).map(|pair| pair[1] - pair[0]).collect();
    assert!(gaps.iter().all(|found| *found <= gap), "{gaps:?}");
    // Four prompts share a chunk of 1.6 ms beside a decode of 5 ms.
    assert!(gaps.contains(&Duration::from_micros(6_600)), "{gaps:?}");
}

/// 48 prompts for 32 rows, at the times of a large model, where a chunk of 128 tokens takes as long as one of 32: each
/// gap is within the limit, but for those before a chunk of each size was measured, and for the first prompts, that
/// nobody waited for.
#[test]
fn a_burst_of_prompts_keeps_to_the_gap() {
    let limits = Limits {
        slots: 32,
        rows: 32,
        pages: 32 * 90,
        sliding: Paging::default(),
        full: Paging { rows: 32, entries: 0 },
        chunks: vec![32, 128, 512],
        context: 640,
        ..limits()
    };
    let chunk = |rows| if rows <= 128 { 24_400_000 } else { 66_100_000 };
    let decode = |rows: u32| 5_000_000 + 700_000 * rows.next_power_of_two() as u64;
    let mut fake = Fake::new(limits);
    fake.times = Times { chunk, decode, asked: 500_000 };
    let clock = fake.clock();
    let mut engine = Engine::new(fake, Options { gap: Gap::Measured, clock, ..Options::default() }).unwrap();
    let clock = engine.device().clock();
    let mut random = Random(31);
    let mut waiting = 48;
    let mut latest: BTreeMap<Id, Duration> = BTreeMap::new();
    let mut gaps: Vec<Duration> = Vec::new();
    while waiting > 0 || !engine.is_idle() {
        while waiting > 0 && engine.occupation().running + engine.occupation().waiting < 32 {
            engine.submit(Request::greedy(random.tokens(512), 100)).unwrap();
            waiting -= 1;
        }
        for event in engine.step().unwrap() {
            if let Event::Token { id, .. } = event {
                gaps.extend(latest.insert(id, clock()).map(|before| clock() - before));
            }
        }
    }
    gaps.sort_unstable();
    let (p99, longest) = (gaps[gaps.len() * 99 / 100], gaps[gaps.len() - 1]);
    assert!(p99 <= Duration::from_millis(80), "p99 {p99:?}, {longest:?} at most");
    assert!(longest <= Duration::from_millis(130), "{longest:?} at most");
}

/// Only even tokens.
#[derive(Clone)]
struct AlwaysEven;

impl Rule for AlwaysEven {
    fn demand(&self) -> Demand {
        Demand::Mask
    }

    fn restrict(&mut self, allowed: &mut Mask) {
        (0..1000).filter(|token| token % 2 == 1).for_each(|token| allowed.forbid(token));
    }

    fn apply(&mut self, logits: &mut [f32]) {
        logits.iter_mut().skip(1).step_by(2).for_each(|logit| *logit = f32::NAN);
    }

    fn picked(&mut self, _: u32) {}

    fn copy(&self) -> Box<dyn Rule> {
        Box::new(self.clone())
    }
}
