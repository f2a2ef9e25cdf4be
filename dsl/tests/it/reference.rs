//! Results that must equal another launch's: on an executor whose functions have other last bits, that executor's own.

use gemma4c_dsl::Instance;
use gemma4c_dsl::harness::{Bound, Case, CaseError, Data, Executor, Reference, Simulator};
use gemma4c_dsl::prelude::*;
use gemma4c_dsl::sim::Order;

#[kernel(block = 32)]
fn bend(x: Input<f32>, out: Output<f32>) {
    out[thread_idx()] = x[thread_idx()].tanh();
}

/// The simulator, with another `tanh`: as far off in every launch, unless it is also `wrong` in the case's own.
struct Elsewhere {
    own: bool,
    wrong: bool,
}

impl Executor for Elsewhere {
    fn name(&self) -> String {
        "elsewhere".into()
    }

    fn run(&self, case: &Case) -> Result<Vec<Option<Data>>, CaseError> {
        let off = if self.wrong && case.name == "both" { 0.5 } else { 0.25 };
        let bent = |data: Data| data.floats().map(|all| all.iter().map(|x| x + off).collect::<Vec<f32>>().into());
        Ok(Simulator(Order::Forward).run(case)?.into_iter().map(|data| data.and_then(bent)).collect())
    }

    fn has_functions_of_its_own(&self) -> bool {
        self.own
    }
}

#[test]
fn a_case_is_compared_with_the_launches_of_whoever_runs_it() {
    let bend = || Instance::of(bend::DEF).build().expect("no parameters to miss");
    let case = |name: &str, x: f32| Case::new(name, bend()).buffer("x", vec![x; 32]);
    let sized = |case: Case| case.expect("out", vec![0.0f32; 32], Bound::Exact);
    let reference = Reference::of(vec![sized(case("alone", 0.3))], "out", &Simulator(Order::Forward));
    let both = case("both", 0.3).expect_like("out", &reference, |x| x.to_vec().into());
    both.assert();
    assert!(both.check_on(&Elsewhere { own: true, wrong: false }).is_ok());
    for other in [Elsewhere { own: false, wrong: false }, Elsewhere { own: true, wrong: true }] {
        assert!(matches!(both.check_on(&other), Err(CaseError::Mismatch { .. })));
    }
}
