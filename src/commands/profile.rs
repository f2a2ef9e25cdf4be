//! `gemma4c profile`: where the time of a phase goes, kernel by kernel, beside what this GPU could do at best.

mod chain;
mod company;
mod table;

use anyhow::{Context, Result, bail, ensure};
use gemma4c_plan::cuda::{CudaProgram, CudaStep, Phase, PhaseKind};
use gemma4c_plan::{Kind, Op, Plan, Program, Step};
use gemma4c_runtime::{Asked, Pick, Run, Session};
use serde_json::json;

use super::Outcome;
use super::plan_file::PlanArgs;
use super::synthetic_media::Media;
use crate::output::{self, OutputFile, print};
use table::{Ceilings, Launched, table};

/// Show where a plan's time goes on this machine's GPU, kernel by kernel.
///
/// Each launch is timed alone, after its predecessor has ended; the shares are of the sum of these times. The phase as
/// a whole is timed too: there launches overlap, so it takes less than the sum. A kernel's floor is the time its bytes
/// and operations would take at the GPU's ceilings.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    plan: PlanArgs,

    /// The phase: its name, or its number of rows. `gemma4c inspect` lists them. Of a plan with a drafter also `draft`:
    /// all its steps, one after the other.
    #[arg(long, default_value = "decode")]
    phase: String,

    /// Tokens already in the sequence.
    #[arg(short, long, value_name = "N", default_value_t = 0)]
    depth: u32,

    /// How often the phase is measured.
    #[arg(short, long, value_name = "N", default_value_t = 20)]
    repeat: usize,

    /// The GPU's highest read bandwidth in GB/s. The default was measured on an H200 with `gemma4c kernels --bench`.
    #[arg(long, value_name = "GB/s", default_value_t = 4400.0)]
    ceiling_gbs: f64,

    /// The GPU's highest bf16 throughput in TFLOP/s. The default is what cuBLAS reaches on an H200.
    #[arg(long, value_name = "TFLOP/s", default_value_t = 790.0)]
    ceiling_tflops: f64,

    /// Also show the last layers as their launches overlap: when the blocks of each started, saw that the launch before
    /// had ended, and ended. The phase's kernels are compiled anew for it, with stamps in them, so all times of this
    /// profile are longer, by up to 8 %. Needs NVRTC.
    #[arg(long)]
    chain: bool,

    /// Also write every launch as a trace, for chrome://tracing or Perfetto.
    #[arg(long, value_name = "OUT.json")]
    trace: Option<OutputFile>,
}

pub fn run(args: &Args) -> Result<Outcome> {
    let ceilings = Ceilings { gigabytes: args.ceiling_gbs, teraflops: args.ceiling_tflops };
    let is_positive = |ceiling: f64| ceiling > 0.0 && ceiling.is_finite();
    ensure!(is_positive(ceilings.gigabytes) && is_positive(ceilings.teraflops), "a ceiling must be more than 0");
    let mut plan = args.plan.read()?;
    if args.chain {
        chain::stamp(&mut plan, &args.phase)?;
    }
    let mut session = args.plan.open_read(plan)?;
    if session.cuda().is_none() {
        bail!("a profile is of a GPU: this plan runs on {}", session.device_name());
    }
    let plan = session.plan().clone();
    let program = &plan.cuda.as_ref().context("a plan on a GPU has a program for it")?.program;
    let (index, phase) = find(program, &args.phase)?;
    let tower = tower_of(program, index);
    let drafts = index == program.drafter_phase();
    match (phase.kind, tower) {
        (PhaseKind::Tower, Some(tower)) => _ = Media::of(&plan, tower, phase)?.read(&mut session)?,
        (PhaseKind::Prefill, _) => prepare(&mut session, phase.kind, phase.rows, args.depth)?,
        _ => prepare(&mut session, phase.kind, 1, args.depth)?,
    }
    if drafts {
        // A step leaves the records as all of them find them, but for the token.
        session.draft(0, 1, &mut |_, _, _| {}, &mut |_| {})?;
    } else if phase.kind == PhaseKind::Decode && phase.rows > 1 {
        let backend = session.backend().context("it runs on a GPU")?;
        company::join(backend, program, phase.rows, args.depth, plan.model.vocab_size)?;
    }
    let pick = if tower.is_some() || drafts { Pick::None } else { Pick::Largest };
    // What ends a round is none of the drafts.
    let drafted = program.drafter.as_ref().filter(|_| drafts).and_then(|drafter| drafter.ends.last());
    let run = Run { phase: index, steps: (0, drafted.map_or(phase.steps.len(), |end| *end as usize)), pick };
    let cuda = session.cuda().context("it runs on a GPU")?;
    let profile = cuda.profile(run, args.repeat)?;
    let meaning = match (tower, plan.drafter.as_ref().filter(|_| drafts)) {
        (Some(tower), _) => &plan.towers[tower].program,
        (None, Some(drafter)) => &drafter.program,
        (None, None) => &plan.program,
    };
    let launched = launched(&plan, meaning, program, (phase, args.depth), &profile.launches);

    let sum: f64 = profile.launches.iter().sum();
    print(&format!(
        "{} on {}, {} at depth {}: {} launches\nwhole        {:.1} us\none by one   {sum:.1} us\n\n",
        plan.model.name.as_deref().unwrap_or("the model"),
        session.device_name(),
        phase.name,
        args.depth,
        launched.len(),
        profile.whole,
    ))?;
    print(&table(&launched, &ceilings))?;
    if args.chain {
        print(&chain::table(&launched, &profile.chain, &ceilings))?;
    }
    if let Some(path) = &args.trace {
        let text = trace(&launched, profile.whole / sum.max(1e-9));
        output::write_whole(path, text.as_bytes())?;
    }
    Ok(Outcome::Done)
}

/// A phase by its name, or by the rows it takes: of prefill, where both have as many. All steps of a drafter are one
/// phase, `draft`.
pub fn find<'a>(program: &'a CudaProgram, wanted: &str) -> Result<(usize, &'a Phase)> {
    let drafter = program.drafter.as_ref().filter(|drafter| wanted == "draft" || wanted == drafter.phase.name);
    if let Some(drafter) = drafter {
        return Ok((program.drafter_phase(), &drafter.phase));
    }
    let of_towers = program.towers.iter().flat_map(|tower| &tower.phases);
    let all: Vec<&Phase> = program.phases.iter().chain(of_towers).collect();
    let named = all.iter().position(|phase| phase.name == wanted);
    // Prefill comes last.
    let sized = || program.phases.iter().rposition(|phase| phase.rows.to_string() == wanted);
    match named.or_else(sized) {
        Some(found) => Ok((found, all[found])),
        None => {
            let drafter = program.drafter.as_ref().map(|drafter| &drafter.phase);
            let names: Vec<&str> = all.into_iter().chain(drafter).map(|phase| phase.name.as_str()).collect();
            bail!("the plan has no phase {wanted:?}; there are {}", names.join(", "))
        }
    }
}

/// The tower that a phase is of.
fn tower_of(program: &CudaProgram, index: usize) -> Option<usize> {
    let mut first = program.phases.len();
    program.towers.iter().position(|tower| {
        first += tower.phases.len();
        (first - tower.phases.len()..first).contains(&index)
    })
}

/// Runs the phase once the usual way, so that everything it reads is in memory.
fn prepare(session: &mut Session, kind: PhaseKind, rows: u32, depth: u32) -> Result<()> {
    let (context, vocab_size) = (session.plan().program.context, session.plan().model.vocab_size);
    ensure!(
        depth.checked_add(rows).is_some_and(|end| end < context),
        "{rows} rows at depth {depth} do not fit the plan's context of {context}"
    );
    let token = |position: u32| (position as u64 * 7919 % vocab_size as u64) as u32;
    let tokens: Vec<u32> = (0..depth + rows).map(token).collect();
    let (before, now) = tokens.split_at(depth as usize);
    if !before.is_empty() {
        session.feed(before, Asked::None, None, |_, _| {})?;
    }
    match kind {
        PhaseKind::Decode | PhaseKind::Tower => session.decode(now[0], |_| {})?,
        PhaseKind::Prefill => session.feed(now, Asked::Last, None, |_, _| {})?,
    }
    Ok(session.wait()?)
}

/// The part of a step's work that there is at a depth: a decoded row's attention is counted for a full context in a
/// plan.
fn seen(program: &Program, step: &CudaStep, kind: PhaseKind, depth: u32) -> f64 {
    let meaning = |node: &u32| program.steps.iter().find(|of| of.output == *node);
    let is_attention = |of: &&Step| matches!(of.op, Op::Attention { .. } | Op::AttentionBefore { .. });
    let attention = step.nodes.iter().filter_map(meaning).find(is_attention);
    let cached = attention.map(|of| program.values[of.inputs[1] as usize].kind);
    let Some(Kind::Kv { cache }) = cached.filter(|_| kind == PhaseKind::Decode) else { return 1.0 };
    let context = program.context;
    let visible = program.caches[cache.index()].window.unwrap_or(context).min(context);
    (depth + 1).min(visible) as f64 / visible as f64
}

/// The launches of a phase and of the pick after it, each with its time.
fn launched(
    plan: &Plan,
    meaning: &Program,
    program: &CudaProgram,
    (phase, depth): (&Phase, u32),
    times: &[f64],
) -> Vec<Launched> {
    let kernel = |index: u32| &program.kernels[index as usize];
    let steps = phase.steps.iter().map(|step| {
        let value = step.outputs.last().map(|output| output.value).or(step.nodes.last().copied());
        let value = value.map_or("", |value| meaning.values[value as usize].name.as_str());
        let kernel = kernel(step.launch.kernel);
        let seen = seen(meaning, step, phase.kind, depth);
        Launched {
            kernel: kernel.name.clone(),
            instance: kernel.instance.clone(),
            makes: table::without_layer(value).to_string(),
            layer: step.layer,
            bytes: (step.bytes as f64 * seen) as u64,
            flops: (step.flops as f64 * seen) as u64,
            microseconds: 0.0,
        }
    });
    let picked = if phase.kind == PhaseKind::Decode { phase.rows } else { 1 };
    let vocabulary = plan.model.vocab_size as u64 * 4 * picked as u64;
    let picks = phase.pick_largest.iter().map(|launch| Launched {
        kernel: kernel(launch.kernel).name.clone(),
        instance: kernel(launch.kernel).instance.clone(),
        makes: "the next token".into(),
        layer: None,
        bytes: vocabulary,
        flops: 0,
        microseconds: 0.0,
    });
    let all = steps.chain(picks).zip(times);
    all.map(|(launched, time)| Launched { microseconds: *time, ..launched }).collect()
}

/// Chrome's trace format: one complete event a launch, scaled so that all of them take as long as the whole does.
fn trace(launched: &[Launched], scale: f64) -> String {
    let mut start = 0.0;
    let events: Vec<_> = launched
        .iter()
        .map(|launch| {
            let duration = launch.microseconds * scale;
            let event = json!({
                "name": if launch.makes.is_empty() { &launch.kernel } else { &launch.makes },
                "cat": launch.kernel,
                "ph": "X",
                "ts": start,
                "dur": duration,
                "pid": 1,
                "tid": 1,
                "args": {
                    "kernel": launch.instance,
                    "layer": launch.layer,
                    "bytes": launch.bytes,
                    "flops": launch.flops,
                    "microseconds alone": launch.microseconds,
                },
            });
            start += duration;
            event
        })
        .collect();
    json!({ "traceEvents": events, "displayTimeUnit": "ns" }).to_string() + "\n"
}
