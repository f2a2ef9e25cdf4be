//! Why a launch is what it is: the reason, and what would have been taken otherwise. A plan carries both for every
//! step.
//!
//! A reason is of that very step: which rule decided, and by which of the step's own sizes. Figures that were measured
//! on other steps or other models decide the rules' constants ([`crate::measured`]) and are not quoted here.

use crate::kernels::matvec::LaunchShape;
use crate::kernels::matvec::Product;
use crate::kernels::matvec::shape::{Ranked, ranked_shapes};
use crate::target::Target;

/// The words of a choice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    pub reason: String,
    /// Empty where nothing else could do it.
    pub runner_up: String,
}

impl Choice {
    /// Says what was the next best.
    pub fn over(self, runner_up: impl Into<String>) -> Choice {
        Choice { runner_up: runner_up.into(), ..self }
    }

    /// The same on that GPU: where nothing was measured on it, a choice between two says that it is made by rule.
    pub fn on(self, target: &Target) -> Choice {
        match target.measured || self.runner_up.is_empty() {
            true => self,
            false => Choice { reason: format!("by rule: {}", self.reason), ..self },
        }
    }

    pub fn because(reason: impl Into<String>) -> Choice {
        Choice { reason: reason.into(), runner_up: String::new() }
    }
}

impl From<&str> for Choice {
    fn from(reason: &str) -> Choice {
        Choice::because(reason)
    }
}

impl From<String> for Choice {
    fn from(reason: String) -> Choice {
        Choice::because(reason)
    }
}

/// How a decoded row's product is launched: as the rule of launch shapes ranks it.
pub fn product(of: &Product, target: &Target) -> (LaunchShape, Choice) {
    let ranked = ranked_shapes(of, target);
    let best = ranked[0];
    let reason = format!(
        "one row: a matrix-vector product of {} x {} {}, shaped for {} SMs: {}",
        of.rows(),
        of.k,
        of.dtype,
        target.multiprocessors,
        ranking(&best)
    );
    let runner_up = ranked.get(1).map(|next| match best.suits && !next.suits {
        true => format!("{}, but slower for products of this kind, as measured", ranking(next)),
        false => format!("{}, {:.2} of the score", ranking(next), next.score() / best.score()),
    });
    (best.shape, Choice::because(reason).over(runner_up.unwrap_or_default()))
}

/// `32 lanes, 4 rows, 3 ahead, 132 blocks of 20 warps; scored as 60 KiB in flight an SM, busy 97 % of the time`.
fn ranking(of: &Ranked) -> String {
    format!(
        "{}; scored as {} KiB in flight an SM, busy {:.0} % of the time",
        of.shape.describe(),
        of.in_flight >> 10,
        of.busy * 100.0
    )
}
