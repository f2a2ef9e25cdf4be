//! Why a model has no plan for a GPU.

use gemma4c_blocks::DType;
use gemma4c_dsl::{ArgumentError, InstanceError};

use crate::kernels::moe::gathered::GatheredError;
use crate::kernels::rows::RowsError;

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
pub enum LowerError {
    #[error("no kernel for {tensor} ({dtype}, {shape}) in {phase}: {why}")]
    NoKernel { tensor: String, dtype: DType, shape: String, phase: String, why: String },
    #[error("{tensor} is {dtype}; a GPU plan needs it in f32")]
    NotFloats { tensor: String, dtype: DType },
    #[error("unknown pass `{name}`; there are {known}")]
    UnknownPass { name: String, known: String },
    #[error("pass `{name}` cannot be switched off: there is no program without it")]
    RequiredPass { name: String },
    #[error("the plan needs {needed} bytes of device memory, the budget is {budget}: {advice}")]
    Budget { needed: u64, budget: u64, advice: String },
    #[error("keys and values in {kv} on {target}: {why}")]
    Kv { kv: &'static str, target: String, why: String },
    #[error("pages of {bytes} bytes of keys and values: a kernel counts up to 2^32 values")]
    Page { bytes: u64 },
    #[error("{node} is {op}, which no kernel computes: it runs on the CPU alone")]
    OnCpuAlone { node: String, op: &'static str },
    #[error("the drafter cannot run on a GPU: {why}")]
    Drafter { why: String },
    #[error("cannot read {tensor}: {why}")]
    Unreadable { tensor: String, why: String },
    // What follows are faults of the compiler, not of its input.
    #[error("internal: {0}")]
    Argument(#[from] ArgumentError),
    #[error("internal: kernel {kernel}: a scalar is neither u32 nor f32, and a plan has no others")]
    Scalar { kernel: String },
    #[error("internal: kernel {kernel} is launched outside the phases, and so has no buffers")]
    Buffer { kernel: String },
    #[error("internal: a {kind} of {node} is {launches} launches, not one")]
    Launches { kind: &'static str, node: String, launches: usize },
    #[error("internal: nothing has made {node}")]
    NoValue { node: String },
    #[error("internal: phase {phase} puts buffers {a} and {b} in the same place")]
    Overlap { phase: String, a: usize, b: usize },
    #[error("internal: phase {phase} cuts memory into too many pieces")]
    Pieces { phase: String },
    #[error("internal: {0}")]
    Instance(#[from] InstanceError),
    #[error("internal: {0}")]
    Rows(#[from] RowsError),
    #[error("internal: {0}")]
    Gathered(#[from] GatheredError),
}
