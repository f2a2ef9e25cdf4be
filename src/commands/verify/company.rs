//! `verify --company`: whether a sequence's logits depend on who is computed beside it.
//!
//! Every prompt is answered alone first. Then all of them are answered again in batches of each size, in another order and so in other
//! slots, with neighbours that join, leave and are cancelled half-way; and once more after their prefixes were kept, from every
//! snapshot. A row's logits must be the same bits each time.

use std::collections::HashMap;

use anyhow::{Result, ensure};
use gemma4c_runtime::engine::{Device, Engine, Event, Id, Request};
use xxhash_rust::xxh3::xxh3_64;

use super::super::Outcome;
use super::super::plan_file::{self, EngineOptions, PlanArgs};
use crate::output::print;
use crate::{progress, random};

/// What is compared.
pub struct Company<'a> {
    pub plan: &'a PlanArgs,
    /// Sequences at once.
    pub batches: &'a [u32],
    pub prompts: u32,
    /// Tokens of the longest prompt.
    pub longest: u32,
    /// Tokens to decode after each.
    pub decode: u32,
    pub seed: u64,
}

/// A token, and a hash of the bits of the logits it was picked from.
type Answer = Vec<(u32, u64)>;

/// Tokens after which a neighbour that is to be cancelled is.
const CANCELLED_AFTER: usize = 2;

pub fn run(of: &Company<'_>) -> Result<Outcome> {
    ensure!(of.prompts > 0 && of.decode > 0, "at least one prompt and one token are needed");
    let plan = plan_file::read(&of.plan.plan)?;
    let vocabulary = plan.model.vocab_size;
    let options = EngineOptions { sequences: None, snapshots: None, suppress: Vec::new() };
    let mut engine = of.plan.open_engine(plan, options)?;
    let most = engine.limits().rows.min(engine.limits().slots);
    let largest = of.batches.iter().copied().max().unwrap_or(0);
    ensure!(
        largest <= most,
        "--company {largest}: the plan has room for {most} sequences at once: compile with a larger --sequences"
    );
    let room = engine.limits().context.saturating_sub(of.decode);
    ensure!(
        of.longest <= room,
        "prompts of {} tokens and {} more do not fit the plan's context",
        of.longest,
        of.decode
    );
    let prompts: Vec<Vec<u32>> = (0..of.prompts).map(|number| prompt(of, number, vocabulary)).collect();

    print(&format!(
        "{} prompts of 1 to {} tokens on {}, {} tokens each\n\n",
        of.prompts,
        of.longest,
        engine.device().name(),
        of.decode
    ))?;
    let bar = progress::tokens("prompts answered", (prompts.len() * (of.batches.len() + 3)) as u64);
    let mut alone: Vec<Answer> = Vec::new();
    for prompt in &prompts {
        alone.extend(answer(&mut engine, of, std::slice::from_ref(prompt), 1, 0)?);
        bar.inc(1);
    }
    let mut all_alike = true;
    let mut rows = 0;
    let mut report = |what: &str, found: &[Answer]| -> Result<()> {
        let compared: usize = alone.iter().map(Vec::len).sum();
        let pairs = || alone.iter().flatten().zip(found.iter().flatten());
        let same = found.iter().map(Vec::len).sum::<usize>() == compared;
        let unlike = pairs().filter(|(a, b)| a != b).count();
        all_alike &= same && unlike == 0;
        rows += compared;
        print(&format!("{what}: {compared} rows, {unlike} differ\n"))
    };
    for &batch in of.batches {
        let mut found = vec![Answer::new(); prompts.len()];
        let order = shuffled(prompts.len(), of.seed + u64::from(batch));
        let mixed: Vec<Vec<u32>> = order.iter().map(|at| prompts[*at].clone()).collect();
        let disturb = if batch > 1 { 3 } else { 0 };
        for (at, answer) in order.iter().zip(answer(&mut engine, of, &mixed, batch as usize, disturb)?) {
            found[*at] = answer;
        }
        bar.inc(prompts.len() as u64);
        report(&format!("in batches of {batch}"), &found)?;
    }
    let (found, hits) = after_prefixes(&mut engine, of, &prompts)?;
    report(&format!("after {hits} prefixes that were kept"), &found)?;
    bar.finish_and_clear();
    let verdict = if all_alike { "ok" } else { "FAILED" };
    print(&format!("\n{rows} rows compared with the same rows alone\n{verdict}\n"))?;
    Ok(if all_alike { Outcome::Done } else { Outcome::CheckFailed })
}

/// A prompt of its own length; several begin alike, so that prefixes are found.
fn prompt(of: &Company<'_>, number: u32, vocabulary: u32) -> Vec<u32> {
    let length = 1 + xxh3_64(&(of.seed ^ u64::from(number)).to_le_bytes()) % u64::from(of.longest);
    random::tokens(of.seed + u64::from(number / 2), length as usize, vocabulary)
}

fn shuffled(count: usize, seed: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    order.sort_by_key(|at| xxh3_64(&[seed.to_le_bytes(), (*at as u64).to_le_bytes()].concat()));
    order
}

/// Answers all prompts, so many at once. One in `disturb` of them has a neighbour that is cancelled after a few tokens.
fn answer<D: Device>(
    engine: &mut Engine<D>,
    of: &Company<'_>,
    prompts: &[Vec<u32>],
    at_once: usize,
    disturb: usize,
) -> Result<Vec<Answer>> {
    engine.forget_prefixes();
    let mut answers = vec![Answer::new(); prompts.len()];
    let mut running: HashMap<Id, usize> = HashMap::new();
    let mut neighbours: HashMap<Id, usize> = HashMap::new();
    let mut next = 0;
    while next < prompts.len() || !engine.is_idle() {
        while next < prompts.len() && running.len() + neighbours.len() < at_once {
            let request = Request { logits: true, ..Request::greedy(prompts[next].clone(), of.decode) };
            running.insert(engine.submit(request)?, next);
            next += 1;
            if disturb > 0 && next % disturb == 0 && running.len() + neighbours.len() < at_once {
                let other = prompts[(next * 7) % prompts.len()].clone();
                neighbours.insert(engine.submit(Request::greedy(other, of.decode))?, 0);
            }
        }
        for event in engine.step()? {
            match event {
                Event::Token { id, token, logits } => match running.get(&id) {
                    Some(at) => answers[*at].push((token, hash(&logits))),
                    None => {
                        let seen = neighbours.entry(id).or_default();
                        *seen += 1;
                        if *seen == CANCELLED_AFTER {
                            engine.cancel(id);
                        }
                    }
                },
                Event::Finished { id, .. } => {
                    running.remove(&id);
                    neighbours.remove(&id);
                }
                Event::Failed { error, .. } => return Err(error.into()),
                Event::Admitted { .. } => {}
            }
        }
    }
    Ok(answers)
}

/// Answers every prompt from a prefix that was kept when it was read before, in turn at each of a few places.
fn after_prefixes<D: Device>(
    engine: &mut Engine<D>,
    of: &Company<'_>,
    prompts: &[Vec<u32>],
) -> Result<(Vec<Answer>, usize)> {
    let mut answers = Vec::new();
    let mut hits = 0;
    for (number, prompt) in prompts.iter().enumerate() {
        engine.forget_prefixes();
        let last = prompt.len() as u32 - 1;
        let place = [last, last / 2, last * 3 / 4, 1.min(last)][number % 4];
        let snapshot_at = if place > 0 { vec![place] } else { Vec::new() };
        engine.submit(Request { snapshot_at, ..Request::greedy(prompt.clone(), 0) })?;
        while !engine.is_idle() {
            engine.step()?;
        }
        let id = engine.submit(Request { logits: true, ..Request::greedy(prompt.clone(), of.decode) })?;
        let mut answer = Answer::new();
        while !engine.is_idle() {
            for event in engine.step()? {
                match event {
                    Event::Token { token, logits, .. } => answer.push((token, hash(&logits))),
                    Event::Admitted { id: admitted, cached } if admitted == id => hits += usize::from(cached > 0),
                    Event::Failed { error, .. } => return Err(error.into()),
                    _ => {}
                }
            }
        }
        answers.push(answer);
    }
    Ok((answers, hits))
}

fn hash(logits: &[f32]) -> u64 {
    let bytes: Vec<u8> = logits.iter().flat_map(|value| value.to_bits().to_le_bytes()).collect();
    xxh3_64(&bytes)
}
