//! Adapters (LoRA): what was trained beside a model, as pairs of small matrices that are added to its products,
//! `y = W x + s B (A x)`.
//!
//! There are two forms: a GGUF file as llama.cpp writes it, and a folder as PEFT saves it. Either becomes an
//! [`Adapter`]: pairs under the names of the model's own tensors, over tensors that lie in a file or are made of its
//! bytes. [`read`] knows no model; [`Stored::of_model`] finds what the pairs belong to, [`declare`] gives them to the
//! forward pass of a text model or of a tower, and [`check`] sees that they are in it.
//!
//! [`Seating`] makes one ready for a plan's seats, which adapters come to and leave while the plan runs.
//!
//! An adapter is applied whole or refused by the name of its first tensor that cannot be: nothing of it is passed over.
//! Files are not trusted; what is read of one is bounded by its bytes.
//!
//! What it does not do: adapters of tables (embeddings, a head that is one with them), and what a pair of matrices
//! cannot say (DoRA, whole tensors, biases). These are refused.

mod apply;
mod config;
mod error;
mod gguf;
mod merge;
mod pad;
mod part;
mod pattern;
mod peft;
mod seat;
mod shape;
mod summary;
mod types;

use std::path::Path;

use crate::gemma4::Config;
use crate::gguf::Gguf;

pub use apply::{Model, check, declare};
pub use error::{AdapterError, Fault};
pub use merge::merge;
pub use part::Part;
pub use peft::files;
pub use seat::{OpenAdapter, Seating, is_reserved, reserve};
pub use summary::Summary;
pub use types::{Adapter, Half, Pair};

use gguf::FromGguf;
use peft::{FromPeft, is_peft};

/// An adapter as it is stored, before it is known which model it is for.
pub enum Stored {
    Gguf(Box<FromGguf>),
    Peft(Box<FromPeft>),
}

/// Whether what is at a path is an adapter: a folder of PEFT or one of its files, a GGUF file that says so.
/// One that cannot be opened is none.
pub fn is_adapter(path: &Path) -> bool {
    let says_so = |file: Gguf| file.metadata().str("general.type").is_ok_and(|kind| kind == "adapter");
    peft::is_there(path) || path.is_file() && Gguf::open(path).is_ok_and(says_so)
}

/// Reads what is at a path: a GGUF file, a folder of PEFT, or one of its two files.
pub fn read(path: &Path) -> Result<Stored, AdapterError> {
    Ok(match is_peft(path) {
        true => Stored::Peft(Box::new(FromPeft::read(path)?)),
        false => Stored::Gguf(Box::new(FromGguf::read(path)?)),
    })
}

impl Stored {
    /// The pairs under the names of the tensors of a model with these parts. Whether they fit is checked when they are
    /// declared.
    pub fn of_model(self, config: &Config, parts: &[Part]) -> Result<Adapter, AdapterError> {
        let adapter = match self {
            Stored::Gguf(stored) => stored.adapter(),
            Stored::Peft(stored) => stored.adapter(Some(config))?,
        };
        adapter.check_parts(parts)?;
        Ok(adapter)
    }

    pub fn summary(&self) -> Summary {
        match self {
            Stored::Gguf(stored) => stored.summary(),
            Stored::Peft(stored) => stored.summary(),
        }
    }
}
