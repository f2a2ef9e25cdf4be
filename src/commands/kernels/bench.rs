//! `gemma4c kernels --bench`: how fast kernels stream their weights, beside the fastest this GPU can read at all.
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
    let ceiling = read_ceiling(&gpu)?;
    let name = &gpu.device.gpu.name;
    print(&format!("{name}, read-only sum over {} GiB: {:.0} GB/s\n\n", PROBED >> 30, ceiling))?;
    print("| shape | type | MB | us | GB/s | of the ceiling | us, chained | of the ceiling |\n")?;
    print("|---|---|---:|---:|---:|---:|---:|---:|\n")?;
    for (family, _) in &selection.families {
        for Bench { shape, weights, case } in benches(family.name) {
            let bytes = streamed_bytes(&case)?;
            let times = time(&gpu, &case, bytes)?;
            let speed = |microseconds: f64| bytes as f64 / microseconds / 1000.0;
            let share = |microseconds: f64| format!("{:.0} %", 100.0 * speed(microseconds) / ceiling);
            let chained = times.chained.map_or("| | |".to_owned(), |us| format!("| {us:.2} | {} |", share(us)));
            let megabytes = bytes as f64 / 1e6;
            let alone = times.alone;
            print(&format!(
                "| {shape} | {weights} | {megabytes:.1} | {alone:.2} | {:.0} | {} {chained}\n",
                speed(alone),
                share(alone),
            ))?;
        }
    }
    Ok(Outcome::Done)
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
            // A kernel is loaded at its first launch, which a recording must not meet.
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
