//! `gemma4c verify --golden`: logits against those that another program computed from the same weights.
//!
//! The file's prompt is read and its continuation decoded, each token as given whatever this machine would choose.
//! Unlike a comparison with our own CPU this one also finds what the CPU has wrong. It looks at logits alone: which
//! step is at fault, the comparison with the CPU says.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use gemma4c_plan::cuda::KvType;
use gemma4c_runtime::{Asked, Session, argmax};
use safetensors::{Dtype, SafeTensors};

use super::super::Outcome;
use super::super::lora::LoraArgs;
use super::super::plan_file::PlanArgs;
use crate::output::print;
use crate::{files, progress};

/// What such a file may have at most: it is read into memory.
const LARGEST: u64 = 4 << 30;
const ENOUGH: usize = 20;

#[derive(clap::Args)]
#[command(next_help_heading = "Against another program's logits")]
pub struct GoldenArgs {
    /// Compare logits with those of this file, not with the CPU.
    ///
    /// It has `tokens` (integers) and `logits` (f32, a row for each of them); `greedy.tokens`, if it is there, is
    /// decoded after them, and a row of `greedy.logits` is what each of these was chosen from. Rows in which
    /// `router_gap.LAYER` or `greedy.router_gap` is below --clear-gap count only in the rms over all rows: their
    /// experts may change places.
    #[arg(
        long,
        value_name = "FILE.safetensors",
        conflicts_with_all = ["tokens", "decode", "phase", "tolerance", "worst", "seed"]
    )]
    pub golden: Option<PathBuf>,

    /// Take only the first N tokens as the prompt and decode the rest one by one [default: as many as `tokens` has].
    #[arg(long, value_name = "N", requires = "golden")]
    prefill: Option<usize>,

    /// Feed the prompt in chunks of at most N tokens.
    #[arg(long, value_name = "N", requires = "golden")]
    chunk: Option<u32>,

    /// Most that all logits may be off by, as the root of their mean square [default: 0.15; on the CPU 0.001; more with
    /// keys and values in 8 bits]
    #[arg(long, value_name = "X", requires = "golden")]
    limit_rms: Option<f64>,

    /// The same for any row alone [default: 0.25; on the CPU 0.001; more with keys and values in 8 bits]
    #[arg(long, value_name = "X", requires = "golden")]
    limit_row: Option<f64>,

    /// Most that any logit may be off by [default: 1; on the CPU 0.001; more with keys and values in 8 bits]
    #[arg(long, value_name = "X", requires = "golden")]
    limit_max: Option<f64>,

    /// The best token must be the same where the reference's two best logits are further apart than this [default: 0.6;
    /// on the CPU 0.002]
    #[arg(long, value_name = "X", requires = "golden")]
    clear_margin: Option<f64>,

    /// A router's choice is certain above this difference of log-probabilities [default: 0.2; on the CPU 0]
    #[arg(long, value_name = "X", requires = "golden")]
    clear_gap: Option<f64>,
}

/// What the logits may differ by.
struct Limits {
    rms: f64,
    row: f64,
    max: f64,
    margin: f64,
    gap: f64,
    /// Of the rows, how many must have the reference's best token, whatever its margin, where there are enough to
    /// count.
    least_same: f64,
}

impl Limits {
    /// By what is rounded: activations to 8 bits, which a CPU does not, and keys and values. Those of 8-bit keys and
    /// values are about twice what was measured on small random models, which amplify errors; trained ones are off by
    /// half as much.
    fn usual(is_cpu: bool, kv: KvType) -> Limits {
        let limits = |rms, row, max, margin| Limits { rms, row, max, margin, gap: 0.2, least_same: 0.9 };
        match (is_cpu, kv) {
            (true, KvType::Q8_0) => limits(0.08, 0.2, 0.7, 0.15),
            (true, KvType::Fp8) => Limits { least_same: 0.8, ..limits(0.35, 0.6, 2.2, 0.8) },
            (true, _) => Limits { gap: 0.0, ..limits(1e-3, 1e-3, 1e-3, 2e-3) },
            (false, KvType::Fp8) => Limits { least_same: 0.8, ..limits(0.4, 0.65, 2.4, 1.0) },
            (false, _) => limits(0.15, 0.25, 1.0, 0.6),
        }
    }

    fn new(args: &GoldenArgs, is_cpu: bool, kv: KvType) -> Result<Limits> {
        let limit = |name: &str, given: Option<f64>, usual: f64| -> Result<f64> {
            let limit = given.unwrap_or(usual);
            ensure!(limit >= 0.0 && limit.is_finite(), "{name} {limit}: a number from 0 on is needed");
            Ok(limit)
        };
        let usual = Limits::usual(is_cpu, kv);
        Ok(Limits {
            rms: limit("--limit-rms", args.limit_rms, usual.rms)?,
            row: limit("--limit-row", args.limit_row, usual.row)?,
            max: limit("--limit-max", args.limit_max, usual.max)?,
            margin: limit("--clear-margin", args.clear_margin, usual.margin)?,
            gap: limit("--clear-gap", args.clear_gap, usual.gap)?,
            least_same: usual.least_same,
        })
    }
}

pub fn run(plan_args: &PlanArgs, lora: &LoraArgs, args: &GoldenArgs, path: &Path) -> Result<Outcome> {
    ensure!(args.chunk != Some(0), "--chunk 0: at least 1 token is needed");
    let bytes = read(path)?;
    let reference = Reference::new(&bytes).with_context(|| path.display().to_string())?;
    let tokens = reference.sequence();
    let prefill = args.prefill.unwrap_or(reference.tokens.len());
    ensure!((1..=tokens.len()).contains(&prefill), "--prefill {prefill} is out of range: 1 to {}", tokens.len());
    let plan = plan_args.read()?;
    let (found, expected) = (reference.vocabulary, plan.model.vocab_size as usize);
    ensure!(found == expected, "{}: its logits are of {found} tokens, the plan's of {expected}", path.display());
    let adapter = lora.for_seat(plan_args, &plan)?;
    let mut session = plan_args.open_read(plan)?;
    adapter.sit(&mut session)?;
    let limits = Limits::new(args, session.backend().is_none(), session.plan().program.kv)?;

    let mut comparison = Comparison::new(&limits, prefill);
    feed(&mut session, &tokens, prefill, args.chunk, |at, row| comparison.add(at, row, &reference))?;
    print(&format!(
        "{} on {} against {}: {prefill} tokens read, {} decoded\n",
        session.plan().model.name.as_deref().unwrap_or("the model"),
        session.device_name(),
        path.display(),
        tokens.len() - prefill
    ))?;
    print(&comparison.text())?;
    Ok(if comparison.faults().is_empty() { Outcome::Done } else { Outcome::CheckFailed })
}

/// Calls `logits` with the row after each token.
fn feed(
    session: &mut Session,
    tokens: &[u32],
    prefill: usize,
    chunk: Option<u32>,
    mut logits: impl FnMut(usize, &[f32]),
) -> Result<()> {
    let bar = progress::tokens("computing", tokens.len() as u64);
    let (prompt, decoded) = tokens.split_at(prefill);
    session.feed(prompt, Asked::All, chunk, |at, row| {
        logits(at, row);
        bar.set_position(at as u64 + 1);
    })?;
    for (at, token) in (prefill..).zip(decoded) {
        session.decode(*token, |row| logits(at, row))?;
        bar.set_position(at as u64 + 1);
    }
    bar.finish_and_clear();
    Ok(())
}

fn read(path: &Path) -> Result<Vec<u8>> {
    let bytes = files::regular(path)?.len();
    ensure!(bytes <= LARGEST, "{}: {bytes} bytes are more than a file of reference logits has", path.display());
    std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

/// What another program computed.
struct Reference<'f> {
    tokens: Vec<u32>,
    /// The continuation, without its last token: nobody was asked what follows it.
    continuation: Vec<u32>,
    vocabulary: usize,
    /// Rows after each of `tokens`, and after each of `continuation`.
    logits: &'f [u8],
    greedy_logits: &'f [u8],
    /// How clear the routers' choices were, for each row; none where the model has no routers.
    gaps: Vec<f32>,
}

impl<'f> Reference<'f> {
    fn new(bytes: &'f [u8]) -> Result<Reference<'f>> {
        let file = SafeTensors::deserialize(bytes).context("not a safetensors file")?;
        let tokens = integers(&file, "tokens")?.context("it has no tensor `tokens`")?;
        ensure!(!tokens.is_empty(), "`tokens` is empty");
        let (shape, logits) = floats(&file, "logits")?.context("it has no tensor `logits`")?;
        let [rows, vocabulary] = shape[..] else {
            bail!("`logits` has the shape {shape:?}: rows of logits are needed")
        };
        ensure!(rows == tokens.len(), "{rows} rows of `logits` for {} `tokens`", tokens.len());
        ensure!(vocabulary > 0, "`logits` has no columns");

        let mut greedy = integers(&file, "greedy.tokens")?.unwrap_or_default();
        let mut greedy_logits = &[][..];
        if !greedy.is_empty() {
            let (shape, all) =
                floats(&file, "greedy.logits")?.context("it has `greedy.tokens`, but no `greedy.logits`")?;
            let wanted = [greedy.len(), vocabulary];
            ensure!(shape == wanted, "`greedy.logits` has the shape {shape:?}, not {wanted:?}");
            // The first was chosen from the prompt's last row.
            greedy_logits = &all[vocabulary * 4..];
            greedy.pop();
        }
        let gaps = gaps(&file, tokens.len(), greedy.len())?;
        Ok(Reference { tokens, continuation: greedy, vocabulary, logits, greedy_logits, gaps })
    }

    fn sequence(&self) -> Vec<u32> {
        [&self.tokens[..], &self.continuation].concat()
    }

    /// The logits after token `at` of the sequence.
    fn row(&self, at: usize) -> Vec<f32> {
        let (rows, at) = match at.checked_sub(self.tokens.len()) {
            None => (self.logits, at),
            Some(at) => (self.greedy_logits, at),
        };
        let bytes = self.vocabulary * 4;
        values(&rows[at * bytes..(at + 1) * bytes])
    }
}

/// The least gap of any layer, for each row.
fn gaps(file: &SafeTensors<'_>, rows: usize, decoded: usize) -> Result<Vec<f32>> {
    let mut least = vec![f32::INFINITY; rows + decoded];
    let names: Vec<&str> = file.names().into_iter().filter(|name| name.starts_with("router_gap.")).collect();
    for (name, first, count) in
        names.into_iter().map(|name| (name, 0, rows)).chain([("greedy.router_gap", rows - 1, decoded + 1)])
    {
        let Some((shape, bytes)) = floats(file, name)? else { continue };
        ensure!(shape == [count], "`{name}` has the shape {shape:?}, not [{count}]");
        for (least, gap) in least[first..].iter_mut().zip(values(bytes)) {
            *least = least.min(gap);
        }
    }
    Ok(least)
}

/// A tensor of f32, if it is there: its shape and its bytes.
fn floats<'f>(file: &SafeTensors<'f>, name: &str) -> Result<Option<(Vec<usize>, &'f [u8])>> {
    let Ok(view) = file.tensor(name) else { return Ok(None) };
    ensure!(view.dtype() == Dtype::F32, "`{name}` is {:?}, not F32", view.dtype());
    Ok(Some((view.shape().to_vec(), view.data())))
}

/// A row of token ids, if it is there.
fn integers(file: &SafeTensors<'_>, name: &str) -> Result<Option<Vec<u32>>> {
    let Ok(view) = file.tensor(name) else { return Ok(None) };
    ensure!(view.shape().len() == 1, "`{name}` has the shape {:?}: one row of ids is needed", view.shape());
    let ids: Vec<i64> = match view.dtype() {
        Dtype::I32 => view.data().as_chunks().0.iter().map(|b| i32::from_le_bytes(*b).into()).collect(),
        Dtype::I64 => view.data().as_chunks().0.iter().map(|b| i64::from_le_bytes(*b)).collect(),
        other => bail!("`{name}` is {other:?}, not I32 or I64"),
    };
    let id = |id: i64| u32::try_from(id).with_context(|| format!("`{name}` has {id} in it, which is no token"));
    ids.into_iter().map(id).collect::<Result<_>>().map(Some)
}

fn values(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// Rows of logits against those they should be.
struct Comparison<'l> {
    limits: &'l Limits,
    prefill: usize,
    rows: usize,
    values: usize,
    squares: f64,
    /// Of rows whose routing is clear: the worst rms, the largest difference.
    worst_row: f64,
    largest: f64,
    left_out: usize,
    /// Rows with the reference's best token, and the widest margin of those with another.
    same: usize,
    overturned: f64,
    /// What is wrong with single rows.
    bad_rows: Vec<String>,
}

impl<'l> Comparison<'l> {
    fn new(limits: &'l Limits, prefill: usize) -> Comparison<'l> {
        Comparison {
            limits,
            prefill,
            rows: 0,
            values: 0,
            squares: 0.0,
            worst_row: 0.0,
            largest: 0.0,
            left_out: 0,
            same: 0,
            overturned: 0.0,
            bad_rows: Vec::new(),
        }
    }

    fn add(&mut self, at: usize, found: &[f32], reference: &Reference<'_>) {
        let expected = reference.row(at);
        let difference = |(e, f): (&f32, &f32)| match (*e as f64 - *f as f64).abs() {
            difference if difference.is_finite() => difference,
            _ => f64::INFINITY,
        };
        let differences = || expected.iter().zip(found).map(difference);
        let squares: f64 = differences().map(|d| d * d).sum();
        let (rms, largest) = ((squares / expected.len() as f64).sqrt(), differences().fold(0.0, f64::max));
        (self.rows, self.values, self.squares) = (self.rows + 1, self.values + expected.len(), self.squares + squares);

        let (best, ours) = (argmax(&expected), argmax(found));
        let margin = margin(&expected);
        self.same += usize::from(best == ours);
        if (reference.gaps[at] as f64) < self.limits.gap {
            self.left_out += 1;
            return;
        }
        (self.worst_row, self.largest) = (self.worst_row.max(rms), self.largest.max(largest));
        let mut faults = Vec::new();
        if best != ours {
            self.overturned = self.overturned.max(margin);
            if margin > self.limits.margin {
                let name = |token: Option<u32>| token.map_or("none".into(), |token| token.to_string());
                faults.push(format!("the best token is {}, not {}, by {margin:.3}", name(ours), name(best)));
            }
        }
        if rms > self.limits.row {
            faults.push(format!("rms {rms:.3e}"));
        }
        if largest > self.limits.max {
            faults.push(format!("a logit is off by {largest:.3e}"));
        }
        if !faults.is_empty() {
            let how = if at < self.prefill { "read" } else { "decoded" };
            self.bad_rows.push(format!("row {at}, {how}: {}", faults.join(", ")));
        }
    }

    fn rms(&self) -> f64 {
        (self.squares / self.values.max(1) as f64).sqrt()
    }

    /// What is beyond its limit.
    fn faults(&self) -> Vec<String> {
        let mut faults = self.bad_rows.clone();
        if self.rms() > self.limits.rms {
            faults.push(format!("all rows: rms {:.3e}", self.rms()));
        }
        if self.rows >= ENOUGH && (self.same as f64) < self.limits.least_same * self.rows as f64 {
            faults.push(format!("all rows: {} of {} have the same best token", self.same, self.rows));
        }
        faults
    }

    /// The figures in one line, then what is wrong, then the verdict.
    fn text(&self) -> String {
        let Limits { rms, row, max, margin, .. } = self.limits;
        let mut text = format!(
            "{} rows: rms {:.3e} of {rms}, worst row {:.3e} of {row}, largest {:.3e} of {max}, same best {}, \
             widest overturned {:.3} of {margin}",
            self.rows,
            self.rms(),
            self.worst_row,
            self.largest,
            self.same,
            self.overturned
        );
        if self.left_out > 0 {
            let _ = write!(text, ", {} with unclear routing", self.left_out);
        }
        text.push('\n');
        let faults = self.faults();
        for fault in &faults {
            let _ = writeln!(text, "  {fault}");
        }
        text + if faults.is_empty() { "ok\n" } else { "FAILED\n" }
    }
}

/// How much larger the largest value is than the next.
fn margin(row: &[f32]) -> f64 {
    let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
    for value in row {
        if *value > first {
            (first, second) = (*value, first);
        } else {
            second = second.max(*value);
        }
    }
    first as f64 - second as f64
}
