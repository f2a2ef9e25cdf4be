//! `gemma4c bench --chat`: how long the turns of a chat wait for their first token.
//!
//! A turn is sent as a chat front end sends it: the whole conversation as one prompt, the model's own answers among it.
//! What the engine has kept of the turn before is not read again. It keeps states of prompts alone, so the last answer
//! is read as a prompt, once. A turn's limit follows from that: the time of its new tokens at the rate of pp512, and a
//! constant.

use std::fmt::Write;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use gemma4c_runtime::engine::{Device, Engine, Event, Request};
use serde_json::json;

use crate::commands::plan_file::{EngineArgs, PlanArgs};
use crate::device::EngineOptions;
use crate::{progress, random};

/// What is measured.
pub struct Chat<'a> {
    pub plan: &'a PlanArgs,
    pub engine: EngineArgs,
    pub turns: u32,
    /// Tokens of the system prompt, of what the user says in a turn, and of an answer.
    pub system: u32,
    pub turn: u32,
    pub answer: u32,
    pub repeat: usize,
    pub seed: u64,
}

/// What a turn may take beyond its new tokens.
const ALLOWANCE: f64 = 0.015;

/// The prompt whose rate the limits follow from.
const RATE_PROMPT: u32 = 512;

/// One turn, in all repetitions of the chat.
struct Turn {
    prompt: u32,
    /// Tokens of the prompt that were not read again.
    cached: u32,
    /// To the first token, in seconds.
    times: Vec<f64>,
}

pub struct Report {
    model: String,
    device: String,
    /// Tokens of the prompt that was measured first, and how many of them a second.
    rate_prompt: u32,
    rate: f64,
    turns: Vec<Turn>,
}

pub fn run(chat: &Chat<'_>) -> Result<Report> {
    let Chat { turns, system, turn, answer, .. } = *chat;
    ensure!(turns > 0, "--chat 0: at least one turn is needed");
    ensure!(turn > 0, "--turn 0: a turn has at least one token");
    ensure!(answer > 0, "-n 0: an answer has at least one token");
    let plan = chat.plan.read()?;
    let context = plan.program.context;
    let positions = u64::from(system) + u64::from(turns) * (u64::from(turn) + u64::from(answer));
    ensure!(
        positions <= u64::from(context),
        "a chat of {positions} tokens does not fit the plan's context of {context}: compile with a larger --ctx"
    );
    let model = plan.model.name.clone().unwrap_or_else(|| plan.model.architecture.clone());
    let options = EngineOptions { sequences: Some(1), ..chat.engine.options() };
    let mut engine = chat.plan.open_engine(plan, options)?;
    let limits = engine.limits();
    // It departs from a snapshot, which has copies of the window's pages and of the page that it ends in.
    let needed = limits.pages_for(positions as u32).iter().sum::<u32>() + limits.sliding.entries + 1;
    ensure!(
        needed <= limits.pages,
        "a chat of {positions} tokens and its snapshot take {needed} pages of keys and values, there are {}: compile with a larger --ctx",
        limits.pages
    );

    let bar = progress::answers(u64::from(turns) * chat.repeat as u64);
    let rate_prompt = RATE_PROMPT.min(context - 1).max(1);
    let rate = prompt_rate(&mut engine, rate_prompt, chat)?;
    let mut report = Report { model, device: engine.device().name(), rate_prompt, rate, turns: Vec::new() };
    for _ in 0..chat.repeat {
        engine.forget_prefixes();
        talk(&mut engine, chat, &mut report.turns)?;
        bar.inc(u64::from(turns));
    }
    bar.finish_and_clear();
    Ok(report)
}

/// Tokens a second of a prompt, to the first token after it.
fn prompt_rate(engine: &mut Engine<Box<dyn Device>>, tokens: u32, chat: &Chat<'_>) -> Result<f64> {
    let prompt = random::tokens(!chat.seed, tokens as usize, engine.limits().vocab);
    // The first run warms up.
    let mut seconds = 0.0;
    for run in 0..=chat.repeat {
        let answered = answer(engine, Request::greedy(prompt.clone(), 1))?;
        if run > 0 {
            seconds += answered.first.as_secs_f64() / chat.repeat as f64;
        }
    }
    Ok(f64::from(tokens) / seconds.max(1e-9))
}

/// One chat, from an engine that has kept nothing of it.
fn talk(engine: &mut Engine<Box<dyn Device>>, chat: &Chat<'_>, turns: &mut Vec<Turn>) -> Result<()> {
    let vocab = engine.limits().vocab;
    let mut conversation = random::tokens(chat.seed, chat.system as usize, vocab);
    for number in 0..chat.turns as usize {
        let said = random::tokens(chat.seed.wrapping_add(1 + number as u64), chat.turn as usize, vocab);
        conversation.extend(said);
        let prompt = conversation.len() as u32;
        // Other chats depart after the system prompt, the next turn after this prompt.
        let mut snapshot_at = vec![chat.system, prompt];
        snapshot_at.retain(|at| *at > 0);
        let request = Request { snapshot_at, ..Request::greedy(conversation.clone(), chat.answer) };
        let answered = answer(engine, request)?;
        let time = answered.first.as_secs_f64();
        match turns.get_mut(number) {
            Some(turn) => {
                turn.cached = turn.cached.min(answered.cached);
                turn.times.push(time);
            }
            None => turns.push(Turn { prompt, cached: answered.cached, times: vec![time] }),
        }
        conversation.extend(answered.tokens);
    }
    Ok(())
}

/// What came of a request.
struct Answered {
    cached: u32,
    /// Until its first token.
    first: Duration,
    tokens: Vec<u32>,
}

fn answer(engine: &mut Engine<Box<dyn Device>>, request: Request) -> Result<Answered> {
    let started = Instant::now();
    engine.submit(request)?;
    let (mut from, mut first, mut tokens) = (0, None, Vec::new());
    while !engine.is_idle() {
        for event in engine.step()? {
            match event {
                Event::Admitted { cached, .. } => from = cached,
                Event::Token { token, .. } => {
                    first.get_or_insert_with(|| started.elapsed());
                    tokens.push(token);
                }
                Event::Failed { error, .. } => return Err(error.into()),
                Event::Finished { .. } | Event::Prompt { .. } | Event::Drafted { .. } => {}
            }
        }
    }
    Ok(Answered { cached: from, first: first.context("an answer ended without a token")?, tokens })
}

impl Turn {
    fn new_tokens(&self) -> u32 {
        self.prompt - self.cached
    }

    /// Seconds to the first token, as the mean of all repetitions and of the slowest.
    fn seconds(&self) -> (f64, f64) {
        let mean = self.times.iter().sum::<f64>() / self.times.len() as f64;
        (mean, self.times.iter().copied().fold(0.0, f64::max))
    }
}

impl Report {
    /// Seconds that a turn may take to its first token.
    fn limit(&self, turn: &Turn) -> f64 {
        f64::from(turn.new_tokens()) / self.rate + ALLOWANCE
    }

    /// Whether it was never slower.
    fn holds(&self, turn: &Turn) -> bool {
        turn.seconds().1 <= self.limit(turn)
    }

    pub fn markdown(&self) -> String {
        let mut text = format!("{} on {}\n\n", self.model, self.device);
        text += "| turn | prompt | cached | new | first token ms | slowest ms | limit ms | holds |\n";
        text += "|---:|---:|---:|---:|---:|---:|---:|---|\n";
        for (number, turn) in (1..).zip(&self.turns) {
            let (mean, slowest) = turn.seconds();
            let _ = writeln!(
                text,
                "| {number} | {} | {} | {} | {:.2} | {:.2} | {:.2} | {} |",
                turn.prompt,
                turn.cached,
                turn.new_tokens(),
                mean * 1e3,
                slowest * 1e3,
                self.limit(turn) * 1e3,
                if self.holds(turn) { "yes" } else { "no" }
            );
        }
        let later = self.turns.get(1..).unwrap_or_default();
        let held = later.iter().filter(|turn| self.holds(turn)).count();
        let _ = write!(
            text,
            "\nlimit: new tokens, the last answer among them, at {:.2} t/s of pp{}, and {} ms; {held} of {} later turns hold it\n",
            self.rate,
            self.rate_prompt,
            ALLOWANCE * 1e3,
            later.len()
        );
        text
    }

    pub fn json(&self) -> Result<String> {
        let turn = |(number, turn): (usize, &Turn)| {
            json!({
                "turn": number,
                "prompt": turn.prompt,
                "cached": turn.cached,
                "new": turn.new_tokens(),
                "first_token_seconds": turn.times,
                "limit_seconds": self.limit(turn),
                "holds": self.holds(turn),
            })
        };
        let turns: Vec<_> = (1..).zip(&self.turns).map(turn).collect();
        let report = json!({
            "model": self.model,
            "device": self.device,
            "limit": { "prompt": self.rate_prompt, "tokens_per_second": self.rate, "allowance_seconds": ALLOWANCE },
            "turns": turns,
        });
        Ok(serde_json::to_string_pretty(&report)? + "\n")
    }
}
