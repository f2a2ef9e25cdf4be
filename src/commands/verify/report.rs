//! What was found, for a person.

use std::fmt::Write;

use gemma4c_plan::cuda::{CudaProgram, Kernel};

use super::compare::PEAK;
use super::limits;
use super::meaning::{Content, Meaning, is_decode_of_several};
use super::numbers::Fault;
use super::walk::{Finding, Outcome, Together};
use crate::report::labels::labels;

/// Everything that was compared.
pub struct Report<'a> {
    pub meaning: &'a Meaning<'a>,
    /// Phases whose steps were run alone, and over how many passes.
    pub phases: Vec<(usize, usize)>,
    pub findings: Vec<Finding>,
    pub together: Vec<Together>,
    /// Positions after which the device picked a token that its logits do not say: largest, sampled, right.
    pub wrong_picks: Vec<(u32, [u32; 2], u32)>,
    /// Pairs of phases that read the same prompt, and whether their logits are the same to the bit.
    pub compared_phases: Vec<(usize, usize, bool)>,
    /// Passes that were run again as they run otherwise, and the positions of those that gave other logits.
    pub replayed: usize,
    pub unlike: Vec<u32>,
}

impl<'a> Report<'a> {
    /// Nothing yet.
    pub fn new(meaning: &'a Meaning<'a>) -> Report<'a> {
        Report {
            meaning,
            phases: Vec::new(),
            findings: Vec::new(),
            together: Vec::new(),
            wrong_picks: Vec::new(),
            compared_phases: Vec::new(),
            replayed: 0,
            unlike: Vec::new(),
        }
    }

    /// What a pass through a phase gave, step by step.
    pub fn add_findings(&mut self, phase: usize, findings: Vec<Finding>) {
        match self.phases.iter_mut().find(|(known, _)| *known == phase) {
            Some((_, passes)) => *passes += 1,
            None => self.phases.push((phase, 1)),
        }
        self.findings.extend(findings);
    }

    fn program(&self) -> &CudaProgram {
        self.meaning.program
    }

    fn first_bad(&self) -> Option<&Finding> {
        self.findings.iter().find(|finding| finding.is_bad())
    }

    fn deep_errors(&self) -> impl Iterator<Item = (&Together, String, f64, f64)> {
        self.together.iter().flat_map(|ran| {
            let layers = ran.layers.iter().map(|(layer, error, limit)| (format!("layer {layer}"), *error, *limit));
            let (error, limit) = ran.logits_error;
            let logits = ("the logits".to_string(), error, limit);
            layers.chain([logits]).map(move |(what, error, limit)| (ran, what, error, limit))
        })
    }

    pub fn is_ok(&self) -> bool {
        self.first_bad().is_none()
            && self.deep_errors().all(|(_, _, error, limit)| error <= limit)
            && self.wrong_picks.is_empty()
            && self.unlike.is_empty()
    }

    /// All of it; `worst` nodes of those that came out well.
    pub fn text(&self, worst: usize) -> String {
        let mut text = String::from("each step alone, on the CPU's values: the worst row's relative rms error\n");
        text += &self.phases_table();
        text += "\n";
        text += &self.kernels_table();
        if worst > 0 {
            let _ = write!(text, "\nthe {worst} values nearest to their limits\n{}", self.worst_table(worst));
        }
        let _ = writeln!(
            text,
            "\nall steps together: relative rms error over all rows; limits by what {} of noise on every product does on the CPU",
            percent(limits::noise(self.meaning.is_exact))
        );
        text += &self.together_table();
        text += "\n";
        text += &self.ends();
        if let Some(bad) = self.first_bad() {
            text += "\n";
            text += &self.describe(bad);
        }
        text
    }

    /// Whether a step's result was there after it.
    fn ran(&self, phase: usize, step: usize) -> bool {
        let mut of_step = self.findings.iter().filter(|finding| (finding.phase, finding.step) == (phase, step));
        of_step.all(|finding| !matches!(finding.outcome, Outcome::Fault(Fault::NotWritten(_))))
    }

    fn phases_table(&self) -> String {
        let mut rows = vec![row(["phase", "passes", "launches", "values", "error", "limit", "at"])];
        for &(phase, passes) in &self.phases {
            let steps = self.program().phases[phase].steps.len();
            let ran = (0..steps).filter(|step| self.ran(phase, *step)).count();
            let findings: Vec<&Finding> = self.findings.iter().filter(|finding| finding.phase == phase).collect();
            let name = self.program().phases[phase].name.clone();
            let launches = format!("{ran} of {steps}");
            let [error, limit, at] = self.largest(&findings);
            rows.push(vec![name, passes.to_string(), launches, findings.len().to_string(), error, limit, at]);
        }
        columns(&rows)
    }

    fn kernels_table(&self) -> String {
        let kernels: &[Kernel] = &self.program().kernels;
        let mut rows = vec![row(["kernel", "launches", "values", "error", "limit", "at"])];
        for (index, label) in labels(kernels).into_iter().enumerate() {
            let runs = |finding: &&Finding| self.kernel_of(finding.phase, finding.step) == index;
            let findings: Vec<&Finding> = self.findings.iter().filter(runs).collect();
            let planned: Vec<(usize, usize)> = (self.phases.iter())
                .flat_map(|(phase, passes)| std::iter::repeat_n(*phase, *passes))
                .flat_map(|phase| (0..self.program().phases[phase].steps.len()).map(move |step| (phase, step)))
                .filter(|(phase, step)| self.kernel_of(*phase, *step) == index)
                .collect();
            if planned.is_empty() {
                continue;
            }
            let ran = planned.iter().filter(|(phase, step)| self.ran(*phase, *step)).count();
            let [error, limit, at] = self.largest(&findings);
            let launches = format!("{ran} of {}", planned.len());
            rows.push(vec![label, launches, findings.len().to_string(), error, limit, at]);
        }
        columns(&rows)
    }

    fn kernel_of(&self, phase: usize, step: usize) -> usize {
        self.program().phases[phase].steps[step].launch.kernel as usize
    }

    /// The finding that takes most of its limit: its error, its limit, its value.
    fn largest(&self, findings: &[&Finding]) -> [String; 3] {
        match findings.iter().max_by(|a, b| a.share().total_cmp(&b.share())) {
            Some(finding) => [error(finding), percent(finding.limit), self.meaning.name(finding.value).into()],
            None => Default::default(),
        }
    }

    fn worst_table(&self, count: usize) -> String {
        let mut sorted: Vec<&Finding> = self.findings.iter().collect();
        sorted.sort_by(|a, b| b.share().total_cmp(&a.share()));
        let mut rows = vec![row(["value", "as", "phase", "step", "position", "error", "limit"])];
        for finding in sorted.iter().take(count) {
            rows.push(vec![
                self.meaning.name(finding.value).into(),
                content(finding.content).into(),
                self.program().phases[finding.phase].name.clone(),
                finding.step.to_string(),
                finding.position.to_string(),
                error(finding),
                percent(finding.limit),
            ]);
        }
        columns(&rows)
    }

    /// A row a pass: the first layer, the middle and the last one, and the logits.
    fn together_table(&self) -> String {
        let mut rows = vec![row([
            "phase",
            "position",
            "first layer",
            "limit",
            "middle",
            "limit",
            "last",
            "limit",
            "logits",
            "limit",
        ])];
        for ran in &self.together {
            let last = ran.layers.len().saturating_sub(1);
            let layers = [0, last / 2, last].into_iter().filter_map(|at| ran.layers.get(at));
            let errors = layers.map(|(_, error, limit)| (*error, *limit)).chain([ran.logits_error]);
            let mut cells = vec![self.program().phases[ran.phase].name.clone(), ran.position.to_string()];
            cells.extend(errors.flat_map(|(error, limit)| [percent(error), percent(limit)]));
            rows.push(cells);
        }
        let mut text = columns(&rows);
        let rerouted: usize = self.together.iter().map(|ran| ran.rerouted).sum();
        if rerouted > 0 {
            let _ = writeln!(text, "  {rerouted} rows went to other experts than the CPU's, here or there");
        }
        for (ran, what, error, limit) in self.deep_errors().filter(|(.., error, limit)| error > limit) {
            let phase = &self.program().phases[ran.phase].name;
            let (position, error, limit) = (ran.position, percent(error), percent(limit));
            let _ = writeln!(text, "  OFF: {what} of {phase} at position {position} by {error}, limit {limit}");
        }
        text
    }

    /// What follows the launches: picks and replays.
    fn ends(&self) -> String {
        let mut text = String::new();
        let swaps = self.findings.iter().filter_map(|finding| match &finding.outcome {
            Outcome::Experts(rerouted) => Some(rerouted.rows.len()),
            _ => None,
        });
        let swapped: usize = swaps.sum();
        if swapped > 0 {
            let _ = writeln!(text, "routing   {swapped} rows chose another expert with nearly the same score");
        }
        match &self.wrong_picks[..] {
            [] => text += "picks     the largest logit's, after every pass\n",
            wrong => {
                for (position, [largest, sampled], right) in wrong {
                    let _ = writeln!(
                        text,
                        "picks     OFF at position {position}: token {largest} as the largest, {sampled} as the only candidate, expected {right}"
                    );
                }
            }
        }
        for (one, other, same) in &self.compared_phases {
            let [one, other] = [one, other].map(|phase| self.program().phases[*phase].name.as_str());
            let how = if *same { "the same bits as" } else { "other bits than" };
            let _ = writeln!(text, "phases    {one} gives {how} {other}");
        }
        let several = self.program().phases.iter().filter(|phase| is_decode_of_several(phase));
        if let Some(most) = several.map(|phase| phase.rows).max() {
            let _ = writeln!(
                text,
                "phases    decode of 2 to {most} rows is not run here: --company compares it with decode of one, to the bit"
            );
        }
        match &self.unlike[..] {
            [] => {
                let _ = writeln!(text, "replay    {} passes as they run otherwise: the same bits", self.replayed);
            }
            unlike => {
                let _ = writeln!(text, "replay    OFF: other logits than launch by launch at positions {unlike:?}");
            }
        }
        text
    }

    fn describe(&self, bad: &Finding) -> String {
        let (program, name) = (self.program(), self.meaning.name(bad.value));
        let phase = &program.phases[bad.phase];
        let step = &phase.steps[bad.step];
        let count = self.findings.iter().filter(|finding| finding.is_bad()).count();
        let nodes: Vec<&str> = step.nodes.iter().map(|node| self.meaning.name(*node)).collect();
        let position = |row: usize| bad.position as usize + row;
        let found = match &bad.outcome {
            Outcome::Numbers(d) => format!(
                "row {} (position {}), column {}: expected {}, found {}; off by {}, limit {}",
                d.row,
                position(d.row),
                d.column,
                d.expected,
                d.found,
                percent(d.peak),
                percent(PEAK * bad.limit)
            ),
            Outcome::Experts(r) => format!(
                "row {} (position {}), choice {}: expected expert {}, found {}",
                r.row,
                position(r.row),
                r.choice,
                r.expected,
                r.found
            ),
            Outcome::Fault(Fault::NotWritten(index)) => {
                let (row, column) = (index / self.meaning.width(bad.value), index % self.meaning.width(bad.value));
                format!("row {row} (position {}), column {column}: nothing was written", position(row))
            }
            Outcome::Fault(Fault::Sum { group, expected, found }) => {
                format!("group {group}: its codes add up to {expected}, its sum is {found}")
            }
        };
        format!(
            "the first bad node is {name}, as {} of step {} of {}; {count} of {} values are off\n{}",
            content(bad.content),
            bad.step,
            phase.name,
            self.findings.len(),
            columns(&[
                row(["error", &format!("{}, limit {}", error(bad), percent(bad.limit))]),
                row(["found", &found]),
                row(["kernel", &program.kernels[step.launch.kernel as usize].instance]),
                row(["meaning", &nodes.join(", ")]),
            ])
        )
    }
}

fn content(content: Content) -> &'static str {
    match content {
        Content::Numbers(numbers) => numbers.name(),
        Content::Experts => "experts",
    }
}

fn error(finding: &Finding) -> String {
    match &finding.outcome {
        Outcome::Numbers(difference) => percent(difference.rms),
        Outcome::Experts(rerouted) => percent(rerouted.regret),
        Outcome::Fault(Fault::NotWritten(_)) => "not written".into(),
        Outcome::Fault(Fault::Sum { .. }) => "wrong sum".into(),
    }
}

/// `0.53 %`, and `1.2e-5 %` where that would be nothing.
fn percent(part: f64) -> String {
    match part * 100.0 {
        part if part == 0.0 || part.is_infinite() => format!("{part} %"),
        part if part < 0.01 => format!("{part:.1e} %"),
        part => format!("{part:.2} %"),
    }
}

fn row<const N: usize>(cells: [&str; N]) -> Vec<String> {
    cells.map(String::from).into()
}

/// Cells under each other, two spaces in and apart.
fn columns(rows: &[Vec<String>]) -> String {
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |at: usize| rows.iter().filter_map(|row| row.get(at)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..count).map(|at| width(at).unwrap_or(0)).collect();
    let mut text = String::new();
    for row in rows {
        let line: String = row.iter().zip(&widths).map(|(cell, width)| format!("  {cell:<width$}")).collect();
        text += line.trim_end();
        text += "\n";
    }
    text
}
