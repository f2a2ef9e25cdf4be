//! Plans of tiny models in the simulator: tokens in, rows of logits or more tokens out.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use gemma4c::simulate;
use gemma4c_plan::{Plan, Sampling};
use gemma4c_runtime::{Asked, ModelLocation, Request, RuntimeError, Sampler, Session, Speculation};

/// Where a plan's model is: the plan names it.
fn location(model: &Path) -> ModelLocation {
    ModelLocation { plan: model.with_file_name("plan.bin"), given: Some(model.into()) }
}

/// How tokens are fed: a prompt in pieces of these lengths, the rest one by one as if they had been generated.
pub struct Feed<'t> {
    pub tokens: &'t [u32],
    pub pieces: Vec<usize>,
    /// Of each piece: all its rows, or the last.
    pub asked: Asked,
}

impl Feed<'_> {
    /// The rows of logits, with the indices of their tokens.
    pub fn rows(&self, session: &mut Session) -> Vec<(usize, Vec<f32>)> {
        let mut rows = Vec::new();
        let mut first = 0;
        for len in &self.pieces {
            let piece = &self.tokens[first..first + len];
            session.feed(piece, self.asked, None, |at, row| rows.push((first + at, row.to_vec()))).expect("a prompt");
            first += len;
        }
        for (at, token) in self.tokens.iter().enumerate().skip(first) {
            session.decode(*token, |row| rows.push((at, row.to_vec()))).expect("a token");
        }
        rows
    }
}

/// The launches of a plan, in the simulator.
pub fn on_simulator(plan: Plan, model: &Path) -> Session {
    simulate::open(plan, &location(model), None).expect("a plan that can be simulated")
}

/// What they mean, in f32.
pub fn on_cpu(plan: Plan, model: &Path) -> Session {
    Session::on_cpu(plan, &location(model)).expect("a plan that can be run")
}

/// How far rows of logits are from those expected.
#[derive(Clone, Copy, Debug, Default)]
pub struct Distance {
    squares: f64,
    values: usize,
    pub largest: f32,
}

impl Distance {
    pub fn of(ours: &[f32], expected: &[f32]) -> Distance {
        assert_eq!(ours.len(), expected.len());
        let difference =
            |(a, b): (&f32, &f32)| if a.is_finite() && b.is_finite() { (a - b).abs() } else { f32::INFINITY };
        let differences = || ours.iter().zip(expected).map(difference);
        Distance {
            squares: differences().map(|d| (d as f64).powi(2)).sum(),
            values: ours.len(),
            largest: differences().fold(0.0, f32::max),
        }
    }

    pub fn and(self, other: Distance) -> Distance {
        let largest = self.largest.max(other.largest);
        Distance { squares: self.squares + other.squares, values: self.values + other.values, largest }
    }

    pub fn rms(&self) -> f64 {
        (self.squares / self.values.max(1) as f64).sqrt()
    }
}

/// Does jobs on as many threads as there are cores, whichever is free taking the next, and fails with all that failed.
///
/// One call at a time: a simulated cluster of 16 blocks is 8192 coroutines, each with a stack and a guard page, and
/// every thread keeps its stacks for the next launch. Tests side by side would meet the kernel's limit of 65,530
/// mappings for a process.
pub fn each<T: Sync>(jobs: &[T], work: impl Fn(&T) -> Result<(), String> + Sync) {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let threads = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let outcome = work(job);
                    failed.lock().expect("no thread has failed").extend(outcome.err());
                }
            });
        }
    });
    let failed = failed.into_inner().expect("no thread has failed");
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// Whether `GEMMA4C_EXHAUSTIVE` asks for every row to be compared.
pub fn exhaustive() -> bool {
    std::env::var_os("GEMMA4C_EXHAUSTIVE").is_some()
}

/// The tokens after a prompt, by a rule with a fixed seed, with drafts or without.
pub fn generate(
    session: &mut Session,
    prompt: &[u32],
    most: u32,
    sampling: Sampling,
    drafts: Option<&mut Speculation>,
) -> Vec<u32> {
    session.reset();
    let (mut sampler, mut tokens) = (Sampler::new(sampling, 3, Vec::new()).expect("a rule"), Vec::new());
    let request = Request { prompt, most, stop: &[] };
    let each: &mut dyn FnMut(u32) -> Result<(), RuntimeError> = &mut |token| {
        tokens.push(token);
        Ok(())
    };
    let ended = match drafts {
        None => session.generate(request, &mut sampler, each),
        Some(drafts) => session.generate_speculating(request, &mut sampler, drafts, each),
    };
    ended.expect("it runs");
    tokens
}
