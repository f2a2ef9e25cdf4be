//! The product of 1 to 128 rows with repacked weights of any type: 16-bit operands, f32 sums, one arithmetic whatever
//! the number of rows.
//!
//! ```text
//! codes and scales ──► cp.async ──► ring of STAGES steps ──► 16 bits, in the layout of a left operand ─┐
//! rows of activations ──► shared memory, ahead ──► right operand ─────────────────────────────────────┴─► mma or wgmma
//! ```
//!
//! Weights are the left operand (C^T = W X^T): 16 of their rows fill an `mma`, and one row of activations costs as much
//! as eight. So a weight is decoded once for up to 128 rows. [`warps`] is the kernel of few rows, and of GPUs without
//! `wgmma`; [`warpgroups`] that of more.
//!
//! **The arithmetic.** Weights are decoded to f16 and activations arrive in it, where none can be too large for that
//! (after a norm, after attention) and codes have an f16 scale; else both are bf16. f16 rounds eight times finer, and a
//! step takes a quarter fewer instructions. K is cut in slices, whose number follows from the matrix alone
//! ([`slices`](shape::slices)). A slice is one chain of products of 16 values into f32 accumulators, from zero, in the
//! order of K; the slices' sums are added in order. Nothing of this depends on the number of rows or on the tile, and
//! columns of a product do not mix, so a row has the same bits alone and in any batch.
//!
//! **Everything in flight is in shared memory**, codes too, which a lane copies and its warp reads back: a wait for a
//! group of copies is exact, while loads to registers share the few scoreboards of a warp, so that each wait is for the
//! newest of them (measured: a fifth of the memory's speed).
//!
//! **The order of K** is that of the file, so that activations need no other one. Each 16 of it are one product. The
//! order within them changes no bit on Hopper; elsewhere all rows have the same kernel. So warps give a lane a word of
//! codes as it lies, with the activations that belong to it; a warpgroup's lane picks its values out of the codes,
//! because `wgmma` reads activations in their order ([`decode`]).
//!
//! **Slices.** Those of a matrix with few rows are shared out among the warps of a block and the blocks of a cluster,
//! so that every SM has weights to read. Their sums meet in shared memory, over DSMEM where there is a cluster.
//!
//! Rows past the end of the batch are zeros, and their results are dropped. Steps past the end of K multiply zeros by
//! the last weights of the row.

pub mod decode;
pub mod shape;
mod sums;
mod tile;
mod views;
pub mod warpgroups;
pub mod warps;

pub use shape::{Gemm, Shape};
pub use views::{GemmRowsArguments, GemmWeightsArguments};
