//! `gemma4c bench --draft`: what drafting costs, what verifying costs, and what both bring at a given acceptance.
//!
//! Random weights accept nothing, so acceptance is forced: the drafter runs, and what it drafted is replaced, with the
//! given probability by the token that an undrafted run chose, else by another. The text is that of the undrafted run,
//! which is checked.
//!
//! Which drafts those are is the luck of a seed, and moves a rate by a tenth. So every run has another seed, and beside
//! the rate that they had together stands the one that is to be expected: of rounds that took as long, with as many
//! tokens as such rounds have on average.

use std::fmt::Write;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use gemma4c_plan::Sampling;
use gemma4c_runtime::{Counts, DraftSource, Guess, MOST_DRAFTS, Request, RuntimeError, Sampler, Session, Speculation};
use serde_json::json;

use super::super::plan_file::PlanArgs;
use crate::random::{self, Random};

/// What is measured.
pub struct Drafts<'a> {
    pub plan: &'a PlanArgs,
    /// Probabilities that a draft is right.
    pub acceptances: Vec<f64>,
    pub prompt: u32,
    pub generate: u32,
    pub repeat: usize,
    pub seed: u64,
}

/// Times in microseconds, rates in tokens a second.
pub struct Report {
    drafter: bool,
    plain: f64,
    /// A round that verifies so many rows, none of whose drafts is right.
    verified: Vec<(u32, f64)>,
    /// The same with the drafter's steps before it.
    drafted: Vec<(u32, f64)>,
    forced: Vec<Forced>,
}

struct Forced {
    acceptance: f64,
    /// `None`: as many as pay.
    steps: Option<u32>,
    rate: f64,
    /// Without the luck of the seeds.
    expected: f64,
    /// Of all runs.
    counts: Counts,
}

pub fn run(of: &Drafts<'_>) -> Result<Report> {
    let mut bench = Bench::open(of)?;
    let drafter = bench.session.plan().drafter.is_some();
    let text = bench.text(of.generate)?;
    let plain = bench.plain(of, &text)?;
    let most = bench.verified_drafts().min(MOST_DRAFTS);
    let (mut verified, mut drafted) = (Vec::new(), Vec::new());
    for drafts in 0..=most {
        verified.push((drafts + 1, bench.round(of, &text, drafts, false)?));
        if drafter && drafts > 0 {
            drafted.push((drafts + 1, bench.round(of, &text, drafts, true)?));
        }
    }
    let mut forced = Vec::new();
    for &acceptance in &of.acceptances {
        for steps in (1..=most).map(Some).chain([None]) {
            forced.push(bench.forced(of, &text, acceptance, steps, drafter)?);
        }
    }
    Ok(Report { drafter, plain, verified, drafted, forced })
}

/// A session that answers one prompt again and again.
pub(super) struct Bench {
    pub session: Session,
    pub sampler: Sampler,
    pub prompt: Vec<u32>,
}

impl Bench {
    fn open(of: &Drafts<'_>) -> Result<Bench> {
        let session = of.plan.open()?;
        let vocab_size = session.plan().model.vocab_size;
        let prompt = random::tokens(of.seed, of.prompt as usize, vocab_size);
        Bench::with_prompt(session, prompt, of.generate + MOST_DRAFTS)
    }

    /// For answers of at most so many tokens.
    pub fn with_prompt(session: Session, prompt: Vec<u32>, answer: u32) -> Result<Bench> {
        let (context, needed) = (session.plan().program.context, prompt.len() as u32 + answer);
        ensure!(
            needed <= context,
            "{needed} tokens do not fit the plan's context of {context}: compile with a larger --ctx"
        );
        let sampling = Sampling { temperature: 0.0, top_k: 1, top_p: 1.0 };
        let sampler = Sampler::new(sampling, 0, Vec::new()).context("the largest logit can always be asked for")?;
        Ok(Bench { session, sampler, prompt })
    }

    /// Drafts that the plan can verify.
    pub fn verified_drafts(&self) -> u32 {
        let plan = self.session.plan();
        let rows =
            plan.cuda.as_ref().map_or(plan.program.chunk.min(plan.program.asked), |cuda| cuda.program.verified_rows);
        rows.saturating_sub(1)
    }

    /// The tokens after the prompt, and the time from the first of them to the last.
    pub fn generate(&mut self, most: u32, drafts: Option<&mut Speculation>) -> Result<(Vec<u32>, Duration)> {
        self.session.reset();
        let request = Request { prompt: &self.prompt, most, stop: &[] };
        let (mut tokens, mut first, mut last) = (Vec::new(), None, Instant::now());
        let each: &mut dyn FnMut(u32) -> Result<(), RuntimeError> = &mut |token| {
            last = Instant::now();
            first.get_or_insert(last);
            tokens.push(token);
            Ok(())
        };
        match drafts {
            None => self.session.generate(request, &mut self.sampler, each)?,
            Some(drafts) => self.session.generate_speculating(request, &mut self.sampler, drafts, each)?,
        };
        Ok((tokens, first.map_or(Duration::ZERO, |first| last - first)))
    }

    /// What an undrafted run says, with some tokens more than are measured.
    fn text(&mut self, generate: u32) -> Result<Vec<u32>> {
        let (tokens, _) = self.generate(generate + MOST_DRAFTS, None)?;
        Ok([&self.prompt[..], &tokens].concat())
    }

    fn plain(&mut self, of: &Drafts<'_>, text: &[u32]) -> Result<f64> {
        let mut rates = Vec::new();
        for _ in 0..of.repeat {
            let (tokens, took) = self.generate(of.generate, None)?;
            ensure!(text[self.prompt.len()..].starts_with(&tokens), "two runs of one prompt differ");
            rates.push((tokens.len() - 1) as f64 / took.as_secs_f64());
        }
        Ok(median(rates))
    }

    /// Microseconds of a round that verifies so many drafts, all of them wrong, or with the drafter's steps before it.
    fn round(&mut self, of: &Drafts<'_>, text: &[u32], drafts: u32, with_drafter: bool) -> Result<f64> {
        let mut times = Vec::new();
        for _ in 0..of.repeat {
            let mut wrong = speculation(guess(text, 0.0, of.seed), Some(drafts), with_drafter);
            let (_, took) = self.generate(of.generate, Some(&mut wrong))?;
            // The last rounds are shorter: there is no room for all drafts.
            times.push(took.as_secs_f64() * 1e6 / wrong.counts.rounds.max(1) as f64);
        }
        Ok(median(times))
    }

    fn forced(
        &mut self,
        of: &Drafts<'_>,
        text: &[u32],
        acceptance: f64,
        steps: Option<u32>,
        with_drafter: bool,
    ) -> Result<Forced> {
        let (mut made, mut expected, mut seconds, mut counts) = (0.0, 0.0, 0.0, Counts::default());
        for run in 0..of.repeat {
            let mut drafts = speculation(guess(text, acceptance, of.seed + run as u64), steps, with_drafter);
            let (tokens, took) = self.generate(of.generate, Some(&mut drafts))?;
            ensure!(text[self.prompt.len()..].starts_with(&tokens), "drafts have changed the text");
            made += (tokens.len() - 1) as f64;
            expected += expected_tokens(&drafts.counts, acceptance);
            seconds += took.as_secs_f64();
            counts.rounds += drafts.counts.rounds;
            counts.drafted += drafts.counts.drafted;
            counts.accepted += drafts.counts.accepted;
        }
        Ok(Forced { acceptance, steps, rate: made / seconds, expected: expected / seconds, counts })
    }
}

/// Tokens that such rounds have on average: each its drafts up to the first wrong one, and one more.
fn expected_tokens(counts: &Counts, acceptance: f64) -> f64 {
    let of_round = |drafts: i32| (0..=drafts).map(|right| acceptance.powi(right)).sum::<f64>();
    (0..).zip(counts.rounds_of).map(|(drafts, rounds)| rounds as f64 * of_round(drafts)).sum()
}

fn speculation(guess: Box<Guess>, steps: Option<u32>, with_drafter: bool) -> Speculation {
    let source = if with_drafter { DraftSource::Replaced(guess) } else { DraftSource::Given(guess) };
    Speculation::new(source, steps)
}

/// Drafts that are right with a probability, each by itself.
fn guess(text: &[u32], acceptance: f64, seed: u64) -> Box<Guess> {
    let (text, mut random) = (text.to_vec(), Random::new(seed));
    Box::new(move |seen: &[u32], most: usize| {
        let follows = text[seen.len().min(text.len())..].iter().take(most);
        // Another token: 0 and 1 are in every vocabulary.
        follows.map(|token| if random.unit() < acceptance { *token } else { u32::from(*token == 0) }).collect()
    })
}

pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

impl Report {
    pub fn markdown(&self) -> String {
        let mut text = format!("without drafts: {:.1} tokens/s\n\n", self.plain);
        let one = self.verified.first().map_or(0.0, |(_, time)| *time);
        text += "| rows | verified, us | of one row | with drafts, us | a draft, us |\n|---:|---:|---:|---:|---:|\n";
        for (rows, time) in &self.verified {
            let drafted = self.drafted.iter().find(|(of, _)| of == rows).map(|(_, time)| *time);
            let step = drafted.map(|drafted| (drafted - time) / f64::from(rows - 1));
            let shown = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.0}"));
            let _ = writeln!(text, "| {rows} | {time:.0} | {:.2} | {} | {} |", time / one, shown(drafted), shown(step));
        }
        let whose = if self.drafter { "the drafter runs" } else { "no drafter" };
        let _ = writeln!(text, "\nAcceptance is forced; {whose}.\n");
        text += "| acceptance | drafts | tokens/s | to be expected | of undrafted | accepted | rounds |\n|---:|---:|---:|---:|---:|---:|---:|\n";
        for Forced { acceptance, steps, rate, expected, counts } in &self.forced {
            let steps = steps.map_or("auto".to_owned(), |steps| steps.to_string());
            let share = 100.0 * counts.accepted as f64 / (counts.drafted as f64).max(1.0);
            let _ = writeln!(
                text,
                "| {acceptance} | {steps} | {rate:.1} | {expected:.1} | {:.2} | {share:.0} % | {} |",
                expected / self.plain,
                counts.rounds
            );
        }
        text
    }

    pub fn json(&self) -> Result<String> {
        let times = |times: &[(u32, f64)]| -> Vec<_> {
            times.iter().map(|(rows, time)| json!({ "rows": rows, "microseconds": time })).collect()
        };
        let forced = |of: &Forced| {
            json!({
                "acceptance": of.acceptance,
                "forced": true,
                "drafts": of.steps,
                "tokens_per_second": of.rate,
                "expected_tokens_per_second": of.expected,
                "rounds": of.counts.rounds,
                "drafted": of.counts.drafted,
                "accepted": of.counts.accepted,
            })
        };
        let report = json!({
            "undrafted_tokens_per_second": self.plain,
            "drafter": self.drafter,
            "verification": times(&self.verified),
            "drafts_and_verification": times(&self.drafted),
            "forced_acceptance": self.forced.iter().map(forced).collect::<Vec<_>>(),
        });
        Ok(serde_json::to_string_pretty(&report)? + "\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_are_expected_to_have_what_they_have_on_average() {
        let mut counts = Counts::default();
        (counts.rounds_of[0], counts.rounds_of[2]) = (3, 4);
        assert_eq!(expected_tokens(&counts, 0.0), 7.0);
        assert_eq!(expected_tokens(&counts, 0.5), 3.0 + 4.0 * 1.75);
        assert_eq!(expected_tokens(&counts, 1.0), 3.0 + 4.0 * 3.0);
    }
}
