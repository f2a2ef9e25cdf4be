//! `gemma4c logits`: what the model computes, as numbers in a file.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result, bail, ensure};
use gemma4c_plan::{Kind, Plan, Program, RowCount, Tower};
use gemma4c_runtime::{Asked, Draft, RuntimeError, Session};
use tempfile::NamedTempFile;

use super::lora::LoraArgs;
use super::media::{Item, Media, MediaArgs, Sense};
use super::tokenize::parse_ids;
use super::{Outcome, plan_file::PlanArgs};
use crate::output::{self, OutputFile};
use crate::progress;

/// Compute logits for given tokens and write them to a safetensors file.
///
/// Key `logits`, f32 [rows, vocabulary]. Rows: one for the last token of the prompt and one for every token decoded
/// after it; with --all one for every token. With --draft the last token is not run: it is taken as the one just
/// chosen. The drafter's steps after it are `draft.tokens` i32 [steps], `draft.logits` [steps, vocabulary] and
/// `draft.h_next` [steps, width].
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

    /// Draft N tokens after the last one, which is not run.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    draft: Option<u32>,

    #[command(flatten)]
    lora: LoraArgs,

    // Media take the places that the tokens hold for them, a placeholder for each soft token.
    #[command(flatten)]
    media: MediaArgs,

    /// Also write this intermediate value, under its own name. May be repeated; `gemma4c inspect --graph` lists the
    /// names. Of picture I there are image.I.pixel_values, vision.I.projected and the stages between, such as
    /// vision.I.patch_embed, vision.I.hidden.LAYER and vision.I.pooled. Of the first sound there are audio.features,
    /// audio.projected and the stages between, such as audio.hidden.LAYER.
    #[arg(long, value_name = "NAME")]
    tap: Vec<String>,

    /// Where to write the logits.
    #[arg(short, long, value_name = "OUT.safetensors")]
    output: OutputFile,
}

pub fn run(args: &Args) -> Result<Outcome> {
    let mut tokens = parse_ids(&args.tokens)?;
    ensure!(args.draft.is_none() || tokens.len() >= 2, "--draft needs two tokens: one that is run and one that is not");
    let drafts = args.draft.and_then(|steps| Some((tokens.pop()?, steps)));
    let prefill = args.prefill.unwrap_or(tokens.len());
    ensure!(!tokens.is_empty(), "--tokens is empty");
    ensure!((1..=tokens.len()).contains(&prefill), "--prefill {prefill} is out of range: 1 to {}", tokens.len());
    ensure!(args.chunk != Some(0), "--chunk 0: at least 1 token is needed");
    let plan = args.plan.read()?;
    let adapters = args.lora.for_seat(&args.plan, &plan)?;
    let mut session = args.plan.open_read(plan)?;
    adapters.sit(&mut session)?;
    ensure!(drafts.is_none() || session.plan().drafter.is_some(), RuntimeError::NoDrafter);
    let (prompt, decoded) = tokens.split_at(prefill);
    let skipped = if args.all { 0 } else { prefill - 1 };
    let media = args.media.read(session.plan())?;
    let (of_media, of_text) = args.tap.iter().partition::<Vec<&String>, _>(|tap| Wanted::is_one(tap));
    let mut shapes = shapes(&session.plan().program, &of_text, tokens.len(), tokens.len() - skipped)?;
    let item_taps = of_media.iter().map(|tap| Wanted::find(session.plan(), &media, tap));
    let item_taps = item_taps.collect::<Result<Vec<_>>>()?;
    shapes.extend(item_taps.iter().map(|tap| Entry::floats(&tap.name, tap.shape)));
    if let Some((_, steps)) = drafts {
        shapes.extend(draft_shapes(session.plan(), steps as usize));
    }
    let file = Tensors::create(&args.output, &shapes)?;
    let mut seen: Result<()> = Ok(());
    let mut missed: Vec<&Wanted> = item_taps.iter().filter(|tap| !tap.value.is_empty()).collect();
    let mut show = |item: usize, value: &str, _: usize, rows: &mut [f32]| {
        for tap in item_taps.iter().filter(|tap| tap.item == item && tap.value == value) {
            missed.retain(|missed| missed.name != tap.name);
            if seen.is_ok() {
                seen = file.write(&tap.name, 0, rows);
            }
        }
    };
    let wants = item_taps.iter().any(|tap| !tap.value.is_empty());
    let soft = media.look(&mut session, if wants { Some(&mut show) } else { None })?;
    seen?;
    if let Some(tap) = missed.first() {
        bail!("--tap {}: no launch leaves it in memory; --device cpu shows every value", tap.name);
    }
    for tap in item_taps.iter().filter(|tap| tap.value.is_empty()) {
        file.write(&tap.name, 0, &pixel_values(&media.items[tap.item]))?;
    }
    session.set_soft(&tokens, &soft)?;

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
        if of_text.iter().any(|t| *t == name) && tap_failed.is_ok() {
            let row = next.entry(name.to_string()).or_default();
            tap_failed = file.write(name, *row * width, rows);
            *row += rows.len() / width;
        }
    };
    match of_text.is_empty() {
        true => session.feed(prompt, asked, args.chunk, &mut write)?,
        false => session.feed_tapped(prompt, asked, args.chunk, &mut tap, &mut write)?,
    }
    bar.set_position(prefill as u64);
    for (index, token) in decoded.iter().enumerate() {
        let row = prefill + index;
        match of_text.is_empty() {
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
    if let Some((token, steps)) = drafts {
        write_drafts(&mut session, token, steps, &file)?;
    }
    file.finish()?;
    Ok(Outcome::Done)
}

/// Names and shapes of what will be written.
fn shapes(program: &Program, taps: &[&String], tokens: usize, rows: usize) -> Result<Vec<Entry>> {
    let output = &program.values[program.output as usize];
    let mut shapes = vec![Entry::floats("logits", [rows, output.width as usize])];
    for tap in taps {
        let value = program.values.iter().find(|v| v.name == **tap && matches!(v.kind, Kind::Floats { .. }));
        let Some(value) = value else { bail!("the plan has no value called {tap} to tap") };
        let rows = if value.rows == RowCount::Chunk { tokens } else { rows };
        shapes.push(Entry::floats(tap, [rows, value.width as usize]));
    }
    Ok(shapes)
}

fn draft_shapes(plan: &Plan, steps: usize) -> [Entry; 3] {
    [
        Entry { name: "draft.tokens".into(), dtype: "I32", shape: vec![steps] },
        Entry::floats("draft.logits", [steps, plan.model.vocab_size as usize]),
        Entry::floats("draft.h_next", [steps, plan.model.hidden as usize]),
    ]
}

/// The drafter's steps after `token`, each fed what the one before chose.
fn write_drafts(session: &mut Session, token: u32, steps: u32, file: &Tensors) -> Result<()> {
    let (mut step, mut failed) = (0, Ok(()));
    session.draft(token, steps, &mut |_, _, _| {}, &mut |draft| {
        let Draft { token, logits, hidden } = draft;
        let write = || -> Result<()> {
            file.write_bytes("draft.tokens", step, &(token as i32).to_le_bytes())?;
            file.write("draft.logits", step * logits.len(), logits)?;
            file.write("draft.h_next", step * hidden.len(), hidden)
        };
        if failed.is_ok() {
            failed = write();
        }
        step += 1;
    })?;
    failed
}

/// A value of a medium that is to be written: of a tower, or the pixels that it reads.
struct Wanted {
    name: String,
    /// Its number among all media.
    item: usize,
    /// The value's name in the tower's program; empty for the pixels.
    value: String,
    shape: [usize; 2],
}

impl Wanted {
    fn is_one(tap: &str) -> bool {
        ["vision.", "image.", "audio."].iter().any(|start| tap.starts_with(start))
    }

    /// `vision.I.STAGE` and `image.I.pixel_values` of picture I; `audio.STAGE` of the first sound.
    fn find(plan: &Plan, media: &Media, tap: &str) -> Result<Wanted> {
        let unknown = || format!("the plan has no value called {tap} to tap");
        let (of, rest) = tap.split_once('.').with_context(unknown)?;
        let (sense, number, stage) = match of {
            "audio" => (Sense::Hearing, 0, rest),
            _ => {
                let (number, stage) = rest.split_once('.').with_context(unknown)?;
                (Sense::Sight, number.parse::<usize>().ok().with_context(unknown)?, stage)
            }
        };
        let Some((index, item)) = media.of(sense).nth(number) else {
            let what = if sense == Sense::Sight { "pictures" } else { "sounds" };
            bail!("--tap {tap}: there are {} {what}, counted from 0", media.of(sense).count())
        };
        let tower = &plan.towers[item.tower];
        let count = (item.columns * item.rows) as usize;
        let (value, shape) = match (of, stage) {
            ("image", "pixel_values") => (String::new(), [count, tower.medium.row_width() as usize]),
            ("vision" | "audio", stage) => {
                tower_value(tower, stage, count).with_context(|| format!("no {tap} to tap"))?
            }
            _ => bail!(unknown()),
        };
        Ok(Wanted { name: tap.into(), item: index, value, shape })
    }
}

/// A value of a tower by its stage's name or by its own, and its shape for a medium of so many patches or frames.
fn tower_value(tower: &Tower, name: &str, patches: usize) -> Option<(String, [usize; 2])> {
    let staged = tower.stages.iter().find(|stage| stage.name == name).map(|stage| stage.value as usize);
    let index = staged.or_else(|| tower.program.values.iter().position(|value| value.name == name))?;
    let value = &tower.program.values[index];
    let rows = match value.rows {
        RowCount::Soft => tower.medium.soft(patches as u64) as usize,
        RowCount::Halves => patches.div_ceil(2),
        _ => patches,
    };
    matches!(value.kind, Kind::Floats { .. }).then(|| (value.name.clone(), [rows, value.width as usize]))
}

/// The pixels of a picture's patches in the order of the reference: row, column, channel.
fn pixel_values(picture: &Item) -> Vec<f32> {
    let width = picture.values.len() / (picture.columns * picture.rows) as usize;
    let (patches, pixels) = (picture.values.chunks_exact(width), width / 3);
    let pixel = |patch: &[f32], at: usize| [0, 1, 2].map(|channel| patch[channel * pixels + at]);
    patches.flat_map(|patch| (0..pixels).flat_map(move |at| pixel(patch, at))).collect()
}

/// A tensor of the file.
struct Entry {
    name: String,
    /// Of four bytes.
    dtype: &'static str,
    shape: Vec<usize>,
}

impl Entry {
    fn floats(name: &str, shape: [usize; 2]) -> Entry {
        Entry { name: name.into(), dtype: "F32", shape: shape.to_vec() }
    }
}

/// A safetensors file of tensors whose shapes are known beforehand, filled piece by piece: a row of logits is a
/// megabyte, so they are not collected in memory.
struct Tensors {
    file: NamedTempFile,
    path: OutputFile,
    /// Byte offset of each tensor.
    starts: BTreeMap<String, u64>,
}

impl Tensors {
    fn create(path: &OutputFile, shapes: &[Entry]) -> Result<Tensors> {
        let mut header = serde_json::Map::new();
        let (mut offset, mut starts) = (0u64, BTreeMap::new());
        for Entry { name, dtype, shape } in shapes {
            let end = offset + 4 * shape.iter().map(|n| *n as u64).product::<u64>();
            let entry = serde_json::json!({"dtype": dtype, "shape": shape, "data_offsets": [offset, end]});
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
        Ok(Tensors { file: named, path: path.clone(), starts })
    }

    /// Writes values from element `first` of a tensor on.
    fn write(&self, name: &str, first: usize, values: &[f32]) -> Result<()> {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.write_bytes(name, first, &bytes)
    }

    fn write_bytes(&self, name: &str, first: usize, bytes: &[u8]) -> Result<()> {
        let start = self.starts.get(name).with_context(|| format!("no tensor {name}"))?;
        let written = self.file.as_file().write_all_at(bytes, start + 4 * first as u64);
        written.with_context(|| format!("cannot write {}", self.path.display()))
    }
    /// Gives the file its name.
    fn finish(self) -> Result<()> {
        let named = self.file.persist(&self.path);
        named.map(drop).with_context(|| format!("cannot write {}", self.path.display()))
    }
}
