//! `gemma4c logits`: what the model computes, as numbers in a file.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use gemma4c_plan::{Kind, Program, RowCount};
use gemma4c_runtime::Asked;
use tempfile::NamedTempFile;

use super::tokenize::parse_ids;
use super::{Outcome, plan_file::PlanArgs};
use crate::{output, progress};

/// Compute logits for given tokens and write them to a safetensors file.
///
/// Key `logits`, f32 [rows, vocabulary]. Rows: one for the last token of the prompt and one for every token decoded after it;
/// with --all one for every token.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    plan: PlanArgs,

    /// Token ids, separated by commas or spaces.
    #[arg(long, value_name = "IDS")]
    tokens: String,

    /// A row for every token, not only for the last of the prompt.
    #[arg(long)]
    all: bool,

    /// Take only the first N tokens as the prompt and decode the rest one by one, as given.
    #[arg(long, value_name = "N")]
    prefill: Option<usize>,

    /// Feed the prompt in chunks of at most N tokens.
    #[arg(long, value_name = "N")]
    chunk: Option<u32>,

    /// Also write this intermediate value, under its own name. May be repeated; `gemma4c inspect --graph` lists the names.
    #[arg(long, value_name = "NAME")]
    tap: Vec<String>,

    /// Where to write the logits.
    #[arg(short, long, value_name = "OUT.safetensors")]
    output: PathBuf,
}

pub fn run(args: &Args) -> Result<Outcome> {
    let tokens = parse_ids(&args.tokens)?;
    let prefill = args.prefill.unwrap_or(tokens.len());
    ensure!(!tokens.is_empty(), "--tokens is empty");
    ensure!((1..=tokens.len()).contains(&prefill), "--prefill {prefill} is out of range: 1 to {}", tokens.len());
    ensure!(args.chunk != Some(0), "--chunk 0: at least 1 token is needed");
    let mut session = args.plan.open()?;
    let (prompt, decoded) = tokens.split_at(prefill);
    let skipped = if args.all { 0 } else { prefill - 1 };
    let shapes = shapes(&session.plan().program, &args.tap, tokens.len(), tokens.len() - skipped)?;
    let file = Tensors::create(&args.output, &shapes)?;

    // Positions of the taps' next rows; a row is counted where it was made, chunk after chunk.
    let mut next: BTreeMap<String, usize> = BTreeMap::new();
    let mut failed: Result<()> = Ok(());
    let bar = progress::tokens("computing", tokens.len() as u64);
    let asked = if args.all { Asked::All } else { Asked::Last };
    let mut write = |row: usize, values: &[f32]| {
        if failed.is_ok() {
            failed = file.write("logits", (row - skipped) * values.len(), values);
        }
    };
    let mut tap_failed: Result<()> = Ok(());
    let mut tap = |name: &str, width: usize, rows: &mut [f32]| {
        if args.tap.iter().any(|t| t == name) && tap_failed.is_ok() {
            let row = next.entry(name.to_string()).or_default();
            tap_failed = file.write(name, *row * width, rows);
            *row += rows.len() / width;
        }
    };
    match args.tap.is_empty() {
        true => session.feed(prompt, asked, args.chunk, &mut write)?,
        false => session.feed_tapped(prompt, asked, args.chunk, &mut tap, &mut write)?,
    }
    bar.set_position(prefill as u64);
    for (index, token) in decoded.iter().enumerate() {
        let row = prefill + index;
        match args.tap.is_empty() {
            true => session.decode(*token, |values| write(row, values))?,
            false => {
                let token = std::slice::from_ref(token);
                session.feed_tapped(token, Asked::Last, None, &mut tap, &mut |_, values| write(row, values))?;
            }
        }
        bar.set_position(row as u64 + 1);
    }
    tap_failed?;
    bar.finish_and_clear();
    failed?;
    file.finish()?;
    Ok(Outcome::Done)
}

/// Names and shapes of what will be written.
fn shapes(program: &Program, taps: &[String], tokens: usize, rows: usize) -> Result<Vec<(String, [usize; 2])>> {
    let output = &program.values[program.output as usize];
    let mut shapes = vec![("logits".to_string(), [rows, output.width as usize])];
    for tap in taps {
        let value = program.values.iter().find(|v| v.name == *tap && matches!(v.kind, Kind::Floats { .. }));
        let Some(value) = value else { bail!("the plan has no value called {tap} to tap") };
        let rows = if value.rows == RowCount::Chunk { tokens } else { rows };
        shapes.push((tap.clone(), [rows, value.width as usize]));
    }
    Ok(shapes)
}

/// A safetensors file of f32 tensors whose shapes are known beforehand, filled piece by piece: a row of logits is a megabyte,
/// so they are not collected in memory.
struct Tensors {
    file: NamedTempFile,
    path: PathBuf,
    /// Byte offset of each tensor.
    starts: BTreeMap<String, u64>,
}

impl Tensors {
    fn create(path: &Path, shapes: &[(String, [usize; 2])]) -> Result<Tensors> {
        let mut header = serde_json::Map::new();
        let (mut offset, mut starts) = (0u64, BTreeMap::new());
        for (name, shape) in shapes {
            let end = offset + 4 * shape[0] as u64 * shape[1] as u64;
            let entry = serde_json::json!({"dtype": "F32", "shape": shape, "data_offsets": [offset, end]});
            header.insert(name.clone(), entry);
            starts.insert(name.clone(), offset);
            offset = end;
        }
        let mut text = serde_json::to_vec(&header)?;
        text.resize(text.len().next_multiple_of(8), b' ');
        let data = 8 + text.len() as u64;
        let cannot_write = || format!("cannot write {}", path.display());
        let named = output::new_file(path)?;
        let file = named.as_file();
        file.set_len(data + offset).with_context(cannot_write)?;
        file.write_all_at(&(text.len() as u64).to_le_bytes(), 0).with_context(cannot_write)?;
        file.write_all_at(&text, 8).with_context(cannot_write)?;
        starts.values_mut().for_each(|start| *start += data);
        Ok(Tensors { file: named, path: path.into(), starts })
    }

    /// Writes values from element `first` of a tensor on.
    fn write(&self, name: &str, first: usize, values: &[f32]) -> Result<()> {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let start = self.starts.get(name).with_context(|| format!("no tensor {name}"))?;
        let written = self.file.as_file().write_all_at(&bytes, start + 4 * first as u64);
        written.with_context(|| format!("cannot write {}", self.path.display()))
    }
    /// Gives the file its name.
    fn finish(self) -> Result<()> {
        let named = self.file.persist(&self.path);
        named.map(drop).with_context(|| format!("cannot write {}", self.path.display()))
    }
}
