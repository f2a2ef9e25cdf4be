//! What is counted of a model's requests. How it is told is in `scrape.rs`.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use gemma4c_runtime::MOST_LOOKED_UP;

/// Seconds.
const TIMES: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0];
/// Tokens.
const COUNTS: &[f64] = &[1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0];

/// Values by their size.
pub struct Histogram {
    pub limits: &'static [f64],
    /// One for each limit, and one for what is beyond the last.
    pub counts: Vec<AtomicU64>,
    /// In millionths.
    pub sum: AtomicU64,
}

impl Histogram {
    fn new(limits: &'static [f64]) -> Histogram {
        Histogram { limits, counts: (0..=limits.len()).map(|_| AtomicU64::new(0)).collect(), sum: AtomicU64::new(0) }
    }

    fn observe(&self, value: f64) {
        let at = self.limits.partition_point(|limit| *limit < value);
        self.counts[at].fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add((value * 1e6) as u64, Ordering::Relaxed);
    }
}

/// Everything that is counted.
pub struct Metrics {
    pub running: AtomicUsize,
    pub used_blocks: AtomicUsize,
    pub blocks: AtomicUsize,
    pub prompt_tokens: AtomicU64,
    pub generation_tokens: AtomicU64,
    pub cache_queries: AtomicU64,
    pub cache_hits: AtomicU64,
    pub stopped: AtomicU64,
    pub cut: AtomicU64,
    pub drafts: AtomicU64,
    pub draft_tokens: AtomicU64,
    /// Of the first draft of each time, of the second, and so on.
    pub accepted_at: [AtomicU64; MOST_LOOKED_UP as usize],
    pub aborted: AtomicU64,
    pub first_token: Histogram,
    pub between_tokens: Histogram,
    pub per_output_token: Histogram,
    pub whole: Histogram,
    pub queued: Histogram,
    pub prefill: Histogram,
    pub decode: Histogram,
    pub request_prompt: Histogram,
    pub request_generation: Histogram,
    pub iteration: Histogram,
}

impl Default for Metrics {
    fn default() -> Metrics {
        let times = || Histogram::new(TIMES);
        Metrics {
            running: AtomicUsize::new(0),
            used_blocks: AtomicUsize::new(0),
            blocks: AtomicUsize::new(0),
            prompt_tokens: AtomicU64::new(0),
            generation_tokens: AtomicU64::new(0),
            cache_queries: AtomicU64::new(0),
            cache_hits: AtomicU64::new(0),
            stopped: AtomicU64::new(0),
            cut: AtomicU64::new(0),
            drafts: AtomicU64::new(0),
            draft_tokens: AtomicU64::new(0),
            accepted_at: Default::default(),
            aborted: AtomicU64::new(0),
            first_token: times(),
            between_tokens: times(),
            per_output_token: times(),
            whole: times(),
            queued: times(),
            prefill: times(),
            decode: times(),
            request_prompt: Histogram::new(COUNTS),
            request_generation: Histogram::new(COUNTS),
            iteration: Histogram::new(COUNTS),
        }
    }
}

impl Metrics {
    /// How the engine is occupied now.
    pub fn occupy(&self, running: usize, used_blocks: usize, blocks: usize) {
        self.running.store(running, Ordering::Relaxed);
        self.used_blocks.store(used_blocks, Ordering::Relaxed);
        self.blocks.store(blocks, Ordering::Relaxed);
    }

    pub fn admitted(&self, prompt_tokens: usize, cached: usize, queued: Duration) {
        self.prompt_tokens.fetch_add(prompt_tokens as u64, Ordering::Relaxed);
        self.cache_queries.fetch_add(prompt_tokens as u64, Ordering::Relaxed);
        self.cache_hits.fetch_add(cached as u64, Ordering::Relaxed);
        self.queued.observe(queued.as_secs_f64());
    }

    pub fn first_token(&self, since_submission: Duration, since_admission: Duration) {
        self.generation_tokens.fetch_add(1, Ordering::Relaxed);
        self.first_token.observe(since_submission.as_secs_f64());
        self.prefill.observe(since_admission.as_secs_f64());
    }

    pub fn next_token(&self, gap: Duration) {
        self.generation_tokens.fetch_add(1, Ordering::Relaxed);
        self.between_tokens.observe(gap.as_secs_f64());
    }

    /// So many tokens were guessed for a sequence, the first of which were right.
    pub fn drafted(&self, drafted: u32, accepted: u32) {
        self.drafts.fetch_add(1, Ordering::Relaxed);
        self.draft_tokens.fetch_add(drafted.into(), Ordering::Relaxed);
        let accepted = self.accepted_at.iter().take(accepted as usize);
        accepted.for_each(|count| _ = count.fetch_add(1, Ordering::Relaxed));
    }

    /// A sequence has ended: by `stop`, `length` or `abort`.
    pub fn finished(&self, reason: &str) {
        let counter = match reason {
            "stop" => &self.stopped,
            "length" => &self.cut,
            _ => &self.aborted,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub fn ended(&self, whole: Duration, decode: Duration, prompt_tokens: usize, tokens: u32) {
        self.whole.observe(whole.as_secs_f64());
        self.decode.observe(decode.as_secs_f64());
        self.request_prompt.observe(prompt_tokens as f64);
        self.request_generation.observe(tokens as f64);
        if tokens > 1 {
            self.per_output_token.observe(decode.as_secs_f64() / (tokens - 1) as f64);
        }
    }

    /// The engine has made a step, with so many tokens.
    pub fn step(&self, tokens: usize) {
        self.iteration.observe(tokens as f64);
    }

    /// Sequences running, and the part of the blocks that is in use.
    pub fn occupation(&self) -> (usize, f64) {
        let blocks = self.blocks.load(Ordering::Relaxed).max(1);
        (self.running.load(Ordering::Relaxed), self.used_blocks.load(Ordering::Relaxed) as f64 / blocks as f64)
    }
}
