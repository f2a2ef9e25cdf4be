//! Lowers a graph to a GPU's program: fused, phase by phase, with a kernel for every group and a place for every byte.
//!
//! ```text
//! Graph ──► passes ──► schedule of a phase (decode; prefill by rows) ──► launches ──► places ──► CudaProgram + instances
//! ```
//!
//! - [`crate::passes`] decides what a launch is, and the form of every value;
//! - `model` is what comes in, `lower` the way from it to a program, `common` what all phases share;
//! - `phase` walks the groups, one launch each, and places the values;
//! - `products`, `norms`, `attention`, `experts`, `grouped`, `singles` know which kernel a group gets and what it is
//!   given;
//! - `weights` places weights in the layouts those kernels read, `launch` puts the arguments of a launch in order;
//! - `build` compiles the instances.
//!
//! The choice of a kernel is a function of the group, the rows, the types, the options, and rules whose constants were
//! measured ([`crate::measured`]). `choice` puts it into words: a reason and a runner-up for every step. Nothing here
//! needs a GPU.

mod adapter;
mod attention;
mod bounds;
pub mod build;
#[doc(hidden)]
pub mod choice;
mod clipped;
mod common;
mod drafter;
mod edges;
mod error;
mod experts;
mod gathered;
mod gemm;
mod grouped;
pub mod image;
#[doc(hidden)]
pub mod launch;
mod lower;
mod memory;
mod model;
mod norms;
mod per_layer;
mod phase;
mod products;
mod records;
mod reports;
mod rows;
pub mod simulate;
mod singles;
mod soft;
mod towers;
mod weights;

pub use error::LowerError;
pub use lower::{Lowered, lower};
pub use model::{Drafter, Model, Options, ReadFloats, SoftTokens, TowerGraph, TowerMedium};
