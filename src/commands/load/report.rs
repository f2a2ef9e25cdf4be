//! The figures of a load test, as text and under the names that `vllm bench serve` gives them.

use std::time::Duration;

use serde_json::{Map, Value, json};

use super::client::Answered;

/// Times in milliseconds.
struct Times {
    mean: f64,
    deviation: f64,
    /// 50, 90 and 99 of 100 are not longer.
    percentiles: [f64; 3],
}

impl Times {
    fn new(mut values: Vec<f64>) -> Times {
        if values.is_empty() {
            return Times { mean: 0.0, deviation: 0.0, percentiles: [0.0; 3] };
        }
        values.iter_mut().for_each(|value| *value *= 1e3);
        values.sort_by(f64::total_cmp);
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let deviation = (values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / count).sqrt();
        let percentile = |percent: f64| {
            let place = percent / 100.0 * (count - 1.0);
            let (low, part) = (place.floor() as usize, place.fract());
            let high = (low + 1).min(values.len() - 1);
            values[low] * (1.0 - part) + values[high] * part
        };
        Times { mean, deviation, percentiles: [50.0, 90.0, 99.0].map(percentile) }
    }
}

pub struct Report {
    duration: Duration,
    completed: usize,
    good: Option<usize>,
    input: u64,
    output: u64,
    first: Times,
    per_token: Times,
    gaps: Times,
    whole: Times,
}

impl Report {
    pub fn new(answers: &[Answered], duration: Duration, good: Option<usize>) -> Report {
        let seconds = |times: &mut dyn Iterator<Item = Duration>| times.map(|time| time.as_secs_f64()).collect();
        let longer = answers.iter().filter(|answer| answer.tokens > 1);
        Report {
            duration,
            completed: answers.len(),
            good,
            input: answers.iter().map(|answer| answer.prompt_tokens).sum(),
            output: answers.iter().map(|answer| answer.tokens).sum(),
            first: Times::new(seconds(&mut answers.iter().map(|answer| answer.first))),
            per_token: Times::new(longer.map(Answered::per_token).collect()),
            gaps: Times::new(seconds(&mut answers.iter().flat_map(|answer| answer.gaps.iter().copied()))),
            whole: Times::new(seconds(&mut answers.iter().map(|answer| answer.whole))),
        }
    }

    fn rate(&self, count: f64) -> f64 {
        count / self.duration.as_secs_f64().max(1e-9)
    }

    pub fn text(&self, failed: usize) -> String {
        let mut text = format!(
            "{} requests in {:.2} s, {failed} failed; {} tokens in, {} out\n",
            self.completed,
            self.duration.as_secs_f64(),
            self.input,
            self.output
        );
        let rates = [
            ("requests", self.completed as f64),
            ("output tokens", self.output as f64),
            ("all tokens", (self.input + self.output) as f64),
        ];
        for (name, count) in rates {
            text.push_str(&format!("{name:<16} {:>10.2} a second\n", self.rate(count)));
        }
        if let Some(good) = self.good {
            text.push_str(&format!("{:<16} {:>10.2} a second\n", "good requests", self.rate(good as f64)));
        }
        text.push_str(&format!("\n{:<16} {:>10} {:>10} {:>10} {:>10}\n", "ms", "mean", "p50", "p90", "p99"));
        for (name, times) in
            [("first token", &self.first), ("per token", &self.per_token), ("gap", &self.gaps), ("whole", &self.whole)]
        {
            let [p50, p90, p99] = times.percentiles;
            text.push_str(&format!("{name:<16} {:>10.2} {p50:>10.2} {p90:>10.2} {p99:>10.2}\n", times.mean));
        }
        text
    }

    pub fn json(&self) -> Value {
        let mut fields = Map::new();
        let mut put = |name: &str, value: Value| _ = fields.insert(name.into(), value);
        put("backend", "gemma4c".into());
        put("duration", self.duration.as_secs_f64().into());
        put("completed", self.completed.into());
        put("total_input_tokens", self.input.into());
        put("total_output_tokens", self.output.into());
        put("request_throughput", self.rate(self.completed as f64).into());
        put("request_goodput", self.good.map_or(Value::Null, |good| json!(self.rate(good as f64))));
        put("output_throughput", self.rate(self.output as f64).into());
        put("total_token_throughput", self.rate((self.input + self.output) as f64).into());
        for (name, times) in
            [("ttft", &self.first), ("tpot", &self.per_token), ("itl", &self.gaps), ("e2el", &self.whole)]
        {
            let [p50, p90, p99] = times.percentiles;
            put(&format!("mean_{name}_ms"), times.mean.into());
            put(&format!("median_{name}_ms"), p50.into());
            put(&format!("std_{name}_ms"), times.deviation.into());
            put(&format!("p90_{name}_ms"), p90.into());
            put(&format!("p99_{name}_ms"), p99.into());
        }
        Value::Object(fields)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_lie_between_what_was_measured() {
        let times = Times::new((1..=5).map(|n| n as f64 / 1e3).collect());
        assert_eq!((times.mean, times.percentiles[0]), (3.0, 3.0));
        assert!((times.percentiles[1] - 4.6).abs() < 1e-9 && (times.deviation - 2f64.sqrt()).abs() < 1e-9);
        assert_eq!(Times::new(vec![]).percentiles, [0.0; 3]);
    }
}
