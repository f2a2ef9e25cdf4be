//! What all phases of a plan share while they are lowered: weights, kernels, the fixed places, and what the target can
//! do.

use std::collections::HashMap;

use gemma4c_graph::CacheId;
use gemma4c_plan::cuda::{DrafterPlaces, KvLayout, Places, Range, Region, TowerPlaces};
use gemma4c_plan::{Program, ValueIndex};

use super::error::LowerError;
use super::launch::{Kernels, Span};
use super::model::ReadFloats;
use super::weights::Weights;
use crate::passes::Abilities;

/// Words of [`Common::counters`] for each decoded row.
pub const COUNTERS: u64 = 1024;
/// Tokens that the device remembers for the host.
pub const HISTORY: u32 = 1024;
/// Capacity of the list of tokens that the device never picks: those of other media, and a few that a model's authors
/// may add.
pub const SUPPRESSED: u32 = 16;
// A pick's block holds them, a thread each, and has 64 threads at least.
const _: () = assert!(SUPPRESSED <= 64);
/// Every fixed place starts at a multiple of this.
pub const ALIGNMENT: u64 = 256;

/// What all phases share.
pub struct Common<'a> {
    pub weights: Weights<'a>,
    pub kernels: Kernels,
    pub places: Places,
    /// Rows of the largest decode phase.
    pub decode_rows: u32,
    /// Words that are zero between launches: their place, and their bytes.
    pub counters: (u64, u64),
    /// Words that blocks of one launch send each other: those that nobody has yet, and the first byte behind them.
    pub packets: (u64, u64),
    /// What the kernels can do, and are asked for.
    pub can: Abilities,
    /// Where keys and values are.
    pub kv_layout: KvLayout,
    pub value_index: HashMap<String, ValueIndex>,
    /// Of the tower that is being lowered.
    pub tower: Option<TowerPlaces>,
    pub read: &'a ReadFloats<'a>,
    /// What host and drafter exchange, if there is one.
    pub drafter: Option<DrafterPlaces>,
    /// Of the drafter, while it is lowered.
    pub drafting: Option<Drafting>,
}

/// What the groups of a drafter are lowered with.
pub struct Drafting {
    /// Which of the text's caches its own are.
    pub caches: Vec<CacheId>,
    /// The tokens in groups, on the device.
    pub order: Span,
}

impl Common<'_> {
    /// So many words for a launch whose blocks send them to each other.
    pub fn packets(&mut self, words: u32) -> Result<Span, LowerError> {
        let (offset, bytes) = (self.packets.0, words as u64 * 4);
        self.packets.0 += bytes;
        match self.packets.0 <= self.packets.1 {
            true => Ok(Span::Fixed(Range { region: Region::Arena, offset, bytes })),
            false => Err(LowerError::NoValue { node: "words between the blocks of a launch".into() }),
        }
    }

    pub fn counters(&self) -> Span {
        let (offset, bytes) = self.counters;
        Span::Fixed(Range { region: Region::Arena, offset, bytes })
    }
}

/// The values of a program by their names.
pub fn index_of_values(meaning: &Program) -> HashMap<String, ValueIndex> {
    meaning.values.iter().zip(0..).map(|(value, index)| (value.name.clone(), index)).collect()
}
