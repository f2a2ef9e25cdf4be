//! The page that a scraper reads: counters in Prometheus's text format, under the names of vLLM, which routers,
//! dashboards and load tests read without being told.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::adapters::Listed;
use crate::app::App;
use crate::metrics::{Histogram, Metrics};

/// What is told of one model.
pub struct Told<'a> {
    /// As a label has it, in quotation marks.
    model: String,
    metrics: &'a Metrics,
    waiting: usize,
    block_rows: u32,
    /// Whether it is in memory, and how often it came.
    is_here: bool,
    loads: u64,
    /// Seats for adapters, and those of them that are not free.
    seats: u32,
    taken_seats: usize,
    adapters: Vec<Listed>,
}

impl<'a> Told<'a> {
    pub fn new(app: &'a App) -> Told<'a> {
        Told {
            model: format!("\"{}\"", app.model.replace('\\', "\\\\").replace('"', "\\\"")),
            metrics: &app.state.metrics,
            waiting: app.state.waiting(),
            block_rows: app.slot.ready().map_or(0, |ready| ready.page_rows),
            is_here: app.slot.is_here(),
            loads: app.slot.loads(),
            seats: app.adapters.seats().map_or(0, |seats| seats.count),
            taken_seats: app.adapters.taken(),
            adapters: app.adapters.list(),
        }
    }
}

fn load(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

/// The page that a scraper reads: each name with its kind once, and with a line for each model.
pub fn text(all: &[Told<'_>]) -> String {
    let mut text = String::new();
    gauges(&mut text, all);
    counters(&mut text, all);
    histograms(&mut text, all);
    // What dashboards of llama-server look for: one model, or all together.
    let mut llama = |name: &str, kind: &str, of: fn(&Told<'_>) -> u64| {
        let value: u64 = all.iter().map(of).sum();
        _ = writeln!(text, "# TYPE llamacpp:{name} {kind}\nllamacpp:{name} {value}");
    };
    llama("requests_processing", "gauge", |told| told.metrics.occupation().0 as u64);
    llama("requests_deferred", "gauge", |told| told.waiting as u64);
    llama("prompt_tokens_total", "counter", |told| load(&told.metrics.prompt_tokens));
    llama("tokens_predicted_total", "counter", |told| load(&told.metrics.generation_tokens));
    text
}

fn gauges(text: &mut String, all: &[Told<'_>]) {
    let mut gauge = |name: &str, of: fn(&Told<'_>) -> f64| {
        _ = writeln!(text, "# TYPE {name} gauge");
        all.iter().for_each(|told| _ = writeln!(text, "{name}{{model_name={}}} {}", told.model, of(told)));
    };
    gauge("vllm:num_requests_running", |told| told.metrics.occupation().0 as f64);
    gauge("vllm:num_requests_waiting", |told| told.waiting as f64);
    gauge("vllm:kv_cache_usage_perc", |told| told.metrics.occupation().1);
    gauge("gemma4c:model_in_memory", |told| f64::from(told.is_here));
    gauge("gemma4c:adapter_seats", |told| f64::from(told.seats));
    gauge("gemma4c:adapter_seats_taken", |told| told.taken_seats as f64);
    gauge("gemma4c:adapters_loaded", |told| told.adapters.len() as f64);
    _ = writeln!(text, "# TYPE vllm:cache_config_info gauge");
    for Told { model, metrics, block_rows, .. } in all {
        let blocks = metrics.blocks.load(Ordering::Relaxed);
        _ = writeln!(
            text,
            "vllm:cache_config_info{{model_name={model},block_size=\"{block_rows}\",num_gpu_blocks=\"{blocks}\"}} 1"
        );
    }
}

fn counters(text: &mut String, all: &[Told<'_>]) {
    let mut counter = |name: &str, of: fn(&Told<'_>) -> u64| {
        _ = writeln!(text, "# TYPE {name}_total counter");
        all.iter().for_each(|told| _ = writeln!(text, "{name}_total{{model_name={}}} {}", told.model, of(told)));
    };
    counter("vllm:prompt_tokens", |told| load(&told.metrics.prompt_tokens));
    counter("vllm:generation_tokens", |told| load(&told.metrics.generation_tokens));
    counter("vllm:prefix_cache_queries", |told| load(&told.metrics.cache_queries));
    counter("vllm:prefix_cache_hits", |told| load(&told.metrics.cache_hits));
    counter("vllm:num_preemptions", |_| 0);
    counter("vllm:spec_decode_num_drafts", |told| load(&told.metrics.drafts));
    counter("vllm:spec_decode_num_draft_tokens", |told| load(&told.metrics.draft_tokens));
    counter("vllm:spec_decode_num_accepted_tokens", |told| told.metrics.accepted_at.iter().map(load).sum());
    counter("gemma4c:model_loads", |told| told.loads);
    // Names that stand for one now: as many as there are seats, at most.
    _ = writeln!(text, "# TYPE gemma4c:adapter_requests_total counter");
    for (Told { model, .. }, Listed { name, requests, .. }) in
        all.iter().flat_map(|told| told.adapters.iter().map(move |listed| (told, listed)))
    {
        _ = writeln!(text, "gemma4c:adapter_requests_total{{model_name={model},adapter=\"{name}\"}} {requests}");
    }
    let mut labelled = |name: &str, label: &str, of: &dyn Fn(&Metrics) -> Vec<(String, u64)>| {
        _ = writeln!(text, "# TYPE {name} counter");
        for Told { model, metrics, .. } in all {
            for (value, count) in of(metrics) {
                _ = writeln!(text, "{name}{{model_name={model},{label}=\"{value}\"}} {count}");
            }
        }
    };
    labelled("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position", &|metrics| {
        metrics.accepted_at.iter().map(load).enumerate().map(|(at, count)| (at.to_string(), count)).collect()
    });
    labelled("vllm:request_success_total", "finished_reason", &|metrics| {
        let reasons = [("stop", &metrics.stopped), ("length", &metrics.cut), ("abort", &metrics.aborted)];
        reasons.map(|(reason, count)| (reason.to_owned(), load(count))).into()
    });
}

fn histograms(text: &mut String, all: &[Told<'_>]) {
    let mut histogram = |name: &str, of: fn(&Metrics) -> &Histogram| {
        _ = writeln!(text, "# TYPE vllm:{name} histogram");
        all.iter().for_each(|told| write_histogram(text, name, &told.model, of(told.metrics)));
    };
    histogram("time_to_first_token_seconds", |metrics| &metrics.first_token);
    histogram("inter_token_latency_seconds", |metrics| &metrics.between_tokens);
    histogram("request_time_per_output_token_seconds", |metrics| &metrics.per_output_token);
    histogram("e2e_request_latency_seconds", |metrics| &metrics.whole);
    histogram("request_queue_time_seconds", |metrics| &metrics.queued);
    histogram("request_prefill_time_seconds", |metrics| &metrics.prefill);
    histogram("request_decode_time_seconds", |metrics| &metrics.decode);
    histogram("request_prompt_tokens", |metrics| &metrics.request_prompt);
    histogram("request_generation_tokens", |metrics| &metrics.request_generation);
    histogram("iteration_tokens_total", |metrics| &metrics.iteration);
}

fn write_histogram(text: &mut String, name: &str, model: &str, histogram: &Histogram) {
    let mut total = 0;
    for (count, limit) in
        histogram.counts.iter().zip(histogram.limits.iter().map(f64::to_string).chain(["+Inf".into()]))
    {
        total += count.load(Ordering::Relaxed);
        _ = writeln!(text, "vllm:{name}_bucket{{model_name={model},le=\"{limit}\"}} {total}");
    }
    let sum = histogram.sum.load(Ordering::Relaxed) as f64 / 1e6;
    _ = writeln!(text, "vllm:{name}_sum{{model_name={model}}} {sum}");
    _ = writeln!(text, "vllm:{name}_count{{model_name={model}}} {total}");
}
