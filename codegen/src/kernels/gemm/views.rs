//! What the kernels of a product take: the tile of a block, weights, rows of activations, and a warp's part of the
//! rings.

use gemma4c_dsl::prelude::*;

/// How a block makes its tile: 16 ACROSS rows of the matrix by ROWS rows of activations. HELD of the SLICES are in a
/// block, each of ACROSS warps; the others are in the other blocks of the cluster. Codes have UNIT values in 16 bytes;
/// K is WHOLE steps of 128.
#[config]
pub struct GemmTile {
    pub UNIT: u32,
    /// Operands are bf16, else f16.
    pub BF: bool,
    /// A lane picks its values out of the codes.
    pub RAW: bool,
    /// Rows have an f16 scale for each 32 values and nothing else beside their codes.
    pub SCALED: bool,
    pub WHOLE: bool,
    pub ROWS: u32,
    pub ACROSS: u32,
    pub SLICES: u32,
    pub HELD: u32,
    pub STAGES: u32,
    /// Steps of activations in shared memory: by warpgroups, of their ring; by warps, of each of X_PARTS parts.
    pub X_STAGES: u32,
    /// Parts of the activations in shared memory, by warps: one that holds all of a slice, or two that take turns.
    pub X_PARTS: u32,
    /// A lane has four neighbouring values of each product: those that a tensor core wants from lane q are
    /// `2 q`, `2 q + 1`, `2 q + 8` and `2 q + 9`, but the order within the 16 changes no bit of a sum.
    pub NEAR: bool,
    /// Blocks that share an SM, at least.
    pub RESIDENT: u32,
    /// Rows are pairs of a row and an expert, sorted by expert, of which so many neighbouring ones share a row of x. 0:
    /// they are rows.
    pub PAIRS: u32,
}

/// Repacked weights, as far as they are copied: scales in words of two, where rows are SCALED.
#[view]
pub struct GemmWeights {
    pub codes: Weights<u32>,
    pub scales: Weights<u32>,
}

/// The rows of activations: of a batch, or pairs of a row and an expert, sorted by expert and cut in groups.
#[view]
pub struct GemmRows<H: Float> {
    pub x: Input<H>,
    pub groups: Input<U32x4>,
    pub order: Input<u32>,
    /// Rows of a batch.
    pub count: u32,
}

/// A warp's part of the ring of weights: a step's codes and scales.
#[view]
pub struct GemmRing {
    pub codes: Shared<u32>,
    pub scales: Shared<u32>,
}
