//! The drafter ("assistant") that comes beside a text model: a few layers that guess the model's next tokens.
//!
//! It has no keys and values of its own. Its layers read those of the model's last layers that own some, sliding or
//! global, up to the token that is about to be run. One step takes that token and a hidden state, and gives logits and
//! the next step's hidden state; the first step's is what the model's LM head read. All steps of a round look from the
//! same position.

mod config;
mod error;
mod forward;
mod weights;

use gemma4c_graph::{Builder, Graph, NodeId, WeightId};

pub use config::{Centroids, DrafterConfig};
pub use error::DrafterError;

use super::config::{Config, ConfigError};
use crate::gguf::{Gguf, Header};
use error::ORDERING;

/// A drafter as a graph over one row a sequence, whose output is logits.
#[derive(Debug)]
pub struct DrafterGraph {
    pub graph: Graph,
    /// The table of embeddings, which is the model's and not the drafter's, and its name in the model's file.
    pub borrowed: (WeightId, &'static str),
    /// What the next step's hidden state is.
    pub hidden: NodeId,
}

/// The drafter in `file` for the model in `target_file`.
pub fn drafter(
    file: &Header,
    config: &DrafterConfig,
    target_file: &Header,
    target: &Config,
) -> Result<DrafterGraph, DrafterError> {
    let mut g = Builder::new();
    let weights = weights::declare(file, config, target_file, target, &mut g)?;
    let hidden = forward::forward(&mut g, config, target, &weights);
    let borrowed = (weights.embedding, weights::TABLE);
    Ok(DrafterGraph { graph: g.finish()?, borrowed, hidden })
}

/// Every token once, in the groups that the drafter's centroids stand for; none where it scores all tokens.
pub fn token_order(file: &Gguf, config: &DrafterConfig) -> Result<Vec<u32>, DrafterError> {
    if config.centroids.is_none() {
        return Ok(Vec::new());
    }
    let wrong = |why: String| DrafterError::Ordering { why };
    let stored = file.integers(ORDERING).map_err(ConfigError::from)?;
    let vocab_size = config.body.vocab_size as usize;
    if stored.len() != vocab_size {
        return Err(wrong(format!("has {} values, expected {vocab_size}, one for each token", stored.len())));
    }
    let mut seen = vec![false; vocab_size];
    let mut token = |stored: i32| {
        let id = u32::try_from(stored).ok().filter(|id| (*id as usize) < vocab_size);
        let id = id.ok_or_else(|| wrong(format!("has {stored}, expected tokens from 0 to {}", vocab_size - 1)))?;
        match std::mem::replace(&mut seen[id as usize], true) {
            false => Ok(id),
            true => Err(wrong(format!("has token {id} twice"))),
        }
    };
    stored.into_iter().map(&mut token).collect()
}
