//! What a session makes a backend do: which phases, with what in memory, and what becomes of the tokens that come back.
//!
//! The backend here computes nothing. It keeps the loop's state as the kernels would, and its "logits" say which row of
//! which position was asked for, so that every mistake in feeding shows.

#![allow(clippy::unwrap_used)]

#[path = "../plan/tests/support/mod.rs"]
mod support;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use gemma4c_plan::cuda::{Paging, PhaseKind, Places, Range, Region};
use gemma4c_plan::{Plan, Sampling};
use gemma4c_runtime::{Asked, Backend, Finish, Pick, Request, Run, RuntimeError, Sampler, Session};

/// What was run, as text: phase, steps, what was in memory.
type Log = Rc<RefCell<Vec<String>>>;

struct Fake {
    arena: Vec<u8>,
    places: Places,
    phases: Vec<(PhaseKind, u32, usize, usize)>,
    vocab: u32,
    /// Tokens of each position whose keys were written, as far as they were.
    kept: Vec<u32>,
    on_their_way: VecDeque<Vec<u32>>,
    most_on_their_way: Rc<RefCell<usize>>,
    log: Log,
}

/// The token after `token` at `position`.
fn next(token: u32, position: u32, vocab: u32) -> u32 {
    (token * 5 + position * 3 + 1) % vocab
}

impl Fake {
    fn words(&self, offset: u64, count: usize) -> Vec<u32> {
        let bytes = &self.arena[offset as usize..][..count * 4];
        bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
    }

    fn set(&mut self, offset: u64, words: &[u32]) {
        for (i, word) in words.iter().enumerate() {
            self.arena[offset as usize + 4 * i..][..4].copy_from_slice(&word.to_le_bytes());
        }
    }
}

impl Backend for Fake {
    fn name(&self) -> String {
        "nothing".into()
    }

    fn write(&mut self, to: Range, bytes: &[u8]) -> Result<(), RuntimeError> {
        assert_eq!((to.region, to.bytes), (Region::Arena, bytes.len() as u64));
        self.arena[to.offset as usize..][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn read(&mut self, from: Range, bytes: &mut [u8]) -> Result<(), RuntimeError> {
        bytes.copy_from_slice(&self.arena[from.offset as usize..][..from.bytes as usize]);
        Ok(())
    }

    fn run(&mut self, run: Run) -> Result<(), RuntimeError> {
        let (kind, rows, asked_from, end) = self.phases[run.phase];
        let is_decode = kind == PhaseKind::Decode;
        let first = [self.places.windows, self.places.pages].map(|table| self.words(table, 1)[0]);
        assert_eq!(first, [0, 1]);
        let record = if is_decode { self.places.rows } else { self.places.segments };
        // Of a segment the third word is its first row.
        let [position, used, token, slot] = self.words(record, 4).try_into().unwrap();
        assert!(used >= 1 && used <= rows, "{used} rows in a phase of {rows}");
        assert_eq!(slot, 0);
        if !is_decode {
            assert_eq!((token, self.words(self.places.chunk, 2)[1]), (0, used), "the chunk is one segment");
        }
        let tokens = if is_decode { vec![token] } else { self.words(self.places.tokens, used as usize) };
        if run.steps.0 == 0 {
            assert!(position as usize <= self.kept.len(), "positions before {position} were never written");
            self.kept.truncate(position as usize);
            self.kept.extend(&tokens);
        }
        let asked = if is_decode { [position, 1, 0] } else { self.words(self.places.asked, 3).try_into().unwrap() };
        if run.steps.1 == end {
            assert_eq!((asked[0], asked[1]), (position + asked[2], 1));
            assert!(asked[2] < used);
            // The logits name the asked row, and the likeliest token is that row's successor.
            let asked_token = self.kept[asked[0] as usize];
            let mut logits = vec![0.0f32; self.vocab as usize];
            logits[next(asked_token, asked[0], self.vocab) as usize] = 100.0 + asked[0] as f32;
            let bits: Vec<u32> = logits.iter().map(|x| x.to_bits()).collect();
            self.set(self.places.logits, &bits);
        }
        if run.pick != Pick::None {
            assert_eq!(self.words(self.places.suppress, 4), [0, 10, u32::MAX, u32::MAX]);
            // The pick of a prompt works on the asked row's record, and leaves the decoded row's to the host.
            let record = if is_decode { self.places.rows } else { self.places.asked };
            let words = self.words(record, 16);
            assert_eq!(words[6..], [8, 0.9f32.to_bits(), 3, 1, 0, 0, 0, 0, 0, 0]);
            let after = words[0] + words[1];
            assert_eq!(after, position + used);
            let token = next(self.kept[after as usize - 1], after - 1, self.vocab);
            self.set(record, &[after, 1, token, 0, words[4] + 1]);
            self.set(self.places.history + 4 * (words[4] % self.places.history_len) as u64, &[token]);
        }
        let part = match run.steps {
            (0, to) if to == end => "all",
            (0, to) if to == asked_from => "trunk",
            (from, to) if (from, to) == (asked_from, end) => "asked",
            other => panic!("{other:?} of {end} steps"),
        };
        let pick = match run.pick {
            Pick::None => "",
            Pick::Largest => ", largest",
            Pick::Sampled => ", sampled",
        };
        self.log.borrow_mut().push(format!("{rows}:{part}{pick} @{position}+{used}"));
        Ok(())
    }

    fn send_back(&mut self, from: Range) -> Result<(), RuntimeError> {
        assert_eq!(from.bytes, 4);
        let word = self.words(from.offset, 1)[0];
        self.on_their_way.push_back(vec![word]);
        let most = &mut *self.most_on_their_way.borrow_mut();
        *most = self.on_their_way.len().max(*most);
        Ok(())
    }

    fn receive(&mut self) -> Result<Vec<u32>, RuntimeError> {
        Ok(self.on_their_way.pop_front().expect("a word was sent"))
    }

    fn copy(&mut self, _: Range, _: Range) -> Result<(), RuntimeError> {
        Err(RuntimeError::Backend("a session copies nothing".into()))
    }

    fn reserve_tier(&mut self, _: u64) -> Result<(), RuntimeError> {
        Err(RuntimeError::Backend("a session keeps nothing in host memory".into()))
    }

    fn save(&mut self, _: Range, _: u64) -> Result<(), RuntimeError> {
        Err(RuntimeError::Backend("a session saves nothing".into()))
    }

    fn load(&mut self, _: u64, _: Range) -> Result<(), RuntimeError> {
        Err(RuntimeError::Backend("a session loads nothing".into()))
    }

    fn wait(&mut self) -> Result<(), RuntimeError> {
        Ok(())
    }
}

struct Bench {
    session: Session,
    log: Log,
    most_on_their_way: Rc<RefCell<usize>>,
}

fn bench_of(plan: Plan) -> Bench {
    let program = &plan.cuda.as_ref().unwrap().program;
    let (log, most_on_their_way) = (Log::default(), Rc::default());
    let fake = Fake {
        arena: vec![0; program.memory.arena as usize],
        places: program.places,
        phases: program.phases.iter().map(|p| (p.kind, p.rows, p.asked_from as usize, p.steps.len())).collect(),
        vocab: plan.model.vocab_size,
        kept: vec![],
        on_their_way: VecDeque::new(),
        most_on_their_way: Rc::clone(&most_on_their_way),
        log: Rc::clone(&log),
    };
    Bench { session: Session::with_backend(plan, Box::new(fake)).unwrap(), log, most_on_their_way }
}

fn bench() -> Bench {
    bench_of(support::plan())
}

impl Bench {
    fn logged(&self) -> Vec<String> {
        std::mem::take(&mut self.log.borrow_mut())
    }

    fn rows(&mut self, tokens: &[u32], asked: Asked, chunk: Option<u32>) -> Vec<(usize, u32)> {
        let mut rows = vec![];
        let position_of = |row: &[f32]| row.iter().copied().fold(0.0, f32::max) as u32 - 100;
        self.session.feed(tokens, asked, chunk, |index, row| rows.push((index, position_of(row)))).unwrap();
        rows
    }

    fn generate(&mut self, prompt: &[u32], most: u32, stop: &[u32], temperature: f32) -> (Vec<u32>, Finish) {
        let suppress = self.session.plan().vocab.as_ref().unwrap().suppress.clone();
        let sampling = Sampling { temperature, top_k: 8, top_p: 0.9 };
        let mut sampler = Sampler::new(sampling, 3 | 1 << 32, suppress).unwrap();
        let mut tokens = vec![];
        let request = Request { prompt, most, stop };
        let end = self.session.generate(request, &mut sampler, &mut |token| {
            tokens.push(token);
            Ok::<(), RuntimeError>(())
        });
        (tokens, end.unwrap())
    }
}

/// The tokens that follow `prompt`, straight from the rule.
fn expected(prompt: &[u32], count: usize) -> Vec<u32> {
    let mut all = prompt.to_vec();
    for _ in 0..count {
        all.push(next(all[all.len() - 1], all.len() as u32 - 1, 12));
    }
    all.split_off(prompt.len())
}

const PROMPT: [u32; 11] = [2, 4, 5, 6, 7, 8, 9, 10, 11, 3, 1];

#[test]
fn a_prompt_goes_through_the_smallest_phases_that_take_it() {
    let mut bench = bench();
    assert_eq!(bench.session.chunk(), 8);
    assert_eq!(bench.rows(&PROMPT, Asked::Last, None), [(10, 10)]);
    assert_eq!(bench.logged(), ["8:trunk @0+8", "8:all @8+3"]);
    assert_eq!(bench.rows(&PROMPT[..2], Asked::None, None), []);
    assert_eq!(bench.rows(&PROMPT[..1], Asked::Last, None), [(0, 13)]);
    assert_eq!(bench.logged(), ["2:trunk @11+2", "2:all @13+1"], "one token of a prompt is still a prompt");
    assert_eq!(bench.rows(&PROMPT[..5], Asked::Last, Some(2)), [(4, 18)]);
    assert_eq!(bench.logged(), ["2:trunk @14+2", "2:trunk @16+2", "2:all @18+1"]);
    assert_eq!(bench.rows(&PROMPT[..4], Asked::All, Some(3)), [(0, 19), (1, 20), (2, 21), (3, 22)]);
    let asked = |at: &'static str| [at; 3];
    assert_eq!(bench.logged(), [&["8:trunk @19+3"][..], &asked("8:asked @19+3"), &["2:all @22+1"]].concat());
    assert_eq!(bench.session.position(), 23);
}

#[test]
fn given_tokens_are_decoded_by_the_first_phase() {
    let mut bench = bench();
    bench.rows(&PROMPT[..3], Asked::None, None);
    bench.logged();
    let mut likeliest = 0;
    let largest = |row: &[f32]| row.iter().position(|x| *x > 0.0).unwrap() as u32;
    bench.session.decode(7, |row| likeliest = largest(row)).unwrap();
    assert_eq!((likeliest, bench.logged()), (next(7, 3, 12), vec!["1:all @3+1".to_string()]));
    assert_eq!(bench.session.position(), 4);
}

#[test]
fn a_plan_without_prefill_feeds_its_prompt_row_by_row() {
    let mut plan = support::plan();
    plan.cuda.as_mut().unwrap().program.phases.truncate(1);
    let mut bench = bench_of(plan);
    assert_eq!(bench.rows(&PROMPT[..3], Asked::Last, None), [(2, 2)]);
    assert_eq!(bench.logged(), ["1:all @0+1", "1:all @1+1", "1:all @2+1"]);
    assert_eq!(bench.rows(&PROMPT[3..5], Asked::All, None), [(0, 3), (1, 4)]);
    assert_eq!(bench.logged(), ["1:all @3+1", "1:all @4+1"]);
    let (tokens, end) = bench.generate(&PROMPT[5..8], 3, &[], 0.0);
    assert_eq!((tokens, end), (expected(&PROMPT[..8], 3), Finish::Length));
    assert_eq!(bench.logged()[2..], ["1:all, largest @7+1", "1:all, largest @8+1", "1:all, largest @9+1"]);
}

#[test]
fn a_window_with_room_for_one_row_more_is_not_run_ahead_of() {
    let mut plan = support::plan();
    plan.cuda.as_mut().unwrap().program.kv_layout.sliding = Paging { rows: 9, entries: 1 };
    let mut bench = bench_of(plan);
    assert_eq!(bench.rows(&PROMPT[..2], Asked::All, None), [(0, 0), (1, 1)]);
    assert_eq!(bench.logged(), ["2:all @0+1", "2:all @1+1"]);
    assert_eq!(bench.generate(&[4], 5, &[], 0.0).0.len(), 5);
    assert_eq!(*bench.most_on_their_way.borrow(), 1);
}

#[test]
fn generated_tokens_are_picked_on_the_device_and_read_late() {
    let mut bench = bench();
    let (tokens, end) = bench.generate(&PROMPT, 6, &[], 0.0);
    assert_eq!((tokens, end), (expected(&PROMPT, 6), Finish::Length));
    assert_eq!(bench.session.position(), 11 + 5, "the last token is not fed");
    let decodes = (11..16).map(|p| format!("1:all, largest @{p}+1"));
    let all: Vec<String> = ["8:trunk @0+8".into(), "8:all, largest @8+3".into()].into_iter().chain(decodes).collect();
    assert_eq!(bench.logged(), all, "one replay a token, none too many");
    assert_eq!(*bench.most_on_their_way.borrow(), 4);
    // It goes on from there.
    let last = expected(&PROMPT, 6)[5];
    let (more, _) = bench.generate(&[last], 3, &[], 0.7);
    assert_eq!(more, expected(&[&PROMPT[..], &expected(&PROMPT, 6)].concat(), 3));
    assert!(bench.logged().iter().all(|run| run.contains("sampled")));
}

#[test]
fn a_stop_token_ends_it_and_the_session_goes_back() {
    let all = expected(&PROMPT, 12);
    let stop = all[4];
    let at = all.iter().position(|token| *token == stop).unwrap();
    let mut bench = bench();
    let (tokens, end) = bench.generate(&PROMPT, 12, &[stop], 0.0);
    assert_eq!((tokens, end), (all[..at].to_vec(), Finish::Stop));
    assert_eq!(bench.session.position() as usize, PROMPT.len() + at);
    let past = bench.logged().len() - 2 - at;
    assert!(past <= 3, "{past} tokens were computed in vain");
    // What is fed next is fed where the stop token would have been.
    let position = PROMPT.len() + at;
    assert_eq!(bench.rows(&[5], Asked::Last, None), [(0, position as u32)]);
}

#[test]
fn the_context_ends_it_one_token_late() {
    let mut bench = bench();
    let prompt: Vec<u32> = (0..61).map(|i| i % 12).collect();
    let (tokens, end) = bench.generate(&prompt, 100, &[], 0.0);
    assert_eq!((tokens.len(), end), (4, Finish::Context), "positions 61, 62, 63, and the token after them");
    assert_eq!(bench.session.position(), 64);
    assert!(matches!(
        bench.session.feed(&[1], Asked::None, None, |_, _| {}),
        Err(RuntimeError::ContextOverflow { used: 64, .. })
    ));
}

#[test]
fn what_the_device_cannot_pick_is_picked_from_the_logits() {
    let mut bench = bench();
    let sampling = |top_k| Sampling { temperature: 1.0, top_k, top_p: 0.9 };
    let sampler = |top_k| Sampler::new(sampling(top_k), 3, vec![0, 10]).unwrap();
    assert_eq!(bench.session.picks_on_host(&sampler(8)), None);
    assert!(bench.session.picks_on_host(&sampler(9)).unwrap().contains("top-k"));
    assert!(bench.session.picks_on_host(&sampler(0)).unwrap().contains("top-k"));
    let long_list = Sampler::new(sampling(8), 3, vec![1, 2, 3, 4, 5]).unwrap();
    assert!(bench.session.picks_on_host(&long_list).unwrap().contains("never picked"));

    let mut tokens = vec![];
    let request = Request { prompt: &PROMPT[..3], most: 4, stop: &[] };
    let greedy = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0 };
    let mut sampler = Sampler::new(greedy, 0, vec![0; 5]).unwrap();
    let mut each = |token| {
        tokens.push(token);
        Ok::<(), RuntimeError>(())
    };
    assert_eq!(bench.session.generate(request, &mut sampler, &mut each).unwrap(), Finish::Length);
    assert_eq!(tokens, expected(&PROMPT[..3], 4), "none of them is 0");
    assert_eq!(bench.logged(), ["8:all @0+3", "1:all @3+1", "1:all @4+1", "1:all @5+1"]);
}

/// An error of whoever takes the tokens ends it at once, and leaves nothing on its way.
#[test]
fn a_reader_that_has_enough_ends_it() {
    let mut bench = bench();
    let mut sampler =
        Sampler::new(Sampling { temperature: 0.0, top_k: 8, top_p: 0.9 }, 3 | 1 << 32, vec![0, 10]).unwrap();
    let request = Request { prompt: &PROMPT, most: 20, stop: &[] };
    let ended = bench.session.generate(request, &mut sampler, &mut |_| Err(RuntimeError::NoTaps));
    assert!(matches!(ended, Err(RuntimeError::NoTaps)));
    bench.session.reset();
    assert_eq!(bench.generate(&PROMPT, 6, &[], 0.0).0, expected(&PROMPT, 6));
}

/// The only sliding layer has a window of 8, and a ring of 16 rows.
#[test]
fn a_sequence_goes_back_as_far_as_its_windows_remember() {
    let mut plan = support::plan();
    plan.cuda.as_mut().unwrap().program.kv_layout.sliding = Paging { rows: 16, entries: 1 };
    let mut bench = bench_of(plan);
    let prompt: Vec<u32> = (0..40).map(|i| i * 7 % 12).collect();
    bench.rows(&prompt, Asked::None, None);
    let back = bench.session.truncate(30);
    assert!(matches!(back, Err(RuntimeError::Forgotten { to: 30, from: 40 })), "{back:?}");
    assert_eq!(bench.session.position(), 40, "a refusal changes nothing");
    bench.session.truncate(33).unwrap();
    assert_eq!(bench.rows(&[4], Asked::Last, None), [(0, 33)]);
    assert!(bench.session.truncate(30).is_err(), "rows 34 to 39 wrote over what it needs");
    assert!(bench.session.truncate(35).is_err(), "it cannot go forward");
    bench.session.truncate(0).unwrap();
    bench.rows(&prompt[..15], Asked::None, None);
    bench.session.reset();
    bench.rows(&prompt[..15], Asked::None, None);
    bench.session.truncate(1).unwrap();
}

#[test]
fn a_prompt_that_goes_on_is_not_fed_again() {
    let mut bench = bench();
    bench.rows(&PROMPT, Asked::None, None);
    assert_eq!(bench.session.keep_prefix(&PROMPT), 10, "one is left to feed");
    assert_eq!(bench.session.keep_prefix(&PROMPT[..10]), 9);
    assert_eq!(bench.session.keep_prefix(&[&PROMPT[..5], &[0, 0]].concat()), 5);
    assert_eq!(bench.session.keep_prefix(&[7]), 0);
    assert_eq!(bench.session.position(), 0);
}

#[test]
fn a_plan_for_the_cpu_has_nothing_to_replay() {
    let plan = support::cpu_plan();
    let none = Fake {
        arena: vec![],
        places: Places::default(),
        phases: vec![],
        vocab: 12,
        kept: vec![],
        on_their_way: VecDeque::new(),
        most_on_their_way: Rc::default(),
        log: Log::default(),
    };
    assert!(matches!(Session::with_backend(plan, Box::new(none)), Err(RuntimeError::NoProgram)));
}
