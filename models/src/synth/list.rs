//! The tensors of a projector file, one after another as towers name them.

use gemma4c_blocks::DType;

use super::inventory::{Fill, Massive, TensorSpec};

pub(super) struct List {
    pub tensors: Vec<TensorSpec>,
    dtype: DType,
}

impl List {
    /// With matrices as `dtype` where their rows allow it.
    pub fn new(dtype: DType) -> List {
        List { tensors: Vec::new(), dtype }
    }

    pub fn push(&mut self, name: &str, dims: &[u32], dtype: DType, fill: Fill) {
        let dims = dims.iter().map(|&dim| dim.into()).collect();
        let (name, random, massive) = (name.to_owned(), name.to_owned(), Massive::Untouched);
        self.tensors.push(TensorSpec { name, dims, dtype, fill, random, massive });
    }

    pub fn vector(&mut self, name: &str, len: u32, low: f32, high: f32) {
        self.push(name, &[len], DType::F32, Fill::Between { low, high });
    }

    /// A matrix that keeps the size of what it is applied to. Rows that are no whole blocks are not quantised.
    pub fn matrix(&mut self, name: &str, inputs: u32, outputs: u32) {
        let dtype = if self.dtype.row_bytes(inputs.into()).is_some() { self.dtype } else { DType::BF16 };
        let fill = Fill::Symmetric { rms: 1.0 / (inputs as f32).sqrt() };
        self.push(name, &[inputs, outputs], dtype, fill);
    }

    /// A matrix, and the bounds of what it reads and leaves where it has some.
    pub fn clipped(&mut self, name: &str, inputs: u32, outputs: u32, has_bounds: bool) {
        self.matrix(&format!("{name}.weight"), inputs, outputs);
        for (bound, low) in [("min", -6.0), ("max", 5.0)] {
            for side in ["input", "output"].into_iter().filter(|_| has_bounds) {
                self.vector(&format!("{name}.{side}_{bound}"), 1, low, low + 1.0);
            }
        }
    }
}
