//! `gemma4c bench --ngram`: what drafts bring that are looked up in the text so far.
//!
//! Random weights never write what they wrote before, so the answer is forced: whatever the model picks, the next token
//! is that of a given text. Everything is computed as if the model had picked it. What it did pick is compared: at
//! every position it must be the same, however many rows were computed at once.

use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use gemma4c_models::tokenizer::{EncodeOptions, Tokenizer};
use gemma4c_runtime::{Counts, DraftSource, MOST_LOOKED_UP, Speculation};
use serde_json::json;

use super::super::plan_file::PlanArgs;
use super::drafts::{Bench, median};

/// What is measured.
pub struct Lookups<'a> {
    pub plan: &'a PlanArgs,
    /// A file whose text is prompt and answer.
    pub text: &'a Path,
    pub prompt: u32,
    pub generate: u32,
    pub repeat: usize,
}

/// Rates in tokens a second.
pub struct Report {
    plain: f64,
    rows: Vec<Row>,
}

struct Row {
    /// `None`: as many as pay.
    drafts: Option<u32>,
    rate: f64,
    counts: Counts,
}

pub fn run(of: &Lookups<'_>) -> Result<Report> {
    let session = of.plan.open()?;
    let text = std::fs::read_to_string(of.text).with_context(|| format!("cannot read {}", of.text.display()))?;
    let vocab = session.plan().vocab.as_ref().context("--ngram: the plan has no vocabulary to read a text with")?;
    let mut text = Tokenizer::new(vocab)?.encode(&text, EncodeOptions { add_bos: vocab.add_bos, parse_special: false });
    let (found, needed) = (text.len(), (of.prompt + of.generate) as usize);
    ensure!(
        found >= needed,
        "--ngram {}: {found} tokens, and {needed} are needed: {} of the prompt and {} after it",
        of.text.display(),
        of.prompt,
        of.generate
    );
    text.truncate(needed);
    let mut bench = Bench::with_prompt(session, text[..of.prompt as usize].to_vec(), of.generate)?;
    let most = bench.verified_drafts().min(MOST_LOOKED_UP);
    ensure!(most > 0, "--ngram: the plan verifies no drafts: compile it with --drafts {MOST_LOOKED_UP}");

    // Undrafted the model writes a text of its own, which takes as long.
    bench.generate(of.generate, None)?;
    let mut rates = Vec::new();
    for _ in 0..of.repeat {
        let (tokens, took) = bench.generate(of.generate, None)?;
        rates.push((tokens.len() - 1) as f64 / took.as_secs_f64());
    }
    let plain = median(rates);
    let (_, expected) = forced(&mut bench, &text, of, Some(0))?;
    let mut rows = Vec::new();
    let depths = [1, 3, 7, MOST_LOOKED_UP].into_iter().filter(|drafts| *drafts <= most);
    for drafts in depths.map(Some).chain([None]) {
        let (row, picks) = forced(&mut bench, &text, of, drafts)?;
        ensure!(picks == expected, "with {drafts:?} drafts the model picks other tokens than one by one");
        rows.push(row);
    }
    Ok(Report { plain, rows })
}

/// The text as the answer, with so many drafts a round, and what the model itself picked at each of its positions.
fn forced(bench: &mut Bench, text: &[u32], of: &Lookups<'_>, drafts: Option<u32>) -> Result<(Row, Vec<u32>)> {
    let (mut rates, mut counts) = (Vec::new(), Counts::default());
    for _ in 0..of.repeat {
        bench.sampler.recite(text);
        let mut speculation = Speculation::new(DraftSource::Lookup, drafts);
        let (tokens, took) = bench.generate(of.generate, Some(&mut speculation))?;
        ensure!(tokens == text[of.prompt as usize..], "drafts have changed the text");
        rates.push((tokens.len() - 1) as f64 / took.as_secs_f64());
        counts = speculation.counts;
    }
    Ok((Row { drafts, rate: median(rates), counts }, bench.sampler.own_picks().to_vec()))
}

impl Report {
    pub fn markdown(&self) -> String {
        let mut text = format!(
            "without drafts: {:.1} tokens/s\n\nThe answer is forced; drafts are looked up in it.\n\n",
            self.plain
        );
        text += "| drafts | drafted | accepted | rounds | tokens/s | of undrafted |\n|---:|---:|---:|---:|---:|---:|\n";
        for Row { drafts, rate, counts } in &self.rows {
            let drafts = drafts.map_or("auto".to_owned(), |drafts| drafts.to_string());
            let Counts { rounds, drafted, accepted, .. } = counts;
            let share = 100.0 * *accepted as f64 / (*drafted as f64).max(1.0);
            let times = rate / self.plain;
            let _ = writeln!(text, "| {drafts} | {drafted} | {share:.0} % | {rounds} | {rate:.1} | {times:.2} |");
        }
        text
    }

    pub fn json(&self) -> Result<String> {
        let row = |row: &Row| {
            json!({
                "drafts": row.drafts,
                "forced": true,
                "drafted": row.counts.drafted,
                "accepted": row.counts.accepted,
                "rounds": row.counts.rounds,
                "tokens_per_second": row.rate,
            })
        };
        let rows: Vec<_> = self.rows.iter().map(row).collect();
        let report = json!({ "undrafted_tokens_per_second": self.plain, "looked_up": rows });
        Ok(serde_json::to_string_pretty(&report)? + "\n")
    }
}
