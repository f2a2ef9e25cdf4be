//! What the kernels of a product take: the tile of a block, weights, rows of activations, and a warp's part of the
//! rings.

use gemma4c_dsl::prelude::*;

/// How a block makes its tile: 16 TILES ACROSS rows of the matrix by ROWS rows of activations. HELD of the SLICES are
/// in a block, each of ACROSS warps; the others are in the other blocks of the cluster. Codes have UNIT values in 16
/// bytes; K is WHOLE steps of 128; a SCALED row has an f16 scale for each 32 values and nothing else beside its codes.
#[config]
pub struct GemmTile {
    pub UNIT: u32,
    pub SCALED: bool,
    pub WHOLE: bool,
    pub ROWS: u32,
    pub TILES: u32,
    pub ACROSS: u32,
    pub SLICES: u32,
    pub HELD: u32,
    pub STAGES: u32,
    /// Blocks that share an SM, at least.
    pub RESIDENT: u32,
}

/// Repacked weights, as far as they are copied: scales in words of two, where rows are SCALED.
#[view]
pub struct GemmWeights {
    pub codes: Weights<U32x4>,
    pub scales: Weights<u32>,
}

/// The rows of activations: of a batch, or pairs of a row and an expert, sorted by expert and cut in groups.
#[view]
pub struct GemmRows {
    pub x: Input<BF16>,
    pub groups: Input<U32x4>,
    pub order: Input<u32>,
    /// Rows of a batch.
    pub count: u32,
}

/// A warp's part of the rings: activations of its slice, codes and scales of its own.
#[view]
pub struct GemmRing {
    pub x: Shared<BF16>,
    pub codes: Shared<U32x4>,
    pub scales: Shared<u32>,
}
