//! `gemma4c bench --sequences`: prompts of several sequences one after another, then all of them decoded together, as
//! `llama-batched-bench` measures it.

use std::fmt::Write;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use gemma4c_runtime::engine::{Device, Engine, Event, Request, Seated};
use serde_json::json;

use crate::commands::lora::LoraArgs;
use crate::commands::plan_file::{EngineArgs, PlanArgs};
use crate::device::EngineOptions;
use crate::{progress, random};

/// What is measured.
pub struct Batched<'a> {
    pub plan: &'a PlanArgs,
    pub lora: &'a LoraArgs,
    pub engine: EngineArgs,
    pub sequences: Vec<u32>,
    pub prompts: Vec<u32>,
    pub generate: Vec<u32>,
    pub repeat: usize,
    pub seed: u64,
}

/// Sequences with prompts of `prompt` tokens, each going on for `generate`.
#[derive(Clone, Copy)]
struct Test {
    sequences: u32,
    prompt: u32,
    generate: u32,
}

/// Seconds, as the mean of all runs.
struct Row {
    test: Test,
    reading: f64,
    writing: f64,
}

pub struct Report {
    model: String,
    device: String,
    rows: Vec<Row>,
}

/// The prompts and tokens of the run before the measurements.
const WARM_UP: (u32, u32) = (16, 2);

pub fn run(batched: &Batched<'_>) -> Result<Report> {
    let plan = batched.plan.read()?;
    let context = plan.program.context;
    let tests: Vec<Test> = (batched.prompts.iter())
        .flat_map(|prompt| batched.generate.iter().map(move |generate| (*prompt, *generate)))
        .flat_map(|(prompt, generate)| batched.sequences.iter().map(move |n| Test { sequences: *n, prompt, generate }))
        .collect();
    for Test { prompt, generate, .. } in &tests {
        ensure!(*prompt > 0, "-p 0: a sequence begins with a prompt of at least one token");
        let wanted = *prompt as u64 + *generate as u64;
        ensure!(
            wanted <= context as u64,
            "{prompt} + {generate} tokens do not fit the plan's context of {context}: compile with a larger --ctx"
        );
    }
    let most = batched.sequences.iter().copied().max().context("--sequences: no number was given")?;
    ensure!(batched.sequences.iter().all(|n| *n > 0), "--sequences 0: at least one is needed");
    let model = plan.model.name.clone().unwrap_or_else(|| plan.model.architecture.clone());
    // Of random prompts nothing is worth keeping.
    let options = EngineOptions { sequences: Some(most), snapshots: Some(0), ..batched.engine.options() };
    let adapters = batched.lora.for_seats(batched.plan, &plan)?;
    let mut engine = batched.plan.open_engine(plan, options)?;
    let adapters = adapters.fill(&mut engine)?;
    for test in &tests {
        let each: u32 = engine.limits().pages_for(test.prompt + test.generate).iter().sum();
        let needed = each * test.sequences;
        ensure!(
            needed <= engine.limits().pages,
            "{} sequences of {} positions take {needed} pages of keys and values, there are {}: fewer --sequences or shorter ones fit",
            test.sequences,
            test.prompt + test.generate,
            engine.limits().pages
        );
    }
    let bar = progress::tokens("measuring", (tests.len() * batched.repeat) as u64);
    let mut rows = Vec::new();
    for test in tests {
        let (prompt, generate) = (test.prompt.min(WARM_UP.0), test.generate.min(WARM_UP.1));
        measure(&mut engine, Test { prompt, generate, ..test }, batched.seed, &adapters)?;
        let (mut reading, mut writing) = (0.0, 0.0);
        for _ in 0..batched.repeat {
            let (read, written) = measure(&mut engine, test, batched.seed, &adapters)?;
            reading += read / batched.repeat as f64;
            writing += written / batched.repeat as f64;
            bar.inc(1);
        }
        rows.push(Row { test, reading, writing });
    }
    bar.finish_and_clear();
    Ok(Report { model, device: engine.device().name(), rows })
}

/// Seconds until all prompts are read, and from there until all tokens are written. Sequences take turns in having the
/// adapters.
fn measure(engine: &mut Engine<Box<dyn Device>>, test: Test, seed: u64, adapters: &[Seated]) -> Result<(f64, f64)> {
    let vocab = engine.limits().vocab;
    let started = Instant::now();
    for sequence in 0..test.sequences as u64 {
        let prompt = random::tokens(seed ^ (sequence << 32), test.prompt as usize, vocab);
        // The first token comes out of the prompt.
        let adapter = adapters.get(sequence as usize % adapters.len().max(1)).copied();
        engine.submit(Request { adapter, ..Request::greedy(prompt, test.generate + 1) })?;
    }
    let (mut first_tokens, mut read) = (0, None);
    let mut seen = std::collections::BTreeSet::new();
    while !engine.is_idle() {
        for event in engine.step()? {
            match event {
                Event::Token { id, .. } if seen.insert(id) => {
                    first_tokens += 1;
                    if first_tokens == test.sequences {
                        read = Some(started.elapsed());
                    }
                }
                Event::Failed { error, .. } => return Err(error.into()),
                _ => {}
            }
        }
    }
    let read = read.context("a sequence ended without a token")?.as_secs_f64();
    Ok((read, started.elapsed().as_secs_f64() - read))
}

impl Row {
    fn positions(&self) -> u32 {
        self.test.sequences * (self.test.prompt + self.test.generate)
    }

    /// Tokens a second: of the prompts, of what was written, of both.
    fn speeds(&self) -> [f64; 3] {
        let Test { sequences, prompt, generate } = self.test;
        let speed = |tokens: u32, seconds: f64| tokens as f64 / seconds.max(1e-9);
        let total = speed(self.positions(), self.reading + self.writing);
        [speed(sequences * prompt, self.reading), speed(sequences * generate, self.writing), total]
    }
}

impl Report {
    pub fn markdown(&self) -> String {
        let mut text = format!("{} on {}\n\n", self.model, self.device);
        text += "| PP | TG | B | N_KV | T_PP s | S_PP t/s | T_TG s | S_TG t/s | T s | S t/s |\n";
        text += "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n";
        for row in &self.rows {
            let Test { sequences, prompt, generate } = row.test;
            let [reading, writing, both] = row.speeds();
            let _ = writeln!(
                text,
                "| {prompt} | {generate} | {sequences} | {} | {:.3} | {reading:.2} | {:.3} | {writing:.2} | {:.3} | {both:.2} |",
                row.positions(),
                row.reading,
                row.writing,
                row.reading + row.writing
            );
        }
        text
    }

    pub fn json(&self) -> Result<String> {
        let row = |row: &Row| {
            let [reading, writing, both] = row.speeds();
            json!({
                "pp": row.test.prompt,
                "tg": row.test.generate,
                "b": row.test.sequences,
                "n_kv": row.positions(),
                "t_pp": row.reading,
                "s_pp": reading,
                "t_tg": row.writing,
                "s_tg": writing,
                "t": row.reading + row.writing,
                "s": both,
            })
        };
        let rows: Vec<_> = self.rows.iter().map(row).collect();
        let report = json!({ "model": self.model, "device": self.device, "results": rows });
        Ok(serde_json::to_string_pretty(&report)? + "\n")
    }
}
