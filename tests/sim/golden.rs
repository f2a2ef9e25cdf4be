//! GPU plans against the golden files, without a GPU: fusion, schedule, memory and kernels together, in the simulator.
//!
//! The limits are those the golden data's own description gives for engines with 8-bit activations, with bf16
//! activations, and in f32. With `GEMMA4C_EXHAUSTIVE=1` every row of every fixture is compared, which takes long.

use std::io::Write;
use std::path::Path;
use std::time::Instant;

use crate::common::lowered::{self, Options};
use crate::common::{Tensors, golden};
use crate::simulated::{Distance, Feed, each, exhaustive, on_simulator};
use gemma4c_plan::cuda::KvType;
use gemma4c_runtime::{Asked, Session, argmax};

/// What the golden data's description allows.
pub struct Limits {
    /// Over everything.
    pub rms: f64,
    pub row_rms: f64,
    pub largest: f32,
    /// Where the two best golden logits are further apart, the best one must be ours too.
    pub clear_margin: f32,
}

pub const INT8: Limits = Limits { rms: 0.15, row_rms: 0.25, largest: 1.0, clear_margin: 0.6 };
/// With massive channels; a row alone has no limit there.
const MASSIVE: Limits = Limits { rms: 0.2, row_rms: f64::INFINITY, largest: 1.6, clear_margin: 0.6 };
const BF16: Limits = Limits { rms: 0.03, row_rms: 0.06, largest: 0.2, clear_margin: 0.2 };
/// Weights of 4 and 8 bits are rounded too, which those of the fixture in bf16 are not.
const BF16_WEIGHTS: Limits = Limits { rms: 0.05, row_rms: 0.08, largest: 0.25, clear_margin: 0.25 };
pub const F32: Limits = Limits { rms: 1e-3, row_rms: 1e-3, largest: 1e-3, clear_margin: 2e-3 };
/// An expert can change places where a router is closer to another choice than this.
const CLEAR_GAP: f32 = 0.2;

/// Compares the rows of one fixture. `feed` takes the prompt's length and returns the lengths of its pieces, which of
/// their rows are asked for, and how many tokens there are in all: of the prompt, then of its golden continuation.
fn check(
    folder: &Path,
    name: &str,
    options: &Options,
    feed: impl Fn(usize) -> (Vec<usize>, Asked, usize),
    limits: &Limits,
) -> Result<(), String> {
    let file = Tensors::read(&folder.join(format!("{name}.golden.safetensors")));
    check_model(name, &golden::model(folder, name), &file, options, feed, limits)
}

/// The same of a model and a golden file that are named otherwise.
pub fn check_model(
    name: &str,
    model: &Path,
    file: &Tensors,
    options: &Options,
    feed: impl Fn(usize) -> (Vec<usize>, Asked, usize),
    limits: &Limits,
) -> Result<(), String> {
    let mut session = on_simulator(lowered::plan(model, options), model);
    check_session(name, &mut session, file, options, feed, limits)
}

/// The same of a session that was made for these options.
pub fn check_session(
    name: &str,
    session: &mut Session,
    file: &Tensors,
    options: &Options,
    feed: impl Fn(usize) -> (Vec<usize>, Asked, usize),
    limits: &Limits,
) -> Result<(), String> {
    let started = Instant::now();
    let prompt = file.ids("tokens");
    let tokens = [&prompt[..], &file.ids("greedy.tokens")].concat();
    let (pieces, asked, count) = feed(prompt.len());
    let ours = Feed { tokens: &tokens[..count], pieces, asked }.rows(session);

    let mut all = Distance::default();
    let (mut worst, mut largest, mut agreed) = (0.0f64, 0.0f32, 0);
    for (at, row) in &ours {
        let (expected, gap) = golden_row(file, *at, prompt.len());
        let distance = Distance::of(row, expected);
        all = all.and(distance);
        let what = format!("{name} without {:?}: row {at}", options.disabled);
        let (best, margin) = best_and_margin(expected);
        agreed += usize::from(argmax(row) == Some(best));
        if gap < CLEAR_GAP {
            continue;
        }
        (worst, largest) = (worst.max(distance.rms()), largest.max(distance.largest));
        let close = distance.rms() <= limits.row_rms && distance.largest <= limits.largest;
        if !close || margin > limits.clear_margin && argmax(row) != Some(best) {
            let (rms, largest, token) = (distance.rms(), distance.largest, argmax(row));
            return Err(format!("{what}: rms {rms}, off by {largest}, best {token:?}, expected {best} by {margin}"));
        }
    }
    let report = format!(
        "{name:<19} without {:?}: {} rows, rms {:.5}, worst row {worst:.5}, largest {largest:.5}, same best {agreed}, {:.0} s",
        options.disabled,
        ours.len(),
        all.rms(),
        started.elapsed().as_secs_f32()
    );
    writeln!(std::io::stderr(), "{report}").expect("stderr takes a message");
    let enough_agree = agreed * 10 >= ours.len() * 9 || ours.len() < 20;
    if all.rms() <= limits.rms && enough_agree { Ok(()) } else { Err(report) }
}

/// Pieces of these lengths, and the rest in as few as may be.
fn pieces(tokens: usize, first: &[usize], chunk: usize) -> Vec<usize> {
    let left = tokens - first.iter().sum::<usize>();
    let whole = std::iter::repeat_n(chunk, left / chunk);
    let rest = Some(left % chunk).filter(|rest| *rest > 0);
    first.iter().copied().chain(whole).chain(rest).collect()
}

/// The golden logits after a token, and how clear its routers' choices were.
fn golden_row(golden: &Tensors, at: usize, prompt: usize) -> (&[f32], f32) {
    let layers = (0..).take_while(|layer| golden.find(&format!("hidden.{layer}")).is_some());
    let gaps = layers.filter_map(|layer| golden.find(&format!("router_gap.{layer}")));
    match at.checked_sub(prompt - 1) {
        None | Some(0) => (golden.get("logits").row(at), gaps.map(|gap| gap.values[at]).fold(f32::INFINITY, f32::min)),
        Some(greedy) => {
            let gap = golden.find("greedy.router_gap").map_or(f32::INFINITY, |gap| gap.values[greedy]);
            (golden.get("greedy.logits").row(greedy), gap)
        }
    }
}

/// The index of the largest value, and how much larger it is than the next.
fn best_and_margin(row: &[f32]) -> (u32, f32) {
    let best = argmax(row).expect("a row has values");
    let others = row.iter().enumerate().filter(|(i, _)| *i != best as usize);
    let second = others.map(|(_, v)| *v).fold(f32::NEG_INFINITY, f32::max);
    (best, row[best as usize] - second)
}

/// The fixtures of Q8_0, which stand for those of other types where the type is not what is looked at. Where they are
/// not there, those that are.
fn of_eight_bits(names: &[&'static str]) -> Vec<&'static str> {
    let there = golden::of(names);
    let of_eight_bits: Vec<_> = there.iter().copied().filter(|name| name.ends_with("q8_0")).collect();
    if exhaustive() || of_eight_bits.is_empty() { there } else { of_eight_bits }
}

/// The whole prompt in chunks, so that it goes round the pages of window and chunk, then a few tokens one by one. Rings
/// know nothing of the weights' type: one fixture of each kind stands for all in that, and of the others the prompt's
/// first tokens show what their types do.
#[test]
fn every_fixture_agrees_as_it_is_compiled() {
    let folder = golden::some();
    let options = Options { context: Some(128), chunk: Some(24), ..Options::default() };
    each(&golden::of(&golden::TEXT), |name| {
        let limits = if name.ends_with("bf16") { &BF16 } else { &INT8 };
        let feed = |prompt: usize| match exhaustive() {
            true => (pieces(prompt, &[], 24), Asked::All, prompt + 31),
            // A whole chunk, a short one, a single row, and what is left.
            false if name.ends_with("tiny_q8_0") => (pieces(prompt, &[24, 9, 1], 24), Asked::Last, prompt + 2),
            false => (vec![9], Asked::Last, 11),
        };
        check(&folder, name, &options, feed, limits)
    });
}

/// Every type of low-bit files and every form of checkpoints: a chunk, and rows one by one.
#[test]
fn every_type_and_form_agrees_as_it_is_compiled() {
    let folder = golden::some();
    let options = Options { context: Some(128), chunk: Some(8), ..Options::default() };
    let limits = |name: &str| if name.ends_with("bf16") { BF16 } else { INT8 };
    each(&golden::of(&[&golden::FORMATS[..], &golden::CHECKPOINTS].concat()), |name| {
        let feed = |prompt: usize| match exhaustive() {
            true => (pieces(prompt, &[], 8), Asked::All, prompt + 7),
            false => (vec![8], Asked::Last, 10),
        };
        check(&folder, name, &options, feed, &limits(name))
    });
}

/// Decoded rows with bf16 operands.
#[test]
fn rows_of_16_bits_agree_as_they_are_compiled() {
    let folder = golden::some();
    let options = Options { context: Some(128), chunk: Some(4), ..Options::default() }.with(&["gemm"]);
    each(&of_eight_bits(&golden::TEXT), |name| {
        let feed = |prompt: usize| match exhaustive() {
            true => (pieces(prompt, &[], 4), Asked::All, prompt + 31),
            false => (vec![4, 1], Asked::Last, 8),
        };
        check(&folder, name, &options, feed, &BF16_WEIGHTS)
    });
}

/// A massive channel takes the whole scale of a block of int8, and its 31 neighbours are rounded to zero: a product
/// that reads the residual itself, not a norm of it, needs more bits. Decoded rows show it first.
#[test]
fn massive_channels_agree_as_they_are_compiled() {
    let folder = golden::some();
    let options = Options { context: Some(128), chunk: Some(4), ..Options::default() };
    each(&of_eight_bits(&golden::MASSIVE), |name| {
        let feed = |prompt: usize| match exhaustive() {
            true => (pieces(prompt, &[], 4), Asked::All, prompt + 31),
            false => (vec![4, 3], Asked::Last, 10),
        };
        check(&folder, name, &options, feed, &MASSIVE)
    });
}

/// Trained weights give activations of other statistics than random ones do. Few rows are fed: these models are the
/// largest here, and their windows of 128 are longer than a simulator has time for.
#[test]
fn trained_models_agree_as_they_are_compiled() {
    let folder = golden::some();
    let options = Options { context: Some(256), chunk: Some(4), ..Options::default() };
    each(&of_eight_bits(&golden::TRAINED), |name| {
        let feed = |prompt: usize| match exhaustive() {
            true => (pieces(prompt, &[], 4), Asked::All, prompt + 31),
            false => (vec![4], Asked::Last, 6),
        };
        check(&folder, name, &options, feed, &INT8)
    });
}

/// Without rounding of activations, and with keys and values in f32, what is left is the order of sums. Chunks are
/// small, since a phase's rows are computed whether they are there or not. One fixture of each kind: what other types
/// of weights mean, the CPU says for all of them (`tests/it/golden.rs`), and the simulator as they are compiled.
#[test]
fn a_fixture_of_each_kind_agrees_in_f32() {
    let folder = golden::some();
    let options =
        Options { context: Some(128), chunk: Some(4), kv: KvType::F32, ..Options::default() }.without(&["int8"]);
    each(&of_eight_bits(&[&golden::TEXT[..], &golden::MASSIVE].concat()), |name| {
        let feed = |prompt: usize| match exhaustive() {
            true => (pieces(prompt, &[], 4), Asked::All, prompt + 31),
            // Beyond the window and round its pages.
            false if golden::TEXT.contains(name) => (vec![4, 1, 3], Asked::All, 18),
            false => (vec![4, 3], Asked::Last, 9),
        };
        check(&folder, name, &options, feed, &F32)
    });
}
