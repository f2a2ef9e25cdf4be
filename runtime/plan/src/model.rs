//! Which model a plan belongs to, where its weights lie, and where it may run.

use gemma4c_blocks::DType;
use serde::{Deserialize, Serialize};

/// One file of the model, as it was when the plan was compiled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelFile {
    /// As given to the compiler, or relative to the plan's folder.
    pub path: String,
    pub bytes: u64,
    /// Length of everything before the tensor data.
    pub header_bytes: u64,
}

/// The model's identity and the numbers a person asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Model {
    pub architecture: String,
    pub name: Option<String>,
    #[serde(deserialize_with = "crate::list::at_most::<1024, _, _>")]
    pub files: Vec<ModelFile>,
    /// See [`crate::fingerprint`].
    pub fingerprint: u64,
    pub layers: u32,
    pub hidden: u32,
    pub vocab_size: u32,
    /// The context the model was trained for.
    pub trained_context: u32,
}

/// A stored tensor and where its bytes lie.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Weight {
    pub name: String,
    pub dtype: DType,
    /// Fastest first.
    #[serde(deserialize_with = "crate::list::at_most::<4, _, _>")]
    pub dims: Vec<u64>,
    /// Index into [`Model::files`].
    pub file: u32,
    /// From the start of that file; of the embedded weights, where the plan has the tensors with it.
    pub offset: u64,
    pub bytes: u64,
}

impl Weight {
    /// Dimension `i`; 1 beyond the last.
    pub fn dim(&self, i: usize) -> u64 {
        self.dims.get(i).copied().unwrap_or(1)
    }

    /// Bytes the type and dimensions imply; `None` where they make no sense.
    pub fn expected_bytes(&self) -> Option<u64> {
        let rows = self.dims.iter().skip(1).try_fold(1u64, |n, d| n.checked_mul(*d))?;
        self.dtype.row_bytes(self.dim(0))?.checked_mul(rows)
    }
}

/// The machine a plan was compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Target {
    Cpu,
    /// NVIDIA GPUs of the architectures that the GPU's program names.
    Cuda,
}

impl Target {
    pub const fn name(self) -> &'static str {
        match self {
            Target::Cpu => "cpu",
            Target::Cuda => "cuda",
        }
    }
}
