//! The operations of a forward pass, declared once: names, inputs and attributes ([`Op`]), what a value is ([`Type`]),
//! and the shape rules ([`infer`]).
//!
//! The compiler's graph and the plan's programs are made of them, so that a graph's node is a plan's step without a
//! translation. What an operation computes is not here: that is the CPU executor's, one arm for each. Nor does this
//! crate know what reads the weights.

mod ids;
mod infer;
mod op;
mod types;

pub use ids::{CacheId, WeightId};
pub use infer::{Declared, Tensor, TypeError, infer};
pub use op::{Attribute, Op};
pub use types::{Cache, Elem, RowCount, Type};
