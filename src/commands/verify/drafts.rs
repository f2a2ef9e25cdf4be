//! A device's drafts against the CPU's: the hidden state and the scores of every step, each behind its own reading of
//! the same tokens.
//!
//! Steps are compared as long as both have drafted the same tokens, since a step begins with the one before it. Of
//! scores those are compared that both have: a head that looks at some groups of tokens may choose another of two that
//! are equally close. The limit is measured as that of the text is: the CPU drafts once more, with noise on what a
//! device rounds. A drafter's launches are not judged one by one.

use std::collections::HashSet;

use anyhow::Result;
use gemma4c_plan::{Op, Plan};
use gemma4c_runtime::{Asked, Draft, Session};

use super::compare::rms;
use super::drift::disturb;
use super::limits;
use super::meaning::Meaning;
use crate::random::Random;

/// What a step left.
struct Step {
    token: u32,
    scores: Vec<f32>,
    hidden: Vec<f32>,
}

/// How far drafts are from the CPU's.
pub struct Drafts {
    /// Steps that were compared, of so many.
    compared: usize,
    steps: usize,
    /// Relative rms of the worst step's hidden state and scores, and what either may be.
    hidden: (f64, f64),
    scores: (f64, f64),
}

impl Drafts {
    /// `device` has read the tokens; `cpu` opens a session that has read none.
    pub fn compare(
        device: &mut Session,
        mut cpu: impl FnMut() -> Result<Session>,
        tokens: &[u32],
        meaning: &Meaning<'_>,
        tolerance: f64,
    ) -> Result<Drafts> {
        let steps = meaning.program.drafter.as_ref().map_or(0, |drafter| drafter.ends.len() as u32);
        // Any token may be the one that was chosen.
        let next = tokens.first().copied().unwrap_or(0);
        let ours = drafted(device, next, steps, &mut |_, _, _| {})?;
        let mut still = cpu()?;
        still.feed(tokens, Asked::Last, None, |_, _| {})?;
        let expected = drafted(&mut still, next, steps, &mut |_, _, _| {})?;
        drop(still);

        let noise = limits::noise(meaning.is_exact);
        let of_text: HashSet<&str> = meaning.rounded().map(|value| meaning.name(value)).collect();
        let of_drafter = rounded(meaning.plan, meaning.is_exact);
        let mut random = Random::new(0);
        let mut noisy = |names: &HashSet<&str>, name: &str, width: usize, rows: &mut [f32]| {
            if names.contains(name) {
                rows.chunks_exact_mut(width).for_each(|row| disturb(row, noise, &mut random));
            }
        };
        let mut moved = cpu()?;
        let tap = &mut |name: &str, width: usize, rows: &mut [f32]| noisy(&of_text, name, width, rows);
        moved.feed_tapped(tokens, Asked::Last, None, tap, &mut |_, _| {})?;
        let tap = &mut |name: &str, width: usize, rows: &mut [f32]| noisy(&of_drafter, name, width, rows);
        let moved = drafted(&mut moved, next, steps, tap)?;

        let layers = meaning.depths().count() as u32;
        let limit = |drift: f64| tolerance * limits::together(layers, 1, meaning.is_exact, drift);
        let (compared, hidden, scores) = apart(&ours, &expected);
        let (_, hidden_drift, scores_drift) = apart(&moved, &expected);
        Ok(Drafts {
            compared,
            steps: expected.len(),
            hidden: (hidden, limit(hidden_drift)),
            scores: (scores, limit(scores_drift)),
        })
    }

    pub fn is_ok(&self) -> bool {
        let within = |(error, limit): (f64, f64)| error <= limit;
        self.compared > 0 && within(self.hidden) && within(self.scores)
    }

    pub fn text(&self) -> String {
        let of = |(error, limit): (f64, f64)| format!("{:.3} % of at most {:.3} %", 100.0 * error, 100.0 * limit);
        format!(
            "drafts: {} of {} steps had the CPU's token before them; relative rms error of hidden states {}, of scores {}\n",
            self.compared,
            self.steps,
            of(self.hidden),
            of(self.scores)
        )
    }
}

fn drafted(
    session: &mut Session,
    token: u32,
    steps: u32,
    tap: &mut (dyn FnMut(&str, usize, &mut [f32]) + Send),
) -> Result<Vec<Step>> {
    let mut all = Vec::new();
    session.draft(token, steps, tap, &mut |Draft { token, logits, hidden }| {
        all.push(Step { token, scores: logits.to_vec(), hidden: hidden.to_vec() });
    })?;
    Ok(all)
}

/// The drafter's products whose activations are rounded, and its attentions.
fn rounded(plan: &Plan, is_exact: bool) -> HashSet<&str> {
    let Some(drafter) = &plan.drafter else { return HashSet::new() };
    let rounds = |op: Op| match op {
        Op::MatMul { .. } => !is_exact,
        Op::AttentionBefore { .. } => true,
        _ => false,
    };
    let steps = drafter.program.steps.iter().filter(|step| rounds(step.op));
    steps.map(|step| drafter.program.values[step.output as usize].name.as_str()).collect()
}

/// Steps up to the first whose beginning differs, and the worst relative rms among them: of hidden states, and of
/// scores.
fn apart(ours: &[Step], expected: &[Step]) -> (usize, f64, f64) {
    let (mut compared, mut hidden, mut scores) = (0, 0.0f64, 0.0f64);
    for (ours, expected) in ours.iter().zip(expected) {
        compared += 1;
        hidden = hidden.max(relative(ours.hidden.iter().copied().zip(expected.hidden.iter().copied())));
        let [least, expected_least] =
            [&ours.scores, &expected.scores].map(|scores| scores.iter().copied().fold(f32::INFINITY, f32::min));
        let both = ours.scores.iter().copied().zip(expected.scores.iter().copied());
        scores = scores.max(relative(both.filter(|(a, b)| *a != least && *b != expected_least)));
        if ours.token != expected.token {
            break;
        }
    }
    (compared, hidden, scores)
}

/// The rms of differences as a part of the rms of what is expected. What is no number is infinitely far off.
fn relative(pairs: impl Iterator<Item = (f32, f32)>) -> f64 {
    let (differences, expected): (Vec<f32>, Vec<f32>) = pairs.map(|(a, b)| (a - b, b)).unzip();
    let part = rms(&differences) / rms(&expected).max(1e-30);
    if part.is_finite() { part } else { f64::INFINITY }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(token: u32, scores: &[f32], hidden: &[f32]) -> Step {
        Step { token, scores: scores.to_vec(), hidden: hidden.to_vec() }
    }

    #[test]
    fn steps_behind_another_token_are_not_compared() {
        let expected = [step(1, &[0.0, 2.0, 3.0], &[1.0, 1.0]), step(2, &[0.0, 2.0, 3.0], &[1.0, 1.0])];
        let same = [step(1, &[0.0, 2.0, 3.0], &[1.0, 1.0]), step(2, &[0.0, 2.0, 3.0], &[1.1, 0.9])];
        let (compared, hidden, scores) = apart(&same, &expected);
        assert!(compared == 2 && (hidden - 0.1).abs() < 1e-6 && scores == 0.0);
        let other = [step(0, &[-1.0, 2.0, 3.3], &[1.0, 1.0]), step(2, &[9.0; 3], &[9.0; 2])];
        let (compared, hidden, scores) = apart(&other, &expected);
        assert!(compared == 1 && hidden == 0.0 && scores > 0.05 && scores < 0.1, "{scores}");
        let broken = [step(0, &[f32::NAN; 3], &[f32::NAN; 2])];
        assert_eq!(apart(&broken, &expected).1, f64::INFINITY);
    }
}
