//! What a case's results must equal to the bit where no number can be written down: the results of other launches.
//!
//! A product of several rows has the bits of each row's own product. Where a result went through `tanh`, those bits are not the same in the
//! simulator and on a GPU, so a GPU compares its kernel with its own launches, not with the simulator's.

use std::sync::Arc;

use super::{Case, CaseError, Executor};

/// One buffer of floats of each of some launches, one after the other.
#[derive(Clone, Debug)]
pub struct Reference(Arc<Launches>);

#[derive(Debug)]
struct Launches {
    cases: Vec<Case>,
    param: String,
    simulated: Vec<f32>,
}

impl Reference {
    /// Runs the launches in `simulator`.
    ///
    /// # Panics
    ///
    /// A launch that does not run, or a parameter that is no buffer of floats: the case that needs it is wrong.
    pub fn of(cases: Vec<Case>, param: &str, simulator: &dyn Executor) -> Self {
        let floats = |case: &Case| floats(case, param, simulator);
        let simulated =
            cases.iter().map(floats).collect::<Result<Vec<_>, _>>().unwrap_or_else(|error| panic!("{error}"));
        Self(Arc::new(Launches { cases, param: param.to_string(), simulated: simulated.concat() }))
    }

    /// The results in the simulator.
    pub fn simulated(&self) -> &[f32] {
        &self.0.simulated
    }

    /// The results on that executor.
    pub fn on(&self, executor: &dyn Executor) -> Result<Vec<f32>, CaseError> {
        let all = self.0.cases.iter().map(|case| floats(case, &self.0.param, executor));
        Ok(all.collect::<Result<Vec<_>, _>>()?.concat())
    }
}

fn floats(case: &Case, param: &str, executor: &dyn Executor) -> Result<Vec<f32>, CaseError> {
    let results = executor.run(case)?;
    let at = case.instance.params().iter().position(|of| of.name == param);
    let data = at.and_then(|at| results.get(at)?.as_ref()?.floats());
    data.ok_or_else(|| CaseError::Setup {
        case: case.name.clone(),
        kernel: case.instance.def.name,
        param: param.to_string(),
        why: "no buffer of floats, as a reference must be".to_string(),
    })
}
