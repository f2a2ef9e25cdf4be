//! `verify --company`: whether a sequence's logits depend on who is computed beside it.
//!
//! Every prompt is answered alone first. Then all of them are answered again in batches of each size, in another order
//! and so in other slots and chunks, with neighbours that join, leave and are cancelled half-way; and once more after
//! their prefixes were kept, from every snapshot. A row's logits must be the same bits each time.
//!
//! At the end the pool must be whole, and the device must have no less memory than when the plan was ready. Prompts are
//! made when they are needed and answers are kept as hashes, so that thousands of them take no more host memory than a
//! few.

use std::collections::HashMap;

use anyhow::{Result, ensure};
use gemma4c_runtime::MemoryUse;
use gemma4c_runtime::engine::{Device, Engine, Event, Id, Occupation, Request, Seated};
use xxhash_rust::xxh3::xxh3_64;

use super::super::Outcome;
use super::super::lora::LoraArgs;
use super::super::plan_file::PlanArgs;
use crate::device::EngineOptions;
use crate::output::print;
use crate::{progress, random};

/// What is compared.
pub struct Company<'a> {
    pub plan: &'a PlanArgs,
    /// Adapters that prompts have in turn, and every so many none.
    pub lora: &'a LoraArgs,
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
    let plan = of.plan.read()?;
    let adapters = of.lora.for_seats(of.plan, &plan)?;
    let mut engine = of.plan.open_engine(plan, EngineOptions::default())?;
    let asked = Asked { of, vocabulary: engine.limits().vocab, adapters: adapters.fill(&mut engine)? };
    let ready = engine.device().memory()?;
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

    print(&format!(
        "{} prompts of 1 to {} tokens on {}, {} tokens each\n\n",
        of.prompts,
        of.longest,
        engine.device().name(),
        of.decode
    ))?;
    let bar = progress::tokens("prompts answered", u64::from(of.prompts) * (of.batches.len() as u64 + 2));
    let mut alone: Vec<Answer> = Vec::new();
    for number in 0..of.prompts {
        alone.extend(answer(&mut engine, &asked, &[number], 1, 0)?);
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
        let mut found = vec![Answer::new(); of.prompts as usize];
        let order = shuffled(of.prompts, of.seed + u64::from(batch));
        let disturb = if batch > 1 { 3 } else { 0 };
        for (number, answer) in order.iter().zip(answer(&mut engine, &asked, &order, batch as usize, disturb)?) {
            found[*number as usize] = answer;
        }
        bar.inc(u64::from(of.prompts));
        report(&format!("in batches of {batch}"), &found)?;
    }
    let (found, hits) = after_prefixes(&mut engine, &asked, || bar.inc(1))?;
    report(&format!("after {hits} prefixes that were kept"), &found)?;
    bar.finish_and_clear();
    print(&format!("\n{rows} rows compared with the same rows alone\n"))?;
    print(&format!("{} chunks of prompts were shared by several\n", engine.shared_chunks()))?;
    let is_whole = pool_is_whole(&mut engine)?;
    let has_grown = memory_has_grown(ready, engine.device().memory()?)?;
    let is_right = all_alike && is_whole && !has_grown;
    print(if is_right { "ok\n" } else { "FAILED\n" })?;
    Ok(if is_right { Outcome::Done } else { Outcome::CheckFailed })
}

/// Whether an engine that has answered everything and keeps nothing owns nothing.
fn pool_is_whole<D: Device>(engine: &mut Engine<D>) -> Result<bool> {
    let kept = engine.audit();
    engine.forget_prefixes();
    let Occupation { waiting, running, free_pages, pages, snapshots } = engine.occupation();
    let nobody_owns_any = || match (waiting, running, snapshots, free_pages == pages) {
        (0, 0, 0, true) => Ok(()),
        _ => Err(format!("{free_pages} of {pages} pages are free, but nobody uses any")),
    };
    let found = kept.and_then(|()| engine.audit()).and_then(|()| nobody_owns_any());
    print(&match &found {
        Ok(()) => format!("pool: all {pages} pages are free again\n"),
        Err(what) => format!("pool: FAILED: {what}\n"),
    })?;
    Ok(found.is_ok())
}

/// Whether a device has taken more memory since it was ready. Of one that has none of its own there is nothing to say.
fn memory_has_grown(ready: Option<MemoryUse>, now: Option<MemoryUse>) -> Result<bool> {
    let (Some(ready), Some(now)) = (ready, now) else { return Ok(false) };
    let grown = now.taken.saturating_sub(ready.taken);
    let since = match grown {
        0 => "nothing allocated since ready".to_owned(),
        bytes => format!("FAILED: {bytes} bytes more than when it was ready"),
    };
    print(&format!(
        "memory: {} bytes as planned, {} taken with kernels and graphs; {since}\n",
        now.planned, now.taken
    ))?;
    Ok(grown > 0)
}

/// What is asked for.
struct Asked<'a> {
    of: &'a Company<'a>,
    vocabulary: u32,
    adapters: Vec<Seated>,
}

impl Asked<'_> {
    /// A prompt of its own length; several begin alike, so that prefixes are found. With adapters, those that begin alike
    /// have other ones.
    fn request(&self, number: u32) -> Request {
        let Company { seed, longest, decode, .. } = *self.of;
        let length = 1 + xxh3_64(&(seed ^ u64::from(number)).to_le_bytes()) % u64::from(longest);
        let prompt = random::tokens(seed + u64::from(number / 2), length as usize, self.vocabulary);
        let turn = number as usize % (self.adapters.len() + 1);
        let adapter = turn.checked_sub(1).map(|adapter| self.adapters[adapter]);
        Request { adapter, ..Request::greedy(prompt, decode) }
    }
}

fn shuffled(count: u32, seed: u64) -> Vec<u32> {
    let mut order: Vec<u32> = (0..count).collect();
    order.sort_by_key(|number| xxh3_64(&[seed.to_le_bytes(), u64::from(*number).to_le_bytes()].concat()));
    order
}

/// Answers prompts by their numbers, so many at once. One in `disturb` of them has a neighbour that is cancelled after
/// a few tokens.
fn answer<D: Device>(
    engine: &mut Engine<D>,
    asked: &Asked<'_>,
    numbers: &[u32],
    at_once: usize,
    disturb: usize,
) -> Result<Vec<Answer>> {
    engine.forget_prefixes();
    let request_at = |at: usize| asked.request(numbers[at % numbers.len()]);
    let mut answers = vec![Answer::new(); numbers.len()];
    let mut running: HashMap<Id, usize> = HashMap::new();
    let mut neighbours: HashMap<Id, usize> = HashMap::new();
    let mut next = 0;
    while next < numbers.len() || !engine.is_idle() {
        while next < numbers.len() && running.len() + neighbours.len() < at_once {
            let request = Request { logits: true, ..request_at(next) };
            running.insert(engine.submit(request)?, next);
            next += 1;
            if disturb > 0 && next % disturb == 0 && running.len() + neighbours.len() < at_once {
                neighbours.insert(engine.submit(request_at(next * 7))?, 0);
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
                Event::Admitted { .. } | Event::Prompt { .. } | Event::Drafted { .. } => {}
            }
        }
    }
    Ok(answers)
}

/// Answers every prompt from a prefix that was kept when it was read before, in turn at each of a few places.
fn after_prefixes<D: Device>(
    engine: &mut Engine<D>,
    asked: &Asked<'_>,
    mut told: impl FnMut(),
) -> Result<(Vec<Answer>, usize)> {
    let mut answers = Vec::new();
    let mut hits = 0;
    for number in 0..asked.of.prompts {
        let request = asked.request(number);
        engine.forget_prefixes();
        let last = request.prompt.len() as u32 - 1;
        let place = [last, last / 2, last * 3 / 4, 1.min(last)][number as usize % 4];
        let snapshot_at = if place > 0 { vec![place] } else { Vec::new() };
        engine.submit(Request { snapshot_at, most: 0, ..request.clone() })?;
        while !engine.is_idle() {
            engine.step()?;
        }
        let id = engine.submit(Request { logits: true, ..request })?;
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
        told();
    }
    Ok((answers, hits))
}

fn hash(logits: &[f32]) -> u64 {
    let bytes: Vec<u8> = logits.iter().flat_map(|value| value.to_bits().to_le_bytes()).collect();
    xxh3_64(&bytes)
}
