//! Why a launch is what it is: the reason, and what would have been taken otherwise. A plan carries both for every step.
//!
//! The choice is a function of what is computed, its shape and type, the architectures, the budget of memory, and what was measured
//! ([`crate::measured`]); the words say which of these decided.

use crate::kernels::matvec::shape::{LaunchShape, ranked_shapes};
use crate::kernels::matvec::{Product, TUNED_MULTIPROCESSORS};
use crate::measured::{Measured, Question};

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

/// How a decoded row's product is launched on GPUs that there is this table of, if there is one.
pub fn product(of: &Product, measured: Option<&Measured>) -> (LaunchShape, Choice) {
    let key @ (dtype, outputs, k, paired) = of.key();
    let shape = of.shape_on(measured);
    let head = format!("one row: a matrix-vector product, {}", shape.told());
    if let Some((table, trial)) = measured.and_then(|table| Some((table, table.product(key)?))) {
        let reason = format!("{head}: {} us in a chain, measured on an {}", trial.chained_us, table.gpu);
        let lost = table.lost_product(key).map(|lost| lost.told()).unwrap_or_default();
        return (shape, Choice::because(reason).over(lost));
    }
    let by = match measured.and_then(|table| Some((table.gpu, table.chosen(Question::FewestWarps)?))) {
        Some((gpu, trial)) => format!("by the rule, measured on an {gpu} ({})", trial.told()),
        None => "by the rule; there are no figures of these GPUs".to_owned(),
    };
    // What was measured for this very product says more than what the rule would have taken next.
    let runner_up = match measured.and_then(|table| table.lost_product(key)) {
        Some(lost) => format!("{}, and slower in whole plans", lost.told()),
        None => {
            let ranked = ranked_shapes(dtype, outputs, k, paired, TUNED_MULTIPROCESSORS);
            let best = ranked[0].0;
            let next = ranked.get(1).map(|(score, next)| format!("{}: {:.2} of the score", next.told(), score / best));
            next.unwrap_or_default()
        }
    };
    (shape, Choice::because(format!("{head}, {by}")).over(runner_up))
}

/// What lost against something that was settled by whole plans, for the words of a step.
pub fn lost(measured: Option<&Measured>, question: Question, otherwise: &str) -> String {
    let trials = measured.and_then(|table| Some((table.runner_up(question)?, table.chosen(question)?)));
    trials.map_or(otherwise.to_owned(), |(lost, chosen)| match chosen.tokens_per_second {
        [(_, speed), ..] => format!("{}, against {speed}", lost.told()),
        [] => lost.told(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::Arch;
    use crate::kernels::matvec::Prologue;
    use crate::measured::{H200, ProductTrial, Verdict};
    use gemma4c_blocks::DType;

    fn gate_and_up() -> Product {
        Product { geglu: true, ..Product::new(DType::Q8_0, 10240, 2560, Prologue::ResidualNorm) }
    }

    #[test]
    fn a_measured_shape_wins_over_the_rule() {
        static SHAPE: LaunchShape = LaunchShape { lanes: 16, rows: 2, depth: 3, warps: 8, blocks: 264 };
        const fn trial(shape: LaunchShape, chained_us: f32, verdict: Verdict) -> ProductTrial {
            ProductTrial {
                dtype: DType::Q8_0,
                outputs: 10240,
                k: 2560,
                paired: true,
                shape,
                alone_us: 9.0,
                chained_us,
                verdict,
            }
        }
        static PLANTED: Measured = Measured {
            gpu: "A100 of a test",
            arch: Arch::Sm89,
            trials: &[],
            products: &[
                trial(SHAPE, 7.5, Verdict::Chosen),
                trial(LaunchShape { warps: 4, ..SHAPE }, 8.5, Verdict::Lost),
                trial(LaunchShape { warps: 2, ..SHAPE }, 9.5, Verdict::Lost),
            ],
        };
        let (shape, choice) = product(&gate_and_up(), Some(&PLANTED));
        assert_eq!(shape, SHAPE);
        assert!(choice.reason.ends_with("7.5 us in a chain, measured on an A100 of a test"), "{}", choice.reason);
        assert_eq!(choice.runner_up, "16 lanes, 2 rows, 3 ahead, 264 blocks of 4 warps: 8.5 us in a chain");
        // Of another product nothing was measured: the rule.
        let other = Product::new(DType::Q8_0, 10240, 2560, Prologue::ResidualNorm);
        assert_eq!(product(&other, Some(&PLANTED)).0, other.shape(TUNED_MULTIPROCESSORS));
    }

    #[test]
    fn the_rule_says_what_it_rests_on_and_what_came_next() {
        let (shape, choice) = product(&gate_and_up(), Some(&H200));
        assert_eq!(shape, gate_and_up().shape(TUNED_MULTIPROCESSORS));
        assert!(
            choice.reason.contains("by the rule, measured on an H200 (20 warps: 477 tokens/s"),
            "{}",
            choice.reason
        );
        assert!(choice.runner_up.contains("12.9 us in a chain, and slower in whole plans"), "{}", choice.runner_up);
        let down = Product::new(DType::Q8_0, 2560, 10240, Prologue::Int8);
        let (_, choice) = product(&down, None);
        assert!(choice.reason.ends_with("there are no figures of these GPUs"), "{}", choice.reason);
        assert!(choice.runner_up.ends_with("of the score"), "{}", choice.runner_up);
        assert_eq!(lost(None, Question::AttentionLaunches, "three launches"), "three launches");
        assert_eq!(
            lost(Some(&H200), Question::AttentionLaunches, "three launches"),
            "three launches: 422 tokens/s of E4B Q8_0, against 422"
        );
    }
}
