//! `gemma4c kernels --bench`: the bandwidth at which kernels read their weights, beside the highest this GPU reaches, and how
//! fast they multiply many rows.
//!
//! A launch finds its weights in memory, not in L2: each takes another copy, and all copies together are far larger than any
//! L2. Launches are replayed as a graph, so that no host stands between them. Both in one run: only ratios taken in one run
//! mean something on another GPU.

use anyhow::Result;
use gemma4c_codegen::cases::{Bench, benches};
use gemma4c_codegen::kernels::probe;
use gemma4c_dsl::harness::{Case, Random, Scalar};
use gemma4c_dsl::{Access, ParamKind};

use super::Selection;
use super::gpu::{Bound, Chain, Gpu, Held};
use crate::commands::Outcome;
use crate::output::print;

/// Bytes the ceiling is measured over.
const PROBED: usize = 2 << 30;
/// Bytes of all copies of one kernel's weights together, at least: several times the largest L2.
const ROTATED: usize = 600 << 20;
/// Launches in one graph, at least.
const LAUNCHES: usize = 64;

pub fn run(selection: &Selection) -> Result<Outcome> {
    let gpu = Gpu::open()?;
    eprintln!("{gpu}");
    let mut ceiling = None;
    for (family, _) in &selection.families {
        let mut heading = Heading::None;
        for Bench { shape, weights, case, flops } in benches(family.name) {
            if !gpu.can_run(&case.instance) {
                continue;
            }
            let bytes = streamed_bytes(&case)?;
            match flops {
                Some(flops) => {
                    heading.print_once(Heading::Multiplied)?;
                    let microseconds = time(&gpu, &case, bytes)?.alone;
                    let speed = flops as f64 / microseconds / 1e6;
                    print(&format!(
                        "| {shape} | {weights} | {:.1} | {microseconds:.1} | {speed:.0} |\n",
                        flops as f64 / 1e9
                    ))?;
                }
                None => {
                    let ceiling = match ceiling {
                        Some(known) => known,
                        None => *ceiling.insert(read_ceiling(&gpu)?),
                    };
                    heading.print_once(Heading::Streamed { ceiling })?;
                    print_streamed(&shape, &weights, bytes, &time(&gpu, &case, bytes)?, ceiling)?;
                }
            }
        }
    }
    Ok(Outcome::Done)
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
                print("\n| shape | weights, tile | GFLOP | us | TFLOP/s |\n|---|---|---:|---:|---:|\n")?;
            }
        }
        *self = wanted;
        Ok(())
    }
}

/// A row of a launch that does little but read its weights.
fn print_streamed(shape: &str, weights: &str, bytes: usize, times: &Times, ceiling: f64) -> Result<()> {
    let speed = |microseconds: f64| bytes as f64 / microseconds / 1000.0;
    let share = |microseconds: f64| format!("{:.0} %", 100.0 * speed(microseconds) / ceiling);
    let chained = times.chained.map_or("| | |".to_owned(), |us| format!("| {us:.2} | {} |", share(us)));
    let (megabytes, alone) = (bytes as f64 / 1e6, times.alone);
    print(&format!(
        "| {shape} | {weights} | {megabytes:.1} | {alone:.2} | {:.0} | {} {chained}\n",
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
    for (_, instance) in probe::instances() {
        for blocks in [528, 1056, 2112, 8192, 32768] {
            let folded = gpu.upload(&vec![0; (blocks * instance.block() * 4) as usize])?;
            let arguments = vec![words.clone(), folded, Held::Scalar(Scalar::U32(groups))];
            let launches = [gpu.bind(&instance, [blocks, 1, 1], arguments)?];
            // The driver loads a kernel at its first launch, which must not happen during a graph capture.
            launches[0].launch(false)?;
            let microseconds = Chain::record(gpu, &launches, 2, false)?.microseconds(gpu)?;
            best = best.max(PROBED as f64 / microseconds / 1000.0);
        }
    }
    Ok(best)
}

/// Bytes of the weights, each of which a launch reads once.
fn streamed_bytes(case: &Case) -> Result<usize> {
    let is_weights = |name: &str| {
        case.instance.params().iter().any(|param| {
            param.name == name && matches!(param.def.kind, ParamKind::Memory { access: Access::Weights, .. })
        })
    };
    let bytes: usize =
        case.buffers.iter().filter(|(name, _)| is_weights(name)).map(|(_, data)| data.bytes().len()).sum();
    anyhow::ensure!(bytes > 0, "{}: no weights", case.name);
    Ok(bytes)
}

/// Microseconds of a launch.
struct Times {
    /// After its predecessor has ended.
    alone: f64,
    /// Started before its predecessor ends, where kernel and GPU can.
    chained: Option<f64>,
}

fn time(gpu: &Gpu, case: &Case, bytes: usize) -> Result<Times> {
    let copies = ROTATED.div_ceil(bytes).max(2);
    let launches: Vec<Bound> = (0..copies).map(|_| gpu.bind_case(case)).collect::<Result<_>>()?;
    launches[0].launch(false)?;
    let count = LAUNCHES.next_multiple_of(copies);
    let alone = Chain::record(gpu, &launches, count, false)?.microseconds(gpu)?;
    let chained = match launches[0].may_depend {
        true => Some(Chain::record(gpu, &launches, count, true)?.microseconds(gpu)?),
        false => None,
    };
    Ok(Times { alone, chained })
}
