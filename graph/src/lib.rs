//! A model's forward pass as a dataflow graph.
//!
//! ```text
//! Builder ──► Graph ──► verify ──► text, dot, lowering (in codegen)
//! ```
//!
//! The graph is plain data: weights, KV caches and nodes, each named by a newtype id and kept in a vector, so that
//! every walk over it has one order. It knows shapes, not numbers: no weight is read here, no arithmetic is done, and
//! nothing in this crate knows which model it describes.

mod builder;
mod dataflow;
mod dot;
mod fused;
mod fused_text;
mod graph;
mod kinds;
pub mod memory;
pub mod passes;
mod text;
mod verify;
mod verify_groups;

pub use builder::{Builder, Delta, Mark, Part, Value};
pub use dot::to_dot;
pub use fused::Fused;
pub use fused_text::fused_text;
pub use gemma4c_ops::{Cache, CacheId, Elem, Op, RowCount, Type, TypeError, WeightId, infer};
pub use graph::{Graph, Node, NodeId, Weight};
pub use kinds::{
    Branch, Clip, ClippedGeglu, ClippedNorm, DenseHalf, Epilogue, Form, Group, Heads, KeyValueHeads, Kind, Norm, Pair,
    PatchHeads, PerLayerInputs, Product, QueryHeads, Residual, Router,
};
pub use text::{layer_ranges, to_text};
pub use verify::{VerifyError, verify};
pub use verify_groups::{GroupError, verify_groups};
