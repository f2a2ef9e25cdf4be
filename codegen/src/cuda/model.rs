//! What is lowered, and what the caller decides: the text's graph with its towers and its drafter, and the options.

use gemma4c_graph::{Graph, NodeId, Weight, WeightId};
use gemma4c_plan::Program;
use gemma4c_plan::cuda::KvType;

use super::error::LowerError;
use crate::target::Target;

/// What the caller decides.
#[derive(Clone, Debug)]
pub struct Options {
    pub context: u32,
    /// Most prompt tokens of one pass.
    pub chunk: u32,
    pub kv: KvType,
    /// Sequences at once.
    pub sequences: u32,
    /// Rows of one sequence that are decoded at once, to verify drafts: 1 for none.
    pub verified: u32,
    /// Rings beyond those of the sequences, for snapshots; `None`: as many as are of use.
    pub snapshots: Option<u32>,
    /// The GPU that launches are shaped for.
    pub target: Target,
    /// Bytes of device memory a plan may take; `None`: as many as it needs.
    pub vram: Option<u64>,
    /// Passes that do not run: of [`crate::passes::optional`].
    pub disabled: Vec<String>,
}

/// What is lowered.
#[derive(Clone, Copy)]
pub struct Model<'a> {
    /// The text's graph.
    pub graph: &'a Graph,
    /// Its program for a CPU, whose values the steps refer to.
    pub meaning: &'a Program,
    /// The weights of the plan: the text's, the towers', the drafter's.
    pub weights: &'a [Weight],
    /// The towers, whose soft tokens take the places of embeddings.
    pub soft: SoftTokens<'a>,
    pub drafter: Option<Drafter<'a>>,
}

/// Reads a small tensor of floats from the model file.
pub type ReadFloats<'a> = dyn Fn(WeightId) -> Result<Vec<f32>, LowerError> + 'a;

/// A drafter that is to be lowered.
#[derive(Clone, Copy)]
pub struct Drafter<'a> {
    /// Its weights are those of the plan.
    pub graph: &'a Graph,
    /// Its program for a CPU, whose values the steps refer to.
    pub meaning: &'a Program,
    /// What the next step's hidden state is.
    pub hidden: NodeId,
    /// The tokens in groups, where only some are scored.
    pub token_order: &'a [u32],
}

/// A tower of a model, next to the text.
#[derive(Clone, Copy)]
pub struct TowerGraph<'a> {
    /// Its weights are those of the plan.
    pub graph: &'a Graph,
    /// Its program for a CPU, whose values the steps refer to.
    pub meaning: &'a Program,
    /// Numbers of a patch.
    pub patch_width: u32,
    pub medium: TowerMedium,
}

/// What a tower reads, as far as its phases depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TowerMedium {
    /// Patches along the square of a soft token.
    Picture { pool: u32 },
    /// Frames of a soft token.
    Sound { frames: u32 },
}

impl TowerMedium {
    /// The first word of its phases' names.
    pub fn name(self) -> &'static str {
        match self {
            TowerMedium::Picture { .. } => "tower",
            TowerMedium::Sound { .. } => "sound",
        }
    }
}

/// What soft tokens need of a text's phases.
#[derive(Clone, Copy)]
pub struct SoftTokens<'a> {
    pub towers: &'a [TowerGraph<'a>],
    /// The token that stands where a soft token is.
    pub pad: u32,
}

impl SoftTokens<'_> {
    /// Of a model that reads text alone.
    pub const NONE: SoftTokens<'static> = SoftTokens { towers: &[], pad: 0 };
}
