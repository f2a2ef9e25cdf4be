//! `gemma4c verify`: a plan's result on this machine against the CPU's, step by step.
//!
//! A launch computes values of the unfused program, which the CPU computes one by one. So every launch can be judged
//! alone: its inputs are the CPU's values, and its outputs are compared with the CPU's. Then all of them run on each
//! other's results, launch by launch and as CUDA graphs. With `--golden` the logits are compared with another program's
//! instead.

mod company;
mod compare;
mod drafts;
mod drift;
mod golden;
mod limits;
mod meaning;
mod numbers;
mod reference;
mod report;
mod walk;

use anyhow::{Context, Result, bail, ensure};
use gemma4c_plan::cuda::{CudaProgram, PhaseKind};
use gemma4c_runtime::{Asked, Session};

use super::lora::LoraArgs;
use super::plan_file::PlanArgs;
use super::{Outcome, profile};
use crate::output::print;
use crate::{progress, random};
use drafts::Drafts;
use drift::Drift;
use golden::GoldenArgs;
use meaning::{Meaning, is_decode_of_several};
use reference::{Recorded, Reference};
use report::Report;
use walk::{Together, Walk};

/// Tokens of a prompt, where nobody says how many.
const USUAL: u32 = 24;
/// Tokens of the longest prompt in a batch, where nobody says how many.
const LONGEST: u32 = 40;

/// Compare what a plan computes on this machine with the CPU, step by step.
///
/// Every prefill phase reads random tokens, and a few more are decoded, one row at a time (for several, see --company).
/// Every launch is first compared alone, with the CPU's values as its inputs, then all launches together. It is also
/// checked that each launch ran, that the tokens picked are right, and that CUDA graphs give the same bits as single
/// launches. Of a plan with a drafter, its drafts are compared step by step. Exits with code 1 if anything is off.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    plan: PlanArgs,

    #[command(flatten)]
    lora: LoraArgs,

    /// Tokens to read [default: 24, or as many as the smallest phase takes].
    #[arg(long, value_name = "N")]
    tokens: Option<u32>,

    /// Tokens to decode after them.
    #[arg(long, value_name = "N", default_value_t = 4)]
    decode: u32,

    /// Only this phase: its name, or its number of rows. `gemma4c inspect` lists them.
    #[arg(long)]
    phase: Option<String>,

    /// Compare logits of sequences computed together, so many at once, with those of each alone: they must be the same
    /// bits.
    #[arg(long, value_name = "N,N...", value_delimiter = ',')]
    company: Vec<u32>,

    /// With --company: how many prompts.
    #[arg(long, value_name = "N", default_value_t = 100)]
    prompts: u32,

    /// Multiply every limit by this.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    tolerance: f64,

    /// How many of the values within their limits to list, the worst first.
    #[arg(long, value_name = "N", default_value_t = 10)]
    worst: usize,

    /// The same seed gives the same tokens.
    #[arg(long, default_value_t = 0)]
    seed: u64,

    #[command(flatten)]
    golden: GoldenArgs,
}

pub fn run(args: &Args) -> Result<Outcome> {
    if let Some(file) = &args.golden.golden {
        return golden::run(&args.plan, &args.lora, &args.golden, file);
    }
    if !args.company.is_empty() {
        return company::run(&company::Company {
            plan: &args.plan,
            lora: &args.lora,
            batches: &args.company,
            prompts: args.prompts,
            longest: args.tokens.unwrap_or(LONGEST),
            decode: args.decode,
            seed: args.seed,
        });
    }
    ensure!(
        args.tolerance > 0.0 && args.tolerance.is_finite(),
        "--tolerance {}: more than 0 is needed",
        args.tolerance
    );
    let plan = args.plan.read()?;
    let Some(cuda) = &plan.cuda else { bail!("the plan is for the CPU: there is nothing to compare with it") };
    // All programs have the same phases; what is asked for is looked at before anything is loaded.
    let selection = Selection::new(&cuda.program, args)?;
    let (prompt, decoded) = (selection.tokens as usize, args.decode as usize);
    let tokens = random::tokens(args.seed, prompt + decoded, plan.model.vocab_size);
    let adapter = args.lora.for_seat(&args.plan, &plan)?;
    let mut device = args.plan.open_read(plan)?;
    adapter.sit(&mut device)?;
    ensure!(device.backend().is_some(), "the plan runs on the CPU here: there is nothing to compare with it");
    let plan = device.plan().clone();
    let cuda = plan.cuda.as_ref().context("a plan on a device has a program for it")?;

    let on_cpu = || {
        let mut session = Session::on_cpu(plan.clone(), &args.plan.location())?;
        adapter.sit(&mut session)?;
        anyhow::Ok(session)
    };
    let mut cpu = on_cpu()?;
    let recorded = Recorded::of(&plan);
    let bar = progress::tokens("computing on the CPU", 2 * tokens.len() as u64);
    let mut compute = |tokens: &[u32]| {
        bar.inc(tokens.len() as u64);
        Reference::compute(&mut cpu, tokens, &recorded)
    };
    let pieces = tokens[..prompt].chunks(if selection.prefill.is_empty() { 1 } else { prompt });
    let prompt: Vec<Reference> = pieces.map(&mut compute).collect::<Result<_>>()?;
    let decoded: Vec<Reference> =
        tokens[tokens.len() - decoded..].chunks(1).map(&mut compute).collect::<Result<_>>()?;
    drop(cpu);

    let meaning = Meaning::new(&plan, &cuda.program);
    let mut disturbed = on_cpu()?;
    let passes: Vec<&Reference> = prompt.iter().chain(&decoded).collect();
    let drift = Drift::measure(&mut disturbed, &passes, &meaning, limits::noise(meaning.is_exact))?;
    drop(disturbed);
    bar.finish_and_clear();

    let mut report = Report::new(&meaning);
    let backend = device.backend().context("it does not run on the CPU")?;
    let mut walk = Walk { meaning: &meaning, backend, tolerance: args.tolerance, drift: &drift };
    for (selected, pass) in selection.runs(&prompt, &decoded) {
        let findings = walk.alone(selected.phase, pass)?;
        if selected.is_judged {
            report.add_findings(selected.phase, findings);
        }
    }
    // All launches on each other's results: from here on the KV cache holds the device's own values.
    let mut last: Vec<Together> = Vec::new();
    for (selected, pass) in selection.runs(&prompt, &decoded) {
        let ran = walk.together(selected.phase, pass)?;
        let (picked, right) = walk.picks(&ran, pass)?;
        if picked != [right; 2] {
            report.wrong_picks.push((pass.position, picked, right));
        }
        if let Some(at) = last.iter().position(|other| other.position == ran.position) {
            let other = last.swap_remove(at);
            report.compared_phases.push((other.phase, ran.phase, other.has_logits(&ran.logits)));
        }
        if selected.is_judged {
            report.together.push(ran.without_logits());
        }
        last.push(ran);
    }
    report.replayed = last.len();
    report.unlike = replay(&mut device, &prompt, &decoded, &last)?;
    let drafts = match cuda.program.drafter {
        Some(_) => Some(Drafts::compare(&mut device, on_cpu, &tokens, &meaning, args.tolerance)?),
        None => None,
    };

    print(&format!(
        "{} on {} against the CPU: {} tokens read, {} decoded\n\n",
        plan.model.name.as_deref().unwrap_or("the model"),
        device.device_name(),
        selection.tokens,
        args.decode
    ))?;
    print(&report.text(args.worst))?;
    if let Some(drafts) = &drafts {
        print(&format!("\n{}", drafts.text()))?;
    }
    let (outcome, verdict) = match report.is_ok() && drafts.is_none_or(|drafts| drafts.is_ok()) {
        true => (Outcome::Done, "ok"),
        false => (Outcome::CheckFailed, "FAILED"),
    };
    print(&format!("\n{verdict}\n"))?;
    Ok(outcome)
}

/// Which phases run, and which of them are judged.
struct Selection {
    /// The prefill phases that read the prompt; last the one that a session takes. None if the plan has none.
    prefill: Vec<Selected>,
    decode: Selected,
    tokens: u32,
}

#[derive(Clone, Copy)]
struct Selected {
    phase: usize,
    is_judged: bool,
}

impl Selection {
    fn new(program: &CudaProgram, args: &Args) -> Result<Selection> {
        let only = match &args.phase {
            Some(name) => {
                let (phase, found) = profile::find(program, name)?;
                ensure!(
                    found.kind != PhaseKind::Tower,
                    "{} reads no tokens: its values are compared by `logits --tap`",
                    found.name
                );
                Some(phase)
            }
            None => None,
        };
        let select = |phase: usize| Selected { phase, is_judged: only.is_none_or(|only| only == phase) };
        let wanted = only.and_then(|only| program.phase(only));
        if let Some(several) = wanted.filter(|phase| is_decode_of_several(phase)) {
            bail!(
                "{} is compared with decode of one row, to the bit: run with --company {}",
                several.name,
                several.rows.min(program.kv_layout.slots)
            );
        }
        let all = || (0..program.phases.len()).filter(|phase| program.phases[*phase].kind == PhaseKind::Prefill);
        let smallest = only.filter(|_| wanted.is_some_and(|phase| phase.kind == PhaseKind::Prefill)).or(all().next());
        let tokens = args.tokens.unwrap_or(smallest.map_or(USUAL, |phase| program.phases[phase].rows.min(USUAL)));
        ensure!(tokens > 0, "--tokens 0: at least one is needed");
        let fits = |phase: &usize| program.phases[*phase].rows >= tokens;
        let usual = all().find(fits);
        let wanted = all().map(select).filter(|s| s.is_judged || Some(s.phase) == usual);
        // From the largest to the smallest: a session takes the smallest that fits.
        let prefill: Vec<Selected> = wanted.rev().collect();
        if let Some(small) = prefill.iter().find(|selected| !fits(&selected.phase)) {
            bail!("{tokens} tokens do not fit {}: choose a phase with --phase", program.phases[small.phase].name);
        }
        ensure!(usual.is_some() || all().next().is_none(), "{tokens} tokens do not fit any phase of the plan");
        Ok(Selection { prefill, decode: select(0), tokens })
    }

    /// The passes, in order, each with its phase. Without prefill phases a prompt is read as generated tokens are.
    fn runs<'a>(&self, prompt: &'a [Reference], decoded: &'a [Reference]) -> Vec<(Selected, &'a Reference)> {
        let prefill = if self.prefill.is_empty() { std::slice::from_ref(&self.decode) } else { &self.prefill };
        let read = prefill.iter().flat_map(|selected| prompt.iter().map(|pass| (*selected, pass)));
        read.chain(decoded.iter().map(|pass| (self.decode, pass))).collect()
    }
}

/// Runs the passes the way a session does, and returns the positions of those whose logits are not those of `last`.
fn replay(device: &mut Session, prompt: &[Reference], decoded: &[Reference], last: &[Together]) -> Result<Vec<u32>> {
    let mut unlike = Vec::new();
    let mut check = |pass: &Reference, logits: &[f32]| {
        let ran = last.iter().find(|ran| ran.position == pass.position);
        if !ran.is_some_and(|ran| ran.has_logits(logits)) {
            unlike.push(pass.position);
        }
    };
    for pass in prompt {
        device.feed(&pass.tokens, Asked::Last, None, |_, logits| check(pass, logits))?;
    }
    for pass in decoded {
        device.decode(pass.tokens[0], |logits| check(pass, logits))?;
    }
    Ok(unlike)
}
