//! Counters in Prometheus's text format, under the names of vLLM: routers, dashboards and load tests read those without
//! being told.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use gemma4c_runtime::MOST_LOOKED_UP;

/// Seconds.
const TIMES: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0];
/// Tokens.
const COUNTS: &[f64] = &[1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0];

/// Values by their size.
struct Histogram {
    limits: &'static [f64],
    /// One for each limit, and one for what is beyond the last.
    counts: Vec<AtomicU64>,
    /// In millionths.
    sum: AtomicU64,
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

    fn write(&self, text: &mut String, name: &str, model: &str) {
        _ = writeln!(text, "# TYPE vllm:{name} histogram");
        let mut total = 0;
        for (count, limit) in self.counts.iter().zip(self.limits.iter().map(f64::to_string).chain(["+Inf".into()])) {
            total += count.load(Ordering::Relaxed);
            _ = writeln!(text, "vllm:{name}_bucket{{model_name=\"{model}\",le=\"{limit}\"}} {total}");
        }
        let sum = self.sum.load(Ordering::Relaxed) as f64 / 1e6;
        _ = writeln!(text, "vllm:{name}_sum{{model_name=\"{model}\"}} {sum}");
        _ = writeln!(text, "vllm:{name}_count{{model_name=\"{model}\"}} {total}");
    }
}

/// Everything that is counted.
pub struct Metrics {
    running: AtomicUsize,
    used_blocks: AtomicUsize,
    blocks: AtomicUsize,
    prompt_tokens: AtomicU64,
    generation_tokens: AtomicU64,
    cache_queries: AtomicU64,
    cache_hits: AtomicU64,
    stopped: AtomicU64,
    cut: AtomicU64,
    drafts: AtomicU64,
    draft_tokens: AtomicU64,
    /// Of the first draft of each time, of the second, and so on.
    accepted_at: [AtomicU64; MOST_LOOKED_UP as usize],
    aborted: AtomicU64,
    first_token: Histogram,
    between_tokens: Histogram,
    per_output_token: Histogram,
    whole: Histogram,
    queued: Histogram,
    prefill: Histogram,
    decode: Histogram,
    request_prompt: Histogram,
    request_generation: Histogram,
    iteration: Histogram,
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

    /// The page that a scraper reads.
    pub fn text(&self, model: &str, waiting: usize, block_rows: u32) -> String {
        let model = model.replace('\\', "\\\\").replace('"', "\\\"");
        let mut text = String::new();
        let (running, usage) = self.occupation();
        let mut gauge = |name: &str, value: f64| {
            _ = writeln!(text, "# TYPE vllm:{name} gauge\nvllm:{name}{{model_name=\"{model}\"}} {value}");
        };
        gauge("num_requests_running", running as f64);
        gauge("num_requests_waiting", waiting as f64);
        gauge("kv_cache_usage_perc", usage);
        let blocks = self.blocks.load(Ordering::Relaxed);
        _ = writeln!(
            text,
            "# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{{block_size=\"{block_rows}\",num_gpu_blocks=\"{blocks}\"}} 1"
        );
        let mut counter = |name: &str, label: &str, value: u64| {
            _ = writeln!(
                text,
                "# TYPE vllm:{name}_total counter\nvllm:{name}_total{{model_name=\"{model}\"{label}}} {value}"
            );
        };
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        counter("prompt_tokens", "", load(&self.prompt_tokens));
        counter("generation_tokens", "", load(&self.generation_tokens));
        counter("prefix_cache_queries", "", load(&self.cache_queries));
        counter("prefix_cache_hits", "", load(&self.cache_hits));
        counter("num_preemptions", "", 0);
        counter("spec_decode_num_drafts", "", load(&self.drafts));
        counter("spec_decode_num_draft_tokens", "", load(&self.draft_tokens));
        counter("spec_decode_num_accepted_tokens", "", self.accepted_at.iter().map(load).sum());
        _ = writeln!(text, "# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter");
        for (position, count) in self.accepted_at.iter().enumerate() {
            let count = load(count);
            _ = writeln!(
                text,
                "vllm:spec_decode_num_accepted_tokens_per_pos_total{{model_name=\"{model}\",position=\"{position}\"}} {count}"
            );
        }
        _ = writeln!(text, "# TYPE vllm:request_success_total counter");
        for (reason, count) in [("stop", &self.stopped), ("length", &self.cut), ("abort", &self.aborted)] {
            let count = load(count);
            _ = writeln!(
                text,
                "vllm:request_success_total{{model_name=\"{model}\",finished_reason=\"{reason}\"}} {count}"
            );
        }
        for (name, histogram) in [
            ("time_to_first_token_seconds", &self.first_token),
            ("inter_token_latency_seconds", &self.between_tokens),
            ("request_time_per_output_token_seconds", &self.per_output_token),
            ("e2e_request_latency_seconds", &self.whole),
            ("request_queue_time_seconds", &self.queued),
            ("request_prefill_time_seconds", &self.prefill),
            ("request_decode_time_seconds", &self.decode),
            ("request_prompt_tokens", &self.request_prompt),
            ("request_generation_tokens", &self.request_generation),
            ("iteration_tokens_total", &self.iteration),
        ] {
            histogram.write(&mut text, name, &model);
        }
        // What dashboards of llama-server look for.
        let mut llama = |name: &str, kind: &str, value: u64| {
            _ = writeln!(text, "# TYPE llamacpp:{name} {kind}\nllamacpp:{name} {value}");
        };
        llama("requests_processing", "gauge", running as u64);
        llama("requests_deferred", "gauge", waiting as u64);
        llama("prompt_tokens_total", "counter", load(&self.prompt_tokens));
        llama("tokens_predicted_total", "counter", load(&self.generation_tokens));
        text
    }
}
