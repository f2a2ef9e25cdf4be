//! Which launches of a plan are run together.
//!
//! A prompt goes through the prefill phases, even if it is one token: decode rounds differently, and the results must not depend on how a prompt is
//! cut into chunks. A chunk whose rows nobody asks for ends where the asked part begins; with several asked rows the asked part runs once for each.

use gemma4c_plan::cuda::{CudaProgram, PhaseKind};

use crate::backend::{Pick, Run};

/// Every run that a device asks for but picks alone, so that a backend can be ready for all of them.
pub(crate) fn runs(program: &CudaProgram) -> Vec<Run> {
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
