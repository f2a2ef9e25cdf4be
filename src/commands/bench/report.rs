//! What `gemma4c bench` found, as a table and as JSON.

use std::fmt::Write;
use std::time::Duration;

use anyhow::Result;
use gemma4c_runtime::Session;
use serde_json::json;

use crate::output;

/// From nothing to the first token.
pub struct Start {
    /// One after the other; together they are all of it.
    parts: Vec<(&'static str, Duration)>,
}

impl Start {
    /// `read`: the plan was read; `opened`: it could run; `first`: a first token was there. All since the beginning.
    pub fn new(session: &mut Session, read: Duration, opened: Duration, first: Duration) -> Start {
        let mut parts = vec![("plan", read)];
        match session.cuda() {
            Some(cuda) => {
                let inner = &cuda.opened().parts;
                let named: Duration = inner.iter().map(|(_, time)| *time).sum();
                parts.extend(inner);
                parts.push(("the rest of opening", (opened - read).saturating_sub(named)));
            }
            None => parts.push(("model file", opened - read)),
        }
        parts.push(("first token", first - opened));
        Start { parts }
    }

    fn total(&self) -> Duration {
        self.parts.iter().map(|(_, time)| *time).sum()
    }
}

/// One test at one depth.
pub struct Row {
    pub name: String,
    pub tokens: u32,
    pub depth: u32,
    pub times: Vec<Duration>,
    /// Bytes that the device had less after the measurements than before.
    pub grown: u64,
}

impl Row {
    /// Tokens a second: mean, and standard deviation of the runs.
    fn speed(&self) -> (f64, f64) {
        let speeds: Vec<f64> =
            self.times.iter().map(|time| self.tokens as f64 / time.as_secs_f64().max(1e-9)).collect();
        let count = speeds.len() as f64;
        let mean = speeds.iter().sum::<f64>() / count;
        let squares: f64 = speeds.iter().map(|speed| (speed - mean).powi(2)).sum();
        (mean, if speeds.len() > 1 { (squares / (count - 1.0)).sqrt() } else { 0.0 })
    }

    fn milliseconds(&self) -> f64 {
        self.times.iter().map(Duration::as_secs_f64).sum::<f64>() / self.times.len() as f64 * 1000.0
    }
}

/// Bytes on the device.
struct Memory {
    planned: u64,
    taken: u64,
}

pub struct Report {
    model: String,
    model_bytes: u64,
    device: String,
    start: Start,
    loaded: Option<u64>,
    memory: Option<Memory>,
    rows: Vec<Row>,
}

impl Report {
    pub fn new(session: &mut Session, start: Start, rows: Vec<Row>) -> Result<Report> {
        let plan = session.plan();
        let model = plan.model.name.clone().unwrap_or_else(|| plan.model.architecture.clone());
        let model_bytes = plan.model.files.iter().map(|file| file.bytes).sum();
        let planned = plan.cuda.as_ref().and_then(|cuda| cuda.program.memory.device());
        let device = session.device_name();
        let (mut memory, mut loaded) = (None, None);
        if let (Some(cuda), Some(planned)) = (session.cuda(), planned) {
            memory = Some(Memory { planned, taken: cuda.memory_taken()? });
            loaded = Some(cuda.opened().loaded);
        }
        Ok(Report { model, model_bytes, device, start, loaded, memory, rows })
    }

    pub fn markdown(&self) -> String {
        let mut text = String::from("| model | size | device | test | ms | t/s |\n|---|---:|---|---|---:|---:|\n");
        let size = output::bytes(self.model_bytes);
        for row in &self.rows {
            let (mean, spread) = row.speed();
            let (name, ms) = (&row.name, row.milliseconds());
            let _ = writeln!(
                text,
                "| {} | {size} | {} | {name} | {ms:.2} | {mean:.2} ± {spread:.2} |",
                self.model, self.device
            );
        }
        let ms = |time: Duration| format!("{:.0} ms", time.as_secs_f64() * 1000.0);
        let parts: Vec<String> = self.start.parts.iter().map(|(name, time)| format!("{name} {}", ms(*time))).collect();
        let _ = write!(text, "\ncold start   {} to the first token: {}\n", ms(self.start.total()), parts.join(", "));
        if let Some(loaded) = self.loaded {
            let time =
                self.start.parts.iter().find(|(name, _)| *name == "weights").map_or(0.0, |(_, t)| t.as_secs_f64());
            let speed = output::bytes((loaded as f64 / time.max(1e-9)) as u64);
            let _ = writeln!(text, "weights      {} at {speed}/s", output::bytes(loaded));
        }
        if let Some(Memory { planned, taken }) = &self.memory {
            let grown: u64 = self.rows.iter().map(|row| row.grown).sum();
            let _ = writeln!(
                text,
                "memory       {} planned, {} taken on the device; {grown} bytes more after the measurements than before",
                output::bytes(*planned),
                output::bytes(*taken)
            );
        }
        text
    }

    pub fn json(&self) -> Result<String> {
        let seconds = |time: &Duration| time.as_secs_f64();
        let rows: Vec<_> = self
            .rows
            .iter()
            .map(|row| {
                let (mean, spread) = row.speed();
                json!({
                    "test": row.name,
                    "tokens": row.tokens,
                    "depth": row.depth,
                    "tokens_per_second": { "mean": mean, "standard_deviation": spread },
                    "seconds": row.times.iter().map(seconds).collect::<Vec<_>>(),
                    "device_bytes_grown": row.grown,
                })
            })
            .collect();
        let parts = self.start.parts.iter();
        let start: serde_json::Map<_, _> = parts.map(|(name, time)| (name.to_string(), seconds(time).into())).collect();
        let memory = self.memory.as_ref().map(|memory| json!({ "planned": memory.planned, "taken": memory.taken }));
        let report = json!({
            "model": self.model,
            "model_bytes": self.model_bytes,
            "device": self.device,
            "cold_start_seconds": { "total": seconds(&self.start.total()), "parts": start },
            "loaded_bytes": self.loaded,
            "device_memory": memory,
            "results": rows,
        });
        Ok(serde_json::to_string_pretty(&report)? + "\n")
    }
}
