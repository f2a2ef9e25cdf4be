//! Cases: one launch of a kernel with its inputs and what must come out, as plain data; and the executors that run it.
//!
//! The same case runs in the simulator under three orders with all checks, as emitted text on the host, and (by an
//! [`Executor`] of another crate) on a GPU. A case knows nothing of who runs it.
//!
//! ```no_run
//! # use gemma4c_dsl::harness::{Bound, Case};
//! # fn case(instance: gemma4c_dsl::Instance) {
//! Case::new("three rows", instance)
//!     .grid([3, 1, 1])
//!     .buffer("x", vec![1.0f32, 2.0, 3.0])
//!     .scalar("n", 3u32)
//!     .expect("out", vec![2.0f32, 4.0, 6.0], Bound::Exact)
//!     .assert();
//! # }
//! ```

mod data;
mod executor;
mod random;

pub use data::{Bound, Data, Mismatch};
pub use executor::{Host, Simulator};
pub use random::Random;

use std::sync::Arc;

use crate::definition::{Access, ParamKind};
use crate::host::HostError;
use crate::instance::Instance;
use crate::sim::{Arg, LaunchError};

/// A scalar argument.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scalar {
    U32(u32),
    I32(i32),
    U64(u64),
    F32(f32),
}

macro_rules! scalars {
    ($($ty:ident $variant:ident)*) => { $(impl From<$ty> for Scalar {
        fn from(value: $ty) -> Self {
            Self::$variant(value)
        }
    })* };
}
scalars!(u32 U32 i32 I32 u64 U64 f32 F32);

impl From<Scalar> for Arg {
    fn from(scalar: Scalar) -> Self {
        match scalar {
            Scalar::U32(v) => Self::U32(v),
            Scalar::I32(v) => Self::I32(v),
            Scalar::U64(v) => Self::U64(v),
            Scalar::F32(v) => Self::F32(v),
        }
    }
}

/// An argument in launch order, ready for an executor.
#[derive(Clone, Debug, PartialEq)]
pub enum Argument {
    /// A buffer of its own with this content before the launch.
    Buffer(Data),
    Scalar(Scalar),
}

/// What a buffer must hold after the launch.
#[derive(Clone, Debug)]
pub struct Expectation {
    pub param: String,
    pub data: Data,
    pub bound: Bound,
    /// Elements the kernel need not write; their content is not compared.
    pub unwritten: Vec<std::ops::Range<usize>>,
    /// Other launches whose results `data` is, in the simulator: an executor with functions of its own runs these
    /// itself.
    pub like: Option<Like>,
}

/// What `read` makes of a [`Reference`]'s results.
#[derive(Clone, Debug)]
pub struct Like {
    pub reference: Reference,
    pub read: fn(&[f32]) -> Data,
}

/// One launch, its inputs and its expected outputs.
#[derive(Clone, Debug)]
pub struct Case {
    pub name: String,
    pub instance: Instance,
    pub grid: [u32; 3],
    pub buffers: Vec<(String, Data)>,
    pub scalars: Vec<(String, Scalar)>,
    pub expectations: Vec<Expectation>,
}

/// Runs a case's launch and gives back its buffers.
pub trait Executor {
    /// For messages: `simulator, reverse order`.
    fn name(&self) -> String;

    /// The content of every buffer after the launch, in launch order; `None` for scalars.
    fn run(&self, case: &Case) -> Result<Vec<Option<Data>>, CaseError>;

    /// Whether `exp`, `tanh` and their like have other last bits than the simulator's.
    fn has_functions_of_its_own(&self) -> bool {
        false
    }
}

/// Why a case failed. Each names the case.
#[derive(Debug, thiserror::Error)]
pub enum CaseError {
    #[error("case `{case}`: parameter `{param}` of kernel {kernel}: {why}")]
    Setup { case: String, kernel: &'static str, param: String, why: String },
    #[error("case `{case}`, {executor}: {source}")]
    Launch { case: String, executor: String, source: Box<LaunchError> },
    #[error("case `{case}`, {executor}: {source}")]
    Compiled { case: String, executor: String, source: Box<HostError> },
    #[error("case `{case}`, {executor}: {message}")]
    Other { case: String, executor: String, message: String },
    #[error("case `{case}`, {executor}: kernel {kernel}, `{param}`: {mismatch}")]
    Mismatch { case: String, executor: String, kernel: &'static str, param: String, mismatch: Box<Mismatch> },
}

impl Case {
    pub fn new(name: impl Into<String>, instance: Instance) -> Self {
        Self {
            name: name.into(),
            instance,
            grid: [1; 3],
            buffers: Vec::new(),
            scalars: Vec::new(),
            expectations: Vec::new(),
        }
    }

    /// Blocks in each dimension; one block if not said.
    pub fn grid(mut self, grid: [u32; 3]) -> Self {
        self.grid = grid;
        self
    }

    /// The content of a buffer before the launch. An `Output` needs none: it is as long as its expectation.
    pub fn buffer(mut self, param: &str, data: impl Into<Data>) -> Self {
        self.buffers.push((param.to_string(), data.into()));
        self
    }

    pub fn scalar(mut self, param: &str, value: impl Into<Scalar>) -> Self {
        self.scalars.push((param.to_string(), value.into()));
        self
    }

    /// What a buffer must hold after the launch.
    pub fn expect(mut self, param: &str, data: impl Into<Data>, bound: Bound) -> Self {
        self.expectations.push(Expectation {
            param: param.to_string(),
            data: data.into(),
            bound,
            unwritten: Vec::new(),
            like: None,
        });
        self
    }

    /// A buffer must hold the very bits that `read` makes of another kernel's results, on whatever runs both.
    pub fn expect_like(mut self, param: &str, reference: &Reference, read: fn(&[f32]) -> Data) -> Self {
        self = self.expect(param, read(reference.simulated()), Bound::Exact);
        if let Some(last) = self.expectations.last_mut() {
            last.like = Some(Like { reference: reference.clone(), read });
        }
        self
    }

    /// Elements of the last expectation that the kernel leaves alone.
    pub fn except(mut self, unwritten: std::ops::Range<usize>) -> Self {
        if let Some(last) = self.expectations.last_mut() {
            last.unwritten.push(unwritten);
        }
        self
    }

    /// The arguments in launch order. Outputs are filled with ones (NaN for floats), so that what is not written shows.
    pub fn arguments(&self) -> Result<Vec<Argument>, CaseError> {
        let params = self.instance.params();
        let refuse = |param: &str, why: &str| CaseError::Setup {
            case: self.name.clone(),
            kernel: self.instance.def.name,
            param: param.to_string(),
            why: why.to_string(),
        };
        let given = self.buffers.iter().map(|(name, _)| name).chain(self.scalars.iter().map(|(name, _)| name));
        for name in given.chain(self.expectations.iter().map(|e| &e.param)) {
            if !params.iter().any(|param| param.name == *name) {
                return Err(refuse(name, "the kernel has no such parameter"));
            }
        }
        params
            .iter()
            .map(|param| match param.def.kind {
                ParamKind::Scalar(_) => match self.scalars.iter().find(|(name, _)| *name == param.name) {
                    Some((_, value)) => Ok(Argument::Scalar(*value)),
                    None => Err(refuse(&param.name, "no scalar was given")),
                },
                ParamKind::Memory { access, element } => {
                    let given = self.buffers.iter().find(|(name, _)| *name == param.name).map(|(_, data)| data.clone());
                    let expected = self.expectations.iter().find(|e| e.param == param.name);
                    let data = match (given, expected) {
                        (Some(data), _) => data,
                        (None, Some(expected)) if access == Access::Output => expected.data.poisoned(),
                        _ => return Err(refuse(&param.name, "no buffer was given")),
                    };
                    match self.instance.values().element(element) {
                        Some(ty) if ty == data.ty() => Ok(Argument::Buffer(data)),
                        _ => Err(refuse(&param.name, &format!("it holds {element}, the buffer {}", data.ty().name()))),
                    }
                }
                ParamKind::Local => Err(refuse(&param.name, "not a launch parameter")),
            })
            .collect()
    }

    /// Outputs, by name, that are not written completely.
    pub fn partial_outputs(&self) -> Vec<String> {
        self.expectations.iter().filter(|e| !e.unwritten.is_empty()).map(|e| e.param.clone()).collect()
    }

    /// Runs the case on one executor and compares.
    pub fn check_on(&self, executor: &dyn Executor) -> Result<(), CaseError> {
        let results = executor.run(self)?;
        for expectation in &self.expectations {
            let place = self.instance.params().iter().position(|param| param.name == expectation.param);
            let Some(Some(found)) = place.map(|at| results.get(at).and_then(Option::as_ref)) else { continue };
            let elsewhere = match &expectation.like {
                Some(like) if executor.has_functions_of_its_own() => Some((like.read)(&like.reference.on(executor)?)),
                _ => None,
            };
            let expected = elsewhere.as_ref().unwrap_or(&expectation.data);
            if let Some(mismatch) = expected.compare(found, expectation.bound, &expectation.unwritten) {
                return Err(CaseError::Mismatch {
                    case: self.name.clone(),
                    executor: executor.name(),
                    kernel: self.instance.def.name,
                    param: expectation.param.clone(),
                    mismatch: Box::new(mismatch),
                });
            }
        }
        Ok(())
    }
}

// ---- results of other launches
// ----------------------------------------------------------------------------------------

/// What a case's results must equal to the bit where no number can be written down: one buffer of floats of each of
/// some other launches, one after the other.
///
/// A product of several rows has the bits of each row's own product. Where a result went through `tanh`, those bits are
/// not the same in the simulator and on a GPU, so a GPU compares its kernel with its own launches, not with the
/// simulator's.
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
