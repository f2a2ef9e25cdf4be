//! `gemma4c kernels --bench`: how fast the launches of plans stream their weights, beside the fastest this GPU can read
//! at all, and how fast they multiply many rows.
//!
//! What is timed are the steps of the five sizes' plans, with the instance, grid and arguments they have there
//! (`timed.rs`). A launch finds its weights in memory, not in L2: each takes another copy, and all copies together are
//! far larger than any L2. A product of many rows that is one matrix's, and not experts', has cuBLASLt beside it over
//! bf16 weights, where the machine has that library. Launches are replayed as a graph, so that no host stands between
//! them. Both in one run: only ratios taken in one run mean something on another GPU.

use std::collections::HashMap;

use anyhow::{Result, ensure};
use gemma4c_blocks::DType;
use gemma4c_codegen::arch::Arch;
use gemma4c_codegen::kernels::probe;
use gemma4c_dsl::harness::{Random, Scalar};
use gemma4c_runtime::cuda::{CublasLt, CublasLtError, Shape};

use super::Selection;
use super::gpu::{Bound, Chain, Gpu, Held};
use super::timed::{Content, Given, Timed, steps};
use crate::commands::Outcome;
use crate::launched::Plan;
use crate::launched::recipes::{self, Recipe};
use crate::output::print;

/// Bytes the ceiling is measured over.
const PROBED: usize = 2 << 30;
/// Bytes of all copies of one launch's weights together, at least: several times the largest L2.
const ROTATED: u64 = 600 << 20;
/// Launches in one graph, at least.
const LAUNCHES: usize = 64;
/// Phases whose products of many rows are timed.
const PREFILLS: [&str; 2] = ["prefill 512", "prefill 2048"];

pub fn run(selection: &Selection) -> Result<Outcome> {
    let gpu = Gpu::open()?;
    eprintln!("{gpu}");
    let names: Vec<&str> = selection.kernels().map(|kernel| kernel.name).collect();
    let of_products = selection.families.iter().filter(|(family, _)| family.name == "product");
    let products: Vec<&str> = of_products.flat_map(|(_, kernels)| kernels).map(|kernel| kernel.name).collect();
    let mut ceiling = None;
    let mut heading = Heading::None;
    for recipe in decode_recipes(gpu.arch) {
        let plan = Plan::lower(recipe)?;
        for timed in steps(&plan, &plan.lowered.program.phases[0], |kernel| names.contains(&kernel)) {
            let timed = timed?;
            let ceiling = match ceiling {
                Some(known) => known,
                None => *ceiling.insert(read_ceiling(&gpu)?),
            };
            heading.print_once(Heading::Streamed { ceiling })?;
            print_streamed(&timed, &time(&gpu, &timed)?, ceiling)?;
        }
    }
    let mut yardstick = Yardstick::default();
    for recipe in if products.is_empty() { Vec::new() } else { prefill_recipes(gpu.arch) } {
        let plan = Plan::lower(recipe)?;
        for phase in plan.lowered.program.phases.iter().filter(|phase| PREFILLS.contains(&phase.name.as_str())) {
            for timed in steps(&plan, phase, |kernel| products.contains(&kernel)) {
                let timed = timed?;
                // What only rounds or copies multiplies nothing.
                if timed.flops == 0 {
                    continue;
                }
                heading.print_once(Heading::Multiplied)?;
                let microseconds = time(&gpu, &timed)?.alone;
                let (work, speed) = (timed.flops as f64 / 1e9, timed.flops as f64 / microseconds / 1e6);
                let Timed { shape, types, how, .. } = &timed;
                let beside = yardstick.beside(&gpu, timed.product, speed)?;
                print(&format!(
                    "| {shape} | {types}, {how} | {work:.1} | {microseconds:.1} | {speed:.0} | {beside} |\n"
                ))?;
            }
        }
    }
    ensure!(heading != Heading::None, "no step of a decode plan and no product of prefill launches what was asked for");
    Ok(Outcome::Done)
}

/// The plans whose decode steps are timed.
pub fn decode_recipes(arch: Arch) -> Vec<Recipe> {
    recipes::of_types(arch, &[DType::Q8_0, DType::Q4_0])
}

/// The plans whose prefill products are timed: over the weights as they are kept, and over bf16 copies where the GPU
/// can have them.
pub fn prefill_recipes(arch: Arch) -> Vec<Recipe> {
    let usual = recipes::of_types(arch, &[DType::Q8_0]);
    let with_copies = usual.iter().filter(|_| arch.has_wgmma()).cloned().map(Recipe::with_copies);
    usual.iter().cloned().chain(with_copies).collect()
}

/// What cuBLASLt reaches: the library, opened when it is first asked, and its answers by shape.
#[derive(Default)]
struct Yardstick {
    library: Option<Result<CublasLt, CublasLtError>>,
    known: HashMap<Shape, f64>,
}

impl Yardstick {
    /// Two cells: its TFLOP/s, and our share of that; or why there is none.
    fn beside(&mut self, gpu: &Gpu, product: Option<Shape>, speed: f64) -> Result<String> {
        let Some(shape) = product else { return Ok("experts | ".to_owned()) };
        let library = match self.library.get_or_insert_with(|| CublasLt::open(&gpu.device, gpu.toolchain_folder())) {
            Ok(library) => library,
            Err(why) => return Ok(format!("{why} | ")),
        };
        let theirs = match self.known.get(&shape) {
            Some(known) => *known,
            None => *self.known.entry(shape).or_insert(library_speed(gpu, library, shape)?),
        };
        Ok(format!("{theirs:.0} | {:.0} %", 100.0 * speed / theirs))
    }
}

/// TFLOP/s of a product by cuBLASLt, over weights that lie in memory, not in L2.
fn library_speed(gpu: &Gpu, library: &CublasLt, shape: Shape) -> Result<f64> {
    let copies = ROTATED.div_ceil(shape.weight_bytes()).max(2);
    let bytes = Content::Halves.bytes(shape.weight_bytes() as usize, 0);
    let weights = (0..copies).map(|_| gpu.device.upload(&bytes)).collect::<Result<Vec<_>, _>>()?;
    let x = gpu.device.upload(&Content::Halves.bytes(shape.row_bytes() as usize, 1))?;
    let microseconds = library.microseconds(&gpu.device, shape, &x, &weights)?;
    Ok(shape.flops() as f64 / microseconds / 1e6)
}

/// The head of the table that is being printed.
#[derive(PartialEq)]
enum Heading {
    None,
    /// GB/s at best.
    Streamed {
        ceiling: f64,
    },
    Multiplied,
}

impl Heading {
    fn print_once(&mut self, wanted: Heading) -> Result<()> {
        if *self == wanted {
            return Ok(());
        }
        match wanted {
            Heading::None => {}
            Heading::Streamed { ceiling } => {
                print(&format!("\nread-only sum over {} GiB: {ceiling:.0} GB/s\n\n", PROBED >> 30))?;
                print("| shape | type | MB | us | GB/s | of the ceiling | us, chained | of the ceiling |\n")?;
                print("|---|---|---:|---:|---:|---:|---:|---:|\n")?;
            }
            Heading::Multiplied => {
                print("\n| shape | weights, tile | GFLOP | us | TFLOP/s | cuBLASLt, bf16 | of it |\n")?;
                print("|---|---|---:|---:|---:|---:|---:|\n")?;
            }
        }
        *self = wanted;
        Ok(())
    }
}

/// A row of a launch that does little but read what it must.
fn print_streamed(timed: &Timed, times: &Times, ceiling: f64) -> Result<()> {
    let speed = |microseconds: f64| timed.bytes as f64 / microseconds / 1000.0;
    let share = |microseconds: f64| format!("{:.0} %", 100.0 * speed(microseconds) / ceiling);
    let chained = times.chained.map_or("| | |".to_owned(), |us| format!("| {us:.2} | {} |", share(us)));
    let (megabytes, alone) = (timed.bytes as f64 / 1e6, times.alone);
    print(&format!(
        "| {} | {} | {megabytes:.1} | {alone:.2} | {:.0} | {} {chained}\n",
        timed.shape,
        timed.types,
        speed(alone),
        share(alone),
    ))
}

/// GB/s of the best of several ways to read much more than L2 holds.
fn read_ceiling(gpu: &Gpu) -> Result<f64> {
    let mut random = Random::new(1);
    let mut words = Vec::with_capacity(PROBED);
    while words.len() < PROBED {
        words.extend(random.bits().to_le_bytes());
    }
    let words = gpu.upload(&words)?;
    let groups = (PROBED / 16) as u32;
    let mut best: f64 = 0.0;
    for instance in probe::tried()? {
        for blocks in [528, 1056, 2112, 8192, 32768] {
            let folded = gpu.upload(&vec![0; (blocks * instance.block() * 4) as usize])?;
            let arguments = vec![words.clone(), folded, Held::Scalar(Scalar::U32(groups))];
            let launches = [gpu.bind(&instance, [blocks, 1, 1], arguments)?];
            // A kernel is loaded at its first launch, which a recording must not meet.
            launches[0].launch(false)?;
            let microseconds = Chain::new(gpu, &launches, 2, false)?.microseconds(gpu)?;
            best = best.max(PROBED as f64 / microseconds / 1000.0);
        }
    }
    Ok(best)
}

/// Microseconds of a launch.
struct Times {
    /// After its predecessor has ended.
    alone: f64,
    /// Started before its predecessor ends, where kernel and GPU can.
    chained: Option<f64>,
}

fn time(gpu: &Gpu, timed: &Timed) -> Result<Times> {
    let copies = ROTATED.div_ceil(timed.bytes.max(1 << 20)).max(2) as usize;
    let mut shared: Vec<Option<Held>> = vec![None; timed.arguments.len()];
    let mut launches: Vec<Bound> = Vec::new();
    for copy in 0..copies {
        let mut held = Vec::new();
        for (given, shared) in timed.arguments.iter().zip(&mut shared) {
            held.push(match (given, &shared) {
                (Given::Scalar(scalar), _) => Held::Scalar(*scalar),
                (Given::Buffer { is_rotated: false, .. }, Some(known)) => known.clone(),
                (Given::Buffer { bytes, content, .. }, _) => {
                    shared.insert(gpu.upload(&content.bytes(*bytes, copy))?).clone()
                }
            });
        }
        launches.push(gpu.bind(&timed.instance, timed.grid, held)?);
    }
    launches[0].launch(false)?;
    let count = LAUNCHES.next_multiple_of(copies);
    let alone = Chain::new(gpu, &launches, count, false)?.microseconds(gpu)?;
    let chained = match launches[0].may_depend {
        true => Some(Chain::new(gpu, &launches, count, true)?.microseconds(gpu)?),
        false => None,
    };
    Ok(Times { alone, chained })
}
