//! Which model a plan belongs to, where its weights lie, and where it may run.

use gemma4c_blocks::DType;
use gemma4c_blocks::recipe::{MOST_INPUTS, Recipe};
use serde::{Deserialize, Serialize};

use crate::seats::Seats;

/// One file of the model, as it was when the plan was compiled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelFile {
    /// As given to the compiler, or relative to the plan's folder.
    pub path: String,
    pub bytes: u64,
    /// Length of everything before the tensor data.
    pub header_bytes: u64,
}

/// Adapters of a plan, at most.
pub const MOST_ADAPTERS: usize = 64;

/// An adapter that is always on: its matrices are among the plan's weights, and its products among the steps; or it is
/// merged into the model's weights.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Adapter {
    /// As its file or folder is called.
    pub name: String,
    /// The file of its matrices: index into [`Model::files`].
    pub file: u32,
    /// How strong it is; 1 is as it was trained.
    pub scale: f32,
    /// The products that it changes.
    pub pairs: u32,
    /// Whether the model's weights are made with it while they are loaded.
    pub is_merged: bool,
}

/// The model's identity and the numbers a person asks for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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
    /// In the order in which they are added.
    #[serde(deserialize_with = "crate::list::at_most::<MOST_ADAPTERS, _, _>")]
    pub adapters: Vec<Adapter>,
    /// Room for adapters that come and go.
    pub seats: Option<Seats>,
}

/// A stored tensor and where its bytes lie.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Weight {
    pub name: String,
    pub dtype: DType,
    /// Fastest first.
    #[serde(deserialize_with = "crate::list::at_most::<4, _, _>")]
    pub dims: Vec<u64>,
    /// Index into [`Model::files`]; 0 where it is made of pieces.
    pub file: u32,
    /// From the start of that file; of the embedded weights, where the plan has the tensors with it. 0 where it is made
    /// of pieces.
    pub offset: u64,
    pub bytes: u64,
    /// What its rows are made of, in order; none where its bytes are in a file as they are.
    #[serde(deserialize_with = "crate::list::at_most::<4096, _, _>")]
    pub pieces: Vec<Piece>,
}

/// Some rows of a tensor, and how they are made of bytes in files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Piece {
    pub rows: u64,
    pub recipe: Recipe,
    /// As [`Recipe::inputs`] lists them.
    #[serde(deserialize_with = "crate::list::at_most::<MOST_INPUTS, _, _>")]
    pub inputs: Vec<Span>,
}

/// Bytes of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// Index into [`Model::files`].
    pub file: u32,
    pub offset: u64,
    pub bytes: u64,
}

impl Piece {
    /// Whether it makes rows of that type and width, and has for that what it needs.
    pub fn makes(&self, dtype: DType, columns: u64) -> bool {
        let fits = |(input, span): (&gemma4c_blocks::recipe::Input, &Span)| {
            input.of_rows(0, self.rows).is_some_and(|(_, bytes)| bytes == span.bytes)
        };
        self.recipe
            .inputs(dtype, columns)
            .is_some_and(|inputs| inputs.len() == self.inputs.len() && inputs.iter().zip(&self.inputs).all(fits))
    }
}

impl Weight {
    /// Dimension `i`; 1 beyond the last.
    pub fn dim(&self, i: usize) -> u64 {
        self.dims.get(i).copied().unwrap_or(1)
    }

    /// Rows of all its other dimensions; `None` on overflow.
    pub fn rows(&self) -> Option<u64> {
        self.dims.iter().skip(1).try_fold(1u64, |n, d| n.checked_mul(*d))
    }

    /// Whether it holds zeros and nothing of any file: it is written while the plan runs.
    pub fn is_reserved(&self) -> bool {
        !self.pieces.is_empty() && self.pieces.iter().all(|piece| piece.recipe == Recipe::Zeros)
    }

    /// All bytes of files that it depends on.
    pub fn spans(&self) -> impl Iterator<Item = Span> + '_ {
        let itself = Span { file: self.file, offset: self.offset, bytes: self.bytes };
        let whole = self.pieces.is_empty().then_some(itself);
        whole.into_iter().chain(self.pieces.iter().flat_map(|piece| piece.inputs.iter().copied()))
    }

    /// Bytes the type and dimensions imply; `None` where they make no sense.
    pub fn expected_bytes(&self) -> Option<u64> {
        self.dtype.row_bytes(self.dim(0))?.checked_mul(self.rows()?)
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
