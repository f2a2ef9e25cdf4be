//! Which launches of a plan are run together.
//!
//! A prompt goes through the prefill phases, even if it is one token: decode rounds differently, and the results must
//! not depend on how a prompt is cut into chunks. A chunk whose rows nobody asks for ends where the asked part begins;
//! with several asked rows the asked part runs once for each.
//!
//! A round of a drafter is several runs that are queued as one: its drafts, the decode that verifies them, and what
//! ends it.

use gemma4c_plan::cuda::{CudaProgram, Phase, PhaseKind};

/// How the next token is picked after a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pick {
    /// No pick: the caller wants the logits.
    None,
    /// [`pick_largest`](gemma4c_plan::cuda::Phase::pick_largest).
    Largest,
    /// [`pick_sampled`](gemma4c_plan::cuda::Phase::pick_sampled).
    Sampled,
}

/// Launches of one phase, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Run {
    /// Index into the plan's phases, or their number for the drafter's.
    pub phase: usize,
    /// The first of its steps, and the one after the last.
    pub steps: (usize, usize),
    /// What is launched after the steps.
    pub pick: Pick,
}

/// A round of one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Round {
    pub drafts: u32,
    pub pick: Pick,
    /// Each behind the one before.
    pub runs: Vec<Run>,
}

/// The rounds of a plan with a drafter: of no draft, and of as many as there can be, by every rule that tokens are
/// picked by on the device.
pub(crate) fn rounds(program: &CudaProgram) -> Vec<Round> {
    let Some(drafter) = &program.drafter else { return Vec::new() };
    let (phase, last) = (program.drafter_phase(), drafter.ends.last().map_or(0, |end| *end as usize));
    let of_drafter = |steps| Run { phase, steps, pick: Pick::None };
    let mut all = Vec::new();
    for drafts in 0..=drafter.ends.len() {
        let takes_them = |phase: &Phase| phase.kind == PhaseKind::Decode && phase.rows as usize > drafts;
        let Some(decode) = program.phases.iter().position(takes_them) else { break };
        let shape = &program.phases[decode];
        for (pick, launches) in [(Pick::Largest, &shape.pick_largest), (Pick::Sampled, &shape.pick_sampled)] {
            let drafted = drafts.checked_sub(1).map(|last| of_drafter((0, drafter.ends[last] as usize)));
            let verified = Run { phase: decode, steps: (0, shape.steps.len()), pick };
            let runs = drafted.into_iter().chain([verified, of_drafter((last, drafter.phase.steps.len()))]);
            if !launches.is_empty() {
                all.push(Round { drafts: drafts as u32, pick, runs: runs.collect() });
            }
        }
    }
    all
}

/// Everything that a device asks for but picks alone, so that a backend can be ready for all of it: runs by themselves,
/// and those that are queued together.
pub(crate) fn replays(program: &CudaProgram) -> Vec<Vec<Run>> {
    let alone = runs(program).into_iter().map(|run| vec![run]);
    alone.chain(rounds(program).into_iter().map(|round| round.runs)).collect()
}

/// The runs by themselves.
fn runs(program: &CudaProgram) -> Vec<Run> {
    const PICKS: [Pick; 3] = [Pick::None, Pick::Largest, Pick::Sampled];
    let mut all: Vec<Run> = Vec::new();
    for (phase, shape) in program.all_phases().take(program.drafter_phase()).enumerate() {
        if shape.kind == PhaseKind::Tower {
            all.push(Run { phase, steps: (0, shape.steps.len()), pick: Pick::None });
            continue;
        }
        let (asked_from, end) = (shape.asked_from as usize, shape.steps.len());
        let whole = PICKS.map(|pick| Run { phase, steps: (0, end), pick });
        let trunk = Run { phase, steps: (0, asked_from), pick: Pick::None };
        let asked = PICKS.map(|pick| Run { phase, steps: (asked_from, end), pick });
        // Decode is not run in part.
        let parts = [trunk].into_iter().chain(asked);
        let parts = parts.filter(|run| shape.kind == PhaseKind::Prefill && run.steps.0 < run.steps.1);
        for run in whole.into_iter().chain(parts) {
            if !all.contains(&run) {
                all.push(run);
            }
        }
    }
    if let Some(drafter) = &program.drafter {
        let drafts = |end: &u32| Run { phase: program.drafter_phase(), steps: (0, *end as usize), pick: Pick::None };
        all.extend(drafter.ends.iter().map(drafts));
    }
    all
}
