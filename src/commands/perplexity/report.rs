//! The figures, as a table and as JSON.

use std::fmt::Write;
use std::path::Path;

use anyhow::Result;
use serde_json::json;

use super::read::Readers;
use super::score::{Mean, Scores, percentile, share};
use super::windows::Windows;

/// What was found, and of what.
pub struct Report<'a> {
    pub windows: &'a Windows,
    pub phase: &'a str,
    pub readers: &'a Readers,
    /// The other plan's file.
    pub against: Option<&'a Path>,
    pub scores: Scores,
}

impl Report<'_> {
    pub fn text(&self) -> String {
        let mut text = String::new();
        let mut row = |name: &str, value: String| {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{name:<15}{value}");
        };
        let longest = self.windows.list.iter().map(|window| window.tokens.len()).max().unwrap_or(0);
        let windows = self.windows.list.len();
        row("windows", format!("{windows}, the longest of {longest} tokens, from {}", self.windows.name));
        row("scored", format!("{} tokens by {} on {}", self.scores.nll.len(), self.phase, self.readers.this.device()));
        let nll = Mean::of(&self.scores.nll);
        row("nll", nll.to_string());
        row("perplexity", perplexity(nll));
        let (Some(path), Some(reader)) = (self.against, &self.readers.against) else { return text };
        let Some(against) = &self.scores.against else { return text };
        row("against", format!("{} on {}", path.display(), reader.device()));
        let nll = Mean::of(&against.nll);
        row("  nll", nll.to_string());
        row("  perplexity", perplexity(nll));
        row("  KL mean", Mean::of(&against.kl).to_string());
        row("  KL 99 %", format!("{:.6}", percentile(&against.kl, 0.99)));
        row("  same top", format!("{:.3} %", 100.0 * share(&against.same_top)));
        text
    }

    pub fn json(&self) -> Result<String> {
        let nll = Mean::of(&self.scores.nll);
        let mut report = json!({
            "nll": nll.mean,
            "error": nll.error,
            "tokens": self.scores.nll.len(),
            "perplexity": nll.mean.exp(),
        });
        if let Some(against) = &self.scores.against {
            report["kl_mean"] = Mean::of(&against.kl).mean.into();
            report["kl_p99"] = percentile(&against.kl, 0.99).into();
            report["same_top"] = share(&against.same_top).into();
            report["nll_against"] = Mean::of(&against.nll).mean.into();
        }
        Ok(serde_json::to_string_pretty(&report)? + "\n")
    }
}

/// exp(nll), and the error of nll carried over to it.
fn perplexity(nll: Mean) -> String {
    let perplexity = nll.mean.exp();
    nll.error.map_or(format!("{perplexity:.4}"), |error| format!("{perplexity:.4} ± {:.4}", perplexity * error))
}
