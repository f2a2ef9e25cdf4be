//! What the stages of a router share: its compile-time shape, and the memory that it reads and writes. The kernel is
//! [`route`](super::router::route).

use gemma4c_dsl::prelude::*;

use crate::kernels::matvec::parts::{chunk_slots, inverse_rms_of_chunks};
use crate::kernels::outputs::OutputRows;

/// What the model says.
#[config]
pub struct RouterShape {
    /// Values of a row.
    pub WIDTH: u32,
    pub EXPERTS: u32,
    /// Experts that a row goes to.
    pub TOP: u32,
    /// What all of a row is multiplied by, besides its norm.
    pub FACTOR: f32,
    /// Of all norms.
    pub EPSILON: f32,
}

/// What a block and its warps take at once.
#[config]
pub struct RouterTile {
    pub WARPS: u32,
    /// Rows of a block, of which NORMED_ROWS are normed at once, with PIECES float4 vectors of each to a thread.
    pub ROWS: u32,
    pub NORMED_ROWS: u32,
    pub PIECES: u32,
    /// Experts that a warp multiplies at once, with DEPTH float4 vectors of each to a lane in flight.
    pub WARP_EXPERTS: u32,
    pub DEPTH: u32,
}

/// How blocks share the experts of the same rows.
#[config]
pub struct RouterSplit {
    /// Several blocks do.
    pub SPLIT: bool,
    /// They are a cluster of so many; 1 where they are none.
    pub CLUSTER_SIZE: u32,
}

/// The weights of the norms around a router.
#[view]
pub struct RouterNorms {
    /// Of what the router multiplies.
    pub scale: Weights<f32>,
    /// Of attention's output, before it is added to the residual.
    pub post: Weights<f32>,
    /// Of the inputs of the dense half and of the experts.
    pub dense: Weights<f32>,
    pub expert: Weights<f32>,
}

/// The rows that come in.
#[view]
pub struct RouterRows {
    pub x: Input<f32>,
    /// Attention's output.
    pub update: Input<f32>,
    /// The record of the phase: its second word is the number of rows in use.
    pub state: Input<u32>,
}

/// What is chosen for each row, and how.
#[view]
pub struct Routing {
    pub logits: InOut<f32>,
    /// How many blocks have ended, for each tile of rows.
    pub counter: InOut<u32>,
    /// TOP for each row, the largest logit first.
    pub ids: Output<u32>,
    /// How much a row takes of what each of its experts makes.
    pub shares: Output<f32>,
}

/// What a router that begins a mixture writes for it.
#[view]
pub struct MixtureInputs {
    pub residual: Output<f32>,
    pub dense: OutputRows,
    pub expert: OutputRows,
}

/// The shared memory of a router's block.
#[view]
pub struct RouterShared {
    /// The rows times `scale`. Their norm's factor is the same for a whole row, so the logits take it.
    pub weighted_rows: Shared<f32>,
    /// The rows themselves, where [`writes_late`]: each thread keeps its own.
    pub kept_rows: Shared<f32>,
    /// Sums of squares, one for each chunk of 128 values: of the updates, and of the rows after them.
    pub update_squares: Shared<f32>,
    pub row_squares: Shared<f32>,
    /// The block's logits; where it chooses, those of all experts, with their order and the largest.
    pub logits: Shared<f32>,
    pub keys: Shared<u32>,
    pub best: Shared<f32>,
}

/// The rows of a block.
#[registers]
pub struct BlockRows {
    pub first: u32,
    /// Behind the last.
    pub end: u32,
}

/// The mixture's inputs are written while the first block of a cluster chooses: possible where all rows are normed at
/// once, so that a thread has a place for each of its values.
#[device]
pub fn writes_late<const T: RouterTile, const B: RouterSplit>() -> bool {
    B.CLUSTER_SIZE > 1 && T.NORMED_ROWS == T.ROWS
}

/// The first of a warp's experts.
#[device]
pub fn first_expert_of_warp<const T: RouterTile>() -> u32 {
    (block_idx_y() * T.WARPS + warp_id()) * T.WARP_EXPERTS
}

/// `1 / rms` of a row, from the sums of squares of all rows of the block.
#[device]
pub fn inverse_rms_of_row<const S: RouterShape>(squares: Shared<f32>, row: u32) -> f32 {
    inverse_rms_of_chunks(squares.offset(row * chunk_slots(S.WIDTH)), S.WIDTH)
}
