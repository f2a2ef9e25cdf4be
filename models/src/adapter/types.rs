//! An adapter whose pairs are known by the names of a model's tensors.

use std::path::PathBuf;

use super::part::Part;
use crate::gguf::{Gguf, TensorInfo};

/// One pair of an adapter.
#[derive(Clone, Debug, PartialEq)]
pub struct Pair {
    /// The model's tensor, by its name in a GGUF file.
    pub target: String,
    /// Its tensors in the adapter's file: names in [`Adapter::file`], and what the file itself calls them.
    pub a: Half,
    pub b: Half,
    /// What the product is multiplied by, as the file says it.
    pub factor: f32,
}

/// One of a pair.
#[derive(Clone, Debug, PartialEq)]
pub struct Half {
    pub tensor: String,
    pub called: String,
}

/// An adapter for a model.
pub struct Adapter {
    /// As it was given.
    pub path: PathBuf,
    /// Where its tensors are.
    pub file: Gguf,
    pub pairs: Vec<Pair>,
}

impl Adapter {
    /// The same with the names of its tensors told apart from those of the adapters before it, which are `number`.
    pub fn numbered(self, number: usize) -> Adapter {
        if number == 0 {
            return self;
        }
        let Adapter { path, file, mut pairs } = self;
        let mut tensors = Vec::new();
        for half in pairs.iter_mut().flat_map(|pair| [&mut pair.a, &mut pair.b]) {
            let name = format!("{}.{}", half.tensor, number + 1);
            tensors.extend(file.tensor(&half.tensor).map(|tensor| tensor.renamed(&name)));
            half.tensor = name;
        }
        Adapter { path, file: file.with_tensors(tensors), pairs }
    }

    /// The pairs that change a part of the model.
    pub fn pairs_of(&self, part: Part) -> impl Iterator<Item = &Pair> {
        self.pairs.iter().filter(move |pair| Part::of(&pair.target) == part)
    }

    /// Their tensors in the order in which [`declare`](super::declare) declares them.
    pub fn tensors_of(&self, part: Part) -> impl Iterator<Item = &TensorInfo> {
        let halves = self.pairs_of(part).flat_map(|pair| [&pair.a, &pair.b]);
        halves.filter_map(|half| self.file.tensor(&half.tensor))
    }
}
